"""Training state: where parameters and gradients of a rank are, and what a training loop does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime import gradients
from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import Mesh
from shardc.runtime.offload import Offload
from shardc.runtime.schedule import Schedule
from shardc.runtime.spec import PlanSpec
from shardc.runtime.weights import Weights


@dataclass(frozen=True, slots=True)
class StateOptions:
    """How a placement keeps the training state.

    groups: the optimizer's parameter group of each trained parameter by canonical name, those left out are frozen; None
    is one group of all that require gradients. max_elements: of a chunk. communication_dtype: in which gradients are
    reduced, None is their own. master_weights: float32 values of parameters in less precision, for the optimizer.
    reshard_after_forward: free gathered parameters before backward. offload: what leaves the device, None nothing.
    """

    groups: Mapping[str, int] | None = None
    max_elements: int = 2**26
    communication_dtype: torch.dtype | None = None
    master_weights: bool = True
    reshard_after_forward: bool = True
    offload: Offload | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What a dp coord holds of a parameter's tp-local part, flattened: elements [offset, offset + numel) of it.

    On this rank they are the elements [start, start + numel) of `master.data.view(-1)`, and of each tensor that the
    optimizer keeps of it; master is None for other coords."""

    master: nn.Parameter | None
    start: int
    offset: int
    numel: int


class Kept(Protocol):
    """Gradients of one call, aside from the others until the call's loss is given to backward."""

    def release(self, scale: Tensor) -> None:
        """Add them, times `scale` (0-d), to the others. Raises ShardcError the second time."""


class TrainingState(Protocol):
    """What PlanModule asks of it. Every rank calls each alike.

    calls_meet: calls of the model send over dp, so that all dp ranks must go the same way through one."""

    calls_meet: bool

    def before_call(self) -> None:
        """Raises ShardcError, before anything is sent, where the parameters cannot be used now."""

    def hold(self) -> AbstractContextManager[None]:
        """Inside, parameters that a module used stay where it used them: for calls of several micro-batches."""

    def collect(self, microbatches: int) -> AbstractContextManager[Kept]:
        """Inside, the backward passes of so many micro-batches add to gradients that are kept apart."""

    def reduce_gradients(self) -> None:
        """Complete the gradients, once before an optimizer step: over partial tp axes, tied stages and dp.

        Raises ShardcError where a backward pass failed since zero_grad, if the gradients are then lost."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def grad_norm(self) -> Tensor:
        """0-d float32, equal on every rank: 2-norm of the whole model's gradient, after reduce_gradients."""

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a 0-d tensor."""

    def parameter(self, name: str) -> Tensor | None:
        """This tp rank's part of a parameter; from dp coord 0, None where it lies elsewhere."""

    def gradient(self, name: str) -> Tensor | None:
        """Its gradient in the same way, None where it has none."""


class OptimizedState(TrainingState, Protocol):
    """Training state with tensors of its own for an elementwise optimizer: `plan.build(placement=...)`."""

    def masters(self, group: int) -> list[nn.Parameter]:
        """What the optimizer's parameter group updates on this rank."""

    def step(self, optimizer: torch.optim.Optimizer, scale: Tensor | None = None) -> None:
        """Update the masters by an optimizer over them, and the parameters from them; scale: 0-d, of the gradients."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes leave gradients unreduced, where the placement has them whole."""

    def piece(self, name: str, coord: int | None = None) -> Piece | None:
        """What a dp coord, None is this rank's, holds of a trained parameter's master; None where it holds nothing."""

    def publish(self) -> None:
        """Bring the masters' values to where modules read them, after they were changed. Every rank calls it."""

    def load(self, weights: Weights) -> None:
        """Take other values for all parameters and their masters; what the optimizer keeps of them stays."""


class SeparateTensors:
    """As torch has it: each parameter is a tensor with its own .grad."""

    calls_meet = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: PlanSpec,
        mesh: Mesh,
        schedule: Schedule,
        tie_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ):
        """parameters: this rank's, by canonical name. tie_groups: process group of the stages that share a tie."""
        self.parameters = {name: parameters[name] for name in sorted(parameters)}
        self.spec, self.mesh, self.schedule, self.tie_groups = spec, mesh, schedule, tie_groups

    def before_call(self) -> None:
        pass

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def collect(self, microbatches: int) -> Iterator[Kept]:
        """.grad is as before afterwards."""
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        before = [parameter.grad for parameter in trained]
        kept = _KeptGradients(trained)
        for parameter in trained:
            parameter.grad = None
        try:
            yield kept
            kept.grads = [parameter.grad for parameter in trained]
        finally:
            for parameter, grad in zip(trained, before, strict=True):
                parameter.grad = grad

    def reduce_gradients(self) -> None:
        gradients.reduce_gradients(self.parameters, self.spec, self.mesh, self.tie_groups)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def grad_norm(self) -> Tensor:
        return gradients.grad_norm(self.parameters, self.spec, self.mesh, self.schedule)

    def scale_gradients(self, factor: Tensor) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def parameter(self, name: str) -> Tensor | None:
        return self.parameters.get(name)

    def gradient(self, name: str) -> Tensor | None:
        return self.parameters[name].grad if name in self.parameters else None


class _KeptGradients:
    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self.grads: list[Tensor | None] | None = None

    def release(self, scale: Tensor) -> None:
        if self.grads is None:
            raise used_up()
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            if grad is None:
                continue
            grad.mul_(scale)
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self.grads = None


def used_up() -> ShardcError:
    """The error of a second backward of one loss."""
    return ShardcError(
        "backward was called twice on one loss; its gradients were used up",
        "call the model again for each backward",
    )


def incomplete() -> ShardcError:
    """The error of a step after a backward pass that failed."""
    return ShardcError(
        "a backward pass failed before the gradients of all parameters were there",
        "call optimizer.zero_grad(), and run the step's calls again",
    )
