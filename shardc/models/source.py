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

    def make() -> Any:
        try:
            return build_from_config(model_class, config)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise ShardcError(f"{model_class.__name__}: {reason}", "compile it as my_file.py:make_model") from error

    return ModelSource(name, config, model_class.__name__, make)


def build_from_config(model_class: Any, config: Any) -> Any:
    """A transformers model as it is trained: no cache, `attention_of` its class, the current default dtype."""
    import torch

    own = copy.deepcopy(config)
    own.use_cache = False
    attention = attention_of(model_class, own)
    return model_class._from_config(own, dtype=torch.get_default_dtype(), attn_implementation=attention)


def attention_of(model_class: Any, config: Any) -> str:
    """The attention implementation that is captured: SDPA where it computes all that the model asks for.

    It has no cap on its logits: transformers 5.17 offers it to Gemma-2 all the same, and leaves the cap out."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if model_class._supports_sdpa and not capped else "eager"


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
    if without_peft(module) is not module:
        from shardc.models.live import source_from_module  # it knows how adapters are built in any dtype

        return source_from_module(module, name)
    return ModelSource(name, hf_config(module), type(module).__name__, make)


def hf_config(module: Any) -> Any:
    """The config of a transformers model, with adapters or without; None of any other module."""
    transformers = sys.modules.get("transformers.modeling_utils")  # loaded if the module is one of its models
    module = without_peft(module)
    return module.config if transformers and isinstance(module, transformers.PreTrainedModel) else None


def without_peft(module: Any) -> Any:
    """The model inside a PeftModel, its adapters still in it; any other module itself."""
    peft = sys.modules.get("peft.peft_model")
    return module.get_base_model() if peft and isinstance(module, peft.PeftModel) else module
