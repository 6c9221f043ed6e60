"""How much of a model's training state may leave the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offload:
    """What leaves the device.

    host_states, host_parameters: shares of all elements, 0 to 1, whose master weights and optimizer states, whose
    parameters, are in host memory; honoured to within one chunk. sharded_parameters: share that is split over dp where
    the placement splits parameters. accumulates: gradients of several backward passes add up before a step; else they
    take the place of the parameters, where masters lie elsewhere.
    """

    host_states: float = 0.0
    host_parameters: float = 0.0
    sharded_parameters: float = 1.0
    accumulates: bool = False
