"""Tensor, pipeline and data parallelism together, with ZeRO 0 to 3 over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardc.booster.plugin import arguments as a
from shardc.booster.plugin.arguments import Valid, argument, given, scaler_of
from shardc.booster.plugin.base import Plugin
from shardc.booster.plugin.low_level_zero import NEXT_GATHERED, OF_STATES, OVERLAPS
from shardc.booster.plugin.recipe import GradientCheckpointConfig, PipelineGradientCheckpointConfig, Recipe
from shardc.booster.plugin.torch_ddp import BUCKET_VIEWS, BUFFERS, CHECKED, GRAPH, UNUSED_PARAMETERS, elements_of
from shardc.errors import ShardcError
from shardc.runtime.plan import Plan

OVER_TP = ("split_gather", "ring")
SP_NOT_YET = ("all_to_all", "ring_attn")
PLAN = a.optional(Valid("what shardc.load_plan(folder) returns", lambda value: isinstance(value, Plan)))
# What a plan decides, by the argument that would say it otherwise.
OF_PLAN = {
    "tp_size": lambda plan: plan.spec.tp,
    "pp_size": lambda plan: plan.spec.pp,
    "pp_style": lambda plan: plan.schedule.name,
    "num_microbatches": lambda plan: plan.schedule.num_microbatches,
    "enable_sequence_parallelism": lambda plan: plan.data["mesh"]["sequence_parallel"],
}
INSIDE_PLAN = ("policy", "custom_policy", "num_layers_per_stage", "microbatch_size")


@dataclass(frozen=True, eq=False, repr=False)
class HybridParallelPlugin(Plugin):
    """tp_size ranks share each layer, pp_size stages share the layers, the remaining ranks share the data.

    plan: a plan that was compiled before says tp, pp, schedule, micro-batches and sequence parallelism; an argument
    that says otherwise is refused. Without it, boost compiles the model by its policy, or by `policy`, a YAML file
    (custom_policy is the same). zero_stage: 0 to 3, with any pp_size.
    num_microbatches: parts of a call's batch, 2 * pp_size unless given; or microbatch_size: rows of a part.
    num_layers_per_stage: layers of each stage; None balances them. parallel_output: False makes the logits of a
    training step readable. ddp_bucket_cap_mb (MiB, zero_stage 0), zero_bucket_size_in_m (2**20 elements): the largest
    chunk that is reduced at once. cpu_offload: master weights and optimizer states are in host memory. initial_scale to
    max_scale: the loss scale of fp16, see ScalerSettings. max_norm: gradients are clipped to this L2 norm, 0 clips
    nothing.
    """

    tp_size: int | None = argument(None, a.optional(a.COUNT))
    pp_size: int | None = argument(None, a.optional(a.COUNT))
    sp_size: int | None = argument(None, a.optional(a.COUNT))
    precision: str = argument("fp16", a.PRECISION)
    zero_stage: int = argument(0, a.one_of(0, 1, 2, 3))
    enable_all_optimization: bool = argument(False, a.FLAG, unused=a.OWN_CODE)
    enable_fused_normalization: bool = argument(False, a.FLAG, unused=a.OWN_CODE)
    enable_flash_attention: bool = argument(False, a.FLAG, unused=a.ATTENTION)
    enable_jit_fused: bool = argument(False, a.FLAG, unused=a.OWN_CODE)
    enable_sequence_parallelism: bool = argument(False, a.FLAG)
    sequence_parallelism_mode: str | None = argument(None, a.optional(a.one_of(*OVER_TP, *SP_NOT_YET)))
    parallel_output: bool = argument(True, a.FLAG)
    num_microbatches: int | None = argument(None, a.optional(a.COUNT))
    microbatch_size: int | None = argument(None, a.optional(a.COUNT))
    initial_scale: float = argument(2**16, a.POSITIVE)
    min_scale: float = argument(1, a.POSITIVE)
    growth_factor: float = argument(2, a.GROWTH)
    backoff_factor: float = argument(0.5, a.BACKOFF)
    growth_interval: int = argument(1000, a.COUNT)
    hysteresis: int = argument(2, a.COUNT)
    max_scale: float = argument(2**32, a.POSITIVE)
    max_norm: float = argument(0, a.NOT_NEGATIVE)
    broadcast_buffers: bool = argument(True, a.FLAG, unused=BUFFERS)
    ddp_bucket_cap_mb: float = argument(25, a.POSITIVE)
    find_unused_parameters: bool = argument(False, a.FLAG, unused=UNUSED_PARAMETERS)
    check_reduction: bool = argument(False, a.FLAG, unused=CHECKED)
    gradient_as_bucket_view: bool = argument(False, a.FLAG, unused=BUCKET_VIEWS)
    static_graph: bool = argument(False, a.FLAG, unused=GRAPH)
    zero_bucket_size_in_m: float = argument(12, a.POSITIVE)
    cpu_offload: bool = argument(False, a.FLAG)
    communication_dtype: torch.dtype | None = argument(None, a.FLOATING)
    overlap_communication: bool = argument(True, a.FLAG, unused=OVERLAPS)
    custom_policy: str | Path | None = argument(None, a.ANYTHING)
    pp_style: str = argument("1f1b", a.one_of("1f1b", "gpipe", not_yet=("interleaved", "zbv")))
    num_model_chunks: int = argument(1, a.one_of(1))
    scheduler_nodes: list | None = argument(None, a.ANYTHING, unused="pp_style alone says the schedule")
    num_layers_per_stage: Sequence[int] | None = argument(None, a.LAYERS)
    gradient_checkpoint_config: GradientCheckpointConfig | None = argument(None, a.RECOMPUTE)
    enable_metadata_cache: bool = argument(True, a.FLAG, unused="shapes follow from the batch and are never sent")
    make_vocab_size_divisible_by: int = argument(64, a.COUNT, unused="a vocabulary of any size is split as it is")
    dp_outside: bool = argument(True, a.FLAG, unused="rank = (dp coord * pp + pp coord) * tp + tp coord")
    overlap_p2p: bool = argument(True, a.FLAG, unused="messages between stages run beside computation")
    overlap_allgather: bool = argument(False, a.FLAG, unused=NEXT_GATHERED)
    fp8_communication: bool = argument(False, a.FLAG, unused=a.NO_FP8_SENT)
    use_fp8: bool = argument(False, a.FLAG, unused=a.NO_FP8)
    inner_ring_size: int | None = argument(None, a.optional(a.COUNT), unused="no attention runs in a ring")
    plan: Plan | None = argument(None, PLAN)
    policy: str | Path | None = argument(None, a.POLICY)

    def _recipe(self) -> Recipe:
        layout = self._layout() if self.plan is None else self._layout_of_plan(self.plan)
        stage, precision = self.zero_stage, self.precision
        recipe = replace(
            layout,
            placement=f"zero{stage}" if stage else "ddp",
            precision=precision,
            max_norm=float(self.max_norm),
            scaler=scaler_of(self),
            communication_dtype=self.communication_dtype,
            bucket_elements=int(self.zero_bucket_size_in_m * 2**20)
            if stage
            else elements_of(self.ddp_bucket_cap_mb, precision),
            parallel_output=bool(self.parallel_output),
            recompute=self.gradient_checkpoint_config,
            offload=OF_STATES if self.cpu_offload else None,
        )
        self._check_stages(recipe.pp)
        object.__setattr__(self, "tp_size", recipe.tp)
        object.__setattr__(self, "pp_size", recipe.pp)
        return recipe

    def _layout(self) -> Recipe:
        """What the arguments say of the layout."""
        for name in ("tp_size", "pp_size"):
            if getattr(self, name) is None:
                self._refuse(f"{name} is missing; valid: {a.COUNT.text}", "1 is no split; or pass plan=")
        if self.num_microbatches is not None and self.microbatch_size is not None:
            self._refuse(
                f"num_microbatches={self.num_microbatches} and microbatch_size={self.microbatch_size} are both given; "
                "valid: one of them, or none",
                f"none means num_microbatches={2 * self.pp_size} for pp_size={self.pp_size}",
            )
        microbatches = self.num_microbatches
        if microbatches is None and self.microbatch_size is None and self.pp_size > 1:
            microbatches = 2 * self.pp_size  # the pipeline is then idle for less than a third of the step
        layers = self.num_layers_per_stage
        return Recipe(
            tp=int(self.tp_size),
            pp=int(self.pp_size),
            sequence_parallel=self._sequence_parallel() and self.tp_size > 1,
            schedule=self.pp_style,
            microbatches=microbatches,
            microbatch_size=self.microbatch_size,
            layers_per_stage=None if layers is None else tuple(layers),
            policy=self._policy(),
        )

    def _layout_of_plan(self, plan: Plan) -> Recipe:
        """What the plan says, where no argument says otherwise."""
        self._sequence_parallel()
        found = {name: read(plan) for name, read in OF_PLAN.items()}
        for name, value in found.items():
            if given(self, name) and getattr(self, name) != value:
                self._refuse(
                    f"{name}={getattr(self, name)!r}, but the plan {plan.folder} has {name}={value!r}",
                    f"leave {name} out, or compile the plan again",
                )
        for name in INSIDE_PLAN:
            if getattr(self, name) is not None:
                self._refuse(
                    f"{name}={getattr(self, name)!r} cannot change the plan {plan.folder}",
                    f"leave {name} out, or compile the plan again",
                )
        return Recipe(
            tp=found["tp_size"],
            pp=found["pp_size"],
            sequence_parallel=found["enable_sequence_parallelism"],
            schedule=found["pp_style"],
            microbatches=found["num_microbatches"],
            plan=plan,
        )

    def _sequence_parallel(self) -> bool:
        """Whether it is asked for, in a way that splits sequences over tp. Raises ShardcError for other ways."""
        mode, over_tp = self.sequence_parallelism_mode, (None, *OVER_TP)
        if self.enable_sequence_parallelism and mode not in over_tp:
            self._refuse(
                f"sequence_parallelism_mode={mode!r} is not built yet; valid: {a.one_of(*OVER_TP).text}, or None",
                'use "split_gather", which splits sequences over tp',
            )
        # ColossalAI's scripts give sp_size = tp_size in these modes, where it says nothing new.
        same = self.enable_sequence_parallelism and self.sp_size == self.tp_size
        if self.sp_size not in (None, 1) and not same:
            self._refuse(
                f"sp_size={self.sp_size} is not built yet; valid: None",
                'use sequence_parallelism_mode="split_gather", which splits sequences over tp',
            )
        return bool(self.enable_sequence_parallelism)

    def _policy(self) -> str | Path | None:
        custom = self.custom_policy
        if custom is None:
            return self.policy
        if not isinstance(custom, (str, Path)):
            self._refuse(
                f"custom_policy=<{type(custom).__name__}> is not valid; valid: the path of a YAML file",
                "write it as YAML: `shardc policy show llama` prints one to start from",
            )
        if self.policy is not None:
            self._refuse(
                f"policy={self.policy!r} and custom_policy={custom!r} are both given; valid: one of them",
                "they mean the same; leave custom_policy out",
            )
        return custom

    def _check_stages(self, stages: int) -> None:
        """Lists with one number for each stage are as long as there are stages."""
        config = self.gradient_checkpoint_config
        counts = config.num_ckpt_layers_per_stage if isinstance(config, PipelineGradientCheckpointConfig) else None
        lists = {"num_layers_per_stage": self.num_layers_per_stage, "num_ckpt_layers_per_stage": counts}
        for name, numbers in lists.items():
            if numbers is not None and len(numbers) != stages:
                self._refuse(
                    f"{name}={list(numbers)} has {len(numbers)} numbers, pp_size is {stages}; "
                    f"valid: a list of {stages}",
                    "give one number for each stage",
                )

    def _without_effect(self) -> dict[str, Any]:
        reasons = {}
        if self.enable_sequence_parallelism and self.tp_size == 1:
            reasons["enable_sequence_parallelism"] = "it splits sequences over tp, and tp_size is 1"
        if self.sequence_parallelism_mode is not None and not self.recipe.sequence_parallel:
            reasons["sequence_parallelism_mode"] = "sequences are not split"
        unread = "ddp_bucket_cap_mb" if self.zero_stage else "zero_bucket_size_in_m"
        if given(self, unread):
            reasons[unread] = f"zero_stage is {self.zero_stage}"
        return reasons

    def _refuse(self, problem: str, advice: str) -> None:
        raise ShardcError(f"{type(self).__name__}: {problem}", advice)
