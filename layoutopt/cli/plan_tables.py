"""A plan as people read it in a terminal: the answer, its proof, its alternatives.

Shows the result of `explain`: the answer, its binding limit, and tables of the value of its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from layoutopt.cli.candidates import show_ways
from layoutopt.cli.cost_tables import overlap_table
from layoutopt.cli.plans import Planned
from layoutopt.cli.terminal import DOUBT, FITS, GOOD, Terminal, facts
from layoutopt.cli.terminal import layout_text as shown
from layoutopt.plan.build import decided
from layoutopt.plan.covered import listed
from layoutopt.plan.machine_details import errors_known, sure
from layoutopt.plan.schema import ANSWER, Alternative
from layoutopt.plan.units import bytes_text, layout_text, seconds_text, share_text, step_change, used_text
from layoutopt.space.objective import Objective
from layoutopt.space.undivided import few
from mesh_tf_core.lower.placement import KEEP
from mesh_tf_core.lower.storage import STAGES
from reports.views import facts as told
from reports.views.curves import factor_value
from reports.views.layouts import frontier, layouts
from reports.views.view import (
    BYTES,
    FLAG,
    NUMBER,
    RULES,
    SECONDS,
    TIMES,
    Cell,
    Column,
    Kind,
    View,
    ViewRow,
    texts,
)

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.analysis.sensitivity import Curves
    from layoutopt.api.explaining import Explained
    from layoutopt.optimize.evaluation.evaluation import Evaluation
    from layoutopt.plan.build import Plan
    from layoutopt.plan.decided import Decided
    from layoutopt.plan.details import Robustness, Trial
    from layoutopt.plan.layout_results import KeptStep, OperationDifference, PartDifference, Placed, Worth
    from layoutopt.space.undivided import Undivided
    from mesh_tf_core.model import Model
    from reports.views.view import View


def show_conditions(terminal: Terminal, plan: Plan, curves: Curves, robust: Robustness) -> None:
    """Prints the best under other conditions, and how robust the answer is."""
    columns = (
        Column("factor", "factor"),
        Column("value", "is", NUMBER),
        Column("step_seconds", "best step", SECONDS),
        Column("ratio", "of the plan's", TIMES),
        Column("layout", "best layout", rank=1),
        Column("proven", "proven", FLAG),
    )
    rows = [_row(plan, curve.factor, t) for curve in curves for t in curve.points]
    terminal.show("", View("Best layouts under other conditions", columns, rows))
    terminal.show("", robust_text(robust))


def _row(plan: Plan, factor: str, t: Trial) -> ViewRow:
    """A condition, what is best under it, and against the plan; where a search was stopped far from
    that, what it knows."""
    from layoutopt.analysis.sensitivity import answer_of

    about = (factor, Cell(factor_value(factor, t.value), value=t.value))
    if t.step_seconds is None and (t.found_seconds is not None or not t.proven):
        least = seconds_text(t.bound) if t.bound else "unknown"
        most = None if t.found_seconds is None else seconds_text(t.found_seconds)
        known = least if most is None else f"{least} to {most}" if t.bound else f"at most {most}"
        return *about, Cell(known), None, "undecided within the time limit", False
    if t.step_seconds is None:
        return *about, Cell("nothing fits"), None, None, True
    best = "; ".join((t.mesh, *t.layout.split(" | ")))
    best = "the same" if t.answer == answer_of(plan) else best.replace("; ", ";").replace(";", "; ")
    return *about, t.step_seconds, t.step_seconds / plan.predicted.step_seconds, best, t.proven


def robust_text(found: Robustness) -> str:
    """Describes how much of the answer's lead remains under the uncertainties of the hardware's numbers."""
    words = told.robust(found)
    nothing = "The numbers of this hardware have no uncertainties, so the robustness of the plan is unknown."
    return f"The answer is {words}." if words else nothing


MORE = Kind(
    lambda value: f"{'+' if value > 0 else '-' if value < 0 else ''}{seconds_text(abs(value))}", adds=True
)
"""Seconds more, or less."""
MOST = 15
"""Rows of numbers that differ."""


def worth_table(title: str, evaluation: Evaluation, memory: bool, answers: list[Worth], best: str) -> View:
    """The table of the step, or the memory, under each condition, the most costly first.

    Args:
      memory: whether bytes are compared, not seconds.
      best: which condition, e.g. "without it".
    """
    now = evaluation.memory.peak if memory else evaluation.cost.step_seconds
    kind = BYTES if memory else SECONDS
    columns = (
        Column("rule", "rule"),
        Column("best", f"{'least memory' if memory else 'best step'} {best}", kind),
        Column("costs", "costs", kind),
        Column("layout", "layout", rank=1),
        Column("proven", "proven", FLAG),
    )

    def row(a: Worth, value: float | None) -> ViewRow:
        if value is None:
            return a.rule, Cell("no layout" if a.proven else "unknown"), None, a.reason, a.proven
        extra, most = max(value - now, 0), "" if a.proven else "at most "
        found = Cell(f"{most}{kind.say(value)}", value=value)
        costs = Cell(f"{most}{kind.say(extra)} ({share_text(extra, now)})", value=extra)
        return a.rule, found, costs, RULES.say(a.layout), a.proven

    found = [(a, a.peak_bytes if memory else a.step_seconds) for a in answers]
    found.sort(key=lambda pair: -(math.inf if pair[1] is None else pair[1]))
    return View(title, columns, [row(a, value) for a, value in found])


def kept_table(evaluation: Evaluation, fits: Fits, found: list[KeptStep]) -> View:
    """The table of the step if recomputed loops keep more, or less."""
    step = evaluation.cost.step_seconds
    columns = (
        *texts("loop", change="keeps"),
        Column("step_seconds", "step", SECONDS),
        Column("more_seconds", "more", MORE),
        Column("peak_bytes", "memory", BYTES),
        Column("fits", "fits"),
    )
    rows = [
        (k.loop, k.change, k.step_seconds, k.step_seconds - step, k.peak_bytes, fits(k.peak_bytes))
        for k in found
    ]
    return View("Saved values of recomputed layers", columns, rows)


def placement_table(found: Sequence[Placed]) -> View:
    """The table of placements, except values that stay on the devices with the layout's splits."""
    from layoutopt.analysis.placed import plain

    columns = (
        Column("values", "values", short=True),
        Column("phase", "phase", short=True),
        Column("names", "of", rank=1),
        *texts(further="split further over", memory="memory"),
        Column("dtype", "dtype", rank=2),
        Column("again", "read again by"),
        Column("bytes", "bytes", BYTES),
    )

    def row(p: Placed) -> ViewRow:
        again = "" if p.again == KEEP else f"{p.again}, keeping {'+'.join(p.keep)}" if p.keep else p.again
        place = "host" if p.host else "device"
        return p.values, p.phase, few(p.names), "+".join(p.further), place, p.dtype, again, p.bytes

    return View("Placement of values", columns, [row(each) for each in found if not plain(each)])


