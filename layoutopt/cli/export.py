"""`layoutopt export`: a plan's layout in another library's form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from layoutopt.cli.options import JsonOption, QuietOption, check_out, examples, say_damage
from layoutopt.cli.plans import ModelOption, PlanArgument, open_plan
from layoutopt.cli.terminal import Terminal

EXAMPLES = examples(
    "layoutopt export plan.json --to mesh-tensorflow",
    "layoutopt export plan.json --to jax --out shardings.py",
)


class Library(StrEnum):
    """Whose form is written."""

    MESH_TENSORFLOW = "mesh-tensorflow"
    DTENSOR = "dtensor"
    JAX = "jax"
    HALIAX = "haliax"
    MAXTEXT = "maxtext"


def export(
    plan: PlanArgument,
    to: Annotated[Library, typer.Option(help="The library.", show_default=False)],
    model: ModelOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there instead of stdout.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a plan's layout in the form that another library takes."""
    from layoutopt.plan.export import Exported, placed
    from layoutopt.plan.export import export as written
    from layoutopt.plan.results import ExportResult

    terminal = Terminal(as_json, quiet)
    check_out(out)
    found = open_plan(plan, model, on_damage=say_damage)
    own = found.plan
    program = found.loaded.model.lower(own.mesh, own.layout, own.options)
    title = f"Layout of {own.data.model.name} on {own.mesh}, searched by layoutopt for {own.data.hardware}."
    text = written(Exported(title, own.mesh, own.layout, *placed(program)), to.value)
    terminal.result(ExportResult(to=to.value, mesh=own.mesh.as_dict(), text=text))
    if out is not None:
        out.write_text(text, encoding="utf-8")
        terminal.say(f"wrote {out}")
    elif not as_json:
        typer.echo(text, nl=False)
