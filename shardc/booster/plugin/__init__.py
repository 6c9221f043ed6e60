"""Plugins: how a model is split and where its states are kept. Names and arguments are those of ColossalAI."""

from shardc.booster.plugin.base import Plugin
from shardc.booster.plugin.gemini import GeminiPlugin
from shardc.booster.plugin.hybrid_parallel import HybridParallelPlugin
from shardc.booster.plugin.low_level_zero import LowLevelZeroPlugin
from shardc.booster.plugin.recipe import (
    GradientCheckpointConfig,
    PipelineGradientCheckpointConfig,
    Recipe,
    ScalerSettings,
)
from shardc.booster.plugin.torch_ddp import TorchDDPPlugin
from shardc.booster.plugin.torch_fsdp import TorchFSDPPlugin

__all__ = [
    "GeminiPlugin",
    "GradientCheckpointConfig",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "PipelineGradientCheckpointConfig",
    "Plugin",
    "Recipe",
    "ScalerSettings",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
