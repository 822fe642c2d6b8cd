"""The rows of every table as plain tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import layout_text, mesh_option
from reports.plan import number
from reports.views import choices, work
from reports.views.dims import dimension_rows
from reports.views.timeline import holdings_at_peak

CellValue = str | float | int | bool | None
RATES = ("mfu", "model_flops", "examples_per_second", "tokens_per_second")


@dataclass(frozen=True)
class DataTable:
    """Column names and rows of as many values."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[CellValue, ...]]


def summary(plan: PlanFile) -> DataTable:
    """(fact, value) pairs; numbers keep their type."""
    p, s = plan.predicted, plan.solver
    facts: list[tuple[str, CellValue]] = [
        ("model", plan.model.name),
        ("fingerprint", plan.model.fingerprint),
        ("parameters", plan.model.parameters or None),
        ("devices", plan.devices),
        ("mesh", mesh_option(plan.mesh)),
        ("layout", layout_text(plan.layout)),
        ("hardware", plan.hardware),
        *plan.listed().items(),
        ("step_seconds", p.step_seconds),
        ("compute_seconds", p.compute_seconds),
        ("communication_seconds", p.communication_seconds),
        ("exposed_communication_seconds", p.exposed_communication_seconds),
        ("peak_memory_bytes", float(p.peak_memory_bytes)),
        ("memory_limit_bytes", plan.memory_limit and float(plan.memory_limit)),
        ("flops_per_device", p.flops_per_device),
        *((name, value) for name in RATES if (value := getattr(p, name)) is not None),
        *(
            (f"communication_bytes_per_device.{axis}", sent)
            for axis, sent in p.communication_bytes_per_device.items()
        ),
    ]
    if s is not None:
        facts += [
            ("solver_status", s.status),
            ("objective", s.objective),
            ("bound", s.bound),
            ("gap", s.gap),
            ("solver_wall_seconds", s.wall_seconds),
            ("layouts_considered", s.layouts_considered),
        ]
    return DataTable(("fact", "value"), facts)


def layouts(plan: PlanFile) -> DataTable:
    """The answer first."""
    out: list[tuple[CellValue, ...]] = []
    for r in choices.ranked(plan):
        p = r.choice.predicted
        prices = (
            (
                p.step_seconds,
                p.compute_seconds,
                p.communication_seconds,
                p.exposed_communication_seconds,
                float(p.peak_memory_bytes),
            )
            if p
            else (None,) * 5
        )
        out.append(
            (
                r.names,
                mesh_option(r.choice.mesh),
                layout_text(r.choice.layout),
                r.choice.in_short(),
                r.choice.feasible,
                (r.choice.reason or ""),
                r.ratio,
                *prices,
            )
        )
    return DataTable(
        (
            "name",
            "mesh",
            "layout",
            "beside",
            "feasible",
            "reason",
            "step_over_answer",
            "step_seconds",
            "compute_seconds",
            "communication_seconds",
            "exposed_communication_seconds",
            "peak_memory_bytes",
        ),
        out,
    )


def dims(plan: PlanFile) -> DataTable:
    """Split dimensions first; a size that the plan does not have is none."""
    out = [(r.name, r.size or None, "+".join(r.axes), r.piece or None) for r in dimension_rows(plan)]
    return DataTable(("dim", "size", "axes", "piece"), out)


def variables(plan: PlanFile) -> DataTable:
    """One row for every variable, ungrouped."""
    out = [
        (
            v.name,
            v.kind,
            v.dtype,
            " ".join(f"{dim}={size}" for dim, size in v.shape),
            " ".join("+".join(axes) or "-" for axes in v.splits),
            "×".join(str(n) for n in v.local_shape(plan.mesh)),
            float(v.bytes),
            float(v.local_bytes),
        )
        for v in plan.details.variables
    ]
    return DataTable(("name", "kind", "dtype", "shape", "splits", "piece", "bytes", "local_bytes"), out)


