"""The proof: the plan in hand computes the loss and every gradient of the model that was captured.

Each obligation is a function that yields `Finding`s. It judges only what the plan says (graphs, parameter table), never
how the plan was made: any correct plan passes. The argument, per obligation, is in the function's docstring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from torch import fx

from shardc.capture.graph import ModelGraph, block_input, block_output, op_name, repeat_block
from shardc.capture.symbols import Axis
from shardc.errors import ShardcError
from shardc.sharding.analyse import analyse_factors, describe
from shardc.sharding.factors import Dims, Factor
from shardc.sharding.layout import CONVERSIONS, I, Layout, R, same_layouts, sharded
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import draws, rule_of, tensors
from shardc.sharding.shard_map import factors_of_shard_map
from shardc.sharding.typing import Mismatch, type_node


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """What a rank holds of a parameter, and over which axes its gradient is summed after backward.

    shape: global. shard: shard map or None. grad_reduce: axis names ("tp", "tp.replica"), each once.
    """

    name: str
    shape: tuple[int, ...]
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    shard: dict | None = None
    grad_reduce: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not hold."""

    obligation: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} [{self.obligation}]"


@dataclass(slots=True)
class Certificate:
    """`proved` holds for the obligations listed; `opaque` modules are trusted; `findings` refute."""

    obligations: dict[str, int] = field(default_factory=dict)  # name -> how many facts were checked
    opaque: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def proved(self) -> bool:
        return not self.findings and not self.opaque

    def merge(self, other: Certificate) -> None:
        for name, count in other.obligations.items():
            self.obligations[name] = self.obligations.get(name, 0) + count
        self.findings += other.findings


def prove(model: ModelGraph, parameters: dict[str, ShardedParameter], mesh: Mesh) -> Certificate:
    """Check one graph, with conversions and global shapes, against a parameter table. Never raises for a wrong plan.

    Leaves the layouts that it derived in `meta["layouts"]` (axis -> Layout) of each node.
    """
    certificate = Certificate()
    try:
        dims = analyse_factors(model)
        layouts = _type_graph(model, parameters, mesh, dims, certificate)
    except ShardcError as error:
        certificate.findings.append(Finding("layouts", "the plan", error.problem))
        return certificate
    for name, obligation in OBLIGATIONS.items():
        count = 0
        for checked in obligation(model, parameters, mesh, layouts):
            count += 1
            if isinstance(checked, Finding):
                certificate.findings.append(checked)
        certificate.obligations[name] = count
    return certificate


# -- layouts ---------------------------------------------------------------------------------------------------------
def _type_graph(
    model: ModelGraph,
    parameters: dict[str, ShardedParameter],
    mesh: Mesh,
    dims: dict[str, Dims],
    certificate: Certificate,
) -> dict[fx.Node, dict[str, Layout]]:
    """Layouts: every operation takes what its type rule allows, so each rank's results mean what their letters say.

    By induction over the graph: a conversion changes value and gradient by dual collectives; any other operation keeps
    the meaning of R, S and P because its rule says along which factors it is local, sums or is linear. A value after an
    operation that does not type is left out, and so is all that depends on it.
    """
    layouts: dict[fx.Node, dict[str, Layout]] = {}
    formals: dict[str, list[fx.Node]] = {}
    results: dict[str, list[fx.Node]] = {}
    split = _split_factors(parameters, mesh, dims)
    count = 0
    for node in model.graph.nodes:
        if node.op == "placeholder":
            layouts[node] = dict.fromkeys(mesh.axes, I)
        elif node.op == "get_attr":
            known = parameters.get(node.target)  # buffers are whole
            layouts[node] = parameter_layouts(known, dims[node.target], mesh) if known else dict.fromkeys(mesh.axes, I)
        elif node.op == "call_function" and all(o in layouts for o in node.all_input_nodes):
            count += 1
            try:
                if node.target is repeat_block:
                    _type_repeat(node, formals, results, parameters, layouts)
                else:
                    _type_call(node, mesh, layouts, split)
            except Mismatch as mismatch:
                certificate.findings.append(Finding("layouts", describe(node), str(mismatch)))
            if node.target is block_input:
                formals.setdefault(node.meta["call"].path, []).append(node)
            elif node.target is block_output:
                results.setdefault(node.meta["call"].path, []).append(node)
    certificate.obligations["layouts"] = count
    for node, found in layouts.items():
        node.meta["layouts"] = found
    return layouts


