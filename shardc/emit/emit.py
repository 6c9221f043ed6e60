"""The text of model.py: one class for each distinct module, and the stages that the runtime builds."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2

import shardc.templates
from shardc.capture import Variant
from shardc.capture.graph import Call, ModelGraph
from shardc.emit.body import BodyWriter
from shardc.emit.classes import EmittedClass, Use, grouped
from shardc.emit.flow import Flow
from shardc.emit.frames import Frame, build_frames
from shardc.emit.module import FileBuilder
from shardc.emit.names import Namer
from shardc.emit.stage import StageBuilder, split_modules
from shardc.emit.wrap import WIDTH, wrap

RUFF_WIDTH = 88  # ruff's, where nothing sets another


def emit(
    stages: list[dict[Variant, ModelGraph]],
    *,
    window: int | None = None,
    title: str = "",
) -> str:
    """The source of a plan's model.py.

    stages: for each stage its graph in each variant, as `cut` gives them (one stage: as `capture` gives them).
    window: the sequence length from which the `long` variants hold. title: model and plan, for the file's first line.
    Before: sharded or plain graphs. After: classes with Hugging Face's parameter names, `STAGES`, `count_targets`.
    Raises ShardcError where a size cannot be written or two variants cannot be told apart.
    """
    file = FileBuilder(window)
    inlined = split_modules(stages)
    uses = []
    for k, stage in enumerate(stages):
        builder = StageBuilder(file, stage, inlined)
        root = next(iter(builder.frames.values())).call.module_class.__name__
        uses.append(builder.build(root if len(stages) == 1 else f"{root}Stage{k}"))
    entries = share_equal_stages(file, uses)
    count = _count_targets(stages[-1])
    template = _templates().get_template("model.py.j2")
    return template.render(
        title=title,
        imports=_runtime_imports(file.functions),
        partial=any("partial(" in entry for entry in entries),
        uses_functional=any("F." in line for emitted in file.classes for line in emitted.forward)
        or any("F." in x for x in count),
        classes=[_class_text(emitted) for emitted in file.classes],
        count_targets=count,
        stages=wrap(f"STAGES = ({', '.join(entries)}{',' if len(entries) == 1 else ''})", 0),
    )


def share_equal_stages(file: FileBuilder, uses: list[Use]) -> list[str]:
    """What STAGES holds; stages that differ only in the range of their layers become one class that takes the range."""
    shared: dict[tuple, list[tuple[EmittedClass, range]]] = {}
    for use in uses:
        lists = {name: members for name, members in grouped(use.emitted.children).items() if isinstance(members, dict)}
        if len(lists) != 1:
            continue
        ((container, members),) = lists.items()
        indices = sorted(members)
        kinds = {members[i].key() for i in indices}
        if len(kinds) == 1 and indices[0] > 0:
            others = tuple(
                (path, child.key())
                for path, child in use.emitted.children.items()
                if not path.startswith(container + ".")
            )
            key = (
                use.emitted.signature,
                use.emitted.forward,
                container,
                kinds.pop(),
                others,
                use.emitted.parameters,
                use.emitted.ties,
            )
            shared.setdefault(key, []).append((use.emitted, range(indices[0], indices[-1] + 1)))
    entries = {use.emitted: use.emitted.name for use in uses}
    for key, stages in shared.items():
        if len(stages) < 2:
            continue
        first = stages[0][0]
        first.layer_range = (key[2], stages[0][1])
        for emitted, layers in stages:
            entries[emitted] = f"partial({first.name}, layers=range({layers.start}, {layers.stop}))"
            if emitted is not first:
                file.classes.remove(emitted)
    return [entries[use.emitted] for use in uses]


@functools.cache
def _templates() -> jinja2.Environment:
    folder = Path(shardc.templates.__path__[0])
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )


def _runtime_imports(functions: set[str]) -> list[str]:
    """One name a line where ruff's own line length wants that: a wider one leaves it so, for the last comma."""
    names = sorted(functions | {"MeshAxis"}, key=lambda name: (not name[0].isupper(), name))
    line = f"from shardc.runtime import {', '.join(names)}"
    if len(line) <= RUFF_WIDTH:
        return [line]
    return ["from shardc.runtime import (", *(f"    {name}," for name in names), ")"]


def _class_text(emitted: EmittedClass) -> str:
    arguments, statements = emitted.init()
    init = [line for statement in statements for line in wrap(statement, 8)]
    definition = f"def forward({emitted.signature}):"
    if len(definition) + 4 > WIDTH:
        start = wrap(definition[:-1], 4)
        start[-1] += ":"
    else:
        start = ["    " + definition]
    template = _templates().get_template("class.py.j2")
    return template.render(
        name=emitted.name, arguments=arguments, init=init, forward_start=start, forward=emitted.forward
    ).rstrip("\n")


def _count_targets(stage: dict[Variant, ModelGraph]) -> list[str]:
    """Body of `count_targets(labels)`: the part of the graph that the output "count" needs."""
    graph = next(iter(stage.values()))
    if "count" not in graph.outputs:
        return []
    flow = Flow(graph, {"count": graph.outputs["count"]})
    frame = build_frames(flow, frozenset(path for path in graph.module_classes if path))
    frame = _without_module(frame)
    writer = BodyWriter(
        frame, Namer(flow), {}, ["labels"], {}, {}, frozenset(), frozenset(frame.formal_names), frozenset()
    )
    body = writer.write()
    return [part for line in body.lines for text in line.text for part in wrap(text, 4)]


def _without_module(frame: Frame) -> Frame:
    frame.formal_names = [node.target for node in frame.formals]
    frame.call = Call("", object, None, frame.call.argument_names)
    return frame
