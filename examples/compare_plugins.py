"""The same loop under eight plugins, beside one process with transformers alone: losses and gradient norms agree.

    shardc run --nproc_per_node 4 examples/compare_plugins.py

In float32, with the clipping, the schedule and the gradient accumulation of a real run, and rows of unequal length.
Exit code 1 where a loss or a norm differs by more than 1e-4.
"""

import argparse
import json
import pydoc_data.topics
import sys
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, get_scheduler

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

RANKS, GLOBAL_BATCH, STEPS, WARMUP, LR, MAX_NORM = 4, 8, 10, 2, 3e-3, 0.5
ACCUMULATIONS = (1, 3)  # calls of the model in each step
TOLERANCE = 1e-4
COMMON = {"precision": "fp32", "max_norm": MAX_NORM}
PLUGINS = {
    "DDP": lambda: TorchDDPPlugin(),
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1, **COMMON),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2, **COMMON),
    "FSDP": lambda: TorchFSDPPlugin(),
    "Gemini": lambda: GeminiPlugin(**COMMON),
    "TP 2": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, **COMMON),
    "TP 2, PP 2, ZeRO-1": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=1, **COMMON),
    "PP 2, ZeRO-3": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, zero_stage=3, **COMMON),
}
Series = dict[str, list[float]]  # "loss" and "grad_norm" of each step


def make_model(name: str | None) -> PreTrainedModel:
    """The model of that name, or a tiny Qwen3 that reads bytes; the same on every rank, each time."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, tie_word_embeddings=True, **heads
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return optimizer, get_scheduler("cosine", optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS)


def make_loader(batch_size: int, accumulation: int) -> DataLoader:
    """STEPS * accumulation global batches: bytes of texts, rows of unequal length. The loss counts all but a prompt."""
    texts = [text.encode() for text in pydoc_data.topics.topics.values()]
    count = GLOBAL_BATCH * STEPS * accumulation
    rows = [torch.tensor(list(texts[i % len(texts)][i % 100 : i % 100 + 12 + 7 * i % 29])) for i in range(count)]
    return DataLoader(rows, batch_size, collate_fn=collate)


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Rows padded by byte 0; the first quarter of each is its prompt."""
    masks = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = [row.masked_fill(torch.arange(len(row)) < len(row) // 4, -100) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": masks,
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def train_plain(model: PreTrainedModel, accumulation: int, device: torch.device) -> Series:
    """One process, nothing of shardc."""
    model.to(device)
    optimizer, lr_scheduler = make_optimizer(model)
    batches = iter(make_loader(GLOBAL_BATCH, accumulation))
    series: Series = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        step_loss = 0.0
        for batch in islice(batches, accumulation):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss / accumulation
            loss.backward()
            step_loss += loss.item()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        series["loss"].append(step_loss)
        series["grad_norm"].append(grad_norm.item())
    return series


def train_boosted(model: PreTrainedModel, accumulation: int, plugin: Plugin) -> Series:
    """The same under a plugin."""
    optimizer, lr_scheduler = make_optimizer(model)
    dataloader = make_loader(GLOBAL_BATCH // plugin.dp_size, accumulation)
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(model, optimizer, None, dataloader, lr_scheduler)
    batches = iter(dataloader)
    series: Series = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        step_loss = 0.0
        for batch in islice(batches, accumulation):
            loss = model(**batch).loss / accumulation
            booster.backward(loss, optimizer)
            step_loss += loss.item()
        if not hasattr(plugin, "max_norm"):  # DDP and FSDP leave clipping to the script
            optimizer.clip_grad_by_norm(MAX_NORM)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        series["loss"].append(step_loss)
        series["grad_norm"].append(optimizer.get_grad_norm().item())
    return series


def difference(found: list[float], expected: list[float]) -> float:
    """The largest, of all steps; absolute, and relative to what is below 1."""
    return max(abs(a - b) / min(1.0, abs(b)) for a, b in zip(found, expected, strict=True))


def compare(name: str | None, device: torch.device) -> list[dict[str, Any]]:
    """A record of each run: those without a plugin, whose differences are 0, and all others."""
    records = []
    for accumulation in ACCUMULATIONS:
        expected = train_plain(make_model(name), accumulation, device)
        runs = {"one process": expected}
        runs |= {key: train_boosted(make_model(name), accumulation, make()) for key, make in PLUGINS.items()}
        for key, found in runs.items():
            differences = {f"{what}_difference": difference(found[what], expected[what]) for what in expected}
            ok = max(differences.values()) <= TOLERANCE
            records.append({"plugin": key, "accumulation": accumulation, **found, **differences, "ok": ok})
    return records


def print_tables(records: list[dict[str, Any]]) -> None:
    """One for each accumulation; differences are the largest of all steps."""
    for accumulation in ACCUMULATIONS:
        title = f"{STEPS} steps of {accumulation} x {GLOBAL_BATCH} rows, float32, clipped to {MAX_NORM}, {RANKS} ranks"
        table = Table("plugin", title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("last loss", "differs by", "last norm", "differs by", ""):
            table.add_column(column, justify="right")
        for record in (record for record in records if record["accumulation"] == accumulation):
            loss = f"{record['loss'][-1]:.6f}", f"{record['loss_difference']:.1e}"
            norm = f"{record['grad_norm'][-1]:.6f}", f"{record['grad_norm_difference']:.1e}"
            table.add_row(record["plugin"], *loss, *norm, "equal" if record["ok"] else "DIFFERS")
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name on the hub, or a folder; default: a tiny one with random weights")
    parser.add_argument(
        "--json", action="store_true", help="print the series of all runs as JSON, in place of the table"
    )
    args = parser.parse_args()

    device = shardc.launch_from_torch()
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if ranks != RANKS:
        if rank == 0:
            command = f"shardc run --nproc_per_node {RANKS} {sys.argv[0]}"
            print(f"{parser.prog}: started on {ranks} rank(s); use {command}", file=sys.stderr)
        sys.exit(2)
    records = compare(args.model, device)
    if rank == 0 and args.json:
        print(json.dumps({"ranks": ranks, "tolerance": TOLERANCE, "runs": records}, indent=2))
    elif rank == 0:
        print_tables(records)
    sys.exit(0 if all(record["ok"] for record in records) else 1)


if __name__ == "__main__":
    main()
