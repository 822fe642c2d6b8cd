"""A search on two cores. Once it takes long, a second process looks at the same problems
(`second_search`): it bounds pipelines while this one looks at named layouts, and takes problems that this one
has not begun. Each tells the other which problem it begins, what is proven of it then, and better layouts.

Both ask the same questions of the same model, so a bound that one proves holds for the other; a layout is
evaluated again by whoever hears of it. The second process starts from a file of ours, not as a copy of this
one, which may have threads. One does all without a second core, or where the other cannot be told the model
or says what a known layout contradicts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from layoutopt.optimize.heuristics.incumbents import FirstLayout, Incumbents
from layoutopt.optimize.problems.bounds import EXACT, ProvenBounds
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import Subproblem, SubproblemKey
from layoutopt.runtime.own_process import UNSENT, OtherProcess, Send, processes
from layoutopt.space.objective import Objective

PROCESS = "layoutopt.optimize.driver.second_search"
LONG = 3.0
"""Seconds of a search after which a second process is worth its start."""
WAIT = 0.02
"""Seconds between two looks for letters."""
BEAT, SILENCE = 1.0, 30.0
"""Seconds after which a process says that it is there; of waiting, after which it takes over what the other
began. That may be stopped; if it is only long at something, both do the same."""


@dataclass(frozen=True)
class Letter:
    """A message from one process to the other; an empty one says that it is there.

    Attributes:
      begun: the problems that it looks at from now on.
      known: of problems that it looks at no more, what is proven, and the best layout if that is.
      found: its fastest layout that fits.
    """

    begun: Set[SubproblemKey] = frozenset()
    known: Mapping[SubproblemKey, tuple[ProvenBounds, FirstLayout | None]] = field(default_factory=dict)
    found: FirstLayout | None = None


class BothCores:
    """The other process of a search, as either of them sees it.

    Args:
      heard, send: of the second process; the first one starts it (`exchange`).
    """

    def __init__(
        self, incumbents: Incumbents, heard: deque[Any] | None = None, send: Send | None = None
    ) -> None:
        self.incumbents, self._send = incumbents, send
        self._heard = deque[Any]() if heard is None else heard
        self._process: OtherProcess | None = None
        self._starts, self._most = send is None, processes()
        self._theirs = set[SubproblemKey]()
        self._told: tuple[EvaluatedLayout | None, float] = None, 0.0  # what, and when
        self._waited = 0.0  # seconds without a letter

    @property
    def running(self) -> bool:
        """There is another process."""
        return self._send is not None and (self._process is None or not self._process.ended)

    def exchange(self) -> None:
        """Tells what is new, and reads what the other process found; begins it once the search takes long."""
        request = self.incumbents.request
        if self._starts and request.clock.elapsed > LONG:
            self._start()
        running = self.running
        while self._heard:
            self._read(self._heard.popleft())
        best, (told, when) = self.incumbents.fastest(request.limit), self._told
        if not running or self._waited > SILENCE:
            self._theirs.clear()
        elif self._send and (best is not told or time.monotonic() > when + BEAT):
            self._told = best, time.monotonic()
            self._send(Letter(found=as_told(best)))

    def _start(self) -> None:
        request, problems = self.incumbents.request, self.incumbents.subproblems
        self._starts = False
        if request.objective != Objective.TIME or len(problems) < 2 or self._most < 2:
            return
        shapes = [*dict.fromkeys(key.mesh for key in problems)]
        # What continues texts is code of the user's, and the graphs of other problems are made there anew.
        model = replace(request.model, network=None, given=None, _others={})
        asked = model, request.hardware, request.limit, request.allowed, request.clock.left, shapes
        try:
            self._process = OtherProcess(PROCESS, asked)
        except UNSENT:
            return
        self._heard, self._send = self._process.news, self._process.tell

    def _read(self, letter: Letter) -> None:
        problems, known, offer = self.incumbents.subproblems, letter.known, self.incumbents.offer
        here = ((f, self.incumbents.subproblem_of(f).key) for f in self.incumbents.found if known)
        below = ((f.seconds, known[key][0].lower(f.peak).value) for f, key in here if key in known)
        if any(seconds < bound * (1 - EXACT) for seconds, bound in below):
            self.end()
            for each in problems.values():  # nor is what it said before believed any more
                each.bounds = ProvenBounds()
            return
        self._theirs, self._waited = (self._theirs | letter.begun) - known.keys(), 0.0
        if letter.found is not None:
            offer(*letter.found)
        for key in known.keys() & problems.keys():
            (bounds, best), own = known[key], problems[key].bounds
            own.learn(bounds)
            own.best = own.best if best is None else offer(*best) or own.best

    def report(self, problems: Sequence[Subproblem]) -> None:
        """Tells what is proven of problems that this process looks at no more."""
        if self._send:
            known = {p.key: (replace(p.bounds, best=None), as_told(p.bounds.best)) for p in problems}
            self._send(Letter(known=known))

    def shared(self, groups: Iterable[Sequence[Subproblem]], limit: float) -> Iterator[Subproblem]:
        """The problems of groups that may have something faster within a limit: of those that the other
        process has not begun, and at last of those that it has, once it has done with them or is silent. What
        follows from fewer microbatches waits for them."""
        clock, left = self.incumbents.request.clock, [*groups]
        while left:
            before, left = left, []
            for group in before:
                self.exchange()
                if not clock.over and any(p.key in self._theirs for e in group for p in (e, *e.fewer)):
                    left.append(group)
                elif group := [each for each in group if self.incumbents.is_open(each, limit)]:
                    if self._send:
                        self._send(Letter(begun=frozenset(each.key for each in group)))
                    yield from group
                    self.report(group)
            if left == before:
                time.sleep(WAIT)
                self._waited += WAIT  # not by a clock, which runs on while both are stopped

    def end(self) -> None:
        """Ends the second process; there will be none."""
        self._starts, self._send, self._heard = False, None, deque()
        if self._process is not None:
            self._process.end()


def as_told(best: EvaluatedLayout | None) -> FirstLayout | None:
    """A layout as a letter has it; whoever reads that evaluates it."""
    return None if best is None else FirstLayout(best.mesh, best.layout, best.options, best.origin)
