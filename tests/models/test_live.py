"""A model that is built already, and the same model built again from it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from shardc.capture import capture
from shardc.capture.capture import TOKENS
from shardc.capture.graph import op_name
from shardc.capture.patches import default_dtype
from shardc.errors import ShardcError
from shardc.models import ModelSource
from shardc.models.live import source_from_module

LAYERS = "base_model.model.model.layers"


def llama(**fields: Any) -> nn.Module:
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **{**sizes, "num_attention_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0, **fields}
    )
    return transformers.LlamaForCausalLM(config)


def adapted(model: nn.Module | None = None, **fields: Any) -> nn.Module:
    options = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **fields}
    return peft.get_peft_model(llama() if model is None else model, peft.LoraConfig(**options))


class Plain(nn.Module):
    """Tied weights, a buffer that no constructor could compute again, a frozen bias."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.drop = nn.Dropout(0.25)
        self.register_buffer("scale", torch.rand(width), persistent=False)
        self.register_buffer("ids", torch.arange(width))
        self.mix.bias.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.drop(self.mix(self.tokens(input_ids) * self.scale)))}


def made(source: ModelSource, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with default_dtype(dtype), torch.device("meta"):
        return source.make()


def form(model: nn.Module) -> tuple:
    """Modules, parameters with what is frozen, ties."""
    names: dict[int, str] = {}
    return (
        [(path, type(module)) for path, module in model.named_modules()],
        [
            (name, p.shape, p.requires_grad, names.setdefault(id(p), name))
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
    )


@pytest.mark.parametrize(
    "make", [llama, adapted, Plain, lambda: adapted(Plain(), target_modules=["mix"], task_type=None)]
)
def test_the_model_that_is_made_has_the_same_modules_parameters_and_ties(make: Callable[[], nn.Module]) -> None:
    model = make()
    again = made(source_from_module(model))
    assert form(again) == form(model)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in again.parameters())


def test_it_is_named_after_the_model_without_adapters_and_has_its_config() -> None:
    source = source_from_module(adapted())
    assert (source.name, source.class_name, source.config.model_type) == ("LlamaForCausalLM",) * 2 + ("llama",)
    assert source_from_module(Plain(), "mine").config is None


def test_what_was_changed_after_building_survives() -> None:
    model = adapted(lora_dropout=0.1)
    layer = model.get_submodule(f"{LAYERS}.1.self_attn")
    layer.attention_dropout = 0.2
    layer.q_proj.lora_dropout["default"].p = 0.3
    layer.q_proj.scaling["default"] = 5.0
    layer.q_proj.lora_A["default"].weight.requires_grad_(False)
    layer.o_proj.weight.requires_grad_(True)
    again = made(source_from_module(model))
    layer = again.get_submodule(f"{LAYERS}.1.self_attn")
    assert (layer.attention_dropout, layer.q_proj.lora_dropout["default"].p) == (0.2, 0.3)
    assert layer.q_proj.scaling == {"default": 5.0}
    assert form(again) == form(model)
    assert made(source_from_module(Plain())).drop.p == 0.25


def test_a_transformers_model_attends_by_sdpa_without_a_cache_and_keeps_float32_frequencies() -> None:
    model = llama()
    model.config._attn_implementation = "eager"
    model.gradient_checkpointing_enable()
    again = made(source_from_module(model))
    assert (again.config._attn_implementation, again.config.use_cache) == ("sdpa", False)
    assert again.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not again.is_gradient_checkpointing
    assert model.config._attn_implementation == "eager", "the live model's own config is left alone"


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 31)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_transformers_model_with_another_module_in_it_is_copied(adapters: bool) -> None:
    model = llama(tie_word_embeddings=False)
    model.lm_head = Head()
    model = adapted(model) if adapters else model
    model.gradient_checkpointing_enable()
    again = made(source_from_module(model))
    assert form(again) == form(model)
    inner = again.get_base_model() if adapters else again
    assert (inner.config._attn_implementation, inner.config.use_cache) == ("sdpa", False)
    assert not inner.is_gradient_checkpointing
    assert inner.model.rotary_emb.inv_freq.dtype == torch.float32
    assert all(p.dtype == torch.bfloat16 for p in again.parameters())


