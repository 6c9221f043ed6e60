"""Run a model once on meta tensors and record what it computes."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from shardc.capture.graph import Call, Repeat, Source, block_input, block_output, op_name, repeat_block
from shardc.capture.source import running_statement
from shardc.errors import ShardcError

_HOST_READS = {"__bool__", "item", "tolist", "__int__", "__float__", "__index__", "numpy", "equal", "allclose", "is_nonzero"}
_NOT_RECORDED = {"requires_grad_", "register_hook", "retain_grad", "__repr__", "__format__", "backward"}


@dataclass(frozen=True, slots=True)
class Concrete:
    """Shape, dtype and requires_grad of a tensor in one run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(eq=False, slots=True)
class BlockCall:
    """One call of a ModuleList element: what entered (`actuals` became `inputs`), its nodes, what left it."""

    path: str
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    first: int
    last: int = 0
    output_tree: Any = None
    skeleton: Any = None  # arguments with tensors replaced by their `Concrete`

    @property
    def actuals(self) -> list[fx.Node]:
        return [node.args[0] for node in self.inputs]


@dataclass(slots=True)
class Trace:
    """One recorded run: literals are those of this run, `meta["concrete"]` holds shapes."""

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    blocks: list[BlockCall] = field(default_factory=list)
    guards: list[tuple[frozenset[str], Source | None]] = field(default_factory=list)


