"""One rank of `shardc verify`: builds its part of the plan, runs the batch forward and backward, keeps the results.

    python -m shardc.plan.verify_rank FOLDER RANK WORLD

FOLDER holds `plan/`, `weights/` and `batch.safetensors`; results go to `loss_RANK.json` and `gradients.safetensors`.
It never imports transformers, like any training process.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from shardc.runtime.plan import load_plan

TIMEOUT_S = 120  # how long a rank waits for another before it gives up


def run(folder: Path, rank: int, world: int) -> None:
    """Run this rank's part of one training step in float32 on the CPU, with dropout off."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    module = load_plan(folder / "plan").build(folder / "weights", device="cpu").eval()
    dp = module.mesh.dp
    batch = {
        name: rows.tensor_split(dp.size)[dp.coord] for name, rows in load_file(folder / "batch.safetensors").items()
    }
    loss = module(**batch).loss
    loss.backward()
    module.reduce_gradients()
    norm = module.grad_norm()
    gradients = module.gather_gradients()
    if rank == 0:
        save_file(
            {name: gradient.contiguous() for name, gradient in gradients.items()}, folder / "gradients.safetensors"
        )
    (folder / f"loss_{rank}.json").write_text(json.dumps({"loss": loss.item(), "grad_norm": norm.item()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
