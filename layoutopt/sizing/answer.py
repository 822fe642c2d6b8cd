"""From a question to its answer: which sizes are searched where, and which of them is the best.

Sizes around the law's optimum are searched on the devices that are given. Where none are, each is searched on
`USUAL` devices, or as many as its variables need, or (with a deadline) as end in time; the best size is then
searched on fewer and on more. For one size, the answer is the soonest training in which a token costs at most
`PAYS` times the least, or the cheapest that meets the deadline.

Sizes that cannot be on the frontier are not searched: if a size is worse in loss, days and cost even at the
bound of `at_best`, then so are all its layouts. Sizes that are nearly as good as the best one, on its
devices, are always searched; they show how flat the optimum is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from layoutopt.optimize.evaluation.evaluation import computed_in
from layoutopt.plan.size_results import PAYS, Unfit
from layoutopt.plan.units import count, digits
from layoutopt.sizing.family import Family, SizeCandidate
from layoutopt.sizing.forecast import Forecast, ParameterCount
from layoutopt.sizing.question import DAY, HOUR, SizingQuestion
from layoutopt.sizing.rows import SAME, SizeRow, all_late, nothing, whole_nodes
from layoutopt.sizing.timing import OfferedHardware, Timer, Timing, fewest
from mesh_tf_core.errors import InfeasibleError, LimitError

USUAL = 64
"""Numbers of devices on which sizes are compared by default."""
MOST_SWEPT, STOPS = 1024, 2.0
"""Largest number of devices for the search of the best size, and the factor of the least cost of a token at
which larger numbers are skipped."""
BETWEEN = (0.75, 1.5)
"""Numbers of devices that are searched beside a power of two, relative to it."""
AROUND = 6.0
"""Sizes to search: factors of the law's optimum."""
DOUBLINGS, ROUNDS = 4, 4
REST_SHARE = 0.5
"""Part of the time left in which a row is searched again with layouts of all kinds."""
Tell = Callable[[int, int, str], None]
"""tell(searches done, approximate number of searches, current search)."""


