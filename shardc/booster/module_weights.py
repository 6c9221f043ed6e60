"""The tensors of a live model as a source of weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.runtime.mesh import MeshAxis
from shardc.runtime.shard_map import shard_tensor
from shardc.runtime.spec import ParameterSpec


class ModuleWeights:
    """Reads from the model's own tensors, one at a time; see shardc.runtime.weights.Weights."""

    def __init__(self, model: nn.Module):
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))

    def check(self, specs: Iterable[ParameterSpec]) -> None:
        """Raises ShardcError for a parameter that the model lacks, has in another shape, or has no values of."""
        for spec in specs:
            found = self._find(spec)
            if found is None or tuple(found.shape) != spec.shape:
                shape = "missing" if found is None else list(found.shape)
                raise ShardcError(
                    f"boost: {spec.name} is {shape} in the model, the plan has {list(spec.shape)}",
                    "give boost the model that the plan was compiled for",
                )
            if found.is_meta:
                raise ShardcError(
                    f"boost: {spec.name} is on the meta device and has no values",
                    "load the model, or make it inside `with shardc.lazy_init():`",
                )

    def shard(self, spec: ParameterSpec, tp: MeshAxis, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's part of a parameter, a copy."""
        whole = self._find(spec)
        assert whole is not None
        return shard_tensor(whole.detach(), spec.shard, tp).to(device=device, dtype=dtype, copy=True)

    def buffer(self, name: str) -> Tensor | None:
        """The model's own buffer."""
        return self.buffers.get(name)

    def _find(self, spec: ParameterSpec) -> Tensor | None:
        names = (spec.name, *spec.aliases)
        return next((self.parameters[name] for name in names if name in self.parameters), None)
