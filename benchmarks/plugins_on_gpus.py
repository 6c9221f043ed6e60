"""Each plugin trains one model on the same tokens: losses, gradient norms, tokens/s and peak memory, side by side.

    torchrun --nproc_per_node 2 benchmarks/plugins_on_gpus.py --compile          # Qwen3-4B on two GPUs
    torchrun --nproc_per_node 4 benchmarks/plugins_on_gpus.py --set num_hidden_layers=2 --seq 64 --dtype fp32

The weights are random, of one seed, so every plugin starts alike. The loop is the one of a user: --rows
sequences a GPU in a call, --accumulate calls a step. Plugins whose sizes do not divide the job are left
out. Speed is of the median step without the first two.
"""

import argparse
import gc
import json
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import shardc
from shardc.booster import Booster
from shardc.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardc.errors import ShardcError
from shardc.models import parse_set, resolve

PLUGINS = {
    "ddp": lambda dtype: TorchDDPPlugin(),
    "zero1": lambda dtype: LowLevelZeroPlugin(1, dtype, max_norm=1.0),
    "zero2": lambda dtype: LowLevelZeroPlugin(2, dtype, max_norm=1.0),
    "gemini": lambda dtype: GeminiPlugin(precision=dtype, max_norm=1.0),
    "gemini host": lambda dtype: GeminiPlugin(
        precision=dtype, max_norm=1.0, offload_optim_frac=1.0, enable_gradient_accumulation=args.accumulate > 1
    ),
    "gemini half": lambda dtype: GeminiPlugin(
        precision=dtype, max_norm=1.0, offload_optim_frac=0.5, enable_gradient_accumulation=args.accumulate > 1
    ),
    "fsdp": lambda dtype: TorchFSDPPlugin(),
    "tp2": lambda dtype: HybridParallelPlugin(2, 1, precision=dtype, max_norm=1.0),
    "pp2": lambda dtype: HybridParallelPlugin(1, 2, precision=dtype, max_norm=1.0, num_microbatches=4),
    "tp2 pp2": lambda dtype: HybridParallelPlugin(2, 2, precision=dtype, max_norm=1.0, num_microbatches=4),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen3-4B")
parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a config field")
parser.add_argument("--plugins", nargs="+", choices=PLUGINS, default=list(PLUGINS))
parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
parser.add_argument("--seq", type=int, default=4096)
parser.add_argument("--rows", type=int, default=2, help="sequences of a call, times the number of GPUs")
parser.add_argument("--accumulate", type=int, default=4, help="calls a step")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--recompute", action="store_true", help="gradient checkpointing of each block")
parser.add_argument("--compile", action="store_true", help="torch.compile each block")
args = parser.parse_args()

device = shardc.launch_from_torch()
config = resolve(args.model, parse_set(args.set)).config


def batch_of(step: int, call: int, plugin: Plugin) -> Tensor:
    """This data-parallel rank's part of the global batch, which is the same under every plugin."""
    draws = torch.Generator().manual_seed(step * args.accumulate + call)
    ids = torch.randint(config.vocab_size, (args.rows * dist.get_world_size(), args.seq), generator=draws)
    return ids.chunk(plugin.dp_size)[plugin.dp_coord]


def train(plugin: Plugin) -> dict[str, object]:
    """Losses, gradient norms and speed of a few steps."""
    torch.manual_seed(0)
    with shardc.lazy_init():
        model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    booster = Booster(plugin=plugin, mixed_precision=None if plugin.control_precision() else args.dtype)
    model, optimizer, *_ = booster.boost(model.train(), optimizer)
    if args.recompute:
        model.gradient_checkpointing_enable()
    if args.compile:
        model.compile()
    losses, norms, seconds = [], [], []
    for step in range(args.steps):
        _synchronize()
        start, total = time.perf_counter(), 0.0
        for call in range(args.accumulate):
            ids = batch_of(step, call, plugin)
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
            if call + 1 < args.accumulate:
                with booster.no_sync(model, optimizer):
                    booster.backward(loss, optimizer)
            else:
                booster.backward(loss, optimizer)
            total += loss.detach()
        if not plugin.control_precision():  # these plugins have no max_norm either
            optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        norm = optimizer.get_grad_norm()
        optimizer.zero_grad()
        _synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(round(total.item(), 5))
        norms.append(round(norm.item(), 4))
    tokens_a_gpu = args.rows * args.accumulate * args.seq
    return {
        "loss": losses,
        "grad_norm": norms,
        "tokens_s_gpu": round(tokens_a_gpu / median(seconds[2:])),
    }


def _synchronize() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Train under each plugin, then print a line for each."""
    rows = {}
    for name in args.plugins:
        try:
            plugin = PLUGINS[name](args.dtype)
        except ShardcError as error:
            if dist.get_rank() == 0:
                print(f"{name}: left out: {error}")
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row = train(plugin)
        if device.type == "cuda":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        rows[name] = row
        if dist.get_rank() == 0:
            print(
                "RESULT", json.dumps({"plugin": name, "model": args.model, "compile": args.compile, **row}), flush=True
            )
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        for name, row in rows.items():
            print(
                f"{name:8} {row['tokens_s_gpu']:>8,} tokens/s a GPU  peak {row.get('peak_gib', float('nan')):6.1f} GiB"
            )
            print("    loss      " + "  ".join(f"{x:9.5f}" for x in row["loss"]))
            print("    grad norm " + "  ".join(f"{x:9.5f}" for x in row["grad_norm"]))


main()
dist.destroy_process_group()