def show_against(terminal: Terminal, found: Explained, other: Evaluation) -> None:
    """Prints which of another layout and the plan is faster, and where their steps differ."""
    evaluation = found.evaluation
    ours, theirs = evaluation.cost.step_seconds, other.cost.step_seconds
    said = decided(other.decided, other.layout).in_short()
    mesh = other.program.mesh
    words = shown(other.layout) + (f"; {said}" if said else "")
    words += "" if mesh == evaluation.program.mesh else f" on {mesh}"
    terminal.show(
        "",
        f"{words}: the plan's step is {step_change(ours, theirs)} ({seconds_text(ours)}, this layout's "
        f"{seconds_text(theirs)}); memory {bytes_text(evaluation.memory.peak)}, this layout's "
        f"{bytes_text(other.memory.peak)}",
    )
    if (alike := found.alike) is not None:
        step, peak = seconds_text(alike.cost.step_seconds), bytes_text(alike.memory.peak)
        own = found.plan.data.in_short()
        terminal.show(f"this layout with the plan's {own}: {step} a step, {peak} of memory")
    seconds = (
        Column("plan_seconds", "the plan", SECONDS),
        Column("other_seconds", "the other", SECONDS),
        Column("saved_seconds", "saved", MORE),
    )

    def both(d: PartDifference | OperationDifference) -> tuple[float, float, float]:
        here, there = d.plan_seconds or 0.0, d.other_seconds or 0.0
        return here, there, there - here

    parts = View("Parts of the step", (*texts("part"), *seconds), [(d.part, *both(d)) for d in found.parts])
    terminal.show("", parts.and_sum("step", ours, theirs, theirs - ours))
    cells = [
        ("/".join(filter(None, (d.scope, d.operation))), d.phase, d.axes or "compute", *both(d))
        for d in found.differences
    ]
    columns = (*texts("operation", "phase", axes="on"), *seconds)
    made = View("Differences per operation", columns, cells).first(MOST)
    terminal.show("", made.and_sum("step", None, None, ours, theirs, theirs - ours))


