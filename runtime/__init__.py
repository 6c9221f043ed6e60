"""What a training process runs: torch and this package, never transformers or the compiler."""

from shardc.runtime.collectives import (
    all_gather,
    all_gather_invariant,
    all_reduce,
    copy_to,
    keep_on_first,
    reduce_scatter,
    shard,
)
from shardc.runtime.errors import ShardcError
from shardc.runtime.launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from shardc.runtime.layers import (
    Conv1D,
    RowConv1D,
    RowLinear,
    VocabEmbedding,
    vocab_cross_entropy,
    vocab_embedding,
)
from shardc.runtime.mesh import Mesh, MeshAxis
from shardc.runtime.module import PlanModule
from shardc.runtime.output import Output
from shardc.runtime.plan import Plan, load_plan
from shardc.runtime.rng import sharded_rng
from shardc.runtime.shard_map import ShardMap, shard_tensor, unshard_tensor

__all__ = [
    "Conv1D",
    "Mesh",
    "MeshAxis",
    "Output",
    "Plan",
    "PlanModule",
    "RowConv1D",
    "RowLinear",
    "ShardMap",
    "ShardcError",
    "VocabEmbedding",
    "all_gather",
    "all_gather_invariant",
    "all_reduce",
    "copy_to",
    "keep_on_first",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "load_plan",
    "reduce_scatter",
    "shard",
    "shard_tensor",
    "sharded_rng",
    "unshard_tensor",
    "vocab_cross_entropy",
    "vocab_embedding",
]
