"""vTrain's rows with pipeline stages: predictions against measured steps.

    .venv/bin/python -m benchmarks.published_pipelines [--every N]

The rows ran 1F1B (Megatron-DeepSpeed). Priced is GPipe, whose stages wait as long; it holds more. No constant
was fitted to these rows. Regret is over all layouts of a workload, those without stages as
`results/published.json` has them: what the layout that is predicted fastest takes above the fastest one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.published_gpu import vtrain
from benchmarks.published_rows import PIPELINED, Prices

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="price one row in so many, and no regret")
    asked = parser.parse_args()
    prices, rows = Prices(), []
    for run in [r for r in vtrain() if r.unjudged == PIPELINED][:: asked.every]:
        stages = int(run.name.rsplit(", ", 1)[1].split()[0])
        _, cost = prices.of(run, run.program())
        found = {"table": run.table, "workload": run.workload, "run": run.name, "stages": stages}
        rows.append({**found, "published_seconds": run.seconds, "predicted_seconds": cost.step_seconds})
    found = {"by table": _by(rows, "table"), "by stages": _by(rows, "stages")}
    if asked.every == 1:
        found["regret"] = _regret(rows)
        out = {**found, "rows": rows}
        (RESULTS / "published_pipelines.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _error(row: dict[str, Any]) -> float:
    return float(row["predicted_seconds"] / row["published_seconds"] - 1)


def _by(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    groups = defaultdict(list)
    for row in rows:
        groups[str(row[key])].append(_error(row))
        groups["all"].append(_error(row))
    return {
        name: {
            "rows": len(errors),
            "mape": statistics.mean(map(abs, errors)),
            "bias": statistics.mean(errors),
            "worst": max(map(abs, errors)),
        }
        for name, errors in groups.items()
    }


def _regret(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over workloads with several layouts."""
    tables = json.loads((RESULTS / "published.json").read_text())["tables"]
    plain = [row for name, table in tables.items() if "vtrain" in name for row in table["rows"]]
    workloads = defaultdict(list)
    for row in (*plain, *rows):
        times = row["published_seconds"], row["predicted_seconds"]
        workloads[row["run"].split(": ")[0]].append(times)
    found = [
        min(times, key=lambda pair: pair[1])[0] / min(times)[0] - 1
        for times in workloads.values()
        if len(times) > 2
    ]
    return {"workloads": len(found), "mean": statistics.mean(found), "worst": max(found)}


if __name__ == "__main__":
    main()
