"""The command line of `shardc run`: its own options, torchrun's, then the script and what belongs to it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTION = """\
Start SCRIPT on several ranks, of this machine or of several. Each rank finds RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT in its environment (shardc.launch_from_torch reads them). All that follows SCRIPT is its
own."""

_EPILOG = """\
examples:
  shardc run train.py --lr 1e-3                             one rank for each GPU of this machine
  shardc run --nproc_per_node 4 -m package.train            4 ranks, a module
  shardc run --hostfile hosts.txt train.py                  all hosts of the file, one ssh connection each
  shardc run --hostfile hosts.txt --exclude worker-3 --env WANDB_API_KEY train.py
  shardc run --host worker-0,worker-1 --nproc_per_node 8 train.py
  shardc run --nnodes 2 --node_rank 1 --master_addr worker-0 --master_port 29500 train.py
                                                            this machine only; the same on worker-0 with --node_rank 0

a hostfile:
  worker-0 slots=8    # ranks on this host; without slots, one for each of its GPUs
  worker-1 slots=4

Options may be written with dashes or underscores. Hosts are reached by `ssh` without passwords, and need this folder
and this Python at the same paths; SHARDC_SSH="ssh -F FILE" is another ssh command. The host that is this machine is
reached without ssh, unless --ssh_port is given. Output of several hosts begins with [host]. The first rank or host that
fails ends all others: its error is shown last, and its exit code is that of the command. Exit codes: 2 for a wrong
command line or hostfile, 130 after Ctrl-C (twice: at once)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for. torchrun: its other options, as words; script: SCRIPT and its arguments."""

    hostfile: Path | None
    host: str | None
    include: str | None
    exclude: str | None
    nproc_per_node: str | None
    nnodes: str | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None
    ssh_port: int | None
    connect_timeout: int
    env: tuple[str, ...]
    torchrun: tuple[str, ...]
    script: tuple[str, ...]

    def gives(self, *options: str) -> bool:
        """Whether an option of torchrun that begins with one of these is there."""
        return any(word.startswith(options) for word in self.torchrun)


class _Torchrun(argparse.Action):
    """Keeps an option of torchrun as a word."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        word = self.option_strings[-1] if self.nargs == 0 else f"{self.option_strings[-1]}={values}"
        namespace.torchrun = (*namespace.torchrun, word)


