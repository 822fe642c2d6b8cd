"""Several plans side by side: one row per fact, with differences from the first plan marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    against,
    bytes_text,
    count,
    layout_text,
    letter,
    mesh_text,
    plural,
    seconds_text,
    some,
    step_change,
    throughput_text,
)
from reports.figures.plans import plans_memory, plans_time
from reports.page.answers import accuracy, fit, proof
from reports.page.cells import PageBlock
from reports.plan import one_model, words
from reports.svg import figure_svg
from reports.views.layouts import chips
from reports.views.variables import (
    DimensionRow,
    VariableGroup,
    dimension_rows,
    grouped,
    piece_shares,
    shape_text,
    split_text,
)
from reports.views.view import BYTES, FLOP, RULES, SECONDS, Cell, Column, Kind, View, ViewRow

SHOWN = 3
"""Hyperparameters in a sentence."""


def verdict(plans: Sequence[PlanFile]) -> str:
    """The fastest plan, and by how much; for plans with different steps, the differences."""
    if not one_model(plans):
        return _unlike(plans)
    usable = [(p.predicted.step_seconds, i) for i, p in enumerate(plans) if p.fits is not False]
    if not usable:
        return "No plan fits in memory."
    usable.sort()
    (best, first), others = usable[0], usable[1:]
    text = f"Plan {letter(first)} is the fastest that fits: {seconds_text(best)} per step"
    if others and best > 0:
        time, second = others[0]
        if time / best < 1.0005:
            return (
                f"Plans {letter(first)} and {letter(second)} are equally fast: {seconds_text(best)} per step."
            )
        return f"{text}; plan {letter(second)} takes {step_change(time, best)}."
    return f"{text}."


def _unlike(plans: Sequence[PlanFile]) -> str:
    """What makes steps of plans differ; of one model with other batches or the like, which learns fastest."""
    names, sizes = {p.model.name for p in plans}, {p.model.parameters for p in plans}
    said = _different(plans)
    if len(names) > 1 or not said:
        return "The plans are for different models, so their step times cannot be compared."
    text = f"The plans differ in {some(said, SHOWN, 80)}, so their step times cannot be compared."
    rates = [(p.predicted.tokens_per_second, i) for i, p in enumerate(plans) if p.fits is not False]
    known = [(rate, i) for rate, i in rates if rate]
    if len(sizes) > 1 or len(known) < len(rates) or len(known) < 2:
        return text
    rate, best = max(known)
    most = throughput_text(rate, "tokens")
    return f"{text} Of the plans that fit, plan {letter(best)} has the highest throughput: {most}."


def _different(plans: Sequence[PlanFile]) -> list[str]:
    """Hyperparameters that are not the same in all plans: 'batch (A 16, B 32)'."""
    known = dict.fromkeys(name for p in plans for name in p.model.hparams)
    values = {name: [words(p.model.hparams.get(name, "–")) for p in plans] for name in known}
    return [
        f"{name} ({', '.join(f'{letter(i)} {value}' for i, value in enumerate(each))})"
        for name, each in values.items()
        if len(set(each)) > 1
    ]


NUMBERS: tuple[tuple[str, Kind, Callable[[PlanFile], float]], ...] = (
    ("Step time", SECONDS, lambda p: p.predicted.step_seconds),
    ("Compute", SECONDS, lambda p: p.predicted.compute_seconds),
    ("Exposed communication", SECONDS, lambda p: p.predicted.exposed_communication_seconds),
    ("Hidden communication", SECONDS, lambda p: p.predicted.hidden_seconds),
    ("Peak memory", BYTES, lambda p: p.predicted.peak_memory_bytes),
    ("Traffic per device", BYTES, lambda p: sum(p.predicted.communication_bytes_per_device.values())),
    ("FLOPs per device", FLOP, lambda p: p.predicted.flops_per_device),
)
"""Facts whose differences are shown."""
VERDICTS: tuple[tuple[str, Callable[[PlanFile], tuple[str, str]]], ...] = (
    ("Fits", lambda p: (fit(p).value if p.memory_limit else "limit unknown", fit(p).state)),
    ("How accurate", lambda p: (accuracy(p).value, accuracy(p).state)),
    ("Proven", lambda p: (proof(p).value, proof(p).state)),
)
WORDS: tuple[tuple[str, Callable[[PlanFile], str]], ...] = (
    ("Mesh", lambda p: mesh_text(p.mesh)),
    ("Layout", lambda p: RULES.say(layout_text(p.layout))),
    ("Hardware", lambda p: p.hardware),
    ("Framework", lambda p: p.framework or ""),
    ("Devices", lambda p: count(p.devices)),
    ("Speed", lambda p: p.predicted.speed),
    ("Per chip", lambda p: p.predicted.chip_speed),
    ("Training", lambda p: p.training.words if p.training else ""),
)


def facts(plans: Sequence[PlanFile]) -> View:
    """The table of the first screen: numbers, verdicts, words, and every kind of decision."""
    decisions = [name for name in plans[0].listed() if any(p.listed()[name] for p in plans)]
    told = [(name, [say(p) for p in plans]) for name, say in WORDS]
    told += [(name.capitalize(), [p.listed()[name] for p in plans]) for name in decisions]
    told += [("Model", [p.model.name for p in plans])]
    rows = [
        *(_numbers(name, kind, [value(p) for p in plans]) for name, kind, value in NUMBERS),
        *(_rated(name, [say(p) for p in plans]) for name, say in VERDICTS),
        *(_rated(name, [(text or "–", "") for text in each]) for name, each in told if any(each)),
    ]
    return _beside(
        "The plans side by side, with differences from plan A marked", "what", plans, rows, shown=99
    )


def _beside(title: str, lead: str, plans: Sequence[PlanFile], rows: Sequence[ViewRow], shown: int) -> View:
    """A column for every plan."""
    columns = (Column("what", lead, lead=True), *(Column(a, a) for a in map(letter, range(len(plans)))))
    return View(title, columns, rows, shown=shown, wide=True)


def pictures(plans: Sequence[PlanFile]) -> tuple[PageBlock, ...]:
    """Step time and memory of the plans on one scale."""
    said = facts(plans).in_words()
    time = figure_svg(plans_time(plans, ""), "plans-time", "Step time of each plan", said)
    memory = figure_svg(plans_memory(plans, ""), "plans-memory", "Peak memory of each plan", said)
    return PageBlock("Step time", time), PageBlock("Peak memory per device", memory)


def _numbers(name: str, kind: Kind, values: Sequence[float]) -> ViewRow:
    """A number of every plan, and how far it is from the first plan's."""
    first = values[0]
    far = [abs(value - first) > 5e-4 * max(abs(first), 1e-30) for value in values]
    cells = (
        Cell(kind.say(value), against(value, first) if differs else "", differs=differs)
        for value, differs in zip(values, far, strict=True)
    )
    return [Cell(name, strong=True), *cells]


