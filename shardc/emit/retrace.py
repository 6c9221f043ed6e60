"""Record what an emitted module computes for one concrete batch on meta tensors, with the line of each operation."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from shardc.capture.graph import Value, op_name
from shardc.capture.memo import Concrete, Made, NotPlain, Signature, flatten
from shardc.capture.writes import writes_in_place
from shardc.emit.unseen import Unseen
from shardc.runtime.mesh import MeshAxis

_NOT_RECORDED = {"__repr__", "__format__"}
# What changes a value, or a gradient, behind the back of the operations that are recorded.
_HIDDEN = frozenset({"__set__", "__delete__", "register_hook", "register_post_accumulate_grad_hook", "backward"})

Memo = dict[Any, Signature]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation is written: the module that runs it and the line of its file."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path} (model.py:{self.line})"


@dataclass(slots=True)
class Retrace:
    """Nodes hold meta["value"], a concrete `Value`, and meta["place"]; under `sharded_rng` also meta["rng_axis"].

    meta["like"] is one object for operations that differ only in which nodes they read, meta["operands"] are these."""

    nodes: list[fx.Node]
    outputs: dict[str, fx.Node]


def retrace(
    module: nn.Module, inputs: dict[str, torch.Tensor], output_names: tuple[str, ...], *, packed: bool, memo: Memo
) -> Retrace:
    """Run `module(**inputs)` and record it; its outputs get `output_names`, those that are None are left out.

    memo: what operations return, shared by runs. Every line of every layer runs each time, only the same operation on
    tensors of the same kind is not computed again. Raises Unseen for what a record of operations does not show:
    in-place writes, hooks, autocast, an autograd function with a backward of its own."""
    recorder = _Recorder(module, memo)
    for name, tensor in inputs.items():
        recorder.bind(tensor, recorder.add("placeholder", name))
    recorder.refuse_hooks(module)
    with recorder.sharded_streams(), recorder.contexts_refused(), recorder:
        out = module(**inputs, packed=packed)
    named = zip(output_names, out, strict=True)
    return Retrace(recorder.nodes, {name: recorder.node(x) for name, x in named if isinstance(x, torch.Tensor)})


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, memo: Memo):
        super().__init__()
        self.memo = memo
        self.graph = fx.Graph()  # owner of the nodes, which stand in a list: it would name each and look at its place
        self.nodes: list[fx.Node] = []
        self.scope = type(module).forward.__globals__
        self.file = type(module).forward.__code__.co_filename
        self.root = type(module).__name__
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.names: dict[int, str] = {}
        for tensors in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
            for name, tensor in tensors:
                self.names.setdefault(id(tensor), name)
        self.node_of: dict[int, fx.Node] = {}
        self.concrete_of: dict[int, Concrete] = {}
        self.keep: list[torch.Tensor] = []  # an id stays unique only while its tensor lives
        self.in_stream = 0

    @contextlib.contextmanager
    def sharded_streams(self) -> Iterator[None]:
        """While the module runs, its `sharded_rng` only marks the operations inside."""
        before = self.scope.get("sharded_rng")
        self.scope["sharded_rng"] = self._stream
        try:
            yield
        finally:
            self.scope["sharded_rng"] = before
            if before is None:
                del self.scope["sharded_rng"]

    @contextlib.contextmanager
    def _stream(self, axis: object) -> Iterator[None]:
        self.in_stream += 1
        try:
            yield
        finally:
            self.in_stream -= 1

    def refuse_hooks(self, module: nn.Module) -> None:
        """Hooks that were set while the module was built would change gradients unseen."""
        hooked = [path for path, child in module.named_modules() if child._backward_hooks or child._backward_pre_hooks]
        hooked += [name for name, parameter in module.named_parameters() if parameter._backward_hooks]
        if hooked:
            raise Unseen("model.py", f"{hooked[0] or self.root} has a backward hook")

    @contextlib.contextmanager
    def contexts_refused(self) -> Iterator[None]:
        """Autocast changes dtypes on another device than this; an autograd function has a backward of its own."""
        enter, apply = torch.autocast.__enter__, torch.autograd.Function.__dict__["apply"]

        def refused_enter(context: torch.autocast) -> None:
            raise Unseen(self._place(), "runs under autocast")

        def checked_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            if not cls.__module__.startswith(("torch.", "shardc.runtime.")):
                raise Unseen(self._place(), f"calls the autograd function {cls.__name__}")
            return apply.__get__(None, cls)(*args, **kwargs)

        torch.autocast.__enter__, torch.autograd.Function.apply = refused_enter, classmethod(checked_apply)
        try:
            yield
        finally:
            torch.autocast.__enter__, torch.autograd.Function.apply = enter, apply

    def add(self, op: str, target: Any, args: tuple = (), kwargs: dict | None = None) -> fx.Node:
        node = fx.Node(self.graph, f"node_{len(self.nodes)}", op, target, args, kwargs or {})
        self.nodes.append(node)
        return node

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        concrete = self.concrete_of.get(id(tensor))
        if concrete is None:
            concrete = self.concrete_of[id(tensor)] = Concrete.of(tensor)
            self.keep.append(tensor)
        node.meta["value"] = Value(concrete.shape, concrete.dtype, concrete.requires_grad)
        self.node_of[id(tensor)] = node
        return node

    def concrete(self, tensor: torch.Tensor) -> Concrete:
        found = self.concrete_of.get(id(tensor))
        if found is None:
            self.node(tensor)
            found = self.concrete_of[id(tensor)]
        return found

    def node(self, tensor: torch.Tensor) -> fx.Node:
        found = self.node_of.get(id(tensor))
        if found is None:  # a parameter, or a tensor that the code made up: its name says that no plan has it
            found = self.bind(tensor, self.add("get_attr", self.names.get(id(tensor), "a constant")))
        return found

    def _operands(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self.node(item)
        if isinstance(item, (tuple, list)):
            return tuple(map(self._operands, item))
        if isinstance(item, dict):
            return {key: self._operands(x) for key, x in item.items()}
        return item

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _NOT_RECORDED:
            return func(*args, **kwargs)
        if name in _HIDDEN or writes_in_place(name, kwargs):
            raise Unseen(self._place(), f"{op_name(func)} changes what is already computed")
        operands: list[torch.Tensor] = []
        key = None if name == "__get__" else self._key(func, args, kwargs, operands)
        known = self.memo.get(key) if key is not None else None
        if known is None:
            out = func(*args, **kwargs)
            tensors = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, torch.Tensor)]
            if not tensors:
                return out
            known = Signature.of(func, (), {}, out, [])
            if key is None or not all(x.is_meta for x in tensors):
                return self._record(func, args, kwargs, out)[0]
            self.memo[key] = known
        made = [self._make(x.concrete) if isinstance(x, Made) else x for x in known.made]
        out, node = self._record(func, args, kwargs, made[0] if known.kind is None else made)
        node.meta["like"] = known
        node.meta["operands"] = [self.node(x) for x in operands]
        return out

    def _make(self, concrete: Concrete) -> torch.Tensor:
        tensor = concrete.make()
        self.concrete_of[id(tensor)] = concrete
        self.keep.append(tensor)
        return tensor

    def _key(self, func: Callable, args: tuple, kwargs: dict, operands: list[torch.Tensor]) -> Any:
        """Equal for calls that return tensors of the same kind; None where that cannot be said. Lists the operands."""

        def plain(x: Any) -> Any:
            return x if isinstance(x, MeshAxis) else flatten(x, operands, self.concrete)

        try:
            return (
                func,
                torch.is_grad_enabled(),
                torch.get_default_dtype(),
                *[plain(x) for x in args],
                *[(key, plain(x)) for key, x in kwargs.items()],
            )
        except NotPlain:
            return None

    def _record(self, func: Callable, args: tuple, kwargs: dict, out: Any) -> tuple[Any, fx.Node]:
        """What a call returned, as tensors that no other node has, and its node."""
        node = self.add("call_function", func, self._operands(args), self._operands(kwargs))
        node.meta["place"] = self._place()
        if self.in_stream:
            node.meta["rng_axis"] = True
        if isinstance(out, torch.Tensor):
            out = self._fresh(out)
            self.bind(out, node)
            return out, node
        parts = [self._fresh(x) if isinstance(x, torch.Tensor) else x for x in out]
        for i, part in enumerate(parts):
            if isinstance(part, torch.Tensor):
                getitem = self.add("call_function", operator.getitem, (node, i))
                getitem.meta["place"] = node.meta["place"]
                self.bind(part, getitem)
        return tuple(parts), node

    def _fresh(self, out: torch.Tensor) -> torch.Tensor:
        """A no-op returns its operand: alias it, or two values become one."""
        if id(out) not in self.node_of and id(out) not in self.names:
            return out
        with torch._C.DisableTorchFunction():
            return torch.ops.aten.alias.default(out)

    def _place(self) -> Place:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        if frame is None:
            return Place(self.root, 0)
        path = self.paths.get(id(frame.f_locals.get("self")), "")
        return Place(path or self.root, frame.f_lineno)
