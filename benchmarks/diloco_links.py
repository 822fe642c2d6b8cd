"""A 70 B model over four slices of 128 TPU v5e, with slow to fast links between them: which plan is fastest.

    python benchmarks/diloco_links.py [--out benchmarks/results/diloco_links.json]

512 sequences of 4,096 tokens in a step, on four slices of 8 x 16 chips. For each bandwidth between a slice
and the others, every way is searched on all of them (`layoutopt.choose_replicas`): all chips meet in every
step, or each slice is a replica that learns from a fourth of the sequences and meets the others every 30, 100
or 300 steps. `share` is how much of the fastest links' synchronous speed is left.
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
from layoutopt import choose_replicas
from layoutopt.plan.units import layout_text
from layoutopt.plan.ways import SYNCHRONOUS, ReplicaStrategy

ROOT = Path(__file__).resolve().parent.parent
SLICES, SLICE, CHIPS = 4, (8, 16), 128
GIGABITS = (1, 10, 100, 1000)
PERIODS = (30, 100, 300)
BATCH, LENGTH = 512, 4096
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
    whole = {count: build(batch=BATCH // count) for count in (1, SLICES)}
    print(f"{whole[1].parameters:,} parameters", flush=True)
    mesh = mtf.Mesh({"sites": SLICES, "data": SLICE[0], "model": SLICE[1]})
    ways = ["never", *(f"sites:period={period}" for period in PERIODS)]
    rows: list[dict[str, Any]] = []
    for gigabits in GIGABITS:
        plan = choose_replicas(
            whole.__getitem__, mesh, ways, machine(gigabits), time_limit=LIMIT, alternatives=False
        )
        found = plan.data.details.ways
        assert found is not None
        rows += [_row(gigabits, way) for way in found.compared]
        for row in rows[-len(ways) :]:
            print(row, flush=True)
    best = min(r["seconds"] for r in rows if r["way"] == SYNCHRONOUS)
    for row in rows:
        row["share"] = best / row["seconds"]
    found = {"date": date.today().isoformat(), "command": "python benchmarks/diloco_links.py", "rows": rows}
    found["cpu_seconds"] = time.process_time() - began
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _row(gigabits: int, way: ReplicaStrategy) -> dict[str, Any]:
    assert way.step_seconds is not None and way.peak_memory_bytes is not None
    return {
        "gigabits": gigabits,
        "way": way.name,
        "layout": layout_text(way.layout),
        "decided": way.in_short(),
        "status": way.status,
        "seconds": way.step_seconds,
        "tokens_per_second": BATCH * LENGTH / way.step_seconds,
        "mfu": way.mfu,
        "gib": way.peak_memory_bytes / 2**30,
        "loss_by_the_law": way.loss,
    }


LIMIT = 1200
"""Seconds of the searches of one link."""

if __name__ == "__main__":
    main()
