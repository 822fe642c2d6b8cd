"""`layoutopt explain`: why this layout, what binds it, and what another one would cost."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.changed import Changed, changed_conditions, proven, with_found
from layoutopt.cli.cost_tables import overlap_table
from layoutopt.cli.explain_tables import kept_steps, kept_table, rules_text_of, show_against, worth_table
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
from layoutopt.cli.plans import (
    ModelOption,
    PlanArgument,
    Planned,
    asked_of,
    open_plan,
    where_of,
)
from layoutopt.cli.progress import Steps
from layoutopt.cli.terminal import Terminal, facts, table
from layoutopt.cli.ways import compared_on_links, show_turning, show_ways, with_turning
from layoutopt.clock import Clock
from layoutopt.details.of_machine import errors_known, sure
from layoutopt.plan.covered import listed
from layoutopt.plan.units import bytes_text, seconds_text, share_text, some

if TYPE_CHECKING:
    from costmodels.liveness import MemoryProfile
    from layoutopt.analysis.certificate import Certificate
    from layoutopt.analysis.explain import Difference, WhatIfAnswer
    from layoutopt.analysis.keeping import Keeping
    from layoutopt.evaluator import Evaluation
    from layoutopt.plan.results import Against, ExplainResult, Worth
    from layoutopt.plan.ways import Turning
    from layoutopt.space.undivided import Undivided

EXAMPLES = examples(
    "layoutopt explain plan.json",
    'layoutopt explain plan.json --against "batch:data+model" --pin "batch:none" --json',
    "layoutopt explain plan.json --without all",
    "layoutopt explain plan.json --sensitivity --check --out plan.json",
)
LARGEST = 3
"""Tensors named at the peak."""


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
            help="Show what the best step is if this may not be chosen: zero, hybrid, recompute, selective, "
            "sequence, context, pipeline, 1f1b, circular, interleaved, collective_matmul, offload, "
            "microbatches; all: each that the plan has.",
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
    from layoutopt.analysis.explain import disagreements, forbidden
    from layoutopt.analysis.keeping import keepings
    from layoutopt.evaluator import evaluate
    from mesh_tf_core.errors import UserError

    clock = time_limited(time_limit)
    terminal = Terminal(as_json, quiet)
    check_out(out)
    found = open_plan(plan, model)
    its = found.plan
    features = forbidden(its, asked_of(its), without or ())
    evaluation = evaluate(found.loaded.model, its.mesh, its.layout, found.hardware, its.options)
    other = _against(found, against)
    said = disagreements(its, evaluation)
    if said and (numbers := _other_numbers(found)):
        said.insert(0, f"made with other hardware numbers: {some(numbers, LARGEST)}")
    if sensitivity and for_memory(found):
        raise UserError("--sensitivity varies what makes a step fast: it needs a plan of another --objective")
    # What is asked for shares the time.
    own = clock.part(1 / (1 + check + sensitivity))
    proof = checked_proof(terminal, found, evaluation, said, own) if check else None
    answers = _searched(terminal, found, list(pin or ()), features, clock.part(1 / (1 + sensitivity)))
    kept = keepings(found.loaded.model, its.mesh, its.layout, its.options, found.hardware)
    changed = changed_conditions(terminal, found, clock) if sensitivity else None
    turning = compared_on_links(terminal, found, clock, sensitivity)
    told = with_found(with_turning(found.plan, turning), changed, proof)
    with terminal.saved(out, told.save, "the plan"):
        _tell(terminal, found, said, evaluation, other, answers, kept, changed, proof, turning)
    if proof is not None and proof.faster is not None:
        raise UserError(f"--check: the plan's proof is {proof}")


def _other_numbers(found: Planned) -> list[str]:
    """Numbers of the hardware that are not those that the plan was made with, as far as it says these."""
    from layoutopt.details.of_machine import hardware_details

    said, now = found.plan.data.details.hardware, hardware_details(found.hardware, found.plan.mesh)
    before = {n.path: n.value for n in said.numbers} if said else {}
    return [n.path for n in now.numbers if n.path in before and before[n.path] != n.value]


def for_memory(found: Planned) -> bool:
    """The plan's search was for the least memory."""
    return where_of(found.plan).objective == "memory"


def checked_proof(
    terminal: Terminal, found: Planned, evaluation: Evaluation, said: list[str], clock: Clock
) -> Certificate:
    """Rules out every problem of the plan's search once more, or as many as there is time for.

    Args:
      said: where the plan's prediction is not that of `evaluation`.

    Raises:
      UserError: a plan that was for memory, claims no proof, or is not what it says.
    """
    from layoutopt.analysis.certificate import Certificate, Ruled, certify, considered_by
    from mesh_tf_core.errors import UserError

    plan, asked = found.plan, where_of(found.plan)
    if plan.data.details.search is None:
        raise UserError("--check: the plan does not say what was asked; make it again with search --out")
    if for_memory(found):
        raise UserError("--check shows that nothing is faster: it needs a plan of another --objective")
    if plan.solver.status != "OPTIMAL":
        raise UserError(f"--check: the plan claims no proof, its status is {plan.solver.status}")
    if said:
        raise UserError(f"--check: the plan is not what its layout comes to: {'; '.join(said)}")
    if evaluation.memory.peak > found.limit:
        needs, limit = bytes_text(evaluation.memory.peak), bytes_text(found.limit)
        raise UserError(f"--check: the plan's layout needs {needs} and was searched for {limit}")
    with terminal.waiting("ruling out what was searched"):
        rules, axes = asked_of(plan), asked.max_axes
        problems = certify(found.loaded.model, plan, found.hardware, found.limit, rules, asked.devices, axes)
        ruled: list[Ruled] = []
        complete = clock.within(0.0, lambda: ruled.extend(problems))
        return Certificate(tuple(ruled), rules, considered_by(plan), complete)


