"""The two records of a policy: Rule and Policy."""

from dataclasses import dataclass
from typing import Literal

# Role -> library classes that may take it. Layouts per role, on the tp axis: column takes I and gives S; row takes S
# and gives P; vocab splits the rows of the embedding and of the head that is tied to it; replicate is whole everywhere.
ROLES: dict[str, tuple[str, ...]] = {
    "column": ("Linear", "Conv1D"),
    "row": ("Linear", "Conv1D"),
    "vocab": ("Embedding", "Linear"),
    "replicate": ("Linear", "Conv1D", "Embedding"),
}
# Not of policies, of adapters: whole on every rank within the parallel region of a column, so gradients are partial.
INSIDE = "inside"
LEAVES = ("Linear", "Conv1D", "Embedding")
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a policy: the modules that `pattern` names take `role`."""

    pattern: str  # glob over module paths: * crosses dots, {a,b} is either
    role: str
    optional: bool  # may match nothing: some members of the family lack the module
    file: str
    line: int  # from 1

    @property
    def place(self) -> str:
        """ "qwen3.yaml:4"."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as it was read: roles by pattern, and how the stack of blocks may be cut."""

    models: tuple[str, ...]  # config.model_type values that the file is meant for
    rules: tuple[Rule, ...]
    blocks: str | None  # glob of the repeated blocks, here * stays within one name; None: cuts fall at any module
    cuts: Literal["auto"] | tuple[int, ...]  # indices of the blocks that begin stage 1, 2, ...
    file: str
    pipeline_line: int = 0

    @property
    def place(self) -> str:
        """ "qwen3.yaml:9", the line of its pipeline section."""
        return f"{self.file}:{self.pipeline_line}"
