"""Predictions against step times, throughput and memory that others published.

    .venv/bin/python -m benchmarks.published [--table NAME …]

Every row is priced with a preset as it ships, under the model, layout and options that its source states
(`published_tpu`, `published_gpu`). Nothing is set per row but the network of the machine, where a source says
that it is another (`--set-hardware`). Rows that cannot be expressed are shown apart and not judged. Rows that
had a part in the fit of a preset's constants are apart too; the constants are listed with their intervals
(`published_fit`).
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import known, published_gpu, published_tpu
from benchmarks.published_criteria import criteria, quality, words_of
from benchmarks.published_fit import STACKS, Fitter, Priced, constants, has_part
from benchmarks.published_layers import MICRO, layers
from benchmarks.published_memory import float8_rows, memory_rows
from benchmarks.published_rows import PIPELINED, Prices, Run, read
from costmodels import load_hardware

OUT = Path(__file__).parent / "results" / "published.json"
SHOWN = 60
"""Tables with more rows than this are summed up only."""


def runs() -> Iterator[Run]:
    """Every row of every table."""
    tpu, gpu = published_tpu, published_gpu
    for source in (tpu.mesh_tensorflow, tpu.gspmd, tpu.maxtext, tpu.small):
        yield from source()
    for source in (gpu.common, gpu.vtrain, gpu.oneflow, gpu.megatron):
        yield from source()


def priced(tables: Sequence[str] = ()) -> list[Priced]:
    """Every run that can be lowered and priced; of some tables, if they are named."""
    prices = Prices()
    chosen = (r for r in runs() if not tables or any(t in r.table for t in tables))
    return [Priced.of(run, prices) for run in chosen if run.unjudged != PIPELINED]


def report(table: str, rows: Sequence[Priced]) -> dict[str, Any]:
    """Prints a table's rows and how good they are; returns the results."""
    print(f"\n{table}: {len(rows)} rows")
    if len(rows) <= SHOWN:
        for p in rows:
            mark = f"not judged: {p.run.unjudged}" if p.run.unjudged else "fitted" if has_part(p.run) else ""
            mark += f"keeps {p.run.keeps}" if p.run.keeps else ""
            mark += ", not all is stated" if p.run.assumed else ""
            s = p.run.seconds
            print(
                f"    {p.run.name[:58]:58} {s:8.3f} s {p.shipped:8.3f} s {p.error:+6.1%} "
                f"{p.peak / p.limit:5.0%} {mark}"
            )
    parts = {
        "no part in a fit": [p for p in rows if not (p.run.unjudged or p.run.keeps) and not has_part(p.run)],
        "keep some values": [p for p in rows if p.run.keeps and not p.run.unjudged],
        "part in a fit": [p for p in rows if has_part(p.run)],
        "not judged": [p for p in rows if p.run.unjudged],
    }
    found = {name: quality(part) for name, part in parts.items() if part}
    for name, q in found.items():
        print(f"    {name}: {words_of(q)}")
    listed = [
        {
            "run": p.run.name,
            "hardware": p.run.hardware,
            "framework": p.run.framework,
            "published_seconds": p.run.seconds,
            "predicted_seconds": p.shipped,
            "predicted_bytes": p.peak,
            "usable_bytes": p.limit,
            "fitted": has_part(p.run),
            "keeps": p.run.keeps,
            "compiled": p.run.compiled,
            "not_judged": p.run.unjudged or None,
        }
        for p in rows
    ]
    return {"quality": {name: asdict(q) for name, q in found.items()}, "rows": listed}


def fits(rows: Sequence[Priced]) -> dict[str, Any]:
    """Prints the fitted constants of every stack with their intervals, beside those that ship."""
    found = {}
    for stack in STACKS:
        own = [p for p in rows if p.run.stack == stack.name and stack.has_part(p.run) and not p.run.unjudged]
        if not own:
            continue
        shipped = constants(load_hardware(*stack.machines[0]))
        fitter = Fitter(stack, own, shipped)
        values, ends = fitter.fit(), fitter.intervals()
        models = list(dict.fromkeys(p.run.model for p in own))
        machines = ", ".join(map(" under ".join, stack.machines))
        print(f"\n{stack.name}: constants of {machines}, fitted to {len(own)} rows")
        found[stack.name] = {"rows": len(own), "models": models, "constants": {}}
        for name, value, low, high in zip(stack.names, values, *ends, strict=True):
            ships = shipped.get(name, shipped["gradient"])
            print(f"    {name:24} ships {ships:.3g}, fitted {value:.3g} ({low:.3g} to {high:.3g})")
            found[stack.name]["constants"][name] = {"ships": ships, "fitted": value, "interval": [low, high]}
    return found


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
    own = sum("vtrain" in p.run.table and "multi" not in p.run.table for p in rows)
    return {"rows": own, "off": found.off, "micro": MICRO, "times": times}


def others() -> list[str]:
    """What other cost models report of themselves, and floors."""
    return [
        f"{r['name']}: {r['value']}{r['unit'] if '%' not in r['value'] else ''} ({r['source']})"
        for r in read("cost_model_constants.csv")
        if r["model"] == "reported error %"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--table", action="append", default=[], help="only tables of this name (repeatable)")
    args = parser.parse_args()
    rows = priced(args.table)
    tables: dict[str, list[Priced]] = defaultdict(list)
    for p in rows:
        tables[p.run.table].append(p)
    print("published, predicted, error; peak memory of what a device has")
    results = {table: report(table, found) for table, found in tables.items()}
    pipelined = sum(run.unjudged == PIPELINED for run in runs())
    print(f"\nApart (benchmarks.published_pipelines): {pipelined} rows with pipeline stages")
    for table, why in published_gpu.LEFT_OUT.items():
        print(f"    {table}, {len(read(table))} rows: {why}")
    fitted = fits(rows)
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
    print("\nWhat others report (and floors: simpler models on the vTrain tables)")
    for line in others():
        print(f"    {line}")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "scipy": version("scipy"),
        },
        "criteria": [asdict(c) for c in judged],
        "tables": results,
        "constants": fitted,
        "memory": memory,
        "others": others(),
        "pipelined": pipelined,
        "layers": layer_times(rows),
        "float8": float8_rows(),
    }
    if not args.table:
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        known.write()


if __name__ == "__main__":
    main()
