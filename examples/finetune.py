"""Teach a language model to answer, on alpaca's questions and answers, or on rows with a `text`.

    shardc run --nproc_per_node 8 examples/finetune.py --plugin gemini
    shardc run --nproc_per_node 8 examples/finetune.py --plugin hybrid_parallel     # TP 2, ZeRO-1 over the other 4

Without a network or a GPU:

    python examples/tiny_model.py tiny
    shardc run --nproc_per_node 4 examples/finetune.py --model_type tiny/model --dataset tiny/data --lr 1e-3
"""

import argparse
from typing import Any

from datasets import load_dataset
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler

import shardc
from shardc.booster import Booster
from shardc.booster.plugin import GeminiPlugin, HybridParallelPlugin, TorchDDPPlugin

PLUGINS = {
    "gemini": lambda: GeminiPlugin(precision="bf16"),
    "hybrid_parallel": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="bf16"),
    "ddp": lambda: TorchDDPPlugin(),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_type", default="meta-llama/Llama-3.2-1B", help="name on the hub, or a folder; default: %(default)s")
    add("--dataset", default="yahma/alpaca-cleaned", help="name on the hub, or a folder; default: %(default)s")
    add("--plugin", default="gemini", choices=PLUGINS, help="default: %(default)s")
    add("--batch_size", type=int, default=4, help="rows of each data-parallel rank; default: %(default)s")
    add("--max_length", type=int, default=2048, help="tokens of a row, at most; default: %(default)s")
    add("--lr", type=float, default=5e-5, help="at the end of the warm-up; default: %(default)s")
    add("--warmup_ratio", type=float, default=0.03, help="share of the steps; default: %(default)s")
    add("--epoch", type=int, default=3, help="passes over the data; default: %(default)s")
    add("--output", default="out", help="folder of the trained model; default: %(default)s")
    return parser.parse_args()


def tokenize(row: dict[str, str], tokenizer: Any, max_length: int) -> dict[str, list[int]]:
    """Tokens of a question and its answer; the loss counts the answer alone."""
    question = "" if "text" in row else f"{row['instruction']}\n{row['input']}\n"
    answer = row["text"] if "text" in row else row["output"]
    prompt = tokenizer(question)["input_ids"]
    ids = prompt + tokenizer(answer + tokenizer.eos_token, add_special_tokens=not prompt)["input_ids"]
    labels = [-100] * len(prompt) + ids[len(prompt) :]
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def main() -> None:
    args = parse_args()
    shardc.launch_from_torch()
    plugin = PLUGINS[args.plugin]()
    booster = Booster(plugin=plugin, monitor=True)

    tokenizer = AutoTokenizer.from_pretrained(args.model_type)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model_type)
    optimizer = AdamW(model.parameters(), lr=args.lr)

    dataset = load_dataset(args.dataset, split="train")
    arguments = {"tokenizer": tokenizer, "max_length": args.max_length}
    dataset = dataset.map(tokenize, fn_kwargs=arguments, remove_columns=dataset.column_names)
    dataset = dataset.filter(lambda row: any(label != -100 for label in row["labels"][1:]))  # an answer to learn
    collate = DataCollatorForSeq2Seq(tokenizer)  # pads rows, their labels with -100
    # Divided over the ranks here, so that its length is the number of steps.
    dataloader = plugin.prepare_dataloader(dataset, args.batch_size, shuffle=True, collate_fn=collate)

    steps = len(dataloader) * args.epoch
    warmup = int(args.warmup_ratio * steps)
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=warmup, num_training_steps=steps)

    model, optimizer, _, dataloader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
    )

    for _ in range(args.epoch):
        for batch in dataloader:
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

    booster.monitor.close()
    booster.save_model(model, args.output, shard=True)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
