"""A model that the user already built -> ModelSource: the same model again, without its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.models.source import ModelSource, attention_of, build_from_config, hf_config, without_peft

# Fields of a LoraConfig that change more than the products of the modules that it targets.
_UNSUPPORTED = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")


def source_from_module(model: nn.Module, name: str | None = None) -> ModelSource:
    """The source of a model as it stands: its classes, ties, adapters, dropout and what of it is frozen.

    `make()` builds it under the current default dtype and device, its parameters without their values; the model is
    not kept. A transformers model is built from its config, a PeftModel around one by peft; any other module, or one
    that was changed after it was built, is copied. Parameters follow the default dtype, as in a plan they all do.
    Raises ShardcError for adapters other than LoRA on single modules, and for quantized weights.
    """
    check_adapters(model)
    for parameter, tensor in model.named_parameters():
        if not tensor.is_floating_point():
            raise ShardcError(
                f"{parameter}: its weights are {_short(tensor.dtype)}; quantized weights are not supported",
                "load the model in bfloat16, float16 or float32",
            )
    base = without_peft(model)
    return ModelSource(name or type(base).__name__, copy.deepcopy(hf_config(model)), type(base).__name__, _maker(model))


def check_adapters(model: nn.Module) -> None:
    """Raise ShardcError where the adapters of a PeftModel are not those that a plan can train: one LoRA, not merged."""
    if without_peft(model) is model:
        return
    if len(model.peft_config) != 1:
        raise ShardcError(
            f"{type(model).__name__}: has the adapters {', '.join(model.peft_config)}; one is trained at a time",
            "delete the others with model.delete_adapter(name)",
        )
    ((name, config),) = model.peft_config.items()
    check_lora_config(config)
    if not name.isidentifier() or hasattr(nn.Module, name):
        raise ShardcError(f"adapter {name!r}: is no attribute name of a module", 'call it "default"')
    for path, module in model.named_modules():
        if not hasattr(module, "lora_variant"):
            continue
        variant = next(iter(module.lora_variant.values()), None)
        if variant is not None:
            raise ShardcError(
                f"{path}: its adapter is a {type(variant).__name__}; only plain LoRA is supported",
                "leave use_dora and the like out of the LoraConfig",
            )
        if module.merged or module.disable_adapters:
            state = "merged" if module.merged else "disabled"
            raise ShardcError(
                f"{path}: its adapter is {state}", "call model.unmerge_adapter() or enable_adapter_layers()"
            )


def check_lora_config(config: Any) -> None:
    """Raise ShardcError for adapters of another kind than LoRA, and for what of a LoraConfig no plan can train."""
    if config.peft_type != "LORA":
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ShardcError(f"{type(config).__name__}: {kind} adapters are not supported", "use peft.LoraConfig")
    for field in _UNSUPPORTED:
        if getattr(config, field, None):
            raise ShardcError(f"{type(config).__name__}: {field} is not supported", f"leave {field} out")


# -- building again ----------------------------------------------------------------------------------------------------
def _maker(model: nn.Module) -> Callable[[], nn.Module]:
    """What builds the model again: by its own library where that gives the same modules, else by copying."""
    build = _library_build(model)
    if build is not None:
        settings = _Settings.of(model)
        with torch.device("meta"):
            try:
                made = build()
            except (TypeError, ValueError):  # a class whose constructor takes more than a config
                made = None
        if made is not None and _form(made) == _form(model):
            return lambda: settings.give(build())
    template = _template(model)
    return lambda: _copy(template)


def _library_build(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Builds a transformers model from its config, wrapped by peft where it is a PeftModel; None for other modules."""
    base = without_peft(model)
    config = copy.deepcopy(hf_config(model))
    if config is None:
        return None
    base_class, peft_class = type(base), type(model)
    if base is model:
        return lambda: build_from_config(base_class, config)
    ((adapter, peft_config),) = model.peft_config.items()
    peft_config = copy.deepcopy(peft_config)
    peft_config.init_lora_weights = True  # others compute from weights, which are not there

    def build() -> nn.Module:
        made = build_from_config(base_class, config)
        own = copy.deepcopy(peft_config)
        return _start_as_base(peft_class(made, own, adapter_name=adapter, autocast_adapter_dtype=False))

    return build


def _start_as_base(model: nn.Module) -> nn.Module:
    """Let `_init_weights` say how peft starts adapters: B is zero, and A what torch makes of it."""
    layers = [module for module in model.modules() if hasattr(module, "lora_B")]
    starts_zero = {b for layer in layers for b in layer.lora_B.values()}
    starts_random = {a for layer in layers for a in layer.lora_A.values()}
    base = model.get_base_model()

    def initialise(module: nn.Module) -> None:
        if module in starts_zero:
            nn.init.zeros_(module.weight)
        elif module not in starts_random:
            base._init_weights(module)

    model._init_weights = initialise
    return model


def _form(model: nn.Module) -> tuple:
    """Modules, parameters and ties by name: what two models have in common that compute alike."""
    first: dict[int, str] = {}
    parameters = [
        (name, tuple(p.shape), first.setdefault(id(p), name))
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    return [(path, type(module)) for path, module in model.named_modules()], parameters


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a user changes on a model that is built, by name: frozen parameters, and numbers such as a dropout's p."""

    trained: dict[str, bool]
    numbers: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, model: nn.Module) -> _Settings:
        trained = {name: p.requires_grad for name, p in model.named_parameters()}
        return cls(trained, {path: _numbers(module) for path, module in model.named_modules()})

    def give(self, model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trained[name])
        for path, module in model.named_modules():
            vars(module).update({key: x for key, x in self.numbers[path].items() if key in _numbers(module)})
        return model


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Numbers among a module's attributes, and dicts of them: an adapter's scaling by name."""

    def is_number(value: Any) -> bool:
        return type(value) in (int, float)

    found = {}
    for key, value in vars(module).items():
        if is_number(value):
            found[key] = value
        elif isinstance(value, dict) and value and all(map(is_number, value.values())):
            found[key] = dict(value)
    return found


# -- copying -----------------------------------------------------------------------------------------------------------
def _template(model: nn.Module) -> nn.Module:
    """A copy with parameters on meta, in their own dtypes; it shares the buffers, whose values a plan keeps."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    made = copy.deepcopy(model, memo)
    config = hf_config(made)
    if config is not None:
        config.use_cache = False
        if config._attn_implementation != "sdpa":
            config._attn_implementation = attention_of(type(without_peft(made)), config)
        for module in made.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False  # a plan has a recomputation of its own
    return made


def _copy(template: nn.Module) -> nn.Module:
    """The template under the current default dtype and device. Buffers follow the dtype where they had the model's.

    Those of a transformers model do not: built in any dtype it keeps its rotary frequencies in float32.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    own = next((p.dtype for p in template.parameters()), None) if hf_config(template) is None else None
    memo: dict[int, Any] = {}
    for parameter in template.parameters():
        memo[id(parameter)] = nn.Parameter(torch.zeros(parameter.shape), requires_grad=parameter.requires_grad)
    for buffer in template.buffers():
        memo[id(buffer)] = _moved(buffer, device, dtype if buffer.dtype == own else buffer.dtype)
    return copy.deepcopy(template, memo)


def _moved(buffer: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of its own, by operations that capture runs again on the CPU where it needs the values."""
    return buffer.detach().to(device, dtype, copy=True)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