def _against(found: Planned, layout: str | None) -> Evaluation | None:
    from layoutopt.evaluator import evaluate
    from mesh_tf_core import Layout

    if layout is None:
        return None
    return evaluate(found.loaded.model, found.plan.mesh, Layout(layout), found.hardware)


def _alike(found: Planned, other: Evaluation) -> Evaluation | None:
    """The other layout with the plan's storage and recomputation, if that is anything and legal there."""
    from layoutopt.evaluator import evaluate
    from mesh_tf_core import LayoutError, Options

    model, mesh, options = found.loaded.model, found.plan.mesh, found.plan.options
    if options == Options():
        return None
    try:
        return evaluate(model, mesh, other.layout, found.hardware, options)
    except LayoutError:
        return None


def _searched(
    terminal: Terminal, found: Planned, pins: list[str], features: list[str], clock: Clock
) -> dict[str, list[WhatIfAnswer]]:
    """The searches under other conditions: without the limit, each split or feature, and with each pin."""
    from layoutopt.analysis.explain import finder, split_rules

    objective = "memory" if for_memory(found) else "time"
    find = finder(found.loaded.model, found.plan, found.hardware, asked_of(found.plan), objective)
    limit = float(found.limit)
    questions: list[tuple[str, str, float, str | None, str | None]] = []
    questions += [] if for_memory(found) else [("limit", "any memory", math.inf, None, None)]
    questions += [("splits", rule, limit, undone, None) for rule, undone in split_rules(found.plan)]
    questions += [("pins", rules, limit, rules, None) for rules in pins]
    questions += [("decisions", name, limit, None, name) for name in features]
    answers: dict[str, list[WhatIfAnswer]] = {"limit": [], "splits": [], "pins": [], "decisions": []}
    with Steps(terminal, "searching", len(questions)) as bar:
        for n, (kind, condition, memory, rules, feature) in enumerate(questions):
            bar.update(n, condition)
            own = clock.part(1 / (len(questions) - n))
            answers[kind].append(find(condition, memory, rules, own, feature))
    return answers


def _tell(
    terminal: Terminal,
    found: Planned,
    said: list[str],
    evaluation: Evaluation,
    other: Evaluation | None,
    answers: dict[str, list[WhatIfAnswer]],
    kept: list[Keeping],
    changed: Changed | None,
    proof: Certificate | None,
    turning: Turning | None,
) -> None:
    from layoutopt.analysis.explain import differences

    own = found.plan.data
    rows = differences(evaluation.cost, other.cost) if other else []
    more = changed.details() if changed else {}
    if proof is not None:
        more["proof"] = proven(proof)
    if turning is not None:
        more["turning"] = turning
    more["kept"] = kept_steps(found.limit, kept)
    terminal.result(_result(found, said, evaluation, other, rows, answers, more))
    if terminal.as_json:
        return
    checked = "lowered and priced again: the same" if not said else "; ".join(said)
    checks = [("checked", checked)]
    if proof is not None:
        from layoutopt.space.recorded import allowed_text

        checks += [("proof", str(proof)), ("allowed", allowed_text(proof.allowed) or "what is usual")]
    held = [("waits", words) for words in evaluation.waits]
    held += [("peak", _peak(evaluation.memory)), _binds(found, evaluation, answers)]
    known = errors_known(found.hardware)
    said_of = summary(found.plan, found.limit, sure(found.hardware))
    fits = partial(known.fits, limit=found.limit)
    terminal.show(facts([*said_of, *checks, *held], verdicts(found.plan, fits)))
    memory = for_memory(found)
    terminal.show(
        "", worth_table("What each split is worth", evaluation, memory, answers["splits"], "without it")
    )
    if answers["pins"]:
        terminal.show("", worth_table("What each pin costs", evaluation, memory, answers["pins"], "with it"))
    if answers["decisions"]:
        title = "What each decision is worth"
        terminal.show("", worth_table(title, evaluation, memory, answers["decisions"], "without it"))
    if kept:
        terminal.show("", kept_table(evaluation, found.limit, kept))
    if other is not None:
        show_against(terminal, evaluation, other, rows)
        if (alike := _alike(found, other)) is not None:
            step, peak = seconds_text(alike.cost.step_seconds), bytes_text(alike.memory.peak)
            terminal.show(f"with the plan's {own.in_short()} too: {step} a step, {peak} of memory")
    if (overlap := overlap_table(evaluation)) is not None:
        terminal.show("", overlap)
    if changed is not None:
        changed.show(terminal)
    show_ways(terminal, found.plan)
    show_turning(terminal, turning)
    if own.space is not None and own.space.not_looked_at:
        left = listed(own.space.not_looked_at)
        terminal.show("", table("Not looked at", ["choices", "looked at with"], left))
    doubt = known.barely(found.plan.predicted.peak_memory_bytes, found.limit)
    whole = map(str, _whole(found, evaluation))
    for note in (*found.loaded.model.notes(found.plan.options), *whole, *([doubt] if doubt else [])):
        terminal.show("", f"note: {note}")


