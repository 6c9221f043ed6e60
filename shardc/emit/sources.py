"""Where a printed literal that follows the run comes from: a tensor in scope with that size, dtype or device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from shardc.capture.graph import op_name
from shardc.capture.symbols import DEVICE, DTYPE_MIN, MODEL_DTYPE, ShardSize, Size
from shardc.emit.author import names_in
from shardc.emit.flow import Flow, value_of
from shardc.emit.frames import ChildCall, Frame, Op, actual_of, order_formals
from shardc.errors import ShardcError

Need = Size | ShardSize | str  # a size, or "dtype" or "device"


def needs_of(flow: Flow, node: fx.Node) -> list[Need]:
    """What the printed form of an operation has to read off other tensors."""
    found: dict[Need, None] = {}
    drops_device = op_name(node.target) == "to"  # all tensors of a batch lie on one device

    def note(item: Any) -> None:
        if isinstance(item, (tuple, list)):
            for x in item:
                note(x)
        elif isinstance(item, slice):
            note((item.start, item.stop, item.step))
        elif isinstance(item, (Size, ShardSize)):
            found[item] = None
        elif item is MODEL_DTYPE or item is DTYPE_MIN:
            found["dtype"] = None
        elif item is DEVICE and not drops_device:
            found["device"] = None

    note(flow.args(node))
    note(tuple(flow.kwargs(node).values()))
    return list(found)


def gives(node: fx.Node, need: Need) -> bool:
    """Whether the tensor shows what is needed."""
    value = value_of(node)
    if value is None:
        return False
    if need == "device":
        return True
    if need == "dtype":
        return value.dtype is MODEL_DTYPE
    return need in value.shape


def parts_of(need: Need) -> list[Need]:
    """The plain sizes that a composite size is computed from: B*S+1 from B and S."""
    if isinstance(need, Size) and (need.coefficient, need.offset, need.batch + need.seq) != (1, 0, 1):
        return [Size(1, 1, 0)] * bool(need.batch) + [Size(1, 0, 1)] * bool(need.seq)
    return [need]


def gathered(need: Need, node: fx.Node) -> str | None:
    """The axis over which the tensor's dim has to be multiplied to give the need: S from S/tp, which is always even."""
    value = value_of(node)
    dims = value.shape if value is not None else ()
    return next((dim.axis for dim in dims if isinstance(dim, ShardSize) and dim.size == need), None)


def may_be_missing(node: fx.Node) -> bool:
    """Whether the tensor is None in a run that only wants logits."""
    return node.op == "placeholder" and node.target in ("labels", "num_targets")


def is_met(need: Need, visible: Iterable[fx.Node]) -> bool:
    visible = list(visible)
    return (
        any(gathered(need, x) for x in visible)
        or any(gives(x, need) for x in visible)
        or (parts_of(need) != [need] and all(any(gives(x, part) for x in visible) for part in parts_of(need)))
    )


def add_missing_sources(root: Frame) -> None:
    """Pass to each module the tensors that it reads only for their size, dtype or device: uses like any other."""
    for frame, visible in _frames_with_scope(root):
        here = list(frame.formals)
        for item in frame.items:
            if isinstance(item, Op):
                scope = [x for x in here if not may_be_missing(x)] + item.operands
                for need in needs_of(frame.flow, item.node):
                    if need == "dtype":
                        scope += [x for x in frame.flow.nodes if x.op == "get_attr" and frame.parameter(x)]
                    for part in [need] if is_met(need, scope) else parts_of(need):
                        if not is_met(part, scope):
                            here.append(_add_formal(frame, part, visible))
                            scope.append(here[-1])
            here.extend(item.outputs)


def _frames_with_scope(frame: Frame) -> Iterable[tuple[Frame, list[fx.Node]]]:
    """Each frame once, callers first, with what its caller has in scope when it is called."""
    yield frame, list(frame.flow.model.inputs.values())
    done = set()
    scope = list(frame.formals)
    for item in list(frame.items):
        if isinstance(item, ChildCall) and item.repeat is None and item.frame not in done:
            done.add(item.frame)
            for inner, visible in _frames_with_scope(item.frame):
                yield inner, list(scope) if inner is item.frame else visible
        scope = list(dict.fromkeys([*frame.formals, *scope]))
        scope.extend(item.outputs)


def _add_formal(frame: Frame, need: Need, visible: list[fx.Node]) -> fx.Node:
    named = [frame.flow.of(node) for node in frame.call.argument_names]
    in_scope = set(visible)
    inputs = frame.flow.model.inputs.values()
    order = [x for x in (*(n for n in named if n in in_scope), *visible, *inputs) if not may_be_missing(x)]
    chosen = next((x for x in order if gives(x, need)), None) or next((x for x in order if gathered(need, x)), None)
    if chosen is None:
        raise ShardcError(
            f"{frame.path or 'the model'}: no tensor in scope shows {need}, which the emitted code has to write",
            "pass a tensor of that size or dtype to the module",
        )
    _pass_down(frame, chosen)
    return chosen


def _pass_down(frame: Frame, value: fx.Node) -> None:
    """Make `value` a formal of the frame, and of its callers up to the one that makes it."""
    if value in frame.formals:
        return
    if frame.argument_name(value) is None:
        taken = {*(frame.argument_name(node) for node in frame.formals), *frame.call.options}
        free = [name for name in names_in(frame.call.module_class).required if name not in taken]
        if free and frame.parent is not None and value_of(value).dtype is MODEL_DTYPE:
            frame.added_names[value] = free[0]
    frame.formals = order_formals(frame, [*frame.formals, value])
    if frame.parent is None:
        return
    if not any(value in item.outputs for item in frame.parent.items) and frame.parent.parameter(value) is None:
        _pass_down(frame.parent, value)
    for item in frame.parent.items:
        if isinstance(item, ChildCall) and item.frame is frame:
            item.actuals = [actual_of(item, formal, frame.flow) for formal in frame.formals]
