"""A plugin is its checked arguments, turned into a Recipe."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from shardc import ShardcError
from shardc.booster.plugin import (
    GeminiPlugin,
    GradientCheckpointConfig,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    Plugin,
    Recipe,
    ScalerSettings,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardc.booster.plugin import base as plugin_base
from shardc.runtime import load_plan
from tests.runtime import toy

# Names, order and defaults of ColossalAI 0.5.0; tp_size and pp_size have no default there.
AMP = "min_scale=1, growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=4294967296"
SIGNATURES = {
    TorchDDPPlugin: "broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False, "
    "gradient_as_bucket_view=False, static_graph=False, fp8_communication=False",
    LowLevelZeroPlugin: f"stage=1, precision='fp16', initial_scale=4294967296, {AMP}, max_norm=0.0, norm_type=2.0, "
    "reduce_bucket_size_in_m=12, communication_dtype=None, overlap_communication=True, overlap_allgather=False, "
    "cpu_offload=False, master_weights=True, verbose=False, cast_inputs=True, fp8_communication=False, use_fp8=False, "
    "extra_dp_size=1",
    GeminiPlugin: "chunk_config_dict=None, chunk_init_device=None, placement_policy='static', "
    "enable_gradient_accumulation=False, max_prefetch=0, shard_param_frac=1.0, offload_optim_frac=0.0, "
    "offload_param_frac=0.0, warmup_non_model_data_ratio=0.8, steady_cuda_cap_ratio=0.9, precision='fp16', "
    "master_weights=True, pin_memory=False, force_outputs_fp32=False, strict_ddp_mode=False, search_range_m=32, "
    "hidden_dim=None, min_chunk_size_m=32, memstats=None, gpu_margin_mem_ratio=0.0, initial_scale=65536, "
    f"{AMP}, max_norm=0.0, norm_type=2.0, tp_size=1, extra_dp_size=1, enable_all_optimization=False, "
    "enable_fused_normalization=False, enable_flash_attention=False, enable_sequence_parallelism=False, "
    "enable_jit_fused=False, enable_async_reduce=True, use_fp8=False, verbose=False, fp8_communication=False",
    HybridParallelPlugin: "tp_size=None, pp_size=None, sp_size=None, precision='fp16', zero_stage=0, "
    "enable_all_optimization=False, enable_fused_normalization=False, enable_flash_attention=False, "
    "enable_jit_fused=False, enable_sequence_parallelism=False, sequence_parallelism_mode=None, parallel_output=True, "
    f"num_microbatches=None, microbatch_size=None, initial_scale=65536, {AMP}, max_norm=0, broadcast_buffers=True, "
    "ddp_bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=False, "
    "static_graph=False, zero_bucket_size_in_m=12, cpu_offload=False, communication_dtype=None, "
    "overlap_communication=True, custom_policy=None, pp_style='1f1b', num_model_chunks=1, scheduler_nodes=None, "
    "num_layers_per_stage=None, gradient_checkpoint_config=None, enable_metadata_cache=True, "
    "make_vocab_size_divisible_by=64, dp_outside=True, overlap_p2p=True, overlap_allgather=False, "
    "fp8_communication=False, use_fp8=False, inner_ring_size=None, plan=None, policy=None",
    TorchFSDPPlugin: "process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None, "
    "backward_prefetch=None, mixed_precision=None, ignored_modules=None, param_init_fn=None, sync_module_states=False, "
    "fp8_communication=False",
}


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """A warning that no test expects is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("plugin", SIGNATURES)
def test_arguments_have_the_names_order_and_defaults_that_scripts_rely_on(plugin: type) -> None:
    parameters = inspect.signature(plugin).parameters.values()
    assert ", ".join(f"{parameter.name}={parameter.default!r}" for parameter in parameters) == SIGNATURES[plugin]


SCALE = ScalerSettings(2.0**16, 1, 2, 0.5, 1000, 2, 2.0**32)
FP16 = {"precision": "fp16", "scaler": SCALE}
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def hybrid(**arguments: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"tp_size": 2, "pp_size": 2, **arguments})


