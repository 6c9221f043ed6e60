"""The parameters and buffers of a model: names and aliases, shapes, dtypes, how they start."""

from __future__ import annotations

import torch

from shardc.capture.fit import Probe, fit_literal
from shardc.capture.graph import Parameter
from shardc.capture.init import initial_values
from shardc.capture.model_index import ModelIndex


def model_parameters(built: dict[torch.dtype, ModelIndex]) -> dict[str, Parameter]:
    """By canonical name, from one model built in several default dtypes: a dtype that follows them is MODEL_DTYPE."""
    first, *others = built.values()
    init = initial_values(first)
    probes = [Probe(1, 1, dtype) for dtype in built]
    tensors = [_tensors(index.model) for index in (first, *others)]
    names: dict[str, list[str]] = {}
    for name, tensor in tensors[0].items():
        names.setdefault(first.tensor_names[id(tensor)], []).append(name)
    buffers = {name for name, _ in first.model.named_buffers(remove_duplicate=False)}
    result = {}
    for name, aliases in names.items():
        tensor = tensors[0][name]
        dtype = fit_literal([each[name].dtype for each in tensors], probes)
        result[name] = Parameter(
            name, tuple(tensor.shape), dtype, tensor.requires_grad, tuple(aliases[1:]), name in buffers, init.get(name)
        )
    return result


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
