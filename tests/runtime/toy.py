"""A small language model as a plan folder written by hand, and the same model for one process.

It has what makes layouts hard: a tied embedding of odd size, a fused weight of two segments, a gain inside the sharded
region (gradient partial over tp), a scale that is sharded over kv and shared by replicas, row biases, a mask, and two
tensors that cross between stages, one of which a stage may only pass on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.runtime import MeshAxis
from shardc.runtime.plan import Plan
from shardc.runtime.weights import SeedWeights

VOCAB, DIM, INNER, KV, BLOCKS = 101, 6, 12, 2, 4

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn

from shardc import runtime

VOCAB, DIM, INNER, KV = 101, 6, 12, 2
SEQUENCE_PARALLEL = {sequence_parallel}


class Block(nn.Module):
    def __init__(self, tp):
        super().__init__()
        kv = tp.sub("kv") if tp.sub_axes else tp
        self.tp = tp
        self.norm = nn.Parameter(torch.empty(DIM))
        self.gate_up = nn.Linear(DIM, 2 * INNER // tp.size, bias=False)
        self.gain = nn.Parameter(torch.empty(3))
        self.kv = nn.Parameter(torch.empty(KV // kv.size))
        self.down = runtime.RowLinear(INNER // tp.size, DIM, tp, scatter_dim=1 if SEQUENCE_PARALLEL else None)

    def forward(self, hidden_states, attention_mask):
        x = hidden_states * self.norm
        x = runtime.all_gather(x, self.tp, 1) if SEQUENCE_PARALLEL else runtime.copy_to(x, self.tp)
        gate, up = self.gate_up(x).chunk(2, -1)
        x = torch.tanh(gate) * up
        x = (x.unflatten(-1, (-1, 3)) * self.gain).flatten(-2)
        x = (x.unflatten(-1, (self.kv.shape[0], -1)) * self.kv.unsqueeze(-1)).flatten(-2)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        return hidden_states + self.down(x.cumsum(1) / 4)


class Stage(nn.Module):
    def __init__(self, tp, first, last, blocks):
        super().__init__()
        self.tp = tp
        if first:
            self.embed = runtime.VocabEmbedding(VOCAB, DIM, tp)
        self.blocks = nn.ModuleDict({{str(i): Block(tp) for i in blocks}})
        if last:
            self.head = nn.Linear(DIM, (lambda ab: ab[1] - ab[0])(tp.bounds(VOCAB)), bias=False)
            if first:
                self.head.weight = self.embed.weight

    def begin(self, input_ids):
        x = self.embed(input_ids)
        x = runtime.reduce_scatter(x, self.tp, 1) if SEQUENCE_PARALLEL else runtime.all_reduce(x, self.tp)
        return x, x.tanh()

    def middle(self, hidden_states, memory, attention_mask):
        for name, block in self.blocks.items():
            hidden_states = block(hidden_states, attention_mask)
            if int(name) % 2 == 0:
                memory = memory + hidden_states.sin()
        return hidden_states, memory

    def end(self, hidden_states, memory, labels, num_targets):
        x = hidden_states * memory
        x = runtime.all_gather(x, self.tp, 1) if SEQUENCE_PARALLEL else runtime.copy_to(x, self.tp)
        logits = self.head(x)
        if labels is None:
            return None, logits
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        loss = runtime.vocab_cross_entropy(logits.flatten(0, 1), targets, self.tp, VOCAB)
        return loss / num_targets, logits


class First(Stage):
    def forward(self, input_ids=None, attention_mask=None):
        return self.middle(*self.begin(input_ids), attention_mask)


class Middle(Stage):
    def forward(self, hidden_states, memory, attention_mask=None):
        return self.middle(hidden_states, memory, attention_mask)


class Last(Stage):
    def forward(self, hidden_states, memory, attention_mask=None, labels=None, num_targets=None):
        return self.end(*self.middle(hidden_states, memory, attention_mask), labels, num_targets)


class Only(Stage):
    def forward(self, input_ids=None, attention_mask=None, labels=None, num_targets=None):
        return self.end(*self.middle(*self.begin(input_ids), attention_mask), labels, num_targets)


def count_targets(labels):
    return (labels[:, 1:] != -100).sum()


STAGES = {stages}
"""


