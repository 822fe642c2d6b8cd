"""`layoutopt export`: a plan's layout in another library's form."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.options import JsonOption, QuietOption, check_out, examples, path_option, say_damage
from layoutopt.cli.plans import ModelOption, PlanArgument, Planned, with_model
from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import bytes_text, some

if TYPE_CHECKING:
    from layoutopt.plan.build import Plan
    from layoutopt.plan.decided import Decided
    from layoutopt.plan.export import Placed

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
        Path | None,
        path_option("FILE", "Write there instead of stdout."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a plan's layout in the form that another library takes, and say what it lacks."""
    from layoutopt.evaluator import evaluate
    from layoutopt.plan.build import decided, load_plan, options_of
    from layoutopt.plan.decided import Decided
    from layoutopt.plan.export import Exported, placed, said, unsaid
    from layoutopt.plan.export import export as written
    from layoutopt.plan.results import ExportResult
    from mesh_tf_core.files import write_file

    terminal = Terminal(as_json, quiet)
    check_out(out)
    own = load_plan(plan, say_damage)
    tensors = None if model is not None else recorded(own, to.value)
    found = None
    if tensors is None:
        found = with_model(own, plan, model)
        tensors = placed(found.loaded.model.lower(own.mesh, own.layout, own.options))
    title = f"Layout of {own.data.model.name} on {own.mesh}, searched by layoutopt for {own.data.hardware}."
    what = Exported(title, own.mesh, own.layout, *tensors, decided(own.options, own.layout))
    text, lost = written(what, to.value), unsaid(what, to.value)
    more: dict[str, Any] = {}
    if lost != Decided():
        more["not_said"] = lost.model_dump(exclude_defaults=True)
        if (found := found or _trusted(own, plan)) is not None:
            options = options_of(said(what, to.value))
            evaluation = evaluate(found.loaded.model, own.mesh, own.layout, found.hardware, options)
            more["peak_memory_bytes"] = evaluation.memory.peak
    with terminal.saved(out, lambda path: write_file(path, text, "--out"), "the layout") as is_saved:
        terminal.result(ExportResult(to=to.value, mesh=own.mesh.as_dict(), text=text, **more))
        if not is_saved and not as_json:
            sys.stdout.write(text)
    if lost != Decided():
        _say_lost(terminal, lost)
    if "peak_memory_bytes" in more:
        assert found is not None
        _say_peak(terminal, found, more["peak_memory_bytes"])


def recorded(plan: Plan, to: str) -> tuple[tuple[Placed, ...], tuple[Placed, ...]] | None:
    """The variables and the inputs, as far as a form needs them and the plan says them; None if it does
    not."""
    from layoutopt.plan.export import SAY_NO_TENSOR, Placed
    from mesh_tf_core.errors import UserError

    if to in SAY_NO_TENSOR:
        return (), ()
    details = plan.data.details
    if not {"variables", "inputs"} <= details.model_fields_set:
        return None
    for tensor in (*details.variables, *details.inputs):
        for axis in (a for axes in tensor.splits for a in axes):
            if axis not in plan.mesh.names:
                raise UserError(
                    f"the plan splits {tensor.name!r} over axis {axis!r}, which its mesh {plan.mesh} lacks; "
                    "name its model with --model MODEL, or search again"
                )
    found = [
        tuple(
            Placed(t.name, tuple(dim for dim, _ in t.shape), t.splits, t.kind == "parameter") for t in tensors
        )
        for tensors in (details.variables, details.inputs)
    ]
    return found[0], found[1]


def _trusted(plan: Plan, path: Path) -> Planned | None:
    """The plan with its model, if that can be run without being named."""
    from mesh_tf_core.errors import UserError

    try:
        return with_model(plan, path, None)
    except UserError:
        return None


def _say_lost(terminal: Terminal, lost: Decided) -> None:
    for stage, names in lost.stages().items():
        terminal.say(f"not in this form: storage {stage} of {some(names, NAMED)}")
    if lost.recompute:
        terminal.say(f"not in this form: recompute of {some(lost.recompute, NAMED)}")
    if lost.microbatches > 1:
        terminal.say(f"not in this form: {lost.microbatches} microbatches")
    if lost.refined:
        terminal.say(
            f"not in this form: how operations of {some([*lost.refined], NAMED)} are placed otherwise"
        )


def _say_peak(terminal: Terminal, found: Planned, peak: int) -> None:
    fits = "" if peak <= found.limit else f", more than the {bytes_text(found.limit)} that it has"
    whole = bytes_text(found.plan.predicted.peak_memory_bytes)
    terminal.say(
        f"the exported layout alone holds {bytes_text(peak)} per device{fits}; the plan holds {whole}"
    )
