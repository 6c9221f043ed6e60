"""The command line: whose option a word is, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from shardc.launcher.options import make_parser, parse


def test_dashes_underscores_beginnings_and_both_ways_to_give_a_value_are_the_same() -> None:
    spellings = (
        ["--nproc_per_node", "4", "--master_port", "1"],
        ["--nproc-per-node=4", "--master-port=1"],
        ["--nproc=4", "--master-p", "1"],
    )
    for words in spellings:
        request = parse([*words, "train.py"])
        assert (request.nproc_per_node, request.master_port, request.script) == ("4", 1, ("train.py",))


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["train.py", "--hostfile", "x", "--help", "-m"], ("train.py", "--hostfile", "x", "--help", "-m")),
        (["-m", "package.train", "--tee", "3"], ("package.train", "--tee", "3")),
        (["--", "--odd.py", "--", "-x"], ("--odd.py", "--", "-x")),
        (["--tee", "3", "train.py", ""], ("train.py", "")),
        (["-t3", "train.py"], ("train.py",)),
        (["--env", "--A=--b", "train.py"], ("train.py",)),
    ],
    ids=["options of the script", "a module", "after --", "an empty argument", "a short option", "a value with dashes"],
)
def test_what_follows_the_script_is_its_own(words: list[str], script: tuple[str, ...]) -> None:
    assert parse(words).script == script


def test_options_of_torchrun_are_kept_in_order_as_words() -> None:
    words = ["--max-restarts", "2", "--standalone", "-m", "--rdzv_conf=a=1,b=2", "-t", "3", "package.train"]
    assert parse(words).torchrun == ("--max_restarts=2", "--standalone", "--module", "--rdzv_conf=a=1,b=2", "--tee=3")


def test_every_option_of_torchrun_is_known_and_takes_a_value_as_there() -> None:
    mine = {name: action.nargs != 0 for name, action in make_parser()[1].items()}
    for action in get_args_parser()._actions:
        for name in (option for option in action.option_strings if "-" not in option[2:]):
            assert mine.get(name) == (action.nargs != 0), name


def test_hosts_and_variables() -> None:
    words = [
        "-H",
        "a,b",
        "--include=a",
        "--ssh-port",
        "22",
        "--connect-timeout",
        "3",
        "--env",
        "A",
        "--env=B=c d",
        "x.py",
    ]
    request = parse(words)
    assert (request.host, request.include, request.ssh_port, request.connect_timeout) == ("a,b", "a", 22, 3)
    assert request.env == ("A", "B=c d")
    assert parse(["--hostfile", "h.txt", "x.py"]).hostfile == Path("h.txt")


REFUSED = [
    ([], "no SCRIPT is given"),
    (["--nproc_per_node", "2"], "no SCRIPT is given"),
    (["--no-such-flag", "x.py"], "no such option: --no-such-flag; see shardc run --help"),
    (["--nproc_per_nod3=2", "x.py"], "no such option: --nproc_per_nod3; did you mean --nproc_per_node?"),
    (["--rdzv=c10d", "x.py"], "no such option: --rdzv; did you mean --rdzv_backend or --rdzv_endpoint or "),
    (["-q", "x.py"], "no such option: -q; see shardc run --help"),
    (["--nproc_per_node"], "--nproc_per_node needs a value: N"),
    (["--standalone=yes", "x.py"], "--standalone takes no value, and --standalone=yes gives it one"),
    (["--nproc_per_node", "x.py"], "argument --nproc_per_node: 'x.py' is no number of 1 or more"),
    (["--nproc_per_node=0", "x.py"], "argument --nproc_per_node: '0' is no number of 1 or more"),
    (["--master_port=99999", "x.py"], "argument --master_port: '99999' is no port; valid: 0 to 65535"),
    (["--node_rank=-1", "x.py"], "argument --node_rank: '-1' is no number of 0 or more"),
    (["--hostfile=h", "--host=a", "x.py"], "--hostfile and --host both name the hosts: give one of them"),
    (["--host=a", "--include=a", "--exclude=b", "x.py"], "--include and --exclude both choose hosts: give one of them"),
    (["--exclude=a", "x.py"], "--exclude chooses from hosts: give --hostfile or --host"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) or "nothing" for words, _ in REFUSED])
def test_a_wrong_command_line_prints_usage_and_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    usage, _, error = capsys.readouterr().err.partition("shardc run: error: ")
    assert usage.startswith("usage: shardc run [OPTIONS] SCRIPT [ARGS]...")
    assert error.startswith(message)


def test_help_has_every_option_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--nproc_per_node", "2", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in make_parser()[1]:
        assert f"{name} " in text or f"{name}\n" in text or f"{name}," in text, name
    assert "\nexamples:\n  shardc run train.py --lr 1e-3 " in text
    assert max(map(len, text.splitlines())) <= 120
