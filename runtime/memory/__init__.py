"""Training state in flat chunks: where parameters, gradients, master weights and optimizer states live.

A chunk is one flat tensor of several parameters. DDP and ZeRO-1, 2, 3 are placements of the same chunks, whole or
sharded over dp (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054).

layout  which parameters share a chunk, and where they lie in it
homes   whether a chunk's parameters and states are on the device or the host
chunk   the tensors of one chunk
access  gathers parameters that are sharded, or on the host, before a module uses them
reduce  sums gradients over ranks while backward runs
update  steps of the optimizer, on the device or by a thread on the host
copies  between device and host, beside computation
engine  puts these together for one rank's module
"""

from shardc.runtime.memory.engine import MemoryEngine
from shardc.runtime.memory.placement import PLACEMENTS, Placement, find_placement

__all__ = ["PLACEMENTS", "MemoryEngine", "Placement", "find_placement"]
