"""A loss of the user's own inside a call of the model: computed of each micro-batch, where the logits are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.batch import Batch
from shardc.runtime.collectives import reduce_ranks
from shardc.runtime.errors import ShardcError
from shardc.runtime.logits import whole_logits
from shardc.runtime.mesh import Mesh
from shardc.runtime.output import Output
from shardc.runtime.spec import LogitsSpec

Criterion = Callable[[Output, Mapping[str, Any]], Tensor]  # (outputs, micro-batch) -> mean loss of it

_ADVICE = "return the mean loss of the micro-batch, computed from outputs.logits or outputs.loss"


@dataclass(slots=True)
class CriterionOfCall:
    """A criterion, and what it needs for the micro-batches of one call.

    batches: what the stages get, by micro-batch; given: what the caller gave, likewise, on the device. counts: targets
    of each micro-batch, its rows where the batch has no labels. total: 0-d, of the global batch. is_trial: whether this
    is the first call with the criterion, at whose end all ranks learn of an error of one."""

    function: Criterion
    spec: LogitsSpec
    mesh: Mesh
    batches: Sequence[Batch]
    given: Sequence[Mapping[str, Any]]
    counts: Sequence[int]
    total: Tensor
    is_trial: bool
    error: Exception | None = field(default=None, init=False)

    def __call__(self, microbatch: int, loss: Tensor | None, logits: Tensor) -> Tensor:
        """0-d, float32 at least: the micro-batch's share of the call's loss. Shares add up over micro-batches and dp.

        loss, logits: as the last stage returns them. A micro-batch without targets adds zeros, to the gradients too."""
        count, value = self.counts[microbatch], None
        if count and self.error is None:
            value = self._value(microbatch, loss, logits)
        if value is None:
            value = logits[(0,) * logits.dim()] * 0
        return value.to(torch.promote_types(value.dtype, torch.float32)) * count / self.total

    def _value(self, microbatch: int, loss: Tensor | None, logits: Tensor) -> Tensor | None:
        """What the user's function returns; None where it failed in a trial."""
        outputs = Output(loss, partial(whole_logits, logits, self.spec, self.batches[microbatch], self.mesh))
        try:
            value = self.function(outputs, self.given[microbatch])
            _check(value, has_gradients=logits.requires_grad)
        except Exception as error:  # raised by `agree`
            if not self.is_trial:
                raise
            self.error = error
            return None
        return value

    def agree(self) -> None:
        """After a trial, on every rank: raises this rank's error, or ShardcError where another rank has one."""
        if not self.is_trial:
            return
        failed = torch.tensor(0 if self.error is None else self.mesh.rank + 1, device=self.mesh.device)
        for axis in (self.mesh.tp, self.mesh.pp, self.mesh.dp):
            if axis.size > 1:
                failed = reduce_ranks(failed, axis, "max")
        if self.error is not None:
            raise self.error
        if failed:
            raise ShardcError(f"criterion: failed on rank {int(failed) - 1}", "see the error of that rank")


def _check(value: Any, *, has_gradients: bool) -> None:
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        found = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ShardcError(f"criterion: returned {found}; valid: a 0-d floating tensor", _ADVICE)
    if has_gradients and not value.requires_grad:
        raise ShardcError("criterion: returned a loss without a gradient: it does not depend on the outputs", _ADVICE)
