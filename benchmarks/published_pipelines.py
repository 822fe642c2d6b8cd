"""vTrain's rows with pipeline stages: predictions against measured steps.

    .venv/bin/python -m benchmarks.published_pipelines [--every N]

The rows ran 1F1B (Megatron-DeepSpeed), every stage a program of its own. Priced is GPipe, whose stages wait
as long, as one program for all stages. What the stages send each other differs (`between_stages`):
  (1) All our devices have what is before and behind the layers, so that the last stage's result is summed
      over all, and so is the gradient of the first one's input. Theirs leave both where they are.
  (2) The ranks of a tensor group all have what a stage hands on. Ours send it whole, theirs a part each,
      which the next stage gathers (microsoft/DeepSpeed deepspeed/runtime/pipe/engine.py,
      `is_pipe_partitioned` and `is_grad_partitioned`; Narayanan et al. 2021, section 4.1).
Left out: their sum of the tied embedding's gradient over the first and the last stage, once a step. No
constant was fitted to these rows. Regret is over all layouts of a workload, those without stages as
`results/published.json` has them: what the layout that is predicted fastest takes above the fastest one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.published_gpu import vtrain
from benchmarks.published_rows import PIPELINED, Prices
from costmodels.pricing.items import Item, Sent
from costmodels.pricing.overlap import ACTIVATION
from costmodels.pricing.pricer import Cost, Pricer
from mesh_tf_core.ir.program import wire_bytes

RESULTS = Path(__file__).parent / "results"
STAGES, TENSOR = "pipe", "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="price one row in so many, and no regret")
    asked = parser.parse_args()
    prices, rows = Prices(), []
    for run in [r for r in vtrain() if r.unjudged == PIPELINED][:: asked.every]:
        stages = int(run.name.rsplit(", ", 1)[1].split()[0])
        pricer, cost = prices.by(run, run.program())
        theirs = cost.step_seconds + between_stages(pricer, cost)
        found = {"table": run.table, "workload": run.workload, "run": run.name, "stages": stages}
        rows.append({**found, "published_seconds": run.seconds, "predicted_seconds": theirs})
        rows[-1]["one_program_seconds"] = cost.step_seconds
    ours = [{**row, "predicted_seconds": row["one_program_seconds"]} for row in rows]
    found = {"by table": _by(rows, "table"), "by stages": _by(rows, "stages")}
    found["one program"] = _by(ours, "stages")["all"]
    if asked.every == 1:
        found["regret"] = _regret(rows)
        out = {"date": date.today().isoformat(), **found, "rows": rows}
        (RESULTS / "published_pipelines.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def between_stages(pricer: Pricer, cost: Cost) -> float:
    """Seconds of what stages send each other, less those of what our program sends, by (1) and (2)."""
    mesh = pricer.placement.mesh
    ranks = mesh.size(TENSOR) if TENSOR in mesh.names else 1
    more = 0.0
    for line in cost.lines:
        item = line.item
        if not isinstance(item, Sent) or item.axes != (STAGES,):
            continue
        if item.kind == "all_reduce":
            more -= line.exposed * line.times
        elif item.kind == "permute" and ranks > 1:
            parts = tuple(-(-size // ranks) for size in item.payloads)
            gathered = wire_bytes("all_gather", sum(parts), ranks)
            own: tuple[Item, ...] = (
                replace(item, payloads=parts, sent=item.sent / ranks),
                Sent("all_gather", (TENSOR,), parts, gathered, ACTIVATION),
            )
            more += (sum(pricer.seconds_of(x)[1] for x in own) - line.exposed) * line.times
    return more


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
