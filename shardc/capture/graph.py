"""The compiler's view of a model: one flat `fx.Graph` whose nodes know their module call, source and symbolic shape.

A node's `meta` holds
    value   `Value`, for every node that is a tensor (absent on nodes that return several; their `getitem`s have it)
    call    `Call`: the module call in which the operation runs
    source  `Source` or None: the statement of the model's author

Equal blocks of a `ModuleList` are held once. The first of them (the *representative*) stands in the graph, between one
`block_input(x)` for each tensor that enters it and one `block_output(x)` for each that leaves (both identities). Every
later equal block is a single `repeat_block(Repeat(...), *inputs)` node: the same computation on its own parameters,
whose names are the representative's with another prefix. So the graph of a 126-layer model is as small as that of 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import resolve_name

from shardc.capture.symbols import Dim, DType


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor without running the model: (B, S, 2560) bf16, requires grad."""

    shape: tuple[Dim, ...]
    dtype: DType
    requires_grad: bool

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]" + "∇" * self.requires_grad


@dataclass(frozen=True, slots=True)
class Source:
    """The innermost statement of the model's author that ran: first and last line, and the name that it assigns."""

    file: str
    line: int
    end_line: int
    name: str | None

    def __repr__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(eq=False, slots=True)
class Call:
    """One call of a module: `path` as in `named_modules`, the class, the call that made it (None for the root).

    options: plain arguments by name (`layer_type="sliding_attention"`), which tell calls of one module apart.
    """

    path: str
    module_class: type
    parent: Call | None
    argument_names: dict[fx.Node, str] = field(default_factory=dict)
    options: dict[str, str | int | bool] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        return self.module_class.__name__

    def chain(self) -> tuple[Call, ...]:
        """The calls from the root down to this one."""
        return (*(self.parent.chain() if self.parent else ()), self)

    def __repr__(self) -> str:
        return f"{self.class_name}({self.path})"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`instance` computes what `representative` computes, on its own parameters; both are module paths."""

    representative: str
    instance: str

    def rename(self, parameter: str) -> str:
        """The instance's name of one of the representative's parameters; names outside the block stay."""
        inside = parameter.startswith(self.representative + ".")
        return self.instance + parameter[len(self.representative) :] if inside else parameter


def block_input(x: torch.Tensor) -> torch.Tensor:
    """Marks a tensor that enters a representative block."""
    return x


def block_output(x: torch.Tensor) -> torch.Tensor:
    """Marks a tensor that leaves a representative block."""
    return x


def repeat_block(repeat: Repeat, *inputs: torch.Tensor) -> Any:
    """Stands for a block equal to its representative: one tensor, or a tuple of its outputs."""
    raise NotImplementedError(f"{repeat.instance} is a mark in a graph, not an operation")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the whole model. `name`: the canonical one, `aliases`: other names of the tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False
    init: tuple[str, float, float] | None = None  # ("normal", mean, std) or ("constant", value, 0.0)


@dataclass(slots=True)
class ModelGraph:
    """A captured model: `inputs` and `outputs` by name ("loss", "logits"); see the module docstring for the nodes.

    parameters: all of the model, also those of repeated blocks, by canonical name, buffers included.
    constants: data of buffers that no checkpoint holds (`inv_freq`), on the CPU, by name: those in the graph.
    blocks: representative path -> all instances that share it, itself first, in call order.
    """

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    parameters: dict[str, Parameter]
    constants: dict[str, torch.Tensor]
    blocks: dict[str, list[str]]
    module_classes: dict[str, type]

    def parameter_of(self, node: fx.Node) -> Parameter:
        """The parameter that a `get_attr` node reads."""
        return self.parameters[node.target]

    def operations(self) -> Iterator[fx.Node]:
        """All nodes but placeholders, parameters and the output, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")


def op_name(target: Callable) -> str:
    """`torch.Tensor.view` -> "view", `torch.Tensor.shape.__get__` -> "shape", a function of ours -> its name."""
    name = _OP_NAMES.get(target)
    if name is None:
        full = (resolve_name(target) or target.__name__).removesuffix(".__get__")
        short = full.rsplit(".", 1)[-1]
        name = _DUNDERS.get(short, short)
        _OP_NAMES[target] = name
    return name


RANDOM_OPS = frozenset({
    "dropout", "alpha_dropout", "feature_dropout", "bernoulli", "rand", "rand_like", "randn", "randn_like", "randint",
    "multinomial", "normal", "rrelu", "gumbel_softmax",
})  # fmt: skip
_OP_NAMES: dict[Callable, str] = {}
_DUNDERS = {
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__rsub__": "rsub", "__mul__": "mul", "__rmul__": "mul",
    "__truediv__": "div", "__rtruediv__": "rdiv", "__rdiv__": "rdiv", "__matmul__": "matmul", "__pow__": "pow",
    "__rpow__": "rpow", "__neg__": "neg", "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__eq__": "eq", "__ne__": "ne",
    "__getitem__": "getitem", "__floordiv__": "floor_divide", "__mod__": "remainder",
}  # fmt: skip
