"""The candidates of a sizing as one view."""

from __future__ import annotations

from layoutopt.plan.size_results import SizedCandidate, SizeResult
from layoutopt.plan.units import mesh_option
from reports.views.view import (
    BYTES,
    EVERYWHERE,
    NUMBER,
    SECONDS,
    SHARE,
    WHOLE,
    Cell,
    Column,
    Kind,
    View,
    ViewRow,
)


def loss_text(each: SizedCandidate) -> str:
    """A loss, with its interval where there is one."""
    if each.loss is None:
        return "–"
    if each.loss_interval is None or None in each.loss_interval:
        return f"{each.loss:.4f}"
    low, high = each.loss_interval
    return f"{each.loss:.4f} ({low:.4f} to {high:.4f})"


def changed(each: SizedCandidate) -> str:
    """The changed hyperparameters, in the form of `--set`."""
    return " ".join(f"{name}={value}" for name, value in each.hparams.items()) or "as given"


ON_FRONTIER = Kind(lambda value: "frontier" if value else "", number=False)


def candidates(found: SizeResult) -> View:
    """Every size that was searched, in its best layout, and the known error of its predicted time."""
    priced = any(each.money is not None for each in found.candidates)
    columns = (
        Column("parameters", "parameters", NUMBER, lead=True),
        Column("hparams", "hyperparameters", under="parameters", on="page, data"),
        Column("tokens", "tokens", NUMBER),
        Column("loss", "loss", NUMBER),
        Column("hardware", "hardware"),
        Column("devices", "devices", WHOLE),
        Column("mesh", "mesh", rank=3, beside="hardware", under="hardware"),
        Column("peak_memory_bytes", "memory", BYTES, under="hardware", on="page, data"),
        Column("step_seconds", "step", SECONDS, on="page, data"),
        Column("mfu", "MFU", SHARE),
        Column("days", "days", NUMBER),
        Column("error", "error", rank=2, under="step_seconds"),
        Column("chip_hours", "chip-hours", NUMBER, rank=1),
        Column("money", "cost", NUMBER, on=EVERYWHERE if priced else "data"),
        Column("frontier", "frontier", ON_FRONTIER, rank=4, under="loss"),
    )

    def row(each: SizedCandidate) -> ViewRow:
        accuracy = found.accuracy_of(each.hardware)
        sure = None if accuracy.mean is None and not accuracy.steps else accuracy.mean
        return (
            *(each.parameters, changed(each), each.tokens, Cell(loss_text(each), value=each.loss)),
            *(each.hardware, each.devices, mesh_option(each.mesh), float(each.peak_memory_bytes)),
            *(each.step_seconds, each.mfu, each.days, Cell(accuracy.in_short(), value=sure)),
            *(each.chip_hours, each.money, each.frontier),
        )

    every = found.candidates
    strong = next((i for i, each in enumerate(every) if each == found.best), None)
    return View("Candidates", columns, [row(each) for each in every], "candidates", strong=strong, shown=20)
