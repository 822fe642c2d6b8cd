"""`layoutopt lint`: likely mistakes of a layout, or of a JAX program's own shardings, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.cost import show_doubts
from layoutopt.cli.given import UNDECIDED, ByHand, GivenOptions
from layoutopt.cli.grouped import grouped
from layoutopt.cli.options import (
    OUTPUT,
    THIS_MACHINE,
    HardwareOption,
    LayoutOption,
    MeshOption,
    ModelArgument,
    Output,
    SetHardwareOption,
    SetOption,
    examples,
    read_hardware,
    read_mesh,
)
from layoutopt.cli.plans import load_with_plan
from layoutopt.cli.terminal import facts, layout_text
from layoutopt.plan.units import seconds_text, times_text

if TYPE_CHECKING:
    from layoutopt.models.loading import Loaded
    from mesh_tf_core import Options

EXAMPLES = examples(
    'layoutopt lint examples/transformer_lm.py --mesh "data:2;model:4" --layout "batch:data;d_ff:model"',
    'layoutopt lint train.py --mesh "data:8"',
)


@grouped
def lint(
    model: ModelArgument,
    mesh: MeshOption = None,
    layout: LayoutOption = None,
    decided: ByHand = UNDECIDED,
    settings: SetOption = None,
    hardware: HardwareOption = THIS_MACHINE,
    set_hardware: SetHardwareOption = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            min=0.1,
            metavar="S",
            help="Stop the search for the best layout after this many seconds.",
        ),
    ] = 60.0,
    output: Output = OUTPUT,
) -> None:
    """Find likely mistakes in a layout, or in your own shardings, and predict their cost."""
    from layoutopt.api.pricing import lint as linted
    from reports.views import facts as told

    terminal = output.terminal
    machine = read_hardware(hardware, set_hardware)
    loaded, plan = load_with_plan(model, settings, layout, mesh)
    unlike: list[str] = []
    if layout is None and loaded.function("shardings") is not None:
        given, unlike = own_shardings(loaded, mesh, decided.options(loaded))
    else:
        given = decided.read(loaded, mesh, layout, plan)
    terminal.say("searching for the best layout on this mesh")
    found = linted(loaded.model, given.mesh, given.layout, machine, given.options, time_limit, unlike)
    of, best = found.priced.evaluation, found.best
    given, its = replace(given, options=of.decided), GivenOptions(best.mesh, best.layout, best.options)
    now, least = of.cost.step_seconds, best.predicted.step_seconds
    terminal.result(found.data)
    if output.as_json:
        return
    proof = "proven best" if best.solver.proven else "best found"
    terminal.show(
        facts(
            [
                *told.model(found.data.model),
                ("mesh", f"{given.mesh} ({given.mesh.devices} devices), {machine.name}"),
                ("layout", _text(given, of.pipeline)),
                ("step", f"{seconds_text(now)} predicted"),
                (
                    proof,
                    f"{seconds_text(least)} with {_text(its, loaded.model.stages(its.mesh, its.layout))}",
                ),
                ("this costs", f"{times_text(now, least)} the best step"),
            ]
        )
    )
    show_doubts(terminal, found.findings)
    if not found.findings:
        terminal.show("", "no likely mistake was found")


def _text(given: GivenOptions, pipeline: Mapping[str, int]) -> str:
    """A layout and what is decided beside it."""
    from layoutopt.plan.build import decided

    more = decided(given.options, given.layout, pipeline).in_short()
    return f"{layout_text(given.layout)}{'; ' if more else ''}{more}"


def own_shardings(loaded: Loaded, mesh: str | None, options: Options) -> tuple[GivenOptions, list[str]]:
    """The results of the file's `shardings()`, (PartitionSpecs of parameters, of the batch), and a note on
    oddities.

    Args:
      options: what else is decided; a parameter that its sharding stores split is stored so all the same.

    Raises:
      UserError: a model that is not from JAX, or shardings that do not fit it.
    """
    from dataclasses import replace

    from layoutopt.importers.jax.written import written
    from mesh_tf_core.errors import UserError

    origin: Any = getattr(loaded.model, "origin", None)
    if origin is None:
        raise UserError(
            f"{loaded.source} defines shardings(), but its model is not built from JAX; add --layout, "
            "or build the model with layoutopt.from_jax"
        )
    said = loaded.call("shardings")
    if not isinstance(said, tuple) or len(said) != 2:
        kind = f"a tuple of length {len(said)}" if isinstance(said, tuple) else type(said).__name__
        raise UserError(
            f"{loaded.source}: shardings() must return two pytrees of PartitionSpec, (parameters, batch), "
            f"but returned {kind}"
        )
    chosen = read_mesh(mesh)
    found = written(origin, chosen, *said)
    stages = {**options.storage, **found.options.storage}
    return GivenOptions(chosen, found.layout, replace(options, storage=stages)), found.doubts
