"""The command line as a user meets it: outputs, exit codes, messages.

Each command runs once as a process; what else it can say is read in this one, which has imported torch already.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardc.cli.main import main

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 98,
}
SETS = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]


def shardc(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shardc.cli.main", *arguments]
    env = os.environ | {"COLUMNS": "200"} | (environment or {})
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)


def in_this_process(*arguments: str) -> subprocess.CompletedProcess:
    """The same, but for starting Python and importing."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main([*arguments])
    return subprocess.CompletedProcess(arguments, end.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("cli") / "plan"
    arguments = ("compile", "--model", "Qwen3-4B", *SETS, "--tp", "2", "--pp", "2", "-o", str(folder))
    return folder, shardc(*arguments, "--json", "--verbose")


def test_compile_prints_one_json_document_and_the_times_of_its_passes(compiled) -> None:
    folder, done = compiled
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    seconds = result.pop("seconds")
    assert 0 < seconds < 240
    params = 98 * 32 + 3 * (4 * 8 * 32 * 2 + 2 * 8 * 32 * 2 + 3 * 32 * 48 + 2 * 32 + 2 * 8) + 32
    assert result == {"plan": str(folder), "params": params, "stages": 2, "proved": True, "opaque": []}
    assert [line.split("  ")[0] for line in done.stderr.splitlines() if line.endswith(" s")][-2:] == ["cut", "emit"]


def test_show_prints_who_holds_what(compiled) -> None:
    folder, _ = compiled
    done = shardc("show", str(folder))
    assert done.returncode == 0, done.stderr
    for text in (
        "tp 2, pp 2; proved",
        "hidden_states [B, S, 32]",
        "model.embed_tokens.weight is held by stages 0 and 1",
        "model.layers.*.self_attn.q_norm.weight",
        "dim 0 over tp (2*2*8)",
        "schedule 1f1b, 4 micro-batches: 23% of the time a rank waits",
    ):
        assert re.sub(r"\d+% of", "% of", text) in re.sub(r"\d+% of", "% of", done.stdout)


def test_show_json_lists_every_attention_call(compiled) -> None:
    folder, _ = compiled
    summary = json.loads(in_this_process("show", str(folder), "--json").stdout)
    assert {call["is_causal"] for call in summary["attention"] if call["variant"] == "plain"} == {True}
    assert sum(call["variant"] == "masked" for call in summary["attention"]) == 3


def test_show_needs_no_torch(compiled) -> None:
    folder, _ = compiled
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"from shardc.cli.main import main\nmain(['show', {str(folder)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_check_prints_the_obligations(compiled) -> None:
    folder, _ = compiled
    result = json.loads(shardc("check", str(folder), "--json").stdout)
    assert result["proved"] is True
    assert result["findings"] == []
    assert result["obligations"]["gradients"] > 0


def test_check_exits_with_1_where_the_plan_is_refuted(compiled) -> None:
    folder, _ = compiled
    path = folder / "plan.json"
    before = path.read_text()
    data = json.loads(before)
    data["ties"] = []
    try:
        path.write_text(json.dumps(data))
        done = in_this_process("check", str(folder))
    finally:
        path.write_text(before)
    assert done.returncode == 1
    assert "refuted: model.embed_tokens.weight: is read by stages [0, 1]" in done.stdout


def test_check_of_a_model_writes_nothing(tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text('rules: {"*.q_proj": column, "*.o_proj": column}\npipeline: {blocks: "model.layers.*"}\n')
    done = in_this_process("check", "--model", "Qwen3-4B", *SETS, "--tp", "2", "--policy", str(policy))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2].startswith("ShardcError: model.layers.0.self_attn")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_help_is_fast_and_names_the_commands() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from shardc.cli.main import main\nmain(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("compile", "show", "check", "verify", "policy", "run"):
        assert command in done.stdout


def test_verify_says_what_ran(compiled) -> None:
    folder, _ = compiled
    done = shardc("verify", str(folder))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"ran {folder}/model.py with the sizes of the config below"
    assert "num_hidden_layers=3" in lines[1]
    assert lines[2] == "layout: tp 2, pp 2, sp False, schedule 1f1b, microbatches 4, dp 1, padding none"
    assert lines[-1].startswith("exact: loss and ")


def test_verify_without_a_target_and_a_wrong_flag_print_usage() -> None:
    for arguments in (("verify",), ("compile", "--modle", "x"), ("check", "a", "--model", "b")):
        done = in_this_process(*arguments)
        assert done.returncode == 2
        assert "Usage: " in done.stderr


MISTAKES = [
    (
        ("compile", "--model", "Qwen3-4C", "-o", "x"),
        "ShardcError: model 'Qwen3-4C': no such preset, folder or file; near presets: Qwen3-4B, ",
    ),
    (("compile", "--model", "Qwen3-4B", "--set", "layers", "-o", "x"), "ShardcError: --set layers: not of the form "),
    (("show", "no/such/plan"), "ShardcError: no/such/plan is no plan folder: it has no plan.json"),
    (("policy", "show", "nothing"), "ShardcError: "),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_a_users_mistake_is_two_lines_and_exit_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = in_this_process(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    problem, advice = [line for line in done.stderr.splitlines() if not line.startswith("[transformers]")]
    assert problem.startswith(message)
    assert advice.startswith("  ")


def test_policy_list_and_show() -> None:
    models = json.loads(shardc("policy", "list", "--json").stdout)
    assert models["qwen3"] == ["qwen3"]
    assert '"*.self_attn.{q,k,v}_proj": column' in in_this_process("policy", "show", "qwen3").stdout


ECHO = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([sys.argv[2:], os.environ["WORLD_SIZE"]]))
"""
ODD = ["--tp", "a b", "quote\"'s", "--", "--help", "$HOME", "-x=1", ""]


def test_run_passes_arguments_through_unharmed(tmp_path: Path) -> None:
    script = tmp_path / "echo it.py"
    script.write_text(ECHO)
    done = shardc("run", "--nproc_per_node", "2", str(script), str(tmp_path), *ODD, environment={"ODD": "a'b\"c"})
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [[ODD, "2"]] * 2


def test_run_passes_the_exit_code_on_and_shows_the_failing_rank(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': raise RuntimeError('rank 1 is out of luck')\n")
    done = shardc("run", "--nproc_per_node=2", str(script))
    assert done.returncode == 1
    assert "RuntimeError: rank 1 is out of luck" in done.stderr
    assert shardc("run", "--no-such-flag").returncode == 2


def test_the_same_command_writes_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    model = f"{Path(__file__).parent / 'set_model.py'}:make_model"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "shardc.cli.main", "compile", "--model", model, "-o"]
    folders = [tmp_path / name for name in ("one", "two")]
    both = [subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL, env=environment) for folder in folders]
    assert [process.wait(timeout=240) for process in both] == [0, 0]
    one, two = ((folder / "model.py").read_text() for folder in folders)
    assert one == two
