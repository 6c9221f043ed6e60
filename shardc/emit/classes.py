"""The classes of a file: one for each distinct module text, built by constructors that say only what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardc.capture.graph import Parameter
from shardc.capture.symbols import MODEL_DTYPE
from shardc.emit.roll import index_condition
from shardc.emit.sizes import size_text


@dataclass(frozen=True, slots=True)
class OwnParameter:
    """A parameter or buffer that the class itself creates; `name` is relative to the module."""

    name: str
    shape: tuple[int, ...]
    kind: tuple[bool, bool, str | None]  # is buffer, requires grad, dtype if it is not the model's

    @classmethod
    def of(cls, name: str, parameter: Parameter) -> OwnParameter:
        dtype = None if parameter.dtype is MODEL_DTYPE else str(parameter.dtype)
        return cls(name, tuple(parameter.shape), (parameter.is_buffer, parameter.requires_grad, dtype))

    def statement(self, sizes: Sequence[str]) -> str:
        is_buffer, requires_grad, dtype = self.kind
        empty = f"torch.empty({', '.join(sizes) or '()'}{f', dtype={dtype}' if dtype else ''})"
        path, _, name = self.name.rpartition(".")
        if is_buffer:
            return f'self.{path + "." if path else ""}register_buffer("{name}", {empty}, persistent=False)'
        return f"self.{self.name} = nn.Parameter({empty}{'' if requires_grad else ', requires_grad=False'})"


@dataclass(eq=False, slots=True)
class EmittedClass:
    """A class of the file. instances: shapes of its own parameters, one entry for each module that it stands for."""

    author_name: str
    name: str
    signature: str
    forward: tuple[str, ...]
    parameters: tuple[OwnParameter, ...]
    children: dict[str, Use]
    needs_tp: bool
    uses_tp: bool
    ties: tuple[tuple[str, str], ...] = ()
    layer_range: tuple[str, range] | None = None  # of a stage class shared by several stages
    instances: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)

    def size_arguments(self) -> dict[tuple[int, int], str]:
        """(parameter, dim) -> the constructor's argument, for the sizes in which the instances differ."""
        columns: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        ordered = sorted(self.instances, key=repr)  # a size may be a ShardSize, which has no order
        for i, parameter in enumerate(self.parameters):
            for dim in range(len(parameter.shape)):
                column = tuple(shapes[i][dim] for shapes in ordered)
                if len(set(column)) > 1:
                    columns.setdefault(column, []).append((i, dim))
        names = ["dim"] if len(columns) == 1 else [f"dim_{k}" for k in range(1, len(columns) + 1)]
        if len(columns) == 2 and [len(p.shape) for p in self.parameters] in ([2], [2, 1], [1, 2]):
            names = ["in_features", "out_features"]
            weight = next(i for i, p in enumerate(self.parameters) if len(p.shape) == 2)
            if (weight, 0) not in next(iter(columns.values())) or self.author_name != "Conv1D":
                columns = dict(
                    sorted(
                        columns.items(), key=lambda c: (weight, 0 if self.author_name == "Conv1D" else 1) not in c[1]
                    )
                )
        return {place: name for name, places in zip(names, columns.values(), strict=True) for place in places}

    def constructor(self, shapes: tuple[tuple[int, ...], ...]) -> str:
        """The call that builds an instance whose own parameters have these shapes."""
        given = {name: shapes[i][dim] for (i, dim), name in self.size_arguments().items()}
        names = list(dict.fromkeys(self.size_arguments().values()))
        ordered = sorted(names) if "in_features" in names else names
        return (
            f"{self.name}({', '.join([*(['tp'] if self.needs_tp else []), *(size_text(given[n]) for n in ordered)])})"
        )

    def init(self) -> tuple[str, list[str]]:
        """(arguments, statements) of __init__; no statements where the class has nothing to build."""
        places = self.size_arguments()
        names = list(dict.fromkeys(places.values()))
        ordered = sorted(names) if "in_features" in names else names
        arguments = ["self", *(["tp: MeshAxis"] if self.needs_tp else []), *(f"{name}: int" for name in ordered)]
        if self.layer_range:
            arguments.append("layers: range")
        lines = ["self.tp = tp"] if self.uses_tp else []
        holders: set[str] = set()

        def hold(path: str) -> None:
            """Plain modules for the containers on the way to `path`."""
            if path and path not in holders and path not in self.children:
                hold(path.rpartition(".")[0])
                holders.add(path)
                lines.append(f"self.{path} = nn.Module()")

        for i, parameter in enumerate(self.parameters):
            hold(parameter.name.rpartition(".")[0])
            sizes = [places.get((i, dim), size_text(size)) for dim, size in enumerate(parameter.shape)]
            lines.append(parameter.statement(sizes))
        for container, members in grouped(self.children).items():
            if isinstance(members, Use):
                hold(container.rpartition(".")[0])
                lines.append(f"self.{container} = {members.constructor()}")
            else:
                hold(container.rpartition(".")[0])
                shared = self.layer_range is not None and self.layer_range[0] == container
                lines.append(f"self.{container} = {module_list(members, shared)}")
        lines += [f"self.{name} = self.{canonical}" for name, canonical in self.ties]
        return ", ".join(arguments), lines


@dataclass(eq=False, slots=True)
class Use:
    """One module of the model: an instance of an emitted class, or a library layer by its constructor call."""

    formals: list[str]
    emitted: EmittedClass | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    library: str | None = None
    imports: str | None = None
    makes: tuple[str, ...] = ()  # full names of the parameters that it creates, its children's included

    def constructor(self) -> str:
        return self.library or self.emitted.constructor(self.shapes)

    @property
    def needs_tp(self) -> bool:
        return self.imports is not None if self.emitted is None else self.emitted.needs_tp

    def key(self) -> tuple:
        return (self.library, id(self.emitted), self.shapes)


def grouped(children: dict[str, Use]) -> dict[str, Use | dict[int, Use]]:
    """Children by attribute; those of a numbered container together, by index."""
    found: dict[str, Use | dict[int, Use]] = {}
    for path, use in children.items():
        container, _, index = path.rpartition(".")
        if index.isdigit():
            found.setdefault(container, {})[int(index)] = use
        else:
            found[path] = use
    return found


def module_list(members: dict[int, Use], shared: bool = False) -> str:
    """`nn.ModuleList(Layer(tp) for _ in range(36))`, or a ModuleDict where the first index is not 0."""
    indices = sorted(members)
    by_text: dict[str, list[int]] = {}
    for index in indices:
        by_text.setdefault(members[index].constructor(), []).append(index)
    kinds = sorted(by_text.items(), key=lambda kind: (len(index_condition(kind[1], indices)), kind[1]))
    text = kinds[-1][0]
    for one, chosen in reversed(kinds[:-1]):
        text = f"{one} if {index_condition(chosen, indices)} else {text}"
    contiguous = indices == list(range(indices[0], indices[-1] + 1))
    if indices[0] == 0 and contiguous:
        if len(indices) == 1:
            return f"nn.ModuleList([{text}])"
        return f"nn.ModuleList({text} for {'i' if len(kinds) > 1 else '_'} in range({len(indices)}))"
    over = "layers" if shared else f"range({indices[0]}, {indices[-1] + 1})" if contiguous else str(tuple(indices))
    return f"nn.ModuleDict({{str(i): {text} for i in {over}}})"