def operations(plan: PlanFile) -> DataTable:
    """Totals of a step on one device."""
    out = [
        (w.scope, w.op, w.phase, w.runs, w.compute, w.hidden, w.exposed, w.seconds, w.flops, w.bytes)
        for w in work.work(plan)
    ]
    return DataTable(
        (
            "scope",
            "op",
            "phase",
            "runs",
            "compute_seconds",
            "hidden_seconds",
            "exposed_seconds",
            "step_seconds",
            "flops",
            "bytes",
        ),
        out,
    )


def collectives(plan: PlanFile) -> DataTable:
    """The longest exposed first."""
    found = [(w, c) for w in work.work(plan) for c in w.collectives.values()]
    found.sort(key=lambda x: -x[1].exposed)
    out = [
        (w.scope, w.op, w.phase, c.kind, "+".join(c.axes), c.runs, c.seconds, c.exposed, c.sent)
        for w, c in found
    ]
    return DataTable(
        ("scope", "op", "phase", "collective", "axes", "runs", "seconds", "exposed_seconds", "sent_bytes"),
        out,
    )


def time_by_kind(plan: PlanFile) -> DataTable:
    """The answer first."""
    out = [(name, kind, value) for name, s in work.shares(plan).items() for kind, value in s.kinds.items()]
    return DataTable(("layout", "kind", "seconds"), out)


def memory_timeline(plan: PlanFile) -> DataTable:
    """In program order."""
    points = plan.details.memory.points if plan.details.memory else ()
    return DataTable(
        ("position", "scope", "op", "phase", "bytes"),
        [(i, p.scope, p.name, p.phase, float(p.bytes)) for i, p in enumerate(points)],
    )


def peak(plan: PlanFile) -> DataTable:
    """As the plan lists them."""
    held = holdings_at_peak(plan.details.memory) if plan.details.memory else ()
    return DataTable(("what", "scope", "bytes"), [(h.what, h.scope, float(h.bytes)) for h in held])


def frontier(plan: PlanFile) -> DataTable:
    """By memory."""
    out = [
        (
            f.choice.name,
            mesh_option(f.choice.mesh),
            layout_text(f.choice.layout),
            float(f.predicted.peak_memory_bytes),
            f.predicted.step_seconds,
            f.knee,
            f.is_answer,
        )
        for f in choices.frontier(plan)
    ]
    return DataTable(
        ("name", "mesh", "layout", "peak_memory_bytes", "step_seconds", "knee", "this_plan"), out
    )


def sensitivity(plan: PlanFile) -> DataTable:
    """No step time: nothing fits."""
    out = [(s.factor, t.value, t.step_seconds, t.layout) for s in plan.details.sensitivity for t in s.trials]
    return DataTable(("factor", "value", "step_seconds", "layout"), out)


def validation(plan: PlanFile) -> DataTable:
    """Relative error: predicted over measured, minus one."""
    found = plan.details.validation.timed if plan.details.validation else ()
    out = [
        (r.layout, r.predicted_seconds, r.measured_seconds, r.predicted_seconds / r.measured_seconds - 1)
        for r in found
    ]
    return DataTable(("layout", "predicted_seconds", "measured_seconds", "relative_error"), out)


def calibration(plan: PlanFile) -> DataTable:
    """Residual: fitted over measured, minus one."""
    found = plan.details.calibration.samples if plan.details.calibration else ()
    out = [(s.what, float(s.size), s.measured_seconds, s.predicted_seconds, s.residual) for s in found]
    return DataTable(("what", "size", "measured_seconds", "fitted_seconds", "residual"), out)


def assumptions(plan: PlanFile) -> DataTable:
    """Numbers whose source is an assumption are marked."""
    found = plan.details.hardware.numbers if plan.details.hardware else ()
    out = [(n.path, number(n.value), n.unit, n.source, n.date, n.assumed) for n in found]
    return DataTable(("number", "value", "unit", "source", "date", "assumed"), out)
