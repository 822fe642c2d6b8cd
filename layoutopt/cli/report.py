"""`layoutopt report`: one self-contained HTML page of one plan, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.grouped import grouped
from layoutopt.cli.options import OUTPUT, Output, check_out, path_option
from layoutopt.cli.plans import ModelOption, machine_of_plan, with_model
from layoutopt.cli.terminal import Terminal
from layoutopt.cli.training_cost import PriceOption, TokensOption, read_prices, read_tokens, training_cost
from layoutopt.optimize.answers.plan_details import with_details
from layoutopt.plan.units import bytes_text

if TYPE_CHECKING:
    from layoutopt.plan.build import Plan

FULL = {"lines", "variables", "memory"}
"""Details without which a report has gaps."""


@grouped
def report(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN...", help="Plan files, made by `search --out`.")
    ],
    out: Annotated[
        Path, path_option("FILE.html", "Write the report to this file.", show_default=True)
    ] = Path("report.html"),
    validation: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="JSON file from `validate --out`; adds measured times to the report."
        ),
    ] = None,
    figures: Annotated[
        Path | None, path_option("DIR", "Folder to write the figures to, as SVG, PNG and PDF.")
    ] = None,
    tables: Annotated[Path | None, path_option("DIR", "Folder to write the tables to, as CSV.")] = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    model: ModelOption = None,
    output: Output = OUTPUT,
) -> None:
    """Write a report for any browser: the layout, its time and memory, and the evidence."""
    from layoutopt.plan.results import ReportResult

    terminal = output.terminal
    check_out(out, read=[*plans, model, validation])
    count = read_tokens(tokens)
    found = [_complete(terminal, path, model) for path in plans]
    prices = read_prices(price or (), [plan.data.hardware for plan in found])
    found = [_billed(plan, count, prices.get(plan.data.hardware)) for plan in found]
    files = [write_report(terminal, found, out, None if validation is None else _json(validation))]
    if figures is not None:
        files += _written(terminal, found, figures, "figures")
    if tables is not None:
        files += _written(terminal, found, tables, "tables")
    terminal.result(ReportResult(files=[str(file) for file in files]))
    terminal.show(str(out))


def write_report(
    terminal: Terminal, plans: Sequence[Plan], out: Path, validation: dict[str, Any] | None = None
) -> Path:
    """Writes the page of some plans."""
    import reports

    with terminal.waiting("drawing the report"):
        reports.write_report([plan.to_json() for plan in plans], out, validation)
    terminal.say(f"wrote the report to {out} ({bytes_text(out.stat().st_size)})")
    return out


def _written(terminal: Terminal, plans: Sequence[Plan], folder: Path, what: str) -> list[Path]:
    import reports

    write = reports.write_figures if what == "figures" else reports.write_tables
    with terminal.waiting(f"writing the {what}"):
        files = write([plan.to_json() for plan in plans], folder)
    terminal.say(f"wrote {len(files)} {what} to {folder}")
    return files


def _complete(terminal: Terminal, path: Path, model: str | None) -> Plan:
    """A plan with its details; those that it lacks are worked out from its model, if there is one to run."""
    from layoutopt.plan.build import load_plan
    from mesh_tf_core.errors import UserError

    plan = load_plan(path)
    if plan.data.details.model_fields_set >= FULL:
        return plan
    try:
        found = with_model(plan, path, model)
    except UserError as error:
        if model is not None:
            raise
        terminal.say(f"{error}, to add variables, operations and memory to the report")
        return plan
    return with_details(
        plan, found.loaded.model, found.hardware, found.limit, found.loaded.source, found.loaded.hashes()
    )


def _billed(plan: Plan, tokens: float | None, price: float | None) -> Plan:
    """The plan with what training takes; as it is where nothing of that is asked."""
    if tokens is None and price is None:
        return plan
    machine = machine_of_plan(plan)
    return plan.with_training(training_cost(plan.predicted, machine, plan.mesh.devices, tokens, price))


def _json(path: Path) -> dict[str, Any]:
    from mesh_tf_core.errors import UserError
    from mesh_tf_core.reading import read_json, reading

    what, again = f"--validation {str(path)!r}", "write it with `layoutopt validate MODEL --out FILE.json`"
    with reading(what, again):
        found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{what} is not a result of `layoutopt validate`; {again}")
    return found