def _rated(name: str, told: Sequence[tuple[str, str]]) -> ViewRow:
    """Words of every plan, each with its state."""
    return [Cell(name, strong=True), *(Cell(t, state=s, differs=(t, s) != told[0]) for t, s in told)]


def pieces(plans: Sequence[PlanFile]) -> View:
    """Variables against plans: bytes of each variable on a device."""
    tables = [{v.name: v for v in grouped(p)} for p in plans]
    names = list(dict.fromkeys(name for t in tables for name in t))

    def cell(plan: PlanFile, one: VariableGroup | None, first: VariableGroup | None) -> Cell:
        if one is None:
            return Cell("not in this plan", differs=first is not None)
        differs = first is None or (one.splits, one.local_bytes) != (first.splits, first.local_bytes)
        held, share = bytes_text(one.local_bytes * one.alike), piece_shares(one, plan)
        return Cell(held, split_text(one), piece=share, differs=differs)

    rows = [
        [
            Cell(name, shape_text(first) if first else "", strong=True),
            *(cell(plan, table.get(name), first) for plan, table in zip(plans, tables, strict=True)),
        ]
        for name in names
        for first in (tables[0].get(name),)
    ]
    title = f"The shard of each of {plural(len(names), 'variable')} on one device, by plan"
    return replace(_beside(title, "variable", plans, rows, shown=12), name="variables")


def _size(row: DimensionRow | None) -> str:
    """How much of a dimension a device has."""
    if row is None or not row.size:
        return ""
    return f"{row.piece:,} of {row.size:,}" if row.axes else f"{row.size:,}"


def splits(plans: Sequence[PlanFile]) -> View:
    """Dimensions against plans: the axes of each split; the split dimensions of any plan come first."""
    tables = [{r.name: r for r in dimension_rows(p)} for p in plans]
    names = list(dict.fromkeys(name for t in tables for name in t))
    names.sort(key=lambda n: not any(t[n].axes for t in tables if n in t))

    def cell(plan: PlanFile, one: DimensionRow | None, first: DimensionRow | None) -> Cell:
        axes = one.axes if one else ()
        differs = one is None or first is None or (axes, one.piece) != (first.axes, first.piece)
        text = "" if axes else "whole" if one else "not a dimension"
        return Cell(text, _size(one), chips(axes, list(plan.mesh)), differs=differs)

    rows = [
        [
            Cell(name, strong=True),
            *(cell(p, t.get(name), tables[0].get(name)) for p, t in zip(plans, tables, strict=True)),
        ]
        for name in names
    ]
    title = f"The mesh axes over which each of {plural(len(names), 'dimension')} is split, by plan"
    return _beside(title, "dimension", plans, rows, shown=24)
