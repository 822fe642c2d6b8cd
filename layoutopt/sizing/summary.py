"""The summary of an answer: how flat it is, where more devices stop paying, and the law."""

from __future__ import annotations

import math
from collections.abc import Iterator

from layoutopt.plan.decided import Decided
from layoutopt.plan.known import Known
from layoutopt.plan.machine_details import errors_known, sure
from layoutopt.plan.size_results import PAYS, Accuracy, Beaten, Course, Flat, Optimum, SizedCandidate, Sweep
from layoutopt.sizing.answer import Answering
from layoutopt.sizing.fitting import FittedLaw
from layoutopt.sizing.forecast import Forecast
from layoutopt.sizing.rows import NEAR_COST, NEAR_LOSS, SAME, SizeRow

DECADES, PER_DECADE, MOST_COURSES = 2, 6, 8
"""Decades of FLOPs that curves span on both sides, points of a decade, and number of sizes with a curve."""


def flat(answering: Answering, best: SizeRow) -> Flat | None:
    """Sizes that are nearly as good on the same devices."""
    if answering.question.goal == "tokens":
        return None
    if answering.question.goal == "budget" and math.isinf(answering.question.deadline):
        same = [*answering.rows, *answering.beaten]  # the loss of a size is the same everywhere
    else:
        same = [r for r in answering.rows if r.place == best.place]
        if len(same) < 3:  # with a deadline, each is on devices of its own
            same = [r for r in answering.rows if r.timing.machine is best.timing.machine]
    by_cost = answering.question.by_cost
    within = f"{NEAR_COST - 1:.0%} more cost" if by_cost else f"{NEAR_LOSS} nats per token"
    sizes = [r.candidate.size.total for r in (*same, best) if r.near(best, by_cost)]
    return Flat(within=within, low=int(min(sizes)), high=int(max(sizes)))


def sweeps(answering: Answering, best: SizeRow) -> Iterator[Sweep]:
    """The best size on every machine where several numbers of devices hold it (and end by the deadline)."""
    rows = [r for r in answering.rows if r.candidate is best.candidate]
    deadline = answering.question.deadline
    for machine in answering.machines:
        own = [r for r in rows if r.timing.machine is machine and r.days <= deadline * (1 + SAME)]
        counts = [r.timing.devices for r in own]
        if len(counts) > math.isinf(deadline):
            least = min(r.per_token for r in own)
            pays = max(r.timing.devices for r in own if r.per_token <= PAYS * least)
            yield Sweep(
                hardware=machine.name,
                fits_from=min(counts),
                in_time=math.isfinite(deadline),
                pays_to=None if pays == max(counts) else pays,
                searched_to=max(counts),
            )


def accuracy(answering: Answering, best: SizeRow) -> Iterator[Accuracy]:
    """The accuracy of the times of each machine with a row: those of the best size there."""
    for machine in answering.machines:
        own = [r for r in (best, *answering.rows) if r.timing.machine is machine]
        if own and (errors := known(own[0])) is not None:
            yield Accuracy(
                hardware=machine.name,
                words=sure(machine.hardware, errors),
                steps=errors.runs.rows if errors.runs else 0,
                mean=errors.runs.mean if errors.runs else None,
            )


def known(row: SizeRow) -> Known | None:
    """The known errors of predictions of the kind of a row's plan."""
    plan = row.timing.plan
    if plan is None:
        return None
    return errors_known(row.timing.machine.hardware, row.candidate.model, plan.data.pipeline)


def least(answering: Answering, best: SizeRow) -> list[tuple[float, float]]:
    """FLOPs around the answer's, and the least loss by the law."""
    flops = best.candidate.flops_per_token * best.tokens
    around = [flops * 10 ** (i / PER_DECADE) for i in range(-PER_DECADE * DECADES, PER_DECADE * DECADES + 1)]
    pairs = [(c, answering.forecast.optimum(c, answering.question.inference)) for c in around]
    return [(c, answering.forecast.loss_of(n, d)) for c, (n, d) in pairs if n >= 1 and d >= 1]


def courses(answering: Answering, best: SizeRow) -> list[Course]:
    """Courses of some sizes, evenly chosen, up to their tokens."""
    sizes = sorted(
        {id(r.candidate): r for r in (*answering.beaten, *answering.rows)}.values(),
        key=lambda r: r.candidate.size.total,
    )
    stride = max(1, -(-len(sizes) // MOST_COURSES))
    chosen = [r for i, r in enumerate(sizes) if i % stride == 0 or r.candidate is best.candidate]
    found = []
    for row in chosen:
        parts = [row.tokens * 10 ** (-i / PER_DECADE) for i in reversed(range(2 * PER_DECADE))]
        points = [
            (t * row.candidate.flops_per_token, answering.forecast.loss(row.candidate.size, t)) for t in parts
        ]
        found.append(Course(parameters=row.candidate.size.total, points=points))
    return found


def optimum(answering: Answering, best: SizeRow) -> Optimum:
    """The law's optimum for the FLOPs of the answer."""
    flops = best.candidate.flops_per_token * (best.tokens + answering.question.inference / 3)
    n, d = answering.forecast.optimum(flops, answering.question.inference)
    return Optimum(flops=flops, parameters=n, tokens=d, loss=answering.forecast.loss_of(n, d))


def sized(row: SizeRow, forecast: Forecast, on_frontier: bool) -> SizedCandidate:
    """A row as plain data."""
    plan, candidate, law = row.timing.plan, row.candidate, forecast.law
    assert plan is not None
    found = plan.data
    interval = None
    if isinstance(law, FittedLaw):
        interval = law.loss_interval(candidate.size.counted(law), row.tokens)
    decided = {name: getattr(found, name) for name in Decided.model_fields}
    return SizedCandidate(
        hparams=dict(candidate.hparams),
        parameters=int(candidate.size.total),
        tokens=row.tokens,
        loss=row.loss,
        flops=row.tokens * candidate.flops_per_token,
        hardware=row.timing.machine.name,
        devices=row.timing.devices,
        mesh=found.mesh,
        layout=found.layout,
        step_seconds=row.timing.step_seconds,
        mfu=plan.predicted.mfu,
        days=row.days,
        chip_hours=row.chip_hours,
        money=row.money,
        non_embedding=int(candidate.size.non_embedding),
        loss_interval=interval,
        tokens_per_second=row.timing.tokens_per_second,
        batch=found.model.batch,
        batch_tokens=candidate.tokens,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        status=plan.solver.status,
        gap=plan.solver.gap,
        beyond=forecast.outside(candidate.size, row.tokens),
        frontier=on_frontier,
        **decided,
    )


def beaten(row: SizeRow) -> Beaten:
    """The sizes that were not searched, as plain data."""
    return Beaten(
        parameters=int(row.candidate.size.total),
        hardware=row.timing.machine.name,
        devices=row.timing.devices,
        loss=row.loss,
        step_seconds=row.timing.step_seconds,
        days=row.days,
        chip_hours=row.chip_hours,
        money=row.money,
    )
