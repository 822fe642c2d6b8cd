"""A 70 B model over four slices of 128 TPU v5e, with slow to fast links between them: which plan is fastest.

    python benchmarks/diloco_links.py [--out benchmarks/results/diloco_links.json]

Four slices learn from 4 x 128 sequences of 4,096 tokens in a step. For each bandwidth between a slice and the
others, the synchronous plan is searched on all 512 chips, as slices of 8 x 16; the replicas' is searched on
one such slice (nothing else crosses the axis), put on all four, and priced with its meeting every 30, 100 and
300 steps. `share` is how much of the fastest links' synchronous speed is left.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from costmodels.hardware.links import Torus
from costmodels.hardware.numbers import Number
from examples.transformer_lm import llama3_8b
from layoutopt import search
from layoutopt.evaluator import evaluate

ROOT = Path(__file__).resolve().parent.parent
SLICES, SLICE, CHIPS = 4, (8, 16), 128
GIGABITS = (1, 10, 100, 1000)
PERIODS = (30, 100, 300)
BATCH, LENGTH = 128, 4096
build = partial(llama3_8b, layers=80, d_model=8192, heads=64, kv_heads=8, d_kv=128, d_ff=28672, length=LENGTH)


def machine(gigabits: float) -> Hardware:
    """Slices of 8 x 16 chips, each with a link of so many Gbit/s, which its chips share."""
    found = load_hardware("tpu-v5e")
    topology = found.topology
    assert isinstance(topology, Torus)
    source = "benchmarks/diloco_links.py"
    axes = tuple(replace(a, value=n, source=source) for a, n in zip(topology.axes, SLICE, strict=True))
    link: Number = replace(topology.network_bandwidth, value=gigabits * 1e9 / 8 / CHIPS, source=source)
    return replace(found, topology=replace(topology, axes=axes, network_bandwidth=link))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "diloco_links.json")
    args = parser.parse_args()
    began = time.process_time()
    own, whole = build(batch=BATCH), build(batch=SLICES * BATCH)
    print(f"{own.parameters:,} parameters")
    # What replicas began from and the outer momentum lie beside the variables: room for them.
    inside = f"data:{SLICE[0]};model:{SLICE[1]}"
    alone = search(
        own, mesh=inside, hardware=machine(1000), alternatives=False, memory=MEMORY, time_limit=LIMIT
    )
    print(f"one slice: {alone.layout}; {alone.solver.status}", flush=True)
    mesh = mtf.Mesh({"sites": SLICES, **alone.mesh.as_dict()})
    rows: list[dict[str, Any]] = []
    for gigabits in GIGABITS:
        hardware = machine(gigabits)
        plan = search(whole, mesh=str(mesh), hardware=hardware, alternatives=False, time_limit=LIMIT)
        rows.append(_row(gigabits, "synchronous", plan, plan.predicted, str(plan.mesh)))
        print(gigabits, plan.layout, plan.solver.status, plan.predicted.step_seconds, flush=True)
        for period in PERIODS:
            options = replace(alone.options, diloco=mtf.DiLoCo("sites", period))
            found = evaluate(own, mesh, alone.layout, hardware, options)
            rows.append(_row(gigabits, f"replicas, period {period}", alone, found.predicted, str(mesh)))
    best = max(r["tokens_per_second"] for r in rows if r["plan"] == "synchronous")
    for row in rows:
        row["share"] = row["tokens_per_second"] / best
        print(
            f"{row['gigabits']:>5} Gbit/s  {row['plan']:<22} {row['seconds']:8.3f} s  MFU {row['mfu']:.1%}  "
            f"{row['share']:6.1%}  {row['gib']:.1f} GiB  {row['mesh']}  {row['status']}"
        )
    found = {"date": date.today().isoformat(), "command": "python benchmarks/diloco_links.py", "rows": rows}
    found["cpu_seconds"] = time.process_time() - began
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _row(gigabits: int, name: str, plan: Any, predicted: Any, mesh: str) -> dict[str, Any]:
    return {
        "gigabits": gigabits,
        "plan": name,
        "mesh": mesh,
        "layout": str(plan.layout),
        "decided": plan.data.in_short() if hasattr(plan.data, "in_short") else "",
        "status": plan.solver.status,
        "seconds": predicted.step_seconds,
        "tokens_per_second": predicted.tokens_per_second,
        "mfu": predicted.mfu,
        "gib": predicted.peak_memory_bytes / 2**30,
    }


LIMIT = 300
"""Seconds of a search."""
MEMORY = 12.2e9
"""Bytes of a chip's that a replica's step may take."""

if __name__ == "__main__":
    main()
