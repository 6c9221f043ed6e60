"""How long does a compile take, beside what nobody can avoid: importing torch and the model's class?

    python benchmarks/compile_time.py [--runs 3] [--json FILE]

Three tables. Every figure of the first comes from a process of its own, imports and compiles in turn, so that a busy
machine slows both; seconds are wall time, cpu is user + system time, and ratio compares with the bare import.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

CASES = (
    ("Qwen3-4B", 2, 2, 2.5),
    ("Qwen3-32B", 8, 4, 6.0),
    ("Llama-3.1-405B", 8, 4, 6.0),
)  # model, tp, pp, ratio allowed
LAYERS = (12, 36, 72)

IMPORT = """
import torch
from transformers.models.{module} import {name}
"""

TRACE = """
import json, time
import torch
from shardc.capture.model_index import ModelIndex
from shardc.capture.patches import default_dtype
from shardc.capture.trace import record
from shardc.models import resolve

torch.set_num_threads(1)
model = "{model}"
with default_dtype(torch.bfloat16), torch.device("meta"):
    built = resolve(model).make()
ids = torch.zeros(2, 15, dtype=torch.int64, device="meta")
batch = {{"input_ids": ids, "labels": ids.clone()}}

def timed(function):
    start = time.process_time()
    function()
    return time.process_time() - start

index = ModelIndex(built)
index.train(True)
found = {{"trace": timed(lambda: record(index, batch, memo={{}}))}}
found["export"] = timed(lambda: torch.export.export(built, (), batch, strict=False))
print(json.dumps(found))
"""

CAPTURE = """
import json, time
import torch
from shardc.capture import capture
from shardc.models import resolve

torch.set_num_threads(1)
source = resolve("Qwen3-4B", {{"num_hidden_layers": {layers}}})
with torch.device("meta"):
    source.make()
start = time.process_time()
captured = capture(source.make)
seconds = time.process_time() - start
print(json.dumps({{"capture": seconds, "nodes": len(captured.plain.graph.nodes)}}))
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process took. memory_gib: its largest resident set."""

    seconds: float
    cpu: float
    memory_gib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="processes per figure; the median is printed")
    parser.add_argument("--json", help="also write the raw figures to this file")
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, Python {platform.python_version()}")
    raw = {"compile": compile_table(options.runs), "trace": trace_table(), "layers": layers_table()}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(raw, file, indent=2)


def compile_table(runs: int) -> list[dict[str, Any]]:
    print(f"\nshardc compile, median of {runs}")
    print("model            tp pp  import s compile s  ratio cpu ratio allowed   GiB")
    rows = []
    for model, tp, pp, allowed in CASES:
        imports, compiles = [], []
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "shardc.cli.main", "compile", "--model", model]
            command += ["--tp", str(tp), "--pp", str(pp), "-o", f"{folder}/plan"]
            bare = [sys.executable, "-c", _import_of(model)]
            run(bare)  # file caches are warm from here on
            run(command)
            for _ in range(runs):
                imports.append(run(bare))
                compiles.append(run(command))
        row = {
            "model": model,
            "import": _median(imports, "seconds"),
            "compile": _median(compiles, "seconds"),
            "cpu_ratio": _median(compiles, "cpu") / _median(imports, "cpu"),
            "memory_gib": max(cost.memory_gib for cost in compiles),
        }
        row["ratio"] = row["compile"] / row["import"]
        print(
            f"{model:16} {tp:2} {pp:2} {row['import']:9.2f} {row['compile']:9.2f} {row['ratio']:6.2f} "
            f"{row['cpu_ratio']:9.2f} {allowed:7} {row['memory_gib']:5.2f}"
        )
        rows.append(row)
    return rows


def trace_table() -> list[dict[str, Any]]:
    print("\none trace of the whole model, cpu s, beside torch.export.export(strict=False)")
    print("model             trace  export  times")
    rows = []
    for model, *_ in CASES:
        found = output_of(TRACE.format(model=model))
        print(f"{model:16} {found['trace']:6.2f} {found['export']:7.2f} {found['export'] / found['trace']:6.1f}")
        rows.append({"model": model, **found})
    return rows


def layers_table() -> list[dict[str, Any]]:
    print("\ncapture of all variants of Qwen3-4B against its number of layers, cpu s")
    print("layers  capture  nodes")
    rows = []
    for layers in LAYERS:
        found = output_of(CAPTURE.format(layers=layers))
        print(f"{layers:6} {found['capture']:8.2f} {found['nodes']:6}")
        rows.append({"layers": layers, **found})
    return rows


def run(command: list[str]) -> Cost:
    """Run a process to its end. Raises CalledProcessError with its error output if it fails."""
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            sys.stderr.write(errors.read().decode())
            raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def output_of(program: str) -> dict[str, Any]:
    """What a program prints as JSON on its last line."""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _import_of(model: str) -> str:
    from shardc.models import resolve

    source = resolve(model)
    return IMPORT.format(module=source.config.model_type, name=source.class_name)


def _median(costs: list[Cost], what: str) -> float:
    return statistics.median(getattr(cost, what) for cost in costs)


if __name__ == "__main__":
    main()
