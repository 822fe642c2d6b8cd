"""Several plans side by side: one row per fact, what differs from the first plan marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    against,
    count,
    flops,
    layout_text,
    letter,
    memory,
    mesh_text,
    plural,
    seconds,
    shorten,
    signed_percent,
    some,
    throughput_text,
)
from reports.figures.pieces import piece_shares
from reports.figures.plans import plans_memory, plans_time, tell_plans_memory, tell_plans_time
from reports.page.answers import fit, proof, sureness
from reports.page.cells import Cell, Column, PageBlock, PageTable, chips
from reports.plan import one_model, words
from reports.svg import figure_svg
from reports.views.dims import DimensionRow, dimension_rows
from reports.views.variables import grouped, shape_text, split_text

LONGEST = 400
SHOWN = 3
"""Hyperparameters in a sentence."""


def verdict(plans: Sequence[PlanFile]) -> str:
    """Which plan is fastest, and by how much; of plans whose steps differ, what differs."""
    if not one_model(plans):
        return _unlike(plans)
    usable = [(p.predicted.step_seconds, i) for i, p in enumerate(plans) if p.fits is not False]
    if not usable:
        return "None of these plans fits in memory."
    usable.sort()
    (best, first), others = usable[0], usable[1:]
    text = f"Plan {letter(first)} is the fastest that fits: {seconds(best)} per step"
    if others and best > 0:
        time, second = others[0]
        if time / best < 1.0005:
            return f"Plans {letter(first)} and {letter(second)} are equally fast: {seconds(best)} per step."
        return f"{text}; plan {letter(second)} takes {signed_percent(time / best - 1).lstrip('+')} longer."
    return f"{text}."


def _unlike(plans: Sequence[PlanFile]) -> str:
    """What makes steps of plans differ; of one model with other batches or the like, which learns fastest."""
    names, sizes = {p.model.name for p in plans}, {p.model.parameters for p in plans}
    said = _different(plans)
    if len(names) > 1 or not said:
        return "These plans are for different models: their step times do not compare."
    text = f"These plans differ in {some(said, SHOWN, 80)}: their step times do not compare."
    rates = [(p.predicted.tokens_per_second, i) for i, p in enumerate(plans) if p.fits is not False]
    known = [(rate, i) for rate, i in rates if rate]
    if len(sizes) > 1 or len(known) < len(rates) or len(known) < 2:
        return text
    rate, best = max(known)
    most = throughput_text(rate, "tokens")
    return f"{text} Plan {letter(best)} takes the most tokens of those that fit: {most}."


def _different(plans: Sequence[PlanFile]) -> list[str]:
    """Hyperparameters that are not the same in all plans: 'batch (A 16, B 32)'."""
    known = dict.fromkeys(name for p in plans for name in p.model.hparams)
    values = {name: [words(p.model.hparams.get(name, "–")) for p in plans] for name in known}
    return [
        f"{name} ({', '.join(f'{letter(i)} {value}' for i, value in enumerate(each))})"
        for name, each in values.items()
        if len(set(each)) > 1
    ]


def facts(plans: Sequence[PlanFile]) -> PageTable:
    """The table of the first screen."""
    rows = [
        _row(
            "Step time",
            plans,
            lambda p: seconds(p.predicted.step_seconds),
            lambda p: p.predicted.step_seconds,
        ),
        _row(
            "Compute",
            plans,
            lambda p: seconds(p.predicted.compute_seconds),
            lambda p: p.predicted.compute_seconds,
        ),
        _row(
            "Exposed communication",
            plans,
            lambda p: seconds(p.predicted.exposed_communication_seconds),
            lambda p: p.predicted.exposed_communication_seconds,
        ),
        _row(
            "Hidden communication",
            plans,
            lambda p: seconds(p.predicted.hidden_seconds),
            lambda p: p.predicted.hidden_seconds,
        ),
        _row(
            "Peak memory",
            plans,
            lambda p: memory(p.predicted.peak_memory_bytes),
            lambda p: p.predicted.peak_memory_bytes,
        ),
        _rated("Fits", plans, lambda p: (fit(p).value if p.memory_limit else "limit unknown", fit(p).state)),
        _rated("How sure", plans, lambda p: (sureness(p).value, sureness(p).state)),
        _rated("Proven", plans, lambda p: (proof(p).value, proof(p).state)),
        _row("Mesh", plans, lambda p: mesh_text(p.mesh)),
        _row("Layout", plans, lambda p: layout_text(p.layout).replace(";", "; ") or "replicated"),
        _row("Hardware", plans, lambda p: p.hardware),
        _row("Devices", plans, lambda p: count(p.devices)),
        _row("Traffic per device", plans, lambda p: memory(_sent(p)), _sent),
        _row(
            "FLOPs per device",
            plans,
            lambda p: flops(p.predicted.flops_per_device),
            lambda p: p.predicted.flops_per_device,
        ),
        *(
            [_row("Speed", plans, lambda p: p.predicted.speed or "–")]
            if any(p.predicted.speed for p in plans)
            else []
        ),
        *(
            [_row("Per chip", plans, lambda p: p.predicted.chip_speed or "–")]
            if any(p.predicted.chip_speed for p in plans)
            else []
        ),
        *(
            [_row("Training", plans, lambda p: p.training.words if p.training else "–")]
            if any(p.training for p in plans)
            else []
        ),
        *(_row(name.capitalize(), plans, _decision(name)) for name in plans[0].listed()),
        _row("Model", plans, lambda p: p.model.name),
    ]
    head = (Column("What", lead=True), *(Column(letter(i)) for i in range(len(plans))))
    return PageTable(
        "The plans side by side; what differs from plan A is marked", head, rows, shown=99, wide=True
    )


def pictures(plans: Sequence[PlanFile]) -> tuple[PageBlock, ...]:
    """Step time and memory of the plans on one scale."""
    return (
        PageBlock(
            "Step time",
            figure_svg(plans_time(plans, ""), "plans-time", "Step time of each plan", tell_plans_time(plans)),
        ),
        PageBlock(
            "Peak memory on a device",
            figure_svg(
                plans_memory(plans, ""), "plans-memory", "Peak memory of each plan", tell_plans_memory(plans)
            ),
        ),
    )


def _sent(plan: PlanFile) -> float:
    return sum(plan.predicted.communication_bytes_per_device.values())


def _decision(name: str) -> Callable[[PlanFile], str]:
    return lambda plan: plan.listed()[name] or "–"


def _row(
    name: str,
    plans: Sequence[PlanFile],
    say: Callable[[PlanFile], str],
    value: Callable[[PlanFile], float] | None = None,
) -> list[Cell]:
    """A fact of every plan; numbers say how far they are from the first plan's."""
    cells = [Cell(name, strong=True)]
    first = plans[0]
    for plan in plans:
        sub = ""
        differs = say(plan) != say(first)
        if value is not None and plan is not first:
            base = value(first)
            differs = abs(value(plan) - base) > 5e-4 * max(abs(base), 1e-30)
            sub = against(value(plan), base) if differs else ""
        cells.append(Cell(shorten(say(plan), LONGEST), sub, differs=differs))
    return _merged(cells)


