"""`layoutopt frameworks`: the training software that can be predicted, and where its numbers come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.options import JsonOption, complete_framework, hardware_option
from layoutopt.cli.terminal import Terminal, facts
from reports.views.view import Column, Kind, View, texts

if TYPE_CHECKING:
    from costmodels.frameworks import Framework
    from costmodels.frameworks.framework import OverlaidNumber


def frameworks(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME_OR_FILE]",
            help="Framework to show: NAME[@VERSION][:variant=option,…], or a framework file.",
            autocompletion=complete_framework,
        ),
    ] = None,
    hardware: Annotated[
        str | None, hardware_option("A preset: list what runs on it, or show what its predictions take.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the training software that can be predicted, or show one with its sources."""
    from costmodels.frameworks import framework_names, load_framework
    from costmodels.hardware import check_framework, numbers_of, preset_content

    terminal = Terminal(as_json)
    if name is None:
        kind = None if hardware is None else preset_content(hardware)["kind"]
        every = map(load_framework, framework_names())
        _list(terminal, [each for each in every if kind is None or kind in each.kinds])
    else:
        found = check_framework(name)
        _one(terminal, found, numbers_of(hardware, found) if hardware else [*found.numbers()])


def _list(terminal: Terminal, found: list[Framework]) -> None:
    from layoutopt.plan.hardware_results import FrameworkList, FrameworkSummary

    terminal.result(FrameworkList(frameworks=[FrameworkSummary(**_summary(each)) for each in found]))
    columns = texts("name", "chips", "variants", summary="software")
    rows = [(f.name, ", ".join(f.kinds), ", ".join(f.variants), f.summary) for f in found]
    terminal.show(View("Training software", columns, rows))
    terminal.show("", "layoutopt frameworks NAME --hardware CHIP shows every number with its source.")


def _one(terminal: Terminal, found: Framework, numbers: list[OverlaidNumber]) -> None:
    from layoutopt.plan.hardware_results import FrameworkResult

    chosen, runs = found.options(), found.programs
    pads = (f"{n} of its models is a multiple of {p.multiple} ({p.source})" for n, p in found.pads.items())
    writes = (f"its models have {n}={its.value} ({its.source})" for n, its in found.choices().items())
    notes = [*found.notes, *writes, *pads]
    terminal.result(FrameworkResult(**_summary(found), notes=notes, runs=runs, numbers=numbers))
    rows = [
        ("name", found.text),
        ("", found.summary),
        ("runs on", ", ".join(found.kinds)),
        *([("models", ", ".join(runs.families))] if runs and runs.families else []),
        *((name, f"{chosen[name]} of {', '.join(each.options)}") for name, each in found.variants.items()),
        *(("note", note) for note in notes),
    ]
    terminal.show(facts(rows), "")
    columns = (
        *texts("option", "chip", number="what", value="value"),
        Column("uncertainty", "±", Kind(lambda share: f"{100 * share:.0f}%")),
        *texts("date", "source"),
    )
    shown = [(n.option, n.chip, n.path, n.value, n.uncertainty, n.date, n.source) for n in numbers]
    terminal.show(View("Set in place of the chip's own", columns, shown))


def _summary(found: Framework) -> dict[str, Any]:
    variants = {
        name: {
            "summary": each.summary,
            "default": each.default,
            "options": {
                option: its.summary + (f" ({', '.join(its.only)})" if its.only else "")
                for option, its in each.options.items()
            },
        }
        for name, each in found.variants.items()
    }
    return {"name": found.name, "summary": found.summary, "chips": list(found.kinds), "variants": variants}
