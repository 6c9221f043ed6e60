"""A model's outline: its graph as a list of steps, where a whole block is one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.capture.graph import Call, ModelGraph, Repeat, block_input, block_output, repeat_block


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One step: a single node, or one block.

    nodes: the node; the body of a representative block; the `repeat_block` node of another block.
    block: the block that runs, which for a representative's own body is a repeat of itself; None for a single node.
    inputs: what the step reads, in order and without parameters: nodes of earlier units.
    """

    nodes: tuple[fx.Node, ...]
    block: Repeat | None
    inputs: tuple[fx.Node, ...]


def outline(model: ModelGraph) -> list[Unit]:
    """The units of a model in the order of its graph. Parameter reads belong to no unit: every user makes its own."""
    representatives: dict[Call, str | None] = {}
    bodies: dict[str, list[fx.Node]] = {}
    steps: list[fx.Node | str] = []
    for node in model.graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        call = node.meta["call"]
        if call not in representatives:
            representatives[call] = next((c.path for c in call.chain() if c.path in model.blocks), None)
        path = None if node.target is repeat_block else representatives[call]
        if path is None:
            steps.append(node)
        elif path in bodies:
            bodies[path].append(node)
        else:
            bodies[path] = [node]
            steps.append(path)
    free = {path: _free_variables(body) for path, body in bodies.items()}
    return [_unit(step, bodies, free) for step in steps]


def _unit(step: fx.Node | str, bodies: dict[str, list[fx.Node]], free: dict[str, tuple[fx.Node, ...]]) -> Unit:
    if isinstance(step, str):
        actuals = [node.args[0] for node in bodies[step] if node.target is block_input]
        return Unit(tuple(bodies[step]), Repeat(step, step), (*_computed(actuals), *free[step]))
    if step.target is repeat_block:
        repeat = step.args[0]
        return Unit((step,), repeat, (*_computed(step.all_input_nodes), *free[repeat.representative]))
    return Unit((step,), None, _computed(step.all_input_nodes))


def _free_variables(body: list[fx.Node]) -> tuple[fx.Node, ...]:
    """What a block's body reads of the outside besides its arguments; every repeat of it reads the same."""
    inside = set(body)
    read = (x for node in body if node.target is not block_input for x in node.all_input_nodes if x not in inside)
    return _computed(dict.fromkeys(read))


def _computed(nodes: object) -> tuple[fx.Node, ...]:
    return tuple(node for node in nodes if node.op != "get_attr")


def body_outputs(body: tuple[fx.Node, ...], path: str) -> list[fx.Node]:
    """The `block_output` nodes of the block at `path`, in order."""
    return [node for node in body if node.target is block_output and node.meta["call"].path == path]
