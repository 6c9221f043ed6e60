"""How parameters start: what the model's own initialiser does."""

import pytest
import torch
import transformers

from shardc.capture.init import initial_values
from shardc.capture.model_index import ModelIndex


@pytest.mark.parametrize("spread", [0.02, 0.007])
def test_the_initialiser_of_a_transformers_model_is_read(spread: float) -> None:
    sizes = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2}
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=spread))
    found = initial_values(ModelIndex(model))
    assert found["transformer.wte.weight"] == ("normal", 0.0, spread)
    assert found["transformer.h.1.mlp.c_fc.weight"] == ("normal", 0.0, spread)
    assert found["transformer.h.1.mlp.c_fc.bias"] == ("constant", 0.0, 0.0)
    assert found["transformer.h.1.ln_1.weight"] == ("constant", 1.0, 0.0)


def test_a_module_without_one_starts_as_torch_starts_it() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(16, 4)
    assert initial_values(ModelIndex(model))["weight"] == ("normal", 0.0, 16**-0.5 / 3**0.5)
