"""Finds transformers classes by model_type, importing one model's modules and nothing else."""

import difflib
import importlib
from typing import Any

from shardc.errors import ShardcError


def config_class(model_type: str) -> type:
    """The config class of `model_type` ("gemma3_text" -> Gemma3TextConfig)."""
    names = _mappings().CONFIG_MAPPING_NAMES
    if model_type not in names:
        near = ", ".join(difflib.get_close_matches(model_type, names, n=4)) or "none"
        raise ShardcError(
            f"config: model_type {model_type!r} is unknown to transformers {_version()}; near names: {near}",
            "a model with its own code is compiled as my_file.py:make_model",
        )
    return getattr(_package(model_type), names[model_type])


def causal_lm_class(config: Any) -> type:
    """The causal language model class of an HF config: its first architecture, or what transformers maps to it."""
    package = _package(config.model_type)
    for name in config.architectures or []:
        if name.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(package, name):
            return getattr(package, name)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    if config.model_type not in names or hasattr(config, "text_config"):
        raise ShardcError(
            f"config: model_type {config.model_type!r} has no causal language model of its own",
            "give the config of its text part, or compile my_file.py:make_model",
        )
    return getattr(package, names[config.model_type])


def _package(model_type: str) -> Any:
    special = _mappings().SPECIAL_MODEL_TYPE_TO_MODULE_NAME
    return importlib.import_module(f"transformers.models.{special.get(model_type, model_type.replace('-', '_'))}")


def _mappings() -> Any:
    """The tables of names; their module imports nothing but collections."""
    return importlib.import_module("transformers.models.auto.auto_mappings")


def _version() -> str:
    return importlib.import_module("transformers").__version__
