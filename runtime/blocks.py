"""Where the blocks of a stage are: what recomputes, and what is gathered, together."""

from __future__ import annotations

from torch import nn


def blocks_of(stage: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a stage module by path, in order: modules with children in a module list, not those in a block.

    Where a stage does not begin with layer 0, its list is a ModuleDict with the numbers of the layers as keys."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> None:
        numbered = isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.ModuleDict) and all(name.isdigit() for name in module)
        )
        for name, child in module.named_children():
            # Layers of an nn.Sequential stand in a list too, but single ones have nothing inside.
            if numbered and next(child.children(), None) is not None:
                found[f"{path}{name}"] = child
            else:
                visit(child, f"{path}{name}.")

    visit(stage, "")
    return found
