"""Train a compiled plan on the text of a file:  shardc run --nproc_per_node 4 examples/train_plan.py plans/tiny"""

import argparse
import json
import pydoc_data.topics
import time
from pathlib import Path

import torch

import shardc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("plan", help="folder that `shardc compile` wrote")
parser.add_argument("--weights", help="Hugging Face folder to start from; default: random weights from --seed")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--text", type=Path, help="text to learn, a byte a token; default: the help pages of Python")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=8, help="sequences a step, over all data-parallel ranks")
parser.add_argument("--seq-length", type=int, default=128)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--save", help="folder for the trained model, in Hugging Face format")
parser.add_argument("--log", type=Path, help="file for one JSON line a step")
args = parser.parse_args()

shardc.launch_from_torch()
model = shardc.load_plan(args.plan).build(**({"weights": args.weights} if args.weights else {"seed": args.seed}))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
dp, is_first = model.mesh.dp, model.mesh.rank == 0

text = args.text.read_bytes() if args.text else "\n".join(pydoc_data.topics.topics.values()).encode()
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
sampler = torch.Generator().manual_seed(args.seed)  # the same on every rank: each takes its rows of the same batch
for step in range(args.steps):
    start = time.perf_counter()
    offsets = torch.randint(len(tokens) - args.seq_length, (args.batch_size,), generator=sampler).tolist()
    rows = torch.stack([tokens[i : i + args.seq_length] for i in offsets]).long().tensor_split(dp.size)[dp.coord]
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    model.reduce_gradients()
    grad_norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        speed = args.batch_size * args.seq_length / (time.perf_counter() - start)
        print(f"step {step + 1:4d}  loss {loss:.4f}  grad norm {grad_norm:.3f}  {speed:,.0f} tokens/s", flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps({"step": step + 1, "loss": loss.item(), "grad_norm": grad_norm.item()}) + "\n")
if args.save:
    model.save_pretrained(args.save)