def _whole(found: Planned, evaluation: Evaluation) -> tuple[Undivided, ...]:
    """Variables that the plan's search could not store split."""
    from mesh_tf_core.lower.storage import STAGES

    stages = [stage for stage in STAGES[1:] if stage in asked_of(found.plan).storage]
    return evaluation.left_whole(stages[-1]) if stages else ()


def _binds(found: Planned, evaluation: Evaluation, answers: dict[str, list[WhatIfAnswer]]) -> tuple[str, str]:
    """Whether the memory limit keeps a faster layout away."""
    step = evaluation.cost.step_seconds
    room = found.limit - evaluation.memory.peak
    if not answers["limit"]:
        return (
            "binds",
            f"not the limit, of which {bytes_text(room)} are free: the least memory was searched for",
        )
    free = answers["limit"][0]
    if not free.proven and (free.seconds is None or free.seconds >= step):
        return "binds", f"unknown: {bytes_text(room)} are free, and there was no time to search with more"
    if free.seconds is None or free.seconds >= step * (1 - 1e-9):
        return "binds", f"not the memory: {bytes_text(room)} are free, and more would not make it faster"
    return (
        "binds",
        f"the memory: with more than {bytes_text(found.limit)}, {rules_text_of(free.layout)} would take "
        f"{seconds_text(free.seconds)} ({share_text(step - free.seconds, step)} less)",
    )


def _peak(memory: MemoryProfile) -> str:
    """What a device holds where it holds most."""
    most = ", ".join(f"{h.what} ({bytes_text(h.bytes)})" for h in memory.holdings[:LARGEST])
    if not memory.points:
        return most
    at = memory.points[memory.at]
    where = "/".join(filter(None, (at.origin.scope, at.name)))
    return f"at {where} in {at.origin.phase}: {most}"


def _result(
    found: Planned,
    said: list[str],
    evaluation: Evaluation,
    other: Evaluation | None,
    rows: list[Difference],
    answers: dict[str, list[WhatIfAnswer]],
    more: dict[str, Any],
) -> ExplainResult:
    from layoutopt.plan.results import Binding, ExplainResult

    step, peak = evaluation.cost.step_seconds, evaluation.memory.peak
    free = next((a.seconds for a in answers["limit"]), None)
    return ExplainResult(
        layout=found.plan.data.layout,
        step_seconds=step,
        agrees=not said,
        disagreements=said,
        memory=Binding(
            peak_bytes=peak,
            peak=_peak(evaluation.memory),
            limit_bytes=found.limit,
            binds=free is not None and free < step * (1 - 1e-9),
            step_seconds_without_limit=free,
        ),
        splits=[_cost_of(a, evaluation, for_memory(found)) for a in answers["splits"]],
        pins=[_cost_of(a, evaluation, for_memory(found)) for a in answers["pins"]],
        decisions=tuple(_cost_of(a, evaluation, for_memory(found)) for a in answers["decisions"]),
        against=None if other is None else _beside(found, other, rows),
        **more,
    )


def _cost_of(a: WhatIfAnswer, evaluation: Evaluation, memory: bool) -> Worth:
    from layoutopt.plan.results import Worth

    step, peak = evaluation.cost.step_seconds, evaluation.memory.peak
    return Worth(
        rule=a.condition,
        step_seconds=a.seconds,
        peak_bytes=a.peak,
        costs_seconds=None if a.seconds is None or memory else max(a.seconds - step, 0.0),
        costs_bytes=max(a.peak - peak, 0) if memory and a.peak is not None else None,
        layout=a.layout,
        proven=a.proven,
        reason=a.reason or None,
    )


def _beside(found: Planned, other: Evaluation, rows: list[Difference]) -> Against:
    from layoutopt.plan.results import Against, OperationDifference

    alike = _alike(found, other)
    return Against(
        layout=str(other.layout),
        step_seconds=other.cost.step_seconds,
        step_seconds_with_the_plans_options=alike.cost.step_seconds if alike else None,
        peak_bytes=other.memory.peak,
        differences=[
            OperationDifference(
                scope=d.scope,
                operation=d.name,
                phase=d.phase,
                axes=d.where,
                plan_seconds=d.ours,
                other_seconds=d.theirs,
            )
            for d in rows
        ],
    )
