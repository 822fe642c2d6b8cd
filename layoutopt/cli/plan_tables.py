"""A plan as people read it in a terminal: the answer, its proof, the alternatives beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from layoutopt.cli.terminal import Terminal, facts, table
from layoutopt.cli.units import bytes_text, duration_text, rate_text, seconds_text

if TYPE_CHECKING:
    from layoutopt.plan import Alternative, Plan, Predicted

ANSWER = "the answer"


def show_plan(terminal: Terminal, plan: Plan, limit: int | None = None) -> None:
    """Prints a plan; `limit` is the memory of a device that it was searched for."""
    terminal.show(facts(summary(plan, limit)), "", alternatives_table(plan))
    if plan.data.frontier:
        terminal.show("", frontier_table(plan.data.frontier))
    for alternative in plan.alternatives:
        if alternative.reason is not None:
            terminal.show("", f"{alternative.name}: {alternative.reason}")
    for note in plan.data.notes:
        terminal.show("", f"note: {note}")


def summary(plan: Plan, limit: int | None = None) -> list[tuple[str, str]]:
    """Names and values of the answer."""
    info, p = plan.data.model, plan.predicted
    of = "" if limit is None else f" of {bytes_text(limit)}"
    sent = ", ".join(f"{axes} {bytes_text(n)}" for axes, n in p.communication_bytes_per_device.items() if n)
    return [
        ("model", f"{info.name}, {info.parameters:,} parameters"),
        ("mesh", f"{plan.mesh} ({plan.mesh.devices} devices)"),
        ("layout", rules_text(plan.data.layout)),
        ("hardware", plan.data.hardware),
        (
            "step",
            f"{seconds_text(p.step_seconds)} predicted = {seconds_text(p.compute_seconds)} compute + "
            f"{seconds_text(p.exposed_communication_seconds)} exposed communication",
        ),
        ("work", f"{rate_text(p.flops_per_device, 'FLOP')} per device"),
        ("sent", f"per device: {sent}" if sent else "nothing"),
        ("memory", f"{bytes_text(p.peak_memory_bytes)}{of} per device"),
        ("proof", proof(plan)),
    ]


def proof(plan: Plan) -> str:
    """What is proven about the answer."""
    s = plan.solver
    spent = f"{s.layouts_considered} layouts, {duration_text(s.wall_seconds)}"
    if s.status == "OPTIMAL":
        return f"optimal: no layout is better (gap {100 * s.gap:.2g}%; {spent})"
    return f"not proven: at most {100 * s.gap:.2g}% from the best ({s.status}; {spent})"


def rules_text(layout: Mapping[str, Sequence[str]]) -> str:
    """A layout's string form; says so if nothing is split."""
    return ";".join(f"{name}:{'+'.join(axes)}" for name, axes in layout.items() if axes) or "nothing is split"


def alternatives_table(plan: Plan) -> Table:
    """The answer and every alternative on the same numbers, the fastest first."""
    own = plan.predicted.step_seconds
    ranked = sorted(
        plan.alternatives, key=lambda a: a.predicted.step_seconds if a.predicted else float("inf")
    )
    same_mesh = all(a.mesh == plan.data.mesh for a in ranked)
    rows = [_row(ANSWER, plan.data.mesh, plan.data.layout, plan.predicted, own, "yes", same_mesh)]
    rows += [_row(a.name, a.mesh, a.layout, a.predicted, own, _fits(a), same_mesh) for a in ranked]
    columns = ["layout", *([] if same_mesh else ["mesh"]), "splits"]
    columns += ["step", "of the answer's", "compute", "exposed", "memory", "fits"]
    first = 2 if same_mesh else 3
    return table("Beside it", columns, rows, range(first, first + 5))


def frontier_table(points: Sequence[Alternative]) -> Table:
    """Time against memory: what every byte less costs."""
    fastest = min((a.predicted.step_seconds for a in points if a.predicted), default=0.0)
    same_mesh = len({tuple(a.mesh.items()) for a in points}) == 1
    rows = [_row(a.name, a.mesh, a.layout, a.predicted, fastest, _fits(a), same_mesh) for a in points]
    columns = ["point", *([] if same_mesh else ["mesh"]), "splits"]
    columns += ["step", "of the fastest", "compute", "exposed", "memory", "fits"]
    first = 2 if same_mesh else 3
    return table("Frontier of time and memory", columns, rows, range(first, first + 5))


def _fits(alternative: Alternative) -> str:
    if alternative.predicted is None:
        return "not legal"
    return "yes" if alternative.feasible else "no"


def _row(
    name: str,
    mesh: Mapping[str, int],
    layout: Mapping[str, Sequence[str]],
    predicted: Predicted | None,
    reference: float,
    fits: str,
    same_mesh: bool,
) -> tuple[str, ...]:
    where = () if same_mesh else (";".join(f"{axis}:{size}" for axis, size in mesh.items()),)
    if predicted is None:
        return (name, *where, rules_text(layout), "", "", "", "", "", fits)
    return (
        name,
        *where,
        rules_text(layout),
        seconds_text(predicted.step_seconds),
        f"{predicted.step_seconds / reference:.2f}×" if reference else "",
        seconds_text(predicted.compute_seconds),
        seconds_text(predicted.exposed_communication_seconds),
        bytes_text(predicted.peak_memory_bytes),
        fits,
    )
