"""What a plugin asks of Booster: one frozen record, and the records inside it."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardc.errors import ShardcError
from shardc.runtime.offload import Offload

if TYPE_CHECKING:
    from shardc.runtime.plan import Plan

PRECISIONS = ("fp16", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class ScalerSettings:
    """The dynamic loss scale of fp16; other precisions do not scale.

    growth_interval: steps without overflow in a row before the scale is multiplied by growth_factor. hysteresis: of the
    overflows since then, the first hysteresis - 1 leave it as it is, each later one multiplies it by backoff_factor.
    The scale stays within [min_scale, max_scale].
    """

    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32


@dataclass(frozen=True)
class GradientCheckpointConfig:
    """How many layers of each stage recompute their activations in backward: the first ones, a share of all.

    gradient_checkpointing_ratio: share of a stage's layers, 0 to 1. attention_only: of those layers recompute the
    attention alone, which costs little time and saves what grows fastest with the sequence.
    Raises ShardcError for a ratio outside 0 to 1, and for attention_only where no layer recomputes.
    """

    gradient_checkpointing_ratio: float | None = 0.0
    attention_only: bool = False

    def __post_init__(self) -> None:
        name, ratio = type(self).__name__, self.gradient_checkpointing_ratio
        if ratio is not None and not (_is_number(ratio) and 0 <= ratio <= 1):
            raise ShardcError(
                f"{name}: gradient_checkpointing_ratio={ratio!r}; valid: a number from 0 to 1",
                "0.5 recomputes the first half of the layers of each stage",
            )
        if not self._names_layers():
            raise ShardcError(
                f"{name}: no layers are named to recompute; valid: {self._valid()}",
                "gradient_checkpointing_ratio=1.0 recomputes all layers",
            )

    def _names_layers(self) -> bool:
        # A ratio of 0 is the default and says "none", which attention_only contradicts.
        return self.gradient_checkpointing_ratio is not None and not (
            self.attention_only and self.gradient_checkpointing_ratio == 0
        )

    def _valid(self) -> str:
        return "gradient_checkpointing_ratio from 0 to 1, above 0 with attention_only=True"

    def get_num_ckpt_layers(self, num_layers: int, stage: int = 0) -> int:
        """How many of the `num_layers` layers of stage `stage` recompute; the first ones do."""
        assert self.gradient_checkpointing_ratio is not None
        return int(self.gradient_checkpointing_ratio * num_layers + 1e-6)  # 0.29 * 100 is 28.999...


@dataclass(frozen=True)
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """The same, stage by stage.

    num_ckpt_layers_per_stage: a count for each stage; it comes before the ratio, where both are given. Raises
    ShardcError where neither is given, and for a count below 0.
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None
    attention_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.num_ckpt_layers_per_stage
        if counts is not None and not is_counts(counts, at_least=0):
            raise ShardcError(
                f"PipelineGradientCheckpointConfig: num_ckpt_layers_per_stage={counts!r}; valid: a list of one number, "
                "0 or more, for each stage",
                "[2, 0] recomputes the first two layers of stage 0 and none of stage 1",
            )

    def _names_layers(self) -> bool:
        return self.num_ckpt_layers_per_stage is not None or super()._names_layers()

    def _valid(self) -> str:
        return f"num_ckpt_layers_per_stage, or {super()._valid()}"

    def get_num_ckpt_layers(self, num_layers: int, stage: int = 0) -> int:
        """How many of the `num_layers` layers of stage `stage` recompute. Raises ShardcError where it has fewer."""
        if self.num_ckpt_layers_per_stage is None:
            return super().get_num_ckpt_layers(num_layers, stage)
        count = self.num_ckpt_layers_per_stage[stage]
        if count > num_layers:
            raise ShardcError(
                f"PipelineGradientCheckpointConfig: stage {stage} has {num_layers} layers, "
                f"num_ckpt_layers_per_stage={list(self.num_ckpt_layers_per_stage)} recomputes {count} of them",
                f"give stage {stage} at most {num_layers}",
            )
        return count


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained: everything that Booster reads of a plugin. Its values were checked by the plugin.

    tp, pp: sizes of the axes; dp takes the remaining ranks. sequence_parallel: over tp, between the sharded regions.
    schedule: "1f1b" or "gpipe". microbatches: parts of a call's batch; or microbatch_size: rows of a part; never both.
    layers_per_stage: layers of each stage; None balances them by cost. policy: a YAML file; None takes the model's.
    plan: what shardc.load_plan returned; then tp, pp, schedule, microbatches and sequence_parallel are its own.

    placement: what each dp rank holds of gradients, master weights and optimizer states:
        "ddp" all of them; "zero1" a part of the states; "zero2" of the gradients too; "zero3" of the parameters too;
        "fsdp" as zero3, by torch's FSDP2.
    reshard_after_forward: "fsdp" frees gathered parameters between forward and backward.
    precision: "fp16", "bf16" or "fp32"; None keeps the dtype of the model. master_weights: float32 copies of lower
    precision parameters for the optimizer. max_norm: gradients are clipped to this L2 norm; 0 clips nothing.
    communication_dtype: gradients are reduced in it; None is their own. bucket_elements: the largest flat chunk.
    parallel_output: logits of a training step stay sharded and are not for reading. force_outputs_fp32, cast_inputs:
    outputs, floating inputs are cast to float32, to `precision`.
    offload: what leaves the device, and how much of the parameters is split; None nothing.
    recompute: which layers recompute activations; None leaves it to the model (gradient_checkpointing_enable).
    """

    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    microbatches: int | None = None
    microbatch_size: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    policy: str | Path | None = None
    plan: Plan | None = None
    placement: str = "ddp"
    reshard_after_forward: bool = True
    precision: str | None = None
    master_weights: bool = True
    max_norm: float = 0.0
    scaler: ScalerSettings = ScalerSettings()
    communication_dtype: torch.dtype | None = None
    bucket_elements: int = 12 * 2**20
    parallel_output: bool = True
    recompute: GradientCheckpointConfig | None = None
    force_outputs_fp32: bool = False
    cast_inputs: bool = True
    offload: Offload | None = None


def is_counts(value: object, *, at_least: int) -> bool:
    """Whether value is a list or tuple of integers, none below at_least."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(count, int) and not isinstance(count, bool) and count >= at_least for count in value
    )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
