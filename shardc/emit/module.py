"""From the calls of one module, one a variant, to its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardc.capture import Variant
from shardc.emit.author import names_in
from shardc.emit.body import Body, BodyWriter, Finish
from shardc.emit.classes import EmittedClass, OwnParameter, Use, grouped
from shardc.emit.frames import ChildCall, Frame, Op
from shardc.emit.library import library_layer
from shardc.emit.merge import Merged, Merger, branch_on
from shardc.emit.names import Namer, name_formals
from shardc.emit.sources import gives
from shardc.capture.symbols import S

Frames = Mapping[Variant, Frame]


@dataclass(slots=True)
class Forward:
    """A merged forward and what its class must provide for it."""

    formals: list[str]
    merged: Merged
    axes: set[str] = field(default_factory=set)


class FileBuilder:
    """Collects the classes of one file. window: the sequence length from which `long` variants hold."""

    def __init__(self, window: int | None):
        self.window = window
        self.classes: list[EmittedClass] = []
        self.functions: set[str] = set()
        self._by_key: dict[tuple, EmittedClass] = {}
        self._names: dict[str, int] = {}

    # -- modules -----------------------------------------------------------------------------------------------------
    def module(self, frames: Frames, namers: Mapping[Variant, Namer]) -> Use:
        """The class, or library layer, of one module; sets the formal names of its frames."""
        for variant, frame in frames.items():
            name_formals(frame, namers[variant])
        first = next(iter(frames.values()))
        layer = library_layer(list(frames.values()))
        if layer is not None:
            for frame in frames.values():
                frame.is_library = True
                frame.formal_names = ["input"]
            if layer[1]:
                self.functions.add(layer[1])
            makes = tuple(f"{first.path}.{first.parameter(node)}" for node in _parameter_nodes(first))
            return Use(["input"], library=layer[0], imports=layer[1], makes=makes)
        children, paths = self.children(frames, namers)
        forward = self.forward(frames, namers, children, paths)
        return self.define(first.call.module_class.__name__, frames, forward, children)

    def children(self, frames: Frames, namers: Mapping[Variant, Namer]) -> tuple[dict[str, Use], dict[str, list[str]]]:
        """Uses by relative path, in the model's order; and the formals by full path."""
        first = next(iter(frames.values()))
        prefix = len(first.path) + 1 if first.path else 0
        calls: dict[str, dict[Variant, ChildCall]] = {}
        for variant, frame in frames.items():
            for item in frame.items:
                if isinstance(item, ChildCall):
                    calls.setdefault(item.path, {}).setdefault(variant, item)
        uses: dict[str, Use] = {}
        for path, by_variant in calls.items():
            if all(item.repeat is None for item in by_variant.values()):
                uses[path] = self.module({v: item.frame for v, item in by_variant.items()}, namers)
        for path, by_variant in calls.items():
            if path not in uses:
                repeat = next(iter(by_variant.values())).repeat
                uses[path] = uses[repeat.representative]
        order = {path: i for i, path in enumerate(first.flow.model.module_classes)}
        ordered = sorted(uses, key=lambda path: order.get(path, len(order)))
        return {path[prefix:]: uses[path] for path in ordered}, {path: use.formals for path, use in uses.items()}

    def forward(
        self,
        frames: Frames,
        namers: Mapping[Variant, Namer],
        children: Mapping[str, Use],
        formal_lists: Mapping[str, list[str]],
        formals: list[str] | None = None,
        finishes: Mapping[Variant, Finish] | None = None,
    ) -> Forward:
        """The merged forward of one module; lines that branches push out of the page are written shorter."""
        formals = union_of_formals(frames) if formals is None else formals
        containers = {
            name: range(min(members), max(members) + 1)
            for name, members in grouped(dict(children)).items()
            if isinstance(members, dict)
        }
        first = next(iter(frames.values()))
        flags = self._flags(frames, formals)
        for width in _LINE_WIDTHS:
            bodies = self._bodies(frames, namers, formal_lists, formals, containers, finishes or {}, width)
            absent = {v: body.absent for v, body in bodies.items()}
            nones = {v: set(body.none_names) for v, body in bodies.items()}
            merger = Merger(absent, nones, formals, flags, first.path or first.call.class_name)
            merged = merger.merge({v: body.lines for v, body in bodies.items()})
            if not merged.is_too_wide:
                break
        axes = {axis for body in bodies.values() for axis in body.axes}
        for body in bodies.values():
            self.functions |= body.functions
        needs_packed = "packed" in merged.flags or any("packed" in names for names in formal_lists.values())
        if needs_packed and "packed" not in formals:
            formals = [*formals, "packed"]
        return Forward(formals, merged, axes)

    def _bodies(
        self,
        frames: Frames,
        namers: Mapping[Variant, Namer],
        formal_lists: Mapping[str, list[str]],
        formals: list[str],
        containers: dict[str, range],
        finishes: Mapping[Variant, Finish],
        width: int,
    ) -> dict[Variant, Body]:
        none_text: dict[tuple[str, str], str] = {}
        common = frozenset.intersection(*(frozenset(frame.formal_names) for frame in frames.values()))
        arguments = {v: sum(len(i.actuals) for i in f.items if isinstance(i, ChildCall)) for v, f in frames.items()}
        bodies = {}
        for variant in sorted(frames, key=lambda v: (-arguments[v], v)):
            writer = BodyWriter(
                frames[variant],
                namers[variant],
                dict(formal_lists),
                formals,
                none_text,
                containers,
                RUNTIME_FUNCTIONS,
                common,
                width,
            )
            bodies[variant] = writer.write(finishes.get(variant))
        return {v: bodies[v] for v in frames}

    def _flags(self, frames: Frames, formals: Sequence[str]) -> list:
        variants = list(frames)
        tests = [branch_on("packed", lambda v: v.packed, variants, "not packed", flag="packed", cost=1)]
        if self.window is not None:
            for name in formals:
                nodes = [dict(zip(f.formal_names, f.formals, strict=True)).get(name) for f in frames.values()]
                if all(node is not None and gives(node, S) for node in nodes):
                    dims = {node.meta["value"].shape.index(S) for node in nodes}
                    if len(dims) == 1:
                        size = f"{name}.shape[{dims.pop()}]"
                        text, negated = f"{size} >= {self.window}", f"{size} < {self.window}"
                        tests.append(branch_on(text, lambda v: v.long, variants, negated, cost=1))
                        break
        return tests

    # -- classes -----------------------------------------------------------------------------------------------------
    def define(self, author_name: str, frames: Frames, forward: Forward, children: dict[str, Use]) -> Use:
        """The class with this text: an earlier one if there is an equal one."""
        first = next(iter(frames.values()))
        parameters = own_parameters(frames, children)
        own = tuple(OwnParameter.of(name, first.flow.model.parameters[target]) for name, target in parameters.items())
        uses_tp = bool(forward.axes)
        needs_tp = uses_tp or any(use.needs_tp for use in children.values())
        signature = ", ".join(["self", *forward.formals])
        lines = tuple(forward.merged.lines)
        keys = tuple((path, use.key()) for path, use in children.items())
        key = (author_name, signature, lines, tuple((p.name, len(p.shape), p.kind) for p in own), keys)
        emitted = self._by_key.get(key)
        if emitted is None:
            count = self._names[author_name] = self._names.get(author_name, 0) + 1
            name = author_name if count == 1 else f"{author_name}_{count}"
            emitted = EmittedClass(author_name, name, signature, lines, own, children, needs_tp, uses_tp)
            self._by_key[key] = emitted
            self.classes.append(emitted)
        shapes = tuple(p.shape for p in own)
        emitted.instances.add(shapes)
        prefix = first.path + "." if first.path else ""
        makes = (*(prefix + name for name in parameters), *(name for use in children.values() for name in use.makes))
        return Use(forward.formals, emitted, shapes, makes=makes)