def _merged(cells: list[Cell]) -> list[Cell]:
    """What is the same in all plans is said once."""
    if any(c.differs for c in cells) or len(cells) < 3:
        return cells
    return [cells[0], replace(cells[1], span=len(cells) - 1)]


def _rated(name: str, plans: Sequence[PlanFile], say: Callable[[PlanFile], tuple[str, str]]) -> list[Cell]:
    first = say(plans[0])
    told = [say(p) for p in plans]
    return _merged([Cell(name, strong=True), *(Cell(t, state=s, differs=(t, s) != first) for t, s in told)])


def pieces(plans: Sequence[PlanFile]) -> PageTable:
    """Variables against plans: what a device holds of each."""
    tables = [{v.name: v for v in grouped(p)} for p in plans]
    names = list(dict.fromkeys(name for t in tables for name in t))
    rows = []
    for name in names[:300]:
        first = tables[0].get(name)
        cells = [Cell(name, shape_text(first) if first else "", strong=True)]
        for plan, table in zip(plans, tables, strict=True):
            one = table.get(name)
            if one is None:
                cells.append(Cell("not in this plan", differs=first is not None))
                continue
            differs = first is None or (one.splits, one.local_bytes) != (first.splits, first.local_bytes)
            held, share = memory(one.local_bytes * one.alike), piece_shares(one, plan)
            cells.append(Cell(held, split_text(one), piece=share, differs=differs))
        rows.append(_merged(cells))
    head = (Column("Variable", lead=True), *(Column(letter(i)) for i in range(len(plans))))
    caption = f"What a device holds of each of {plural(len(names), 'variable')}, by plan"
    return PageTable(
        caption, head, rows, shown=12, more=len(names) - len(rows), more_in="variables.csv", wide=True
    )


def _size(row: DimensionRow | None) -> str:
    """How much of a dimension a device has."""
    if row is None or not row.size:
        return ""
    return f"{row.piece:,} of {row.size:,}" if row.axes else f"{row.size:,}"


def splits(plans: Sequence[PlanFile]) -> PageTable:
    """Dimensions against plans: the axes of each split; the split dimensions of any plan come first."""
    tables = [{r.name: r for r in dimension_rows(p)} for p in plans]
    names = list(dict.fromkeys(name for t in tables for name in t))
    names.sort(key=lambda n: not any(t[n].axes for t in tables if n in t))
    rows = []
    for name in names[:300]:
        cells = [Cell(name, strong=True)]
        first = tables[0].get(name)
        for plan, table in zip(plans, tables, strict=True):
            one = table.get(name)
            axes = one.axes if one else ()
            cells.append(
                Cell(
                    text="" if axes else "whole" if one else "not a dimension",
                    sub=_size(one),
                    chips=chips(axes, list(plan.mesh)),
                    differs=one is None or first is None or axes != first.axes or one.piece != first.piece,
                )
            )
        rows.append(_merged(cells))
    head = (Column("Dimension", lead=True), *(Column(letter(i)) for i in range(len(plans))))
    caption = f"The axes that each of {plural(len(names), 'dimension')} is split over, by plan"
    return PageTable(caption, head, rows, shown=24, more=len(names) - len(rows), wide=True)