def show_explained(terminal: Terminal, planned: Planned, found: Explained) -> None:
    """Shows all that `explain` found."""
    from layoutopt.api.explaining import peak_text

    evaluation, own, limit = found.evaluation, found.plan.data, planned.limit
    said = "; ".join(found.disagreements)
    checks = [("checked", said or "predicted again from the model: the same")]
    if (proof := found.proof) is not None:
        checks += [("recheck", proof.words), ("allowed", proof.allowed or "what is usual")]
    held = [("idle", evaluation.waits)] * bool(evaluation.waits)
    held += [("peak", peak_text(evaluation.memory)), ("binds", _binds(found))]
    known = evaluation.known
    fits = partial(known.fits, limit=limit, usable=found.hardware.usable_memory_bytes)
    rows = [*summary(found.plan, fits, limit, sure(found.hardware, known)), *checks, *held]
    terminal.show(facts(rows, verdicts(found.plan, fits)))
    if evaluation.slots:
        terminal.show("", "Slots of the stages: F forward, B backward, W gradients of weights")
        terminal.show_whole(*evaluation.slots)
    worths = (
        ("What each split is worth", found.splits, "without it"),
        ("What each pin costs", found.pins, "with it"),
        ("What each decision is worth", found.decisions, "without it"),
    )
    among = ", among the usual kinds and the plan's" * bool(found.plan.question.first)
    for title, answers, best in worths:
        if answers or answers is found.splits:
            terminal.show("", worth_table(title + among, evaluation, found.for_memory, [*answers], best))
    if (placement := placement_table(found.placed)).rows:
        terminal.show("", placement)
    if found.kept:
        terminal.show("", kept_table(evaluation, fits, [*found.kept]))
    if found.against is not None:
        show_against(terminal, found, found.against)
    if (overlap := overlap_table(evaluation)) is not None:
        terminal.show("", overlap)
    if found.robust is not None:
        show_conditions(terminal, found.plan, found.curves, found.robust)
    show_ways(terminal, found.plan)
    if own.space is not None and own.space.not_looked_at:
        left = listed(own.space.not_looked_at)
        terminal.show("", View("Not searched", texts("choices", "searched with"), left))
    chips, doubt = found.hardware.chips_note(evaluation.program.mesh.devices), evaluation.doubt(limit)
    whole = map(str, _whole(planned, evaluation))
    for note in filter(None, (chips, *planned.loaded.model.notes(found.plan.options), *whole, doubt)):
        terminal.show("", f"note: {note}")


