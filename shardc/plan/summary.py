"""What `shardc show` prints of a plan, read from plan.json alone: loads neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardc.errors import ShardcError

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


def summarize(folder: str | Path) -> dict[str, Any]:
    """The plan as `shardc show --json` prints it. Raises ShardcError where the folder is no plan."""
    path = Path(folder)
    try:
        data = json.loads((path / "plan.json").read_text())
        schedule = json.loads((path / "schedule.json").read_text())
        certificate = json.loads((path / "certificate.json").read_text())
        return _summary(data, schedule, certificate)
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise _error(f"{folder} is no plan folder: it has no {name}", "make it with `shardc compile`") from None
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{folder}: cannot be read ({type(error).__name__}: {error})"
        raise _error(problem, "compile the plan again") from error


def _error(problem: str, advice: str) -> ShardcError:
    from shardc.errors import ShardcError  # loads torch, which a plan that can be shown does not need

    return ShardcError(problem, advice)


def _summary(data: dict[str, Any], schedule: dict[str, Any], certificate: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": data["model"]["name"],
        "mesh": data["mesh"],
        "dtype": data["dtype"],
        "parameters": data["estimates"]["parameters"],
        "stages": [
            {
                "index": stage["index"],
                "blocks": stage["num_blocks"],
                "first_block": stage["first_block"],
                **estimate,
                "batch": stage["batch"],
                "receives": stage["receives"],
                "sends": stage["sends"],
            }
            for stage, estimate in zip(data["stages"], data["estimates"]["stages"], strict=True)
        ],
        "ties": data["ties"],
        "schedule": {"name": schedule["name"], "microbatches": schedule["microbatches"]},
        "bubble": data["estimates"]["bubble"],
        "layouts": _layouts(data["parameters"]),
        "attention": [call for name, graph in data["graphs"]["variants"].items() for call in _attention(name, graph)],
        "proved": certificate["proved"],
        "opaque": certificate["opaque"],
    }


def _layouts(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameters that are held alike, blocks' numbers replaced by *: what a rank keeps and over what it is summed."""
    rows: dict[tuple, dict[str, Any]] = {}
    for name, entry in parameters.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        key = (pattern, json.dumps([entry["shard"], entry["grad_reduce"]]))
        row = rows.setdefault(key, {"pattern": pattern, "count": 0, "shape": entry["shape"]})
        row |= {"shard": entry["shard"], "grad_reduce": entry["grad_reduce"]}
        row["count"] += 1
    return list(rows.values())


def _attention(variant: str, graph: dict[str, Any]) -> list[dict[str, Any]]:
    """Every call of scaled_dot_product_attention in one variant, repeated blocks' included."""
    calls = []
    for node in graph["nodes"]:
        if node.get("target") != _ATTENTION:
            continue
        path = graph["calls"][node["call"]]["path"]
        kwargs = node.get("kwargs", {})
        causal, grouped = bool(kwargs.get("is_causal")), bool(kwargs.get("enable_gqa"))
        first = next((b for b in graph["blocks"] if path == b or path.startswith(b + ".")), None)
        for instance in graph["blocks"].get(first, [first]):
            module = path if first is None else instance + path[len(first) :]
            calls.append({"variant": variant, "module": module, "is_causal": causal, "enable_gqa": grouped})
    return calls
