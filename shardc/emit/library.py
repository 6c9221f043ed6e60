"""Module calls that are one of torch's own layers, or one of the runtime's: they stay a call of that layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from shardc.capture.graph import op_name
from shardc.capture.symbols import TRAINING
from shardc.emit.expressions import drop_defaults, literal
from shardc.emit.flow import target_name, value_of
from shardc.emit.frames import Frame, Op
from shardc.emit.sizes import size_text

_ACTIVATIONS = {"silu": "SiLU", "relu": "ReLU", "gelu": "GELU"}


def library_layer(frames: Sequence[Frame]) -> tuple[str, str | None] | None:
    """(constructor call, runtime class to import) if the module is exactly one known layer in all its calls.

    Its parameters are all trained, or all frozen."""
    found = {_one(frame) for frame in frames}
    layer = found.pop() if len(found) == 1 else None
    trained = {trains for frame in frames for trains in _trained(frame)}
    if layer is None or len(trained) > 1:
        return None
    return (f"{layer[0]}.requires_grad_(False)", layer[1]) if trained == {False} else layer


def _trained(frame: Frame) -> list[bool]:
    """Of each parameter that the frame reads, whether it is trained."""
    nodes = {node for item in frame.items for node in item.operands if node.op == "get_attr"}
    return [value_of(node).requires_grad for node in nodes]


def _one(frame: Frame) -> tuple[str, str | None] | None:
    if not all(isinstance(item, Op) for item in frame.items) or len(frame.formals) != 1 or len(frame.results) != 1:
        return None
    nodes = [item.node for item in frame.items]
    if not nodes or nodes[-1] is not frame.results[0]:
        return None
    names = [op_name(node.target) for node in nodes]
    first = nodes[0]
    args, kwargs = frame.flow.args(first), frame.flow.kwargs(first)
    if not args or args[0] is not frame.formals[0]:
        return None
    if names == ["linear"] and issubclass(frame.call.module_class, nn.Linear):
        return _linear(frame, args, kwargs)
    if names[0] == "linear" and issubclass(frame.call.module_class, nn.Linear):
        return _row_linear(frame, nodes, names, args, kwargs)
    if len(nodes) > 1:
        return None
    if names == ["embedding"] and issubclass(frame.call.module_class, nn.Embedding):
        return _embedding(frame, args, drop_defaults(first, "embedding", args, kwargs))
    if names == ["vocab_embedding"]:
        return _vocab_embedding(frame, args, kwargs)
    if names == ["layer_norm"] and issubclass(frame.call.module_class, nn.LayerNorm):
        return _layer_norm(frame, args, kwargs)
    if names == ["dropout"] and kwargs.get("training") is TRAINING:
        return f"nn.Dropout({kwargs.get('p')!r})", None
    if names[0] in _ACTIVATIONS and target_name(first).startswith("torch.nn.functional."):
        rest = drop_defaults(first, names[0], args, kwargs)
        if len(args) == 1 and not rest.keys() - {"approximate"}:
            inner = ", ".join(f"{key}={literal(x).text}" for key, x in rest.items())
            return f"nn.{_ACTIVATIONS[names[0]]}({inner})", None
    return None


def _is_own(frame: Frame, node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and frame.parameter(node) == name


def _weights(frame: Frame, weight: Any, bias: Any) -> tuple[int, ...] | None:
    """Local shape of the weight if both are the module's own."""
    if not _is_own(frame, weight, "weight") or not (bias is None or _is_own(frame, bias, "bias")):
        return None
    return tuple(value_of(weight).shape)


def _linear(frame: Frame, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str | None] | None:
    weight, bias = (*args[1:], None)[:2] if len(args) > 2 else (args[1], kwargs.get("bias"))
    shape = _weights(frame, weight, bias)
    if shape is None:
        return None
    return f"nn.Linear({size_text(shape[1])}, {size_text(shape[0])}{', bias=False' if bias is None else ''})", None


def _row_linear(
    frame: Frame, nodes: list[fx.Node], names: list[str], args: tuple, kwargs: dict[str, Any]
) -> tuple[str, str | None] | None:
    if (
        names[1] not in ("all_reduce", "reduce_scatter")
        or names[2:] not in ([], ["add"])
        or (len(args) > 2 and args[2] is not None)
    ):
        return None
    bias = frame.flow.args(nodes[2])[1] if len(nodes) == 3 else None
    shape = _weights(frame, args[1], bias)
    if shape is None or kwargs.get("bias") is not None:
        return None
    given = frame.flow.kwargs(nodes[1])
    rest = frame.flow.args(nodes[1])[2:]
    scatter = f", scatter_dim={given['dim'] if 'dim' in given else rest[0]}" if names[1] == "reduce_scatter" else ""
    return f"RowLinear({shape[1]}, {shape[0]}, tp{', bias=False' if bias is None else ''}{scatter})", "RowLinear"


def _embedding(frame: Frame, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str | None] | None:
    shape = _weights(frame, args[1], None)
    padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
    if shape is None or kwargs.keys() - {"padding_idx"} or any(x is not None for x in args[3:]):
        return None
    return f"nn.Embedding({shape[0]}, {shape[1]}{'' if padding is None else f', padding_idx={padding}'})", None


def _vocab_embedding(frame: Frame, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str | None] | None:
    given = dict(zip(("ids", "weight", "axis", "num_embeddings", "padding_idx"), args, strict=False)) | kwargs
    shape = _weights(frame, given["weight"], None)
    if shape is None:
        return None
    padding = given.get("padding_idx")
    last = "" if padding is None else f", padding_idx={padding}"
    return f"VocabEmbedding({given['num_embeddings']}, {shape[1]}, tp{last})", "VocabEmbedding"


def _layer_norm(frame: Frame, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str | None] | None:
    given = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
    weight, bias = given.get("weight"), given.get("bias")
    if (
        weight is None
        or _weights(frame, weight, bias) is None
        or given["normalized_shape"] != tuple(value_of(weight).shape)
    ):
        return None
    shape = given["normalized_shape"]
    size = str(shape[0]) if len(shape) == 1 else str(shape)
    eps = given.get("eps", 1e-5)
    return (
        f"nn.LayerNorm({size}{'' if eps == 1e-5 else f', eps={eps!r}'}{'' if bias is not None else ', bias=False'})",
        None,
    )
