"""Train a language model on many GPUs, or on CPU processes: the loop is that of one process, one line is the plugin.

    shardc run --nproc_per_node 8 examples/quickstart.py                 # Qwen3-4B on TinyStories, from the hub
    shardc run --nproc_per_node 8 examples/quickstart.py --plugin 3d     # the same, split in another way

Without a network or a GPU:

    python examples/tiny_model.py tiny
    shardc run --nproc_per_node 4 examples/quickstart.py --model tiny/model --dataset tiny/data --lr 1e-3
"""

import argparse
from itertools import islice

import torch
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardc
from shardc.booster import Booster
from shardc.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin

PLUGINS = {
    "ddp": lambda: TorchDDPPlugin(),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="bf16"),
    "gemini": lambda: GeminiPlugin(precision="bf16"),
    "3d": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=1, precision="bf16"),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--plugin", default="gemini", choices=PLUGINS, help="default: %(default)s")
parser.add_argument("--model", default="Qwen/Qwen3-4B-Base", help="name on the hub, or a folder; default: %(default)s")
parser.add_argument("--dataset", default="roneneldan/TinyStories", help="the same, of texts; default: %(default)s")
parser.add_argument("--batch_size", type=int, default=8, help="rows of a step, over all ranks; default: %(default)s")
parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
parser.add_argument("--lr", type=float, default=5e-5, help="default: %(default)s")
args = parser.parse_args()

shardc.launch_from_torch()
plugin = PLUGINS[args.plugin]()  # this line says how the model is split over the ranks
booster = Booster(plugin=plugin, monitor=True)

# Model, optimizer and data: as for one process.
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
optimizer = AdamW(model.parameters(), lr=args.lr)


def collate(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Texts of unequal length, padded; the loss does not count the padding."""
    texts = ["\n".join(row.values()) for row in rows]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


dataset = load_dataset(args.dataset, split="train")
dataloader = DataLoader(dataset, args.batch_size // plugin.dp_size, shuffle=True, collate_fn=collate)

model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, None, dataloader, None)

for batch in islice(dataloader, args.steps):
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()

booster.monitor.close()
booster.save_model(model, "ckpt", shard=True)  # a Hugging Face folder, for from_pretrained
