"""`layoutopt export`: a plan's layout in another library's form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.options import JsonOption, QuietOption, check_out, examples, say_damage
from layoutopt.cli.plans import ModelOption, PlanArgument, Planned, open_plan
from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import bytes_text, some

if TYPE_CHECKING:
    from layoutopt.plan.decided import Decided

EXAMPLES = examples(
    "layoutopt export plan.json --to mesh-tensorflow",
    "layoutopt export plan.json --to jax --out shardings.py",
)

NAMED = 6
"""Names that a line has."""


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
    """Write a plan's layout in the form that another library takes, and say what it lacks."""
    from layoutopt.evaluator import evaluate
    from layoutopt.plan.build import decided, options_of
    from layoutopt.plan.decided import Decided
    from layoutopt.plan.export import Exported, placed, said, unsaid
    from layoutopt.plan.export import export as written
    from layoutopt.plan.results import ExportResult

    terminal = Terminal(as_json, quiet)
    check_out(out)
    found = open_plan(plan, model, on_damage=say_damage)
    own = found.plan
    program = found.loaded.model.lower(own.mesh, own.layout, own.options)
    title = f"Layout of {own.data.model.name} on {own.mesh}, searched by layoutopt for {own.data.hardware}."
    what = Exported(title, own.mesh, own.layout, *placed(program), decided(own.options))
    text, lost = written(what, to.value), unsaid(what, to.value)
    more: dict[str, Any] = {}
    if lost != Decided():
        options = options_of(said(what, to.value))
        evaluation = evaluate(found.loaded.model, own.mesh, own.layout, found.hardware, options)
        more = {
            "not_said": lost.model_dump(exclude_defaults=True),
            "peak_memory_bytes": evaluation.memory.peak,
        }
    terminal.result(ExportResult(to=to.value, mesh=own.mesh.as_dict(), text=text, **more))
    if out is not None:
        out.write_text(text, encoding="utf-8")
        terminal.say(f"wrote {out}")
    elif not as_json:
        typer.echo(text, nl=False)
    if more:
        _say_lost(terminal, found, lost, more["peak_memory_bytes"])


def _say_lost(terminal: Terminal, found: Planned, lost: Decided, peak: int) -> None:
    for stage, names in lost.stages().items():
        terminal.say(f"not in this form: storage {stage} of {some(names, NAMED)}")
    if lost.recompute:
        terminal.say(f"not in this form: recompute of {some(lost.recompute, NAMED)}")
    if lost.microbatches > 1:
        terminal.say(f"not in this form: {lost.microbatches} microbatches")
    fits = "" if peak <= found.limit else f", more than the {bytes_text(found.limit)} that it has"
    whole = bytes_text(found.plan.predicted.peak_memory_bytes)
    terminal.say(
        f"the exported layout alone holds {bytes_text(peak)} per device{fits}; the plan holds {whole}"
    )
