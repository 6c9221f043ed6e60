"""Data parallelism: every rank holds the whole model and its states."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.booster.plugin import arguments as a
from shardc.booster.plugin.arguments import argument
from shardc.booster.plugin.base import Plugin
from shardc.booster.plugin.recipe import Recipe

BUFFERS = "buffers are constants of the model, equal on every rank, and never sent"
UNUSED_PARAMETERS = "parameters without a gradient in a step are allowed in any case"
CHECKED = "the order of the reductions is fixed when the model is compiled"
BUCKET_VIEWS = "gradients are views of flat chunks in any case"
GRAPH = "nothing depends on whether the graph changes"
_BYTES = {"fp16": 2, "bf16": 2}


def elements_of(mib: float, precision: str | None) -> int:
    """How many gradients, in their precision (None: float32), fill a bucket of `mib` MiB."""
    return max(1, int(mib * 2**20) // _BYTES.get(precision, 4))


@dataclass(frozen=True, eq=False, repr=False)
class TorchDDPPlugin(Plugin):
    """What torch's DistributedDataParallel does. Precision is Booster's mixed_precision, or the model's own dtype.

    bucket_cap_mb: the largest bucket of float32 gradients that is reduced at once, in MiB.
    """

    broadcast_buffers: bool = argument(True, a.FLAG, unused=BUFFERS)
    bucket_cap_mb: float = argument(25, a.POSITIVE)
    find_unused_parameters: bool = argument(False, a.FLAG, unused=UNUSED_PARAMETERS)
    check_reduction: bool = argument(False, a.FLAG, unused=CHECKED)
    gradient_as_bucket_view: bool = argument(False, a.FLAG, unused=BUCKET_VIEWS)
    static_graph: bool = argument(False, a.FLAG, unused=GRAPH)
    fp8_communication: bool = argument(False, a.FLAG, unused=a.NO_FP8_SENT)

    def _recipe(self) -> Recipe:
        return Recipe(placement="ddp", bucket_elements=elements_of(self.bucket_cap_mb, None))
