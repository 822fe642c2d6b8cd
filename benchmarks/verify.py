"""Programs through the real TPU compiler, beside what is predicted: collectives, peak memory, compute time.

    python benchmarks/verify.py [--large] [--only N ...] [--out FILE.json]

Every row is a whole training step (forward, backward, optimizer) compiled ahead of time; no TPU is needed.
`collectives` compares bytes that a device puts in, by kind and group size; `memory` and `compute` are our
prediction over the compiler's, with the preset as it comes; `calibrated` is `compute` with the profile of
`layoutopt calibrate --target`, from the estimates that ship. Nothing is fitted to these programs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from costmodels.calibration.tpu import calibrate_tpu  # noqa: E402
from costmodels.calibration.tpu_compiled import shipped_probes  # noqa: E402
from costmodels.calibration.tpu_fit import with_numbers  # noqa: E402
from costmodels.hardware import Hardware, load_hardware  # noqa: E402
from costmodels.pricing import price  # noqa: E402
from layoutopt.evaluate import evaluate  # noqa: E402
from layoutopt.loading import load_model  # noqa: E402
from layoutopt.verify import Verified, generation, verify  # noqa: E402
from mesh_tf_core import Layout, Mesh, Options  # noqa: E402
from mesh_tf_core.program import Program  # noqa: E402

MEDIUM = {"layers": 8, "d_model": 1024, "d_kv": 64, "heads": 16, "d_ff": 4096, "vocab": 8192, "length": 512}
LARGE = {
    "layers": 18,
    "d_model": 2048,
    "d_kv": 128,
    "heads": 16,
    "d_ff": 8192,
    "vocab": 32768,
    "length": 1024,
}
EXPERT = "batch:data;heads:model;d_ff:model;vocab:model"
TRANSFORMER = "examples/transformer_lm.py"


@dataclass(frozen=True)
class Pair:
    """A model and a layout on a topology; `stage` is how trained variables are stored (0 to 3)."""

    topology: str
    mesh: str
    layout: str
    hparams: dict[str, Any] = field(default_factory=dict)
    model: str = TRANSFORMER
    stage: int = 0
    large: bool = False


def lm(topology: str, mesh: str, layout: str, batch: int, stage: int = 0, **more: Any) -> Pair:
    hparams = {**MEDIUM, "batch": batch, "dtype": "bfloat16", **more}
    return Pair(topology, mesh, layout, hparams, stage=stage)


def large(topology: str, mesh: str, batch: int) -> Pair:
    hparams = {**LARGE, "batch": batch, "dtype": "bfloat16"}
    return Pair(topology, mesh, EXPERT, hparams, large=True)


PAIRS = (
    lm("v5e:2x4", "data:8", "batch:data", 64),
    lm("v5e:2x4", "data:2;model:4", EXPERT, 64),
    lm("v5e:2x4", "data:2;model:4", EXPERT, 64, dtype="float32"),
    lm("v5e:2x4", "model:8", EXPERT.removeprefix("batch:data;"), 64),
    lm("v5e:2x4", "data:8", "batch:data", 64, stage=3),
    lm("v4:2x2x2", "data:2;model:4", EXPERT, 64),
    lm("v5p:2x2x2", "data:4;model:2", EXPERT, 64),
    lm("v6e:2x4", "data:2;model:4", EXPERT, 64),
    lm("v6e:2x4", "data:8", "batch:data", 64),
    Pair("v3:2x2", "data:8", "batch:data", {"batch": 4096, "hidden": 4096, "layers": 4}, "examples/mlp.py"),
    large("v5e:8x8", "data:16;model:4", 64),
    large("v4:4x4x4", "data:16;model:4", 64),
    large("v5p:4x4x4", "data:16;model:4", 128),
    large("v6e:8x8", "data:16;model:4", 128),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--large", action="store_true", help="also the models of a billion parameters")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the pairs to compile")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "verify.json")
    args = parser.parse_args()
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    usual = [i for i, p in enumerate(PAIRS) if args.large or not p.large]
    numbers = usual if args.only is None else args.only
    rows = []
    head = f"{'':>2} {'topology':<10} {'mesh':<16} {'layout':<46} {'params':>8}"
    print(f"{head}  compile  collectives  memory  compute  calibrated")
    for number in numbers:
        rows.append(row(PAIRS[number]))
        print(f"{number:>2} {line(PAIRS[number], rows[-1])}", flush=True)
    print(summary(rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def row(pair: Pair) -> dict[str, Any]:
    """One pair compiled."""
    model = load_model(pair.model, pair.hparams).model
    hardware = load_hardware(generation(pair.topology).hardware)
    trained = [v.name for v in model.graph.variables.values() if v.trainable and len(v.shape)]
    options = Options(dict.fromkeys(trained, pair.stage)) if pair.stage else Options()
    evaluation = evaluate(model, Mesh(pair.mesh), Layout(pair.layout), hardware, options)
    found = verify(evaluation, pair.topology, hardware)
    return {
        "topology": pair.topology,
        "mesh": pair.mesh,
        "layout": pair.layout,
        "stage": pair.stage,
        "hparams": pair.hparams,
        "parameters": model.parameters,
        "refused": found.refusal and found.refusal.reason,
        "compile_seconds": found.compiled and found.compiled.compile_seconds,
        "moved": moved(found),
        "same_collectives": found.same_collectives,
        "peak_memory_bytes": {
            "compiler": found.compiled and found.compiled.peak_bytes,
            "allocated": found.compiled and found.compiled.allocated_bytes,
            "predicted": evaluation.memory.peak,
        },
        "compute_seconds": {
            "compiler": found.compiled and found.compiled.compute_seconds,
            "predicted": evaluation.cost.compute_seconds,
            "calibrated": calibrated_seconds(evaluation.program, hardware),
        },
    }


def calibrated_seconds(program: Program, hardware: Hardware) -> float | None:
    """Predicted compute by the profile fitted to the compiler's estimates of probes; None if none ship."""
    if shipped_probes(hardware.name) is None:
        return None
    machine = with_numbers(hardware, calibrate_tpu(hardware.name).fit.numbers)
    return price(program, machine).compute_seconds


