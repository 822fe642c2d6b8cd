"""The answer to a question about a model's size, as plain data, with its notes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set

from layoutopt.plan.decided import Decided
from layoutopt.plan.known import Known
from layoutopt.plan.machine_details import errors_known, sure
from layoutopt.plan.schema import ProofStatus
from layoutopt.plan.size_results import (
    PAYS,
    Accuracy,
    Beaten,
    Course,
    Flat,
    LawInfo,
    Optimum,
    SizedCandidate,
    SizeResult,
    Sweep,
)
from layoutopt.plan.units import count, gap_text, percent
from layoutopt.sizing.answer import Answering
from layoutopt.sizing.fitting import FittedLaw
from layoutopt.sizing.forecast import Forecast
from layoutopt.sizing.laws import critical_batch, data
from layoutopt.sizing.rows import NEAR_COST, NEAR_LOSS, SAME, SizeRow, frontier, whole_nodes

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
        tokens=row.tokens,
        flops=row.tokens * candidate.flops_per_token,
        mesh=found.mesh,
        layout=found.layout,
        mfu=plan.predicted.mfu,
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
        **row.facts(),
        **decided,
    )


def law_info(forecast: Forecast) -> LawInfo:
    """A law with the further inputs, as results have it."""
    law = forecast.law
    whole = {"errors": law.errors, "intervals": law.intervals, "runs": law.runs}
    return law.model_copy(update={**whole, "told": forecast.facts(), "sources": forecast.sources()})


def result_of(answering: Answering, best: SizeRow) -> SizeResult:
    """The answer to a question, with the best size found, as plain data."""
    question, forecast = answering.question, answering.forecast
    best_of_all = frontier(answering.rows)
    rows = sorted(
        answering.rows, key=lambda r: (r.candidate.size.total, r.timing.machine.name, r.timing.devices)
    )
    told = {id(r): sized(r, forecast, id(r) in best_of_all) for r in rows}
    answer = told[id(best)]
    batch, seen = critical_batch(best.loss), {(each.hardware, each.devices) for each in answering.unfit}
    seen |= {row.place for row in (*rows, *answering.beaten)}
    return SizeResult(
        model=best.candidate.model.name,
        question=question.facts(),
        law=law_info(forecast),
        best=answer,
        candidates=[told[id(r)] for r in rows],
        scaled={} if question.goal == "tokens" and answering.sizes is None else answering.family.powers,
        beaten=[Beaten(**row.facts()) for row in answering.beaten],
        unfit=answering.unfit,
        unsearched=[*_unsearched(answering, seen)],
        optimum=optimum(answering, best),
        flat=flat(answering, best),
        sweeps=[*sweeps(answering, best)],
        critical_batch_tokens=batch,
        least=least(answering, best),
        courses=courses(answering, best),
        accuracy=[*accuracy(answering, best)],
        notes=[*_notes(answering, best, answer, batch)],
    )


def _unsearched(answering: Answering, seen: Set[tuple[str, int]]) -> Iterator[str]:
    """The hardware, or numbers of it that somebody asked for, that there was no time for."""
    for name in (machine.name for machine in answering.machines):
        if name not in {each for each, _ in seen}:
            yield name
        else:
            yield from (f"{n} {name}" for n in answering.question.devices if (name, n) not in seen)


def _is_usual(row: SizeRow) -> bool:
    """True if only the usual layouts of a row were searched."""
    return row.timing.usual and row.timing.plan is not None and row.timing.plan.data.usual is None


def _notes(answering: Answering, best: SizeRow, answer: SizedCandidate, batch: float) -> Sequence[str]:
    """What readers of the answer should know."""
    question = answering.question
    notes = [f"the loss is extrapolated: {each}" for each in answer.beyond]
    sizes = {r.candidate.size.total for r in (*answering.rows, *answering.beaten)}
    own = best.candidate.size.total
    if len(sizes) > 1 and own in (min(sizes), max(sizes)):
        end = "smallest" if own == min(sizes) else "largest"
        notes.append(
            f"the best size is the {end} one searched, so sizes outside this range may be better; widen "
            "--sizes"
        )
    if answer.batch_tokens > batch:
        notes.append(
            f"the batch of {answer.batch_tokens:,} tokens is above the critical batch size of about "
            f"{batch:,.0f} tokens at this loss ({data()['critical_batch']['source']}), so training needs "
            "more tokens than the law predicts"
        )
    if idle := best.candidate.size.idle:
        notes.append(
            f"the scaling law was fitted to dense models; its N is the {count(own - idle)} parameters that a "
            "token uses, without other experts (--fit fits one to your runs)"
        )
    suits = answering.forecast.batch(best.candidate.size)
    if suits is not None:
        notes.append(
            f"the recommended batch for {answering.forecast.replicas} replicas of this size is about "
            f"{suits:,.0f} tokens (Charles et al. 2025, table 10); the model's batch is "
            f"{answer.batch_tokens:,} tokens"
        )
    doubt = known(best)
    runs = doubt.runs if doubt is not None else None
    if runs is not None and best.days * (1 + runs.mean) > question.deadline:
        notes.append(
            f"training takes {best.days:.3g} of the {question.deadline:g} days; the margin is smaller "
            f"than the mean error of predictions for {best.timing.machine.name} ({percent(runs.mean)})"
        )
    hardware = {row.timing.machine.name: row.timing.machine for row in answering.rows}
    if len(hardware) > 1 and any(machine.price is None for machine in hardware.values()):
        notes.append(
            "hardware is compared by chip-hours, not by cost; to compare by cost, add "
            + " ".join(f"--price {name}=P" for name in hardware)
        )
    if answer.status != ProofStatus.OPTIMAL:
        notes.append(
            f"the layout of the best size is not proven optimal (status {answer.status}, gap "
            f"{gap_text(answer.gap or 0)})"
        )
    if not question.devices and (near := whole_nodes(best, (0.75, 1, 1.25, 1.5)))[1:]:
        notes.append(
            "numbers of devices between those in the table were not searched; to compare some, add "
            f"--devices {','.join(map(str, near))}"
        )
    if best.timing.plan is not None:
        notes += (f"layout of the best size: {each}" for each in best.timing.plan.data.notes)
    if ruled := len(answering.beaten):
        notes.append(
            f"{ruled} of {ruled + len(answering.rows) + len(answering.unfit)} candidates were not searched, "
            "because even without communication time they would be worse than another candidate in loss, "
            "days or cost and better in none of the three; to search them too, use --every"
        )
    if narrow := sum(_is_usual(row) for row in answering.rows):
        notes.append(
            f"{narrow} of {len(answering.rows)} rows are the best of the usual layouts, and others, such as "
            "pipelines, may be faster; a longer --time-limit searches them too"
        )
    if answering.missing:
        why = "stopped" if answering.stopped else "time limit reached"
        notes.append(f"{why}: {answering.missing} of {answering.planned} searches were not run")
    if question.inference:
        notes.append(
            f"the answer allows for {question.inference:.3g} tokens of inference, each at a third of the "
            f"FLOPs of a training token and at the same cost per FLOP ({data()['inference']['source']}); "
            "days and money cover training only"
        )
    return notes
