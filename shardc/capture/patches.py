"""What capture changes in torch while a model runs, and puts back."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardc.capture.source import running_statement
from shardc.errors import ShardcError


@contextlib.contextmanager
def module_calls_through(handler: Callable[[Callable, nn.Module, tuple, dict], Any]) -> Iterator[None]:
    """Every module call becomes `handler(original, module, args, kwargs)`."""
    original = nn.Module.__call__

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handler(original, module, args, kwargs)

    nn.Module.__call__ = __call__
    try:
        yield
    finally:
        nn.Module.__call__ = original


@contextlib.contextmanager
def custom_autograd_refused(where: Callable[[], str]) -> Iterator[None]:
    """A custom autograd function has a backward that its recorded forward would not have: refuse it."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ShardcError(
            f"{where()}: calls the custom autograd function {cls.__name__} ({running_statement()})",
            "mark the module `opaque`, or write the computation with torch operations",
        )

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection meanwhile: each would walk all of torch and transformers to free next to nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