def _split_factors(
    parameters: dict[str, ShardedParameter], mesh: Mesh, dims: dict[str, Dims]
) -> dict[str, set[Factor]]:
    """axis -> the factors that some parameter's shard map splits over it."""
    split: dict[str, set[Factor]] = {axis: set() for axis in mesh.axes}
    for name, parameter in parameters.items():
        if name in dims:
            for axis, factor in factors_of_shard_map(dims[name], parameter.shard, mesh).items():
                split[axis].add(factor)
    return split


def parameter_layouts(parameter: ShardedParameter, dims: Dims, mesh: Mesh) -> dict[str, Layout]:
    """S where the shard map splits, R where the gradient is summed afterwards, else I."""
    split = factors_of_shard_map(dims, parameter.shard, mesh)
    partial = {axis for name in parameter.grad_reduce for axis in mesh.atomic(name)}
    return {axis: sharded(split[axis]) if axis in split else R if axis in partial else I for axis in mesh.axes}


def _type_call(
    node: fx.Node, mesh: Mesh, layouts: dict[fx.Node, dict[str, Layout]], split: dict[str, set[Factor]]
) -> None:
    if op_name(node.target) == "getitem" and "value" not in node.args[0].meta:
        of_source = layouts[node.args[0]]
        layouts[node] = of_source[node.args[1]] if isinstance(of_source, list) else of_source
        return
    result = {}
    for axis in mesh.axes:
        own = {operand: layouts[operand][axis] for operand in tensors(node)}
        copies = split[axis] if axis in node.meta.get("shards_copies", ()) else ()
        result[axis] = type_node(node, axis, mesh, own, copies)
    layouts[node] = result


def _type_repeat(node: fx.Node, formals: dict, results: dict, parameters: dict, layouts: dict) -> None:
    """A repeated block types as its representative did, if its inputs and its parameters have the same layouts."""
    repeat, *actuals = node.args
    for formal, actual in zip(formals[repeat.representative], actuals, strict=True):
        if formal not in layouts:
            raise Mismatch(f"{repeat.representative} does not type")
        if not same_layouts(layouts[formal], layouts[actual], actual.meta["value"].requires_grad):
            raise Mismatch(f"enters with {layouts[actual]}, but {repeat.representative} with {layouts[formal]}")
    prefix = repeat.representative + "."
    for name in [n for n in parameters if n.startswith(prefix)]:
        mine, other = parameters[name], parameters[repeat.rename(name)]
        if (mine.shard, sorted(mine.grad_reduce)) != (other.shard, sorted(other.grad_reduce)):
            raise Mismatch(f"{other.name} is laid out differently from {mine.name}")
    if any(result not in layouts for result in results[repeat.representative]):
        raise Mismatch(f"{repeat.representative} does not type")
    all_results = [layouts[r] for r in results[repeat.representative]]
    layouts[node] = all_results[0] if "value" in node.meta else all_results


# -- obligations -----------------------------------------------------------------------------------------------------
Checked = Iterator[Finding | str]


def _reduced_outputs(model: ModelGraph, parameters: dict, mesh: Mesh, layouts: dict) -> Checked:
    """Outputs: the loss is I, so every rank has its value and starts backward from the same gradient."""
    for name, node in model.outputs.items():
        if node not in layouts:
            continue
        letters = {layout.letter for layout in layouts[node].values()}
        allowed = {"I", *["S"] * (name == "logits"), *["R"] * (not node.meta["value"].requires_grad)}
        if letters <= allowed:
            yield name
        else:
            yield Finding("outputs", name, f"leaves as {layouts[node]}, must be {' or '.join(sorted(allowed))}")


