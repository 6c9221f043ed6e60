"""A tutorial of ColossalAI, word for word but for its name, trains here as plain transformers does.

tutorial/*.py.txt are its code blocks. What is changed beside the name is PATCHES, and nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, get_scheduler

from tests.end_to_end.scripts import shardc_run
from tests.workers import Workers

Weights = dict[str, Tensor]

BLOCKS = Path(__file__).parent / "tutorial"
ROWS, STEPS, LENGTH = 8, 8, 32  # a global batch, steps of the skeleton, tokens of its rows
TEXTS, EPOCHS, MAX_LENGTH, LR = 61, 2, 64, 1e-3  # of finetune: the last step of an epoch has 5 rows
BF16 = 0.1  # how far rounding in training may take weights from float32's, as a share of what training changed

# What a block needs to run here: local names, the dataloader that the text leaves out, and the warm-up that
# transformers' cosine schedule demands. FOLDER is the test's.
PATCHES = {
    "skeleton": {
        '"Qwen/Qwen3-4B-Base"': '"FOLDER/model"',
        "build_my_dataloader(...)": (
            'torch.utils.data.DataLoader(torch.load("FOLDER/rows.pt"), batch_size=8 // plugin.dp_size)'
        ),
    },
    "finetune": {
        '"yahma/alpaca-cleaned"': '"FOLDER/data"',
        '"cosine", optimizer,': '"cosine", optimizer, num_warmup_steps=0,',
        "# ... tokenize + collator + dataloader ...": """
    def collate(rows):
        texts = [row["output"] for row in rows]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=args.max_length, return_tensors="pt")
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, collate_fn=collate)
""",
    },
}


def block(name: str) -> str:
    return (BLOCKS / f"{name}.py.txt").read_text(encoding="utf-8").replace("colossalai", "shardc")


def script(name: str, place: Place) -> str:
    """A block of the tutorial with its patches."""
    text = block(name)
    for old, new in PATCHES[name].items():
        assert old in text, old
        text = text.replace(old, new.replace("FOLDER", str(place.folder)))
    return text


def with_plugin(text: str, lines: str) -> str:
    """The skeleton with another plugin, as the tutorial says: all other lines stay."""
    text, count = re.subn(r"^plugin = GeminiPlugin\(\n.*?^\)\n", lines, text, flags=re.M | re.S)
    assert count == 1
    return text


def plugin_lines() -> dict[str, str]:
    """The tutorial's plugins, by their comments: one line of the skeleton is exchanged for these."""
    parts = re.split(r"^# ([\w-]+).*\n", block("plugins"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# -- plain transformers ------------------------------------------------------------------------------------------------
def train_plain(model: nn.Module, loader: DataLoader, *, lr: float, epochs: int = 1, cosine: bool = False) -> Weights:
    """One process with the loop of the tutorial, in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    kind, steps = "cosine" if cosine else "constant", len(loader) * epochs
    lr_scheduler = get_scheduler(kind, optimizer, num_warmup_steps=0, num_training_steps=steps)
    for _ in range(epochs):
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


def collate(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    texts = [row["output"] for row in rows]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@dataclass(frozen=True)
class Place:
    """Model, data and what plain transformers makes of them."""

    folder: Path  # model/; data/, for finetune; rows.pt, for the skeleton
    start: Weights
    skeleton: Weights
    finetuned: Weights


@pytest.fixture(scope="module")
def place(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    here = tmp_path_factory.mktemp("tutorial")
    (here / "model").symlink_to(tiny / "model")
    (here / "data").mkdir()
    lines = (tiny / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:TEXTS]
    (here / "data" / "train.jsonl").write_text("".join(lines))
    texts = [json.loads(line) for line in lines]

    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    ids = torch.tensor(tokenizer("\n".join(text["output"] for text in texts))["input_ids"])
    rows = [{"input_ids": row, "labels": row} for row in ids[: ROWS * STEPS * LENGTH].view(-1, LENGTH)]
    torch.save(rows, here / "rows.pt")
    assert len(rows) == ROWS * STEPS

    def model(dtype: torch.dtype) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=dtype).float()

    loader = DataLoader(texts, batch_size=ROWS, collate_fn=partial(collate, tokenizer=tokenizer))
    return Place(
        folder=here,
        start=dict(model(torch.float32).named_parameters()),
        skeleton=train_plain(model(torch.bfloat16), DataLoader(rows, batch_size=ROWS), lr=5e-5),
        finetuned=train_plain(model(torch.float32), loader, lr=LR, epochs=EPOCHS, cosine=True),
    )


@torch.no_grad()
def distance(folder: Path, expected: Weights, start: Weights) -> float:
    """How far the saved weights are from the expected ones in their dtype, as a share of what training changed."""
    saved = AutoModelForCausalLM.from_pretrained(folder)
    off = torch.stack([(saved.get_parameter(name) - w.to(saved.dtype)).float().norm() for name, w in expected.items()])
    moved = torch.stack([(w - start[name]).norm() for name, w in expected.items()])
    return float(off.norm() / moved.norm())


# -- the tutorial ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """plugin: as plugin_lines or --plugin call it. launched: by `shardc run`, others on ranks that run already."""

    plugin: str
    ranks: int
    dp_size: int
    launched: bool = False

    def __str__(self) -> str:
        return f"{self.plugin} on {self.ranks}{' by shardc run' if self.launched else ''}"

    def run(self, workers: Workers, path: Path, arguments: list[str]) -> None:
        if not self.launched:
            workers.run(self.ranks, "tests.end_to_end.scripts:run_script", str(path), arguments)
            return
        done = shardc_run(f"--nproc_per_node={self.ranks}", path.name, *arguments, cwd=path.parent)
        assert done.returncode == 0, done.stderr[-3000:]


SKELETONS = [
    Case("GeminiPlugin", ranks=1, dp_size=1),
    Case("GeminiPlugin", ranks=4, dp_size=4),
    Case("ZeRO-2", ranks=1, dp_size=1),
    Case("ZeRO-2", ranks=4, dp_size=4),
    Case("3D", ranks=4, dp_size=1, launched=True),
    Case("PyTorch", ranks=1, dp_size=1),
    Case("PyTorch", ranks=4, dp_size=4),
]
FINETUNES = [
    Case("gemini", ranks=1, dp_size=1, launched=True),
    Case("gemini", ranks=4, dp_size=4),
    Case("hybrid_parallel", ranks=4, dp_size=2),
    Case("ddp", ranks=1, dp_size=1),
    Case("ddp", ranks=4, dp_size=4),
]


@pytest.mark.parametrize("case", SKELETONS, ids=str)
def test_the_skeleton_trains_under_each_plugin(workers: Workers, place: Place, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "train.py"
    path.write_text(with_plugin(script("skeleton", place), plugin_lines()[case.plugin]), encoding="utf-8")
    case.run(workers, path, [])
    assert distance(tmp_path / "ckpt", place.skeleton, place.start) < BF16


@pytest.mark.parametrize("case", FINETUNES, ids=str)
def test_finetune_trains_with_each_plugin(workers: Workers, place: Place, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "finetune.py"
    path.write_text(script("finetune", place), encoding="utf-8")
    values = {"model_type": place.folder / "model", "plugin": case.plugin, "batch_size": ROWS // case.dp_size}
    values |= {"max_length": MAX_LENGTH, "lr": LR, "epoch": EPOCHS}
    case.run(workers, path, [f"--{name}={value}" for name, value in values.items()])
    assert distance(tmp_path / "out", place.finetuned, place.start) < (1e-4 if case.plugin == "ddp" else BF16)


def test_all_plugin_lines_of_the_tutorial_run_one_after_another(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "plugins.py"
    path.write_text("from shardc.booster.plugin import GeminiPlugin\n" + block("plugins"), encoding="utf-8")
    workers.run(4, "tests.end_to_end.scripts:run_script", str(path), [])
