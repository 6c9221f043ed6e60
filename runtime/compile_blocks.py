"""torch.compile for a built plan, block by block: gathers, transfers and recomputation stay outside of the graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardc.runtime.blocks import blocks_of
from shardc.runtime.module import PlanModule
from shardc.runtime.recompute import is_recomputed


def compile_blocks(module: PlanModule, **options: Any) -> None:
    """Let torch.compile(..., **options) make kernels of each block; blocks that recompute run theirs twice.

    Equal blocks share their code, so all but the first compile from torch's cache. dynamic is False unless given:
    micro-batches of two sizes each have a graph of their own, and recomputation runs the one that forward ran."""
    options = {"dynamic": False, **options}
    for stage in module.pipeline.modules.values():
        for block in blocks_of(stage).values():
            if is_recomputed(block):
                wrapper = block.forward
                block.forward = partial(wrapper.func, torch.compile(wrapper.args[0], **options))
            else:
                block.forward = torch.compile(block.forward, **options)