def test_a_copy_of_a_plain_module_allocates_nothing_and_keeps_the_values_of_its_buffers() -> None:
    model = Plain()
    captured = capture(source_from_module(model).make, inputs={"input_ids": TOKENS})
    assert torch.equal(captured.plain.constants["scale"], model.scale)
    again = made(source_from_module(model))
    assert (again.scale.dtype, again.ids.dtype, again.scale.is_meta) == (torch.bfloat16, torch.int64, True)
    with torch.device("meta"):
        huge = Plain(10**7)
    assert made(source_from_module(huge)).mix.weight.shape == (10**7, 10**7)


def test_the_source_does_not_keep_the_weights() -> None:
    for make in (llama, adapted, Plain):
        model = make()
        weights = [weakref.ref(parameter) for parameter in model.parameters()]
        source = source_from_module(model)
        del model
        gc.collect()
        assert not any(weight() is not None for weight in weights), source


def test_a_wrapper_takes_the_inputs_of_the_model_in_it() -> None:
    """PeftModelForCausalLM.forward passes position_ids on without naming them."""
    names = {variant.name for variant in capture(source_from_module(adapted()).make).variants}
    assert {"plain", "masked", "positions", "positions+packed"} <= names


def test_new_adapters_start_at_zero() -> None:
    parameters = capture(source_from_module(adapted()).make).plain.parameters
    assert parameters[f"{LAYERS}.0.self_attn.q_proj.lora_B.default.weight"].init == ("constant", 0.0, 0.0)
    assert parameters[f"{LAYERS}.0.self_attn.q_proj.lora_A.default.weight"].init == ("normal", 0.0, 16**-0.5 / 3**0.5)
    assert parameters[f"{LAYERS}.0.self_attn.q_proj.base_layer.weight"].init == ("normal", 0.0, 0.02)


def test_adapters_compute_in_the_dtype_of_the_plan() -> None:
    """peft makes float32 adapters of a bfloat16 model: in a plan all parameters have one dtype."""
    model = adapted(llama().to(torch.bfloat16))
    assert model.get_submodule(f"{LAYERS}.0.self_attn.q_proj.lora_A.default").weight.dtype == torch.float32
    casts = [
        node for node in capture(source_from_module(model).make).plain.operations() if op_name(node.target) == "to"
    ]
    assert not any("lora" in str(node.args) for node in casts)


def _two() -> nn.Module:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return model


def _merged() -> nn.Module:
    model = adapted()
    model.merge_adapter()
    return model


def _disabled() -> nn.Module:
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


def _named(name: str) -> nn.Module:
    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]), adapter_name=name)


def _quantized() -> nn.Module:
    model = llama()
    weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)
    model.model.layers[0].self_attn.q_proj.weight = weight
    return model


QKV = ["q_proj", "k_proj", "v_proj"]
REFUSED = [
    (
        "two adapters",
        _two,
        "PeftModelForCausalLM: has the adapters default, other; one is trained at a time",
        "delete the others with model.delete_adapter(name)",
    ),
    (
        "IA3",
        lambda: peft.get_peft_model(llama(), peft.IA3Config(target_modules=QKV, feedforward_modules=[])),
        "IA3Config: IA3 adapters are not supported",
        "use peft.LoraConfig",
    ),
    (
        "DoRA",
        lambda: adapted(use_dora=True),
        "LoraConfig: use_dora is not supported",
        "leave use_dora out",
    ),
    (
        "modules to save",
        lambda: adapted(modules_to_save=["lm_head"]),
        "LoraConfig: modules_to_save is not supported",
        "leave modules_to_save out",
    ),
    (
        "merged",
        _merged,
        f"{LAYERS}.0.self_attn.q_proj: its adapter is merged",
        "call model.unmerge_adapter() or enable_adapter_layers()",
    ),
    (
        "disabled",
        _disabled,
        f"{LAYERS}.0.self_attn.q_proj: its adapter is disabled",
        "call model.unmerge_adapter() or enable_adapter_layers()",
    ),
    (
        "a name that is none",
        lambda: _named("my-task"),
        "adapter 'my-task': is no attribute name of a module",
        'call it "default"',
    ),
    (
        "quantized weights",
        _quantized,
        "model.layers.0.self_attn.q_proj.weight: its weights are int8; quantized weights are not supported",
        "load the model in bfloat16, float16 or float32",
    ),
]


@pytest.mark.parametrize(("make", "problem", "advice"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_refused(make: Callable[[], nn.Module], problem: str, advice: str) -> None:
    with pytest.raises(ShardcError) as caught:
        source_from_module(make())
    assert (caught.value.problem, caught.value.advice) == (problem, advice)
