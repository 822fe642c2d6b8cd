"""A search on two cores. Once it takes long, a second process looks at the same problems
(`second_search`): it bounds pipelines while this one looks at named layouts, and takes problems that this one
has not begun. Each tells the other which problem it begins, what is proven of it then, and better layouts.

Both ask the same questions of the same model, so a bound that one proves holds for the other; a layout is
evaluated again by whoever hears of it. The second process starts from a file of ours, not as a copy of this
one, which may have threads. Without a second core, or where it cannot be told the model, one does all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from layoutopt.optimize.bounds import ProvenBounds
from layoutopt.optimize.incumbents import Incumbents
from layoutopt.optimize.subproblems import Subproblem, SubproblemKey
from layoutopt.runtime.own_process import UNSENT, OtherProcess, Send, processes
from layoutopt.space.objective import Objective
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options

PROCESS = "layoutopt.optimize.second_search"
LONG = 3.0
"""Seconds of a search after which a second process is worth its start."""
WAIT = 0.02
"""Seconds between two looks for letters."""


@dataclass(frozen=True)
class Letter:
    """A message from one process to the other.

    Attributes:
      begun: the problems that it looks at from now on.
      known: what is proven of problems that it looks at no more.
      found: its fastest layout that fits.
      solved: that is the best of the only problem in `known`.
    """

    begun: Set[SubproblemKey] = frozenset()
    known: Mapping[SubproblemKey, ProvenBounds] = field(default_factory=dict)
    found: tuple[Mesh, Layout, Options] | None = None
    solved: bool = False


class BothCores:
    """The other process of a search, as either of them sees it.

    Args:
      heard, send: of the second process; the first one starts it (`exchange`).
    """

    def __init__(
        self, incumbents: Incumbents, heard: deque[Any] | None = None, send: Send | None = None
    ) -> None:
        self.incumbents, self._send = incumbents, send or ignored
        self._heard = deque[Any]() if heard is None else heard
        self._process: OtherProcess | None = None
        self._starts, self._most = send is None, processes()
        self._theirs = set[SubproblemKey]()
        self._known = float("inf")  # seconds of the best that both know

    @property
    def running(self) -> bool:
        """There is another process."""
        return self._send is not ignored and (self._process is None or not self._process.ended)

    def exchange(self) -> None:
        """Tells what is new, and reads what the other process found; begins it once the search takes long."""
        request = self.incumbents.request
        if self._starts and request.clock.elapsed > LONG:
            self._start()
        running = self.running
        while self._heard:
            self._read(self._heard.popleft())
        if not running:
            self._theirs.clear()
        elif (best := self.incumbents.fastest(request.limit)) is not None and best.seconds < self._known:
            self._known = best.seconds
            self._send(Letter(found=(best.mesh, best.layout, best.options)))

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
        limit, problems = self.incumbents.request.limit, self.incumbents.subproblems
        found = None if letter.found is None else self.incumbents.offer(*letter.found)
        if found is not None and found.peak <= limit:
            self._known = min(self._known, found.seconds)
        self._theirs |= letter.begun
        for key, bounds in letter.known.items():
            self._theirs.discard(key)
            if (here := problems.get(key)) is not None:
                here.bounds.learn(bounds)
                here.bounds.best = found if letter.solved else here.bounds.best

    def report(self, problems: Sequence[Subproblem]) -> None:
        """Tells what is proven of problems that this process looks at no more."""
        if self.running:
            best = next((each.bounds.best for each in problems if each.bounds.best is not None), None)
            found = None if best is None else (best.mesh, best.layout, best.options)
            known = {each.key: replace(each.bounds, best=None) for each in problems}
            self._send(Letter(known=known, found=found, solved=best is not None))

    def shared(self, groups: Iterable[Sequence[Subproblem]], limit: float) -> Iterator[Subproblem]:
        """The problems of groups that may have something faster within a limit: of those that the other
        process has not begun, and at last of those that it has, once it has done with them. What follows from
        fewer microbatches waits for them."""
        clock, left = self.incumbents.request.clock, [*groups]
        while left:
            later, begun = list[Sequence[Subproblem]](), False
            for group in left:
                self.exchange()
                if not clock.over and any(p.key in self._theirs for e in group for p in (e, *e.fewer)):
                    later.append(group)
                elif group := [each for each in group if self.incumbents.is_open(each, limit)]:
                    begun = True
                    if self.running:
                        self._send(Letter(begun=frozenset(each.key for each in group)))
                    yield from group
                    self.report(group)
            left = later
            if left and not begun:
                time.sleep(WAIT)

    def end(self) -> None:
        """Ends the second process; there will be none."""
        self._starts = False
        if self._process is not None:
            self._process.end()


def ignored(letter: object) -> None:
    """Nobody reads a letter."""
