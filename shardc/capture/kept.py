"""What a forward keeps on its modules: harmless if it is the same in every run, as a cache of constants is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.capture.rows import Trace
from shardc.errors import ShardcError


def keeps_state(name: str) -> ShardcError:
    """The refusal of a model whose calls depend on earlier calls."""
    return ShardcError(
        f"{name.rpartition('.')[0] or 'the model'}: keeps {name.rpartition('.')[2]!r} from one batch to the next",
        "compute it in forward, or keep it out of the model",
    )


def check_kept(traces: Sequence[Trace]) -> None:
    """Raise ShardcError where forward keeps something that differs from run to run: calls would depend on calls."""
    for name in {name: None for trace in traces for name in trace.kept}:
        first, *others = (trace.kept.get(name) for trace in traces)
        if any(not _equal(first, other) for other in others):
            raise keeps_state(name)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and (one is other or not isinstance(one, (int, float)) or one == other)
