"""`layoutopt lint`: likely mistakes of a layout, or of a program's own placements, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from layoutopt.cli import options
from layoutopt.cli.cost import show_doubts
from layoutopt.cli.given import PLAIN, GivenOptions, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.plans import ON_PLANNED, OnPlannedHardware, load_with_plan
from layoutopt.cli.terminal import FITS, facts, layout_text
from layoutopt.plan.units import seconds_text, used_text

if TYPE_CHECKING:
    from layoutopt.api.pricing import Linted
    from layoutopt.importers.arrays.written import WrittenLayout
    from layoutopt.models.loading import Loaded


@grouped
def lint(
    model: options.ModelArgument,
    asked: LayoutByHand = PLAIN,
    machine_on: OnPlannedHardware = ON_PLANNED,
    time_limit: Annotated[
        float,
        options.time_option("--time-limit", "Stop the search for the best layout after this time.", 0.1),
    ] = 60.0,
    output: options.Output = options.OUTPUT,
) -> None:
    """Find likely mistakes in a layout, or in your own shardings, and predict their cost."""
    from layoutopt.api.pricing import lint as linted
    from reports.views import facts as told

    terminal = output.terminal
    loaded, plan = load_with_plan(model, asked.settings, asked.layout, asked.mesh)
    machine = machine_on.read(loaded.model, plan)
    given = asked.read(loaded, plan)
    own = own_shardings(loaded, given) if asked.layout is None else None
    terminal.say("searching for the best layout on this mesh")
    layout = None if asked.layout is None else given.layout
    found = linted(loaded.model, given.mesh, layout, machine, given.options, time_limit, own)
    of = found.priced.evaluation
    given = replace(given, layout=of.layout, options=of.decided)
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
    from layoutopt.optimize.problems.bounds import EXACT
    from layoutopt.plan.schema import ProofStatus

    best, fastest = found.best, found.fastest
    if fastest is None:
        return []
    p = fastest.predicted
    its = GivenOptions(fastest.program.mesh, fastest.layout, fastest.decided)
    words = f"{seconds_text(p.step_seconds)} with {_text(its, loaded.model.stages(its.mesh, its.layout))}"
    if best is not None and best.data.space and best.predicted.step_seconds > p.step_seconds * (1 + EXACT):
        words += f" (outside this search: {best.data.space.limits})"
    return [("proven best" if found.status == ProofStatus.OPTIMAL else "best found", words)]


def _text(given: GivenOptions, pipeline: Mapping[str, int]) -> str:
    """A layout and what is decided beside it."""
    from layoutopt.plan.build import decided

    more = decided(given.options, given.layout, pipeline).in_short()
    return f"{layout_text(given.layout)}{'; ' if more else ''}{more}"


def own_shardings(loaded: Loaded, given: GivenOptions) -> WrittenLayout | None:
    """The layout that the file's `shardings()` returns; None if it has none.

    Raises:
      UserError: a model of no other library, or shardings that do not fit it.
    """
    from layoutopt.api.pricing import own_layout
    from layoutopt.front_ends import front_end_of, made_by
    from mesh_tf_core.errors import UserError

    if loaded.function("shardings") is None:
        return None
    if (front := front_end_of(loaded.model)) is None:
        raise UserError(
            f"{loaded.source} defines shardings(), but its model is of no other library; add --layout, or "
            f"build the model with {made_by()}"
        )
    with front.on_ranks(given.mesh):
        return own_layout(loaded.model, given.mesh, loaded.call("shardings"), given.options)