def parse(arguments: Sequence[str]) -> Request:
    """Prints usage and exits with 2 where the command line is wrong; prints help and exits with 0 on --help."""
    parser, known = make_parser()
    options, script = _split(parser, known, arguments)
    values = vars(parser.parse_args(options))
    if not script:
        parser.error("no SCRIPT is given")
    if values["hostfile"] and values["host"]:
        parser.error("--hostfile and --host both name the hosts: give one of them")
    if values["include"] is not None and values["exclude"] is not None:
        parser.error("--include and --exclude both choose hosts: give one of them")
    for name in ("include", "exclude"):
        if values[name] is not None and not (values["hostfile"] or values["host"]):
            parser.error(f"--{name} chooses from hosts: give --hostfile or --host")
    return Request(**values | {"env": tuple(values["env"])}, script=script)


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.Action]]:
    """The options with their help, and each by its names, which are in this form: --nproc_per_node."""
    parser = argparse.ArgumentParser(
        prog="shardc run",
        usage="shardc run [OPTIONS] SCRIPT [ARGS]...\n       shardc run [OPTIONS] -m MODULE [ARGS]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=120),
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(torchrun=())
    ranks = parser.add_argument_group("ranks")
    hosts = parser.add_argument_group("several machines, started from this one")
    nodes = parser.add_argument_group("several machines, with this command on each")
    torchrun = parser.add_argument_group("torchrun's own, passed on (torchrun --help explains them)")
    actions = [
        ranks.add_argument(
            "--nproc_per_node",
            metavar="N",
            type=_ranks,
            help="ranks on each machine: a number, or auto, cpu, gpu, xpu as torchrun has them "
            "(default: the slots of the hostfile, else the number of GPUs, else 1)",
        ),
        ranks.add_argument(
            "--env",
            metavar="NAME[=VALUE]",
            action="append",
            default=[],
            help="a variable for all ranks; without VALUE, as it is here; can be repeated. Other hosts get PATH, "
            "PYTHONPATH, VIRTUAL_ENV, LD_LIBRARY_PATH, OMP_NUM_THREADS, HF_*, TORCH_*, SHARDC_*, CUDA_* and NCCL_* "
            "without being asked, but for those that name devices or files of one machine",
        ),
        ranks.add_argument(
            "-m",
            "--module",
            action=_Torchrun,
            nargs=0,
            default=argparse.SUPPRESS,
            help="SCRIPT is the name of a module",
        ),
        ranks.add_argument("-h", "--help", action="help", help="show this and exit"),
        hosts.add_argument("--hostfile", metavar="FILE", type=Path, help="one host a line: NAME, or NAME slots=N"),
        hosts.add_argument("-H", "--host", metavar="H1,H2", help="the hosts, instead of a file"),
        hosts.add_argument("--include", metavar="H1,H2", help="only these of the hosts"),
        hosts.add_argument("--exclude", metavar="H1,H2", help="all hosts but these"),
        hosts.add_argument(
            "--ssh_port", metavar="P", type=_port, help="port of ssh; every host is then reached by ssh"
        ),
        hosts.add_argument(
            "--connect_timeout",
            metavar="S",
            type=_positive,
            default=10,
            help="seconds after which a host counts as unreachable (default: 10)",
        ),
        nodes.add_argument(
            "--nnodes", metavar="N", help="number of machines, or MIN:MAX; with hosts: the first N of them"
        ),
        nodes.add_argument(
            "--node_rank", metavar="R", type=_number, help="which of them this is; with hosts: no ssh, only this one"
        ),
        nodes.add_argument(
            "--master_addr", metavar="A", help="address of machine 0 (default: the first host, else 127.0.0.1)"
        ),
        nodes.add_argument(
            "--master_port", metavar="P", type=_port, help="a port of it (default: with ssh a free one, else 29500)"
        ),
    ]
    for name, metavar in _TORCHRUN.items():
        takes = {"nargs": 0} if metavar is None else {"metavar": metavar}
        names = [_SHORT[name], f"--{name}"] if name in _SHORT else [f"--{name}"]
        actions.append(torchrun.add_argument(*names, action=_Torchrun, default=argparse.SUPPRESS, **takes))
    return parser, {name: action for action in actions for name in action.option_strings}


_SHORT = {"redirects": "-r", "tee": "-t"}
_TORCHRUN: dict[str, str | None] = {  # None: takes no value
    "standalone": None,
    "rdzv_backend": "NAME",
    "rdzv_endpoint": "HOST[:PORT]",
    "rdzv_id": "ID",
    "rdzv_conf": "K=V,..",
    "max_restarts": "N",
    "monitor_interval": "S",
    "start_method": "METHOD",
    "event_log_handler": "NAME",
    "role": "NAME",
    "no_python": None,
    "run_path": None,
    "log_dir": "DIR",
    "redirects": "STD",
    "tee": "STD",
    "local_ranks_filter": "R1,R2",
    "duplicate_stdout_filters": "F1,F2",
    "duplicate_stderr_filters": "F1,F2",
    "local_addr": "A",
    "logs_specs": "NAME",
    "numa_binding": "MODE",
    "signals_to_handle": "S1,S2",
    "shutdown_timeout": "S",
    "virtual_local_rank": None,
}


def _split(
    parser: argparse.ArgumentParser, known: Mapping[str, argparse.Action], arguments: Sequence[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Options as --name=value, with their full names, and the words from the script on.

    The script is the first word that neither is an option nor the value of one: what follows it may look like ours.
    """
    options, position = [], 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        position += 1
        name, value = _name_and_value(word)
        action = known[_full_name(parser, name, known, word)]
        option = action.option_strings[-1]
        if action.nargs == 0:
            if value is not None:
                parser.error(f"{option} takes no value, and {word} gives it one")
            options.append(option)
            continue
        if value is None:
            if position == len(arguments):
                parser.error(f"{option} needs a value: {action.metavar}")
            value, position = arguments[position], position + 1
        options.append(f"{option}={value}")
    return options, tuple(arguments[position:])


def _name_and_value(word: str) -> tuple[str, str | None]:
    """--nproc-per-node=4, -H=h1 and -Hh1 as name and value."""
    if not word.startswith("--"):
        return word[:2], word[2:].removeprefix("=") or None
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_"), value if equals else None


def _full_name(parser: argparse.ArgumentParser, name: str, known: Iterable[str], word: str) -> str:
    """An option, of which the beginning may have been given."""
    if name in known:
        return name
    begun = [option for option in known if name.startswith("--") and option.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    near = begun or difflib.get_close_matches(name, list(known), n=2)
    advice = f"did you mean {' or '.join(near)}?" if near else "see shardc run --help"
    parser.error(f"no such option: {word.partition('=')[0]}; {advice}")


def _ranks(text: str) -> str:
    if text in ("auto", "cpu", "gpu", "xpu"):
        return text
    return str(_positive(text))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; valid: 0 to 65535")
    return int(text)
