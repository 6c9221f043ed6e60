"""Gather sharded parameters before a module uses them, the next unit's meanwhile, and free them afterwards.

Forward: a unit is gathered before it runs and freed after. Backward: it is gathered when the gradient of its output is
there, which is also before a recomputation, and freed when the next unit's turn comes.

Parameters that a step still brings from the host are waited for when their unit's turn comes, not before: the units
before it compute meanwhile. All dp ranks gather in one order, whatever arrives first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardc.runtime.memory.chunk import Chunk
from shardc.runtime.memory.layout import Unit


class ParameterAccess:
    """Hooks on the units of a rank's stages. Units are numbered in the order of use."""

    def __init__(self, units: Sequence[Unit], chunks_of: Mapping[str, Chunk]):
        self.chunks = [list(dict.fromkeys(chunks_of[name] for name in unit.names)) for unit in units]
        self.encloses = [unit.encloses for unit in units]
        self.is_held = False
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(lambda *_, index=index: self._before_forward(index))
            unit.module.register_forward_hook(lambda _, __, output, index=index: self._after_forward(index, output))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, what was gathered stays until the end.

        For calls of several micro-batches: a unit is then gathered once a call, in an order that does not depend on
        how many micro-batches this dp rank has."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
            self.release_all()

    def release_all(self) -> None:
        """Free every parameter: between two calls nothing is gathered."""
        for chunk in self._gathered():
            chunk.release()

    def _gathered(self) -> list[Chunk]:
        every = dict.fromkeys(chunk for chunks in self.chunks for chunk in chunks)
        return [chunk for chunk in every if chunk.is_gathered or chunk.is_arriving]

    def _before_forward(self, index: int) -> None:
        self._use(index, index + 1)

    def _use(self, index: int, following: int) -> None:
        for chunk in self.chunks[index]:
            chunk.gather()
        if 0 <= following < len(self.chunks):
            for chunk in self.chunks[following]:
                if chunk.update is None:
                    chunk.gather()
        for chunk in self.chunks[index]:
            chunk.wait()

    def _after_forward(self, index: int, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _, index=index: self._before_backward(index))
        is_last = index + 1 == len(self.chunks)
        following = [] if is_last else self.chunks[index + 1]
        for chunk in following:
            chunk.gather()
        turns_back = is_last and torch.is_grad_enabled()  # backward begins with it
        if not self.is_held and not self.encloses[index] and not turns_back:
            for chunk in self.chunks[index]:
                if chunk not in following:
                    chunk.release()

    def _before_backward(self, index: int) -> None:
        self._use(index, index - 1)
        if self.is_held:
            return
        near = {*self.chunks[index], *(self.chunks[index - 1] if index else ())}
        kept = near.union(*(chunks for chunks, encloses in zip(self.chunks, self.encloses, strict=True) if encloses))
        for chunk in self._gathered():
            if chunk not in kept:
                chunk.release()