class Dense(nn.Module):
    """The same model, for one process."""

    def __init__(self, values: dict[str, Tensor]):
        super().__init__()
        self.values = {name: nn.Parameter(value) for name, value in values.items()}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        values = self.values
        x = F.embedding(input_ids, values["embed.weight"])
        memory = x.tanh()
        for i in range(BLOCKS):
            block = {name: values[f"blocks.{i}.{name}"] for name in PARAMETERS}
            gate, up = F.linear(x * block["norm"], block["gate_up.weight"]).chunk(2, -1)
            y = (torch.tanh(gate) * up).unflatten(-1, (KV, 2, 3)) * block["gain"] * block["kv"][:, None, None]
            y = y.flatten(-3)
            if attention_mask is not None:
                y = y * attention_mask.unsqueeze(-1)
            x = x + F.linear(y.cumsum(1) / 4, block["down.weight"], block["down.bias"])
            memory = memory + x.sin() if i % 2 == 0 else memory
        return F.linear(x * memory, values["embed.weight"])

    def loss(self, labels: Tensor, num_targets: int | None = None, **inputs: Tensor) -> Tensor:
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        total = F.cross_entropy(self(**inputs).flatten(0, 1), targets, reduction="sum")
        return total / (num_targets or (targets != -100).sum())


# name in a block: (shape, sharded dim, sizes of its segments or None, grad_reduce, grad_reduce if sequence parallel)
PARAMETERS: dict[str, tuple[list[int], int, list[list[int]] | None, list[str], list[str]]] = {
    "norm": ([DIM], 0, None, [], ["tp"]),
    "gate_up.weight": ([2 * INNER, DIM], 0, [[INNER], [INNER]], [], []),
    "gain": ([3], 0, None, ["tp"], ["tp"]),
    "kv": ([KV], 0, [[KV]], [], []),
    "down.weight": ([DIM, INNER], 1, [[INNER]], [], []),
    "down.bias": ([DIM], 0, None, [], ["tp"]),
}


def one_f_one_b(pp: int, microbatches: int) -> list[list[str]]:
    """1F1B: each coord first runs ahead by the stages behind it, then alternates."""
    ranks = []
    for stage in range(pp):
        ahead = min(pp - stage - 1, microbatches)
        order = [("F", i) for i in range(ahead)]
        for i in range(microbatches):
            if i + ahead < microbatches:
                order.append(("F", i + ahead))
            order.append(("B", i))
        ranks.append([text for kind, i in order for text in _with_transfers(stage, kind, i, pp)])
    return ranks


def gpipe(pp: int, microbatches: int) -> list[list[str]]:
    """All forwards, then all backwards."""
    order = [(kind, i) for kind in "FB" for i in range(microbatches)]
    return [[text for kind, i in order for text in _with_transfers(stage, kind, i, pp)] for stage in range(pp)]


def interleaved(pp: int, microbatches: int, chunks: int) -> list[list[str]]:
    """GPipe over pp * chunks stages, stage k on coord k % pp, stage after stage."""
    num_stages = pp * chunks
    ranks: list[list[str]] = [[] for _ in range(pp)]
    for kind, stages in (("F", range(num_stages)), ("B", reversed(range(num_stages)))):
        for stage in stages:
            for i in range(microbatches):
                ranks[stage % pp] += _with_transfers(stage, kind, i, num_stages)
    return ranks


def _with_transfers(stage: int, kind: str, microbatch: int, stages: int) -> list[str]:
    texts = [f"{stage}{kind}{microbatch}"]
    receives, sends = (stage > 0, stage < stages - 1) if kind == "F" else (stage < stages - 1, stage > 0)
    if receives:
        texts.insert(0, f"{stage}RECV_{kind}{microbatch}")
    if sends:
        texts.append(f"{stage}SEND_{kind}{microbatch}")
    return texts


