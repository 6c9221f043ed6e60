"""Values of parameters: from a Hugging Face folder, slice by slice, or drawn from a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import MeshAxis
from shardc.runtime.shard_map import shard_tensor
from shardc.runtime.spec import ParameterSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DEFAULT_STD = 0.02  # of a parameter whose plan says nothing of its initialisation; Hugging Face's initializer_range


class Weights(Protocol):
    """Where the values of parameters come from."""

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Raises ShardcError naming every parameter that is not there, or there in another shape."""

    def shard(self, spec: ParameterSpec, tp: MeshAxis, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The part of a parameter that the coord of `tp` holds, a tensor of its own."""

    def buffer(self, name: str) -> Tensor | None:
        """The value of a buffer, None where it is not there."""


class FolderWeights:
    """A Hugging Face folder: model.safetensors, or several files and their index. Reads only what a rank holds."""

    def __init__(self, folder: str | Path):
        """Opens the folder. Raises ShardcError if it holds no safetensors."""
        self.folder = Path(folder)
        self.file_of = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.folder / INDEX_FILE
        if index.is_file():
            return {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        single = self.folder / SINGLE_FILE
        if not single.is_file():
            raise ShardcError(
                f"{self.folder}: no {SINGLE_FILE} and no {INDEX_FILE}", "pass a folder that save_pretrained wrote"
            )
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)

    def find(self, spec: ParameterSpec) -> str | None:
        """The name under which the folder holds a parameter: its own, an alias, or one of them without its first part.

        A checkpoint of the bare model leaves out the prefix that the head adds: "h.0.ln_1.bias"."""
        names = (spec.name, *spec.aliases)
        candidates = (*names, *(name.partition(".")[2] for name in names))
        return next((name for name in candidates if name in self.file_of), None)

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Raises ShardcError naming every parameter that the folder lacks or holds in another shape."""
        problems = []
        for spec in specs:
            name = self.find(spec)
            if name is None:
                problems.append(f"{spec.name} is missing")
                continue
            with safe_open(self.file_of[name], "pt") as file:
                found = tuple(file.get_slice(name).get_shape())
            if found != spec.shape:
                problems.append(f"{spec.name} is {list(found)}, the plan has {list(spec.shape)}")
        if problems:
            raise ShardcError(
                f"{self.folder}: {'; '.join(problems)}",
                "pass the checkpoint of the model that the plan was compiled for",
            )

    def shard(self, spec: ParameterSpec, tp: MeshAxis, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Read this rank's part of a parameter."""
        name = self.find(spec)
        with safe_open(self.file_of[name], "pt") as file:
            if spec.shard is None:
                return file.get_tensor(name).to(device=device, dtype=dtype)
            whole = file.get_slice(name)
            dim = spec.shard.dim
            before = (slice(None),) * dim
            pieces = [whole[(*before, slice(start, end))] for start, end in spec.shard.runs(tp)]
            return torch.cat(pieces, dim).to(device=device, dtype=dtype)

    def buffer(self, name: str) -> Tensor | None:
        """Read a buffer, which a checkpoint may hold."""
        if name not in self.file_of:
            return None
        with safe_open(self.file_of[name], "pt") as file:
            return file.get_tensor(name)


class SeedWeights:
    """Random values that depend on the seed and the parameter's name only, so every layout gets the same model."""

    def __init__(self, seed: int):
        self.seed = seed

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Every parameter has a value."""

    def buffer(self, name: str) -> Tensor | None:
        """Buffers are not random."""
        return None

    def shard(self, spec: ParameterSpec, tp: MeshAxis, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw the whole parameter in float32 on `device` and keep this rank's part."""
        init = spec.init or {"kind": "normal", "mean": 0.0, "std": _DEFAULT_STD}
        full = torch.empty(spec.shape, dtype=torch.float32, device=device)
        if init["kind"] == "constant":
            full.fill_(init["value"])
        elif init["kind"] == "normal":
            digest = hashlib.sha256(f"{self.seed}:{spec.name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            full.normal_(init["mean"], init["std"], generator=generator)
        else:
            raise ShardcError(f"plan.json: {spec.name} has an unknown init {init['kind']!r}", "compile the plan again")
        return shard_tensor(full, spec.shard, tp).to(dtype, copy=spec.shard is None)
