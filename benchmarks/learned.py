"""What `layoutopt learn` does for the other runs of a table: `python -m benchmarks.learned`.

Rows of one published table, chip and framework stand for what one user runs. 3, 5 or 10 of them, drawn four
times at random, are learnt from; the others are predicted with what ships and with what was learnt. Most
tables had a part in the constants of their framework, so there is little left to learn; a stack that nobody
has fitted is that of a table whose rows, without stages, are predicted under `layoutopt`. Results:
`benchmarks/results/learned.json`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.framework_fit import chip_of, sums_of, timed
from benchmarks.framework_rows import Row
from costmodels.frameworks import DEFAULT
from costmodels.step_fit import StepSums
from layoutopt.api.learning import CHIP, error_of, taken
from mesh_tf_core.errors import UserError

OUT = Path(__file__).parent / "results" / "learned.json"
COUNTS, DRAWS, OTHERS = (3, 5, 10), 4, 4
MOST = 40
"""Rows of a table."""


def tables(unknown: bool) -> dict[str, list[StepSums]]:
    """The steps of each table by chip and framework, where there are enough.

    Args:
      unknown: under `layoutopt` in place of their framework.
    """
    groups = defaultdict[str, list[Row]](list)
    for row in timed():
        base, stages = row.framework.partition(":")[0], ", stages" if row.stages else ""
        if not unknown:
            groups[f"{row.table}, {base}, {chip_of(row)}{stages}"].append(row)
        elif not stages and base != DEFAULT:
            groups[f"{row.table}, {base}, {chip_of(row)}"].append(replace(row, framework=DEFAULT))
    found = defaultdict[str, list[StepSums]](list)
    for name, rows in groups.items():
        for row in rows[:MOST] if len(rows) >= COUNTS[0] + OTHERS else ():
            try:
                found[name].append(sums_of(row))
            except UserError:
                continue
            found[name][-1].chip = CHIP
    return found


def draws(steps: list[StepSums], count: int) -> list[dict[str, float]]:
    """The error of the rows that were not drawn, as shipped and as learnt."""
    rng, found = np.random.default_rng(1), []
    for _ in range(DRAWS):
        order = rng.permutation(len(steps))
        own, others = ([steps[i] for i in part] for part in (order[:count], order[count:]))
        _, left, constants = taken(own)
        before = fmean(error_of(each, []) for each in others)
        after = fmean(error_of(each, constants) for each in others)
        found.append({"before": before, "after": after, "told": fmean(left), "constants": len(constants)})
    return found


def summed(found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The mean errors of all draws, and of each table."""
    draws = [draw for own in found.values() for draw in own]

    def means(own: list[dict[str, float]]) -> dict[str, float]:
        return {name: round(fmean(draw[name] for draw in own), 4) for name in ("before", "after", "told")}

    worse = sum(draw["after"] > draw["before"] + 0.01 for draw in draws)
    tables = {name: means(own) for name, own in found.items()}
    return {**means(draws), "draws": len(draws), "worse": worse, "tables": tables}


def main() -> None:
    result = list[dict[str, Any]]()
    for kind, unknown in (("fitted to published runs", False), ("not fitted", True)):
        every = tables(unknown)
        for count in COUNTS:
            enough = {name: draws(own, count) for name, own in every.items() if len(own) >= count + OTHERS}
            result.append({"framework": kind, "runs": count, **summed(enough)})
            print({name: value for name, value in result[-1].items() if name != "tables"}, flush=True)
    content = {"date": datetime.now(UTC).date().isoformat(), "learned": result}
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
