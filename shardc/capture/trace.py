"""Run a model once on meta tensors and record what it computes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardc.capture.graph import Call, Repeat, block_input, block_output, op_name, repeat_block
from shardc.capture.host_reads import HOST_READS, certain_answer, draws, evaluate, is_guard, origins
from shardc.capture.kept import keeps_state
from shardc.capture.longrope import longrope_by_value
from shardc.capture.memo import Concrete, Made, NotPlain, Signature, Slot, flatten
from shardc.capture.model_index import ModelIndex, argument_names
from shardc.capture.patches import custom_autograd_refused, module_calls_through
from shardc.capture.rows import BlockCall, Row, SizeRead, Trace
from shardc.capture.sizes import watch_sizes, watched_int
from shardc.capture.source import running_statement
from shardc.capture.trees import has_tensor, map_leaves, map_tensors, tensors_in
from shardc.capture.writes import out_of_place, writes_in_place
from shardc.errors import ShardcError

_SIZE_READS = frozenset({"shape", "size", "numel", "nelement"})
_NOT_RECORDED = frozenset({
    "dtype", "device", "ndim", "dim", "layout", "grad", "grad_fn", "is_leaf", "is_meta", "is_cuda", "is_cpu",
    "is_sparse", "is_floating_point", "is_complex", "is_contiguous", "stride", "element_size", "requires_grad",
    "requires_grad_", "register_hook", "retain_grad", "backward", "__len__", "__hash__", "__repr__", "__format__",
})  # fmt: skip
_MARKS = (block_input, block_output)  # ours, so no statement of the author
# Attributes that are operations: tensor -> the method that says the same, and its arguments.
_ATTRIBUTES: dict[str, Callable[[torch.Tensor], tuple]] = {
    "T": lambda x: (
        (torch.Tensor.permute, *range(x.dim() - 1, -1, -1)) if x.dim() != 2 else (torch.Tensor.transpose, 0, 1)
    ),
    "mT": lambda x: (torch.Tensor.transpose, -2, -1),
    "data": lambda x: (torch.Tensor.detach,),
}


def record(
    index: ModelIndex,
    inputs: dict[str, torch.Tensor],
    *,
    memo: dict[Any, Signature],
    options: dict[str, Any] | None = None,
    answers: dict[str, bool] | None = None,
    same_block: dict[str, str] | None = None,
    output_names: tuple[str, ...] | None = None,
) -> Trace:
    """Run `model(**inputs, **options)` and record it, in the mode of the last `index.train`.

    inputs: tensors by keyword, on meta. memo: signatures by call, shared by runs under one default dtype. answers: for
    each input that a guard may read, what the guard evaluates to. same_block: block path -> a key; blocks with one key
    and equal argument shapes are run once and then repeated.
    Raises ShardcError with the source line for host reads, in-place writes to views and unregistered tensors.
    """
    recorder = _Recorder(index, memo, answers or {}, same_block or {})
    for name, tensor in inputs.items():
        recorder.bind(tensor, recorder.add(Row("placeholder", name)))
    try:
        with (
            longrope_by_value(index.modules.values()),
            module_calls_through(recorder.call_module),
            custom_autograd_refused(recorder.where),
            recorder,
        ):
            out = index.model(**inputs, **(options or {}))
    finally:
        kept = index.restore()
    recorder.trace.kept = {name: recorder.kept_value(name, value) for name, value in kept.items()}
    recorder.trace.outputs = {name: recorder.row(tensor) for name, tensor in _named_outputs(out, index.model).items()}
    return recorder.trace


class _Recorder(TorchFunctionMode):
    """Records each torch-level call as one row, so that kernels such as `linear` stay whole."""

    def __init__(
        self, index: ModelIndex, memo: dict[Any, Signature], answers: dict[str, bool], same_block: dict[str, str]
    ):
        super().__init__()
        self.index = index
        self.memo = memo
        self.answers = answers
        self.same_block = same_block
        self.trace = Trace()
        self.size_type = watched_int(self.trace.comparisons)
        self.row_of: dict[int, Row] = {}
        self.viewed: dict[int, int] = {}  # id of a view -> id of the tensor whose memory it shows
        self.keep: list[torch.Tensor] = []  # an id stays unique only while its tensor lives
        self.block: BlockCall | None = None
        self.call = Call("", type(index.model), None)

    def where(self) -> str:
        """The running module, for errors."""
        return self.call.path or "the model"

    # -- rows ----------------------------------------------------------------------------------------------------
    def add(self, row: Row) -> Row:
        row.call = self.call
        self.trace.rows.append(row)
        return row

    def bind(self, tensor: torch.Tensor, row: Row, concrete: Concrete | None = None) -> Row:
        row.concrete = concrete or Concrete.of(tensor)
        self.row_of[id(tensor)] = row
        self.keep.append(tensor)
        return row

    def row(self, tensor: torch.Tensor) -> Row:
        """The row that made a tensor; a parameter or buffer gets its row on first use."""
        row = self.row_of.get(id(tensor))
        if row is None:
            name = self.index.tensor_names.get(id(tensor))
            if name is None:
                raise ShardcError(
                    f"{self.where()}: a tensor of shape {tuple(tensor.shape)} is neither an input, nor a parameter, "
                    f"nor computed in forward ({running_statement()})",
                    "register it as a buffer, or compute it in forward",
                )
            row = self.bind(tensor, self.add(Row("get_attr", name, name=name.replace(".", "_"))))
        return row

    def _concrete(self, tensor: torch.Tensor) -> Concrete:
        return self.row(tensor).concrete

    # -- operations ------------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if name in _SIZE_READS:
            return watch_sizes(func(*args, **kwargs), self.size_type)
        if name in _NOT_RECORDED:
            return func(*args, **kwargs)
        if name in HOST_READS:
            return self._host_read(func, name, args)
        if writes_in_place(name, kwargs):
            return self._write(func, name, args, kwargs)
        if name in _ATTRIBUTES:
            func, *rest = _ATTRIBUTES[name](args[0])
            args = (args[0], *rest)
        return self._operation(func, args, kwargs)

    def _operation(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled() and func is not torch.Tensor.detach and func not in _MARKS:
            args, kwargs = map_tensors((args, kwargs), self._detached)  # a graph has no `with torch.no_grad()`
        operands: list[torch.Tensor] = []
        try:
            key = (
                func,
                torch.is_grad_enabled(),
                flatten(args, operands, self._concrete),
                flatten(kwargs, operands, self._concrete),
            )
            signature = self.memo.get(key)
        except NotPlain:
            key = signature = None
        if signature is None:
            args, kwargs = map_leaves((args, kwargs), self.size_type, int)  # torch's own branches are not the model's
            out = func(*args, **kwargs)
            if not has_tensor(out):
                return out
            self._refuse_autocast()
            if key is None:
                operands = tensors_in((args, kwargs))
            signature = Signature.of(func, args, kwargs, out, operands)
            if key is not None:
                self.memo[key] = signature
        return self._results(signature, operands)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._operation(torch.Tensor.detach, (tensor,), {}) if self._concrete(tensor).requires_grad else tensor

    def _results(self, signature: Signature, operands: list[torch.Tensor]) -> Any:
        """New tensors for what an operation returned, each bound to its row.

        Also where an operation returns its own operand (`.to` the same dtype, dropout in eval): otherwise two values
        would become one.
        """
        source = None if signature.func in _MARKS else running_statement()
        rows = tuple([self.row(t) for t in operands])
        row = self.add(
            Row("call_function", signature.func, signature, rows, source=source, name=source.name if source else None)
        )
        if signature.kind is None:
            return self._result(signature.made[0], row, operands)
        items = []
        for i, made in enumerate(signature.made):
            if isinstance(made, Made):
                part = Row("call_function", operator.getitem, _getitem(i), (row,), source=source)
                made = self._result(made, self.add(part), operands)
            items.append(made)
        kind = signature.kind
        return kind(items) if kind in (tuple, list) else kind(tuple(items))

    def _result(self, made: Made, row: Row, operands: list[torch.Tensor]) -> torch.Tensor:
        tensor = made.concrete.make()
        self.bind(tensor, row, made.concrete)
        if made.view_of is not None:
            base = id(operands[made.view_of])
            self.viewed[id(tensor)] = self.viewed.get(base, base)
        return tensor

    def _write(self, func: Callable, name: str, args: tuple, kwargs: dict) -> torch.Tensor:
        """An in-place operation makes a new version of its first operand: later reads see the new row."""
        target = args[0]
        plain = func if "inplace" in kwargs else out_of_place(name)
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
        if kwargs.get("out") is not None or (plain is None and name != "copy_"):
            self._refuse_write(f"in-place operation {name}")
        if id(target) in self.viewed or id(target) in self.viewed.values():
            self._refuse_write(f"in-place write to a view by {name}")
        if name == "copy_" and self._overwrites_buffer(target, args[1]):
            self.bind(target, self.row(args[1]))
            return target
        if self.row(target).op == "get_attr":
            self._refuse_write(f"in-place write to a parameter or buffer by {name}")
        if target.requires_grad and not torch.is_grad_enabled():
            self._refuse_write(f"in-place write without gradient by {name} to a tensor that requires one")
        new = self._operation(plain, args, kwargs)
        if (new.shape, new.dtype) != (target.shape, target.dtype):
            kept = f"keeps {target.dtype} {tuple(target.shape)} where the result is {new.dtype} {tuple(new.shape)}"
            self._refuse_write(f"in-place operation {name} {kept}")
        target.requires_grad_(new.requires_grad)
        self.bind(target, self.row(new))
        return target

    def _overwrites_buffer(self, target: torch.Tensor, value: Any) -> bool:
        """Whether a copy fills a buffer that was not read yet, so that no call sees what an earlier one left there."""
        is_buffer = id(target) in self.index.tensor_names and not isinstance(target, nn.Parameter)
        alike = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (target.shape, target.dtype)
        return is_buffer and alike and id(target) not in self.row_of

    def _refuse_write(self, what: str) -> None:
        raise ShardcError(
            f"{self.where()}: {what} ({running_statement()})",
            "compute a new tensor instead, for example with torch.where or masked_fill",
        )

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            raise ShardcError(
                f"{self.where()}: runs under autocast ({running_statement()}), which a graph cannot hold",
                "cast explicitly with .to(dtype)",
            )

    # -- what is not a graph --------------------------------------------------------------------------------------
    def _host_read(self, func: Callable, name: str, args: tuple) -> Any:
        """A value read by Python: concrete if it follows from sizes alone, a guard if a boolean of the inputs.

        A random number has to lead to the same answer in every draw."""
        row = self.row(args[0])
        source = running_statement()
        sources = origins(row)
        inputs = frozenset(r.target for r in sources if r.op == "placeholder")
        if any(r.op == "get_attr" for r in sources):
            raise ShardcError(
                f"{self.where()}: reads the value of a parameter or buffer on the host ({source})",
                "mark the module `opaque`, or rewrite the line without .item(), bool() or tolist()",
            )
        if draws(sources):
            answer = certain_answer(row)
            if name != "__bool__" or answer is None:
                raise ShardcError(
                    f"{self.where()}: reads a random number on the host ({source}), so that batches run different code",
                    "set the probability to 0, such as OPT's layerdrop, or apply the draw with torch operations",
                )
            return answer
        if not inputs:
            value, literals = evaluate(self.trace.rows, sources, row)
            self.trace.size_reads.append(SizeRead(literals, source))
            return func(value, *args[1:])
        known = [r for r in sources if r.op == "placeholder" and r.target in self.answers]
        answer = self.answers.get(known[0].target) if len(known) == 1 == len(inputs) else None
        if name != "__bool__" or answer is None or not is_guard(self.trace.rows, sources, row, known[0], answer):
            raise ShardcError(
                f"{self.where()}: reads values of {', '.join(sorted(inputs))} on the host ({source})",
                "only `all tokens kept` of attention_mask and `no restart` of position_ids can be guards; "
                "pass this input as a Python value",
            )
        return answer

    def kept_value(self, name: str, value: Any) -> Any:
        """A value that forward kept on a module: a tensor is computed, so that runs can be compared.

        Raises ShardcError where it follows from the inputs: the next call would compute something else."""
        if not isinstance(value, torch.Tensor):
            return value
        row = self.row_of.get(id(value))
        if row is None or row.op == "get_attr":
            return None
        sources = origins(row)
        if any(r.op != "call_function" for r in sources):
            raise keeps_state(name)
        return evaluate(self.trace.rows, sources, row)[0]

    # -- module calls ----------------------------------------------------------------------------------------------
    def call_module(self, original: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        path = self.index.paths.get(id(module))
        if path is None or module is self.index.model:
            return original(module, *args, **kwargs)
        previous, self.call = self.call, Call(path, type(module), self.call)
        try:
            if self.block is None and path in self.index.block_paths:
                return self._call_block(original, module, path, args, kwargs)
            self._name_arguments(module, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self.call = previous

    def _name_arguments(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        for name, value in (*zip(argument_names(type(module)), args, strict=False), *kwargs.items()):
            row = self.row_of.get(id(value)) if isinstance(value, torch.Tensor) else None
            if row is not None:
                self.call.argument_names[row] = name
            elif isinstance(value, (str, int, bool)):
                self.call.options[name] = value

    def _call_block(self, original: Callable, module: nn.Module, path: str, args: tuple, kwargs: dict) -> Any:
        skeleton = map_tensors((args, kwargs), lambda t: self._concrete(t)[:3])
        twin = next((b for b in self.trace.blocks if self._is_twin(b, path, skeleton)), None)
        if twin is not None:
            return self._repeat(twin, path, tensors_in((args, kwargs)))

        block = self.block = BlockCall(path, first=len(self.trace.rows), skeleton=skeleton)

        def pass_through(mark: Callable, rows: list[Row]) -> Callable[[torch.Tensor], torch.Tensor]:
            def mark_tensor(tensor: torch.Tensor) -> torch.Tensor:
                with torch._C.DisableTorchFunction():
                    made = self._operation(mark, (tensor,), {})
                rows.append(self.row_of[id(made)])
                return made

            return mark_tensor

        try:
            args, kwargs = map_tensors((args, kwargs), pass_through(block_input, block.inputs))
            self._name_arguments(module, args, kwargs)
            out = map_tensors(original(module, *args, **kwargs), pass_through(block_output, block.outputs))
        finally:
            self.block = None
        block.last = len(self.trace.rows)
        block.output_tree = map_tensors(out, lambda t: _Output(self._concrete(t)))
        self.trace.blocks.append(block)
        return out

    def _is_twin(self, block: BlockCall, path: str, skeleton: Any) -> bool:
        same = self.same_block
        return path in same and same[path] == same.get(block.path) and block.skeleton == skeleton

    def _repeat(self, twin: BlockCall, path: str, actuals: list[torch.Tensor]) -> Any:
        """Do not run a block that is known to equal `twin`: its outputs have the twin's shapes."""
        operands = tuple([self.row(t) for t in actuals])
        signature = Signature(repeat_block, (Repeat(twin.path, path), *map(Slot, range(len(operands)))), {})
        row = self.add(Row("call_function", repeat_block, signature, operands))
        count = len(twin.outputs)
        numbers = iter(range(count))

        def make(output: _Output) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                tensor = output.concrete.make()
            number = next(numbers)
            made = row if count == 1 else self.add(Row("call_function", operator.getitem, _getitem(number), (row,)))
            self.bind(tensor, made, output.concrete)
            return tensor

        return map_leaves(twin.output_tree, _Output, make)


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for a tensor in what a block returned."""

    concrete: Concrete


@functools.cache
def _getitem(i: int) -> Signature:
    return Signature(operator.getitem, (Slot(0), i), {})


def _named_outputs(out: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Loss and logits of what a model returns: an output object, a dict, a tuple of both, or one of them alone."""
    if isinstance(out, torch.Tensor):
        found = {"logits" if out.dim() else "loss": out}
    elif isinstance(out, (tuple, list)) and not hasattr(out, "loss"):
        names = ("loss", "logits") if out and isinstance(out[0], torch.Tensor) and not out[0].dim() else ("logits",)
        found = dict(zip(names, out, strict=False))
    else:
        get = out.get if isinstance(out, dict) else lambda name: getattr(out, name, None)
        found = {name: get(name) for name in ("loss", "logits")}
    found = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    if not found:
        raise ShardcError(
            f"the model: {type(model).__name__} returns {type(out).__name__} without loss or logits",
            "return the loss, (loss, logits), or a dict or object with these names",
        )
    return found
