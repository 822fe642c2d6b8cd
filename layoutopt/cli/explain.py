"""`layoutopt explain`: the reasons of a layout, its binding limit, and the cost of other layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from layoutopt.cli import options
from layoutopt.cli.given import UNDECIDED, ByHand, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.plans import ModelOption, PlanArgument, Planned, is_plan, named_plan, open_plan
from layoutopt.cli.progress import StepProgress
from layoutopt.space.option import listed as listed_options


@grouped
def explain(
    plan: PlanArgument,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT_OR_PLAN",
            help="Compare the plan's predicted time, part by part and item by item, with that of another "
            'layout: DIM:AXIS rules, the name of an alternative in the plan, e.g. "FSDP", or another '
            "PLAN.json of the model. --mesh and the options of decisions belong to this layout.",
        ),
    ] = None,
    mesh: options.MeshOption = None,
    decided: ByHand = UNDECIDED,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULES",
            help='Show how much requiring this split would cost, e.g. "batch:none" (repeatable).',
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DECISION",
            help="Show the best step time without this decision: "
            f"{', '.join(listed_options()['features'])}, or all, for each decision of the plan in turn "
            "(repeatable).",
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Search again with half and twice the bandwidth, memory and number of devices, and with the "
            "hardware's numbers varied within their uncertainties.",
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Verify, without using a solver, that no layout in the search space is faster than the "
            "plan.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        options.path_option(
            "PLAN.json",
            (
                "Write the plan to this file with the results of --sensitivity and --check, which "
                "`report` then shows."
            ),
        ),
    ] = None,
    model: ModelOption = None,
    framework: options.FrameworkOption = None,
    time_limit: options.TimeLimitOption = None,
    output: options.Output = options.OUTPUT,
) -> None:
    """Explain a plan: what each split saves, which limit binds, and what a pin costs."""
    from layoutopt.api.explaining import explain as explained
    from mesh_tf_core.errors import UserError

    clock = options.time_limited(time_limit)
    terminal = output.terminal
    options.check_out(out, read=[model])
    planned = open_plan(plan, model, framework=framework)
    other: Any = against
    if mesh or decided or (against is not None and is_plan(against)):
        other = _other(planned, against, mesh, decided)
    with StepProgress(terminal, "searching", 1) as bar:
        found = explained(
            planned.plan.of(planned.loaded.model),
            other,
            planned.hardware,
            clock,
            pin or (),
            without or (),
            sensitivity,
            check,
            lambda done, total, what: bar.update(done, what, max(total, done + 1)),
        )
    with terminal.saved(out, found.plan.with_details(**found.details).save, "the plan"):
        terminal.result(found.data)
        if not output.as_json:
            from layoutopt.cli.plan_tables import show_explained

            show_explained(terminal, planned, found)
    if found.proof is not None and found.proof.refuted:
        raise UserError(f"--check: the plan's proof is {found.proof.words}; search again")


def _other(planned: Planned, against: str | None, mesh: str | None, decided: ByHand) -> Any:
    """The plan, or the layout with its mesh and decisions, to compare with."""
    from layoutopt.api.pricing import cost
    from mesh_tf_core.errors import UserError

    if against is None:
        said = ", ".join(["--mesh"] * bool(mesh) + [*decided.texts])
        raise UserError(f"{said}: these describe the layout to compare with; name it with --against")
    asked = LayoutByHand(mesh or str(planned.plan.mesh), against, decided)
    if (plan := named_plan(against)) is not None:
        asked = replace(asked, mesh=mesh or str(plan.mesh))
    given = asked.read(planned.loaded, plan)
    return plan or cost(
        planned.loaded.model, given.mesh, given.layout, planned.hardware, options=given.options
    )
