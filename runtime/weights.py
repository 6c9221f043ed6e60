"""Values of parameters: from a Hugging Face folder, slice by slice, or drawn from a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import MeshAxis
from shardc.runtime.shard_map import shard_tensor
from shardc.runtime.spec import ParameterSpec

_DEFAULT_STD = 0.02  # of a parameter whose plan says nothing of its initialisation; Hugging Face's initializer_range


class Weights(Protocol):
    """Where the values of parameters come from."""

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Raises ShardcError naming every parameter that is not there, or there in another shape."""

    def shard(self, spec: ParameterSpec, tp: MeshAxis, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The part of a parameter that the coord of `tp` holds, a tensor of its own."""

    def buffer(self, name: str) -> Tensor | None:
        """The value of a buffer, None where it is not there."""


def open_weights(path: str | Path) -> Weights:
    """The weights in a Hugging Face folder, in one safetensors file, or in a file of torch.save(state_dict).

    Raises ShardcError for what is none of these."""
    path = Path(path)
    if path.is_dir():
        return FolderWeights(path)
    if not path.exists():
        raise ShardcError(f"{path} does not exist", "pass what booster.save_model or save_pretrained wrote")
    return FolderWeights(path) if path.suffix == ".safetensors" else TorchFileWeights(path)


class FolderWeights:
    """A Hugging Face folder: model.safetensors, or several files and their index. Reads only what a rank holds."""

    def __init__(self, folder: str | Path, *, stem: str = "model"):
        """Opens the folder, or one file. stem: of the files' names. Raises ShardcError if there are no safetensors."""
        self.folder, self.stem = Path(folder), stem
        self.file_of = self._index()

    def _index(self) -> dict[str, Path]:
        if self.folder.is_file():
            return self._one_file(self.folder)
        index, single = (self.folder / f"{self.stem}.safetensors{end}" for end in (".index.json", ""))
        if index.is_file():
            files = {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            for file in sorted(set(files.values())):
                self._one_file(file)
            return files
        if not single.is_file():
            raise ShardcError(
                f"{self.folder}: no {single.name} and no {index.name}", "pass a folder that save_pretrained wrote"
            )
        return self._one_file(single)

    def _one_file(self, path: Path) -> dict[str, Path]:
        try:
            with safe_open(path, "pt") as file:
                return dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise ShardcError(f"{path} cannot be read: {error}", "save it again, or pass an older checkpoint") from None

    def find(self, spec: ParameterSpec) -> str | None:
        """The name under which the folder holds a parameter."""
        return _found(spec, self.file_of)

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Raises ShardcError naming every parameter that the folder lacks or holds in another shape."""
        _check(self.folder, specs, self._shape)

    def _shape(self, spec: ParameterSpec) -> tuple[int, ...] | None:
        name = self.find(spec)
        if name is None:
            return None
        with safe_open(self.file_of[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

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


def _found(spec: ParameterSpec, known: Container[str]) -> str | None:
    """The name of a parameter in a checkpoint: its own, an alias, or one of them without its first part.

    A checkpoint of the bare model leaves out the prefix that the head adds: "h.0.ln_1.bias"."""
    names = (spec.name, *spec.aliases)
    candidates = (*names, *(name.partition(".")[2] for name in names))
    return next((name for name in candidates if name in known), None)


def _check(
    place: Path, specs: Iterable[ParameterSpec], shape_of: Callable[[ParameterSpec], tuple[int, ...] | None]
) -> None:
    problems = []
    for spec in specs:
        found = shape_of(spec)
        if found is None:
            problems.append(f"{spec.name} is missing")
        elif found != spec.shape:
            problems.append(f"{spec.name} is {list(found)}, the plan has {list(spec.shape)}")
    if problems:
        raise ShardcError(
            f"{place}: {'; '.join(problems)}", "pass the checkpoint of the model that the plan was compiled for"
        )


class TorchFileWeights:
    """A state dict that torch.save wrote; its tensors stay on the disk until they are read."""

    def __init__(self, path: Path):
        """Opens the file. Raises ShardcError if it is none of torch's, or holds more than tensors by name."""
        try:
            self.tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # of zipfile, pickle or torch, as the damage has it
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ShardcError(f"{path} cannot be read: {reason}", "pass a file of safetensors or torch.save") from None
        if not isinstance(self.tensors, dict) or not all(isinstance(x, Tensor) for x in self.tensors.values()):
            raise ShardcError(f"{path} holds no state dict", "pass what torch.save(model.state_dict(), path) wrote")
        self.path = path

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Raises ShardcError naming every parameter that the file lacks or holds in another shape."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        _check(self.path, specs, lambda spec: shapes.get(_found(spec, shapes)))

    def shard(self, spec: ParameterSpec, tp: MeshAxis, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Read this rank's part of a parameter."""
        whole = self.tensors[_found(spec, self.tensors)]
        return shard_tensor(whole, spec.shard, tp).to(device=device, dtype=dtype, copy=True)

    def buffer(self, name: str) -> Tensor | None:
        """Read a buffer, which the file may hold."""
        return self.tensors.get(name)


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
