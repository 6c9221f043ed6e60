"""From the calls of one module, one a variant, to its class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardc.capture import Variant
from shardc.capture.symbols import S, ShardSize
from shardc.emit.author import names_in
from shardc.emit.body import BodyWriter, Finish
from shardc.emit.classes import EmittedClass, OwnParameter, Use, grouped
from shardc.emit.expressions import literal
from shardc.emit.flow import value_of
from shardc.emit.frames import ChildCall, Frame, Op
from shardc.emit.library import library_layer
from shardc.emit.lines import Body
from shardc.emit.merge import Merged, Merger, Test, branch_on
from shardc.emit.names import Namer, class_name, is_usable, name_formals
from shardc.emit.sources import gathered, may_be_missing
from shardc.emit.variants import CallKey

Frames = Mapping[CallKey, Frame]


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
    def module(self, frames: Frames, namers: Mapping[Variant, Namer], tests: Sequence[Test] = ()) -> Use:
        """The class, or library layer, of one module; sets the formal names of its frames. tests: between its calls."""
        for key, frame in frames.items():
            name_formals(frame, namers[key.variant])
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
        forward = self.forward(frames, namers, children, paths, tests=tests)
        return self.define(class_name(first.call.module_class), frames, forward, children)

    def children(self, frames: Frames, namers: Mapping[Variant, Namer]) -> tuple[dict[str, Use], dict[str, list[str]]]:
        """Uses by relative path, in the model's order; and the formals by full path."""
        first = next(iter(frames.values()))
        prefix = len(first.path) + 1 if first.path else 0
        calls: dict[str, dict[CallKey, ChildCall]] = {}
        for caller, frame in frames.items():
            for item in frame.items:
                if isinstance(item, ChildCall):
                    found = calls.setdefault(item.path, {})
                    found[CallKey(caller.variant, sum(key.variant == caller.variant for key in found))] = item
        uses: dict[str, Use] = {}
        for path, items in calls.items():
            if all(item.repeat is None for item in items.values()):
                tests = _call_tests(items) if any(key.call for key in items) else []
                uses[path] = self.module({key: item.frame for key, item in items.items()}, namers, tests)
        for path, items in calls.items():
            if path not in uses:
                repeat = next(iter(items.values())).repeat
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
        finishes: Mapping[CallKey, Finish] | None = None,
        tests: Sequence[Test] = (),
    ) -> Forward:
        """The merged forward of one module; lines that branches push out of the page are written shorter."""
        formals = union_of_formals(frames) if formals is None else formals
        containers = {
            name: range(min(members), max(members) + 1)
            for name, members in grouped(dict(children)).items()
            if isinstance(members, dict)
        }
        first = next(iter(frames.values()))
        flags = [*self._flags(frames, formals), *tests]
        too_wide: frozenset[str] = frozenset()
        while True:
            bodies = self._bodies(frames, namers, formal_lists, formals, containers, finishes or {}, too_wide)
            absent = {v: body.absent for v, body in bodies.items()}
            nones = {v: set(body.none_names) for v, body in bodies.items()}
            merger = Merger(absent, nones, formals, flags, first.path or first.call.class_name)
            merged = merger.merge({v: body.lines for v, body in bodies.items()})
            if merged.too_wide <= too_wide:
                break
            too_wide |= merged.too_wide
        axes = {axis for body in bodies.values() for axis in body.axes} | merged.axes
        for body in bodies.values():
            self.functions |= body.functions
        needs_packed = "packed" in merged.flags or any("packed" in names for names in formal_lists.values())
        needed = [*(["packed"] if needs_packed else []), *sorted(merged.flags - {"packed"})]
        formals = [*formals, *(name for name in needed if name not in formals)]
        return Forward(formals, merged, axes)

    def _bodies(
        self,
        frames: Frames,
        namers: Mapping[Variant, Namer],
        formal_lists: Mapping[str, list[str]],
        formals: list[str],
        containers: dict[str, range],
        finishes: Mapping[CallKey, Finish],
        too_wide: frozenset[str],
    ) -> dict[CallKey, Body]:
        none_text: dict[tuple[str, str], str] = {}
        common = _formals_alike(frames.values())
        arguments = {v: sum(len(i.actuals) for i in f.items if isinstance(i, ChildCall)) for v, f in frames.items()}
        bodies = {}
        for key in sorted(frames, key=lambda key: (-arguments[key], key)):
            writer = BodyWriter(
                frames[key],
                namers[key.variant],
                dict(formal_lists),
                formals,
                none_text,
                containers,
                RUNTIME_FUNCTIONS,
                common,
                too_wide,
            )
            bodies[key] = writer.write(finishes.get(key))
        return {v: bodies[v] for v in frames}

    def _flags(self, frames: Frames, formals: Sequence[str]) -> list[Test]:
        variants = list(frames)
        tests = [branch_on("packed", lambda key: key.variant.packed, variants, "not packed", flag="packed", cost=1)]
        size = None if self.window is None else _sequence_length(frames, formals)
        if size is not None:
            text, negated = f"{size[0]} >= {self.window}", f"{size[0]} < {self.window}"
            tests.append(branch_on(text, lambda key: key.variant.long, variants, negated, cost=1, axis=size[1]))
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


