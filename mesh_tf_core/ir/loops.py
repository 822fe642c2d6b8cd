"""The loop of a program: an instruction with a body, and the values that cross its border."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.values import Instr


class Carry(NamedTuple):
    """State that iterations hand on, as ids of values.

    Attributes:
      init: the value before the loop.
      enter: the body's value as an iteration begins.
      leave: the body's value as it ends.
      final: the value after the loop.
    """

    init: int
    enter: int
    leave: int
    final: int


class Sliced(NamedTuple):
    """A value outside of a loop, and the body's value that is one iteration's part of it."""

    outer: int
    inner: int


class Result(NamedTuple):
    """A value of the body, and its result outside the loop: a stack or a sum."""

    inner: int
    outer: int


@dataclass(frozen=True, slots=True)
class Loop(Instr):
    """Runs `body` once per element of `dim`, from the last if `reverse`. The body may read any earlier value.

    Attributes:
      index: body value, the number of the iteration's element (int32 scalar).
      carried: the state.
      sliced: stacks of which every iteration reads its part.
      stacked: stacks to which every iteration contributes a part.
      summed: values that are added up over the iterations.
      runs: bool scalar, one of the carried or sliced body values or from outside: whether an iteration runs.
        One that does not run passes its carries on, stacks zeros and adds nothing; every device decides the
        same.
      branch: of a choice: the share of the times in which it runs, as a price counts it.
      first: int32 scalar from outside: the element of stacks that are longer than the loop at which
        iterations begin; other elements of their results are zero.
      offset: the first element, of a loop over a part of its dimension; its stacks have this part alone, or
        with `first` are as long as the whole, and this part is as far behind that.
      undecided: in a part that is lowered alone, without the value that decides whether an iteration runs.
      `inputs` and `outputs` list all values that cross the border, in that order; `inputs` ends with the
      values of outside that the body reads directly (`closed`).
    """

    dim: Dim
    reverse: bool
    index: int
    carried: tuple[Carry, ...]
    sliced: tuple[Sliced, ...]
    stacked: tuple[Result, ...]
    summed: tuple[Result, ...]
    body: tuple[Instr, ...]
    runs: int | None = None
    branch: Fraction | None = None
    first: int | None = None
    undecided: bool = False
    offset: int | None = None

    @property
    def stops(self) -> bool:
        """True if an iteration may not run."""
        return self.undecided or self.runs is not None

    def text(self) -> str:
        condition = "" if self.runs is None else f", {'if' if self.branch else 'while'} %{self.runs}"
        condition += "" if self.first is None else f", from %{self.first}"
        condition += "" if self.offset is None else f", from {self.offset}"
        return f"loop({self.dim}{', reverse' if self.reverse else ''}{condition})"

    @property
    def times(self) -> float:
        """The number of times that the program's cost counts the body: for a branch the number of times it is
        taken, for a loop that may stop early its full length."""
        return self.dim.size if self.branch is None else float(self.dim.size * self.branch)

    @property
    def entering(self) -> tuple[int, ...]:
        """Body values that an iteration is handed: the state, its parts."""
        return *(c.enter for c in self.carried), *(s.inner for s in self.sliced)

    @property
    def results(self) -> tuple[Result, ...]:
        """The stacked results, then the summed ones."""
        return *self.stacked, *self.summed

    @property
    def leaving(self) -> tuple[int, ...]:
        """Body values that an iteration returns: the state, stacked values, summed values."""
        return *(c.leave for c in self.carried), *(r.inner for r in self.results)

    @property
    def outside(self) -> tuple[int, ...]:
        """Values of outside that the body reads directly, and not by parts."""
        return self.inputs[len(self.carried) + len(self.sliced) :]

    def remade(self, **parts: Any) -> Loop:
        """The loop with some of its parts replaced."""
        return replace(self, **parts).closed()

    def closed(self) -> Loop:
        """The same with the `inputs` and `outputs` that follow from its parts."""
        inside = {self.index, *self.entering}
        read = dict.fromkeys(i for i in (self.runs, self.first) if i is not None and i not in inside)
        for instr in self.body:
            for i in instr.inputs:
                if i not in inside:
                    read[i] = None
            inside.update(instr.outputs)
        read.update((i, None) for i in self.leaving if i not in inside)
        inputs = (*(c.init for c in self.carried), *(s.outer for s in self.sliced), *read)
        outputs = (*(c.final for c in self.carried), *(r.outer for r in self.results))
        return replace(self, inputs=inputs, outputs=outputs)
