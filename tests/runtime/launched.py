"""What torchrun starts in test_launch: the checks of the other files, on this machine's devices.

python -m tests.runtime.launched FOLDER, with the plans of test_launch in FOLDER, on two ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardc.runtime import launch_from_torch
from tests.runtime import test_collectives, test_layers, test_rng, test_training

CALLS = [(4, 8, "none"), (3, 9, "left")]


def main() -> None:
    """Join, check, leave."""
    torch.set_num_threads(1)
    device = launch_from_torch(seed=7)
    assert dist.get_world_size() == 2
    assert torch.initial_seed() == 7
    if device.type == "cuda":
        assert torch.cuda.current_device() == device.index == dist.get_rank()
        with device:
            test_collectives.check_lengths([12, 7])
            test_collectives.check_low_precision()
            test_collectives.check_compile()
            test_layers.check_cross_entropies()
            test_layers.check_embeddings()
            test_layers.check_rows()
            test_rng.replayed()
            test_rng.resumed()
    for plan in sorted(Path(sys.argv[1]).iterdir()):
        test_training.train(str(plan), CALLS, device=str(device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
