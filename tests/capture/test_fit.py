"""A literal has exactly one explanation, or none is given (pitfalls 1, 3 and 5)."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardc.capture import Variant
from shardc.capture.fit import FitError, Probe, fit_literal
from shardc.capture.symbols import DEVICE, DTYPE_MIN, MODEL_DTYPE, TRAINING, B, S, Size, WhileTraining
from shardc.capture.variants import PROBES, SMALLEST_WINDOW, probes_for

LITERALS = {
    "batch": (lambda p: p.batch, B),
    "sequence": (lambda p: p.seq, S),
    "tokens": (lambda p: p.batch * p.seq, Size(1, 1, 1)),
    "heads times batch": (lambda p: 12 * p.batch, Size(12, 1, 0)),
    "shifted sequence": (lambda p: p.seq - 1, Size(1, 0, 1, -1)),
    "tokens of shifted labels": (lambda p: p.batch * (p.seq - 1), Size(1, 1, 1, Size(-1, 1, 0))),
    "constant": (lambda p: 64, 64),
    "dtype of the model": (lambda p: p.dtype, MODEL_DTYPE),
    "fixed dtype": (lambda p: torch.float32, torch.float32),
    "least number of the dtype": (lambda p: torch.finfo(p.dtype).min, DTYPE_MIN),
    "training flag": (lambda p: p.training, TRAINING),
    "dropout": (lambda p: 0.1 if p.training else 0.0, WhileTraining(0.1)),
    "device": (lambda p: torch.device("meta"), DEVICE),
}


@pytest.mark.parametrize("name", LITERALS)
def test_a_literal_is_explained_over_the_probes(name: str) -> None:
    value, expected = LITERALS[name]
    assert fit_literal([value(p) for p in PROBES], PROBES) == expected


def test_pitfall_1_a_literal_with_two_explanations_is_refused() -> None:
    """(2, 16) (3, 24) (5, 40): S is 8 B, so 16, 24, 40 may be either."""
    probes = [Probe(2, 16, torch.float32), Probe(3, 24, torch.float32), Probe(5, 40, torch.float32)]
    with pytest.raises(FitError, match=r"\[16, 24, 40\] has more than one explanation: 8\*B, S"):
        fit_literal([16, 24, 40], probes)


def test_sizes_print_as_they_are_computed() -> None:
    sizes = [B, S, Size(12, 1, 0), Size(1, 0, 1, -1), Size(2, 1, 1, 3), Size(1, 1, 1, Size(-1, 1, 0))]
    assert [str(size) for size in sizes] == ["B", "S", "12*B", "S-1", "2*B*S+3", "B*S-B"]


@pytest.mark.parametrize("values", [[1, 2, 4, 9], [0.5, 0.25, 0.5, 0.5], ["a", "b", "a", "b"]])
def test_a_literal_without_an_explanation_is_refused(values: list) -> None:
    with pytest.raises(FitError, match="does not follow batch size, sequence length, dtype or training mode"):
        fit_literal(values, PROBES)


@pytest.mark.parametrize("long", [False, True])
def test_pitfall_1_sizes_have_one_explanation_at_every_window(long: bool) -> None:
    for window in (*range(SMALLEST_WINDOW, 60), 512, 4096, 131072):
        probes = probes_for(Variant(long=long), window)
        assert all((p.seq >= window) == long and p.seq > 0 for p in probes), window
        for batch, seq in ((1, 0), (0, 1), (1, 1)):
            for coefficient, offset in itertools.product((1, 7), (0, -1, 3)):
                size = Size(coefficient, batch, seq, offset)
                assert fit_literal([size.at(p.batch, p.seq) for p in probes], probes) == size, window
