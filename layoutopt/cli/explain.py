"""`layoutopt explain`: why this layout, what binds it, and what another one would cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.changed import Changed, changed_conditions, proof_json, with_found
from layoutopt.cli.options import JsonOption, QuietOption, check_out, examples
from layoutopt.cli.plan_tables import rules_text, summary
from layoutopt.cli.plans import ModelOption, PlanArgument, Planned, asked_of, details_of, open_plan
from layoutopt.cli.progress import Steps
from layoutopt.cli.results import layout_text
from layoutopt.cli.terminal import Terminal, facts, table
from layoutopt.cli.units import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from layoutopt.certificate import Certificate
    from layoutopt.evaluate import Evaluation
    from layoutopt.explain import Answer, Difference

EXAMPLES = examples(
    "layoutopt explain plan.json",
    'layoutopt explain plan.json --against "batch:data+model" --pin "batch:none" --json',
    "layoutopt explain plan.json --sensitivity --check --out plan.json",
)
MOST = 15


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
        typer.Option(
            metavar="PLAN.json",
            help="Write the plan again, with what --sensitivity and --check found, for its report.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say why a plan's layout and not another: what each split is worth, what binds, what a pin costs."""
    from layoutopt.evaluate import evaluate
    from layoutopt.explain import disagreements

    terminal = Terminal(as_json, quiet)
    check_out(out)
    found = open_plan(plan, model)
    own = found.plan
    judged = evaluate(found.loaded.model, own.mesh, own.layout, found.hardware, own.options)
    other = _against(found, against)
    said = disagreements(own, judged)
    proof = checked_proof(terminal, found) if check else None
    answers = _searched(terminal, found, list(pin or ()))
    changed = changed_conditions(terminal, found) if sensitivity else None
    _tell(terminal, found, said, judged, other, answers, changed, proof)
    if out is not None:
        with_found(found.plan, changed, proof).save(out)
        terminal.say(f"wrote the plan to {out}")


def checked_proof(terminal: Terminal, found: Planned) -> Certificate:
    """Rules out every problem of the plan's search once more; UserError for a plan that was not for time."""
    from layoutopt.certificate import Certificate, certify
    from mesh_tf_core.errors import UserError

    plan, asked = found.plan, details_of(found.plan).get("search")
    if not isinstance(asked, dict) or asked.get("objective", "time") != "time":
        raise UserError("--check needs a plan of `search --objective time --out`, which says what was asked")
    if plan.solver.status != "OPTIMAL":
        raise UserError(f"--check: the plan claims no proof, its status is {plan.solver.status}")
    devices, axes = asked.get("devices"), asked.get("max_axes", 2)
    with terminal.waiting("ruling out what was searched"):
        ruled = certify(found.loaded.model, plan, found.hardware, found.limit, asked_of(plan), devices, axes)
        return Certificate(tuple(ruled))


def _against(found: Planned, layout: str | None) -> Evaluation | None:
    from layoutopt.evaluate import evaluate
    from mesh_tf_core import Layout

    if layout is None:
        return None
    return evaluate(found.loaded.model, found.plan.mesh, Layout(layout), found.hardware)


def _searched(terminal: Terminal, found: Planned, pins: list[str]) -> dict[str, list[Answer]]:
    """The searches under other conditions: without the limit, without each split, with each pin."""
    from layoutopt.explain import finder, split_rules

    find = finder(found.loaded.model, found.plan, found.hardware, asked_of(found.plan))
    questions: list[tuple[str, str, float, str | None]] = [("limit", "any memory", math.inf, None)]
    questions += [("splits", rule, float(found.limit), undone) for rule, undone in split_rules(found.plan)]
    questions += [("pins", rules, float(found.limit), rules) for rules in pins]
    answers: dict[str, list[Answer]] = {"limit": [], "splits": [], "pins": []}
    with Steps(terminal, "searching", len(questions)) as bar:
        for n, (kind, condition, memory, rules) in enumerate(questions):
            bar.update(n, condition)
            answers[kind].append(find(condition, memory, rules))
    return answers


def _tell(
    terminal: Terminal,
    found: Planned,
    said: list[str],
    judged: Evaluation,
    other: Evaluation | None,
    answers: dict[str, list[Answer]],
    changed: Changed | None,
    proof: Certificate | None,
) -> None:
    from layoutopt.explain import differences

    rows = differences(judged.cost, other.cost) if other else []
    more = changed.as_json() if changed else {}
    if proof is not None:
        more["proof"] = proof_json(proof)
    terminal.result({**_json(found, said, judged, other, rows, answers), **more})
    if terminal.as_json:
        return
    checked = "lowered and priced again: the same" if not said else "; ".join(said)
    checks = [("checked", checked)] if proof is None else [("checked", checked), ("proof", str(proof))]
    terminal.show(facts([*summary(found.plan, found.limit), *checks, _binds(found, judged, answers)]))
    splits = table(
        "What each split is worth", *_worth(judged.cost.step_seconds, answers["splits"], "without it")
    )
    terminal.show("", splits)
    if answers["pins"]:
        pins = table("What each pin costs", *_worth(judged.cost.step_seconds, answers["pins"], "with it"))
        terminal.show("", pins)
    if other is not None:
        _show_against(terminal, judged, other, rows)
    if changed is not None:
        changed.show(terminal)


