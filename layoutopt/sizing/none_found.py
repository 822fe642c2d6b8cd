"""Why a question about a size has no answer: proven, or not searched in time."""

from __future__ import annotations

from collections.abc import Sequence

from layoutopt.plan.size_results import Unfit
from layoutopt.plan.training import lasts
from layoutopt.plan.units import count
from layoutopt.sizing.question import DAY
from layoutopt.sizing.rows import SizeRow
from mesh_tf_core.errors import InfeasibleError, LimitError, NoLayoutError

_UNSEARCHED = "some sizes were not searched within the time limit; raise --time-limit"


def nothing(unfit: Sequence[Unfit], missing: int) -> NoLayoutError | LimitError:
    """The error of a question without any row; `missing`: searches for which there was no time."""
    if missing and not unfit:
        return LimitError("no size was searched within the time limit; raise --time-limit")
    none, near = f"none of the {len(unfit)} searched candidates meets the target", unfit[0]
    if missing:
        return LimitError(f"{none}, and {_UNSEARCHED}")
    place = f"{count(near.parameters)} parameters on {near.devices:,} {near.hardware}"
    return InfeasibleError(f"{none}; for example, with {place}: {near.reason}")


def all_late(
    days: float, rows: Sequence[SizeRow], unended: Sequence[SizeRow], missing: int
) -> NoLayoutError | LimitError:
    """The error where no row ends in time; `unended`: those that may, by the bounds of searches that did not
    end."""
    soonest = min(rows, key=lambda r: r.days)
    fastest = f"the fastest, {_place(soonest)}, takes {lasts(DAY * soonest.days)}"
    late = f"none of the searched sizes ends within {days:g} days"
    if unended:
        return LimitError(
            f"{late} ({fastest}), but the search of {', '.join(map(_place, unended))} did not end, and "
            "faster layouts may meet it; raise --time-limit"
        )
    if missing:
        return LimitError(f"{late}, and {_UNSEARCHED}")
    assert soonest.timing.plan is not None
    parts = ", ".join(map(str, soonest.timing.plan.question.microbatches))
    return InfeasibleError(
        f"--days {days:g}: no candidate is fast enough; {fastest} (with {parts} microbatches: no other "
        "number was tried); allow more days, or offer more or faster devices (--devices, --hardware)"
    )


def _place(row: SizeRow) -> str:
    return f"{count(row.candidate.size.total)} parameters on {row.timing.devices:,} {row.timing.machine.name}"
