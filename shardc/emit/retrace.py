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

from shardc.capture.graph import Value

_NOT_RECORDED = {"requires_grad_", "__repr__", "__format__"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation is written: the module that runs it and the line of its file."""

    path: str
    line: int


@dataclass(slots=True)
class Retrace:
    """Nodes hold meta["value"], a concrete `Value`, and meta["place"]; under `sharded_rng` also meta["rng_axis"]."""

    graph: fx.Graph
    outputs: dict[str, fx.Node]


def retrace(
    module: nn.Module, inputs: dict[str, torch.Tensor], output_names: tuple[str, ...], *, packed: bool
) -> Retrace:
    """Run `module(**inputs)` and record it; its outputs get `output_names`, those that are None are left out."""
    recorder = _Recorder(module)
    for name, tensor in inputs.items():
        recorder.bind(tensor, recorder.graph.placeholder(name))
    with recorder.sharded_streams(), recorder:
        out = module(**inputs, packed=packed)
    named = zip(output_names, out, strict=True)
    return Retrace(recorder.graph, {name: recorder.node(x) for name, x in named if isinstance(x, torch.Tensor)})


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.graph = fx.Graph()
        self.scope = type(module).forward.__globals__
        self.file = type(module).forward.__code__.co_filename
        self.root = type(module).__name__
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.names: dict[int, str] = {}
        for tensors in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
            for name, tensor in tensors:
                self.names.setdefault(id(tensor), name)
        self.node_of: dict[int, fx.Node] = {}
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

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        node.meta["value"] = Value(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        self.node_of[id(tensor)] = node
        self.keep.append(tensor)
        return node

    def node(self, tensor: torch.Tensor) -> fx.Node:
        found = self.node_of.get(id(tensor))
        if found is None:  # a parameter, or a tensor that the code made up: its name says that no plan has it
            found = self.bind(tensor, self.graph.create_node("get_attr", self.names.get(id(tensor), "a constant")))
        return found

    def _nodes(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self.node(item)
        if isinstance(item, (tuple, list)):
            return tuple(map(self._nodes, item))
        if isinstance(item, dict):
            return {key: self._nodes(x) for key, x in item.items()}
        return item

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        parts = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, (tuple, list)) else []
        if not any(isinstance(x, torch.Tensor) for x in parts) or getattr(func, "__name__", "") in _NOT_RECORDED:
            return out
        node = self.graph.create_node("call_function", func, self._nodes(args), self._nodes(kwargs))
        node.meta["place"] = self._place()
        if self.in_stream:
            node.meta["rng_axis"] = True
        if isinstance(out, torch.Tensor):
            out = self._fresh(out)
            self.bind(out, node)
            return out
        parts = [self._fresh(x) for x in parts]
        for i, part in enumerate(parts):
            getitem = self.graph.call_function(operator.getitem, (node, i))
            getitem.meta["place"] = node.meta["place"]
            self.bind(part, getitem)
        return tuple(parts)

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
