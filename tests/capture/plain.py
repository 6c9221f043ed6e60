"""Small models that are not from Hugging Face, each with one habit that capture has to get right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH = 11, 8


class Tiny(nn.Module):
    """Embedding, `body`, head, and the mean cross entropy of the shifted labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def body(self, hidden: Tensor) -> Tensor:
        return self.proj(hidden)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.body(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": next_token_loss(logits, labels), "logits": logits}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), labels[:, 1:].reshape(-1))


def with_body(body: Callable[[Tiny, Tensor], Tensor], setup: Callable[[Tiny], None] | None = None) -> type[Tiny]:
    """A Tiny whose body is `body`; `setup` runs at the end of its constructor."""

    class WithBody(Tiny):
        def __init__(self) -> None:
            super().__init__()
            if setup:
                setup(self)

        def body(self, hidden: Tensor) -> Tensor:
            return body(self, hidden)

    return WithBody


def tiny_batch(rows: int = 3, length: int = 17) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    labels = ids.clone()
    labels[:, ::4] = -100
    return {"input_ids": ids, "labels": labels}
