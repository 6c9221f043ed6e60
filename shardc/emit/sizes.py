"""How a constructor writes the size of a parameter."""

from shardc.capture.symbols import ShardSize


def size_text(size: int | ShardSize) -> str:
    """A size in a constructor; one that differs between ranks (an odd vocabulary) is asked of the axis."""
    if isinstance(size, ShardSize):
        axis = "tp" if size.axis == "tp" else f'tp.sub("{size.axis.removeprefix("tp.")}")'
        return f"{axis}.shard_size({size.size})"
    return str(size)
