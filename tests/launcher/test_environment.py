"""Which variables go to other hosts."""

from __future__ import annotations

import pytest

from shardc.errors import ShardcError
from shardc.launcher.environment import named, sent


def test_variables_of_the_job_go_and_those_of_one_machine_stay() -> None:
    go = {
        "PATH": "/bin",
        "PYTHONPATH": "a b",
        "VIRTUAL_ENV": "v",
        "LD_LIBRARY_PATH": "l",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": 'it\'s "here"\n$HOME',
        "TORCH_LOGS": "+dynamo",
        "SHARDC_X": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_DEBUG": "INFO",
    }
    stay = {
        "CUDA_VISIBLE_DEVICES": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5",
        "SSH_CONNECTION": "x",
        "HOME": "/root",
        "HOSTNAME": "worker-0",
        "RANK": "0",
        "XHF_HOME": "x",
    }
    assert sent(go | stay) == go


def test_variables_that_are_named() -> None:
    environment = {"WANDB_API_KEY": "k", "NCCL_SOCKET_IFNAME": "eth0"}
    options = ["WANDB_API_KEY", "NCCL_SOCKET_IFNAME", "A=b=c d", "EMPTY="]
    assert named(options, environment) == environment | {"A": "b=c d", "EMPTY": ""}


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("A B=c", "--env 'A B=c': 'A B' is no name of a variable\n  write --env NAME or --env NAME=VALUE"),
        ("=c", "--env '=c': '' is no name of a variable\n  write --env NAME or --env NAME=VALUE"),
        ("MISSING", "--env MISSING: it is not set here\n  set it, or write --env MISSING=VALUE"),
    ],
    ids=["a name with a space", "no name", "a variable that is not set"],
)
def test_a_wrong_variable(option: str, text: str) -> None:
    with pytest.raises(ShardcError) as caught:
        named([option], {})
    assert str(caught.value) == text
