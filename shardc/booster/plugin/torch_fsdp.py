"""Fully sharded data parallelism by torch itself, its second version (fully_shard)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardc.booster.plugin import arguments as a
from shardc.booster.plugin.arguments import Valid, argument
from shardc.booster.plugin.base import Plugin
from shardc.booster.plugin.low_level_zero import ONE_GROUP
from shardc.booster.plugin.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

PRECISION_OF = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", None: None}
# strategy -> (placement, parameters are freed between forward and backward); the hybrid ones replicate over hosts
STRATEGIES = {
    None: ("fsdp", True),
    "FULL_SHARD": ("fsdp", True),
    "SHARD_GRAD_OP": ("fsdp", False),
    "NO_SHARD": ("ddp", True),
    "HYBRID_SHARD": ("fsdp", True),
    "_HYBRID_SHARD_ZERO2": ("fsdp", False),
}
# torch.distributed.fsdp takes long to import, so its classes are told by their attributes.
STRATEGY = a.optional(
    Valid(
        "a torch.distributed.fsdp.ShardingStrategy: " + ", ".join(name for name in STRATEGIES if name),
        lambda value: getattr(value, "name", None) in STRATEGIES and hasattr(value, "name"),
    )
)
OFFLOAD = a.optional(
    Valid("a torch.distributed.fsdp.CPUOffload", lambda value: isinstance(getattr(value, "offload_params", None), bool))
)
MIXED_PRECISION = a.optional(
    Valid(
        "a torch.distributed.fsdp.MixedPrecision whose param_dtype and reduce_dtype are float32, bfloat16 or float16",
        lambda value: (
            getattr(value, "param_dtype", "") in PRECISION_OF and getattr(value, "reduce_dtype", "") in PRECISION_OF
        ),
    )
)


@dataclass(frozen=True, eq=False, repr=False)
class TorchFSDPPlugin(Plugin):
    """torch's fully_shard, applied to each block of the model and to the model.

    sharding_strategy: SHARD_GRAD_OP keeps parameters gathered from forward to backward, NO_SHARD splits nothing.
    mixed_precision: param_dtype is the precision, reduce_dtype that of the gradients' reduction; without it, precision
    is Booster's mixed_precision, or the model's own dtype.
    """

    process_group: Any = argument(None, a.ANYTHING, unused="parameters are split over the ranks of dp")
    sharding_strategy: ShardingStrategy | None = argument(None, STRATEGY)
    cpu_offload: CPUOffload | None = argument(None, OFFLOAD)
    auto_wrap_policy: Callable | None = argument(None, a.ANYTHING, unused="each block of the model is a unit")
    backward_prefetch: BackwardPrefetch | None = argument(None, a.ANYTHING, unused="the next block is always fetched")
    mixed_precision: MixedPrecision | None = argument(None, MIXED_PRECISION)
    ignored_modules: Iterable[nn.Module] | None = argument(None, a.ANYTHING, unused="all parameters are split")
    param_init_fn: Callable | None = argument(None, a.ANYTHING, unused="weights are those of the model given to boost")
    sync_module_states: bool = argument(False, a.FLAG, unused="weights are those of the model given to boost")
    fp8_communication: bool = argument(False, a.FLAG, unused=a.NO_FP8_SENT)

    def _recipe(self) -> Recipe:
        placement, reshard = STRATEGIES[self._strategy()]
        mixed = self.mixed_precision
        return Recipe(
            placement=placement,
            reshard_after_forward=reshard,
            precision=None if mixed is None else PRECISION_OF[mixed.param_dtype],
            communication_dtype=None if mixed is None else mixed.reduce_dtype,
            cast_inputs=True if mixed is None else bool(mixed.cast_forward_inputs),
        )

    def _without_effect(self) -> dict[str, str]:
        reasons = {}
        if "HYBRID" in (self._strategy() or ""):
            reasons["sharding_strategy"] = ONE_GROUP
        if self.cpu_offload is not None and self.cpu_offload.offload_params:
            reasons["cpu_offload"] = a.NO_OFFLOAD
        if self.mixed_precision is not None and self.mixed_precision.buffer_dtype is not None:
            reasons["mixed_precision"] = "its buffer_dtype is not used: buffers keep the dtype of the model"
        return reasons

    def _strategy(self) -> str | None:
        return None if self.sharding_strategy is None else self.sharding_strategy.name
