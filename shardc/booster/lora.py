"""LoRA for the Booster: adapters put into a model by peft, and saved as peft reads them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.models.live import check_adapters, check_lora_config
from shardc.runtime.replace_folder import replacing

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

WEIGHTS = "adapter_model.safetensors"
_ADAPTER = re.compile(r"(.*\.lora_(?:embedding_)?[AB])\.[^.]+(\.(?:weight|bias))?")
_ADVICE = "give lora_config=peft.LoraConfig(...), or pretrained_dir= a folder that peft wrote"


def enable_lora(
    model: nn.Module,
    pretrained_dir: str | Path | None = None,
    lora_config: LoraConfig | None = None,
    bnb_quantization_config: Any = None,
    quantize: bool = False,
) -> PeftModel:
    """The model with adapters to train, the rest of it frozen; call it before `boost`, on the whole model.

    pretrained_dir: a folder of `save_adapter`, or of peft's own, to train further. lora_config: new adapters where
    there is no folder. Raises ShardcError for what a plan cannot train, before the model is changed where the config
    shows it; quantized base weights are not supported.
    """
    if quantize or bnb_quantization_config is not None:
        raise ShardcError(
            "enable_lora: quantized base weights are not supported",
            "leave out quantize and bnb_quantization_config, and load the model in bfloat16",
        )
    if pretrained_dir is None and lora_config is None:
        raise ShardcError("enable_lora: neither pretrained_dir nor lora_config is given", _ADVICE)
    try:
        import peft
    except ImportError as error:
        raise ShardcError("enable_lora: peft is not installed", "pip install 'shardc[train]'") from error
    if isinstance(model, peft.PeftModel):
        raise ShardcError(f"enable_lora: the model is a {type(model).__name__} already", "give it to boost as it is")
    if pretrained_dir is not None and not Path(pretrained_dir, "adapter_config.json").is_file():
        raise ShardcError(f"enable_lora: {pretrained_dir} holds no adapter_config.json", _ADVICE)
    config = peft.PeftConfig.from_pretrained(pretrained_dir) if lora_config is None else lora_config
    check_lora_config(config)
    if any(parameter.is_meta for parameter in model.parameters()):  # of lazy_init
        adapted = peft.get_peft_model(model, config)
        _draw_values(adapted)
        if pretrained_dir is not None:
            peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(str(pretrained_dir), device="cpu"))
    elif pretrained_dir is None:
        adapted = peft.get_peft_model(model, config)
    else:
        adapted = peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True, config=config)
    check_adapters(adapted)
    return adapted


def _draw_values(model: PeftModel) -> None:
    """Give adapters the values that peft begins with: beside a weight on meta it leaves them there."""
    ((adapter, config),) = model.peft_config.items()
    for module in model.modules():
        if not hasattr(module, "reset_lora_parameters"):
            continue
        for parts in (module.lora_A, module.lora_B, module.lora_embedding_A, module.lora_embedding_B):
            if isinstance(parts, nn.ModuleDict):
                parts.to_empty(device="cpu")
            else:
                for key, value in parts.items():
                    parts[key] = nn.Parameter(torch.empty_like(value, device="cpu"))
        module.reset_lora_parameters(adapter, config.init_lora_weights)


def saved_names(names: Iterable[str], peft_config: LoraConfig) -> dict[str, str]:
    """Of a PeftModel's parameters those that an adapter's file holds -> their names there, without the adapter's."""
    found = {}
    for name in names:
        if match := _ADAPTER.fullmatch(name):
            found[name] = match[1] + (match[2] or "")
        elif name.endswith(".bias") and (
            peft_config.bias == "all" or (peft_config.bias == "lora_only" and name.endswith(".base_layer.bias"))
        ):
            found[name] = name
    return found


def save_adapter(folder: str | Path, tensors: Mapping[str, Tensor], peft_config: LoraConfig) -> None:
    """Write adapter_config.json and adapter_model.safetensors, for `PeftModel.from_pretrained` and `enable_lora`.

    tensors: whole parameters by the PeftModel's names, of one rank; others than the adapter's are left out. Written
    beside `folder`, which is then replaced: a killed save leaves the old one whole. Other files in it are kept.
    """
    names = saved_names(tensors, peft_config)
    whole = {saved: tensors[name].detach().cpu().contiguous() for name, saved in names.items()}
    with replacing(folder) as partial:
        save_file(whole, partial / WEIGHTS, metadata={"format": "pt"})
        _plain(peft_config).save_pretrained(str(partial))


def _plain(peft_config: LoraConfig) -> LoraConfig:
    """The config as it is saved: to be loaded for inference, and its sets in one order, so that bytes are the same."""
    config = copy.deepcopy(peft_config)
    config.inference_mode = True
    for field, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, field, sorted(value))
    return config
