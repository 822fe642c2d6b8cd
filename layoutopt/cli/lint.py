"""`layoutopt lint`: likely mistakes of a layout, or of a JAX program's own shardings, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli import options
from layoutopt.cli.cost import show_doubts
from layoutopt.cli.given import PLAIN, GivenOptions, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.plans import load_with_plan
from layoutopt.cli.terminal import FITS, facts, layout_text
from layoutopt.plan.units import seconds_text, used_text

if TYPE_CHECKING:
    from layoutopt.analysis.lint import UnlikeArray
    from layoutopt.api.pricing import Linted
    from layoutopt.models.loading import Loaded
    from mesh_tf_core import Options


@grouped
def lint(
    model: options.ModelArgument,
    asked: LayoutByHand = PLAIN,
    machine_on: options.OnHardware = options.ON,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            min=0.1,
            metavar="S",
            help="Stop the search for the best layout after this many seconds.",
        ),
    ] = 60.0,
    output: options.Output = options.OUTPUT,
) -> None:
    """Find likely mistakes in a layout, or in your own shardings, and predict their cost."""
    from layoutopt.api.pricing import lint as linted
    from reports.views import facts as told

    terminal = output.terminal
    machine_on.read()  # refused before anything takes time
    loaded, plan = load_with_plan(model, asked.settings, asked.layout, asked.mesh)
    machine = machine_on.read(loaded.model)
    if asked.layout is None and loaded.function("shardings") is not None:
        given, unlike = own_shardings(loaded, asked.mesh, asked.decided.options(loaded))
    else:
        given, unlike = asked.read(loaded, plan), []
    terminal.say("searching for the best layout on this mesh")
    found = linted(loaded.model, given.mesh, given.layout, machine, given.options, time_limit, unlike)
    of = found.priced.evaluation
    given = replace(given, options=of.decided)
    terminal.result(found.data)
    if output.as_json:
        return
    fits = of.known.fits(of.memory.peak, found.priced.limit)
    rows = [
        *told.model(found.data.model),
        ("mesh", f"{given.mesh} ({given.mesh.devices} devices), {machine.name} under {machine.framework}"),
        ("layout", _text(given, of.pipeline)),
        ("step", f"{seconds_text(of.predicted.step_seconds)} predicted"),
        ("memory", f"{used_text(of.memory.peak, found.priced.limit)} per device"),
        ("fits", fits),
        *_best(found, loaded),
        ("this costs", found.costs),
    ]
    terminal.show(facts(rows, {"fits": FITS[fits]}))
    show_doubts(terminal, found.findings)
    if not found.findings:
        terminal.show("", "no likely mistake was found")


def _best(found: Linted, loaded: Loaded) -> list[tuple[str, str]]:
    """The fastest layout that fits, and what the search left out where its own answer is slower."""
    from layoutopt.optimize.bounds import EXACT
    from layoutopt.plan.schema import ProofStatus

    best, fastest = found.best, found.fastest
    if fastest is None:
        return []
    p = fastest.predicted
    its = GivenOptions(fastest.program.mesh, fastest.layout, fastest.decided)
    words = f"{seconds_text(p.step_seconds)} with {_text(its, loaded.model.stages(its.mesh, its.layout))}"
    if best is not None and best.data.space and best.predicted.step_seconds > p.step_seconds * (1 + EXACT):
        words += f" ({best.data.space.limits})"
    return [("proven best" if found.status == ProofStatus.OPTIMAL else "best found", words)]


def _text(given: GivenOptions, pipeline: Mapping[str, int]) -> str:
    """A layout and what is decided beside it."""
    from layoutopt.plan.build import decided

    more = decided(given.options, given.layout, pipeline).in_short()
    return f"{layout_text(given.layout)}{'; ' if more else ''}{more}"


def own_shardings(
    loaded: Loaded, mesh: str | None, besides: Options
) -> tuple[GivenOptions, list[UnlikeArray]]:
    """The results of the file's `shardings()`, (PartitionSpecs of parameters, of the batch), and the arrays
    that lie otherwise than operations read them.

    Args:
      besides: what else is decided; a parameter that its sharding stores split is stored so all the same.

    Raises:
      UserError: a model that is not from JAX, or shardings that do not fit it.
    """
    from layoutopt.front_ends import FRONT_ENDS
    from mesh_tf_core.errors import UserError

    model: Any = loaded.model
    front = FRONT_ENDS.get(getattr(model, "front_end", ""))
    if front is None or not front.own:
        able = [each for each in FRONT_ENDS.values() if each.own]
        raise UserError(
            f"{loaded.source} defines shardings(), but its model is not built from "
            f"{' or '.join(each.title for each in able)}; add --layout, or build the model with "
            f"{' or '.join(each.made.partition('(')[0] for each in able)}"
        )
    said = loaded.call("shardings")
    if not isinstance(said, tuple) or len(said) != 2:
        kind = f"a tuple of length {len(said)}" if isinstance(said, tuple) else type(said).__name__
        raise UserError(f"{loaded.source}: shardings() must return {front.said}, but returned {kind}")
    chosen = options.read_mesh(mesh)
    found = front.written()(model, chosen, *said, besides)
    return GivenOptions(chosen, found.layout, found.options), found.unlike