def moved(found: Verified) -> list[dict[str, Any]]:
    return [
        {
            "family": m.family,
            "group_size": m.group_size,
            "predicted": [m.predicted_count, m.predicted_bytes],
            "compiler": [m.compiler_count, m.compiler_bytes],
        }
        for m in found.moved
    ]


def ratio(row: dict[str, Any], name: str, side: str = "predicted") -> float | None:
    """Predicted over the compiler's; None without one of them."""
    found, compiler = row[name][side], row[name]["compiler"]
    return found / compiler if found is not None and compiler else None


def line(pair: Pair, found: dict[str, Any]) -> str:
    layout = pair.layout + (f" zero{pair.stage}" if pair.stage else "")
    start = f"{pair.topology:<10} {pair.mesh:<16} {layout:<46} {found['parameters'] / 1e6:>7.0f}M"
    if found["refused"]:
        return f"{start}  refused: {found['refused']}"
    memory, compute = ratio(found, "peak_memory_bytes"), ratio(found, "compute_seconds")
    fitted = ratio(found, "compute_seconds", "calibrated")
    last = "" if fitted is None else f"  {fitted:9.2f}x"
    different = [
        f"{m['family']}/{m['group_size']} {m['compiler'][1] / m['predicted'][1]:.3f}x"
        if m["predicted"][1]
        else f"{m['family']}/{m['group_size']} only compiled"
        for m in found["moved"]
        if not m["predicted"][1] or abs(m["compiler"][1] / m["predicted"][1] - 1) > 0.01
    ]
    same = "same" if not different else ", ".join(different)
    return f"{start}  {found['compile_seconds']:6.0f}s  {same:<11}  {memory:5.2f}x  {compute:5.2f}x{last}"


SIDES = (
    ("peak_memory_bytes", "predicted"),
    ("compute_seconds", "predicted"),
    ("compute_seconds", "calibrated"),
)


def summary(rows: list[dict[str, Any]]) -> str:
    compiled = [r for r in rows if not r["refused"]]
    same = sum(r["same_collectives"] for r in compiled)
    parts = [f"{len(compiled)} of {len(rows)} compiled, {same} with the predicted collectives"]
    sides = (
        ("peak_memory_bytes", "predicted"),
        ("compute_seconds", "predicted"),
        ("compute_seconds", "calibrated"),
    )
    for name, side in sides:
        errors = [abs(math.log(found)) for r in compiled if (found := ratio(r, name, side))]
        if errors:
            typical = 100 * (math.exp(statistics.median(errors)) - 1)
            parts.append(f"median error of {name} {side} {typical:.0f} %")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
