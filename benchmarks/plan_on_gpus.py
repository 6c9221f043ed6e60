"""A plan on two GPUs beside the Hugging Face model on one: losses and gradient norms of the same steps, tokens/s.

    torchrun --nproc_per_node 2 benchmarks/plan_on_gpus.py                          # Qwen3-4B, tp 2, then pp 2
    torchrun --nproc_per_node 2 benchmarks/plan_on_gpus.py --model Qwen3-0.6B --set num_hidden_layers=2 --seq 64

Every model starts from the same random weights (seed 0) and sees the same tokens. The reference runs first, on rank 0.
Numbers are of one run: the first steps include warm-up, so tokens/s is of the median of the later ones.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import shardc
from shardc.models import parse_set, resolve
from shardc.plan import write_plan
from shardc.runtime import Mesh
from shardc.runtime.plan import Plan
from shardc.runtime.weights import SeedWeights

LAYOUTS = {"tp2": {"tp": 2}, "tp2-sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen3-4B")
parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a config field")
parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["tp2", "pp2"])
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--seq", type=int, default=4096)
parser.add_argument("--rows", type=int, default=4, help="sequences a step")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--compile", action="store_true", help="torch.compile each block, of the reference as well")
args = parser.parse_args()

device = shardc.launch_from_torch()
rank = dist.get_rank()
dtype = getattr(torch, args.dtype)
source = resolve(args.model, parse_set(args.set))


def batches() -> list[torch.Tensor]:
    """The tokens of each step, the same for every layout."""
    sampler = torch.Generator().manual_seed(1)
    return [
        torch.randint(source.config.vocab_size, (args.rows, args.seq), generator=sampler) for _ in range(args.steps)
    ]


def train(name: str, step: Callable[[torch.Tensor], tuple[float, float]]) -> dict:
    """Run the steps of one model; returns losses, gradient norms and speed."""
    losses, norms, seconds = [], [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for ids in batches():
        start = time.perf_counter()
        loss, norm = step(ids)  # both are read on the host, so the GPU has finished
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
        norms.append(norm)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    speed = args.rows * args.seq / median(seconds[min(2, len(seconds) - 1) :])
    return {"layout": name, "loss": losses, "grad_norm": norms, "tokens_s": round(speed), "peak_gib": round(peak, 1)}


def reference(parameters: dict) -> dict:
    """The Hugging Face model on this GPU, one micro-batch of one row at a time as the plan under pp has."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with device:
        model = source.make()
    torch.set_default_dtype(before)
    weights, single = SeedWeights(0), Mesh.single().tp
    named = dict(model.named_parameters())
    with torch.no_grad():
        for spec in parameters.values():
            named[spec.name].copy_(weights.shard(spec, single, dtype, device))
    if args.compile:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    def step(ids: torch.Tensor) -> tuple[float, float]:
        ids = ids.to(device)
        loss = 0.0
        for row in ids.split(1):
            part = model(input_ids=row, labels=row).loss / args.rows  # rows have equally many targets
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return train("one GPU, transformers", step)


def compile_blocks(model: nn.Module) -> None:
    """torch.compile each decoder layer of a Hugging Face model or of a plan's stages."""
    for path, module in model.named_modules():
        if path.rpartition(".")[0].endswith("model.layers"):
            module.compile()


def planned(name: str, plan: Plan) -> dict:
    """A plan on all GPUs."""
    model = plan.build(seed=0, device=device)
    if args.compile:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    def step(ids: torch.Tensor) -> tuple[float, float]:
        rows = ids.tensor_split(model.mesh.dp.size)[model.mesh.dp.coord]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        model.reduce_gradients()
        norm = model.grad_norm()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return train(name, step)


def free() -> None:
    """Return memory before the next model, on all ranks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()


def main() -> None:
    """Compile the plans, train the reference and then each plan, print the table."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        folders = {name: Path(shared[0]) / name for name in args.layouts}
        if rank == 0:
            for name, path in folders.items():
                sizes = {"tp": 1, "pp": 1, "microbatches": args.rows, **LAYOUTS[name]}
                plan = shardc.compile_plan(args.model, overrides=parse_set(args.set), dtype=args.dtype, **sizes)
                write_plan(plan, path)
        dist.barrier()
        plans = {name: shardc.load_plan(path) for name, path in folders.items()}
        rows = [reference(next(iter(plans.values())).spec.parameters)] if rank == 0 else []
        free()
        for name, plan in plans.items():
            rows.append(planned(name, plan))
            free()
        if rank == 0:
            for row in rows:
                print(f"{row['layout']:24} {row['tokens_s']:>9,} tokens/s  peak {row['peak_gib']:6.1f} GiB")
                print("    loss      " + "  ".join(f"{x:9.5f}" for x in row["loss"]))
                print("    grad norm " + "  ".join(f"{x:9.5f}" for x in row["grad_norm"]))
            for row in rows:
                print(
                    "RESULT", json.dumps({"model": args.model, "seq": args.seq, "rows": args.rows, **row}), flush=True
                )


main()
dist.destroy_process_group()
