"""The price of a layout as tables: every table's rows add up to the same step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from layoutopt.cli.terminal import table
from layoutopt.plan.units import bytes_text, rate_text, seconds_text, share_text

if TYPE_CHECKING:
    from costmodels.liveness import MemoryProfile
    from costmodels.pricing.pricer import Cost, Line
    from layoutopt.evaluator import Evaluation
    from layoutopt.plan.results import CostLine

PHASES = ("forward", "recompute", "backward", "update")


def phase_table(cost: Cost) -> Table:
    """Compute and waiting per phase of the step."""
    found = sorted(
        {x.origin.phase for x in cost.lines},
        key=lambda p: (PHASES.index(p) if p in PHASES else len(PHASES), p),
    )
    rows = [_phase_row(name, [x for x in cost.lines if x.origin.phase == name], cost) for name in found]
    rows.append(_phase_row("step", cost.lines, cost))
    columns = ("phase", "compute", "communication", "of it exposed", "time", "share", "FLOPs")
    return table("Per phase", columns, rows, range(1, 7), total=True)


def _phase_row(name: str, lines: Sequence[Line], cost: Cost) -> tuple[str, ...]:
    local = [x for x in lines if not x.is_communication]
    sent = [x for x in lines if x.is_communication]
    time = _exposed(lines)
    return (
        name,
        seconds_text(sum(x.seconds * x.times for x in local)),
        seconds_text(sum(x.seconds * x.times for x in sent)),
        seconds_text(_exposed(sent)),
        seconds_text(time),
        share_text(time, cost.step_seconds),
        rate_text(sum(x.flops * x.times for x in local), "FLOP"),
    )


def axis_table(cost: Cost) -> Table | None:
    """Collectives per mesh axis and kind; None if there are none."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for x in cost.lines:
        if x.is_communication:
            groups.setdefault(("+".join(x.axes), x.name), []).append(x)
    if not groups:
        return None
    rows = [_axis_row(axes, kind, lines, cost) for (axes, kind), lines in sorted(groups.items())]
    if len(rows) > 1:
        rows.append(_axis_row("all", "", [x for lines in groups.values() for x in lines], cost))
    columns = ("axis", "collective", "messages", "traffic per device", "time", "exposed", "share of step")
    return table("Per axis", columns, rows, range(2, 7), total=len(rows) > 1)


def _axis_row(axes: str, kind: str, lines: Iterable[Line], cost: Cost) -> tuple[str, ...]:
    lines = list(lines)
    exposed = _exposed(lines)
    return (
        axes,
        kind,
        f"{sum(x.times for x in lines):,.6g}",
        bytes_text(sum(x.sent * x.times for x in lines)),
        seconds_text(sum(x.seconds * x.times for x in lines)),
        seconds_text(exposed),
        share_text(exposed, cost.step_seconds),
    )


def overlap_table(found: Evaluation) -> Table | None:
    """What of the communication is hidden, and behind what; None if there is none."""
    from costmodels.pricing.hidden import hidden

    rows = [
        (
            h.purpose,
            seconds_text(h.seconds),
            seconds_text(h.hidden),
            seconds_text(h.exposed),
            h.behind,
            (seconds_text(h.room) if h.room else "") + ("" if h.fits else ": less than is hidden"),
        )
        for h in hidden(found.program, found.cost)
    ]
    columns = ("messages for", "time", "hidden", "exposed", "what runs meanwhile", "which takes")
    return table("Overlap", columns, rows, (1, 2, 3, 5)) if rows else None


def operation_table(cost: Cost, most: int = 12) -> Table:
    """The operations that take the most time; the rest in one row."""
    groups: dict[tuple[str, str, str, str], list[Line]] = {}
    for x in cost.lines:
        groups.setdefault((x.origin.scope, x.name, x.origin.phase, "+".join(x.axes)), []).append(x)
    ranked = sorted(groups.items(), key=lambda item: -_exposed(item[1]))
    rows = [
        _operation_row(f"{scope}/{name}" if scope else name, phase, axes or "compute", lines, cost)
        for (scope, name, phase, axes), lines in ranked[:most]
    ]
    rest = [x for _, lines in ranked[most:] for x in lines]
    if rest:
        rows.append(_operation_row(f"{len(ranked) - most} others", "", "", rest, cost))
    rows.append(_operation_row("step", "", "", cost.lines, cost))
    columns = ("operation", "phase", "on", "runs", "time", "share", "FLOPs", "traffic per device")
    return table("Per operation", columns, rows, range(3, 8), total=True)


def _operation_row(name: str, phase: str, where: str, lines: Sequence[Line], cost: Cost) -> tuple[str, ...]:
    flops, sent = (
        sum(value * x.times for value, x in zip(values, lines, strict=True)) for values in _work(lines)
    )
    return (
        name,
        phase,
        where,
        f"{sum(x.times for x in lines):,.6g}",
        seconds_text(_exposed(lines)),
        share_text(_exposed(lines), cost.step_seconds),
        rate_text(flops, "FLOP") if flops else "",
        bytes_text(sent) if sent else "",
    )


def _work(lines: Sequence[Line]) -> tuple[list[float], list[float]]:
    return [x.flops for x in lines], [x.sent for x in lines]


def memory_table(held: MemoryProfile, most: int = 8) -> Table:
    """What a device holds at the peak, equal tensors together; the rest in one row."""
    groups: dict[tuple[str, str], list[int]] = {}
    for h in held.holdings:
        origin = f"{h.origin.scope or 'model'}, {h.origin.phase}" if h.origin else "between steps"
        groups.setdefault((h.what, origin), []).append(h.bytes)
    ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))
    rows = [_memory_row(what, origin, sizes, held) for (what, origin), sizes in ranked[:most]]
    rest = [size for _, sizes in ranked[most:] for size in sizes]
    if rest:
        rows.append(_memory_row("others", "", rest, held))
    shared = held.peak - sum(h.bytes for h in held.holdings)
    if shared:
        rows.append(_memory_row("of these, a result in the place of its input", "", [shared], held))
    rows.append(("peak", "", "", bytes_text(held.peak), share_text(held.peak, held.peak)))
    columns = ("on every device at the peak", "from", "tensors", "size", "share")
    return table("Memory", columns, rows, (2, 3, 4), total=True)


def _memory_row(what: str, origin: str, sizes: Sequence[int], held: MemoryProfile) -> tuple[str, ...]:
    size = sum(sizes)
    return what, origin, str(len(sizes)), bytes_text(size), share_text(size, held.peak)


def _exposed(lines: Iterable[Line]) -> float:
    return sum(x.exposed * x.times for x in lines)


def line_table(lines: Iterable[CostLine]) -> Table:
    """Every priced line: what runs, how often, how long, and why so long."""
    rows = [
        (
            "/".join(filter(None, (x.scope, " + ".join(x.fused) or x.operation))),
            x.phase,
            f"{x.runs:,g}",
            seconds_text(x.seconds or 0.0),
            x.formula,
        )
        for x in lines
    ]
    return table("Per instruction", ("operation", "phase", "runs", "one takes", "formula"), rows, (2, 3))
