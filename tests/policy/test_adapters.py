"""A policy names modules as their author did: peft's renaming, and the roles of what it adds."""

import pytest
from torch import nn

from shardc.policy import (
    find_blocks,
    match,
    module_classes,
    parse_policy,
    paths_without_adapters,
    roles_with_adapters,
)

PARTS = ("lora_dropout", "lora_A", "lora_B")


def decoder(adapted: tuple[str, ...], prefix: str = "base_model.model.") -> dict[str, str]:
    """Modules of two layers; those named in `adapted` hold an adapter called default."""
    modules = {"base_model": "LoraModel", "base_model.model": "Decoder"} if prefix else {}
    plain = {"embed": "Embedding", "layers": "ModuleList"}
    for i in range(2):
        plain |= {f"layers.{i}": "Layer", f"layers.{i}.up": "Linear", f"layers.{i}.down": "Linear"}
        plain |= {f"layers.{i}.side": "Linear"}
    for path, kind in (plain | {"head": "Linear"}).items():
        modules[prefix + path] = kind
        if path.rpartition(".")[2] in adapted:
            modules[f"{prefix}{path}.base_layer"] = kind
            for part in PARTS:
                modules |= {f"{prefix}{path}.{part}": "ModuleDict"}
                modules |= {f"{prefix}{path}.{part}.default": "Dropout" if part == "lora_dropout" else "Linear"}
    return modules


POLICY = parse_policy(
    'rules:\n  "embed": vocab\n  "*.up": column\n  "*.down": row\n  "*.side": replicate\n  "head": vocab\n'
    'pipeline: {blocks: "layers.*"}\n',
    "p.yaml",
)


def test_without_adapters_every_path_is_its_own() -> None:
    modules = decoder(())
    assert paths_without_adapters(modules) == {path: path for path in modules}
    plain = decoder((), prefix="")
    found = match(POLICY, plain)
    assert roles_with_adapters(found, plain) == found


@pytest.mark.parametrize("prefix", ["base_model.model.", ""], ids=["a PeftModel", "adapters put into the model itself"])
def test_the_model_is_seen_as_its_author_wrote_it(prefix: str) -> None:
    modules = decoder(("up", "head"), prefix)
    paths = paths_without_adapters(modules)
    assert list(paths) == list(decoder((), prefix=""))
    assert paths["layers.1.up"] == f"{prefix}layers.1.up.base_layer"
    assert paths["layers.1.down"] == f"{prefix}layers.1.down"
    without = {path: modules[here] for path, here in paths.items()}
    assert [paths[block] for block in find_blocks(POLICY, without)] == [f"{prefix}layers.{i}" for i in range(2)]


def test_adapters_follow_the_module_that_they_adapt() -> None:
    modules = decoder(("up", "down", "side", "head"))
    paths = paths_without_adapters(modules)
    found = roles_with_adapters(match(POLICY, {path: modules[here] for path, here in paths.items()}), modules)
    roles = {path.removeprefix("base_model.model."): rule.role for path, rule in found.items()}
    assert roles == {
        "embed": "vocab",
        **{
            f"layers.{i}.{path}": role
            for i in range(2)
            for path, role in {
                "up.base_layer": "column",
                "up.lora_dropout.default": "inside",
                "up.lora_A.default": "inside",
                "up.lora_B.default": "column",
                "down.base_layer": "row",
                "down.lora_A.default": "row",
                "side.base_layer": "replicate",
                "side.lora_A.default": "replicate",
                "side.lora_B.default": "replicate",
            }.items()
        },
        "head.base_layer": "vocab",
        "head.lora_dropout.default": "inside",
        "head.lora_A.default": "inside",
        "head.lora_B.default": "vocab",
    }
    assert list(found) == [path for path in modules if path in found]
    assert found["base_model.model.layers.0.up.lora_B.default"].place == "p.yaml:3"


def test_a_module_of_the_author_may_be_called_base_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = nn.ModuleDict({"model": nn.ModuleDict({"up": nn.Linear(2, 2)})})

    modules = module_classes(Wrapper())
    assert paths_without_adapters(modules) == {path: path for path in modules}
