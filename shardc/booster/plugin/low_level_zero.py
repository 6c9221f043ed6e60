"""ZeRO 1 and 2: data parallelism whose optimizer states, and gradients, are split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardc.booster.plugin import arguments as a
from shardc.booster.plugin.arguments import argument, scaler_of
from shardc.booster.plugin.base import Plugin
from shardc.booster.plugin.recipe import Recipe
from shardc.runtime.offload import Offload

OVERLAPS = "gradients are reduced beside computation"
NEXT_GATHERED = "parameters are gathered beside computation"
ONE_GROUP = "states are split over all data-parallel ranks"
OF_STATES = Offload(host_states=1.0, accumulates=True)  # cpu_offload: gradients add up over calls, as without it


@dataclass(frozen=True, eq=False, repr=False)
class LowLevelZeroPlugin(Plugin):
    """ZeRO stage 1 splits optimizer states and master weights over the ranks, stage 2 gradients as well.

    initial_scale to max_scale: the loss scale of fp16, see ScalerSettings. max_norm: gradients are clipped to this L2
    norm, 0 clips nothing. reduce_bucket_size_in_m: largest chunk that is reduced at once, in 2**20 elements.
    cpu_offload: master weights and optimizer states are in host memory, where a thread updates them.
    communication_dtype: gradients are reduced in it, None in their own. cast_inputs: floating inputs to `precision`.
    """

    stage: int = argument(1, a.one_of(1, 2))
    precision: str = argument("fp16", a.PRECISION)
    initial_scale: float = argument(2**32, a.POSITIVE)
    min_scale: float = argument(1, a.POSITIVE)
    growth_factor: float = argument(2, a.GROWTH)
    backoff_factor: float = argument(0.5, a.BACKOFF)
    growth_interval: int = argument(1000, a.COUNT)
    hysteresis: int = argument(2, a.COUNT)
    max_scale: float = argument(2**32, a.POSITIVE)
    max_norm: float = argument(0.0, a.NOT_NEGATIVE)
    norm_type: float = argument(2.0, a.L2_NORM)
    reduce_bucket_size_in_m: float = argument(12, a.POSITIVE)
    communication_dtype: torch.dtype | None = argument(None, a.FLOATING)
    overlap_communication: bool = argument(True, a.FLAG, unused=OVERLAPS)
    overlap_allgather: bool = argument(False, a.FLAG, unused=NEXT_GATHERED)
    cpu_offload: bool = argument(False, a.FLAG)
    master_weights: bool = argument(True, a.FLAG)
    verbose: bool = argument(False, a.FLAG, unused=a.NOT_VERBOSE)
    cast_inputs: bool = argument(True, a.FLAG)
    fp8_communication: bool = argument(False, a.FLAG, unused=a.NO_FP8_SENT)
    use_fp8: bool = argument(False, a.FLAG, unused=a.NO_FP8)
    extra_dp_size: int = argument(1, a.COUNT, unused=ONE_GROUP)

    def _recipe(self) -> Recipe:
        return Recipe(
            placement=f"zero{self.stage}",
            precision=self.precision,
            master_weights=bool(self.master_weights),
            max_norm=float(self.max_norm),
            scaler=scaler_of(self),
            communication_dtype=self.communication_dtype,
            bucket_elements=int(self.reduce_bucket_size_in_m * 2**20),
            cast_inputs=bool(self.cast_inputs),
            offload=OF_STATES if self.cpu_offload else None,
        )
