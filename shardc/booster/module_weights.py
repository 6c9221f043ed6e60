"""The tensors of a live model as a source of weights, and the folder or seed of one that has no values yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.runtime.mesh import MeshAxis
from shardc.runtime.shard_map import shard_tensor
from shardc.runtime.spec import ParameterSpec
from shardc.runtime.weights import Weights


class ModuleWeights:
    """Reads from the model's own tensors, and from `origin` what is on the meta device; see runtime.weights.Weights.

    origin: of the model without adapters, whose names lack what peft adds to them."""

    def __init__(self, model: nn.Module, origin: Weights | None = None):
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.origin = origin

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Raises ShardcError for a parameter that the model lacks, has in another shape, or has no values of."""
        absent = []
        for spec in specs:
            found = self._find(spec)
            if found is None or tuple(found.shape) != spec.shape:
                shape = "missing" if found is None else list(found.shape)
                raise ShardcError(
                    f"boost: {spec.name} is {shape} in the model, the plan has {list(spec.shape)}",
                    "give boost the model that the plan was compiled for",
                )
            if not found.is_meta:
                continue
            if self.origin is None:
                raise ShardcError(
                    f"boost: {spec.name} is on the meta device and has no values",
                    "load the model, or make a model of transformers inside `with shardc.lazy_init():`",
                )
            absent.append(_without_adapter_names(spec))
        if absent:
            self.origin.check(absent)

    def shard(self, spec: ParameterSpec, tp: MeshAxis, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's part of a parameter, a tensor of its own."""
        whole = self._find(spec)
        if whole.is_meta:
            return self.origin.shard(_without_adapter_names(spec), tp, dtype, device)
        return shard_tensor(whole.detach(), spec.shard, tp).to(device=device, dtype=dtype, copy=True)

    def buffer(self, name: str) -> Tensor | None:
        """The model's own buffer."""
        found = self.buffers.get(name)
        if found is not None and found.is_meta:
            return None if self.origin is None else self.origin.buffer(_without_adapter(name))
        return found

    def _find(self, spec: ParameterSpec) -> Tensor | None:
        names = (spec.name, *spec.aliases)
        return next((self.parameters[name] for name in names if name in self.parameters), None)


def _without_adapter_names(spec: ParameterSpec) -> ParameterSpec:
    return replace(spec, name=_without_adapter(spec.name), aliases=tuple(map(_without_adapter, spec.aliases)))


def _without_adapter(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
