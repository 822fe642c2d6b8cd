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


def main() -> None:
    result = dict[str, dict[str, dict[str, list[dict[str, float]]]]]()
    for kind, unknown in (("own framework", False), ("unknown", True)):
        every, of = tables(unknown), result.setdefault(kind, {})
        for count in COUNTS:
            enough = {name: own for name, own in every.items() if len(own) >= count + OTHERS}
            of[str(count)] = {name: draws(own, count) for name, own in enough.items()}
            print(kind, count, "runs:", words(of[str(count)]), flush=True)
    content = {"date": datetime.now(UTC).date().isoformat(), "runs": result}
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def words(found: Mapping[str, list[dict[str, float]]]) -> str:
    flat = [draw for own in found.values() for draw in own]
    before, after, told = (fmean(draw[k] for draw in flat) for k in ("before", "after", "told"))
    worse = sum(draw["after"] > draw["before"] + 0.01 for draw in flat)
    return f"{before:.1%} before, {after:.1%} after, {told:.1%} told; {worse} of {len(flat)} worse"


if __name__ == "__main__":
    main()
