"""`layoutopt validate`: many layouts run for real, their times beside the predicted ones."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.options import (
    THIS_MACHINE,
    Given,
    HardwareOption,
    JsonOption,
    MeshOption,
    ModelArgument,
    QuietOption,
    SetOption,
    check_out,
    examples,
    read_hardware,
    read_mesh,
)
from layoutopt.cli.progress import Steps
from layoutopt.cli.running import batches, open_trainer, timed_steps
from layoutopt.cli.terminal import Terminal, facts, table
from layoutopt.cli.units import seconds_text

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.loading import Loaded
    from layoutopt.validation import Row
    from mesh_tf_core import Layout, Mesh

EXAMPLES = examples(
    'layoutopt validate examples/mlp.py --mesh "data:2;model:2" --layouts 6',
    'layoutopt validate examples/transformer_lm.py --mesh "data:2;model:4" --out build/validation.json',
)


def validate(
    model: ModelArgument,
    mesh: MeshOption = None,
    layouts: Annotated[int, typer.Option(min=2, metavar="N", help="How many layouts to run.")] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 5,
    seed: Annotated[int, typer.Option(help="Which random layouts.")] = 0,
    settings: SetOption = None,
    hardware: HardwareOption = THIS_MACHINE,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the JSON there, for `report`.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run many layouts on this machine and hold the predicted times against the measured ones."""
    import json

    from layoutopt import search
    from layoutopt.cli.terminal import plain
    from layoutopt.loading import load_model
    from layoutopt.validation import sample_layouts, summary

    terminal = Terminal(as_json, quiet)
    check_out(out)
    machine = read_hardware(hardware)
    where = read_mesh(mesh)
    loaded = load_model(model, settings or ())
    with terminal.waiting("searching the best layout"):
        best = search(loaded.model, mesh=where, hardware=machine).layout
    others = [x for x in sample_layouts(loaded.model, where, layouts, seed) if x != best]
    rows = _measured(terminal, loaded, machine, where, [best, *others][:layouts], steps)
    found = summary(rows)
    if out is not None:
        out.write_text(json.dumps(plain(found), indent=1) + "\n", encoding="utf-8")
        terminal.say(f"wrote {out}")
    terminal.result(found)
    _show(terminal, found, machine.name)


def _measured(
    terminal: Terminal, loaded: Loaded, machine: Hardware, mesh: Mesh, layouts: list[Layout], steps: int
) -> list[Row]:
    from layoutopt.evaluate import evaluate
    from layoutopt.validation import Row
    from mesh_tf_core import Options

    fed = list(itertools.islice(batches(terminal, loaded), steps))
    rows = []
    with Steps(terminal, "measuring layouts", len(layouts)) as bar:
        for n, layout in enumerate(layouts):
            bar.update(n, str(layout) or "replicated")
            predicted = evaluate(loaded.model, mesh, layout, machine).cost.step_seconds
            trainer = open_trainer(terminal, loaded, Given(mesh, layout, Options()), tell=n == 0)
            timed = timed_steps(trainer, fed, warm_up=2)
            trainer.engine.close()
            rows.append(Row(str(layout), predicted, timed.median))
            if not terminal.live:
                terminal.say(
                    f"{n + 1}/{len(layouts)} {layout or 'replicated'}: "
                    f"{seconds_text(timed.median)} measured, {seconds_text(predicted)} predicted"
                )
    return rows


def _show(terminal: Terminal, found: dict[str, Any], hardware: str) -> None:
    best = min(row["measured_seconds"] for row in found["rows"])
    ranked = sorted(found["rows"], key=lambda row: row["predicted_seconds"])
    order = sorted(row["measured_seconds"] for row in found["rows"])
    rows = [
        (
            str(n + 1),
            str(order.index(row["measured_seconds"]) + 1),
            row["layout"].replace(";", "; ") or "nothing is split",
            seconds_text(row["predicted_seconds"]),
            seconds_text(row["measured_seconds"]),
            f"{row['predicted_seconds'] / row['measured_seconds']:.2f}",
            f"{row['measured_seconds'] / best:.2f}×",
        )
        for n, row in enumerate(ranked)
    ]
    columns = ("rank", "measured", "layout", "predicted", "measured", "ratio", "of the best")
    terminal.show(
        table("Layouts, by predicted rank", columns, rows, (0, 1, 3, 4, 5, 6)),
        "",
        facts(
            [
                ("hardware", hardware),
                ("MAPE", f"{100 * found['mape']:.1f}%: the mean error of a predicted time"),
                ("Kendall tau", f"{_number(found['kendall_tau'])}: 1 is the measured order"),
                ("Spearman", f"{_number(found['spearman'])}: rank correlation"),
                ("regret", f"{100 * found['regret']:.1f}%: what the layout ranked first costs over the best"),
            ]
        ),
    )


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "unknown"