def _binds(found: Explained) -> str:
    """Whether the memory limit keeps a faster layout away."""
    step, free = found.evaluation.cost.step_seconds, found.limit
    room = bytes_text(found.memory - found.evaluation.memory.peak)
    if free is None:
        return f"not the memory limit ({room} are free): the search minimised memory"
    if not free.proven and (free.step_seconds is None or free.step_seconds >= step):
        return f"unknown: {room} are free, but the time limit was reached before a search with more memory"
    if not found.binds or free.step_seconds is None:
        return f"not the memory limit: {room} are free, and no layout with more memory is faster"
    return (
        f"the memory limit: with more than {bytes_text(found.memory)}, {RULES.say(free.layout)} "
        f"would take {seconds_text(free.step_seconds)} ({share_text(step - free.step_seconds, step)} less)"
    )


def _whole(found: Planned, evaluation: Evaluation) -> tuple[Undivided, ...]:
    """Variables that the plan's search could not store split."""
    stages = [stage for stage in STAGES[1:] if stage in found.plan.allowed.storage]
    return evaluation.left_whole(stages[-1]) if stages else ()


Fits = Callable[[float], str]
"""fits(peak memory) -> 'yes', 'barely' or 'no'."""
FitOf = Callable[[Alternative], str]


def show_plan(terminal: Terminal, plan: Plan, limit: int, machine: Hardware) -> None:
    """Prints a plan; `limit` is the memory of a device that it was searched for, on this machine."""
    assert plan.model is not None
    known = errors_known(machine, plan.model, plan.data.pipeline)
    fits = partial(known.fits, limit=limit, usable=machine.usable_memory_bytes)
    answer = facts(summary(plan, fits, limit, sure(machine, known)), verdicts(plan, fits))
    fit: FitOf = partial(Alternative.fit, known=known, limit=limit)
    terminal.show(answer, "", alternatives_table(plan, fit))
    if plan.data.frontier:
        terminal.show("", frontier(plan.data, fit))
    reasons = [(a.name, a.reason) for a in plan.alternatives if a.reason is not None]
    if reasons:
        terminal.show("", facts(reasons))
    for note in plan.data.notes:
        terminal.show("", f"note: {note}")


def summary(plan: Plan, fits: Fits, limit: int, behind: str) -> list[tuple[str, str]]:
    """Names and values of the answer; `behind`: the source of its numbers."""
    p = plan.predicted
    peak = p.peak_memory_bytes
    return [
        *told.model(plan.data.model),
        ("mesh", f"{plan.mesh} ({plan.mesh.devices} devices)"),
        ("layout", RULES.say(layout_text(plan.data.layout))),
        *([("parallel", told.forms(plan.data.details.parallelism))] if plan.data.details.parallelism else []),
        *decided_rows(plan.data, plan.model),
        ("hardware", plan.data.hardware),
        ("framework", plan.data.framework or "layoutopt"),
        *told.costs(plan.data),
        ("memory", f"{used_text(peak, limit)} per device{', barely fits' * (fits(peak) == 'barely')}"),
        *([("host", p.host)] if p.host else []),
        ("accuracy", behind),
        ("proof", str(told.proof(plan.data, ""))),
        *told.searched(plan.data),
        *told.left(plan.data),
    ]


def verdicts(plan: Plan, fits: Fits) -> dict[str, str]:
    """The colours of proven and feasible results."""
    memory = FITS[fits(plan.predicted.peak_memory_bytes)]
    return {"proof": GOOD if plan.solver.proven else DOUBT, "memory": memory}


def decided_rows(said: Decided, model: Model | None) -> list[tuple[str, str]]:
    """Rows of the decisions besides the layout, and of variables that keep the layout's storage although
    others do not."""
    found = said.listed()
    known = model.graph.variables.items() if model is not None and said.storage else ()
    whole = [name for name, v in known if (v.trainable or v.own_storage) and name not in said.storage]
    if whole:
        found["storage"] += f"; layout: {few(whole)}"
    return [(name, words) for name, words in found.items() if words]


def alternatives_table(plan: Plan, fit: FitOf | None = None) -> View:
    """The answer and every alternative with the same numbers, the best by the objective first."""
    return layouts(plan.data, fit, ANSWER, plan.question.objective == Objective.MEMORY)
