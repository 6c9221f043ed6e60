"""An edited file is proved again or refused, by the line of the first operation that differs."""

import pytest

from shardc.emit import emit
from shardc.emit.compare import compare
from shardc.errors import ShardcError
from tests.emit.tiny import FAMILIES, captured, load

EDITS = {
    "a term doubled": ("residual + hidden_states\n", "residual + hidden_states + hidden_states\n", "model.layers.0"),
    "another weight": ("self.act_fn(self.gate_proj(x))", "self.act_fn(self.up_proj(x))", "model.layers.0.mlp"),
    "another epsilon": ("variance + 1e-06", "variance + 1e-05", "model.layers.0.input_layernorm"),
    "a gradient cut": ("query_states * cos", "query_states.detach() * cos", "model.layers.0.self_attn"),
    "another mask": ("(kv_indices <= q_indices)", "(kv_indices < q_indices)", "model"),
}


def prove(text, name, tmp_path):
    module = load(text, tmp_path)
    compare(module.STAGES[0], captured(name).variants, window=FAMILIES[name].window)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_emitted_is_proved(name, tmp_path):
    prove(emit([captured(name).variants], window=FAMILIES[name].window), name, tmp_path)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_changes_the_computation_is_refused_by_its_line(edit, tmp_path):
    old, new, module = EDITS[edit]
    text = emit([captured("qwen3").variants])
    assert old in text
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(ShardcError) as error:
        prove(text.replace(old, new, 1), "qwen3", tmp_path)
    assert str(error.value).startswith(f"{module} (model.py:{line}): ")


OLD = "        return residual + hidden_states\n"
TOTAL = "        total = residual + hidden_states\n"
UNSEEN = {
    "a sum in place": (OLD, f"{TOTAL}        total.add_(hidden_states)\n        return total\n", "add_ changes"),
    "an item written": (OLD, f"{TOTAL}        total[:, 0] = 0\n        return total\n", "__setitem__ changes"),
    "a result written out": (
        OLD,
        f"{TOTAL}        torch.mul(total, 2, out=total.data)\n        return total\n",
        "mul changes",
    ),
    "data exchanged": (OLD, f"{TOTAL}        total.data = 2 * total\n        return total\n", "__set__ changes"),
    "a gradient hooked": (
        OLD,
        f"{TOTAL}        total.register_hook(lambda g: 2 * g)\n        return total\n",
        "register_hook changes",
    ),
    "autocast": (
        OLD,
        "        with torch.autocast('cuda', torch.bfloat16):\n            return residual + hidden_states\n",
        "runs under autocast",
    ),
    "a backward of its own": (
        OLD,
        "        return Twice.apply(residual + hidden_states)\n",
        "calls the autograd function Twice",
    ),
    "a hook on a module": (
        "        self.mlp = Qwen3MLP()\n",
        "        self.mlp = Qwen3MLP()\n        self.mlp.register_full_backward_hook(print)\n",
        "model.layers.0.mlp has a backward hook",
    ),
    "a hook on a parameter": (
        "        self.mlp = Qwen3MLP()\n",
        "        self.mlp = Qwen3MLP()\n        self.mlp.up_proj.weight.register_hook(print)\n",
        "model.layers.0.mlp.up_proj.weight has a backward hook",
    ),
}
TWICE = """class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Qwen3DecoderLayer("""


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # it is refused all the same
@pytest.mark.parametrize("edit", UNSEEN)
def test_an_edit_that_operations_do_not_show_is_refused(edit, tmp_path):
    old, new, message = UNSEEN[edit]
    text = emit([captured("qwen3").variants])
    assert old in text
    with pytest.raises(ShardcError) as error:
        prove(text.replace(old, new).replace("class Qwen3DecoderLayer(", TWICE), "qwen3", tmp_path)
    assert message in error.value.problem
    assert error.value.problem.endswith(", which a comparison of operations does not see")
    assert "model.py" in error.value.problem


def test_every_layer_runs(tmp_path):
    """Operations are not computed twice, but no line is left out: here one of the equal layers computes otherwise."""
    text = emit([captured("qwen3").variants])
    assert OLD in text
    counted = "        CALLS.append(0)\n        return residual + (2 if len(CALLS) % 3 == 2 else 1) * hidden_states\n"
    text = text.replace(OLD, counted).replace("class Qwen3DecoderLayer(", "CALLS = []\n\n\nclass Qwen3DecoderLayer(")
    with pytest.raises(ShardcError, match=r"model.layers.1 \(model.py:\d+\): mul is not what the plan computes"):
        prove(text, "qwen3", tmp_path)


def test_an_edit_that_changes_nothing_is_proved(tmp_path):
    text = emit([captured("qwen3").variants])
    new = text.replace(
        "        cos = cos.unsqueeze(1)\n        sin = sin.unsqueeze(1)\n",
        "        sin = torch.unsqueeze(sin, 1).view(sin.shape[0], 1, sin.shape[1], -1)\n"
        "        cos = cos.unsqueeze(dim=1) * 1.0\n",
    )
    assert new != text
    prove(new, "qwen3", tmp_path)


def test_another_dropout_is_refused(tmp_path):
    text = emit([captured("gpt_neox").variants])
    assert "nn.Dropout(0.1)" in text
    with pytest.raises(ShardcError, match="dropout is not what the plan computes"):
        prove(text.replace("nn.Dropout(0.1)", "nn.Dropout(0.2)", 1), "gpt_neox", tmp_path)


def test_a_file_that_fails_is_refused(tmp_path):
    text = emit([captured("qwen3").variants]).replace("self.k_proj(hidden_states)", "self.k_proj(hidden_states.t())")
    with pytest.raises(ShardcError, match="fails on a plain batch"):
        prove(text, "qwen3", tmp_path)
