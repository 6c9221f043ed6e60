"""How many parts a call's batch is split into."""

from __future__ import annotations

from typing import Any

from shardc.booster.plugin import Recipe
from shardc.errors import ShardcError


def count_microbatches(recipe: Recipe, dataloader: Any) -> int | None:
    """Parts of a batch, None for the compiler's own number. Raises ShardcError where microbatch_size cannot tell it."""
    if recipe.microbatch_size is None:
        return recipe.microbatches
    rows = getattr(dataloader, "batch_size", None)
    if not isinstance(rows, int):
        raise ShardcError(
            f"boost: microbatch_size={recipe.microbatch_size} needs a dataloader with a batch_size to be divided",
            "give boost the dataloader, or the plugin num_microbatches",
        )
    return -(-rows // recipe.microbatch_size)
