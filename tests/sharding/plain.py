"""Models that no library knows: a mixer with fused attention, and one operation without a rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, HEADS, INNER = 101, 12, 4, 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, DIM))


class Mixer(nn.Module):
    """A gated MLP between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.gate = nn.Linear(DIM, 2 * INNER)
        self.down = nn.Linear(INNER, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        gate, up = self.gate(self.norm2(x)).split(INNER, dim=-1)
        return x + self.down(F.gelu(gate) * up)


class Plain(nn.Module):
    """Untied head, LayerNorm, learned positions; `blocks` of them."""

    def __init__(self, blocks: int = 3, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Mixer() for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return with_loss(self.head(self.norm(x)), labels, self.label_smoothing)


class Unknown(nn.Module):
    """Sorts the hidden features: no rule knows `sort`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.up = nn.Linear(DIM, INNER)
        self.down = nn.Linear(INNER, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = torch.sort(self.up(self.embed(input_ids)), dim=-1)[0]
        return with_loss(self.down(x), labels)


def with_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> dict[str, Any]:
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=label_smoothing)
    return {"loss": loss, "logits": logits}
