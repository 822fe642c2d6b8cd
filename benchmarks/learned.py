"""What `layoutopt learn` does for the other runs of a table: `python -m benchmarks.learned`.

Rows of one published table, chip and framework stand for what one user runs. 3, 5 or 10 of them, drawn four
times at random, are learnt from; the others are predicted with what ships and with what was learnt. Tables
whose rows had a part in the constants that ship have little left to learn. Results:
`benchmarks/results/learned.json`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.framework_fit import chip_of, sums_of, timed
from benchmarks.framework_rows import Row
from costmodels.step_fit import StepSums
from layoutopt.api.learning import CHIP, error_of, fitted, learned
from mesh_tf_core.errors import UserError

OUT = Path(__file__).parent / "results" / "learned.json"
COUNTS, DRAWS, OTHERS = (3, 5, 10), 4, 4
MOST = 60
"""Rows of a table."""


def tables() -> dict[str, list[StepSums]]:
    """The steps of each table by chip and framework, where there are enough."""
    groups = defaultdict[str, list[Row]](list)
    for row in timed():
        stages = ", stages" if row.stages else ""
        groups[f"{row.table}, {row.framework.partition(':')[0]}, {chip_of(row)}{stages}"].append(row)
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
        done = learned(own)
        constants = fitted(own) if done.constants else []
        before = fmean(error_of(each, []) for each in others)
        after = fmean(error_of(each, constants) for each in others)
        found.append(
            {"before": before, "after": after, "told": done.error_after, "constants": len(constants)}
        )
    return found


def main() -> None:
    every, result = tables(), dict[str, dict[str, list[dict[str, float]]]]()
    for count in COUNTS:
        of = {name: draws(own, count) for name, own in every.items() if len(own) >= count + OTHERS}
        result[str(count)] = of
        flat = [draw for own in of.values() for draw in own]
        worse = sum(draw["after"] > draw["before"] + 0.01 for draw in flat)
        before, after, told = (fmean(draw[k] for draw in flat) for k in ("before", "after", "told"))
        errors = f"{before:.1%} before, {after:.1%} after, told {told:.1%}"
        print(f"{count} runs: {errors}; {worse} of {len(flat)} worse", flush=True)
    content = {"date": datetime.now(UTC).date().isoformat(), "runs": result}
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