RECIPES = [
    (lambda: TorchDDPPlugin(), {"bucket_elements": 25 * 2**20 // 4}),
    (lambda: TorchDDPPlugin(bucket_cap_mb=1), {"bucket_elements": 2**18}),
    (
        lambda: LowLevelZeroPlugin(),
        {"placement": "zero1", "precision": "fp16", "scaler": dataclasses.replace(SCALE, initial_scale=2.0**32)},
    ),
    (
        lambda: LowLevelZeroPlugin(
            2,
            "bf16",
            initial_scale=8,
            hysteresis=1,
            max_norm=1,
            reduce_bucket_size_in_m=0.5,
            communication_dtype=torch.float32,
            master_weights=False,
            cast_inputs=False,
        ),
        {
            "placement": "zero2",
            "precision": "bf16",
            "scaler": dataclasses.replace(SCALE, initial_scale=8, hysteresis=1),
            "max_norm": 1.0,
            "bucket_elements": 2**19,
            "communication_dtype": torch.float32,
            "master_weights": False,
            "cast_inputs": False,
        },
    ),
    (lambda: GeminiPlugin(), {"placement": "zero3", "bucket_elements": 2**25, **FP16}),
    (lambda: GeminiPlugin(shard_param_frac=0), {"placement": "zero2", "bucket_elements": 2**25, **FP16}),
    (lambda: GeminiPlugin(strict_ddp_mode=True), {"placement": "ddp", "bucket_elements": 2**25, **FP16}),
    (
        lambda: GeminiPlugin(
            tp_size=2,
            enable_sequence_parallelism=True,
            precision="fp32",
            min_chunk_size_m=1,
            force_outputs_fp32=True,
            master_weights=False,
            max_norm=0.5,
        ),
        {
            "tp": 2,
            "sequence_parallel": True,
            "placement": "zero3",
            "precision": "fp32",
            "bucket_elements": 2**20,
            "force_outputs_fp32": True,
            "master_weights": False,
            "max_norm": 0.5,
        },
    ),
    (lambda: HybridParallelPlugin(1, 1), {"bucket_elements": 25 * 2**20 // 2, **FP16}),
    (lambda: hybrid(), {"tp": 2, "pp": 2, "microbatches": 4, "bucket_elements": 25 * 2**20 // 2, **FP16}),
    (
        lambda: hybrid(
            pp_size=3,
            zero_stage=3,
            precision="bf16",
            enable_sequence_parallelism=True,
            sequence_parallelism_mode="ring",
            sp_size=2,
            parallel_output=False,
            microbatch_size=2,
            zero_bucket_size_in_m=1,
            communication_dtype=torch.bfloat16,
            pp_style="gpipe",
            num_layers_per_stage=[2, 3, 2],
            custom_policy="my.yaml",
            gradient_checkpoint_config=PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 1, 0]),
        ),
        {
            "tp": 2,
            "pp": 3,
            "placement": "zero3",
            "precision": "bf16",
            "sequence_parallel": True,
            "parallel_output": False,
            "microbatch_size": 2,
            "bucket_elements": 2**20,
            "communication_dtype": torch.bfloat16,
            "schedule": "gpipe",
            "layers_per_stage": (2, 3, 2),
            "policy": "my.yaml",
            "recompute": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 1, 0]),
        },
    ),
    (
        lambda: hybrid(pp_size=1, num_microbatches=3, policy=Path("p.yaml")),
        {"tp": 2, "microbatches": 3, "policy": Path("p.yaml"), "bucket_elements": 25 * 2**20 // 2, **FP16},
    ),
    (lambda: TorchFSDPPlugin(), {"placement": "fsdp"}),
    (
        lambda: TorchFSDPPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, cpu_offload=CPUOffload(False)),
        {"placement": "fsdp", "reshard_after_forward": False},
    ),
    (lambda: TorchFSDPPlugin(sharding_strategy=ShardingStrategy.NO_SHARD), {"placement": "ddp"}),
    (
        lambda: TorchFSDPPlugin(mixed_precision=MIXED),
        {"placement": "fsdp", "precision": "bf16", "communication_dtype": torch.float32, "cast_inputs": False},
    ),
]


@pytest.mark.parametrize(("make", "expected"), RECIPES)
def test_arguments_become_a_recipe(make: Any, expected: dict) -> None:
    plugin = make()
    assert plugin.recipe == Recipe(**expected)
    assert (plugin.tp_size, plugin.pp_size, plugin.precision) == (
        plugin.recipe.tp,
        plugin.recipe.pp,
        plugin.recipe.precision,
    )


def said(plugin: str, *lines: str) -> str:
    return "\n".join((f"{plugin}: accepted, but without effect:", *(f"  {line}" for line in lines)))


OFFLOAD = "nothing is offloaded for now: parameters, gradients and optimizer states stay on the GPU"
FRACTIONS = "placement follows shard_param_frac, offload_optim_frac and offload_param_frac for now"
WARNED = [
    (
        lambda: TorchDDPPlugin(broadcast_buffers=False, find_unused_parameters=True),
        said(
            "TorchDDPPlugin",
            "broadcast_buffers=False: buffers are constants of the model, equal on every rank, and never sent",
            "find_unused_parameters=True: parameters without a gradient in a step are allowed in any case",
        ),
    ),
    (
        lambda: LowLevelZeroPlugin(cpu_offload=True, use_fp8=True),
        said("LowLevelZeroPlugin", "use_fp8=True: linear layers compute in `precision`"),
    ),
    (
        lambda: GeminiPlugin(placement_policy="auto", offload_optim_frac=1, shard_param_frac=0.5, memstats=object()),
        said(
            "GeminiPlugin",
            f"placement_policy='auto': {FRACTIONS}",
            "memstats=<object>: the order of use is known from the compiled model",
        ),
    ),
    (
        lambda: GeminiPlugin(enable_sequence_parallelism=True),
        said("GeminiPlugin", "enable_sequence_parallelism=True: it splits sequences over tp, and tp_size is 1"),
    ),
    (
        lambda: HybridParallelPlugin(1, 2, enable_sequence_parallelism=True, sequence_parallelism_mode="ring"),
        said(
            "HybridParallelPlugin",
            "enable_sequence_parallelism=True: it splits sequences over tp, and tp_size is 1",
            "sequence_parallelism_mode='ring': sequences are not split",
        ),
    ),
    (
        lambda: hybrid(sequence_parallelism_mode="all_to_all", sp_size=1, enable_flash_attention=True),
        said(
            "HybridParallelPlugin",
            "enable_flash_attention=True: attention is the model's own: from_pretrained(..., attn_implementation=...)",
            "sequence_parallelism_mode='all_to_all': sequences are not split",
        ),
    ),
    (
        lambda: hybrid(zero_bucket_size_in_m=3),
        said("HybridParallelPlugin", "zero_bucket_size_in_m=3: zero_stage is 0"),
    ),
    (
        lambda: hybrid(zero_stage=1, ddp_bucket_cap_mb=3),
        said("HybridParallelPlugin", "ddp_bucket_cap_mb=3: zero_stage is 1"),
    ),
    (
        lambda: TorchFSDPPlugin(
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            cpu_offload=CPUOffload(offload_params=True),
            mixed_precision=MixedPrecision(buffer_dtype=torch.float16),
            auto_wrap_policy=print,
        ),
        said(
            "TorchFSDPPlugin",
            "auto_wrap_policy=<builtin_function_or_method>: each block of the model is a unit",
            "sharding_strategy=<ShardingStrategy>: states are split over all data-parallel ranks",
            f"cpu_offload=<CPUOffload>: {OFFLOAD}",
            "mixed_precision=<MixedPrecision>: its buffer_dtype is not used: buffers keep the dtype of the model",
        ),
    ),
]


@pytest.mark.parametrize(("make", "message"), WARNED)
def test_what_has_no_effect_is_said_in_one_warning(make: Any, message: str) -> None:
    with pytest.warns(UserWarning) as caught:
        make()
    assert [str(warning.message) for warning in caught] == [message]
    assert caught[0].filename == __file__


def test_every_argument_without_effect_has_a_reason_and_takes_its_default_silently() -> None:
    for plugin in SIGNATURES:
        for row in dataclasses.fields(plugin):
            assert set(row.metadata) == {"valid", "unused"}
            assert row.metadata["valid"].test(row.default)


def test_the_first_rank_alone_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_base.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(plugin_base.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(plugin_base.dist, "get_rank", lambda: 3)
    GeminiPlugin(pin_memory=True)


def refused(plugin: str, argument: str, valid: str, default: Any, *, why: str = "valid") -> str:
    name = argument.partition("=")[0]
    return (
        f"{plugin}: {argument} is not {why}; valid: {valid}\n  pass one of these, or leave {name} out for {default!r}"
    )


COUNT, FRACTION = "an integer from 1 on", "a number from 0 to 1"
HYBRID = "HybridParallelPlugin"
REFUSED = [
    (LowLevelZeroPlugin, {"stage": 4}, refused("LowLevelZeroPlugin", "stage=4", "1, 2", 1)),
    (LowLevelZeroPlugin, {"stage": True}, refused("LowLevelZeroPlugin", "stage=True", "1, 2", 1)),
    (
        LowLevelZeroPlugin,
        {"precision": "int8"},
        refused("LowLevelZeroPlugin", "precision='int8'", "'fp16', 'bf16', 'fp32'", "fp16"),
    ),
    (LowLevelZeroPlugin, {"norm_type": 1.0}, refused("LowLevelZeroPlugin", "norm_type=1.0", "2.0", 2.0)),
    (LowLevelZeroPlugin, {"max_norm": -1}, refused("LowLevelZeroPlugin", "max_norm=-1", "a number from 0 on", 0.0)),
    (LowLevelZeroPlugin, {"max_norm": None}, refused("LowLevelZeroPlugin", "max_norm=None", "a number from 0 on", 0.0)),
    (
        LowLevelZeroPlugin,
        {"cpu_offload": "False"},
        refused("LowLevelZeroPlugin", "cpu_offload='False'", "True, False", False),
    ),
    (
        LowLevelZeroPlugin,
        {"communication_dtype": torch.int8},
        refused(
            "LowLevelZeroPlugin",
            "communication_dtype=torch.int8",
            "torch.float32, torch.bfloat16, torch.float16, or None",
            None,
        ),
    ),
    (
        LowLevelZeroPlugin,
        {"backoff_factor": 1.0},
        refused("LowLevelZeroPlugin", "backoff_factor=1.0", "a number above 0 and below 1", 0.5),
    ),
    (
        LowLevelZeroPlugin,
        {"growth_factor": float("nan")},
        refused("LowLevelZeroPlugin", "growth_factor=nan", "a number from 1 on", 2),
    ),
    (
        LowLevelZeroPlugin,
        {"max_scale": 2**16},
        "LowLevelZeroPlugin: initial_scale=4294967296 is not within min_scale=1 and max_scale=65536\n"
        "  the loss scale starts at initial_scale and stays within the other two",
    ),
    (TorchDDPPlugin, {"bucket_cap_mb": 0}, refused("TorchDDPPlugin", "bucket_cap_mb=0", "a number above 0", 25)),
    (
        GeminiPlugin,
        {"placement_policy": "cpu"},
        refused("GeminiPlugin", "placement_policy='cpu'", "'static', 'auto'", "static"),
    ),
    (GeminiPlugin, {"offload_optim_frac": 1.5}, refused("GeminiPlugin", "offload_optim_frac=1.5", FRACTION, 0.0)),
    (GeminiPlugin, {"shard_param_frac": -1}, refused("GeminiPlugin", "shard_param_frac=-1", FRACTION, 1.0)),
    (GeminiPlugin, {"tp_size": 0}, refused("GeminiPlugin", "tp_size=0", COUNT, 1)),
    (GeminiPlugin, {"max_prefetch": -1}, refused("GeminiPlugin", "max_prefetch=-1", "an integer from 0 on", 0)),
    (HybridParallelPlugin, {"tp_size": 0}, refused(HYBRID, "tp_size=0", f"{COUNT}, or None", None)),
    (HybridParallelPlugin, {"tp_size": 2.0}, refused(HYBRID, "tp_size=2.0", f"{COUNT}, or None", None)),
    (HybridParallelPlugin, {"zero_stage": 5}, refused(HYBRID, "zero_stage=5", "0, 1, 2, 3", 0)),
    (HybridParallelPlugin, {"pp_style": "foo"}, refused(HYBRID, "pp_style='foo'", "'1f1b', 'gpipe'", "1f1b")),
    (
        HybridParallelPlugin,
        {"pp_style": "interleaved"},
        refused(HYBRID, "pp_style='interleaved'", "'1f1b', 'gpipe'", "1f1b", why="built yet"),
    ),
    (
        HybridParallelPlugin,
        {"pp_style": "zbv"},
        refused(HYBRID, "pp_style='zbv'", "'1f1b', 'gpipe'", "1f1b", why="built yet"),
    ),
    (HybridParallelPlugin, {"num_model_chunks": 2}, refused(HYBRID, "num_model_chunks=2", "1", 1)),
    (
        HybridParallelPlugin,
        {"sequence_parallelism_mode": "rings"},
        refused(
            HYBRID,
            "sequence_parallelism_mode='rings'",
            "'split_gather', 'ring', 'all_to_all', 'ring_attn', or None",
            None,
        ),
    ),
    (
        HybridParallelPlugin,
        {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
        f"{HYBRID}: sequence_parallelism_mode='all_to_all' is not built yet; valid: 'split_gather', 'ring', or None\n"
        '  use "split_gather", which splits sequences over tp',
    ),
    (
        HybridParallelPlugin,
        {"sp_size": 2},
        f"{HYBRID}: sp_size=2 is not built yet; valid: None\n"
        '  use sequence_parallelism_mode="split_gather", which splits sequences over tp',
    ),
    (
        HybridParallelPlugin,
        {"num_microbatches": 4, "microbatch_size": 1},
        f"{HYBRID}: num_microbatches=4 and microbatch_size=1 are both given; valid: one of them, or none\n"
        "  none means num_microbatches=4 for pp_size=2",
    ),
    (
        HybridParallelPlugin,
        {"tp_size": None},
        f"{HYBRID}: tp_size is missing; valid: an integer from 1 on\n  1 is no split; or pass plan=",
    ),
    (
        HybridParallelPlugin,
        {"num_layers_per_stage": [1, 2, 3]},
        f"{HYBRID}: num_layers_per_stage=[1, 2, 3] has 3 numbers, pp_size is 2; valid: a list of 2\n"
        "  give one number for each stage",
    ),
    (
        HybridParallelPlugin,
        {"num_layers_per_stage": [4, 0]},
        refused(
            HYBRID, "num_layers_per_stage=[4, 0]", "a list of one number, 1 or more, for each stage, or None", None
        ),
    ),
    (
        HybridParallelPlugin,
        {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1])},
        f"{HYBRID}: num_ckpt_layers_per_stage=[1] has 1 numbers, pp_size is 2; valid: a list of 2\n"
        "  give one number for each stage",
    ),
    (
        HybridParallelPlugin,
        {"gradient_checkpoint_config": 0.5},
        refused(
            HYBRID,
            "gradient_checkpoint_config=0.5",
            "a GradientCheckpointConfig or PipelineGradientCheckpointConfig of shardc.booster.plugin, or None",
            None,
        ),
    ),
    (
        HybridParallelPlugin,
        {"custom_policy": Recipe()},
        f"{HYBRID}: custom_policy=<Recipe> is not valid; valid: the path of a YAML file\n"
        "  write it as YAML: `shardc policy show llama` prints one to start from",
    ),
    (
        HybridParallelPlugin,
        {"custom_policy": "a.yaml", "policy": "b.yaml"},
        f"{HYBRID}: policy='b.yaml' and custom_policy='a.yaml' are both given; valid: one of them\n"
        "  they mean the same; leave custom_policy out",
    ),
    (
        HybridParallelPlugin,
        {"plan": "plans/qwen"},
        refused(HYBRID, "plan='plans/qwen'", "what shardc.load_plan(folder) returns, or None", None),
    ),
    (
        TorchFSDPPlugin,
        {"sharding_strategy": "FULL_SHARD"},
        refused(
            "TorchFSDPPlugin",
            "sharding_strategy='FULL_SHARD'",
            "a torch.distributed.fsdp.ShardingStrategy: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, "
            "_HYBRID_SHARD_ZERO2, or None",
            None,
        ),
    ),
    (
        TorchFSDPPlugin,
        {"cpu_offload": True},
        refused("TorchFSDPPlugin", "cpu_offload=True", "a torch.distributed.fsdp.CPUOffload, or None", None),
    ),
    (
        TorchFSDPPlugin,
        {"mixed_precision": "bf16"},
        refused(
            "TorchFSDPPlugin",
            "mixed_precision='bf16'",
            "a torch.distributed.fsdp.MixedPrecision whose param_dtype and reduce_dtype are float32, bfloat16 or "
            "float16, or None",
            None,
        ),
    ),
]


@pytest.mark.parametrize(("plugin", "arguments", "message"), REFUSED, ids=[row[2].splitlines()[0] for row in REFUSED])
def test_wrong_values_are_refused(plugin: type, arguments: dict, message: str) -> None:
    make = hybrid if plugin is HybridParallelPlugin else plugin
    with pytest.raises(ShardcError) as error:
        make(**arguments)
    assert str(error.value) == message


# --- a plan decides the layout


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    return load_plan(toy.write_plan(tmp_path / "plan", tp=2, pp=2, sequence_parallel=True, microbatches=3))


def test_a_plan_says_what_it_was_compiled_for(plan: Any) -> None:
    plugin = HybridParallelPlugin(plan=plan, precision="bf16", zero_stage=2)
    recipe = plugin.recipe
    assert (recipe.tp, recipe.pp, recipe.sequence_parallel, recipe.microbatches) == (2, 2, True, 3)
    assert (recipe.schedule, recipe.plan, recipe.placement) == (plan.schedule.name, plan, "zero2")
    assert (plugin.tp_size, plugin.pp_size) == (2, 2)
    same = HybridParallelPlugin(2, 2, plan=plan, num_microbatches=3, precision="bf16", zero_stage=2)
    assert same.recipe == recipe


AGAINST_PLAN = [
    ({"tp_size": 4}, "tp_size=4, but the plan {folder} has tp_size=2"),
    ({"pp_size": 1}, "pp_size=1, but the plan {folder} has pp_size=2"),
    ({"num_microbatches": 4}, "num_microbatches=4, but the plan {folder} has num_microbatches=3"),
    ({"policy": "my.yaml"}, "policy='my.yaml' cannot change the plan {folder}"),
    ({"num_layers_per_stage": [2, 2]}, "num_layers_per_stage=[2, 2] cannot change the plan {folder}"),
    ({"microbatch_size": 1}, "microbatch_size=1 cannot change the plan {folder}"),
]


@pytest.mark.parametrize(("arguments", "problem"), AGAINST_PLAN, ids=[row[1] for row in AGAINST_PLAN])
def test_what_the_plan_contradicts_is_refused(plan: Any, arguments: dict, problem: str) -> None:
    with pytest.raises(ShardcError) as error:
        HybridParallelPlugin(plan=plan, **arguments)
    name = next(iter(arguments))
    assert str(error.value) == (
        f"{HYBRID}: {problem.format(folder=plan.folder)}\n  leave {name} out, or compile the plan again"
    )


# --- the job


def job(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(plugin_base.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(plugin_base.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(plugin_base.dist, "get_rank", lambda: rank)


def test_dp_takes_the_remaining_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchDDPPlugin().dp_size == 1
    job(monkeypatch, rank=5, world=8)
    assert [(plugin.dp_size, plugin.dp_coord) for plugin in (TorchDDPPlugin(), GeminiPlugin(tp_size=2), hybrid())] == [
        (8, 5),
        (4, 2),
        (2, 1),
    ]
    loader = hybrid().prepare_dataloader([{"input_ids": torch.tensor([row])} for row in range(8)], 2)
    assert [batch["input_ids"].flatten().tolist() for batch in loader] == [[2, 3], [6, 7]]


def test_sizes_that_do_not_divide_the_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "{plugin}: tp_size=2 * pp_size={pp} = {model} does not divide the {world} process(es) of this job\n"
        "  start a multiple of {model} processes (shardc run --nproc_per_node {model}), after "
        "shardc.launch_from_torch()"
    )
    early = GeminiPlugin(tp_size=2)  # before launch_from_torch: found when it is asked
    with pytest.raises(ShardcError) as error:
        early.prepare_dataloader([1, 2], 1)
    assert str(error.value) == message.format(plugin="GeminiPlugin", pp=1, model=2, world=1)
    job(monkeypatch, rank=0, world=6)
    with pytest.raises(ShardcError) as error:
        hybrid()
    assert str(error.value) == message.format(plugin=HYBRID, pp=2, model=4, world=6)


def test_capabilities() -> None:
    plugins = {
        TorchDDPPlugin(): (True, False),
        LowLevelZeroPlugin(1): (True, True),
        LowLevelZeroPlugin(2): (False, True),
        HybridParallelPlugin(1, 2): (True, True),
        hybrid(zero_stage=2): (False, True),
        GeminiPlugin(): (False, True),
        TorchFSDPPlugin(): (False, False),
    }
    for plugin, expected in plugins.items():
        assert (plugin.support_no_sync(), plugin.control_precision()) == expected, plugin
        assert plugin.support_lora()
        assert isinstance(plugin, Plugin) and plugin.control_device()
        assert plugin.supported_precisions() == ["fp16", "bf16", "fp32"]
        assert plugin.supported_devices() == ["cuda", "cpu"]


def test_a_plugin_is_fixed_and_prints_what_was_given() -> None:
    plugin = hybrid(precision="bf16", policy="my.yaml")
    assert repr(plugin) == "HybridParallelPlugin(tp_size=2, pp_size=2, precision='bf16', policy='my.yaml')"
    assert repr(TorchDDPPlugin()) == "TorchDDPPlugin()"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plugin.tp_size = 4


def test_plugins_of_a_users_own() -> None:
    class Mine(HybridParallelPlugin):
        def __init__(self) -> None:
            super().__init__(tp_size=2, pp_size=1)
            self.note = "mine"

    class Bare(Plugin):
        recipe = Recipe(tp=4, precision="bf16")

    assert (Mine().recipe.tp, Mine().note, repr(Mine())) == (2, "mine", "Mine(tp_size=2, pp_size=1)")
    assert (Bare().tp_size, Bare().precision) == (4, "bf16")


# --- recomputation


def test_how_many_layers_recompute() -> None:
    ratio = GradientCheckpointConfig(0.29)
    assert [ratio.get_num_ckpt_layers(layers) for layers in (100, 3, 4)] == [29, 0, 1]
    assert GradientCheckpointConfig(1.0).get_num_ckpt_layers(7, stage=2) == 7
    assert GradientCheckpointConfig().get_num_ckpt_layers(7) == 0
    stages = PipelineGradientCheckpointConfig(0.5, num_ckpt_layers_per_stage=[2, 0])
    assert [stages.get_num_ckpt_layers(4, stage=stage) for stage in (0, 1)] == [2, 0]
    assert PipelineGradientCheckpointConfig(0.5).get_num_ckpt_layers(4, stage=1) == 2
    with pytest.raises(ShardcError) as error:
        stages.get_num_ckpt_layers(1, stage=0)
    assert str(error.value) == (
        "PipelineGradientCheckpointConfig: stage 0 has 1 layers, num_ckpt_layers_per_stage=[2, 0] recomputes 2 of "
        "them\n  give stage 0 at most 1"
    )


ABOVE_0 = "gradient_checkpointing_ratio from 0 to 1, above 0 with attention_only=True"
ALL = "  gradient_checkpointing_ratio=1.0 recomputes all layers"
REFUSED_CONFIGS = [
    (
        lambda: GradientCheckpointConfig(1.5),
        "GradientCheckpointConfig: gradient_checkpointing_ratio=1.5; valid: a number from 0 to 1\n"
        "  0.5 recomputes the first half of the layers of each stage",
    ),
    (
        lambda: GradientCheckpointConfig(attention_only=True),
        f"GradientCheckpointConfig: no layers are named to recompute; valid: {ABOVE_0}\n{ALL}",
    ),
    (
        lambda: GradientCheckpointConfig(None),
        f"GradientCheckpointConfig: no layers are named to recompute; valid: {ABOVE_0}\n{ALL}",
    ),
    (
        lambda: PipelineGradientCheckpointConfig(),
        "PipelineGradientCheckpointConfig: no layers are named to recompute; valid: num_ckpt_layers_per_stage, or "
        f"{ABOVE_0}\n{ALL}",
    ),
    (
        lambda: PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, -1]),
        "PipelineGradientCheckpointConfig: num_ckpt_layers_per_stage=[1, -1]; valid: a list of one number, 0 or more, "
        "for each stage\n  [2, 0] recomputes the first two layers of stage 0 and none of stage 1",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED_CONFIGS, ids=[row[1].splitlines()[0] for row in REFUSED_CONFIGS])
def test_wrong_recomputation_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ShardcError) as error:
        make()
    assert str(error.value) == message
