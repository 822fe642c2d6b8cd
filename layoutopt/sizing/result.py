"""The answer to a question about a model's size, as plain data, with its notes."""

from __future__ import annotations

from collections.abc import Sequence

from layoutopt.plan.schema import ProofStatus
from layoutopt.plan.size_results import LawInfo, SizedCandidate, SizeResult
from layoutopt.plan.units import count, gap_text, percent
from layoutopt.sizing import summary
from layoutopt.sizing.answer import Answering
from layoutopt.sizing.fitting import FittedLaw
from layoutopt.sizing.forecast import Forecast
from layoutopt.sizing.laws import critical_batch, data
from layoutopt.sizing.rows import SizeRow, frontier


def law_info(forecast: Forecast) -> LawInfo:
    """A law as plain data."""
    law = forecast.law
    own = law if isinstance(law, FittedLaw) else None
    return LawInfo(
        name=law.name,
        counts=law.counts,
        constants=dict(law.constants),
        source=law.source,
        note=law.note,
        exponents=law.exponents,
        ranges={"parameters": law.parameters, "tokens": law.tokens},
        errors=dict(law.errors),
        intervals=own.intervals if own else {},
        runs=list(own.points) if own else [],
        told=forecast.facts(),
        sources=forecast.sources(),
    )


def result_of(answering: Answering, best: SizeRow) -> SizeResult:
    """The answer to a question, with the best size found, as plain data."""
    question, forecast = answering.question, answering.forecast
    best_of_all = frontier(answering.rows)
    rows = sorted(
        answering.rows, key=lambda r: (r.candidate.size.total, r.timing.machine.name, r.timing.devices)
    )
    told = {id(r): summary.sized(r, forecast, id(r) in best_of_all) for r in rows}
    answer = told[id(best)]
    batch, seen = critical_batch(best.loss), {each.hardware for each in answering.unfit}
    seen |= {row.timing.machine.name for row in (*rows, *answering.beaten)}
    return SizeResult(
        model=best.candidate.model.name,
        question=question.facts(),
        law=law_info(forecast),
        best=answer,
        candidates=[told[id(r)] for r in rows],
        scaled={} if question.goal == "tokens" and answering.sizes is None else answering.family.powers,
        beaten=[*map(summary.beaten, answering.beaten)],
        unfit=answering.unfit,
        unsearched=[machine.name for machine in answering.machines if machine.name not in seen],
        optimum=summary.optimum(answering, best),
        flat=summary.flat(answering, best),
        sweeps=[*summary.sweeps(answering, best)],
        critical_batch_tokens=batch,
        least=summary.least(answering, best),
        courses=summary.courses(answering, best),
        accuracy=[*summary.accuracy(answering, best)],
        notes=[*_notes(answering, best, answer, batch)],
    )


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
    known = summary.known(best)
    runs = known.runs if known is not None else None
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
    if best.timing.plan is not None:
        notes += (f"layout of the best size: {each}" for each in best.timing.plan.data.notes)
    if ruled := len(answering.beaten):
        notes.append(
            f"{ruled} of {ruled + len(answering.rows) + len(answering.unfit)} candidates were not searched, "
            "because even without communication time they would be worse than another candidate in loss, "
            "days or cost and better in none of the three; to search them too, use --every"
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
