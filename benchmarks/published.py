"""Predictions against step times and memory that others published, of programs built here.

    .venv/bin/python -m benchmarks.published [--table NAME …]

Every row is priced with a preset as it ships, under the model, layout and options that its source states
(`published_tpu`, `published_gpu`): models that the examples cannot build (GSPMD, MaxText's first ones,
Megatron-LM's GPT with its biases and dropout). Nothing is set per row but the network of the machine, where a
source says that it is another (`--set-hardware`). Rows that had a part in a preset's constants are apart, and
rows with pipeline stages, each a program of its own (`stages`). Runs under their own framework:
`benchmarks.unseen`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import known, published_gpu, published_tpu
from benchmarks.errors import errors_of
from benchmarks.published_criteria import criteria, quality, words_of
from benchmarks.published_layers import MICRO, layers
from benchmarks.published_memory import memory_rows
from benchmarks.published_rows import Priced, Prices, Run

OUT = Path(__file__).parent / "results" / "published.json"
SHOWN = 60
"""Tables with more rows than this are summed up only."""


def runs() -> Iterator[Run]:
    """Every row of every table."""
    tpu, gpu = published_tpu, published_gpu
    for source in (tpu.mesh_tensorflow, tpu.gspmd, tpu.maxtext, tpu.small, gpu.vtrain, gpu.oneflow):
        yield from source()
    yield from gpu.megatron()


def priced(tables: Sequence[str] = ()) -> list[Priced]:
    """Every run; of some tables, if they are named."""
    prices = Prices()
    return [Priced.of(run, prices) for run in runs() if not tables or any(t in run.table for t in tables)]


def report(table: str, rows: Sequence[Priced]) -> dict[str, Any]:
    """Prints a table's rows and how good they are; returns the results."""
    print(f"\n{table}: {len(rows)} rows")
    if len(rows) <= SHOWN:
        for p in rows:
            mark = "fitted" if p.run.fitted else f"keeps {p.run.keeps}" if p.run.keeps else ""
            s = p.run.seconds
            print(f"    {p.run.name[:58]:58} {s:8.3f} s {p.shipped:8.3f} s {p.error:+6.1%} {mark}")
    plain = [p for p in rows if p.run.stages == 1]
    parts = {
        "no part in a fit": [p for p in plain if not p.run.keeps and not p.run.fitted],
        "keep some values": [p for p in plain if p.run.keeps],
        "part in a fit": [p for p in plain if p.run.fitted],
        "pipeline stages": [p for p in rows if p.run.stages > 1],
    }
    found = {name: quality(part) for name, part in parts.items() if part}
    for name, q in found.items():
        print(f"    {name}: {words_of(q)}")
    listed = [
        {
            "run": p.run.name,
            "hardware": p.run.hardware,
            "framework": p.run.framework,
            "stages": p.run.stages,
            "published_seconds": p.run.seconds,
            "predicted_seconds": p.shipped,
            "fitted": p.run.fitted,
            "keeps": p.run.keeps,
        }
        for p in rows
    ]
    return {"quality": {name: asdict(q) for name, q in found.items()}, "rows": listed}


def stages(rows: Sequence[Priced]) -> dict[str, Any]:
    """Errors of runs with pipeline stages by their number, and the regret over all layouts of a workload: how
    much longer than the fastest layout the one takes that is predicted fastest."""
    groups, workloads = defaultdict[str, list[float]](list), defaultdict[str, list[Priced]](list)
    for p in rows:
        if p.run.workload and "vtrain" in p.run.table:
            workloads[p.run.workload].append(p)
        if p.run.stages > 1:
            for name in (str(p.run.stages), "all"):
                groups[name].append(p.error)
    regrets = [
        min(own, key=lambda p: p.shipped).run.seconds / min(p.run.seconds for p in own) - 1
        for own in workloads.values()
        if len(own) > 2 and any(p.run.stages > 1 for p in own)
    ]
    if not regrets:
        return {}
    found = {"workloads": len(regrets), "mean": fmean(regrets), "worst": max(regrets)}
    return {"by_stages": {name: errors_of(own) for name, own in groups.items()}, "regret": found}


def layer_times(rows: Sequence[Priced]) -> dict[str, Any]:
    """Prints and returns the times of a layer in vTrain's steps of one node; nothing without them."""
    found = layers(rows)
    if not found.published:
        return {}
    print(f"\nvTrain, one node: ms of a layer, published and predicted, by micro batch {MICRO}")
    times = []
    for hidden, tensor in sorted({(h, t) for h, t, _ in found.published}):
        keys = [(hidden, tensor, m) for m in MICRO]
        pairs = [(found.published[k], found.predicted[k]) for k in keys]
        print(f"    {hidden}, tensor {tensor}: " + "  ".join(f"{a:6.2f} {b:6.2f}" for a, b in pairs))
        times.append((hidden, tensor, pairs))
    return {"off": found.off, "micro": MICRO, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--table", action="append", default=[], help="only tables of this name (repeatable)")
    args = parser.parse_args()
    rows = priced(args.table)
    tables: dict[str, list[Priced]] = defaultdict(list)
    for p in rows:
        tables[p.run.table].append(p)
    print("published, predicted, error")
    results = {table: report(table, found) for table, found in tables.items()}
    memory = memory_rows()
    print("\nPeak memory of the 22-billion-parameter model of Korthikanti et al. 2022, 8 A100")
    for m in memory:
        print(
            f"    {m['run']:40} {m['published_gib']:8.2f} GiB {m['predicted_gib']:8.2f} GiB {m['error']:+.1%}"
        )
    print("\nCriteria")
    judged = criteria(rows, memory)
    for c in judged:
        verdict = "no rows" if c.reached is None else "met" if c.met else "NOT MET"
        print(f"    {c.name:68} {c.text:>28}  {verdict}")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "criteria": [asdict(c) for c in judged],
        "tables": results,
        "memory": memory,
        "stages": stages(rows),
        "layers": layer_times(rows),
    }
    if not args.table:
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        known.write()


if __name__ == "__main__":
    main()
