"""boost compiles a live model once, and keeps the plan by what decided it."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from shardc.booster import Booster, plan_cache
from shardc.booster.compiled import plan_for
from shardc.booster.plan_cache import PlanCache
from shardc.booster.plan_key import key_of
from shardc.booster.plugin import HybridParallelPlugin, Recipe, TorchDDPPlugin
from shardc.errors import ShardcError
from shardc.models.live import source_from_module
from shardc.plan import compile_plan, load_plan, write_plan
from shardc.runtime.plan import Plan
from tests.booster.small import make_loader, make_model
from tests.end_to_end.user_model import Decoder
from tests.workers import Workers

HERE = "tests.booster.test_compiled"
COMPILES = "shardc: compiling"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def test_the_second_time_nothing_is_compiled(cache: Path, capfd: pytest.CaptureFixture) -> None:
    plan_for(make_model(), Recipe(), torch.float32, microbatches=None)
    assert COMPILES in capfd.readouterr().err
    first = plan_for(make_model(), Recipe(), torch.float32, microbatches=None)
    assert capfd.readouterr().err == ""
    assert first.folder.parent == cache
    assert [path.name for path in cache.iterdir()] == [first.folder.name], "no partial folders are left"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: (folder / "model.py").write_bytes((folder / "model.py").read_bytes()[:-20]),
    "deleted": lambda folder: (folder / "schedule.json").unlink(),
    "not json": lambda folder: (folder / "plan.json").write_text("{"),
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
}


def test_a_damaged_plan_is_compiled_again(cache: Path, capfd: pytest.CaptureFixture) -> None:
    folder = plan_for(make_model(), Recipe(), torch.float32, microbatches=None).folder
    files = PlanCache().read(folder.name)
    for damage in DAMAGES.values():
        damage(folder)
        assert PlanCache().read(folder.name) is None
        PlanCache().write(folder.name, files)
        assert PlanCache().read(folder.name) == files
    DAMAGES["truncated"](folder)
    capfd.readouterr()
    again = plan_for(make_model(), Recipe(), torch.float32, microbatches=None)
    assert COMPILES in capfd.readouterr().err
    assert again.folder == folder and PlanCache().read(folder.name) == files


def test_a_plan_that_another_job_wrote_meanwhile_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That job may have read plan.json, and be about to read the rest."""
    files = {"plan.json": b'{"sha256": {}}'}
    before, during = cache / "before", cache / "during"
    write = plan_cache._write

    def other_job(folder: Path) -> None:
        folder.mkdir(parents=True)
        write(folder, files | {"of_the_other": b""})

    other_job(before)
    PlanCache().write("before", files)
    monkeypatch.setattr(plan_cache, "_write", lambda folder, files: (write(folder, files), other_job(during)))
    with warnings.catch_warnings(action="error"):
        PlanCache().write("during", files)
    assert {path.name for path in cache.iterdir()} == {"before", "during"}, "no partial folders are left"
    assert all((folder / "of_the_other").exists() for folder in (before, during))


def test_without_a_home_plans_last_for_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHARDC_CACHE")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    files = {"plan.json": b'{"sha256": {}}'}
    with pytest.warns(UserWarning, match="plans are not kept: there is no home folder"):
        PlanCache().write("key", files)
    assert (PlanCache().folder("key", files) / "plan.json").read_bytes() == files["plan.json"]
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "file"))
    sizes = {"num_hidden_layers": 1, "intermediate_size": 40}  # of no other test
    with pytest.warns(UserWarning, match="plans are not kept.*SHARDC_CACHE"):
        Booster().boost(make_model(**sizes))
    capfd.readouterr()
    boosted, *_ = Booster().boost(make_model(**sizes))
    assert capfd.readouterr().err == "", "this process still has it"
    with torch.no_grad():
        assert boosted(**next(iter(make_loader(1)))).loss > 0


