"""A model's name -> its config and a way to build it on meta tensors. Importing this package loads no transformers."""

from shardc.models.overrides import parse_set
from shardc.models.presets import Preset, list_presets, load_preset
from shardc.models.reduced import reduced_config
from shardc.models.resolve import resolve
from shardc.models.source import ModelSource, source_from_callable, source_from_config

__all__ = [
    "ModelSource",
    "Preset",
    "list_presets",
    "load_preset",
    "parse_set",
    "reduced_config",
    "resolve",
    "source_from_callable",
    "source_from_config",
]