def write_plan(
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    stages: int | None = None,
    microbatches: int = 4,
    ranks: list[list[str]] | None = None,
    sub_axes: dict[str, int] | None = None,
    sequence_parallel: bool = False,
    frozen: Iterable[str] = (),
) -> Path:
    """Write the plan folder; stages: None is pp. frozen: prefixes of canonical names."""
    stages = stages or pp
    per_stage = [list(map(int, part)) for part in torch.arange(BLOCKS).tensor_split(stages)]
    stage_of = {block: index for index, blocks in enumerate(per_stage) for block in blocks}
    kv_axis = "tp.kv" if sub_axes else "tp"

    def parameter(shape: list[int], holders: list[int], dim: int, segments: Any, reduce: list[str], axis: str = "tp"):
        shard = {"dim": dim, "segments": [{"sizes": sizes, "splits": [[0, axis]]} for sizes in segments or []]}
        return {
            "shape": shape,
            "stages": holders,
            "aliases": [],
            "requires_grad": True,
            "shard": shard if segments else None,
            "grad_reduce": reduce,
            "init": {"kind": "normal", "mean": 0.1, "std": 0.7},
        }

    parameters = {"embed.weight": parameter([VOCAB, DIM], sorted({0, stages - 1}), 0, [[VOCAB]], [])}
    parameters["embed.weight"]["aliases"] = ["head.weight"]
    for block in range(BLOCKS):
        for name, (shape, dim, segments, reduce, reduce_sp) in PARAMETERS.items():
            reduce = reduce_sp if sequence_parallel else reduce
            if name == "kv" and sub_axes:
                reduce = ["tp.replica"]
            axis = kv_axis if name == "kv" else "tp"
            parameters[f"blocks.{block}.{name}"] = parameter(shape, [stage_of[block]], dim, segments, reduce, axis)
    for name, entry in parameters.items():
        entry["requires_grad"] = not name.startswith(tuple(frozen))
    length = "S/tp" if sequence_parallel else "S"
    crossing = [{"name": name, "shape": ["B", length, DIM], "dtype": "float32"} for name in ("hidden_states", "memory")]
    entries = []
    classes = ["Only"] if stages == 1 else ["First", *["Middle"] * (stages - 2), "Last"]
    for index in range(stages):
        first, last = index == 0, index == stages - 1
        logits = {"shape": ["B", "S", VOCAB], "dtype": "float32", "shard": {"dim": 2, "axis": "tp"} if tp > 1 else None}
        entries.append(
            {
                "index": index,
                "class": f"Stage{index}",
                "batch": ["input_ids"] * first + ["attention_mask"] + ["labels"] * last,
                "receives": [] if first else crossing,
                "sends": [] if last else crossing,
                "logits": logits if last else None,
            }
        )
    source = SOURCE.format(
        sequence_parallel=sequence_parallel,
        stages="("
        + "".join(
            f"lambda tp: {kind}(tp, {index == 0}, {index == stages - 1}, {per_stage[index]}), "
            for index, kind in enumerate(classes)
        )
        + ")",
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(source)
    data = {
        "format": 1,
        "model": {"name": "toy", "class": "Toy", "config_sha256": ""},
        "mesh": {"tp": tp, "pp": pp, "sub_axes": sub_axes, "sequence_parallel": sequence_parallel},
        "pad_sequence": sequence_parallel,
        "dtype": "float32",
        "policy": {},
        "parameters": parameters,
        "buffers": {},
        "ties": [{"parameter": "embed.weight", "stages": [0, stages - 1]}] if stages > 1 else [],
        "stages": entries,
        "guards": [{"input": "attention_mask", "drop_when": "all"}],
        "graphs": {},
        "estimates": {},
        "versions": {},
        "sha256": {"model.py": hashlib.sha256(source.encode()).hexdigest()},
    }
    schedule = {
        "name": "1f1b",
        "stages": stages,
        "microbatches": microbatches,
        "ranks": ranks or one_f_one_b(pp, microbatches),
    }
    for name, content in (("plan.json", data), ("schedule.json", schedule), ("config.json", {"model_type": "toy"})):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return folder


def dense_model(plan: Plan, *, seed: int, device: torch.device | str = "cpu") -> Dense:
    """The dense model, on the CPU, with the values that plan.build(seed=seed, dtype=float64) gives on `device`."""
    weights, tp = SeedWeights(seed), MeshAxis.abstract("tp", plan.spec.tp, sub_axes=plan.spec.sub_axes)
    values = {}
    for name, spec in plan.spec.parameters.items():
        device = torch.device(device)
        shards = [weights.shard(spec, tp.at(coord), torch.float64, device).cpu() for coord in range(tp.size)]
        if spec.shard is None:
            values[name] = shards[0]
            continue
        values[name] = torch.empty(spec.shape, dtype=torch.float64)
        for coord, shard in enumerate(shards):
            index = spec.shard.indices(tp.at(coord))
            values[name].index_copy_(spec.shard.dim, index, shard)
    return Dense(values)


def batch_of(rows: int, length: int, *, seed: int, padding: str = "none") -> dict[str, Tensor]:
    """Ids, labels with ragged ignored parts, and a mask of left- or right-padded rows of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : (2 * row) % length] = -100
    batch = {"input_ids": ids, "labels": labels}
    if padding != "none":
        positions, missing = torch.arange(length), torch.arange(rows).unsqueeze(1) % (length - 2)
        visible = positions >= missing if padding == "left" else positions < length - missing
        batch["attention_mask"] = visible.long()
        labels.masked_fill_(~visible, -100)
    return batch
