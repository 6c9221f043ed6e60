"""The learning rate schedule that boost returns: the user's own, which waits where the optimizer skipped a step."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from shardc.booster.optimizer import BoostedOptimizer


class BoostedScheduler(LRScheduler):
    """Stands for the user's schedule, whose attributes it shows. A skipped step of fp16 is no step of the schedule."""

    # The constructor of LRScheduler is not called: it would take a step.
    def __init__(self, scheduler: Any, optimizer: BoostedOptimizer):
        self.scheduler, self.boosted = scheduler, optimizer

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "boosted"):  # not set yet: while it is copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the schedule, unless the optimizer's last one was skipped."""
        if not self.boosted.skipped:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The schedule's own."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the saved schedule was."""
        self.scheduler.load_state_dict(state_dict)
