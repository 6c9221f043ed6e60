"""A stage: the class that the runtime builds, with the contract's keywords, its sends or its loss."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from shardc.capture import Variant
from shardc.capture.graph import ModelGraph
from shardc.emit.body import BodyWriter, Finish
from shardc.emit.classes import Use
from shardc.emit.flow import Flow
from shardc.emit.frames import Frame, build_frames
from shardc.emit.lines import Line
from shardc.emit.module import FileBuilder, Forward
from shardc.emit.names import Namer
from shardc.emit.sources import add_missing_sources
from shardc.emit.variants import CallKey

Stage = Mapping[Variant, ModelGraph]
_BATCH = ("input_ids", "attention_mask", "position_ids", "labels", "num_targets")


class _Sends(Finish):
    """A stage that is not the last returns a tuple of what it sends."""

    is_custom = True

    def write(self, writer: BodyWriter) -> None:
        texts = [writer.name_of[node] for node in writer.frame.results]
        inner = ", ".join(texts)
        writer._line(f"return ({inner},)" if len(texts) == 1 else f"return {inner}")


class _Loss(Finish):
    """The last stage returns (loss, logits), and stops at the logits where there are no labels."""

    is_custom = True

    def __init__(self, loss: fx.Node | None, logits: fx.Node):
        self.loss = loss
        self.logits = logits
        self.split = 0

    def extra_uses(self, writer: BodyWriter) -> dict[fx.Node, int]:
        wanted = {self.logits}
        self.split = len(writer.statements)
        last = 0
        for i in range(len(writer.statements) - 1, -1, -1):
            units = writer.statements[i].units
            if any(node in wanted for unit in units for node in unit.outputs):
                wanted.update(node for unit in units for node in unit.operands)
                last = max(last, i + 1)
        self.split = last
        return {self.logits: len(writer.statements)}

    def before(self, writer: BodyWriter, index: int) -> None:
        if self.loss is not None and index == self.split:
            logits = writer.name_of[self.logits]
            writer.body.lines.append(Line(("if labels is None:", f"    return None, {logits}")))

    def write(self, writer: BodyWriter) -> None:
        logits = writer._value(self.logits).text
        loss = "None" if self.loss is None else writer._value(self.loss).text
        writer._line(f"return {loss}, {logits}")


class StageBuilder:
    """Builds the class of one stage in `file`. name: of the class, the author's where there is one stage."""

    def __init__(self, file: FileBuilder, stage: Stage, inlined: frozenset[str]):
        self.file = file
        self.stage = stage
        self.frames: dict[CallKey, Frame] = {}
        self.namers: dict[Variant, Namer] = {}
        for variant, graph in stage.items():
            outputs = {name: node for name, node in graph.outputs.items() if name != "count"}
            flow = Flow(graph, outputs)
            root = build_frames(flow, inlined)
            root.rolls_single = bool(inlined)
            add_missing_sources(root)
            namer = Namer(flow)
            _name_all(root, namer)
            self.frames[CallKey(variant)], self.namers[variant] = root, namer

    def build(self, name: str) -> Use:
        for frame in self.frames.values():
            inputs = frame.flow.model.inputs.items()
            frame.formals = [node for _, node in inputs if node in frame.formals]
            frame.formal_names = [key for key, node in inputs if node in frame.formals]
        children, lists = self.file.children(self.frames, self.namers)
        formals = self._keywords()
        finishes = {v: self._finish(frame) for v, frame in self.frames.items()}
        forward = self.file.forward(
            self.frames, self.namers, children, lists, [f for f in formals if f != "packed"], finishes
        )
        forward = Forward(formals, forward.merged, forward.axes)
        use = self.file.define(name, self.frames, forward, children)
        assert use.emitted is not None
        use.emitted.signature = signature(formals)
        use.emitted.needs_tp = True
        use.emitted.ties = self._ties(use)
        return use

    def _keywords(self) -> list[str]:
        names = list(dict.fromkeys(name for graph in self.stage.values() for name in graph.inputs))
        received = [name for name in names if name not in _BATCH]
        return [*received, *(name for name in _BATCH if name in names), "packed"]

    def _finish(self, frame: Frame) -> Finish:
        outputs = frame.flow.outputs
        if "logits" in outputs:
            return _Loss(outputs.get("loss"), outputs["logits"])
        return _Sends()

    def _ties(self, use: Use) -> tuple[tuple[str, str], ...]:
        """(alias, canonical name) of the tensors that the stage creates under two names."""
        made = set(use.makes)
        graph = next(iter(self.stage.values()))
        found = []
        for parameter in graph.parameters.values():
            names = [name for name in (parameter.name, *parameter.aliases) if name in made]
            found.extend((name, names[0]) for name in names[1:])
        return tuple(found)


def signature(formals: list[str]) -> str:
    """Every argument by keyword; an absent one is None."""
    return ", ".join(["self", "*", *(f"{name}=False" if name == "packed" else f"{name}=None" for name in formals)])


def _name_all(frame: Frame, namer: Namer) -> None:
    namer.name_call_results(frame)
    for item in frame.items:
        if hasattr(item, "frame") and item.repeat is None:
            _name_all(item.frame, namer)


def split_modules(stages: list[Stage]) -> frozenset[str]:
    """Modules that lie in several stages in parts: containers of blocks, and what runs differently in two stages."""
    if len(stages) == 1:
        return frozenset()
    inside: list[dict[str, set[str]]] = []
    blocks: set[str] = set()
    for stage in stages:
        below: dict[str, set[str]] = {}
        for graph in stage.values():
            blocks.update(path for paths in graph.blocks.values() for path in paths)
            for node in graph.graph.nodes:
                chain = node.meta["call"].chain() if "call" in node.meta else ()
                for i, call in enumerate(chain):
                    below.setdefault(call.path, set()).update(c.path for c in chain[i + 1 :])
        inside.append(below)
    holders = {path[:i] for path in blocks for i, char in enumerate(path) if char == "."}
    paths = {path for below in inside for path in below}
    differing = {path for path in paths if len({frozenset(below[path]) for below in inside if path in below}) > 1}
    in_blocks = tuple(f"{block}." for block in blocks)
    return frozenset(p for p in holders | differing if p not in blocks and not f"{p}.".startswith(in_blocks))
