"""The whole way on a small model, on CPUs: compile, train on 4 ranks, save, generate with plain transformers.

    python examples/train_tiny.py [--steps 120]

The model is a small Qwen3 that reads bytes, with the policy and the layout (tp 2, pp 2) that Qwen3-4B would have.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parent
SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


def run(*command: str) -> None:
    """Run a command as a user would type it, and show it."""
    print("\n$ shardc", *command, flush=True)
    subprocess.run([sys.executable, "-m", "shardc.cli.main", *command], check=True)


def generate(folder: Path, prompt: str, num_bytes: int) -> str:
    """Continue a prompt by sampling `num_bytes` bytes, temperature 0.7, top 20, with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(prompt.encode())])
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "pad_token_id": 0}
    torch.manual_seed(0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_bytes, **options)
    return bytes(out[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("plans"))
    args = parser.parse_args()

    plan, trained = args.out / "tiny-qwen3", args.out / "tiny-qwen3-trained"
    sizes = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    run("compile", "--model", "Qwen3-4B", *sizes, "--tp", "2", "--pp", "2", "--dtype", "float32", "-o", str(plan))
    script = [str(EXAMPLES / "train_plan.py"), str(plan), "--steps", str(args.steps), "--save", str(trained)]
    run("run", "--nproc_per_node", "4", *script)
    print(f"\nThe saved folder {trained}, opened by transformers, continues:\n")
    print(generate(trained, "The class statement ", 200))


if __name__ == "__main__":
    main()
