"""Shard a captured model by a policy: the passes of this folder, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardc.capture.capture import CapturedModel, Variant
from shardc.capture.graph import ModelGraph
from shardc.errors import ShardcError
from shardc.policy import Rule
from shardc.sharding.analyse import analyse_factors, of_instances
from shardc.sharding.canonical import keep_batch_and_sequence
from shardc.sharding.factors import Dims
from shardc.sharding.localise import localise
from shardc.sharding.mark import mark, sharded_by_propagation
from shardc.sharding.mesh import Mesh
from shardc.sharding.propagate import propagate
from shardc.sharding.prove import Certificate, ShardedParameter, prove
from shardc.sharding.shard_map import shard_map_of
from shardc.sharding.unfold import unfold_unequal_roles

Table = dict[str, ShardedParameter]


@dataclass(slots=True)
class ShardedModel:
    """Graphs with conversions and global shapes, the parameter table, and what was noticed.

    propagated: modules that are sharded though no rule names them.
    """

    variants: dict[Variant, ModelGraph]
    parameters: Table
    mesh: Mesh
    sequence_parallel: bool
    certificate: Certificate = field(default_factory=Certificate)
    propagated: list[str] = field(default_factory=list)

    @property
    def sub_axes(self) -> dict[str, int] | None:
        """{"kv": 2, "replica": 2} where tp exceeds the KV heads."""
        return {axis.removeprefix("tp."): n for axis, n in self.mesh.sizes.items()} if len(self.mesh.axes) > 1 else None


def shard(captured: CapturedModel, roles: dict[str, Rule], *, tp: int, sequence_parallel: bool = False) -> ShardedModel:
    """Insert the conversions that `roles` (module path -> rule) ask for into every graph of `captured`, in place.

    Raises ShardcError naming module and line where the roles do not fit the model; a refuted plan is not an error
    here: see `certificate`.
    """
    if sequence_parallel and tp == 1:
        raise ShardcError(
            "sequence parallelism shards the residual stream over tp, and tp is 1", "use --tp 2 or more with --sp"
        )
    if tp == 1:
        roles = {}  # nothing is split, so nothing enters a parallel region
    graphs = captured.variants
    found = {variant: _shard_graph(model, roles, tp, sequence_parallel) for variant, model in graphs.items()}
    table, mesh, propagated = next(iter(found.values()))
    for variant, (other, _, _) in found.items():
        _check_same_table(table, other, variant)
    sharded = ShardedModel(graphs, table, mesh, sequence_parallel, propagated=propagated)
    for model in graphs.values():
        sharded.certificate.merge(prove(model, table, mesh))
    return sharded


def _shard_graph(
    model: ModelGraph, roles: dict[str, Rule], tp: int, sequence_parallel: bool
) -> tuple[Table, Mesh, list]:
    """The passes, in order; returns the parameter table, the mesh, and the modules that only propagation sharded."""
    if tp > 1:
        unfold_unequal_roles(model, roles)
        keep_batch_and_sequence(model)
    dims = analyse_factors(model)
    marks = mark(model, roles, dims, tp)
    partial = propagate(model, marks, roles, sequence_parallel=sequence_parallel)
    table = _parameter_table(model, dims, partial, marks.mesh)
    return table, marks.mesh, sharded_by_propagation(model, marks, roles, dims)


def _check_same_table(table: Table, other: Table, variant: Variant) -> None:
    """All variants of a model train the same parameters."""
    for name, parameter in table.items():
        if parameter != other[name]:
            raise ShardcError(
                f"{name}: laid out as {parameter} in the plain graph, but as {other[name]} in the {variant.name} one",
                "mark its module `replicate`",
            )


def _parameter_table(model: ModelGraph, dims: dict[str, Dims], partial: dict[str, list[str]], mesh: Mesh) -> Table:
    layouts = of_instances(model, "layouts")
    table = {}
    for parameter in model.parameters.values():
        if parameter.is_buffer:
            continue
        own = layouts.get(parameter.name, {})
        axes = tuple(partial.get(parameter.name, ()))
        reduce = ("tp",) if axes == mesh.axes and axes else axes
        shard_map = shard_map_of(parameter.name, dims[parameter.name], own, mesh) if own else None
        table[parameter.name] = ShardedParameter(
            parameter.name, parameter.shape, parameter.requires_grad, parameter.aliases, shard_map, reduce
        )
    return table


def localise_model(sharded: ShardedModel) -> None:
    """Make every graph say what one rank computes, in place.

    Before: graphs as the proof leaves them, with factors and layouts. After: they can no longer be proved.
    """
    for model in sharded.variants.values():
        localise(model, sharded.mesh, of_instances(model, "dims"), of_instances(model, "layouts"))
