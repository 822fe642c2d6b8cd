"""The bandwidth that a compute utilisation needs with replicas that meet rarely: published tables and ours.

    python -m benchmarks.diloco_utilisation [--out benchmarks/results/diloco_utilisation.json]

Charles et al. 2025 (2503.09799, table 6) and Douillard et al. 2025 (2501.18512, table 4) print what a
simulator of theirs says that is not published. What is known of it: step times follow from 6 N D at 60 % of
the peak, the reduction of gradients or outer gradients overlaps with backward, layer by layer. The rule here:

    a layer computes C / L seconds of the step's C, a third of them forward
    its reduction takes bits of the layer / W, begins when its backward has ended, one after the other
    of H steps the last one reduces:     utilisation = H C / (H C + what of its reductions is left at its end)

with 16 bits for each parameter, once: what a device sends of them in an all-reduce between two replicas. The
tables' bandwidths are points of a logarithmic grid, 50 from 0.1 to 1,000 Gbit/s, and of these the last one
below what the rule needs. The number of parameters is that of what crosses the axis in the meeting's program.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from examples import deepseek_lm
from examples.transformer_lm import llama3_405b
from examples.transformer_lm import model as transformer

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "benchmarks" / "data" / "diloco_utilisation.json"
GRID = tuple(10 ** (-1 + 4 * point / 49) for point in range(50))
"""Gbit/s; each is 20.7 % more than the one before."""
BITS = 16
FORWARD = 1 / 3
chinchilla = partial(
    transformer, layers=48, d_model=4096, heads=32, d_kv=128, d_ff=16384, vocab=32000, length=2048, batch=1
)
MODELS: Mapping[str, Callable[[], mtf.Model]] = {
    "Chinchilla 10B": chinchilla,
    "Llama3 405B": partial(llama3_405b, batch=1),
    "DeepSeek-V3 671B": partial(deepseek_lm.v3, batch=1),
}


def crossing(model: mtf.Model) -> int:
    """Elements that a device sends in a meeting of two replicas: of an all-reduce, as many as there are."""
    options = mtf.Options(diloco=mtf.DiLoCo("sites"))
    (outer,) = model.replicas(mtf.Mesh("sites:2"), mtf.Layout(), options, check=False).outer
    return round(outer.communication_bytes()["sites"] / 4)  # float32


def utilisation(gigabits: float, parameters: float, layers: int, seconds: float, period: int) -> float:
    """The share of `period` steps that computes.

    Args:
      parameters: that cross the axis.
      seconds: that a step computes.
    """
    each = parameters * BITS / layers / (gigabits * 1e9)
    end = 0.0
    for layer in range(1, layers + 1):
        backward = seconds * (FORWARD + (1 - FORWARD) * layer / layers)
        end = max(end, backward) + each
    return period * seconds / ((period - 1) * seconds + end)


def needed(share: float, *of: Any) -> int:
    """The number of the last grid point below what a utilisation needs; 49: more than the grid has."""
    return next((point for point, rate in enumerate(GRID) if utilisation(rate, *of) >= share), len(GRID)) - 1


def point_of(gigabits: float) -> int:
    """The number of the grid point that a table prints in three digits."""
    return min(range(len(GRID)), key=lambda point: abs(math.log(GRID[point] / gigabits)))


def compared(parameters: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Every entry of the tables beside the rule's.

    Args:
      parameters: by model; of others, those that the table names.
    """
    said = json.loads(TABLES.read_text(encoding="utf-8"))
    for table in said["tables"]:
        for row in table["rows"]:
            own = parameters.get(row["model"], row["parameters"])
            for share, printed in zip(said["utilisation"], row["gigabits"], strict=True):
                ours = needed(share, own, row["layers"], row["seconds"], row["period"])
                yield {
                    "table": table["source"],
                    "model": row["model"],
                    "period": row["period"],
                    "utilisation": share,
                    "printed": printed,
                    "ours": GRID[ours],
                    "points_apart": ours - point_of(printed),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "diloco_utilisation.json"
    )
    args = parser.parse_args()
    parameters = {name: crossing(build()) for name, build in MODELS.items()}
    for name, number in parameters.items():
        print(f"{name}: {number:,} elements cross the axis in a meeting", flush=True)
    rows = [*compared(parameters)]
    for table in dict.fromkeys(row["table"] for row in rows):
        apart = Counter(row["points_apart"] for row in rows if row["table"] == table)
        near = sum(apart[n] for n in (-1, 0, 1))
        print(f"{table}: {apart[0]} of {apart.total()} the same point, {near} that or its neighbour")
        for row in rows:
            if row["table"] == table and abs(row["points_apart"]) > 1:
                print(
                    f"  {row['model']}, H = {row['period']}, {row['utilisation']:.0%}: "
                    f"{row['printed']} printed, {row['ours']:.1f} by the rule"
                )
    result = {
        "date": date.today().isoformat(),
        "command": "python -m benchmarks.diloco_utilisation",
        "elements": parameters,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
