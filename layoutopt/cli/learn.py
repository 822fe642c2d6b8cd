"""`layoutopt learn`: a framework's constants, fitted to runs that the user measured.

The runs are a table that `candidates --out` writes: a line for each layout, with the options of `cost` as
columns. Fields of options that may be given again have values with spaces between them.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.given import UNDECIDED, LayoutByHand, read_source
from layoutopt.cli.grouped import grouped
from layoutopt.cli.terminal import facts
from layoutopt.plan.units import mesh_option, percent
from layoutopt.space.option import listed
from reports.views.view import Column, View

if TYPE_CHECKING:
    from rich.console import RenderableType

    from costmodels.hardware import Hardware
    from layoutopt.api.comparing import LayoutCandidates
    from layoutopt.api.learning import Learned
    from layoutopt.api.pricing import PricedLayout
    from mesh_tf_core.model import Model

SECONDS = "step_seconds"
OPTIONS = {o.parameter: o for o in listed()["by_hand"]}
PARAMETERS = {o.name: o.parameter for o in OPTIONS.values()}
ASKED = ("model", "set", "hardware", "framework", "mesh", "layout", *OPTIONS)
NOTED = ("name", "group", "predicted_seconds")
"""Columns that `candidates` writes for people."""
BETWEEN = " "


@grouped
def learn(
    runs: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS.csv",
            help="Measured runs: columns model, mesh, step_seconds and any of set, hardware, framework, "
            f"layout, {', '.join(OPTIONS)}, as `cost` takes them. `candidates --out` writes such a file.",
        ),
    ],
    machine_on: options.OnHardware = options.ON,
    out: Annotated[
        Path | None,
        options.path_option("FILE.json", "Write the framework to this file, for --framework FILE.json."),
    ] = None,
    output: options.Output = options.OUTPUT,
) -> None:
    """Fit a framework's constants to runs that you measured."""
    from costmodels.frameworks import load_framework
    from layoutopt.api.learning import learn as fitted
    from mesh_tf_core.errors import UserError

    base = load_framework(machine_on.framework).file if machine_on.framework else ""
    options.check_out(out, read=[runs, base or None])
    if _named(machine_on):
        machine_on.read()  # refused before anything takes time
    terminal, lines = output.terminal, [*read_runs(runs)]
    measured = [(where, line, _number(line[SECONDS], where)) for where, line in lines if line[SECONDS]]
    if lines and not measured:
        raise UserError(f"{runs}: {SECONDS} is empty in every line; write there how long a step took")
    priced: dict[tuple[str, ...], PricedLayout] = {}
    with terminal.waiting(f"predicting {len(measured)} runs"):
        for where, line, _ in measured:
            if (key := _asked(line)) not in priced:
                priced[key] = _priced(line, machine_on, where)
        found = fitted([(priced[_asked(line)], seconds) for _, line, seconds in measured])
    with terminal.saved(out, lambda path: found.save(path, runs.name), "the framework"):
        terminal.result(found.data)
        if not output.as_json:
            terminal.show(*_shown(found, len(lines), len(measured), out))


