"""Gemini: parameters, gradients and states in flat chunks, each split over the data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardc.booster.plugin import arguments as a
from shardc.booster.plugin.arguments import argument, given, scaler_of
from shardc.booster.plugin.base import Plugin
from shardc.booster.plugin.low_level_zero import ONE_GROUP, OVERLAPS
from shardc.booster.plugin.recipe import Recipe
from shardc.runtime.offload import Offload

CHUNKS = "chunks follow the blocks of the model, none larger than min_chunk_size_m"
PREFETCH = "the order of use is known from the compiled model, so the next chunks are gathered in any case"
NO_BUDGET = "memory is shared out by offload_optim_frac and offload_param_frac, not by measuring, for now"
NOT_AUTOMATIC = "placement follows shard_param_frac, offload_optim_frac and offload_param_frac for now"
NOT_PINNED = "no pinned copies are kept"
NOT_TRACED = "the order of use is known from the compiled model"


@dataclass(frozen=True, eq=False, repr=False)
class GeminiPlugin(Plugin):
    """ZeRO stage 3 in flat chunks, with tensor parallelism, and parts of the model in host memory.

    shard_param_frac: share of the parameters that is split over the data-parallel ranks; 0.0 is ZeRO 2.
    offload_optim_frac: share whose master weights and optimizer states are in host memory, where a thread updates them
    beside the next forward. offload_param_frac: share whose parameters are there between their uses. Each is honoured
    to within one chunk. enable_gradient_accumulation: where something is offloaded, False lets gradients take the place
    of the parameters until the step, so that the model is called once a step; True keeps 2 more bytes a parameter.
    strict_ddp_mode: nothing is split or offloaded.
    min_chunk_size_m: the largest chunk, in 2**20 elements. enable_async_reduce: communication runs beside computation.
    initial_scale to max_scale: the loss scale of fp16, see ScalerSettings. max_norm: gradients are clipped to this L2
    norm, 0 clips nothing.
    """

    chunk_config_dict: dict | None = argument(None, a.ANYTHING, unused=CHUNKS)
    chunk_init_device: Any = argument(None, a.ANYTHING, unused="chunks are made on the device that computes")
    placement_policy: str = argument("static", a.one_of("static", "auto"), unused=NOT_AUTOMATIC)
    enable_gradient_accumulation: bool = argument(False, a.FLAG)
    max_prefetch: int = argument(0, a.COUNT_OR_ZERO, unused=PREFETCH)
    shard_param_frac: float = argument(1.0, a.FRACTION)
    offload_optim_frac: float = argument(0.0, a.FRACTION)
    offload_param_frac: float = argument(0.0, a.FRACTION)
    warmup_non_model_data_ratio: float = argument(0.8, a.FRACTION, unused=NO_BUDGET)
    steady_cuda_cap_ratio: float = argument(0.9, a.FRACTION, unused=NO_BUDGET)
    precision: str = argument("fp16", a.PRECISION)
    master_weights: bool = argument(True, a.FLAG)
    pin_memory: bool = argument(False, a.FLAG, unused=NOT_PINNED)
    force_outputs_fp32: bool = argument(False, a.FLAG)
    strict_ddp_mode: bool = argument(False, a.FLAG)
    search_range_m: int = argument(32, a.POSITIVE, unused=CHUNKS)
    hidden_dim: int | None = argument(None, a.optional(a.COUNT), unused=CHUNKS)
    min_chunk_size_m: float = argument(32, a.POSITIVE)
    memstats: Any = argument(None, a.ANYTHING, unused=NOT_TRACED)
    gpu_margin_mem_ratio: float = argument(0.0, a.FRACTION, unused=NO_BUDGET)
    initial_scale: float = argument(2**16, a.POSITIVE)
    min_scale: float = argument(1, a.POSITIVE)
    growth_factor: float = argument(2, a.GROWTH)
    backoff_factor: float = argument(0.5, a.BACKOFF)
    growth_interval: int = argument(1000, a.COUNT)
    hysteresis: int = argument(2, a.COUNT)
    max_scale: float = argument(2**32, a.POSITIVE)
    max_norm: float = argument(0.0, a.NOT_NEGATIVE)
    norm_type: float = argument(2.0, a.L2_NORM)
    tp_size: int = argument(1, a.COUNT)
    extra_dp_size: int = argument(1, a.COUNT, unused=ONE_GROUP)
    enable_all_optimization: bool = argument(False, a.FLAG, unused=a.OWN_CODE)
    enable_fused_normalization: bool = argument(False, a.FLAG, unused=a.OWN_CODE)
    enable_flash_attention: bool = argument(False, a.FLAG, unused=a.ATTENTION)
    enable_sequence_parallelism: bool = argument(False, a.FLAG)
    enable_jit_fused: bool = argument(False, a.FLAG, unused=a.OWN_CODE)
    enable_async_reduce: bool = argument(True, a.FLAG, unused=OVERLAPS)
    use_fp8: bool = argument(False, a.FLAG, unused=a.NO_FP8)
    verbose: bool = argument(False, a.FLAG, unused=a.NOT_VERBOSE)
    fp8_communication: bool = argument(False, a.FLAG, unused=a.NO_FP8_SENT)

    def _recipe(self) -> Recipe:
        # Parameters on the host are brought for each use, as split ones are.
        sharded = "zero2" if self.shard_param_frac == self.offload_param_frac == 0 else "zero3"
        return Recipe(
            tp=int(self.tp_size),
            sequence_parallel=bool(self.enable_sequence_parallelism) and self.tp_size > 1,
            placement="ddp" if self.strict_ddp_mode else sharded,
            precision=self.precision,
            master_weights=bool(self.master_weights),
            max_norm=float(self.max_norm),
            scaler=scaler_of(self),
            bucket_elements=int(self.min_chunk_size_m * 2**20),
            force_outputs_fp32=bool(self.force_outputs_fp32),
            offload=self._offload(),
        )

    def _offload(self) -> Offload | None:
        """None where all is on the device, and split or not as a whole: gradients then accumulate in any case."""
        fractions = (self.offload_optim_frac, self.offload_param_frac)
        if self.strict_ddp_mode or (fractions == (0, 0) and self.shard_param_frac in (0, 1)):
            return None
        return Offload(
            host_states=float(self.offload_optim_frac),
            host_parameters=float(self.offload_param_frac),
            sharded_parameters=float(self.shard_param_frac),
            accumulates=bool(self.enable_gradient_accumulation) or fractions == (0, 0),
        )

    def _without_effect(self) -> dict[str, str]:
        reasons = {}
        if self.strict_ddp_mode:
            shares = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
            reasons |= {name: "strict_ddp_mode splits and offloads nothing" for name in shares if given(self, name)}
        if self.enable_sequence_parallelism and self.tp_size == 1:
            reasons["enable_sequence_parallelism"] = "it splits sequences over tp, and tp_size is 1"
        return reasons
