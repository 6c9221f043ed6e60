"""Operations as Python expressions: operators as operators, Tensor methods as methods, slices as slices."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.capture.graph import op_name
from shardc.capture.symbols import DEVICE, DTYPE_MIN, MODEL_DTYPE, TRAINING, Axis, ShardSize, Size, WhileTraining
from shardc.emit.flow import target_name


@dataclass(frozen=True, slots=True)
class Text:
    """An expression and how tightly its outermost operator binds; `ATOM` needs parentheses nowhere."""

    text: str
    binding: int

    def at(self, binding: int) -> str:
        return self.text if self.binding >= binding else f"({self.text})"


ATOM, POWER, UNARY, PRODUCT, SUM, AND, XOR, OR, COMPARISON, CONDITIONAL = 100, 95, 90, 80, 70, 60, 55, 50, 40, 10

_BINARY = {
    "add": ("+", SUM), "sub": ("-", SUM), "rsub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT),
    "rdiv": ("/", PRODUCT), "matmul": ("@", PRODUCT), "floor_divide": ("//", PRODUCT), "remainder": ("%", PRODUCT),
    "bitwise_and": ("&", AND), "bitwise_xor": ("^", XOR), "bitwise_or": ("|", OR), "lt": ("<", COMPARISON),
    "le": ("<=", COMPARISON), "gt": (">", COMPARISON), "ge": (">=", COMPARISON), "eq": ("==", COMPARISON),
    "ne": ("!=", COMPARISON),
}  # fmt: skip
_REFLECTED = {"rsub", "rdiv"}
_SIZE_METHODS = {"view", "reshape", "expand", "permute", "repeat"}
_DEFAULTS = {
    "scaled_dot_product_attention": {
        "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
    },
    "softmax": {"_stacklevel": 3, "dtype": None},
    "log_softmax": {"_stacklevel": 3, "dtype": None},
    "pad": {"mode": "constant", "value": None},
    "gelu": {"approximate": "none"},
    "linear": {"bias": None},
    "mean": {"dtype": None},
    "sum": {"dtype": None},
}  # fmt: skip


class Printer:
    """Prints operations; `value` names tensors, `size`, `dtype` and `device` name what follows the run.

    axes: set while printing, names of the mesh axes that were used. functions: of ours, that the file has to import.
    """

    def __init__(
        self,
        value: Callable[[fx.Node], Text],
        size: Callable[[Size | ShardSize], Text],
        prefix: Callable[[fx.Node, tuple], tuple[str, int]],
        dtype: Callable[[], str],
        device: Callable[[], str],
    ):
        self.value = value
        self.size = size
        self.prefix = prefix
        self.dtype = dtype
        self.device = device
        self.axes: set[str] = set()
        self.functions: set[str] = set()

    def operation(self, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Text:
        full = target_name(node)
        name = op_name(node.target)
        kwargs = drop_defaults(node, name, args, kwargs)
        if full.endswith(".__get__"):
            return Text(f"{self.value(args[0]).at(ATOM)}.{full.split('.')[-2]}", ATOM)
        if name == "getitem":
            return Text(f"{self.value(args[0]).at(ATOM)}[{self._index(args[1])}]", ATOM)
        if name in _BINARY and len(args) == 2 and not kwargs:
            left, right = (args[1], args[0]) if name in _REFLECTED else args
            sign, binding = _BINARY[name]
            compared = binding == COMPARISON  # chained comparisons mean something else
            return Text(f"{self.any(left).at(binding + compared)} {sign} {self.any(right).at(binding + 1)}", binding)
        if name in ("neg", "bitwise_not") and not kwargs and len(args) == 1:
            return Text(("-" if name == "neg" else "~") + self.value(args[0]).at(UNARY), UNARY)
        if name in ("pow", "__rpow__") and full.startswith("torch.Tensor.__"):
            base, exponent = args if name == "pow" else args[::-1]
            left, right = self.any(base).at(ATOM), self.any(exponent).at(UNARY)
            tight = _is_simple_power(left) and _is_simple_power(right)
            return Text(f"{left}**{right}" if tight else f"{left} ** {right}", POWER)
        if name == "to":
            args, kwargs = _without_device(node, args, kwargs)
        if full.startswith("torch.Tensor."):
            rest = args[1:]
            if name in _SIZE_METHODS:
                sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
                return Text(
                    f"{self.value(args[0]).at(ATOM)}.{name}({self._sizes(args[0], tuple(sizes), kwargs)})", ATOM
                )
            return Text(f"{self.value(args[0]).at(ATOM)}.{full.split('.')[-1]}({self._arguments(rest, kwargs)})", ATOM)
        return Text(f"{self._function(node, full)}({self._arguments(args, kwargs)})", ATOM)

    def _function(self, node: fx.Node, full: str) -> str:
        if full.startswith("torch.nn.functional."):
            return "F." + full.removeprefix("torch.nn.functional.")
        if getattr(node.target, "__module__", "").startswith("shardc.runtime"):
            self.functions.add(node.target.__name__)
            return node.target.__name__
        return full if full.startswith("torch.") else f"torch.{full}"

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> str:
        return ", ".join(
            [*(self.any(x).text for x in args), *(f"{key}={self.any(x).text}" for key, x in kwargs.items())]
        )

    def _sizes(self, operand: fx.Node, sizes: tuple, kwargs: dict[str, Any]) -> str:
        prefix, length = self.prefix(operand, sizes)
        rest = self._arguments(sizes[length:], kwargs)
        return ", ".join(part for part in (prefix, rest) if part)

    def any(self, item: Any) -> Text:
        """An argument: a tensor, a symbol, a container or a plain literal."""
        if isinstance(item, fx.Node):
            return self.value(item)
        if isinstance(item, (Size, ShardSize)):
            return self.size(item)
        if isinstance(item, Axis):
            self.axes.add(item.name)
            sub = item.name.partition(".")[2]
            return Text(f'self.tp.sub("{sub}")' if sub else f"self.{item.name}", ATOM)
        if item is MODEL_DTYPE:
            return Text(self.dtype(), ATOM)
        if item is DTYPE_MIN:
            return Text(f"torch.finfo({self.dtype()}).min", ATOM)
        if item is DEVICE:
            return Text(self.device(), ATOM)
        if item is TRAINING:
            return Text("self.training", ATOM)
        if isinstance(item, WhileTraining):
            return Text(f"{item.value!r} if self.training else 0.0", CONDITIONAL)
        if isinstance(item, (tuple, list)):
            inner = ", ".join(self.any(x).text for x in item)
            return Text(f"({inner},)" if len(item) == 1 else f"({inner})", ATOM)
        if isinstance(item, slice):
            return Text(f"slice({', '.join(self.any(x).text for x in (item.start, item.stop, item.step))})", ATOM)
        if item is Ellipsis:
            return Text("...", ATOM)
        return literal(item)

    def _index(self, index: Any) -> str:
        items = index if isinstance(index, tuple) else (index,)
        text = ", ".join(self._slice(x) if isinstance(x, slice) else self.any(x).text for x in items)
        return text

    def _slice(self, part: slice) -> str:
        start = None if part.start == 0 else part.start
        ends = [
            "" if x is None else self.any(x).text
            for x in ((start, part.stop) if part.step is None else (start, part.stop, part.step))
        ]
        if all(re.fullmatch(r"-?\w*", end) for end in ends):
            return ":".join(ends)
        return " : ".join(ends).strip(" ").replace("  ", " ") if ends[0] or len(ends) > 2 else f": {ends[1]}"


def literal(item: Any) -> Text:
    """A plain Python literal as source."""
    if isinstance(item, float) and item in (float("inf"), float("-inf")):
        return Text(f'float("{item}")', ATOM)
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return Text(repr(item), ATOM if item >= 0 else UNARY)
    if isinstance(item, str):
        return Text('"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"', ATOM)
    return Text(repr(item), ATOM)


def _is_simple_power(text: str) -> bool:
    return re.fullmatch(r"-?[\w.]+", text) is not None


def _without_device(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """`.to(device, dtype)` as `.to(dtype)`: every tensor of a run lies on one device."""
    args = (args[0], *(x for x in args[1:] if x is not DEVICE))
    kwargs = {key: x for key, x in kwargs.items() if x is not DEVICE}
    if len(args) == 1 and kwargs.keys() == {"dtype"}:
        return (args[0], kwargs["dtype"]), {}
    return args, kwargs


@functools.cache
def _signature_defaults(function: Callable) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def drop_defaults(node: fx.Node, name: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords that only repeat a default say nothing."""
    defaults = _DEFAULTS.get(name)
    if defaults is None:
        defaults = _signature_defaults(node.target) if target_name(node).startswith("torch.nn.functional.") else {}

    def is_default(key: str, x: Any) -> bool:
        if key not in defaults:
            return x is None and name != "where"
        return not isinstance(x, fx.Node) and type(x) is type(defaults[key]) and x == defaults[key]

    return {key: x for key, x in kwargs.items() if not is_default(key, x)}
