"""From a question to its answer: which sizes are searched where, and which of them is the best.

Sizes around the law's optimum are searched on the devices that are given. Where none are, each is searched on
`USUAL` devices, or as many as its variables need, or (with a deadline) as end in time; the best size is then
searched on fewer and on more. Of one size, the answer is the soonest training in which a token costs at most
`PAYS` times the least, or the cheapest that meets the deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from layoutopt.plan.decided import Decided
from layoutopt.plan.size_results import Course, Flat, Optimum, SizedCandidate, Sweep, Unfit
from layoutopt.plan.units import count, digits
from layoutopt.sizing.family import Candidate, Family
from layoutopt.sizing.fitting import FittedLaw
from layoutopt.sizing.forecast import Forecast, Size
from layoutopt.sizing.question import DAY, GUESSED_MFU, HOUR, Question
from layoutopt.sizing.timing import Machine, Timer, Timing, fewest
from mesh_tf_core.errors import InfeasibleError, LimitError

USUAL = 64
"""Devices on which sizes are compared where nothing is said of them."""
MOST_SWEPT, PAYS, STOPS = 1024, 1.25, 2.0
"""Devices up to which the best size is searched; times the least cost of a token that are still worth the
time, and at which no more devices are looked at."""
AROUND = 6.0
"""Sizes that are searched: the law's optimum, so many times smaller and larger."""
NEAR_LOSS, NEAR_COST = 0.01, 1.1
"""Nats per token above the best, and times the least cost, that are called flat."""
DOUBLINGS = 4
DECADES, PER_DECADE, MOST_COURSES = 2, 6, 8
"""Of FLOPs that curves are of, on both sides, their points, and how many sizes have one."""
Tell = Callable[[int, int, str], None]
"""tell(searches done, of about so many, what is looked at)."""


@dataclass(frozen=True)
class Row:
    """A timing, trained as the question says."""

    timing: Timing
    tokens: float
    loss: float
    days: float
    chip_hours: float
    money: float | None
    cost: float

    @property
    def candidate(self) -> Candidate:
        return self.timing.candidate

    @property
    def per_token(self) -> float:
        return self.cost / self.tokens