class _Recorder(TorchFunctionMode):
    """Records each torch-level call as one node, so that kernels such as `linear` stay whole."""

    def __init__(self, root: nn.Module, answers: dict[str, bool], same_block: dict[str, str]):
        super().__init__()
        self.root = root
        self.answers = answers
        self.same_block = same_block
        self.trace = Trace(fx.Graph(), {}, {})
        self.nodes: list[fx.Node] = []
        self.node_of: dict[int, fx.Node] = {}
        self.keep: list[torch.Tensor] = []  # an id stays unique only while its tensor lives
        self.paths = {id(module): path for path, module in root.named_modules()}
        self.block_paths = {
            f"{path}.{i}" if path else str(i)
            for path, module in root.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) > 1
            for i in range(len(module))
        }
        self.block: BlockCall | None = None
        self.call = Call("", type(root), None)
        self.tensor_names = canonical_names(root)

    # -- nodes ---------------------------------------------------------------------------------------------------
    def add(self, op: str, target: Any, args: tuple = (), kwargs: dict | None = None, name: str | None = None) -> fx.Node:
        node = self.trace.graph.create_node(op, target, args, kwargs or {}, name=name)
        node.meta["call"] = self.call
        self.nodes.append(node)
        return node

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        node.meta["concrete"] = Concrete(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        self.node_of[id(tensor)] = node
        self.keep.append(tensor)
        return node

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node that made a tensor; a parameter or buffer gets its node on first use."""
        node = self.node_of.get(id(tensor))
        if node is None:
            name = self.tensor_names.get(id(tensor))
            if name is None:
                raise ShardcError(
                    f"{self.call.path or 'the model'}: a tensor of shape {tuple(tensor.shape)} is neither an input, nor a parameter, nor "
                    f"computed in forward ({running_statement()})",
                    "register it as a buffer, or compute it in forward",
                )
            node = self.bind(tensor, self.add("get_attr", name, name=name.replace(".", "_")))
        return node

    def _to_nodes(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self.node(item)
        if isinstance(item, (tuple, list)):
            return tuple(self._to_nodes(x) for x in item)
        if isinstance(item, dict):
            return {key: self._to_nodes(x) for key, x in item.items()}
        if isinstance(item, slice):
            return slice(self._to_nodes(item.start), self._to_nodes(item.stop), self._to_nodes(item.step))
        return item

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if name in _HOST_READS:
            return self._host_read(func, name, args)
        out = func(*args, **kwargs)
        is_tensor = isinstance(out, torch.Tensor)
        if (not is_tensor and not _has_tensor(out)) or name in _NOT_RECORDED:
            return out
        source = running_statement()
        if kwargs.get("inplace") is True or (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__"):
            return self._write(func, name, args, kwargs, source)
        node = self.add("call_function", func, self._to_nodes(args), self._to_nodes(kwargs), name=source.name if source else None)
        node.meta["source"] = source
        if is_tensor:
            out = self._fresh(out, args)
            self.bind(out, node)
            return out
        items = []
        for i, item in enumerate(out):
            if isinstance(item, torch.Tensor):
                item = self._fresh(item, args)
                part = self.add("call_function", operator.getitem, (node, i))
                part.meta["source"] = source
                self.bind(item, part)
            items.append(item)
        return type(out)(items) if type(out) in (tuple, list) else type(out)(tuple(items))

    def _fresh(self, out: torch.Tensor, args: tuple) -> torch.Tensor:
        """A no-op (`.to` the same dtype, dropout in eval) returns its own operand: alias it, or the two values become one."""
        return _alias(out) if id(out) in self.node_of or id(out) in self.tensor_names else out

    def _write(self, func: Callable, name: str, args: tuple, kwargs: dict, source: Source | None) -> torch.Tensor:
        """An in-place operation makes a new version of its first operand: later reads see this node."""
        target = args[0]
        if name == "__setitem__" or target._is_view() or any(t._base is target for t in self.keep if t._is_view()):
            raise ShardcError(
                f"{self.call.path or 'the model'}: in-place write to a view by {name} ({source})",
                "compute a new tensor instead, for example with torch.where or masked_fill",
            )
        out_of_place = _out_of_place(func, name)
        inputs = self._to_nodes(args)
        kwargs = {key: value for key, value in self._to_nodes(kwargs).items() if key != "inplace"}
        node = self.add("call_function", out_of_place, inputs, kwargs, name=source.name if source else None)
        node.meta["source"] = source
        self.bind(target, node)
        return target

    # -- what is not a graph --------------------------------------------------------------------------------------
    def _host_read(self, func: Callable, name: str, args: tuple) -> Any:
        """A value read by Python: concrete if it follows from sizes alone, a guard if a boolean of the inputs."""
        node = self.node(args[0])
        source = running_statement()
        origins = _origins(node)
        inputs = frozenset(n.target for n in origins if n.op == "placeholder")
        if any(n.op == "get_attr" for n in origins):
            raise ShardcError(
                f"{self.call.path or 'the model'}: reads the value of a parameter or buffer on the host ({source})",
                "mark the module `opaque`, or rewrite the line without .item(), bool() or tolist()",
            )
        if not inputs:
            return func(_evaluate(node))
        self.trace.guards.append((inputs, source))
        known = [self.answers[i] for i in sorted(inputs) if i in self.answers]
        if name != "__bool__" or not known:
            raise ShardcError(
                f"{self.call.path or 'the model'}: reads values of {', '.join(sorted(inputs))} on the host ({source})",
                "only booleans of attention_mask and position_ids can be guards; pass this input as a plain Python value instead",
            )
        return known[0]

    # -- module calls ----------------------------------------------------------------------------------------------
    def call_module(self, original: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        path = self.paths.get(id(module))
        if path is None or module is self.root:
            return original(module, *args, **kwargs)
        previous, self.call = self.call, Call(path, type(module), self.call)
        is_block = self.block is None and path in self.block_paths
        try:
            if is_block:
                return self._call_block(original, module, path, args, kwargs)
            self._name_arguments(module, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self.call = previous

    def _name_arguments(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        names = _argument_names(type(module))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor) and id(value) in self.node_of:
                self.call.argument_names[self.node_of[id(value)]] = name
            elif isinstance(value, (str, int, bool)):
                self.call.options[name] = value

    def _call_block(self, original: Callable, module: nn.Module, path: str, args: tuple, kwargs: dict) -> Any:
        skeleton = _map_tensors((args, kwargs), lambda t: Concrete(tuple(t.shape), t.dtype, t.requires_grad))
        actuals: list[torch.Tensor] = []
        _map_tensors((args, kwargs), actuals.append)
        twin = next((b for b in self.trace.blocks if self._is_twin(b, path, skeleton)), None)
        if twin is not None:
            return self._repeat(twin, path, actuals)

        block = self.block = BlockCall(path, [], [], first=len(self.nodes), skeleton=skeleton)

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            alias = _alias(tensor)
            block.inputs.append(self.bind(alias, self.add("call_function", block_input, (self.node(tensor),))))
            return alias

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            alias = _alias(tensor)
            block.outputs.append(self.bind(alias, self.add("call_function", block_output, (self.node(tensor),))))
            return alias

        try:
            args, kwargs = _map_tensors((args, kwargs), enter)
            self._name_arguments(module, args, kwargs)
            out = original(module, *args, **kwargs)
            out = _map_tensors(out, leave)
        finally:
            self.block = None
        block.last = len(self.nodes)
        block.output_tree = out
        self.trace.blocks.append(block)
        return out

    def _is_twin(self, block: BlockCall, path: str, skeleton: Any) -> bool:
        same = self.same_block
        return path in same and same[path] == same.get(block.path) and block.skeleton == skeleton

    def _repeat(self, twin: BlockCall, path: str, actuals: list[torch.Tensor]) -> Any:
        """Do not run a block that is known to equal `twin`: its outputs have the twin's shapes."""
        node = self.add("call_function", repeat_block, (Repeat(twin.path, path), *map(self.node, actuals)))
        count = len(twin.outputs)
        index = 0

        def make(like: torch.Tensor) -> torch.Tensor:
            nonlocal index
            with torch._C.DisableTorchFunction():
                out = torch.empty_like(like).requires_grad_(like.requires_grad)
            made = node if count == 1 else self.add("call_function", operator.getitem, (node, index))
            index += 1
            self.bind(out, made)
            return out

        return _map_tensors(twin.output_tree, make)


def record(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    *,
    options: dict[str, Any] | None = None,
    answers: dict[str, bool] | None = None,
    same_block: dict[str, str] | None = None,
) -> Trace:
    """Run `model(**inputs, **options)` and record it.

    inputs: tensors by keyword, on meta. answers: for each input that a guard may read, what the guard evaluates to.
    same_block: block path -> a key; blocks with one key and equal argument shapes are run once and then repeated.
    Raises ShardcError with the source line for host reads, in-place writes to views and unregistered tensors.
    """
    recorder = _Recorder(model, answers or {}, same_block or {})
    for name, tensor in inputs.items():
        recorder.trace.inputs[name] = recorder.bind(tensor, recorder.add("placeholder", name))
    with _module_calls(recorder), _no_custom_autograd(recorder), recorder:
        out = model(**inputs, **(options or {}))
    recorder.trace.outputs = {name: recorder.node(tensor) for name, tensor in _named_outputs(out).items()}
    recorder.trace.graph.output(tuple(recorder.trace.outputs.values()))
    return recorder.trace


def canonical_names(model: nn.Module) -> dict[int, str]:
    """id of each parameter and buffer -> its first name in `named_parameters` order (the others are aliases)."""
    names: dict[int, str] = {}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            names.setdefault(id(tensor), name)
    return names


@contextlib.contextmanager
def _module_calls(recorder: _Recorder) -> Iterator[None]:
    original = nn.Module.__call__
    nn.Module.__call__ = lambda module, *args, **kwargs: recorder.call_module(original, module, args, kwargs)
    try:
        yield
    finally:
        nn.Module.__call__ = original


@contextlib.contextmanager
def _no_custom_autograd(recorder: _Recorder) -> Iterator[None]:
    """A custom autograd function has a backward that its recorded forward would not have: refuse it."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ShardcError(
            f"{recorder.call.path or 'the model'}: calls the custom autograd function {cls.__name__} ({running_statement()})",
            "mark the module `opaque`, or write the computation with torch operations",
        )

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


def _named_outputs(out: Any) -> dict[str, torch.Tensor]:
    """Loss and logits of what a model returns: an output object, a dict, (loss, logits), or the loss alone."""
    if isinstance(out, torch.Tensor):
        return {"loss": out}
    if isinstance(out, tuple) and not hasattr(out, "loss"):
        return dict(zip(("loss", "logits"), out, strict=False))
    get = out.get if isinstance(out, dict) else lambda name: getattr(out, name, None)
    return {name: get(name) for name in ("loss", "logits") if isinstance(get(name), torch.Tensor)}


def _argument_names(module_class: type) -> list[str]:
    names = _ARGUMENT_NAMES.get(module_class)
    if names is None:
        names = _ARGUMENT_NAMES[module_class] = list(inspect.signature(module_class.forward).parameters)[1:]
    return names


_ARGUMENT_NAMES: dict[type, list[str]] = {}


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another object for the same tensor, unseen by the recorder."""
    with torch._C.DisableTorchFunction():
        return torch.ops.aten.alias.default(tensor)


def _has_tensor(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in item)


def _map_tensors(item: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, (tuple, list)):
        mapped = [_map_tensors(x, function) for x in item]
        return type(item)(*mapped) if hasattr(item, "_fields") else type(item)(mapped)
    if isinstance(item, dict):
        return {key: _map_tensors(x, function) for key, x in item.items()}
    return item


def _origins(node: fx.Node) -> set[fx.Node]:
    """All nodes that a node is computed from, itself included."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo.extend(current.all_input_nodes)
    return seen


def _evaluate(node: fx.Node) -> torch.Tensor:
    """The real value of a node that depends on sizes alone, computed on the CPU."""
    values: dict[fx.Node, Any] = {}

    def load(item: Any) -> Any:
        return fx.node.map_aggregate(
            item, lambda x: values[x] if isinstance(x, fx.Node) else torch.device("cpu") if isinstance(x, torch.device) else x
        )

    wanted = _origins(node)
    for current in node.graph.nodes:
        if current in wanted:
            values[current] = current.target(*load(current.args), **load(current.kwargs))
    return values[node]


def _out_of_place(func: Callable, name: str) -> Callable:
    plain = {"__iadd__": "add"}.get(name, name.rstrip("_"))
    return getattr(torch.Tensor, plain, None) or getattr(torch.nn.functional, plain, None) or func
