"""What stands in a node's arguments, as JSON: one sign at the front of a string tells the kind.

"%linear" a node   "$B*S+1" a size, "$S/tp" a rank's part of it   "@tp.kv" a mesh axis   "#training" a symbol
":torch.float32" a constant of torch   "'sum" a string   [..] a tuple   numbers, true, false, null: themselves
{"slice": [a, b, c]}, {"list": [..]}, {"device": "cpu"}, {"float": "inf"}, {"while_training": 0.1},
{"repeat": [representative, instance]}, {"ellipsis": null}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from shardc.capture import symbols
from shardc.capture.graph import Repeat
from shardc.capture.symbols import Axis, ShardSize, Size, Symbol, WhileTraining
from shardc.errors import ShardcError

_SYMBOLS = {symbol.name: symbol for symbol in vars(symbols).values() if isinstance(symbol, Symbol)}
_TORCH_KINDS = (torch.dtype, torch.memory_format, torch.layout)
_TERM = re.compile(r"([+-]?)(\d+)?\*?(B)?\*?(S)?")


def encode(item: Any) -> Any:
    """One argument as JSON. Raises TypeError for a kind that no captured graph holds."""
    if item is None or isinstance(item, (bool, int)):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"float": repr(item)}
    if isinstance(item, str):
        return f"'{item}"
    if isinstance(item, fx.Node):
        return f"%{item.name}"
    if isinstance(item, (Size, ShardSize)):
        return f"${item}"
    if isinstance(item, Axis):
        return f"@{item.name}"
    if isinstance(item, Symbol):
        return f"#{item.name}"
    if isinstance(item, _TORCH_KINDS):
        return f":{item}"
    if isinstance(item, tuple):
        return [encode(x) for x in item]
    return {**_encode_rare(item)}


def _encode_rare(item: Any) -> dict[str, Any]:
    if isinstance(item, list):
        return {"list": [encode(x) for x in item]}
    if isinstance(item, slice):
        return {"slice": [encode(item.start), encode(item.stop), encode(item.step)]}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    if isinstance(item, WhileTraining):
        return {"while_training": encode(item.value)}
    if isinstance(item, Repeat):
        return {"repeat": [item.representative, item.instance]}
    if item is Ellipsis:
        return {"ellipsis": None}
    raise TypeError(f"{type(item).__name__} has no form in a plan: {item!r}")


def decode(data: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """The argument that `encode` wrote. Raises ShardcError for what it never writes."""
    if data is None or isinstance(data, (bool, int, float)):
        return data
    if isinstance(data, list):
        return tuple(decode(x, nodes) for x in data)
    try:
        if isinstance(data, str):
            return _decode_text(data[0], data[1:], nodes)
        ((kind, content),) = data.items()
        return _decode_rare(kind, content, nodes)
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ShardcError(f"plan.json: {data!r} is no argument of a graph", "compile the plan again") from None


def _decode_text(sign: str, text: str, nodes: Mapping[str, fx.Node]) -> Any:
    if sign == "'":
        return text
    if sign == "%":
        return nodes[text]
    if sign == "$":
        return parse_size(text)
    if sign == "@":
        return Axis(text)
    if sign == "#":
        return _SYMBOLS[text]
    if sign == ":":
        constant = getattr(torch, text.removeprefix("torch."))
        if isinstance(constant, _TORCH_KINDS):
            return constant
    raise ValueError(text)


def _decode_rare(kind: str, content: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if kind == "list":
        return [decode(x, nodes) for x in content]
    if kind == "slice":
        return slice(*(decode(x, nodes) for x in content))
    if kind == "device":
        return torch.device(content)
    if kind == "while_training":
        return WhileTraining(decode(content, nodes))
    if kind == "repeat":
        return Repeat(*content)
    if kind == "float":
        return float(content)
    if kind == "ellipsis":
        return Ellipsis
    raise ValueError(kind)


def parse_size(text: str) -> Size | ShardSize:
    """The size that prints as `text`: "B", "2*B*S+1", "B*S-B", "S/tp"."""
    whole, slash, axis = text.partition("/")
    size = _parse_sum(whole)
    if not isinstance(size, Size):
        raise ValueError(text)
    return ShardSize(size, axis) if slash else size


def _parse_sum(text: str) -> Size | int:
    """A size, or the number that stands alone at the end of one."""
    match = _TERM.match(text)
    sign, number, batch, seq = match.groups()
    rest = text[match.end() :]
    if not (number or batch or seq) or (rest and rest[0] not in "+-"):
        raise ValueError(text)
    coefficient = int(f"{sign}{number or 1}")
    if batch or seq:
        return Size(coefficient, int(batch is not None), int(seq is not None), _parse_sum(rest) if rest else 0)
    if rest:
        raise ValueError(text)
    return coefficient