def _binds(found: Planned, judged: Evaluation, answers: dict[str, list[Answer]]) -> tuple[str, str]:
    """Whether the memory limit keeps a faster layout away."""
    free = answers["limit"][0]
    step = judged.cost.step_seconds
    room = found.limit - judged.memory.peak
    if free.seconds is None or free.seconds >= step * (1 - 1e-9):
        return "binds", f"not the memory: {bytes_text(room)} are free, and more would not make it faster"
    return (
        "binds",
        f"the memory: with more than {bytes_text(found.limit)}, {rules_text_of(free.layout)} would take "
        f"{seconds_text(free.seconds)} ({share_text(step - free.seconds, step)} less)",
    )


def rules_text_of(layout: str) -> str:
    """A layout's string with room to break the line."""
    return layout.replace(";", "; ") or rules_text({})


def _worth(
    step: float, answers: list[Answer], best: str
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[int, ...]]:
    columns = ("rule", f"best step {best}", "costs", "then the layout is", "proven")
    rows: list[tuple[str, ...]] = []
    for a in sorted(answers, key=lambda a: -(a.seconds if a.seconds is not None else math.inf)):
        if a.seconds is None:
            rows.append(
                (
                    a.condition,
                    "nothing fits" if a.proven else "unknown",
                    "",
                    a.reason,
                    "yes" if a.proven else "no",
                )
            )
            continue
        extra = max(a.seconds - step, 0.0)
        costs = f"{seconds_text(extra)} ({share_text(extra, step)})"
        proven = "yes" if a.proven else "no"
        rows.append((a.condition, seconds_text(a.seconds), costs, rules_text_of(a.layout), proven))
    return columns, rows, (1, 2)


def _show_against(terminal: Terminal, judged: Evaluation, other: Evaluation, rows: list[Difference]) -> None:
    ours, theirs = judged.cost.step_seconds, other.cost.step_seconds
    cells = [
        (
            f"{d.scope}/{d.name}" if d.scope else d.name,
            d.phase,
            d.where or "compute",
            seconds_text(d.ours),
            seconds_text(d.theirs),
            _signed(d.saved),
        )
        for d in rows[:MOST]
    ]
    rest = sum(d.saved for d in rows[MOST:])
    if len(rows) > MOST:
        cells.append((f"{len(rows) - MOST} others", "", "", "", "", _signed(rest)))
    cells.append(("step", "", "", seconds_text(ours), seconds_text(theirs), _signed(theirs - ours)))
    columns = ("operation", "phase", "on", "the plan", "the other", "saved")
    terminal.show("", table("Where the two differ", columns, cells, (3, 4, 5), total=True))
    terminal.show(
        f"{layout_text(other.program.layout)}: {seconds_text(theirs)} a step, "
        f"{bytes_text(other.memory.peak)} of memory; the plan: {bytes_text(judged.memory.peak)}"
    )


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{seconds_text(abs(seconds))}"


def _json(
    found: Planned,
    said: list[str],
    judged: Evaluation,
    other: Evaluation | None,
    rows: list[Difference],
    answers: dict[str, list[Answer]],
) -> dict[str, Any]:
    step = judged.cost.step_seconds

    def worth(a: Answer) -> dict[str, Any]:
        return {
            "rule": a.condition,
            "step_seconds": a.seconds,
            "costs_seconds": None if a.seconds is None else max(a.seconds - step, 0.0),
            "layout": a.layout,
            "proven": a.proven,
            "reason": a.reason or None,
        }

    free = answers["limit"][0].seconds
    return {
        "layout": found.plan.data.layout,
        "step_seconds": step,
        "agrees": not said,
        "disagreements": said,
        "memory": {
            "peak_bytes": judged.memory.peak,
            "limit_bytes": found.limit,
            "binds": free is not None and free < step * (1 - 1e-9),
            "step_seconds_without_limit": free,
        },
        "splits": [worth(a) for a in answers["splits"]],
        "pins": [worth(a) for a in answers["pins"]],
        "against": None
        if other is None
        else {
            "layout": str(other.program.layout),
            "step_seconds": other.cost.step_seconds,
            "peak_bytes": other.memory.peak,
            "differences": [
                {
                    "scope": d.scope,
                    "operation": d.name,
                    "phase": d.phase,
                    "axes": d.where,
                    "plan_seconds": d.ours,
                    "other_seconds": d.theirs,
                }
                for d in rows
            ],
        },
    }