def _gradient_reductions(model: ModelGraph, parameters: dict, mesh: Mesh, layouts: dict) -> Checked:
    """Gradients: a parameter is R exactly on the axes over which its gradient is summed, and each is summed once.

    That every use of it is then one of R (or of I) is what its typing has shown.
    """
    for parameter in parameters.values():
        axes = [axis for name in parameter.grad_reduce for axis in mesh.atomic(name)]
        over = ", ".join(parameter.grad_reduce)
        split = sorted(_split_axes(parameter, mesh) & set(axes))
        if len(axes) != len(set(axes)):
            yield Finding("gradients", parameter.name, f"gradient is summed twice over {over}")
        elif any(axis not in mesh.axes for axis in axes):
            yield Finding("gradients", parameter.name, f"gradient is summed over unknown axes {over}")
        elif split:
            yield Finding("gradients", parameter.name, f"is sharded over {split[0]}: its gradient there is not partial")
        else:
            yield parameter.name
    for node in model.graph.nodes:
        if node.op == "get_attr" and node.meta["value"].requires_grad and node.target not in parameters:
            yield Finding("gradients", node.target, "is trained, but the parameter table does not hold it")


def _split_axes(parameter: ShardedParameter, mesh: Mesh) -> set[str]:
    segments = parameter.shard["segments"] if parameter.shard is not None else ()
    return {axis for segment in segments for _, name in segment["splits"] for axis in mesh.atomic(name)}


def _dropout_streams(model: ModelGraph, parameters: dict, mesh: Mesh, layouts: dict) -> Checked:
    """Randomness: a shard draws from a stream of its own, a whole value from the stream that all ranks share."""
    for node in model.operations():
        rule = rule_of(node)
        if rule is None or not rule.random or node not in layouts:
            continue
        split = {axis for axis, layout in layouts[node].items() if layout.letter == "S"}
        own = node.meta.get("rng_axis")
        named = set(mesh.atomic(own.name)) if isinstance(own, Axis) else set()
        if named - split:
            yield Finding(
                "randomness",
                describe(node),
                f"draws separately over {', '.join(sorted(named - split))}, where ranks hold the same value",
            )
        elif split - named and draws(node):
            yield Finding(
                "randomness",
                describe(node),
                f"draws the same on all ranks of {', '.join(sorted(split - named))}, which hold different parts",
            )
        else:
            yield node.name


def _normalised_loss(model: ModelGraph, parameters: dict, mesh: Mesh, layouts: dict) -> Checked:
    """Loss: a sum over targets divided by `num_targets`, the count over the whole batch with all its micro-batches."""
    loss = model.outputs.get("loss")
    if loss is None:
        return
    total, count = loss.args if op_name(loss.target) == "div" else (None, None)
    if total is not None and total.target in CONVERSIONS:
        total = total.args[0]
    names = ("cross_entropy", "vocab_cross_entropy")
    is_sum = total is not None and op_name(total.target) in names and total.kwargs.get("reduction") == "sum"
    if is_sum and count is model.inputs.get("num_targets"):
        yield "loss"
    else:
        yield Finding("loss", describe(loss), "is not a sum over targets divided by num_targets")


def _shard_maps(model: ModelGraph, parameters: dict, mesh: Mesh, layouts: dict) -> Checked:
    """Checkpoint: each element of a parameter lies on exactly one coordinate of the axes that split it."""
    shapes = {node.target: node.meta["value"].shape for node in model.graph.nodes if node.op == "get_attr"}
    for parameter in parameters.values():
        wrong = _shard_map_fault(parameter, mesh)
        if tuple(shapes.get(parameter.name, parameter.shape)) != tuple(parameter.shape):
            wrong = f"has the shape {shapes[parameter.name]} in the graph, but {parameter.shape} in the table"
        yield Finding("checkpoint", parameter.name, wrong) if wrong else parameter.name


def _shard_map_fault(parameter: ShardedParameter, mesh: Mesh) -> str | None:
    if parameter.shard is None:
        return None
    dim, segments = parameter.shard["dim"], parameter.shard["segments"]
    total = sum(prod(segment["sizes"]) for segment in segments)
    if dim >= len(parameter.shape) or total != parameter.shape[dim]:
        return f"its shard map covers {total} of {parameter.shape}"
    for segment in segments:
        split = [axis for _, name in segment["splits"] for axis in mesh.atomic(name)]
        if len(split) != len(set(split)):
            return f"its shard map splits twice over {', '.join(split)}"
    return None


OBLIGATIONS = {
    "outputs": _reduced_outputs,
    "gradients": _gradient_reductions,
    "randomness": _dropout_streams,
    "loss": _normalised_loss,
    "checkpoint": _shard_maps,
}
