"""The whole verification grid, run by `make verify-grid`: all families, layouts, paddings, tied and untied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.exact import Layout, compare, prepare, small
from tests.workers import Workers

pytestmark = [pytest.mark.grid, pytest.mark.timeout(900)]

FAMILIES = {
    "Llama": "Llama-3.2-1B",
    "Mistral": "Mistral-7B-v0.1",
    "Qwen2": "Qwen2.5-3B",
    "Qwen3": "Qwen3-4B",
    "Gemma-2": "gemma-2-2b",
    "Gemma-3": "gemma-3-1b",
    "Phi-3": "Phi-3-mini-4k-instruct",
    "OLMo-2": "OLMo-2-1B",
    "GPT-2": "gpt2",
    "GPT-NeoX": "pythia-70m",
    "OPT": "opt-125m",
}
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
    Layout(pp=4),
    Layout(tp=2, dp=2),
    Layout(tp=2, sp=True),
    Layout(tp=2, pp=2, sp=True),
    Layout(tp=4, sp=True),
    Layout(tp=2, dp=2, sp=True),
]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact(family: str, layout: Layout, tied: bool, workers: Workers, tmp_path: Path) -> None:
    """One plan, three batches: without padding, left-padded, right-padded."""
    trial = prepare(small(FAMILIES[family], layout, tie_word_embeddings=tied), tmp_path, layout)
    rows = layout.dp * (2 * trial.microbatches + 1)
    batches = [trial.batch(rows, padding=padding) for padding in ("none", "left", "right")]
    compare(workers, trial, batches).assert_exact()
