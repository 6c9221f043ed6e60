"""Write a tiny model with its tokenizer, and some text, to try the other scripts without a network or a GPU.

    python examples/tiny_model.py tiny          # makes tiny/model and tiny/data

The model is a Qwen3 with random weights; the text is Python's own help, as questions and answers.
"""

import argparse
import json
import pydoc_data.topics
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    args = parser.parse_args()

    rows = [
        {"instruction": f"What does Python's help say of {topic}?", "input": "", "output": paragraph}
        for topic, text in pydoc_data.topics.topics.items()
        for paragraph in [part for part in text.split("\n\n")[1:] if 20 < len(part) < 200][:4]  # [0] is a heading
    ]
    (args.folder / "data").mkdir(parents=True, exist_ok=True)
    (args.folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    bpe.train_from_iterator((row["output"] for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(args.folder / "model")

    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(args.folder / "model")
    print(f"{args.folder / 'model'} and {args.folder / 'data'}: {len(rows)} rows")


if __name__ == "__main__":
    main()
