"""The optimizer that boost returns: the user's own, over flat tensors, with loss scale and clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardc.booster.data import ShardedLoader
from shardc.booster.handle import GroupView
from shardc.booster.loss_scale import LossScaler
from shardc.errors import ShardcError
from shardc.runtime.module import PlanModule
from shardc.runtime.monitor import Monitor
from shardc.runtime.state import OptimizedState

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class BoostedOptimizer(torch.optim.Optimizer):
    """Stands for the user's optimizer, whose groups and state it shows; schedules made from either set the same rates.

    A step completes the gradients over all ranks, skips where fp16 gradients overflowed on any, clips, and updates.
    skipped: whether the last step was. num_steps: steps so far, skipped ones too. dataloader: whose position is saved
    with the state. monitor, after_step: what is told of each step.
    """

    # The constructor of Optimizer is not called: groups and state are those of the user's optimizer.
    def __init__(
        self, optimizer: torch.optim.Optimizer, module: PlanModule, scaler: LossScaler | None, max_norm: float
    ):
        self.optim, self.module, self.scaler, self.max_norm = optimizer, module, scaler, max_norm
        self._groups = [GroupView(group) for group in optimizer.param_groups]
        self.skipped, self.num_steps = False, 0
        self.dataloader: ShardedLoader | None = None
        self.monitor: Monitor | None = None
        self.after_step: Callable[[BoostedOptimizer], None] | None = None
        self.in_backward = self._in_step = False
        optimizer.register_step_pre_hook(self._check_step)
        self._norm: Tensor | None = None
        self._clip: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("optim", "module"):  # not set yet: while it is copied
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[GroupView]:  # type: ignore[override]
        """The groups of the user's optimizer; their params are flat parts of the model, as this rank holds them."""
        return self._groups

    @property
    def training_state(self) -> OptimizedState:
        """Where parameters and gradients are."""
        return self.module.state

    def unwrap(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self.optim

    # -- gradients -----------------------------------------------------------------------------------------------------
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale of fp16; the loss itself in other precisions."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """loss.backward(), scaled in fp16. Raises ShardcError for inputs=, which no plan supports."""
        if inputs is not None:
            raise ShardcError("backward: inputs= is not supported", "freeze parameters before boost instead")
        self.in_backward = True
        try:
            self.scale_loss(loss).backward(retain_graph=retain_graph)
        finally:
            self.in_backward = False

    def check_backward(self) -> None:
        """Raises ShardcError in a backward pass of fp16 that this optimizer did not begin."""
        if not self.in_backward:
            raise ShardcError(
                "loss.backward(): fp16 gradients would underflow without the loss scale",
                "call booster.backward(loss, optimizer)",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.module.zero_grad(set_to_none)
        self._clip = None

    def get_grad_norm(self) -> Tensor | None:
        """0-d float32, equal on every rank: 2-norm of the gradients that the last step found, before clipping.

        None where nothing needed it: with max_norm=0, unless the precision is fp16 or clip_grad_by_norm was called."""
        return self._norm

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        """Scale the gradients of the next step so that their norm is at most max_norm; returns the norm before, 0-d.

        Every rank calls it, after backward. Raises ShardcError for another norm than 2."""
        if norm_type != 2:
            raise ShardcError(f"clip_grad_by_norm: norm_type={norm_type}; valid: 2", "leave norm_type out")
        norm = self._measure()
        self._limit(norm, max_norm)
        return norm

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Raises ShardcError: clipping each element by itself is not supported."""
        raise ShardcError("clip_grad_by_value is not supported", f"call clip_grad_by_norm, or max_norm={clip_value}")

    def _limit(self, norm: Tensor, max_norm: float) -> None:
        factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
        self._clip = factor if self._clip is None else torch.minimum(self._clip, factor)

    def _measure(self) -> Tensor:
        """Complete the gradients; their norm without the loss scale."""
        self.training_state.reduce_gradients()
        norm = self.training_state.grad_norm()
        self._norm = norm if self.scaler is None else norm * self.scaler.inverse()
        return self._norm

    # -- steps ---------------------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step of the user's optimizer, on every rank. Raises ShardcError for a closure."""
        if closure is not None:
            raise ShardcError("step: closures are not supported", "call the model and booster.backward before step")
        if self.max_norm or self.scaler is not None:
            norm = self._measure()
        else:
            self.training_state.reduce_gradients()
            if self._clip is None:
                self._norm = None
        if self.max_norm:
            self._limit(norm, self.max_norm)
        # Where some gradient of some rank is not finite, neither is the norm, which is equal on every rank.
        self.skipped = self.scaler is not None and not bool(norm.isfinite())
        if self.skipped:
            self.training_state.zero_grad()  # they are no use, and may be in the parameters' place
        else:
            self._in_step = True
            try:
                self.training_state.step(self.optim, self._factor())
            finally:
                self._in_step = False
        if self.scaler is not None:
            self.scaler.update(self.skipped)
        self._clip = None
        self.num_steps += 1
        if self.after_step is not None:
            self.after_step(self)

    def _check_step(self, *_: Any) -> None:
        """Raises ShardcError in a step of the user's own optimizer, which has no gradients since boost."""
        if not self._in_step:
            raise ShardcError(
                f"{type(self.optim).__name__}.step: the optimizer was boosted, and this is not what boost returned",
                "write model, optimizer, ... = booster.boost(model, optimizer, ...), and use that optimizer",
            )

    def _factor(self) -> Tensor | None:
        """0-d: what the gradients are multiplied by; None is 1."""
        if self.scaler is None:
            return self._clip
        inverse = self.scaler.inverse()
        return inverse if self._clip is None else inverse * self._clip

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on each rank, where the plugin keeps them whole."""
        return self.training_state.no_sync()

    # -- state ---------------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ShardcError: groups are fixed when the model is boosted."""
        raise ShardcError("add_param_group: the groups are fixed since boost", "add the group before boost")

    def state_dict(self) -> dict[str, Any]:
        """Raises ShardcError: a rank holds a part of the state."""
        raise ShardcError(
            "optimizer.state_dict(): each rank holds a part of it", "call booster.save_optimizer(optimizer, folder)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises ShardcError: neither a copy nor a pickle of one rank's part is an optimizer."""
        raise ShardcError(
            "a boosted optimizer is neither copied nor pickled: each rank holds a part of its state",
            "call booster.save_optimizer(optimizer, folder)",
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ShardcError: a rank holds a part of the state."""
        raise ShardcError(
            "optimizer.load_state_dict(): each rank holds a part of it",
            "call booster.load_optimizer(optimizer, folder), with what booster.save_optimizer wrote",
        )
