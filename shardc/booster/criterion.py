"""The criterion that boost returns: the user's own has run inside the call of the model by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.output import Output


class BoostedCriterion:
    """criterion(outputs, batch) -> the loss of the call that gave these outputs.

    The user's function ran where the logits are, on each micro-batch; see PlanModule.forward."""

    def __init__(self, function: Callable[[Any, Any], Tensor]):
        self.function = function

    def __call__(self, outputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Raises ShardcError where it is given something else than outputs of the model."""
        if not isinstance(outputs, Output):
            raise ShardcError(
                f"criterion: given {type(outputs).__name__}; the criterion ran when the model was called",
                "call it as criterion(outputs, batch) with what the model returned, or use outputs.loss",
            )
        return outputs.loss


@dataclass(frozen=True, slots=True)
class InFloat32:
    """The user's function, given outputs in float32, as the caller of the model is."""

    function: Callable[[Any, Any], Tensor]

    def __call__(self, outputs: Output, batch: Mapping[str, Any]) -> Tensor:
        outputs.to_float32()
        return self.function(outputs, batch)
