"""Where a chunk's parameters and states live, and how fractions of a model are turned into whole chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEVICE, HOST = "device", "host"


@dataclass(frozen=True, slots=True)
class Home:
    """parameters: DEVICE or HOST. sharded: over dp; on the host they always are. states: DEVICE or HOST; the master
    weights and what the optimizer keeps of each."""

    sharded: bool
    parameters: str = DEVICE
    states: str = DEVICE

    @property
    def is_gathered_to_use(self) -> bool:
        """Whether modules find the parameters in a tensor that is whole only while they use it."""
        return self.sharded or self.parameters == HOST


def last_chunks(sizes: Sequence[int], fraction: float) -> int:
    """How many chunks at the end hold `fraction` of all elements, to within half a chunk. sizes: in order of use.

    The end, because what an optimizer updates on the host is ready later: the next forward needs the last chunks
    last."""
    wanted, taken = fraction * sum(sizes), 0.0
    for count, size in enumerate(reversed(sizes)):
        if taken + size / 2 > wanted:
            return count
        taken += size
    return len(sizes)


def find_homes(
    sizes: Sequence[int],
    trained: Sequence[bool],
    *,
    sharded: float,
    host_parameters: float,
    host_states: float,
) -> list[Home]:
    """Home of each chunk. sizes: elements, in order of use; trained: whether an optimizer updates it; shares of all."""
    count = len(sizes)
    first_sharded = count - last_chunks(sizes, sharded)
    first_host = count - last_chunks(sizes, host_parameters)
    of_trained = [index for index in range(count) if trained[index]]
    on_host = last_chunks([sizes[index] for index in of_trained], host_states)
    host = set(of_trained[len(of_trained) - on_host :])
    return [
        Home(
            sharded=index >= first_sharded,
            parameters=HOST if index >= first_host else DEVICE,
            states=HOST if index in host else DEVICE,
        )
        for index in range(count)
    ]