@dataclass
class Answering:
    """The state while a question is answered.

    Attributes:
      count: of sizes.
      sizes: the smallest and the largest (None: around the law's optimum).
      every: search also sizes that cannot be on the frontier.
      rows, unfit: results of searches.
      beaten: sizes that were not searched, with the bounds that rule them out.
      missing: sizes for which there was no time; stopped: Ctrl-C ended it.
    """

    question: SizingQuestion
    forecast: Forecast
    family: Family
    machines: Sequence[OfferedHardware]
    timer: Timer
    count: int
    sizes: tuple[float, float] | None = None
    every: bool = False
    tell: Tell | None = None
    rows: list[SizeRow] = field(default_factory=list)
    unfit: list[Unfit] = field(default_factory=list)
    beaten: list[SizeRow] = field(default_factory=list)
    missing: int = 0
    stopped: bool = False
    planned: int = 0
    _refused: set[tuple[int, str, int]] = field(default_factory=set)

    # -- which sizes ---------------------------------------------------------------------------------------

    def candidates(self) -> list[SizeCandidate]:
        """The sizes, those near the law's optimum first."""
        if self.question.goal == "tokens":
            if self.sizes is None:
                return [self.family.own]
            return [*self.family.sizes([self.sizes[0]], self._counted)]
        low, high = self.sizes or self._around()
        middle = math.sqrt(low * high)
        steps = max(self.count - 1, 1)
        ratio = (high / low) ** (1 / steps)
        wanted = [low * ratio**i for i in range(self.count)] if self.count > 1 else [middle]
        found = [*self.family.sizes(wanted, self._counted)]
        return sorted(found, key=lambda c: abs(math.log(self._counted(c.size) / middle)))

    def _counted(self, size: ParameterCount) -> float:
        # Users count all experts.
        return size.counted(self.forecast.law) + (size.idle if self.sizes else 0)

    def _around(self) -> tuple[float, float]:
        """Around what the law says for the work that there is."""
        question, forecast = self.question, self.forecast
        if question.loss is not None:
            works = [forecast.budget_for(question.loss, question.inference)]
            if math.isinf(works[0]):
                told = " with the given data and replicas" if forecast.facts() else ""
                raise InfeasibleError(
                    f"--loss {question.loss:g}: no size reaches this loss, because the least loss under "
                    f"the scaling law {forecast.law.name!r} is "
                    f"{digits(forecast.least(question.inference), 4)}{told}; give a higher loss"
                )
        else:
            works = [w for m in self.machines for w in question.work(m, self.dtype)]
        sizes = [forecast.optimum(work, question.inference)[0] for work in (min(works), max(works))]
        return sizes[0] / AROUND, sizes[1] * AROUND

    @property
    def dtype(self) -> str:
        """That most products of the model run in."""
        return computed_in(self.family.own.model)

    # -- where they are searched ---------------------------------------------------------------------------

    def run(self, keep_best: bool = False) -> SizeRow:
        """Runs the searches and returns the best row; `keep_best`: Ctrl-C ends them with the best result so
        far."""
        candidates = self.candidates()
        try:
            self._look(candidates)
            if not self.rows and self.missing:
                self.timer.widen()
                self._look(candidates)
            self._insist()
            return self._with_everything(candidates)
        except KeyboardInterrupt:
            if not keep_best or not self.rows:
                raise
        self.stopped = True
        self.timer.hurry()
        self.missing = max(0, self.planned - self._done)
        return self._answer(candidates)

    def _with_everything(self, candidates: Sequence[SizeCandidate]) -> SizeRow:
        """The best row once layouts of all kinds were searched: for the best, and then for the rows after it,
        each in half of the time left. A table in which one row alone has them would compare unlike things."""
        best = self._answer(candidates)
        self.timer.widen()
        while self.timer.goes_on and (rest := [r for r in self.rows if r.timing.usual]):
            row = best if best.timing.usual else self._best_of(self._timely(rest) or rest)
            self._again(row, self.timer.everything(row.timing, REST_SHARE if rest[1:] else 1.0))
            best = self._answer(candidates)
        return best

    def _look(self, candidates: Sequence[SizeCandidate]) -> None:
        """Searches the sizes where they are compared."""
        explicit, self.missing = self.question.devices, 0
        self.planned = len(candidates) * len(self.machines) * max(len(explicit), 1)
        for candidate in candidates:
            for machine in self._promising(candidate):
                for devices in explicit or (None,):
                    self.timer.share = 1 / max(1, self.planned - self._done - self.missing)
                    if self.timer.clock.over:
                        self.missing += 1
                    elif devices is not None:
                        self._add(candidate, machine, devices)
                    else:
                        self._one(candidate, machine)
        self.timer.share = 1.0
        self._complete_flat()

    @property
    def _done(self) -> int:
        """Searches."""
        return len(self.rows) + len(self.unfit) + len(self.beaten)

    def _insist(self) -> None:
        """Where nothing ends in time: goes on with searches that did not end, as long as there is time."""
        for row in self._unended():
            if not self._timely(self.rows):
                self.timer.widen()
                self._again(row, self.timer.longer(row.timing))

    def _unended(self) -> list[SizeRow]:
        """The rows whose searches did not end, and that are in time by their bounds; the soonest first."""
        left = [r for r in self.rows if (plan := r.timing.plan) and not plan.solver.proven]
        least = [replace(r.timing, step_seconds=r.timing.least) for r in left]
        bound = {id(r): self._trained(timing).days for r, timing in zip(left, least, strict=True)}
        most = self.question.deadline * (1 + SAME)
        return sorted((r for r in left if bound[id(r)] <= most), key=lambda r: bound[id(r)])

    def _again(self, row: SizeRow, timing: Timing) -> None:
        """Another timing of a row, in its place."""
        more = self._trained(timing)
        self.rows = [more if each is row else each for each in self.rows]

    def _trained(self, timing: Timing) -> SizeRow:
        """The row of a timing."""
        return self._row(timing, self.question.trained(self.forecast, timing.candidate, timing))

    def _answer(self, candidates: Sequence[SizeCandidate]) -> SizeRow:
        best = self._best_size().candidate
        return self._chosen(best) if self.question.devices else self._on_its_devices(best, candidates)

    def _on_its_devices(self, best: SizeCandidate, candidates: Sequence[SizeCandidate]) -> SizeRow:
        """The answer with the devices that suit it. Where what a size comes to depends on them, all sizes are
        compared there again: on many devices small ones lose more."""
        for _ in range(ROUNDS):
            self._sweep(best)
            chosen = self._chosen(best)
            if self.question.goal not in ("loss", "money"):
                break
            for candidate in candidates:
                if not self._never(candidate):
                    self._add(candidate, chosen.timing.machine, chosen.timing.devices)
            here = self._timely(r for r in self.rows if r.place == chosen.place)
            before, best = best, self._best_of(here).candidate
            if best is before:
                break
        self._complete_flat(chosen)
        return chosen

    def _promising(self, candidate: SizeCandidate) -> list[OfferedHardware]:
        """The machines, those first that may be the fastest: the others may be beaten then."""
        if self._whole or len(self.machines) == 1:
            return [*self.machines]
        return sorted(self.machines, key=lambda m: self.timer.at_best(candidate, m, 1).step_seconds)

    @property
    def _whole(self) -> bool:
        """Whether all is searched: of one size, all hardware is compared."""
        return self.every or self.question.goal == "tokens"

    def _hopeless(self, candidate: SizeCandidate, machine: OfferedHardware, devices: int) -> bool:
        """Whether it cannot be on the frontier, however good its layout is; then it is `beaten`."""
        if self._whole:
            return False
        timing = self.timer.at_best(candidate, machine, devices)
        tokens = self.question.trained(self.forecast, candidate, timing) if timing.step_seconds else 0.0
        if not tokens or self.question.refusal(candidate, tokens):
            return False
        row = self._row(timing, tokens)
        if row.days > self.question.deadline or not any(known.beats(row) for known in self.rows):
            return False
        best = self._leading()
        if row.place == best.place and row.near(best, self.question.by_cost):
            return False
        self.beaten.append(row)
        return True

    def _complete_flat(self, row: SizeRow | None = None) -> None:
        """Searches what is nearly as good as the best (or as a row) on its devices, should that have been
        elsewhere when it was beaten."""
        while self.rows and not self.timer.clock.over:
            best = row or self._leading()
            close = [r for r in self.beaten if r.place == best.place and r.near(best, self.question.by_cost)]
            if not close:
                break
            self._add(close[0].candidate, close[0].timing.machine, close[0].timing.devices, sure=True)

    def _add(
        self, candidate: SizeCandidate, machine: OfferedHardware, devices: int, sure: bool = False
    ) -> SizeRow | None:
        """Searches one; the row, unless it cannot answer, or (if not `sure`) cannot be on the frontier."""
        where = machine.name, devices
        for row in self.rows:
            if row.candidate is candidate and row.place == where:
                return row
        if (id(candidate), *where) in self._refused:
            return None
        if not sure and self._hopeless(candidate, machine, devices):
            return None
        self.beaten = [r for r in self.beaten if not (r.candidate is candidate and r.place == where)]
        if self.tell is not None:
            what = f"{count(candidate.size.total)} parameters on {devices:,} {machine.name}"
            self.tell(self._done, self.planned, what)
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
            self._refused.add((id(candidate), *where))
            self.unfit.append(
                Unfit(parameters=candidate.size.total, hardware=machine.name, devices=devices, reason=reason)
            )
            return None
        row = self._row(timing, tokens)
        self.rows.append(row)
        return row

    def _row(self, timing: Timing, tokens: float) -> SizeRow:
        machine, candidate = timing.machine, timing.candidate
        seconds = tokens / timing.tokens_per_second
        chip_hours = machine.hardware.chips(timing.devices) * seconds / HOUR
        money = None if machine.price is None else chip_hours * machine.price
        priced = all(m.price is not None for m in self.machines)
        cost = money if priced and money is not None else chip_hours
        return SizeRow(
            timing,
            tokens,
            self.forecast.loss(candidate.size, tokens),
            seconds / DAY,
            chip_hours,
            money,
            cost * (1 + self.question.inference / 3 / tokens),
        )

    def _one(self, candidate: SizeCandidate, machine: OfferedHardware) -> None:
        """Searches a size on a number of devices that suits it: doubled until it fits, and ends in time."""
        devices = self._first(candidate, machine)
        for _ in range(DOUBLINGS):
            if self._hopeless(candidate, machine, devices):
                break
            row = self._add(candidate, machine, devices, sure=True)
            if row is not None and row.days <= self.question.deadline:
                break
            if row is None and self.question.goal != "tokens" and self._never(candidate):
                break
            devices *= 2

    def _never(self, candidate: SizeCandidate) -> bool:
        """More devices would not help."""
        if self.timer.clock.over or self.question.goal in ("days", "money"):
            return self.timer.clock.over
        return bool(self.question.refusal(candidate, self.question.trained(self.forecast, candidate, None)))

    def _first(self, candidate: SizeCandidate, machine: OfferedHardware) -> int:
        least, question = fewest(candidate, machine), self.question
        if math.isinf(question.deadline):
            return max(least, 1 if question.goal == "tokens" else USUAL)
        wanted = question.devices_in_time(self.forecast, candidate, machine, self.dtype)
        return max(least, 2 ** math.ceil(math.log2(min(max(wanted, 1), 2**16))))

    def _sweep(self, best: SizeCandidate) -> None:
        """The best size on other numbers of devices: powers of two that hold it and may end in time, until
        more stop paying, and around the chosen one whole nodes over which the batch splits."""
        for machine in self.machines:
            least, devices = math.inf, fewest(best, machine)
            while devices <= MOST_SWEPT and self._late(best, machine, devices):
                devices *= 2
            own = [r.timing.devices for r in self.rows if r.candidate is best]
            while devices <= max(MOST_SWEPT, *own) and not self.timer.clock.over:
                row = self._add(best, machine, devices, sure=True)
                if row is not None:
                    least = min(least, row.per_token)
                    if row.per_token > STOPS * least:
                        break
                devices *= 2
        for devices in whole_nodes(chosen := self._chosen(best), BETWEEN):
            if not best.model.examples % (devices // (devices & -devices)) and not self.timer.clock.over:
                self._add(best, chosen.timing.machine, devices, sure=True)

    def _late(self, candidate: SizeCandidate, machine: OfferedHardware, devices: int) -> bool:
        """Whether training ends after the deadline even at the bound of `at_best`."""
        if math.isinf(self.question.deadline):
            return False
        timing = self.timer.at_best(candidate, machine, devices)
        return bool(timing.step_seconds) and self._trained(timing).days > self.question.deadline * (1 + SAME)

    # -- which is the best ---------------------------------------------------------------------------------

    def _best_size(self) -> SizeRow:
        """The best row in time."""
        if not self.rows:
            raise nothing(self.unfit, self.missing)
        if not (timely := self._timely(self.rows)):
            raise all_late(self.question.deadline, self.rows, self._unended(), self.missing)
        return self._best_of(timely)

    def _leading(self) -> SizeRow:
        """The best row so far, in time if one is."""
        return self._best_of(self._timely(self.rows) or self.rows)

    def _timely(self, rows: Iterable[SizeRow]) -> list[SizeRow]:
        return [r for r in rows if r.days <= self.question.deadline * (1 + SAME)]

    def _best_of(self, rows: Sequence[SizeRow]) -> SizeRow:
        """The cheapest that comes to a loss that is given, else the one of least loss."""
        if self.question.by_cost:
            return min(rows, key=lambda r: (r.cost, r.days))
        return min(rows, key=lambda r: (r.loss, r.cost))

    def _chosen(self, size: SizeCandidate) -> SizeRow:
        question, rows = self.question, [r for r in self.rows if r.candidate is size]
        timely = self._timely(rows)
        if question.goal == "days":
            return min(timely, key=lambda r: (r.loss, r.cost))
        if math.isfinite(question.deadline):
            return min(timely, key=lambda r: (r.per_token, r.days))
        return min((r for r in timely if self._pays(r, rows)), key=lambda r: r.days)

    def _pays(self, row: SizeRow, rows: Sequence[SizeRow]) -> bool:
        """Whether a token costs at most `PAYS` times the least; without prices, on the same machine."""
        priced = all(m.price is not None for m in self.machines)
        rivals = [r.per_token for r in rows if priced or r.timing.machine is row.timing.machine]
        return row.per_token <= PAYS * min(rivals)
