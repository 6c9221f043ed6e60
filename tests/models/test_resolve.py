"""What a model may be called, and the full text of each refusal."""

import json
import socket
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from shardc import ShardcError
from shardc.models import resolve

FORMS = "\n  give a preset name, a local folder, a config.json, a hub id (org/name) or my_file.py:make_model"
USER_FILE = """
from torch import nn

WIDTH = 8

def make_model(width=WIDTH):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())

def make_nothing():
    return None
"""


def test_importing_the_package_does_not_load_transformers():
    code = "import sys, shardc.models; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_make_follows_the_default_dtype_and_device_and_leaves_the_config_alone():
    source = resolve("Qwen3-0.6B", {"num_hidden_layers": 1})
    before = source.config.to_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = source.make()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert (model.config._attn_implementation, model.config.use_cache) == ("sdpa", False)
    assert source.config.to_dict() == before
    assert source.class_name == "Qwen3ForCausalLM"


def test_gemma2_has_no_sdpa_path_and_is_built_with_its_eager_attention():
    with torch.device("meta"):
        assert resolve("gemma-2-2b", {"num_hidden_layers": 1}).make().config._attn_implementation == "eager"


def test_a_folder_and_a_config_file_give_the_config_they_hold(tmp_path):
    config = resolve("gpt2", {"n_layer": 2}).config
    config.save_pretrained(tmp_path / "mine")
    for name in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
        source = resolve(str(name))
        assert (source.name, source.class_name, source.config.n_layer) == ("mine", "GPT2LMHeadModel", 2)


def test_dtype_is_written_into_the_config():
    assert resolve("Qwen3-4B", dtype="float32").config.dtype == torch.float32
    assert resolve("Qwen3-4B", dtype=torch.float16).config.dtype == torch.float16


def test_a_users_function_is_called_with_the_overrides(tmp_path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    source = resolve(f"{tmp_path}/mine.py:make_model", {"width": "6"})
    assert (source.class_name, source.config) == ("Sequential", None)
    assert source.make()[0].weight.shape == (6, 6)
    assert resolve(lambda: nn.Linear(2, 2)).class_name == "Linear"


def test_a_users_file_may_import_its_neighbour_and_define_dataclasses(tmp_path):
    (tmp_path / "my_sizes.py").write_text("WIDTH = 5")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom torch import nn\n"
        "from my_sizes import WIDTH\n\n@dataclass\nclass Sizes:\n    width: int = WIDTH\n\n"
        "def make_model():\n    return nn.Linear(Sizes().width, 1)\n"
    )
    before = list(sys.path)
    assert resolve(f"{tmp_path}/mine.py:make_model").make().in_features == 5
    assert sys.path == before


@dataclass
class Override:
    name: str
    model: str
    overrides: dict
    expected: dict = field(default_factory=dict)


OVERRIDES = [
    Override("layers by the common name", "gpt2", {"num_hidden_layers": "4"}, {"n_layer": 4}),
    Override("the layer pattern is continued", "gemma-3-1b", {"num_hidden_layers": 8}, {"num_hidden_layers": 8}),
    Override("a nested field", "Llama-3.1-8B", {"rope_scaling.factor": 2.0}, {}),
    Override(
        "a bool and None", "Qwen3-4B", {"tie_word_embeddings": "false", "pad_token_id": "none"}, {"pad_token_id": None}
    ),
    Override(
        "the old name of the rope base",
        "Qwen3-4B",
        {"rope_theta": 5},
        {"rope_parameters": {"rope_theta": 5, "rope_type": "default"}},
    ),
]


@pytest.mark.parametrize("case", OVERRIDES, ids=lambda case: case.name)
def test_override(case):
    config = resolve(case.model, case.overrides).config
    assert {key: getattr(config, key) for key in case.expected} == case.expected


def test_per_layer_lists_of_a_file_follow_the_number_of_layers(tmp_path):
    fields = resolve("gemma-3-1b", {"num_hidden_layers": 12}).config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    kinds = lambda layers: [t[0] for t in resolve(str(tmp_path), {"num_hidden_layers": layers}).config.layer_types]  # noqa: E731
    assert "".join(kinds(4)) == "ssss"
    assert "".join(kinds(20)) == "sssssf" * 3 + "ss"