@dataclass
class Answering:
    """What is known while a question is answered.

    Attributes:
      count: of sizes.
      sizes: the smallest and the largest (None: around the law's optimum).
      rows, unfit: what was searched.
      missing: sizes for which there was no time.
    """

    question: Question
    forecast: Forecast
    family: Family
    machines: Sequence[Machine]
    timer: Timer
    count: int
    sizes: tuple[float, float] | None = None
    tell: Tell | None = None
    rows: list[Row] = field(default_factory=list)
    unfit: list[Unfit] = field(default_factory=list)
    missing: int = 0
    planned: int = 0

    # -- which sizes ---------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """The sizes, those near the law's optimum first."""
        if self.question.goal == "tokens":
            return [self.family.own]
        low, high = self.sizes or self._around()
        middle = math.sqrt(low * high)
        steps = max(self.count - 1, 1)
        ratio = (high / low) ** (1 / steps)
        wanted = [low * ratio**i for i in range(self.count)] if self.count > 1 else [middle]
        found = [*self.family.sizes(wanted, self._counted)]
        return sorted(found, key=lambda c: abs(math.log(self._counted(c.size) / middle)))

    def _counted(self, size: Size) -> float:
        return size.counted(self.forecast.law)

    def _around(self) -> tuple[float, float]:
        """Around what the law says for the work that there is."""
        question, forecast = self.question, self.forecast
        if question.loss is not None:
            works = [forecast.budget_for(question.loss, question.served)]
            if math.isinf(works[0]):
                raise InfeasibleError(
                    f"--loss {question.loss:g}: no size comes to it by the law {forecast.law.name!r}, whose "
                    f"least is {digits(forecast.floor, 4)}; ask for more"
                )
        else:
            works = [w for m in self.machines for w in question.work(m, self.dtype)]
        sizes = [forecast.optimum(work, question.served)[0] for work in (min(works), max(works))]
        return sizes[0] / AROUND, sizes[1] * AROUND

    @property
    def dtype(self) -> str:
        """That most products of the model run in."""
        from layoutopt.evaluator import unsplit_flops

        found = unsplit_flops(self.family.own.model)
        return max(found, key=lambda d: found[d])

    # -- where they are searched ---------------------------------------------------------------------------

    def run(self) -> Row:
        """Searches, and gives the best row."""
        candidates = self.candidates()
        explicit = self.question.devices
        self.planned = len(candidates) * len(self.machines) * max(len(explicit), 1)
        for candidate in candidates:
            for machine in self.machines:
                for devices in explicit or (None,):
                    if self.timer.clock.over:
                        self.missing += 1
                    elif devices is not None:
                        self._add(candidate, machine, devices)
                    else:
                        self._one(candidate, machine)
        best = self._best_size()
        if not explicit:
            self._sweep(best)
        return self._chosen([r for r in self.rows if r.candidate is best])

    def _add(self, candidate: Candidate, machine: Machine, devices: int) -> Row | None:
        """Searches one; the row, unless it cannot answer."""
        known = next(
            (
                r
                for r in self.rows
                if (r.candidate, r.timing.machine, r.timing.devices) == (candidate, machine, devices)
            ),
            None,
        )
        if known is not None:
            return known
        if self.tell is not None:
            what = f"{count(candidate.size.total)} parameters on {devices:,} {machine.name}"
            self.tell(len(self.rows) + len(self.unfit), self.planned, what)
        question = self.question
        reason, timing = "", None
        if question.goal not in ("days", "money"):
            reason = question.refusal(candidate, question.trained(self.forecast, candidate, None))
        if not reason:
            try:
                timing = self.timer(candidate, machine, devices)
            except LimitError:
                self.missing += 1
                return None
            reason = timing.reason
        if timing is not None and not reason:
            tokens = question.trained(self.forecast, candidate, timing)
            reason = question.refusal(candidate, tokens)
        if reason or timing is None:
            self.unfit.append(
                Unfit(parameters=candidate.size.total, hardware=machine.name, devices=devices, reason=reason)
            )
            return None
        row = self._row(timing, tokens)
        self.rows.append(row)
        return row

    def _row(self, timing: Timing, tokens: float) -> Row:
        machine, candidate = timing.machine, timing.candidate
        seconds = tokens / timing.tokens_per_second
        chip_hours = machine.hardware.chips(timing.devices) * seconds / HOUR
        money = None if machine.price is None else chip_hours * machine.price
        priced = all(m.price is not None for m in self.machines)
        cost = money if priced and money is not None else chip_hours
        return Row(
            timing,
            tokens,
            self.forecast.loss(candidate.size, tokens),
            seconds / DAY,
            chip_hours,
            money,
            cost * (1 + self.question.served / 3 / tokens),
        )

    def _one(self, candidate: Candidate, machine: Machine) -> None:
        """Searches a size on a number of devices that suits it: doubled until it fits, and ends in time."""
        devices = self._first(candidate, machine)
        for _ in range(DOUBLINGS):
            row = self._add(candidate, machine, devices)
            if row is not None and row.days <= self.question.deadline:
                break
            if row is None and self.question.goal != "tokens" and self._never(candidate):
                break
            devices *= 2

    def _never(self, candidate: Candidate) -> bool:
        """More devices would not help."""
        if self.timer.clock.over or self.question.goal in ("days", "money"):
            return self.timer.clock.over
        return bool(self.question.refusal(candidate, self.question.trained(self.forecast, candidate, None)))

    def _first(self, candidate: Candidate, machine: Machine) -> int:
        least = fewest(candidate, machine)
        if math.isinf(self.question.deadline):
            return max(least, 1 if self.question.goal == "tokens" else USUAL)
        seconds = self.question.deadline * DAY
        if self.question.money is not None:
            assert machine.price is not None
            wanted = self.question.money / machine.price * HOUR / seconds * machine.hardware.devices_per_chip
        else:
            tokens = self.question.trained(self.forecast, candidate, None)
            rate = machine.hardware.peak_flops(self.dtype) * GUESSED_MFU
            wanted = candidate.flops_per_token * tokens / rate / seconds if math.isfinite(tokens) else 1
        return max(least, 2 ** math.ceil(math.log2(min(max(wanted, 1), 2**16))))

    def _sweep(self, best: Candidate) -> None:
        """The best size on other numbers of devices: all that hold it, until more stop paying."""
        for machine in self.machines:
            least, devices = math.inf, fewest(best, machine)
            own = [r.timing.devices for r in self.rows if r.candidate is best]
            while devices <= max(MOST_SWEPT, *own) and not self.timer.clock.over:
                row = self._add(best, machine, devices)
                if row is not None:
                    least = min(least, row.per_token)
                    if row.per_token > STOPS * least:
                        break
                devices *= 2

    # -- which is the best ---------------------------------------------------------------------------------

    def _best_size(self) -> Candidate:
        if not self.rows:
            raise self._nothing()
        timely = [r for r in self.rows if r.days <= self.question.deadline * (1 + 1e-9)]
        if not timely:
            soonest = min(self.rows, key=lambda r: r.days)
            place = f"{soonest.timing.devices:,} devices of {soonest.timing.machine.name}"
            raise InfeasibleError(
                f"--days {self.question.deadline:g}: the soonest that was found takes {soonest.days:.3g}, "
                f"{count(soonest.candidate.size.total)} parameters on {place}; give more of one of them"
            )
        if self.question.goal == "loss":
            return min(timely, key=lambda r: (r.cost, r.days)).candidate
        return min(timely, key=lambda r: (r.loss, r.cost)).candidate

    def _nothing(self) -> Exception:
        if self.missing and not self.unfit:
            return LimitError("no size was searched in the time given; raise --time-limit")
        near = self.unfit[0]
        return InfeasibleError(
            f"none of {len(self.unfit)} candidates can answer; {count(near.parameters)} parameters on "
            f"{near.devices:,} {near.hardware}: {near.reason}"
        )

    def _chosen(self, rows: Sequence[Row]) -> Row:
        """Of one size."""
        question = self.question
        timely = [r for r in rows if r.days <= question.deadline * (1 + 1e-9)]
        if question.goal == "days":
            return min(timely, key=lambda r: (r.loss, r.cost))
        if math.isfinite(question.deadline):
            return min(timely, key=lambda r: (r.per_token, r.days))
        return min((r for r in timely if self._pays(r, rows)), key=lambda r: r.days)

    def _pays(self, row: Row, rows: Sequence[Row]) -> bool:
        """Whether a token costs at most `PAYS` times the least; without prices, on the same machine."""
        priced = all(m.price is not None for m in self.machines)
        rivals = [r.per_token for r in rows if priced or r.timing.machine is row.timing.machine]
        return row.per_token <= PAYS * min(rivals)

    # -- what is said of it --------------------------------------------------------------------------------

    def frontier(self) -> set[int]:
        """Ids of the rows that no other beats in loss, days and cost."""

        def beats(a: Row, b: Row) -> bool:
            one, other = (a.loss, a.days, a.cost), (b.loss, b.days, b.cost)
            return one != other and all(x <= y for x, y in zip(one, other, strict=True))

        return {id(r) for r in self.rows if not any(beats(other, r) for other in self.rows)}

    def flat(self, best: Row) -> Flat | None:
        """Sizes that are nearly as good on the same devices."""
        if self.question.goal == "tokens":
            return None
        same = [r for r in self.rows if _place(r) == _place(best)]
        if len(same) < 3:  # with a deadline, each is on devices of its own
            same = [r for r in self.rows if r.timing.machine is best.timing.machine]
        if self.question.goal == "loss":
            near = [r for r in same if r.cost <= NEAR_COST * best.cost]
            within = f"{NEAR_COST - 1:.0%} more cost"
        else:
            near = [r for r in same if r.loss <= best.loss + NEAR_LOSS]
            within = f"{NEAR_LOSS} nats per token"
        sizes = [r.candidate.size.total for r in (*near, best)]
        return Flat(within=within, low=int(min(sizes)), high=int(max(sizes)))

    def sweeps(self, best: Row) -> Iterator[Sweep]:
        """The best size on every machine where it was searched on several numbers of devices."""
        rows = [r for r in self.rows if r.candidate is best.candidate]
        for machine in self.machines:
            own = [r for r in rows if r.timing.machine is machine]
            counts = [r.timing.devices for r in own]
            if len(counts) > 1:
                least = min(r.per_token for r in own)
                pays = max(r.timing.devices for r in own if r.per_token <= PAYS * least)
                yield Sweep(
                    hardware=machine.name,
                    fits_from=min(counts),
                    pays_to=None if pays == max(counts) else pays,
                    searched_to=max(counts),
                )

    def least(self, best: Row) -> list[tuple[float, float]]:
        """FLOPs around the answer's, and the least loss by the law."""
        flops = best.candidate.flops_per_token * best.tokens
        around = [
            flops * 10 ** (i / PER_DECADE) for i in range(-PER_DECADE * DECADES, PER_DECADE * DECADES + 1)
        ]
        pairs = [(c, self.forecast.optimum(c, self.question.served)) for c in around]
        return [(c, self.forecast.loss_of(n, d)) for c, (n, d) in pairs if n >= 1 and d >= 1]

    def courses(self, best: Row) -> list[Course]:
        """Some sizes, evenly taken, on the way to their tokens."""
        sizes = sorted({id(r.candidate): r for r in self.rows}.values(), key=lambda r: r.candidate.size.total)
        stride = max(1, -(-len(sizes) // MOST_COURSES))
        chosen = [r for i, r in enumerate(sizes) if i % stride == 0 or r.candidate is best.candidate]
        found = []
        for row in chosen:
            parts = [row.tokens * 10 ** (-i / PER_DECADE) for i in reversed(range(2 * PER_DECADE))]
            points = [
                (t * row.candidate.flops_per_token, self.forecast.loss(row.candidate.size, t)) for t in parts
            ]
            found.append(Course(parameters=row.candidate.size.total, points=points))
        return found

    def optimum(self, best: Row) -> Optimum:
        """What the law alone says for the FLOPs of the answer."""
        flops = best.candidate.flops_per_token * (best.tokens + self.question.served / 3)
        n, d = self.forecast.optimum(flops, self.question.served)
        return Optimum(flops=flops, parameters=n, tokens=d, loss=self.forecast.loss_of(n, d))


def _place(row: Row) -> tuple[str, int]:
    return row.timing.machine.name, row.timing.devices


def said(row: Row, forecast: Forecast, on_frontier: bool) -> SizedCandidate:
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
        step_seconds=plan.predicted.step_seconds,
        mfu=plan.predicted.mfu,
        days=row.days,
        chip_hours=row.chip_hours,
        money=row.money,
        non_embedding=int(candidate.size.non_embedding),
        loss_interval=interval,
        tokens_per_second=row.timing.tokens_per_second,
        batch_tokens=candidate.tokens,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        status=plan.solver.status,
        gap=plan.solver.gap,
        beyond=forecast.outside(candidate.size, row.tokens),
        frontier=on_frontier,
        **decided,
    )
