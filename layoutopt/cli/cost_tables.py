"""The price of a layout as tables: every table's rows add up to the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from layoutopt.plan.units import seconds_text
from reports.views.view import (
    BYTES,
    FLOP,
    RUNS,
    SECONDS,
    SHARE,
    Cell,
    CellValue,
    Column,
    View,
    ViewRow,
    texts,
)

if TYPE_CHECKING:
    from costmodels.liveness import MemoryProfile
    from costmodels.pricing.pricer import Cost, Line
    from layoutopt.optimize.evaluation.evaluation import Evaluation
    from layoutopt.plan.results import CostLine

PHASES = ("forward", "recompute", "backward", "update")
OPERATIONS, HOLDINGS = 12, 8
"""Rows of the longest tables; the rest is in one more."""
GroupKey = TypeVar("GroupKey")


def _grouped(lines: Iterable[Line], key: Callable[[Line], GroupKey]) -> dict[GroupKey, list[Line]]:
    found: dict[GroupKey, list[Line]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return found


def _sum(lines: Iterable[Line], what: Callable[[Line], float]) -> float:
    return sum(what(x) * x.times for x in lines)


def _exposed(lines: Iterable[Line]) -> float:
    return _sum(lines, lambda x: x.exposed)


def _runs(lines: Iterable[Line]) -> float:
    return sum(x.times for x in lines)


def _share(part: float, whole: float) -> CellValue:
    return part / whole if whole else None


def phase_table(cost: Cost) -> View:
    """Compute and exposed communication by phase of the step."""
    columns = (
        Column("phase", "phase"),
        Column("compute_seconds", "compute", SECONDS),
        Column("communication_seconds", "communication", SECONDS),
        Column("exposed_seconds", "of it exposed", SECONDS, rank=1),
        Column("step_seconds", "time", SECONDS),
        Column("share", "share", SHARE),
        Column("flops", "FLOPs", FLOP, rank=2),
    )

    def row(name: str, lines: Sequence[Line]) -> ViewRow:
        local = [x for x in lines if not x.is_communication]
        sent = [x for x in lines if x.is_communication]
        seconds = (_sum(local, lambda x: x.seconds), _sum(sent, lambda x: x.seconds), _exposed(sent))
        time = _exposed(lines)
        return name, *seconds, time, _share(time, cost.step_seconds), _sum(local, lambda x: x.flops)

    found = _grouped(cost.lines, lambda x: x.origin.phase)
    known = sorted(found, key=lambda p: (PHASES.index(p) if p in PHASES else len(PHASES), p))
    rows = [row(name, found[name]) for name in known]
    return View("Per phase", columns, rows).and_sum(*row("step", cost.lines))


def axis_table(cost: Cost) -> View | None:
    """Collectives by mesh axis and kind; None if there are none."""
    columns = (
        *texts("axis", "collective"),
        Column("messages", "messages", RUNS, rank=1),
        Column("sent_bytes", "traffic per device", BYTES),
        Column("seconds", "time", SECONDS),
        Column("exposed_seconds", "exposed", SECONDS),
        Column("share", "share of step", SHARE, rank=2),
    )

    def row(axes: str, kind: str, lines: Sequence[Line]) -> ViewRow:
        time, exposed = _sum(lines, lambda x: x.seconds), _exposed(lines)
        sent = _sum(lines, lambda x: x.sent)
        return axes, kind, _runs(lines), sent, time, exposed, _share(exposed, cost.step_seconds)

    sent = [x for x in cost.lines if x.is_communication]
    found = sorted(_grouped(sent, lambda x: ("+".join(x.axes), x.name)).items())
    made = View("Per axis", columns, [row(axes, kind, lines) for (axes, kind), lines in found])
    if not found:
        return None
    return made.and_sum(*row("all", "", sent)) if len(found) > 1 else made


def overlap_table(found: Evaluation) -> View | None:
    """Which communication is hidden, and behind what; None if there is none."""
    from costmodels.pricing.hidden import hidden

    columns = (
        Column("purpose", "messages for"),
        Column("seconds", "time", SECONDS),
        Column("hidden_seconds", "hidden", SECONDS),
        Column("exposed_seconds", "exposed", SECONDS),
        Column("behind", "overlapped with"),
        Column("behind_seconds", "which takes", SECONDS, rank=1),
        Column("fits", "fits", on="data"),
    )

    def takes(seconds: float, fits: bool) -> Cell:
        said = f"{seconds_text(seconds) if seconds else ''}{'' if fits else ': too short to hide this'}"
        return Cell(said, value=seconds or None)

    rows = [
        (h.purpose, h.seconds, h.hidden, h.exposed, h.behind, takes(h.room, h.fits), h.fits)
        for h in hidden(found.program, found.cost)
    ]
    return View("Overlap", columns, rows) if rows else None


def operation_table(cost: Cost, most: int = OPERATIONS) -> View:
    """The operations that take the most time; the rest in one row."""
    columns = (
        *texts("operation", "phase", axes="on"),
        Column("runs", "runs", RUNS, rank=3),
        Column("step_seconds", "time", SECONDS),
        Column("share", "share", SHARE),
        Column("flops", "FLOPs", FLOP, rank=2),
        Column("sent_bytes", "traffic per device", BYTES, rank=1),
    )

    def row(name: str, phase: str, axes: str, lines: Sequence[Line]) -> ViewRow:
        time, flops, sent = _exposed(lines), _sum(lines, lambda x: x.flops), _sum(lines, lambda x: x.sent)
        share = _share(time, cost.step_seconds)
        return name, phase, axes, _runs(lines), time, share, flops or None, sent or None

    found = _grouped(
        cost.lines, lambda x: (x.origin.scope, x.name, x.origin.phase, "+".join(x.axes) or "compute")
    )
    ranked = sorted(found.items(), key=lambda item: -_exposed(item[1]))
    rows = [
        row("/".join(filter(None, (scope, name))), phase, axes, lines)
        for (scope, name, phase, axes), lines in ranked
    ]
    return View("Per operation", columns, rows).first(most).and_sum(*row("step", "", "", cost.lines))


def memory_table(held: MemoryProfile, most: int = HOLDINGS) -> View:
    """The table of tensors that a device holds at the peak, equal tensors together; the rest in one row."""
    columns = (
        Column("what", "tensors of a device at the peak"),
        Column("origin", "from", rank=2),
        Column("tensors", "tensors", RUNS, rank=1),
        Column("bytes", "size", BYTES),
        Column("share", "share", SHARE),
    )

    def row(what: str, origin: str | None, count: int | None, size: int) -> ViewRow:
        return what, origin, count, size, _share(size, held.peak)

    groups: dict[tuple[str, str], list[int]] = {}
    for h in held.holdings:
        origin = f"{h.origin.scope or 'model'}, {h.origin.phase}" if h.origin else "between steps"
        groups.setdefault((h.what, origin), []).append(h.bytes)
    ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))
    rows = [row(what, origin, len(sizes), sum(sizes)) for (what, origin), sizes in ranked]
    made = View("Memory", columns, rows).first(most, "others")
    shared = held.peak - sum(h.bytes for h in held.holdings)
    if shared:
        of_these = row("counted twice above: results that reuse their input's buffer", None, 1, shared)
        made = View(made.title, columns, [*made.rows, of_these])
    return made.and_sum(*row("peak", None, None, held.peak))


def line_table(lines: Iterable[CostLine]) -> View:
    """Every line of the prediction: what runs, how often, how long, and the formula."""
    columns = (
        *texts("operation", "phase"),
        Column("runs", "runs", RUNS),
        Column("seconds", "one takes", SECONDS),
        Column("formula", "formula"),
    )
    rows = [
        (name, x.phase, x.runs, x.seconds or 0.0, x.formula)
        for x in lines
        for name in ("/".join(filter(None, (x.scope, " + ".join(x.fused) or x.operation))),)
    ]
    return View("Per instruction", columns, rows)
