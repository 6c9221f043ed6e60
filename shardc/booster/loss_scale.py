"""The dynamic loss scale of fp16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.booster.plugin.recipe import ScalerSettings


class LossScaler:
    """scale: 0-d float32 on the device, changed in place. Every rank updates it alike, from what all agreed on."""

    def __init__(self, settings: ScalerSettings, device: torch.device):
        self.settings = settings
        self.scale = torch.tensor(settings.initial_scale, dtype=torch.float32, device=device)
        self.value = float(settings.initial_scale)  # the same number, to be read without waiting for the device
        self.good_steps = self.overflows = 0

    def update(self, overflowed: bool) -> None:
        """After a step: lower the scale where gradients overflowed, raise it after growth_interval good steps.

        Overflows are counted until the scale grows: the first hysteresis - 1 of them leave it as it is."""
        settings = self.settings
        if overflowed:
            self.good_steps = 0
            self.overflows += 1
            if self.overflows >= settings.hysteresis:
                self._set(max(self.value * settings.backoff_factor, settings.min_scale))
            return
        self.good_steps += 1
        if self.good_steps % settings.growth_interval == 0:
            self.overflows = 0
            self._set(min(self.value * settings.growth_factor, settings.max_scale))

    def inverse(self) -> Tensor:
        """0-d: what gradients are multiplied by to take the scale out."""
        return self.scale.reciprocal()

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.value, "good_steps": self.good_steps, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the saved one."""
        self._set(float(state["scale"]))
        self.good_steps, self.overflows = int(state["good_steps"]), int(state["overflows"])

    def _set(self, value: float) -> None:
        self.value = value
        self.scale.fill_(value)
