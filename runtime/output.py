"""What a call of the model returns: loss and logits, read as the outputs of transformers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.errors import ShardcError


class Output(Mapping[str, Tensor]):
    """.loss and .logits by attribute, by name (out["loss"]) and by position (out[0], out[:2], to_tuple()).

    loss: 0-d, equal on every rank; None without labels and criterion. The mapping has what is there: no loss that is
    None, no logits that cannot be read. Reading and printing never communicate, but for .logits inside a criterion."""

    __slots__ = ("_is_float32", "_logits", "loss")

    def __init__(self, loss: Tensor | None, logits: Tensor | Callable[[], Tensor] | None):
        """logits: whole, or what gathers them when they are read; None where a rank has only parts of them."""
        self.loss = loss
        self._logits = logits
        self._is_float32 = False

    @property
    def logits(self) -> Tensor:
        """(B, T, V), equal on every rank of a model replica. Raises ShardcError where they were not gathered."""
        if self._logits is None:
            raise ShardcError(
                "logits are not gathered while gradients are on, because ranks, stages or micro-batches hold parts",
                "call the model under torch.no_grad() for logits, or set parallel_output=False of the plugin; "
                "a loss of your own is boost(criterion=...)",
            )
        if not isinstance(self._logits, Tensor):
            self._logits = self._logits()
        if self._is_float32:
            self._logits = _to_float32(self._logits)
        return self._logits

    def to_float32(self) -> None:
        """Make loss and logits float32 where they are in less; logits not before they are read."""
        self._is_float32 = True
        if self.loss is not None:
            self.loss = _to_float32(self.loss)

    def to_tuple(self) -> tuple[Tensor, ...]:
        """Loss and logits, as far as they are there."""
        return tuple(self[name] for name in self)

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key == "logits" or (key == "loss" and self.loss is not None):
            return getattr(self, key)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def _names(self) -> list[str]:
        return [name for name, value in (("loss", self.loss), ("logits", self._logits)) if value is not None]

    # Tensors have no single answer to ==.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        logits = f", logits={tuple(self._logits.shape)}" if isinstance(self._logits, Tensor) else ""
        return f"Output(loss={self.loss}{logits})"


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
