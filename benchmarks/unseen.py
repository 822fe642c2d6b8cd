"""Predictions against published runs, each under its framework as shipped: `python -m benchmarks.unseen`.

Every row of `benchmarks/data/published` (`benchmarks.framework_rows`) is priced as `layoutopt.cost` prices it
(`benchmarks.framework_parts`), with the model of an example. Half of the models of a framework had a part in
its constants, the others are judged (`benchmarks.framework_fit`). A row that is not exactly its run says how
it differs. Results: `benchmarks/results/unseen.json`, of which `--table` replaces some
tables.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import known
from benchmarks.errors import errors_of, order
from benchmarks.framework_fit import halves
from benchmarks.framework_parts import parts
from benchmarks.framework_rows import LESS, Row, rows, tables
from costmodels import load_hardware
from costmodels.pricing.hidden import is_launched
from costmodels.pricing.items import Item
from costmodels.pricing.pricer import Pricer
from layoutopt.plan.machine_details import errors_known
from mesh_tf_core.errors import UserError

OUT = Path(__file__).parent / "results" / "unseen.json"
BOUNDS = OUT.with_name("unseen_bounds.json")
"""The least mean error that each group of rows had, and notes on those that rose by a tenth since."""
SHOWN = ("table", "name", "model", "framework", "software", "family", "mesh", "layout", "hardware", "decided")


def priced(row: Row) -> dict[str, Any]:
    """A row with its prediction, or with why it cannot be priced."""
    told = asdict(row)
    found = {name: told[name] for name in SHOWN} | {
        "recompute": [again for _, again in row.ways],
        "differs": row.differs,
        "ran": row.ran,
        "seconds": row.seconds,
        "gib": row.gib,
    }
    try:
        kept = parts(row)
    except UserError as error:
        return {**found, "why_not": str(error)}
    machine = load_hardware(row.hardware, row.framework)
    prices = Pricer(machine, kept.placement)
    known = errors_known(machine, row.model_built(), ("layers",) if row.stages else ())
    said = known.fits(kept.peak, kept.limit, machine.usable_memory_bytes)
    exact = len(row.ways) == 1 and not any(each.startswith(LESS) for each in row.differs)
    waited = [(times * prices.seconds_of(x)[1], x) for times, x in kept.items]
    launched = sum(times for times, x in kept.items if is_launched(x))
    if row.decided.get("schedule"):
        found["seconds_by_kind"] = by_kind(waited)
    return {
        **found,
        "predicted_seconds": max(sum(seconds for seconds, _ in waited), prices.interval * launched),
        "predicted_gib": kept.peak / 2**30 if exact else None,
        "fits": said != "no" if exact else None,
        "barely": said == "barely" if exact else None,
    }


def by_kind(waited: Sequence[tuple[float, Item]]) -> dict[str, float]:
    """Seconds that a step waits for: products and attention, messages by mesh axis, what loops write to
    stacks and add to sums, all other kernels."""
    found = defaultdict[str, float](float)
    for seconds, item in waited:
        kind = "others"
        if item.axes:
            kind = "messages over " + "+".join(item.axes)
        elif item.kind in ("matmul", "attention"):
            kind = "products and attention"
        elif item.kind == "data":
            kind = "stacks and sums"
        found[kind] += seconds
    return dict(found)


def quality(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of rows: predicted over published, less 1."""
    timed = [r for r in found if r["seconds"] and "predicted_seconds" in r]
    held = [r["predicted_gib"] / r["gib"] - 1 for r in found if r["gib"] and r.get("predicted_gib")]
    known = [r for r in found if r.get("fits") is not None]
    lost, ran = [r for r in known if not r["ran"]], [r for r in known if r["ran"]]
    return {
        "rows": len(found),
        "priced": sum("predicted_seconds" in r for r in found),
        "time": errors_of(r["predicted_seconds"] / r["seconds"] - 1 for r in timed),
        "order": order(
            (r["model"], r["hardware"], r["predicted_seconds"], r["seconds"], r["tokens"]) for r in timed
        ),
        "memory": errors_of(held),
        "out_of_memory": len(lost),
        "out_of_memory_called_fitting": sum(r["fits"] for r in lost),
        "out_of_memory_called_barely": sum(r["barely"] for r in lost),
        "ran": len(ran),
        "ran_called_too_large": sum(not r["fits"] for r in ran),
    }