_LINE_WIDTHS = (112, 108, 104, 100, 90, 80)

RUNTIME_FUNCTIONS = frozenset(
    (
        "all_gather", "all_gather_invariant", "all_reduce", "copy_to", "keep_on_first", "reduce_scatter", "shard",
        "sharded_rng", "vocab_cross_entropy", "vocab_embedding",
    )
)  # fmt: skip


def union_of_formals(frames: Frames) -> list[str]:
    """All formals of the variants, in the order of the author's signature, others in the order of the longest list."""
    lists = sorted((frame.formal_names for frame in frames.values()), key=len, reverse=True)
    names = list(dict.fromkeys(name for names in lists for name in names))
    call = next(iter(frames.values())).call
    signature = {name: i for i, name in enumerate(names_in(call.module_class).arguments)}
    return sorted(names, key=lambda name: signature.get(name, len(signature)))


def _parameter_nodes(frame: Frame) -> list:
    nodes = [node for item in frame.items if isinstance(item, Op) for node in item.operands if node.op == "get_attr"]
    nodes += [node for item in frame.items if isinstance(item, ChildCall) for node in item.actuals if node.op == "get_attr"]
    return [node for node in dict.fromkeys(nodes) if frame.parameter(node) is not None]


def own_parameters(frames: Frames, children: Mapping[str, Use]) -> dict[str, str]:
    """Relative name -> canonical name of what the module reads and none of its children creates, in the model's order."""
    found: dict[str, str] = {}
    first = next(iter(frames.values()))
    made = {name for use in children.values() for name in use.makes}
    prefix = first.path + "." if first.path else ""
    for frame in frames.values():
        for node in _parameter_nodes(frame):
            name = frame.parameter(node)
            if prefix + name not in made:
                found[name] = node.target
    order = {name: i for i, name in enumerate(first.flow.model.parameters)}
    return dict(sorted(found.items(), key=lambda item: order[item[1]]))
