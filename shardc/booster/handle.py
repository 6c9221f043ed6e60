"""What a boosted model and optimizer show of their parameters: to be looked at, while ranks hold parts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from shardc.errors import ShardcError

# What may be asked of a parameter whose values are not on this rank now.
_ABOUT_SHAPE = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "__len__",
    "stride",
    "is_contiguous",
    "storage_offset",
    "untyped_storage",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "get_device",
}
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that are tensors
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


class ParameterHandle(nn.Parameter):
    """A parameter, or a part of one, to be read. Gradients are not where a plain script looks for them, and said so.

    Raises ShardcError for .grad, for a write, for a hook, for a backward that reaches it, and for reading values that
    are not on this rank between calls."""

    def __new__(cls, data: Tensor, requires_grad: bool) -> ParameterHandle:
        handle = super().__new__(cls, data, requires_grad)
        if requires_grad:
            nn.Parameter.__torch_function__(Tensor.register_hook, (cls,), (handle, _refuse_gradient), {})
        return handle

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, writes = func.__name__, _writes(func.__name__)
        is_read = name == "__get__"
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
        harmless = name not in _VALUES if is_read else name in _ABOUT_SHAPE
        if name in _HOOKS:
            raise ShardcError(f"{name}: no gradient reaches this parameter", "read optimizer.get_grad_norm()")
        if args and isinstance(args[0], cls) and writes:
            raise ShardcError(
                f"{name}: parameters are changed by the optimizer's steps alone since boost",
                "change them before boost, or call booster.load_model(model, folder)",
            )
        if not harmless:
            for handle in args:
                if isinstance(handle, cls) and handle.numel() and not handle.untyped_storage().nbytes():
                    raise ShardcError(
                        f"a parameter of {list(handle.shape)}: its values are split over the ranks, and whole on this "
                        "one only while a module computes with them",
                        "read them from model.module.gather_parameters(), which every rank calls",
                    )
        return nn.Parameter.__torch_function__(func, types, args, kwargs or {})

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        """Raises ShardcError: gradients lie in chunks, summed over ranks when a step needs them."""
        raise ShardcError(
            "parameter.grad: gradients lie in flat chunks since boost",
            "clip by the plugin's max_norm= or optimizer.clip_grad_by_norm(max_norm); "
            "read the norm by optimizer.get_grad_norm()",
        )

    @grad.setter
    def grad(self, value: Any) -> NoReturn:
        raise ShardcError(
            "parameter.grad: gradients lie in flat chunks since boost", "call optimizer.zero_grad() to forget them"
        )

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Raises ShardcError: what is trained was fixed by boost."""
        raise ShardcError("requires_grad_: what is trained is fixed since boost", "freeze parameters before boost")


class GroupView(MutableMapping[str, Any]):
    """A parameter group of the user's optimizer: options are read and set, `params` are handles."""

    def __init__(self, group: dict[str, Any]):
        self.group = group
        self.handles = [ParameterHandle(parameter.detach(), True) for parameter in group["params"]]

    def __getitem__(self, key: str) -> Any:
        return self.handles if key == "params" else self.group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ShardcError("param_groups: what is trained is fixed since boost", "make the groups before boost")
        self.group[key] = value

    def __delitem__(self, key: str) -> None:
        del self.group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __len__(self) -> int:
        return len(self.group)

    def __repr__(self) -> str:
        return repr(dict(self))


def _writes(name: str) -> bool:
    return (
        name in ("__set__", "__setitem__")
        or (name.startswith("__i") and name.endswith("__") and name[3:-2] in _OPERATORS)
        or (name.endswith("_") and not name.endswith("__"))
    )


_OPERATORS = {"add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"}


def _refuse_gradient(_: Tensor) -> NoReturn:
    raise ShardcError(
        "backward reached a parameter outside the model's call: its gradient would be lost, because gradients exist "
        "through the model's loss only",
        "give the whole loss to boost(criterion=...), or decay weights by the optimizer's weight_decay",
    )