def test_an_override_that_the_config_does_not_keep_warns():
    with pytest.warns(UserWarning, match="--set sliding_window=8 has no effect: the config turns it into None"):
        resolve("Qwen2.5-3B", {"sliding_window": 8})


@dataclass
class Refusal:
    name: str
    model: str
    message: str
    overrides: dict = field(default_factory=dict)


REFUSALS = [
    Refusal(
        "a misspelt preset",
        "Qwen3-4Bx",
        "model 'Qwen3-4Bx': no such preset, folder or file; near presets: Qwen3-4B, Qwen3-14B, Qwen3-8B, Qwen3-32B"
        + FORMS,
    ),
    Refusal(
        "a missing path", "./nowhere", "model './nowhere': no such preset, folder or file; near presets: none" + FORMS
    ),
    Refusal(
        "an unknown field",
        "Qwen3-4B",
        "--set num_hidden_layer: Qwen3Config has no such field; near names: num_hidden_layers, hidden_act, "
        "output_hidden_states, max_window_layers\n  field names are those of the model's config.json",
        {"num_hidden_layer": 4},
    ),
    Refusal(
        "a value of the wrong type",
        "Qwen3-4B",
        "Qwen3-4B: Qwen3Config refuses these fields: TypeError: Field 'hidden_size' expected int, got str "
        "(value: 'abc')\n  see its config.json and --set",
        {"hidden_size": "abc"},
    ),
    Refusal(
        "no layers",
        "Qwen3-4B",
        "--set num_hidden_layers=0: not a positive number\n  for example --set num_hidden_layers=4",
        {"num_hidden_layers": 0},
    ),
    Refusal(
        "a path into a plain field",
        "Qwen3-4B",
        "--set hidden_size.x: hidden_size is not an object in this config\n  set hidden_size itself, as a JSON object",
        {"hidden_size.x": 1},
    ),
    Refusal(
        "a missing user file",
        "no.py:make",
        "model 'no.py:make': no file no.py\n  the form is path/to/my_file.py:make_model",
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_refusal(case):
    with pytest.raises(ShardcError) as caught:
        resolve(case.model, case.overrides)
    assert str(caught.value) == case.message


def test_refusals_of_a_users_file(tmp_path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    name = f"{tmp_path}/mine.py"
    with pytest.raises(ShardcError) as caught:
        resolve(f"{name}:make")
    problem = f"model '{name}:make': mine.py defines no function 'make'; it defines: make_model, make_nothing"
    assert str(caught.value) == problem + FORMS
    with pytest.raises(ShardcError) as caught:
        resolve(f"{name}:make_nothing")
    assert str(caught.value) == f"{name}:make_nothing: returned NoneType, not an nn.Module\n  return the model itself"


def test_refusals_of_config_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    advice = "\n  it should be the config.json of a Hugging Face model"
    with pytest.raises(ShardcError) as caught:
        resolve(str(path))
    assert str(caught.value).startswith(f"{path}: not JSON: ") and str(caught.value).endswith(advice)
    path.write_text("{}")
    with pytest.raises(ShardcError) as caught:
        resolve(str(path))
    assert str(caught.value) == f"{path}: has no model_type{advice}"
    path.write_text('{"model_type": "qwen33"}')
    with pytest.raises(
        ShardcError, match=r"^config: model_type 'qwen33' is unknown to transformers .*; near names: qwen3"
    ):
        resolve(str(path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardcError) as caught:
        resolve(str(tmp_path / "empty"))
    assert str(caught.value) == f"model '{tmp_path}/empty': the folder has no config.json{FORMS}"


def test_a_hub_id_without_a_network_is_refused_at_once(monkeypatch, tmp_path):
    def unreachable(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(ShardcError) as caught:
        resolve("Qwen/Qwen9-4B")
    assert str(caught.value) == (
        "model 'Qwen/Qwen9-4B': not a preset, and its config.json could not be fetched (OSError); "
        "near presets: Qwen3-4B, Qwen3-14B, Qwen3-8B, Qwen2-7B" + FORMS
    )