def read_runs(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a table of runs: where each is, and its fields by column.

    Raises:
      UserError: the file cannot be read, or has other columns, or a line of other length.
    """
    from mesh_tf_core.errors import UserError, known_names
    from mesh_tf_core.reading import read_text, reading

    with reading(f"runs {str(path)!r}"):
        text = read_text(path)
    given = (line for line in text.splitlines(keepends=True) if line.strip() and line[0] != "#")
    try:
        heading, *lines = [*csv.reader(given, strict=True)] or [[]]
    except csv.Error as error:
        raise UserError(f"{path} is no table of runs: {error}") from None
    columns = [name.strip() for name in heading]
    for name in ("model", SECONDS):
        if name not in columns:
            among = shorten(", ".join(columns), 200) or "none"
            raise UserError(f"{path}: no column {name!r} among {among}; add it")
    for name in columns:
        if columns.count(name) > 1:
            raise UserError(f"{path}: {columns.count(name)} columns are named {name!r}; leave one")
        if name not in (known := (*ASKED, SECONDS, *NOTED)):
            raise UserError(f"{path}: column {name!r} is not known; {known_names(name, known)}")
    for number, line in enumerate(lines, start=1):
        if len(line) != len(columns):
            raise UserError(f"{path}: run {number} has another number of fields than the heading")
        yield f"{path}: run {number}", {n: value.strip() for n, value in zip(columns, line, strict=True)}


def _asked(line: Mapping[str, str]) -> tuple[str, ...]:
    """The fields that say what ran."""
    return tuple(line.get(name, "") for name in ASKED)


def _priced(line: Mapping[str, str], machine_on: options.OnHardware, where: str) -> PricedLayout:
    from layoutopt.api.pricing import cost
    from mesh_tf_core.errors import UserError

    given = {n: v.split(BETWEEN) if OPTIONS[n].several else v for n in OPTIONS if (v := line.get(n))}
    try:
        mesh, layout = (line.get(name) or None for name in ("mesh", "layout"))
        settings, decided = line.get("set", "").split(), type(UNDECIDED)(**given)
        loaded, of = read_source(line["model"], None, LayoutByHand(mesh, layout, decided, settings))
        machine = _machine(line, machine_on, loaded.model)
        return cost(loaded.model, of.mesh, of.layout, machine, options=of.options)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _named(asked: options.OnHardware) -> bool:
    return asked.hardware != options.THIS_MACHINE or bool(asked.set_hardware)


def _machine(line: Mapping[str, str], asked: options.OnHardware, model: Model) -> Hardware:
    """What a run is predicted for: as asked, else as its line says; UserError if these differ."""
    from mesh_tf_core.errors import UserError

    name, software = line.get("hardware"), line.get("framework")
    on = asked if _named(asked) or not name else replace(asked, hardware=name)
    found = replace(on, framework=on.framework or software or None).read(model)
    own = replace(on, framework=software or on.framework)
    own = replace(own, hardware=name, set_hardware=None) if name else own
    if (its := own.read(model)) != found:
        raise UserError(
            f"it is a run on {its.name} under {its.framework}, but {found.name} under {found.framework} is "
            "asked for; leave out --hardware and --framework, or learn from other runs"
        )
    return found


def _number(text: str, where: str) -> float:
    from mesh_tf_core.errors import UserError

    with contextlib.suppress(ValueError):
        if "_" not in text and 0 < (found := float(text)) < options.LONGEST:
            return found
    raise UserError(f"{where}: {SECONDS} {shorten(text, 40)!r} is not a positive number, e.g. 1.25")


def _shown(found: Learned, lines: int, runs: int, out: Path | None) -> Iterator[RenderableType | View]:
    left = f" of {len(found.before)} different layouts" * (runs > len(found.before))
    left += f", {lines - runs} without {SECONDS}" * (lines > runs)
    after = f"{percent(found.error_after)} with these constants, each layout predicted without its runs"
    rows = [
        ("framework", f"{found.machine.framework} on {found.machine.name}"),
        ("runs", f"{runs} measured{left}"),
        ("error", f"{percent(found.error_before)} on average as shipped"),
    ]
    yield facts([*rows, *([("", after)] if found.constants else [])])
    columns = tuple(Column(n, n) for n in ("constant", "before", "after", "90 % of fits"))
    table = [
        (c.name, f"{c.before:.3g}", f"{c.after:.3g}", f"{c.interval[0]:.3g} to {c.interval[1]:.3g}")
        for c in found.constants
    ]
    none = "No constants predict these runs better than those that ship."
    yield from ("", View("Constants of the framework", columns, table) if table else none)
    if out is not None and table:
        yield from ("", f"Use them: --framework {out}")


def _short(model: Model | None, option: str, texts: list[str]) -> list[str]:
    """The one value that all variables have, where that alone says the same."""
    from layoutopt.space.decisions import typed

    one = [*{text.partition("=")[2] for text in texts}]
    if model is None or len(one) > 1 or "" in one:
        return texts
    return one if typed(model, {option: one}) == typed(model, {option: texts}) else texts


def write_candidates(path: Path, found: LayoutCandidates, model: str, settings: Sequence[str]) -> None:
    """Writes the table that `learn` reads, whose times are to be measured."""
    from layoutopt.plan.build import layout_of
    from mesh_tf_core.files import write_file

    rows = []
    for each in found.chosen:
        row = {
            "name": each.name,
            "group": str(each.group),
            "model": model,
            "set": BETWEEN.join(settings),
            "hardware": found.data.hardware,
            "framework": found.data.framework,
            "mesh": mesh_option(each.mesh),
            "layout": str(layout_of(each)),
            "predicted_seconds": "" if each.predicted is None else f"{each.predicted.step_seconds:.6g}",
        }
        for name, texts in each.options().items():
            row[PARAMETERS[name]] = BETWEEN.join(_short(found.plan.model, name, texts))
        rows.append(row)
    rows = [{name: value for name, value in row.items() if value} for row in rows]
    used = [n for n in (*NOTED[:2], *ASKED, NOTED[2]) if any(n in row for row in rows)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*used, SECONDS], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue(), "the runs")
