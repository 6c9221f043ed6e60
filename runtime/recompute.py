"""Gradient checkpointing: blocks of a built plan keep their inputs alone, and run again in the backward pass.

A block's `forward` is replaced on the instance, so hooks of the block stay outside: its forward hooks run once a call,
and a hook on a tensor that the block returned runs before the block is computed again. The default random generators
are restored for that, which replays dropout, `sharded_rng` included.

A compiled forward (compile_blocks) stays inside, and runs twice.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardc.runtime.blocks import blocks_of
from shardc.runtime.errors import ShardcError
from shardc.runtime.module import PlanModule

_ATTENTION_CALLS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_PRODUCTS = {"@", "matmul", "bmm", "baddbmm", "einsum"}


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which blocks recompute. Raises ShardcError for a ratio outside 0 to 1 and for counts below 0.

    ratio: share of the blocks of each stage, the first ceil(ratio * n). layers_per_stage: the first k blocks of each
    stage, a number a stage, in place of the ratio. attention_only: of these blocks the attention alone.
    """

    ratio: float = 1.0
    layers_per_stage: tuple[int, ...] | None = None
    attention_only: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ShardcError(f"Recompute: ratio={self.ratio}; valid: a number from 0 to 1", "1.0 is every block")
        if self.layers_per_stage is not None and any(count < 0 for count in self.layers_per_stage):
            raise ShardcError(
                f"Recompute: layers_per_stage={list(self.layers_per_stage)}; valid: numbers from 0 on",
                "0 recomputes nothing in that stage",
            )

    def count(self, stage: int, num_blocks: int) -> int:
        """How many of the `num_blocks` blocks of a stage recompute. Raises ShardcError where it has fewer."""
        if self.layers_per_stage is None:
            return math.ceil(self.ratio * num_blocks - 1e-6)  # 0.1 * 30 is 3.0000000000000004
        count = self.layers_per_stage[stage]
        if count > num_blocks:
            raise ShardcError(
                f"Recompute: layers_per_stage={list(self.layers_per_stage)}, but stage {stage} has {num_blocks} blocks",
                f"give stage {stage} at most {num_blocks}",
            )
        return count


def enable_recompute(module: PlanModule, settings: Recompute) -> None:
    """Let blocks recompute in training, in place of what was enabled before; without gradients nothing changes.

    Raises ShardcError, and changes nothing, where the settings do not fit the plan: on every rank, as far as plan.json
    says how many blocks the stages have."""
    chosen = [found for stage in sorted(module.pipeline.modules) for found in _chosen(module, settings, stage)]
    disable_recompute(module)
    for recomputed in chosen:
        recomputed.forward = partial(_recomputed, recomputed.forward)


def disable_recompute(module: PlanModule) -> None:
    """Give every block the forward back that it had before enable_recompute."""
    for part in module.modules():
        if is_recomputed(part):
            (before,) = part.forward.args
            if before == MethodType(type(part).forward, part):
                del part.forward
            else:
                part.forward = before


def is_recomputed(part: nn.Module) -> bool:
    """Whether this module itself was chosen by enable_recompute: its forward is partial(..., the forward before)."""
    forward = vars(part).get("forward")
    return isinstance(forward, partial) and forward.func is _recomputed


def attention_of(block: nn.Module) -> list[nn.Module]:
    """The outermost modules inside a block whose own forward attends.

    That is, it calls a kernel of attention, or softmax and a product of two tensors; functions and methods of the same
    file that it names are read with it. A router, which takes a softmax alone, does not attend."""
    found: list[nn.Module] = []
    for child in block.children():
        found += [child] if _attends(type(child)) else attention_of(child)
    return found


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _chosen(module: PlanModule, settings: Recompute, stage: int) -> Iterator[nn.Module]:
    """The modules of a stage that recompute."""
    _check_counts(module, settings)
    blocks = blocks_of(module.pipeline.modules[stage])
    if not blocks and settings.layers_per_stage is None and settings.ratio > 0:
        raise ShardcError(
            f"Recompute: stage {stage} of {module.spec.model} has no blocks",
            "only layers of an nn.ModuleList recompute; leave recomputation out",
        )
    first = list(blocks.items())[: settings.count(stage, len(blocks))]
    if not settings.attention_only:
        yield from (block for _, block in first)
        return
    attention = [found for _, block in first for found in attention_of(block)]
    if first and not attention:
        path, block = first[0]
        raise ShardcError(
            f"Recompute: attention_only, but no module inside {path} ({type(block).__name__}) calls "
            "scaled_dot_product_attention, or softmax and a matrix product",
            "leave attention_only out, to recompute whole blocks",
        )
    yield from attention


def _check_counts(module: PlanModule, settings: Recompute) -> None:
    """layers_per_stage has a number for each stage of the plan, and none is too large, on other ranks' stages too."""
    counts, stages = settings.layers_per_stage, module.spec.stages
    if counts is None:
        return
    if len(counts) != len(stages):
        raise ShardcError(
            f"Recompute: layers_per_stage={list(counts)} has {len(counts)} numbers, the plan has {len(stages)} stages",
            "give one number for each stage",
        )
    for stage in stages:
        if stage.num_blocks is not None:
            settings.count(stage.index, stage.num_blocks)


def _attends(kind: type[nn.Module]) -> bool:
    names = _names_in(kind)
    return bool(names & _ATTENTION_CALLS) or ("softmax" in names and bool(names & _PRODUCTS))


def _names_in(kind: type[nn.Module]) -> set[str]:
    """What the forward of a class names and does: attributes, globals, "@"; helpers of the same file included."""
    names: set[str] = set()
    waiting: list[FunctionType | CodeType] = [kind.forward]
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        here = {*code.co_names, *(i.argrepr for i in dis.get_instructions(code) if i.opname == "BINARY_OP")}
        names |= here
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        scope = kind.forward.__globals__
        helpers = [getattr(kind, name, scope.get(name)) for name in here]
        waiting += [h for h in helpers if isinstance(h, FunctionType) and h.__module__ == kind.__module__]
    return names
