"""The data flow of one graph, read through the operations that provably return their operand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.overrides import resolve_name

from shardc.capture.graph import RANDOM_OPS, ModelGraph, Value, block_input, block_output, op_name, repeat_block
from shardc.capture.symbols import WhileTraining

ValueOf = Callable[[fx.Node], Value | None]


class Flow:
    """One graph: `nodes` are the operations that some output needs, in order; operands are read through no-ops.

    outputs: node of each output by name. block_outputs: for each representative block, the values that leave it.
    """

    def __init__(self, model: ModelGraph, outputs: dict[str, fx.Node] | None = None):
        self.model = model
        self._same: dict[fx.Node, fx.Node] = {}
        self.later_names: dict[fx.Node, str] = {}  # what the author called a value after a no-op
        self.block_outputs: dict[str, list[fx.Node]] = {}
        self.block_inputs: dict[str, list[fx.Node]] = {}
        self._args: dict[fx.Node, tuple[tuple, dict[str, Any]]] = {}
        self._made: dict[Any, fx.Node] = {}
        for node in model.graph.nodes:
            if node.op != "call_function":
                continue
            same = identity_of(node, self.args(node), self.kwargs(node), value_of)
            if same is not None:
                source = node.meta.get("source")
                if source is not None and source.name is not None:
                    self.later_names[same] = source.name
            else:
                same = self._computed_before(node)
            if same is not None:
                self._same[node] = same
            if node.target is block_output:
                self.block_outputs.setdefault(node.meta["call"].path, []).append(self.of(node))
            elif node.target is block_input:
                self.block_inputs.setdefault(node.meta["call"].path, []).append(node)
        self.outputs = {name: self.of(node) for name, node in (model.outputs if outputs is None else outputs).items()}
        self.nodes = self._needed()

    def _computed_before(self, node: fx.Node) -> fx.Node | None:
        """The same statement run again on the same operands: two masks are built from the same index tensors."""
        value, source = value_of(node), node.meta.get("source")
        if (
            value is None
            or source is None
            or value.requires_grad
            or node.target in (block_input, operator.getitem, repeat_block)
            or is_random(node)
        ):
            return None
        key = (node.meta["call"], source, node.target, repr((self.args(node), self.kwargs(node))))
        found = self._made.setdefault(key, node)
        return None if found is node else found

    def of(self, node: fx.Node) -> fx.Node:
        """The node that really computes the value of `node`."""
        return self._same.get(node, node)

    def args(self, node: fx.Node) -> tuple:
        return self._read(node)[0]

    def kwargs(self, node: fx.Node) -> dict[str, Any]:
        return self._read(node)[1]

    def _read(self, node: fx.Node) -> tuple[tuple, dict[str, Any]]:
        found = self._args.get(node)
        if found is None:
            found = (fx.node.map_arg(node.args, self.of), dict(fx.node.map_arg(node.kwargs, self.of)))
            self._args[node] = found
        return found

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Tensors that the node reads, one entry a use, in the order in which they are written."""
        found: list[fx.Node] = []
        fx.node.map_arg((self.args(node), self.kwargs(node)), lambda x: found.append(x) or x)
        return found

    def _needed(self) -> list[fx.Node]:
        unused: set[fx.Node] = set()  # block inputs that nothing in their block reads
        while True:
            wanted = set(self.outputs.values())
            kept = []
            for node in reversed(self.model.graph.nodes):
                if node in wanted:
                    kept.append(node)
                    if node.target is repeat_block:
                        wanted.update(self.block_outputs[node.args[0].representative])
                        inputs = self.block_inputs.get(node.args[0].representative, ())
                        actuals = zip(self.args(node)[1:], inputs, strict=True)
                        wanted.update(actual for actual, formal in actuals if formal not in unused)
                    elif node.op == "call_function":
                        wanted.update(self.operands(node))
            more = {node for formals in self.block_inputs.values() for node in formals if node not in wanted} - unused
            if not more:
                return kept[::-1]
            unused |= more


def value_of(node: fx.Node) -> Value | None:
    return node.meta.get("value")


def target_name(node: fx.Node) -> str:
    """`torch.nn.functional.silu`, `torch.Tensor.mT.__get__`, or a function of ours by its plain name."""
    found = _TARGET_NAMES.get(node.target)
    if found is None:
        found = _TARGET_NAMES[node.target] = resolve_name(node.target) or node.target.__name__
    return found


_TARGET_NAMES: dict[Callable, str] = {}


