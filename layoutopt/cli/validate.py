"""`layoutopt validate`: runs many layouts and compares their times with the predicted ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.grouped import grouped
from layoutopt.cli.job import ALONE, Job
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.running import batches
from layoutopt.cli.terminal import Terminal, facts, plain
from reports.views.view import RULES, SECONDS, TIMES, WHOLE, Column, Kind, View

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.plan.evidence import Validation


MOST = 1000
"""Number of layouts to run; each needs an engine of its own."""


@grouped
def validate(
    model: options.ModelArgument,
    mesh: options.MeshOption = None,
    layouts: Annotated[
        int, typer.Option(min=2, max=MOST, metavar="N", help="Number of layouts to run.")
    ] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Number of timing samples per layout.")] = 7,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random layouts.")] = 0,
    settings: options.SetOption = None,
    machine_on: options.OnHardware = options.ON,
    out: Annotated[
        Path | None,
        options.path_option("FILE.json", "Write the result as JSON to this file, for `report --validation`."),
    ] = None,
    job: Job = ALONE,
    output: options.Output = options.OUTPUT,
) -> None:
    """Measure several layouts on this machine and compare them with their predictions."""
    from layoutopt.api.running import validate as run
    from mesh_tf_core.files import write_file

    options.check_out(out, read=[model])
    machine = machine_on.read()
    devices = options.read_mesh(mesh)
    with job.open(output) as session:
        terminal = session.terminal
        loaded = session.load(model, settings, mesh)
        session.start(devices.devices)
        with StepProgress(terminal, "validating", 1, left=True) as bar:
            found = run(
                loaded.model,
                devices,
                machine,
                count=layouts,
                steps=steps,
                batch=next(batches(terminal, loaded)),
                seed=seed,
                engine=session.engine,
                cluster=session.cluster,
                on_progress=lambda what, done, total: bar.update(done, what, total),
            )
        text = json.dumps(plain(found.data), indent=1) + "\n"
        with terminal.saved(out, lambda path: write_file(path, text, "--out"), "the validation"):
            terminal.result(found.data)
            _show(terminal, found.data, machine)


def _show(terminal: Terminal, found: Validation, machine: Hardware) -> None:
    assert found.mape is not None and found.regret is not None
    unmeasured = "" if machine.calibrated else " (not calibrated; run `layoutopt calibrate` first)"
    terminal.show(
        _layouts(found),
        "",
        facts(
            [
                ("hardware", f"{machine.name}{unmeasured}"),
                ("machine", found.noise.words),
                ("MAPE", f"{100 * found.mape:.1f}%: mean absolute percentage error of the predicted times"),
                (
                    "Kendall tau",
                    f"{_number(found.kendall_tau)}: rank correlation; 1 if the predicted order is the "
                    "measured order",
                ),
                ("Spearman", f"{_number(found.spearman)}: rank correlation"),
                (
                    "regret",
                    f"{100 * found.regret:.1f}%: extra time of the layout predicted best over the "
                    "layout measured best",
                ),
            ]
        ),
        *(f"\nnote: {note}" for note in found.notes),
    )


def _layouts(found: Validation) -> View:
    """Every layout, by its predicted rank."""
    columns = (
        Column("rank", "rank", WHOLE),
        Column("measured_rank", "measured", WHOLE, rank=2),
        Column("name", "name", lead=True),
        Column("layout", "layout", RULES),
        Column("predicted_seconds", "predicted", SECONDS),
        Column("measured_seconds", "measured", SECONDS),
        Column("ratio", "ratio", Kind(lambda ratio: f"{ratio:.2f}")),
        Column("over_best", "of the best", TIMES, rank=1),
    )
    order = sorted(row.measured_seconds for row in found.rows)
    rows = [
        (
            *(n, order.index(measured) + 1, row.name, row.layout, predicted, measured),
            *(predicted / measured, measured / order[0]),
        )
        for n, row in enumerate(sorted(found.rows, key=lambda row: row.predicted_seconds), start=1)
        for predicted, measured in ((row.predicted_seconds, row.measured_seconds),)
    ]
    return View("Layouts, by predicted rank", columns, rows)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