def test_what_decides_a_plan_is_in_its_key() -> None:
    def key(settings: object = 1, policy: str | None = None, **changes: object) -> str | None:
        return key_of(make_model(**changes), {"tp": settings}, policy)

    frozen, moved, shared = make_model(), make_model(), make_model()
    frozen.model.norm.weight.requires_grad_(False)
    moved.model.layers[0].self_attn.scaling = 0.5
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    base = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=4)
    alpha = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=8)
    keys = [
        key(),
        key(2),
        key(policy="models: [a]"),
        key(policy="models: [b]"),
        key(rms_norm_eps=1e-3),
        key(tie_word_embeddings=False),
        key_of(frozen, {"tp": 1}, None),
        key_of(moved, {"tp": 1}, None),
        key_of(shared, {"tp": 1}, None),
        key_of(peft.get_peft_model(make_model(), base), {"tp": 1}, None),
        key_of(peft.get_peft_model(make_model(), alpha), {"tp": 1}, None),
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    other_values = make_model()
    with torch.no_grad():
        other_values.model.norm.weight.add_(1)
    assert key() == key_of(other_values.eval(), {"tp": 1}, None)
    other_values.name_or_path = other_values.config.name_or_path = "elsewhere"
    assert key() == key_of(other_values, {"tp": 1}, None)


def scaled_mlp(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def wrapped_mlp(of: Callable) -> Callable:
    """As `scaled_mlp`, by a decorator: it bears the name and the module of what it wraps."""

    @functools.wraps(of)
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 2 * of(self, x)

    return forward


ORIGINAL = modeling_qwen3.Qwen3MLP.forward
PATCHES = {
    "a class's forward": (modeling_qwen3.Qwen3MLP, "forward", scaled_mlp),
    "a forward wrapped": (modeling_qwen3.Qwen3MLP, "forward", wrapped_mlp(ORIGINAL)),
    "a forward wrapped by torch": (modeling_qwen3.Qwen3MLP, "forward", torch.enable_grad()(scaled_mlp)),
    "a function beside the classes": (modeling_qwen3, "rotate_half", lambda x: -x),
    "a static method": (modeling_qwen3.Qwen3RMSNorm, "helper", staticmethod(lambda x: x)),
    "a property": (modeling_qwen3.Qwen3Attention, "window", property(lambda self: 2)),
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_plans_of_patched_libraries_are_not_kept(patch: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of transformers no longer tells what the model computes."""
    assert key_of(make_model(), {}, None) is not None
    monkeypatch.setattr(*patch, raising=False)
    assert key_of(make_model(), {}, None) is None


class OwnNorm(modeling_qwen3.Qwen3RMSNorm):
    """Without a function of its own; an attribute may say what those that it inherits do."""


def test_plans_of_own_classes_are_not_kept() -> None:
    model = make_model()
    model.model.norm = OwnNorm(32)
    assert key_of(model, {}, None) is None


def test_a_patched_class_is_compiled_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    Booster().boost(make_model())  # its plan is kept
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", scaled_mlp)
    boosted, *_ = Booster().boost(make_model())
    batch = next(iter(make_loader(1)))
    with torch.no_grad():
        torch.testing.assert_close(boosted(**batch).logits, make_model()(**batch).logits)


@pytest.mark.parametrize("name", ["model.norm.forward", "_loss_function"])
def test_functions_of_one_model_are_refused(name: str) -> None:
    """A transformers model is built again from its config, without them."""
    model = make_model()
    if name == "_loss_function":
        model.loss_function = lambda logits, labels, **rest: logits.sum()
    else:
        model.model.norm.forward = types.MethodType(lambda self, x: x, model.model.norm)
    with pytest.raises(ShardcError, match=rf"{name} was set on this one model, and is not compiled"):
        Booster().boost(model)


def module_in(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("my_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_edited_model_is_compiled_as_it_is_now(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a function or a file changed that the model's class only uses: plans of own classes are not kept."""
    source = Path(importlib.util.find_spec("tests.end_to_end.user_model").origin).read_text()
    losses = []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of two texts of one length, written in one second
    for text in (source, source.replace("F.gelu", "F.relu")):
        (tmp_path / "my_model.py").write_text(text)
        decoder = module_in(tmp_path / "my_model.py").Decoder
        torch.manual_seed(0)
        model = decoder()
        batch = {key: value.clamp(min=0) for key, value in next(iter(make_loader(1))).items()}
        boosted, *_ = Booster().boost(model)
        with torch.no_grad():
            losses.append(boosted(**batch).loss)
            torch.testing.assert_close(losses[-1], model(**batch)["loss"])
        assert COMPILES in capfd.readouterr().err
    assert losses[0] != losses[1]
    assert not cache.exists()


def test_the_model_stays_as_it_was() -> None:
    model = make_model().eval()
    model.config.use_cache = True
    before = model.config.to_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    Booster().boost(model)
    assert model.config.to_dict() == before[0] and not model.training
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())


def fails_on_rank_0(folder: str) -> str:
    """The policy is there on rank 0 alone; what is wrong with it, all say."""
    plugin = HybridParallelPlugin(2, 1, precision="fp32", policy=f"{folder}/my.yaml")
    with pytest.raises(ShardcError) as error:
        Booster(plugin=plugin).boost(make_model())
    return str(error.value)


def test_an_error_of_rank_0_is_raised_on_every_rank(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text('models: [qwen3]\nrules:\n  "*.no_such_module": column\n')
    first, second = workers.run(2, f"{HERE}:fails_on_rank_0", str(tmp_path))
    assert first == second and "no_such_module" in first


def test_a_policy_that_is_not_there_is_named(tmp_path: Path) -> None:
    plugin = HybridParallelPlugin(1, 1, precision="fp32", policy=tmp_path / "my.yaml")
    with pytest.raises(ShardcError, match=r"policy .*my\.yaml: No such file"):
        Booster(plugin=plugin).boost(make_model())


def cut_as_asked() -> list[list[str]]:
    plugin = HybridParallelPlugin(1, 2, precision="fp32", num_layers_per_stage=[1, 3])
    boosted, *_ = Booster(plugin=plugin).boost(make_model(num_hidden_layers=4))
    with pytest.raises(ShardcError, match=r"num_layers_per_stage=\[1, 2\]: 3 layers, Qwen3ForCausalLM has 4"):
        wrong = HybridParallelPlugin(1, 2, precision="fp32", num_layers_per_stage=[1, 2])
        Booster(plugin=wrong).boost(make_model(num_hidden_layers=4))
    return sorted({name.split(".")[2] for name, _ in boosted.named_parameters() if ".layers." in name})


def test_stages_have_the_layers_that_were_asked_for(workers: Workers) -> None:
    assert workers.run(2, f"{HERE}:cut_as_asked") == [["0"], ["1", "2", "3"]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of the small model, its last norm frozen."""
    model = make_model()
    model.model.norm.requires_grad_(False)
    compiled = compile_plan(source_from_module(model), dtype="float32")
    return load_plan(write_plan(compiled, tmp_path_factory.mktemp("plans") / "plan"))


def frozen_norm(**changes: object) -> nn.Module:
    model = make_model(**changes)
    model.model.norm.requires_grad_(False)
    model.config.eos_token_id = 7  # of generation
    return model


def with_one_more() -> nn.Module:
    model = frozen_norm()
    model.extra = nn.Parameter(torch.ones(3))
    return model


def untied() -> nn.Module:
    model = frozen_norm()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def tied() -> nn.Module:
    model = frozen_norm()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "intermediate_size is 40, the plan has 48": lambda: frozen_norm(intermediate_size=40),
    "rms_norm_eps is 0.001, the plan has 1e-06": lambda: frozen_norm(rms_norm_eps=1e-3),
    "model.norm.weight is trained, the plan has it frozen": make_model,
    "extra is not in the plan": with_one_more,
    "lm_head.weight are one parameter in the plan, not in the model": untied,
    "model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are one parameter in the model": tied,
    "model.embed_tokens.weight is missing in the model": Decoder,
}


@pytest.mark.parametrize(("problem", "make"), OTHERS.items(), ids=OTHERS)
def test_a_plan_of_another_model_is_refused(plan: Plan, problem: str, make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ShardcError) as error:
        plan_for(make(), Recipe(plan=plan), torch.float32, microbatches=None)
    assert problem in str(error.value)
    assert str(error.value).endswith(f"\n  compile a plan of this model, or load the model of {plan.folder}")


def test_a_plan_of_the_model_is_taken_as_it_is(plan: Plan, capfd: pytest.CaptureFixture) -> None:
    boosted, *_ = Booster(plugin=HybridParallelPlugin(plan=plan, precision="fp32")).boost(frozen_norm())
    assert boosted.module.folder == plan.folder and capfd.readouterr().err == ""


def sizes_that_do_not_divide() -> None:
    plugin = TorchDDPPlugin()
    object.__setattr__(plugin, "recipe", Recipe(tp=3))
    with pytest.raises(ShardcError, match=r"tp_size=3 \* pp_size=1 does not divide the 2 process"):
        Booster(plugin=plugin).boost(make_model())


def test_sizes_that_do_not_divide_the_job_are_refused(workers: Workers) -> None:
    workers.run(2, f"{HERE}:sizes_that_do_not_divide")


def test_float64_is_built_from_a_plan_of_float32() -> None:
    boosted, *_ = Booster().boost(make_model(torch.float64))
    assert boosted.dtype is torch.float64
    with torch.no_grad():
        batch = next(iter(make_loader(1)))
        found, expected = boosted(**batch).logits, make_model(torch.float64)(**batch).logits
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
