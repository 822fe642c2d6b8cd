"""`layoutopt explain`: why this layout, what binds it, and what another one would cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli.changed import show_conditions
from layoutopt.cli.cost_tables import overlap_table
from layoutopt.cli.explain_tables import kept_table, rules_text_of, show_against, worth_table
from layoutopt.cli.options import (
    JsonOption,
    QuietOption,
    TimeLimitOption,
    check_out,
    examples,
    path_option,
    time_limited,
)
from layoutopt.cli.plan_tables import summary, verdicts
from layoutopt.cli.plans import ModelOption, PlanArgument, Planned, open_plan
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.terminal import Terminal, facts
from layoutopt.cli.ways import compared_on_links, show_turning, show_ways
from layoutopt.plan.covered import listed
from layoutopt.plan.machine_details import errors_known, sure
from layoutopt.plan.units import bytes_text, seconds_text, share_text
from layoutopt.space.option import listed as listed_options
from reports.views.view import View, texts

if TYPE_CHECKING:
    from layoutopt.api.explaining import Explained
    from layoutopt.optimize.evaluator import Evaluation
    from layoutopt.space.undivided import Undivided

EXAMPLES = examples(
    "layoutopt explain plan.json",
    'layoutopt explain plan.json --against "batch:data+model" --pin "batch:none" --json',
    "layoutopt explain plan.json --without all",
    "layoutopt explain plan.json --sensitivity --check --out plan.json",
)


def explain(
    plan: PlanArgument,
    against: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help="Show where this layout takes longer.", show_default=False),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="RULES", help="Show what this pin costs.", show_default=False),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DECISION",
            help="Show what the best step is if this may not be chosen: "
            f"{', '.join(listed_options()['features'])}; all: each that the plan has.",
            show_default=False,
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also search with half and twice the bandwidth, memory and devices, and vary the hardware's "
            "numbers within their uncertainties.",
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Show without a solver that nothing that was searched is faster."),
    ] = False,
    out: Annotated[
        Path | None,
        path_option(
            "PLAN.json", "Write the plan again, with what --sensitivity and --check found, for its report."
        ),
    ] = None,
    model: ModelOption = None,
    time_limit: TimeLimitOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say why a plan's layout and not another: what each split is worth, what binds, what a pin costs."""
    from layoutopt.api.explaining import explain as explained
    from layoutopt.api.explaining import with_found
    from mesh_tf_core.errors import UserError

    clock = time_limited(time_limit)
    terminal = Terminal(as_json, quiet)
    check_out(out)
    planned = open_plan(plan, model)
    with StepProgress(terminal, "searching", 1) as bar:
        found = explained(
            planned.plan.of(planned.loaded.model),
            against,
            planned.hardware,
            clock,
            pin or (),
            without or (),
            sensitivity,
            check,
            lambda done, total, what: bar.update(done, what, max(total, done + 1)),
        )
    found = replace(found, turning=compared_on_links(terminal, planned, clock, sensitivity))
    with terminal.saved(out, with_found(found).save, "the plan"):
        terminal.result(found.data)
        if not as_json:
            _show(terminal, planned, found)
    if found.proof is not None and found.proof.faster is not None:
        raise UserError(f"--check: the plan's proof is {found.proof}")


def _show(terminal: Terminal, planned: Planned, found: Explained) -> None:
    from layoutopt.api.explaining import peak_text
    from layoutopt.space.recorded import allowed_text

    evaluation, own, limit = found.evaluation, found.plan.data, planned.limit
    said = "; ".join(found.disagreements)
    checks = [("checked", said or "lowered and priced again: the same")]
    if (proof := found.proof) is not None:
        checks += [("recheck", str(proof)), ("allowed", allowed_text(proof.allowed) or "what is usual")]
    held = [("waits", words) for words in evaluation.waits]
    held += [("peak", peak_text(evaluation.memory)), ("binds", _binds(found))]
    known = errors_known(found.hardware)
    fits = partial(known.fits, limit=limit)
    rows = [*summary(found.plan, fits, limit, sure(found.hardware)), *checks, *held]
    terminal.show(facts(rows, verdicts(found.plan, fits)))
    worths = (
        ("What each split is worth", found.splits, "without it"),
        ("What each pin costs", found.pins, "with it"),
        ("What each decision is worth", found.decisions, "without it"),
    )
    for title, answers, best in worths:
        if answers or answers is found.splits:
            terminal.show("", worth_table(title, evaluation, found.for_memory, [*answers], best))
    if found.kept:
        terminal.show("", kept_table(evaluation, fits, [*found.kept]))
    if found.against is not None:
        show_against(terminal, evaluation, found.against, found.differences)
        if (alike := found.alike) is not None:
            step, peak = seconds_text(alike.cost.step_seconds), bytes_text(alike.memory.peak)
            terminal.show(f"with the plan's {own.in_short()} too: {step} a step, {peak} of memory")
    if (overlap := overlap_table(evaluation)) is not None:
        terminal.show("", overlap)
    if found.conditions is not None:
        show_conditions(terminal, found.plan, found.conditions)
    show_ways(terminal, found.plan)
    show_turning(terminal, found.turning)
    if own.space is not None and own.space.not_looked_at:
        left = listed(own.space.not_looked_at)
        terminal.show("", View("Not looked at", texts("choices", "looked at with"), left))
    doubt = known.barely(found.plan.predicted.peak_memory_bytes, limit)
    whole = map(str, _whole(planned, evaluation))
    for note in (*planned.loaded.model.notes(found.plan.options), *whole, *([doubt] if doubt else [])):
        terminal.show("", f"note: {note}")


def _binds(found: Explained) -> str:
    """Whether the memory limit keeps a faster layout away."""
    step, free = found.evaluation.cost.step_seconds, found.limit
    room = bytes_text(found.memory - found.evaluation.memory.peak)
    if free is None:
        return f"not the limit, of which {room} are free: the least memory was searched for"
    if not free.proven and (free.seconds is None or free.seconds >= step):
        return f"unknown: {room} are free, and there was no time to search with more"
    if not found.binds or free.seconds is None:
        return f"not the memory: {room} are free, and more would not make it faster"
    return (
        f"the memory: with more than {bytes_text(found.memory)}, {rules_text_of(free.layout)} would take "
        f"{seconds_text(free.seconds)} ({share_text(step - free.seconds, step)} less)"
    )


def _whole(found: Planned, evaluation: Evaluation) -> tuple[Undivided, ...]:
    """Variables that the plan's search could not store split."""
    from mesh_tf_core.lower.storage import STAGES

    stages = [stage for stage in STAGES[1:] if stage in found.plan.allowed.storage]
    return evaluation.left_whole(stages[-1]) if stages else ()