def identity_of(node: fx.Node, args: tuple, kwargs: dict[str, Any], value_of: ValueOf) -> fx.Node | None:
    """The operand that `node` returns unchanged, bit for bit and with the same gradient; None if it computes something.

    args, kwargs: of the node, read through earlier no-ops. `contiguous` is never one: it may copy.
    """
    if node.target is block_output:
        return args[0]
    if not args or not isinstance(args[0], fx.Node) or node.target in (block_input, repeat_block):
        return None
    first, name = args[0], op_name(node.target)
    before, after = value_of(node.args[0]), value_of(node)
    if before is None or after is None:
        return None
    same_value = before.shape == after.shape and before.dtype == after.dtype
    if name in ("view", "reshape", "expand", "float", "long", "bool", "type_as"):
        return first if same_value or (name == "expand" and _is_broadcast_anyway(node, value_of)) else None
    if name == "to":
        plain = not kwargs.keys() - {"device", "dtype", "non_blocking"} and all(
            not isinstance(a, bool) for a in args[1:]
        )
        return first if same_value and plain else None
    if name in ("mul", "div"):
        return first if same_value and len(args) == 2 and _is_number(args[1], 1) and not kwargs else None
    if name in ("add", "sub"):
        whole = isinstance(before.dtype, torch.dtype) and not before.dtype.is_floating_point
        return first if same_value and whole and len(args) == 2 and _is_number(args[1], 0) and not kwargs else None
    if name == "dropout":
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        return first if p in (0.0, WhileTraining(0.0)) or training is False else None
    if node.target is torch.Tensor.__getitem__ and same_value:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return first if all(_is_all(i) for i in index) else None
    if name == "bitwise_and" and len(args) == 2 and isinstance(args[1], fx.Node):
        for one, other in ((first, args[1]), (args[1], first)):
            if _is_true_scalar(one) and value_of(other) == after:
                return other
    return None


def _is_broadcast_anyway(node: fx.Node, value_of: ValueOf) -> bool:
    """Whether all that reads an `expand` is a matmul that would repeat the operand itself.

    `freqs = inv_freq.expand(batch, -1, 1) @ positions` multiplies a table by the positions of each row; where there is
    one row of positions nothing is expanded, and one text must serve both.
    """
    before, after = value_of(node.args[0]), value_of(node)
    if before is None or after is None or len(before.shape) != len(after.shape) or len(after.shape) < 3:
        return False
    changed = [d for d, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
    if any(d >= len(after.shape) - 2 for d in changed):
        return False
    return _feeds_only_products(node, changed, value_of)


def _feeds_only_products(node: fx.Node, changed: list[int], value_of: ValueOf) -> bool:
    """Whether all that reads a value, also through casts that change nothing, is a matmul that repeats `changed`."""
    for user in node.users:
        if user.op != "call_function":
            return False
        name, before, after = op_name(user.target), value_of(node), value_of(user)
        is_cast = name in ("to", "float") and after is not None
        if is_cast and (after.shape, after.dtype) == (before.shape, before.dtype):
            if not _feeds_only_products(user, changed, value_of):
                return False
        elif name != "matmul" or not _matmul_repeats(user, node, changed, value_of):
            return False
    return True


def _matmul_repeats(matmul: fx.Node, operand: fx.Node, changed: list[int], value_of: ValueOf) -> bool:
    """Whether the other factor of a product has the dims that `operand` lacks before its `expand`."""
    other = next((x for x in matmul.args if isinstance(x, fx.Node) and x is not operand), None)
    mine, theirs = value_of(operand), value_of(other) if other is not None else None
    return (
        theirs is not None
        and len(theirs.shape) == len(mine.shape)
        and all(theirs.shape[d] == mine.shape[d] for d in changed)
    )


def _is_number(x: Any, number: int) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x == number


def _is_all(index: Any) -> bool:
    return index is Ellipsis or (
        isinstance(index, slice) and index.start in (None, 0) and index.stop is None and index.step in (None, 1)
    )


def _is_true_scalar(node: fx.Node) -> bool:
    """`x.new_ones((), dtype=torch.bool)`: what transformers' mask functions start from."""
    return (
        node.op == "call_function"
        and op_name(node.target) == "new_ones"
        and node.args[1:] == ((),)
        and node.kwargs.get("dtype") is torch.bool
    )


def is_projection(node: fx.Node) -> bool:
    """Item `i` of an operation that returns several tensors."""
    return node.target is operator.getitem


def is_random(node: fx.Node) -> bool:
    """Whether the operation draws random numbers while it trains, so that its place among such operations matters."""
    if op_name(node.target) == "scaled_dot_product_attention":
        return node.kwargs.get("dropout_p", 0.0) not in (0.0, None)
    return op_name(node.target) in RANDOM_OPS
