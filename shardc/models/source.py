"""ModelSource: a model that is resolved and not yet built."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardc.errors import ShardcError
from shardc.models.hf import causal_lm_class


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What `resolve` finds: enough to build the model as often as wanted, on any device, in any dtype."""

    name: str
    config: Any  # the Hugging Face config, or None for a plain nn.Module
    class_name: str
    make: Callable[[], Any] = field(repr=False)  # builds under the current torch default dtype and torch.device context


def source_from_config(config: Any, name: str) -> ModelSource:
    """The source of an HF causal language model without a cache, with SDPA attention where it has that (not Gemma-2).

    The config is copied at each build: nothing that the model writes into it returns here."""
    model_class = causal_lm_class(config)
    attention = "sdpa" if model_class._supports_sdpa else "eager"

    def make() -> Any:
        import torch

        own = copy.deepcopy(config)
        own.use_cache = False
        try:
            return model_class._from_config(own, dtype=torch.get_default_dtype(), attn_implementation=attention)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise ShardcError(f"{model_class.__name__}: {reason}", "compile it as my_file.py:make_model") from error

    return ModelSource(name, config, model_class.__name__, make)


def source_from_callable(
    function: Callable[..., Any], name: str, overrides: dict[str, Any] | None = None
) -> ModelSource:
    """The source of a user's own model: `function(**overrides)` returns an nn.Module.

    It is called once here, on the meta device, for its class (and its config, where it is a transformers model)."""
    import torch

    arguments = dict(overrides or {})

    def make() -> Any:
        module = function(**arguments)
        if not isinstance(module, torch.nn.Module):
            raise ShardcError(f"{name}: returned {type(module).__name__}, not an nn.Module", "return the model itself")
        return module

    with torch.device("meta"):
        module = make()
    return ModelSource(name, _hf_config(module), type(module).__name__, make)


def _hf_config(module: Any) -> Any:
    transformers = sys.modules.get("transformers.modeling_utils")  # loaded if the module is one of its models
    return module.config if transformers and isinstance(module, transformers.PreTrainedModel) else None
