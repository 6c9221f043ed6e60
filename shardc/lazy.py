"""Make a model of transformers without its values; boost reads or draws what each rank holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import nn

from shardc.errors import ShardcError
from shardc.runtime.weights import FolderWeights, SeedWeights, Weights

_origins: WeakKeyDictionary[nn.Module, Weights] = WeakKeyDictionary()

# Arguments of from_pretrained that say where the files are; all others but these and dtype are refused.
_PLACE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_WITHOUT_EFFECT = (
    "low_cpu_mem_usage",
    "use_safetensors",
    "weights_only",
    "disable_mmap",
    "attn_implementation",
    "adapter_kwargs",
)


@contextmanager
def lazy_init() -> Iterator[None]:
    """Inside, from_pretrained and the constructors of transformers' models read and draw no values.

    with shardc.lazy_init():
        model = AutoModelForCausalLM.from_pretrained(folder)   # or from_config(config)

    Parameters are on the meta device. `boost` then reads from the folder's safetensors what a rank holds, or draws it
    from the seed (torch.initial_seed() of rank 0): no rank ever holds the whole model. Until then the model has no
    values to compute with. Raises ShardcError for arguments of from_pretrained that change the weights.
    """
    from transformers import PreTrainedModel

    read, construct = PreTrainedModel.__dict__["from_pretrained"], PreTrainedModel.__init__

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _origins[self] = SeedWeights(torch.initial_seed())

    PreTrainedModel.from_pretrained = classmethod(_from_pretrained)
    PreTrainedModel.__init__ = constructed
    try:
        with torch.device("meta"):
            yield
    finally:
        PreTrainedModel.from_pretrained, PreTrainedModel.__init__ = read, construct


def origin_of(model: nn.Module) -> Weights | None:
    """Where the values of a model are that was made inside lazy_init; None of others."""
    return _origins.get(model)


def _from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    """PreTrainedModel.from_pretrained, but for the values. The model is in evaluation mode, as there."""
    place = {key: kwargs.pop(key) for key in _PLACE if kwargs.get(key) is not None}
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or "auto"
    generation = kwargs.pop("generation_config", None)
    changed = sorted(key for key, value in kwargs.items() if value and key not in _WITHOUT_EFFECT and key[0] != "_")
    if args or changed:
        what = ", ".join(changed) or "further positional arguments"
        raise ShardcError(
            f"lazy_init: from_pretrained does not take {what}", "leave them out, or load the model outside of lazy_init"
        )
    if config is None or isinstance(config, (str, Path)):
        config = cls.config_class.from_pretrained(config or name, **place)
    weights = FolderWeights(_folder(name, place))
    model = cls._from_config(config, dtype=_dtype(dtype, config, weights))
    if model.can_generate():
        model.generation_config = generation or _generation_config(name, place, model)
    _origins[model] = weights
    return model.eval()


def _folder(name: Any, place: dict[str, Any]) -> Path:
    """The folder itself, or what the hub's cache has of it, downloaded if need be."""
    if Path(name).is_dir():
        return Path(name) / place.get("subfolder", "")
    from huggingface_hub import snapshot_download

    hub = {key: value for key, value in place.items() if key != "subfolder"}
    subfolder = place.get("subfolder", "")
    patterns = [f"{subfolder}/{kind}".lstrip("/") for kind in ("*.safetensors", "*.safetensors.index.json")]
    return Path(snapshot_download(str(name), allow_patterns=patterns, **hub)) / subfolder


def _dtype(dtype: Any, config: Any, weights: FolderWeights) -> torch.dtype:
    """What from_pretrained would load in: "auto" is the config's dtype, or that of the file's first tensor."""
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or _stored_dtype(weights)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _stored_dtype(weights: FolderWeights) -> torch.dtype:
    name, path = next(iter(sorted(weights.file_of.items())))
    with safe_open(path, "pt") as file:
        return file.get_slice(name)[:0].dtype


def _generation_config(name: Any, place: dict[str, Any], model: Any) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(name, **place)
    except (OSError, json.JSONDecodeError):  # a folder without one
        return model.generation_config
