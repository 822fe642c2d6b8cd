"""The tables of a plan, each one view: terminals, pages and data files show the same rows."""

from __future__ import annotations

from collections.abc import Mapping

from layoutopt.plan.details import MemoryTimeline
from layoutopt.plan.evidence import Sample, typical
from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    bytes_text,
    count,
    digits,
    layout_text,
    mesh_option,
    percent,
    plural,
    rate_text,
    seconds_text,
    signed_percent,
    some,
)
from reports.plan import dims_on, lies_on, number, number_text
from reports.theme import axis_token
from reports.views import work
from reports.views.curves import factor_value, layout_letters
from reports.views.layouts import chips, data
from reports.views.timeline import holdings_at_peak, phases
from reports.views.variables import dimension_rows, grouped, piece_shares, shape_text, split_text
from reports.views.view import (
    BYTES,
    ERROR,
    FLAG,
    NUMBER,
    RULES,
    SECONDS,
    WHOLE,
    Cell,
    CellValue,
    Column,
    Kind,
    View,
    ViewRow,
)

RATES = ("mfu", "model_flops", "examples_per_second", "tokens_per_second")
DIFFERENCE = Kind(signed_percent)


def summary(plan: PlanFile) -> View:
    """The answer and its cost, a row per fact; numbers keep their type."""
    p, s = plan.predicted, plan.solver
    facts: list[tuple[str, CellValue]] = [
        ("model", plan.model.name),
        ("fingerprint", plan.model.fingerprint),
        ("parameters", plan.model.parameters or None),
        ("devices", plan.devices),
        ("mesh", mesh_option(plan.mesh)),
        ("layout", layout_text(plan.layout)),
        ("hardware", plan.hardware),
        *([("framework", plan.framework)] if plan.framework else []),
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
    return View("The plan", data("fact", "value"), facts, "summary")


def dims(plan: PlanFile) -> View:
    """Dimensions against mesh axes, split ones first; a size that is missing from the plan is None."""
    names = [*plan.mesh]
    found = dimension_rows(plan)
    axes = [Column(f"on_{n}", f"{n} {plan.mesh[n]}", named=True, on="page") for n in names]
    columns = (
        Column("dim", "dimension", lead=True),
        Column("size", "size", WHOLE),
        Column("axes", "axes", on="data"),
        *axes,
        Column("piece", "on a device", WHOLE),
    )
    rows = [
        (
            Cell(strong=bool(r.axes), value=r.name),
            *(r.size or None, "+".join(r.axes)),
            *(Cell("split", fill=axis_token(a, names)) if a in r.axes else Cell() for a in names),
            r.piece or None,
        )
        for r in found
    ]
    longest = max([len(axis.head) for axis in axes] + [len(r.name) // 2 for r in found] + [0])
    compact = len(names) <= 3 and longest <= 10
    return View("Dimensions and mesh axes", columns, rows, "dims", shown=24, compact=compact)


def variables(plan: PlanFile) -> View:
    """Every variable and the piece that a device holds."""
    keys = data("name", "kind", "dtype", "shape", "splits", "piece", "bytes", "local_bytes")
    rows = [
        (
            *(v.name, v.kind, v.dtype),
            " ".join(f"{dim}={size}" for dim, size in v.shape),
            " ".join("+".join(axes) or "-" for axes in v.splits),
            "×".join(str(n) for n in v.local_shape(plan.mesh)),
            *(float(v.bytes), float(v.local_bytes)),
        )
        for v in plan.details.variables
    ]
    return View("Variables", keys, rows, "variables")


def variable_groups(plan: PlanFile) -> View:
    """Variables and the shard of each on a device; equal variables share one row."""
    columns = (
        Column("picture", "piece", on="page"),
        Column("name", "variable", lead=True, share="24%"),
        Column("shape", "shape and split"),
        Column("piece", "piece's shape"),
        Column("local_bytes", "bytes per device", BYTES),
    )
    rows = [
        (
            Cell(piece=piece_shares(v, plan)),
            Cell(
                v.name,
                f"{f'{v.alike} equal variables, ' if v.alike > 1 else ''}{v.kind}, {v.dtype}",
                strong=True,
            ),
            Cell(shape_text(v), split_text(v)),
            " × ".join(f"{n:,}" for n in v.local_shape(plan.mesh)) or "scalar",
            Cell(sub=f"of {bytes_text(v.bytes * v.alike)}", value=v.local_bytes * v.alike),
        )
        for v in grouped(plan)
    ]
    return View("Variables and the shard on one device", columns, rows, "variables", shown=8)


def operations(plan: PlanFile) -> View:
    """Operations by the time they add to the step on one device, with the collectives that each causes."""
    columns = (
        Column("name", "operation", lead=True, share="28%", on="page"),
        *data("scope", "op", "phase", "runs", "compute_seconds", "hidden_seconds", "exposed_seconds"),
        Column("step_seconds", "adds to the step", SECONDS),
        *data("flops", "bytes"),
        Column("work", "work", on="page", share="15%"),
        Column("collectives", "collectives", on="page"),
    )
    found = work.work(plan)
    longest = found[0].seconds if found and found[0].seconds else 1.0
    total = plan.predicted.step_seconds or sum(w.seconds for w in found) or 1.0

    def row(w: work.OperationWork) -> ViewRow:
        bars = ((w.compute / longest, "compute"), (w.exposed / longest, "exposed"))
        runs = f"{count(w.runs)} runs" if w.runs > 1 else ""
        busy = ", ".join(filter(None, (runs, rate_text(w.flops, "FLOP") if w.flops else "")))
        return (
            Cell(w.name, w.phase, strong=True, more=_opened(w, plan.details.sources)),
            *(w.scope, w.op, w.phase, w.runs, w.compute, w.hidden, w.exposed),
            Cell(sub=percent(w.seconds / total), bars=bars, value=w.seconds),
            *(w.flops, w.bytes, busy, "; ".join(_sent(c) for c in w.collectives.values())),
        )

    return View("Slowest operations", columns, [row(w) for w in found], "operations", shown=12)


def _opened(w: work.OperationWork, sources: Mapping[str, str]) -> tuple[str, ...]:
    """What is folded away under an operation: where the model writes it, and its work."""
    code = sources.get(w.place, "").replace("`", "'")
    found = [f"{w.place}: `{code}`" if code else w.place] if w.place else []
    parts = (("compute", w.compute), ("exposed", w.exposed), ("hidden", w.hidden))
    found.append(", ".join(f"{name} {seconds_text(value)}" for name, value in parts))
    if w.flops or w.bytes:
        intensity = f", {digits(w.flops / w.bytes)} FLOP per byte" if w.flops and w.bytes else ""
        found.append(f"{rate_text(w.flops, 'FLOP')} and {bytes_text(w.bytes)} read or written{intensity}")
    return tuple(found)


def _sent(c: work.CollectiveWork) -> str:
    exposed = f"{seconds_text(c.seconds)}, of which {seconds_text(c.exposed)} exposed"
    return f"{c.name}: {bytes_text(c.sent)} in {plural(round(c.runs), 'run')}, {exposed}"


def collectives(plan: PlanFile) -> View:
    """Collectives with the operation that causes them, the longest exposed first."""
    found = [(w, c) for w in work.work(plan) for c in w.collectives.values()]
    found.sort(key=lambda x: -x[1].exposed)
    keys = data(
        "scope", "op", "phase", "collective", "axes", "runs", "seconds", "exposed_seconds", "sent_bytes"
    )
    rows = [
        (w.scope, w.op, w.phase, c.kind, "+".join(c.axes), c.runs, c.seconds, c.exposed, c.sent)
        for w, c in found
    ]
    return View("Collectives", keys, rows, "collectives")


def time_by_kind(plan: PlanFile) -> View:
    """Seconds by kind of work, a row per layout and kind, the answer first."""
    rows = [(name, kind, value) for name, s in work.shares(plan).items() for kind, value in s.kinds.items()]
    columns = (*data("layout", "kind"), Column("seconds", "seconds", SECONDS, on="data"))
    return View("Time by kind of work", columns, rows, "time_by_kind")


def memory_timeline(plan: PlanFile) -> View:
    """Bytes held at every instruction, in program order."""
    points = plan.details.memory.points if plan.details.memory else ()
    rows = [(i, p.scope, p.name, p.phase, float(p.bytes)) for i, p in enumerate(points)]
    return View("Memory", data("position", "scope", "op", "phase", "bytes"), rows, "memory_timeline")


def memory_phases(plan: PlanFile) -> View:
    """The most memory of each phase of the step."""
    found = plan.details.memory or MemoryTimeline()
    columns = (Column("phase", "phase"), Column("bytes", "at most", BYTES))
    rows = [(p.name, max(x.bytes for x in found.points[p.start : p.end])) for p in phases(found)]
    return View("Memory during the step", columns, rows)


def slots(plan: PlanFile) -> View:
    """The slots of each pipeline stage over time."""
    head = "slots (F forward, B backward, W gradients of weights)"
    columns = (Column("stage", "stage", WHOLE, lead=True), Column("slots", head))
    found = [(i + 1, Cell(line, code=True)) for i, line in enumerate(plan.details.slots)]
    return View("Slots of the stages", columns, found, fixed=True)


def peak(plan: PlanFile) -> View:
    """Tensors held at the peak of memory, the largest first."""
    found = plan.details.memory
    held = holdings_at_peak(found) if found else ()
    most = found.points[found.peak].bytes if found and found.points else 0.0
    columns = (
        Column("what", "tensor at the peak", lead=True),
        Column("scope", "where", under="what"),
        Column("bytes", "bytes", BYTES),
        Column("share", "share", ERROR, on="terminal, page"),
    )
    rows = [
        (Cell(h.name, value=h.what), h.scope, float(h.bytes), h.bytes / most if most else None) for h in held
    ]
    folded = f"All {sum(h.alike for h in held):,} tensors in memory at the peak"
    return View("Tensors in memory at the peak", columns, rows, "peak", folded=folded)


def sensitivity(plan: PlanFile) -> View:
    """The best step time as one factor changes; none where nothing fits."""
    seconds = Column("step_seconds", "best step", SECONDS, on="data")
    columns = (*data("factor", "value"), seconds, *data("layout"))
    rows = [
        (s.factor, Cell(factor_value(s.factor, t.value), value=t.value), t.step_seconds, t.layout)
        for s in plan.details.sensitivity
        for t in s.trials
    ]
    return View("Sensitivity", columns, rows, "sensitivity")


def validation(plan: PlanFile) -> View:
    """Predicted and measured seconds by layout, the fastest first.

    The error is predicted over measured, minus one.
    """
    found = plan.details.validation.timed if plan.details.validation else ()
    columns = (
        Column("layout", "layout", RULES, lead=True),
        Column("predicted_seconds", "predicted", SECONDS),
        Column("measured_seconds", "measured", SECONDS),
        Column("relative_error", "error", DIFFERENCE),
    )
    rows = [
        (r.layout, r.predicted_seconds, r.measured_seconds, r.predicted_seconds / r.measured_seconds - 1)
        for r in sorted(found, key=lambda r: r.measured_seconds)
    ]
    return View("Predicted and measured step times", columns, rows, "validation", shown=8)


def calibration(plan: PlanFile) -> View:
    """Measurements of the calibration with their fit; the residual is fitted over measured, minus one."""
    found = plan.details.calibration.samples if plan.details.calibration else ()
    rows = [(s.what, float(s.size), s.measured_seconds, s.predicted_seconds, s.residual) for s in found]
    keys = data("what", "size", "measured_seconds", "fitted_seconds", "residual")
    return View("Calibration", keys, rows, "calibration")


def calibration_groups(plan: PlanFile) -> list[tuple[str, list[Sample]]]:
    """Measurements by what was run: what the fit had not seen, then those with the most samples."""
    found: dict[str, list[Sample]] = {}
    for sample in plan.details.calibration.samples if plan.details.calibration else ():
        found.setdefault(sample.what, []).append(sample)
    return sorted(found.items(), key=lambda g: (not g[1][0].held_out, -len(g[1])))


def calibration_kinds(plan: PlanFile) -> View:
    """The typical error of the fit for each kind of measurement."""
    columns = (*data("what", "measurements"), Column("error", "median error", ERROR))
    rows = [(what, len(each), typical(each)) for what, each in calibration_groups(plan)]
    return View("Calibration", columns, rows)


def fitted(plan: PlanFile) -> View:
    """The fitted numbers of the calibration."""
    found = plan.details.calibration.fit if plan.details.calibration else ()
    columns = (Column("name", "fitted number", lead=True), Column("value", "value", NUMBER))
    rows = [(f.name, Cell(number_text(f.value, f.unit), value=number(f.value))) for f in found]
    return View("Fitted numbers", columns, rows)


def assumptions(plan: PlanFile) -> View:
    """Every hardware number with its source and date; assumptions first, because they are the least
    certain."""
    found = plan.details.hardware.numbers if plan.details.hardware else ()
    columns = (
        Column("number", "number", lead=True, share="26%"),
        Column("value", "value", NUMBER),
        Column("unit", "unit", on="data"),
        Column("source", "source"),
        Column("date", "date", under="source"),
        Column("assumed", "assumed", FLAG, on="data"),
    )
    rows = [
        (
            n.path,
            Cell(number_text(n.value, n.unit), value=number(n.value)),
            n.unit,
            Cell(state="warn" if n.assumed else "", value=n.source),
            n.date,
            n.assumed,
        )
        for n in sorted(found, key=lambda n: not n.assumed)
    ]
    return View("Hardware numbers and their sources", columns, rows, "assumptions")


def axes(plan: PlanFile) -> View:
    """The mesh's axes with the dimensions on them, and the bytes that a device sends over each."""
    columns = (
        Column("axis", "axis", lead=True),
        Column("size", "size", WHOLE),
        Column("dims", "dimensions split over it"),
        Column("sent_bytes", "bytes sent per device and step", BYTES),
    )
    sent = plan.predicted.communication_bytes_per_device
    rows: list[ViewRow] = [
        (
            Cell(chips=chips([axis], plan.mesh), sub=lies_on(plan, axis), value=axis),
            size,
            some(dims_on(plan, axis), 24, 80) or "nothing",
            sent.get(axis) or None,
        )
        for axis, size in plan.mesh.items()
    ]
    rows += [
        (Cell(chips=chips(key.split("+"), plan.mesh), value=key), None, "together", value)
        for key, value in sent.items()
        if key not in plan.mesh and value
    ]
    return View("Axes of the mesh", columns, rows, shown=12)


def curve_layouts(plan: PlanFile) -> View:
    """The layouts behind the letters of the sensitivity curves, and where each is best."""

    def best_at(layout: str) -> str:
        found = []
        for s in plan.details.sensitivity:
            trials = (t for t in s.trials if t.layout == layout and t.step_seconds is not None)
            values = [factor_value(s.factor, t.value) for t in trials]
            if values:
                found.append(f"{s.factor} {values[0]}" + (f" to {values[-1]}" if len(values) > 1 else ""))
        return "; ".join(found)

    columns = (
        Column("mark", "mark", lead=True),
        Column("layout", "layout", RULES),
        Column("best_at", "best at"),
    )
    rows = [
        (Cell(mark, strong=True, value=mark), layout, best_at(layout))
        for layout, mark in layout_letters(plan).items()
    ]
    return View("Layouts of the curves", columns, rows, shown=8)