def kind(row: Mapping[str, Any]) -> str:
    """What rows are summed up by: framework, chip, stages."""
    stages = ", stages" if "layers:" in row["layout"] else ""
    return f"{row['framework'].partition(':')[0]}, {row['hardware'].partition(',')[0]}{stages}"


def measured(names: Sequence[str]) -> dict[str, Any]:
    """The rows of some tables, priced."""
    half, found = halves(), dict[str, Any]()
    for name in names:
        own = []
        for row in rows(name):
            told = priced(row)
            told["tokens"] = row.sizes["batch"] * row.sizes["length"]
            told["half"] = half(row)
            own.append(told)
        found[name] = {**quality(own), "found": own}
        shown = {k: v for k, v in found[name].items() if k != "found"}
        print(name, json.dumps(shown), flush=True)
    return found


def means(found: Mapping[str, Any]) -> dict[str, float]:
    """Mean error of step times by table, framework, chip and half."""
    groups = defaultdict[str, list[float]](list)
    for name, table in found.items():
        for row in table["found"]:
            if row["seconds"] and "predicted_seconds" in row:
                framework, chip = row["framework"].partition(":")[0], row["hardware"].partition(",")[0]
                of = ", ".join((name, framework, chip, row["half"]))
                groups[of].append(abs(row["predicted_seconds"] / row["seconds"] - 1))
    return {of: round(fmean(errors), 4) for of, errors in groups.items()}


def bound(found: Mapping[str, float], note: str) -> None:
    """Lowers the stored bounds where errors fell; with a note, raises those that rose by a tenth."""
    stored = json.loads(BOUNDS.read_text(encoding="utf-8")) if BOUNDS.exists() else {"means": {}, "notes": {}}
    old, notes = stored["means"], {k: v for k, v in stored["notes"].items() if k in found}
    risen = {k for k, mean in found.items() if mean > 1.1 * old.get(k, mean)}
    if note:
        notes |= dict.fromkeys(sorted(risen), note)
    means = {k: mean if note and k in risen else min(mean, old.get(k, mean)) for k, mean in found.items()}
    BOUNDS.write_text(json.dumps({"means": means, "notes": notes}, indent=1) + "\n", encoding="utf-8")
    for k in sorted(risen):
        print(f"{k}: {old[k]:.1%} before, {found[k]:.1%} now{'' if note else '; say why with --note'}")


def summed(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Quality by kind of rows and by half."""
    groups = defaultdict[str, dict[str, list[Any]]](lambda: defaultdict(list))
    for table in found.values():
        for row in table["found"]:
            groups[kind(row)][row["half"]].append(row)
    return {k: {half: quality(own) for half, own in sorted(v.items())} for k, v in sorted(groups.items())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="append", help="only this table; others stay as stored")
    parser.add_argument("--note", default="", help="why errors rose by more than a tenth, where they did")
    asked = parser.parse_args()
    stored = json.loads(OUT.read_text(encoding="utf-8"))["tables"] if asked.table else {}
    found = stored | measured(asked.table or tables())
    kinds = summed(found)
    for name, halves_of in kinds.items():
        for half, q in halves_of.items():
            if q["time"]:
                of, found_order = q["time"], q["order"]
                errors = f"{of['rows']:4} {of['mean']:6.1%} {of['signed_mean']:+6.1%} {of['worst']:+6.1%}"
                print(f"{name:40} {half:8} {errors} {found_order}")
    content = {"date": datetime.now(UTC).date().isoformat(), "kinds": kinds, "tables": found}
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    bound(means(found), asked.note)
    known.write()


if __name__ == "__main__":
    main()