def _sequence_length(frames: Frames, formals: Sequence[str]) -> tuple[str, str | None] | None:
    """(`input_ids.shape[1]`, axis) from an argument that all variants have; the axis where it shows only a shard."""
    scopes = [dict(zip(frame.formal_names, frame.formals, strict=True)) for frame in frames.values()]
    for whole in (True, False):
        for name in formals:
            nodes = [scope.get(name) for scope in scopes]
            if any(node is None or may_be_missing(node) for node in nodes):
                continue
            axis = None if whole else gathered(S, nodes[0])
            dim = S if whole else ShardSize(S, axis or "")
            found = {node.meta["value"].shape.index(dim) if dim in node.meta["value"].shape else None for node in nodes}
            if len(found) == 1 and None not in found:
                return f"{name}.shape[{found.pop()}]" + (f" * self.{axis}.size" if axis else ""), axis
    return None


def _call_tests(items: Mapping[CallKey, ChildCall]) -> list[Test]:
    """Tests between the calls of one module: on a plain argument of the author's, or on the number of the call."""
    options = {key: item.frame.call.options for key, item in items.items()}
    names = dict.fromkeys(name for given in options.values() for name in given if is_usable(name))
    differing = [name for name in names if len({repr(given.get(name)) for given in options.values()}) > 1]
    name = differing[0] if differing else "call"
    values = {key: literal(options[key].get(name) if differing else key.call).text for key in items}
    tests = []
    for key, item in items.items():
        item.flag = (name, values[key])
    for value in dict.fromkeys(values.values()):
        test = f"{name} == {value}"
        tests.append(
            branch_on(test, lambda key, value=value: values[key] == value, list(items), f"{name} != {value}", flag=name)
        )
    return tests


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
    nodes += [
        node for item in frame.items if isinstance(item, ChildCall) for node in item.actuals if node.op == "get_attr"
    ]
    return [node for node in dict.fromkeys(nodes) if frame.parameter(node) is not None]


def own_parameters(frames: Frames, children: Mapping[str, Use]) -> dict[str, str]:
    """Relative -> canonical name of what the module reads and none of its children creates, in the model's order."""
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


def _formals_alike(frames: Iterable[Frame]) -> frozenset[str]:
    """Formals that all variants have, in one shape: what a size may be read from in all of them."""
    shapes = [
        {(name, value_of(node).shape) for node, name in zip(frame.formals, frame.formal_names, strict=True)}
        for frame in frames
    ]
    return frozenset(name for name, _ in set.intersection(*shapes))
