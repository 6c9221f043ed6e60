"""Make a model of transformers without its values; boost reads or draws what each rank holds."""

from __future__ import annotations

import copy
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

# Arguments of from_pretrained that say where the files are.
_PLACE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
# Those that change nothing of a model without values, or that were heeded before: by AutoModel, or in the config.
_WITHOUT_EFFECT = (
    "low_cpu_mem_usage",
    "use_safetensors",
    "weights_only",
    "disable_mmap",
    "attn_implementation",
    "trust_remote_code",
)


@contextmanager
def lazy_init() -> Iterator[None]:
    """Inside, from_pretrained and the constructors of transformers' models read and draw no values.

    with shardc.lazy_init():
        model = AutoModelForCausalLM.from_pretrained(folder)   # or from_config(config)

    Parameters are on the meta device. `boost` then reads from the folder's safetensors what a rank holds, or draws it
    from the seed (torch.initial_seed() of rank 0): no rank ever holds the whole model. Until then the model has no
    values: to call it raises ShardcError, and what is written into its parameters is lost. Raises ShardcError for
    quantized checkpoints, for adapters, and for arguments of from_pretrained that change the weights.
    """
    from transformers import PreTrainedModel

    read, construct = PreTrainedModel.__dict__["from_pretrained"], PreTrainedModel.__init__

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _origins[self] = SeedWeights(torch.initial_seed())
        self.register_forward_pre_hook(_refuse_call)

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


def _refuse_call(model: nn.Module, args: Any) -> None:
    """A forward pre-hook; copies of the model, which capture makes with values, are not in _origins."""
    if model in _origins and any(parameter.is_meta for parameter in model.parameters()):
        raise ShardcError(
            f"{type(model).__name__}: was made inside lazy_init, and has no values to compute with",
            "call what boost returns, or load the model outside of lazy_init",
        )


def _from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    """PreTrainedModel.from_pretrained, but for the values. The model is in evaluation mode, as there."""
    place = {key: kwargs.pop(key) for key in _PLACE if kwargs.get(key) is not None}
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or "auto"
    generation = kwargs.pop("generation_config", None)
    adapter = (kwargs | (kwargs.pop("adapter_kwargs", None) or {})).get("_adapter_model_path")
    if config is None or isinstance(config, (str, Path)):
        config, kwargs = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **place, **kwargs)
    config = copy.deepcopy(config)
    config.name_or_path = str(name)
    _check_arguments(args, kwargs, config)
    folder = _folder(name, place)
    if adapter is not None or (folder / "adapter_config.json").is_file():
        raise ShardcError(
            f"lazy_init: {adapter or name} holds an adapter",
            "load its base model here, then booster.enable_lora(model, pretrained_dir=...)",
        )
    weights = FolderWeights(folder)
    model = cls._from_config(config, dtype=_dtype(dtype, config, weights))
    if model.can_generate():
        model.generation_config = generation or _generation_config(name, place, model)
    _origins[model] = weights
    return model.eval()


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> None:
    """Raises ShardcError for what is neither a field that the config has taken nor without effect."""
    changed = sorted(
        key
        for key, value in kwargs.items()
        if key not in _WITHOUT_EFFECT and key[0] != "_" and (value not in (None, False) or hasattr(config, key))
    )
    if args or changed:
        what = ", ".join(changed) or "further positional arguments"
        raise ShardcError(
            f"lazy_init: from_pretrained does not take {what}", "leave them out, or load the model outside of lazy_init"
        )
    if getattr(config.get_text_config(), "quantization_config", None) or getattr(config, "quantization_config", None):
        raise ShardcError(
            "lazy_init: the checkpoint is quantized; quantized weights are not supported",
            "load one in bfloat16, float16 or float32",
        )


def _folder(name: Any, place: dict[str, Any]) -> Path:
    """The folder itself, or what the hub's cache has of it, downloaded if need be."""
    if Path(name).is_dir():
        return Path(name) / place.get("subfolder", "")
    from huggingface_hub import snapshot_download

    subfolder = place.get("subfolder", "")
    files = ("model*.safetensors", "model.safetensors.index.json", "adapter_config.json")  # not other copies of them
    patterns = [f"{subfolder}/{pattern}".lstrip("/") for pattern in files]
    hub = {key: value for key, value in place.items() if key != "subfolder"}
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
