"""The emitted text of a tiny model, reviewed as a diff. `make golden` rewrites it."""

import os
from pathlib import Path

from shardc.emit import emit
from tests.emit.tiny import captured

GOLDEN = Path(__file__).with_name("qwen3_tiny.py.txt")


def test_the_model_text_of_tiny_qwen3():
    text = emit([captured("qwen3").variants], title="tiny qwen3")
    if os.environ.get("SHARDC_GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "if the change is meant, run `make golden` and review the diff"
