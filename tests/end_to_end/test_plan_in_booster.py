"""A compiled plan, and a user's policy file, in a script that `shardc run` starts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from shardc.plan import compile_plan, write_plan
from tests.booster.small import make_loader, make_model, relative
from tests.end_to_end.scripts import shardc_run

STEPS, LR = 4, 0.5

# The plan splits each layer's MLP and attention over two stages; the policy splits the MLP alone.
SCRIPT = f"""
import json
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import shardc
from shardc.booster import Booster
from shardc.booster.plugin import HybridParallelPlugin

shardc.launch_from_torch()
for name, plugin in {{
    "plan": HybridParallelPlugin(plan=shardc.load_plan("plan"), precision="fp32"),
    "policy": HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="fp32", policy="my.yaml"),
}}.items():
    model = AutoModelForCausalLM.from_pretrained("model")
    optimizer = torch.optim.SGD(model.parameters(), lr={LR})
    loader = DataLoader(torch.load("rows.pt"), batch_size=8 // plugin.dp_size)
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    booster.save_model(model, name, shard=True)
    if model.module.mesh.rank == 0:
        split = sorted({{n.split(".")[-2] for n, s in model.module.spec.parameters.items() if s.shard is not None}})
        open(f"{{name}}.json", "w").write(json.dumps({{"losses": losses, "split": split, "sizes": [
            plugin.tp_size, plugin.pp_size, plugin.dp_size]}}))
"""

POLICY = """
models: [qwen3]
rules:
  "*.mlp.{gate,up}_proj": column
  "*.mlp.down_proj": row
pipeline: {blocks: "model.layers.*", cuts: auto}
"""

SPLIT = {
    "plan": ["down_proj", "embed_tokens", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    "policy": ["down_proj", "gate_proj", "up_proj"],
}
SIZES = {"plan": [2, 2, 1], "policy": [2, 1, 2]}


def test_a_compiled_plan_and_a_policy_train_as_one_process_does(tmp_path: Path) -> None:
    """Losses of each step, and every parameter after the last; SGD, so that these are the gradients."""
    make_model().save_pretrained(tmp_path / "model")
    torch.save(make_loader(STEPS).dataset, tmp_path / "rows.pt")
    (tmp_path / "my.yaml").write_text(POLICY)
    (tmp_path / "train.py").write_text(SCRIPT)
    write_plan(compile_plan(str(tmp_path / "model"), tp=2, pp=2, microbatches=2, dtype="float32"), tmp_path / "plan")
    done = shardc_run("--nproc_per_node", "4", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]

    reference = make_model()
    sgd = torch.optim.SGD(reference.parameters(), lr=LR)
    expected = []
    for batch in make_loader(STEPS):
        loss = reference(**batch).loss
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        expected.append(loss.item())
    for name in ("plan", "policy"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert (found["split"], found["sizes"]) == (SPLIT[name], SIZES[name])
        assert relative(found["losses"], expected) < 2e-5
        trained = dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters())
        for key, parameter in reference.named_parameters():
            torch.testing.assert_close(trained[key], parameter, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
