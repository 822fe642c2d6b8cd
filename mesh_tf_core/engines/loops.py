"""Loops of a program, for any engine: an engine fills in how values are added and stacked, and how iterations
follow each other.

An iteration begins with its number, the state and its parts. The state consists of carries and sums so far; a
sum so far has the name of the sum. One that does not run hands the state on and stacks zeros. A stack that is
added to a sum of the loop around (`Program.added`) is made from the parts of that sum so far: it is the sum
afterwards. So is a branch's sum.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from mesh_tf_core.ir.program import Loop

V = TypeVar("V")
"""An engine's own form of a value."""
LoopState = list[V | None]
"""The carried values, and the sums so far; None: nothing has been added yet."""
Left = tuple[LoopState[V], list[V]]
"""The results of an iteration: the state, and the values to stack."""


class Arithmetic(Protocol[V]):
    """The arithmetic that every engine fills in."""

    def zeros(self, id: int) -> V:
        """A value of zeros, of the type of a value of the program."""

    def add(self, total: V, term: V) -> V:
        """Their sum."""


class InTurn(Arithmetic[V], Protocol[V]):
    """The steps that an engine fills in if it runs, or writes, iterations one after the other (`in_turn`)."""

    def number(self, at: int) -> V:
        """An int32 scalar."""

    def parts(self, stack: V) -> Sequence[V]:
        """The elements of the first dimension."""

    def stack(self, parts: Sequence[V]) -> V:
        """The inverse of `parts`."""

    def chunk(self, stack: V, first: V, size: int) -> V:
        """`size` elements of the first dimension, from a number on that devices have each their own of."""

    def within(self, chunk: V, first: V, stack: V) -> V:
        """The inverse: a stack with these elements replaced."""

    def chosen(self, iterations: Iterations[V], values: dict[int, V]) -> Left[V]:
        """`iterations.run(values)` if the loop's condition holds among the values, else `skip`."""


class Iterations(Generic[V]):
    """The iterations of one loop.

    Args:
      env: value id -> value, for values known before the loop; `end` adds its results.
      body: adds the values that the loop's body computes from its inputs.
      added: `Program.added`.
      longer: `Program.longer`.

    Attributes:
      state: ids of the state in an iteration.
      carries: initial values of the carries.
      sums: for every summed value, the sum so far of the surrounding loop that it continues; None: no sum
        yet.
      onto: for every stacked value, the sum so far to whose parts it is added; None: no sum.
    """

    def __init__(
        self,
        loop: Loop,
        env: dict[int, V],
        body: Callable[[dict[int, V]], None],
        engine: Arithmetic[V],
        added: Mapping[int, int],
        longer: Container[int] = (),
    ) -> None:
        self.loop, self.env, self.body, self.engine, self.added = loop, env, body, engine, added
        self.longer = longer
        self.sums, self.onto = (
            [env.get(added[s.outer]) if s.outer in added else None for s in found]
            for found in (loop.summed, loop.stacked)
        )
        self._terms = list(loop.summed)
        self.state = (*(c.enter for c in loop.carried), *(s.outer for s in loop.summed))
        self.carries = [env[c.init] for c in loop.carried]

    def begun(self, number: V, state: Sequence[V | None], parts: Sequence[V]) -> dict[int, V]:
        """All values that are known when an iteration begins."""
        values = {**self.env, self.loop.index: number}
        values.update((i, x) for i, x in zip(self.state, state, strict=True) if x is not None)
        values.update((s.inner, x) for s, x in zip(self.loop.sliced, parts, strict=True))
        return values

    def run(self, values: dict[int, V]) -> Left[V]:
        """An iteration that runs; `values` stay as they are, for one that might not."""
        values = dict(values)
        self._terms = list(self.loop.summed)
        self.body(values)
        self.add({s.inner for s in self._terms}, values)
        state: LoopState[V] = [values[c.leave] for c in self.loop.carried]
        state += [values[s.outer] for s in self.loop.summed]
        return state, [values[s.inner] for s in self.loop.stacked]

    def add(self, made: Container[int], values: dict[int, V]) -> None:
        """Adds terms of the loop's sums that have been made; for a body that does not keep them."""
        for s in [s for s in self._terms if s.inner in made]:
            self._terms.remove(s)
            term = values[s.inner]
            if s.outer in values and s.inner not in self.added:
                term = self.engine.add(values[s.outer], term)
            values[s.outer] = term

    def skip(self, values: dict[int, V]) -> Left[V]:
        """An iteration that does not run."""
        return [values.get(i) for i in self.state], [self.engine.zeros(s.inner) for s in self.loop.stacked]

    def end(self, state: Sequence[V | None], stacks: Sequence[V]) -> None:
        """After the last iteration."""
        for i, x in zip(self.loop.outputs, (*state[: len(self.carries)], *stacks), strict=False):
            assert x is not None
            self.env[i] = x
        for s, total in zip(self.loop.summed, state[len(self.carries) :], strict=True):
            self.env[s.outer] = self.engine.zeros(s.outer) if total is None else total


def in_turn(iterations: Iterations[V], engine: InTurn[V]) -> None:
    """Runs a loop, one iteration after the other."""
    loop, env = iterations.loop, iterations.env
    first, offset = None if loop.first is None else env[loop.first], loop.offset or 0
    if first is not None and offset:
        first = engine.add(first, engine.number(offset))

    def parts_of(stack: int, whole: V) -> Sequence[V]:
        if first is not None and stack in iterations.longer:
            whole = engine.chunk(whole, first, loop.dim.size)
        elif stack in iterations.longer:
            return engine.parts(whole)[offset : offset + loop.dim.size]
        return engine.parts(whole)

    parts = [parts_of(s.outer, env[s.outer]) for s in loop.sliced]
    totals = [*zip(loop.stacked, iterations.onto, strict=True)]
    onto = [None if total is None else parts_of(s.outer, total) for s, total in totals]
    state: LoopState[V] = [*iterations.carries, *iterations.sums]
    made: dict[int, list[V]] = {}
    order = range(loop.dim.size)
    for at in reversed(order) if loop.reverse else order:
        values = iterations.begun(engine.number(offset + at), state, [own[at] for own in parts])
        state, new = iterations.run(values) if loop.runs is None else engine.chosen(iterations, values)
        pairs = zip(onto, new, strict=True)
        made[at] = [x if total is None else engine.add(total[at], x) for total, x in pairs]
    stacks = [engine.stack(list(column)) for column in zip(*(made[at] for at in order), strict=True)]
    for at, (s, total) in enumerate(totals):
        if first is not None and s.outer in iterations.longer:
            stacks[at] = engine.within(stacks[at], first, engine.zeros(s.outer) if total is None else total)
    iterations.end(state, stacks)
