"""boost compiles a live model once, and keeps the plan by what decided it."""

from __future__ import annotations

import shutil
from pathlib import Path

import peft
import pytest
import torch

from shardc.booster import Booster
from shardc.booster.compiled import plan_for
from shardc.booster.plan_cache import key_of
from shardc.booster.plugin import HybridParallelPlugin, Recipe, TorchDDPPlugin
from shardc.errors import ShardcError
from shardc.models.live import source_from_module
from shardc.plan import compile_plan, load_plan, write_plan
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


@pytest.mark.parametrize("damage", ["truncated", "deleted", "not json", "empty"])
def test_a_damaged_plan_is_compiled_again(cache: Path, damage: str, capfd: pytest.CaptureFixture) -> None:
    folder = plan_for(make_model(), Recipe(), torch.float32, microbatches=None).folder
    if damage == "truncated":
        (folder / "model.py").write_bytes((folder / "model.py").read_bytes()[:-20])
    elif damage == "deleted":
        (folder / "schedule.json").unlink()
    elif damage == "not json":
        (folder / "plan.json").write_text("{")
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    capfd.readouterr()
    again = plan_for(make_model(), Recipe(), torch.float32, microbatches=None)
    assert COMPILES in capfd.readouterr().err
    assert again.folder == folder and len(list(folder.iterdir())) == 6


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="plans are not kept.*SHARDC_CACHE"):
        boosted, *_ = Booster().boost(make_model())
    with torch.no_grad():
        assert boosted(**next(iter(make_loader(1)))).loss > 0


def test_what_decides_a_plan_is_in_its_key(tmp_path: Path) -> None:
    def key(settings: object = 1, policy: object = None, **changes: object) -> str | None:
        return key_of(make_model(**changes), {"tp": settings}, policy)

    policies = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for number, path in enumerate(policies):
        path.write_text(f"models: [m{number}]\n")
    frozen, moved = make_model(), make_model()
    frozen.model.norm.weight.requires_grad_(False)
    moved.model.layers[0].self_attn.scaling = 0.5
    base = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=4)
    alpha = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=8)
    keys = [
        key(),
        key(2),
        key(policy=policies[0]),
        key(policy=policies[1]),
        key(rms_norm_eps=1e-3),
        key(tie_word_embeddings=False),
        key_of(frozen, {"tp": 1}, None),
        key_of(moved, {"tp": 1}, None),
        key_of(peft.get_peft_model(make_model(), base), {"tp": 1}, None),
        key_of(peft.get_peft_model(make_model(), alpha), {"tp": 1}, None),
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    other_values = make_model()
    with torch.no_grad():
        other_values.model.norm.weight.add_(1)
    assert key() == key_of(other_values.eval(), {"tp": 1}, None)
    assert key_of(Decoder(), {}, None) is None, "a user's own class may change between runs"


def test_a_users_own_module_is_compiled_each_time(cache: Path, capfd: pytest.CaptureFixture) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        boosted, *_ = Booster().boost(Decoder())
        batch = {key: value.clamp(min=0) for key, value in next(iter(make_loader(1))).items()}
        torch.manual_seed(0)
        with torch.no_grad():
            torch.testing.assert_close(boosted(**batch).loss, Decoder()(**batch)["loss"])
        assert COMPILES in capfd.readouterr().err
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


def cut_as_asked() -> list[list[str]]:
    plugin = HybridParallelPlugin(1, 2, precision="fp32", num_layers_per_stage=[1, 3])
    boosted, *_ = Booster(plugin=plugin).boost(make_model(num_hidden_layers=4))
    with pytest.raises(ShardcError, match=r"num_layers_per_stage=\[1, 2\]: 3 layers, Qwen3ForCausalLM has 4"):
        wrong = HybridParallelPlugin(1, 2, precision="fp32", num_layers_per_stage=[1, 2])
        Booster(plugin=wrong).boost(make_model(num_hidden_layers=4))
    return sorted({name.split(".")[2] for name, _ in boosted.named_parameters() if ".layers." in name})


def test_stages_have_the_layers_that_were_asked_for(workers: Workers) -> None:
    assert workers.run(2, f"{HERE}:cut_as_asked") == [["0"], ["1", "2", "3"]]


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    compiled = compile_plan(source_from_module(make_model()), dtype="float32")
    plan = load_plan(write_plan(compiled, tmp_path / "plan"))
    plugin = HybridParallelPlugin(plan=plan, precision="fp32")
    boosted, *_ = Booster(plugin=plugin).boost(make_model())
    assert boosted.module.folder == plan.folder
    with pytest.raises(ShardcError, match="intermediate_size is 40, the plan has 48"):
        Booster(plugin=plugin).boost(make_model(intermediate_size=40))
    with pytest.raises(ShardcError, match=r"tokens\.weight|embed_tokens\.weight is missing in the model"):
        Booster(plugin=plugin).boost(Decoder())


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
