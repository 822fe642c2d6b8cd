"""The instructions of a program: frozen, plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.values import Instr, Origin


@dataclass(frozen=True, slots=True)
class Local(Instr):
    """Every device applies `op` to its pieces."""

    op: Op

    @property
    def name(self) -> str:
        return self.op.name

    def text(self) -> str:
        return self.op.describe()


STEP, GRADIENT, PARAMETER, HOST = "ring", "gradient", "parameter", "host link"
RULES = (STEP, GRADIENT, PARAMETER, HOST)
"""The rules by which messages start before they are waited for (`lower.start_done`)."""


@dataclass(frozen=True, slots=True)
class Message(Instr):
    """Moves pieces while the device may compute: between devices, or between a device and its host.

    Attributes:
      rule: why the device computes on after the start, until the message's `Done`; empty: the device waits.
      pipelined: start and done are one iteration of their block apart. A value that an iteration reads was
        started in the iteration before, and a value that leaves it is done in the next one (XLA's collective
        pipeliner). Iterations of the outermost block are steps.
    """

    rule: str = field(default="", kw_only=True)
    pipelined: bool = field(default=False, kw_only=True)
    name: ClassVar[str]

    def parameters(self) -> str:
        """The text in brackets after the instruction's name."""
        return ""

    def text(self) -> str:
        if not self.rule:
            return f"{self.name}({self.parameters()})" if self.parameters() else self.name
        how = ", ".join([self.rule, *["pipelined"] * self.pipelined])
        return f"{self.name}_start({'; '.join(filter(None, (self.parameters(), how)))})"


@dataclass(frozen=True, slots=True)
class Done(Instr):
    """The device waits for messages that started before. Makes no value: readers name the messages' own.

    Attributes:
      message: their name.
    """

    message: str

    @property
    def name(self) -> str:
        return f"{self.message}_done"


@dataclass(frozen=True, slots=True)
class Collective(Message):
    """Devices that differ only along `axes` exchange pieces.

    Attributes:
      part: what a device puts in is a part of the array of its group, not as large as that.
      sums: it adds up values that are partial over its axes.
    """

    axes: Axes
    part: ClassVar[bool] = False

    @property
    def sums(self) -> bool:
        return False

    def resplits(self) -> Mapping[str, tuple[int, Axes]]:
        """Dimension -> (1, axes that split it further afterwards), or (-1, axes that no longer do)."""
        raise NotImplementedError

    @staticmethod
    def sent(n: int) -> float:
        """How many times what it puts in each of n devices sends, by the bandwidth-optimal algorithm (Chan et
        al. 2007, "Collective communication: theory, practice, and experience", table 1)."""
        raise NotImplementedError

    def parameters(self) -> str:
        return ", ".join(filter(None, ("+".join(self.axes), getattr(self, "dim", ""))))


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """Joins partial values by `combine` (sum, max, min); several values of one dtype may travel together."""

    combine: str = "sum"

    name = "all_reduce"

    @property
    def sums(self) -> bool:
        return self.combine == "sum"

    def resplits(self) -> Mapping[str, tuple[int, Axes]]:
        return {}

    @staticmethod
    def sent(n: int) -> float:
        return 2 * (n - 1) / n

    def parameters(self) -> str:
        return f"{'+'.join(self.axes)}, {self.combine}"


@dataclass(frozen=True, slots=True)
class ReduceScatter(Collective):
    """Adds partial values up and leaves every device its piece of `dim`."""

    dim: str = ""

    name = "reduce_scatter"

    @property
    def sums(self) -> bool:
        return True

    def resplits(self) -> Mapping[str, tuple[int, Axes]]:
        return {self.dim: (1, self.axes)}

    @staticmethod
    def sent(n: int) -> float:
        return (n - 1) / n


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """Joins the pieces of `dim`; `axes` are the minor-most of those that split it."""

    dim: str = ""

    name = "all_gather"
    part = True

    def resplits(self) -> Mapping[str, tuple[int, Axes]]:
        return {self.dim: (-1, self.axes)}

    @staticmethod
    def sent(n: int) -> float:
        return float(n - 1)


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """Splits `split` over the axes and joins `concat`, which was split over them."""

    split: str = ""
    concat: str = ""

    name = "all_to_all"
    part = True

    def resplits(self) -> Mapping[str, tuple[int, Axes]]:
        return {self.split: (1, self.axes), self.concat: (-1, self.axes)}

    @staticmethod
    def sent(n: int) -> float:
        return (n - 1) / n

    def parameters(self) -> str:
        return f"{'+'.join(self.axes)}, split {self.split}, concat {self.concat}"


@dataclass(frozen=True, slots=True)
class Permute(Collective):
    """Every device sends its piece `shift` places along its group; places that nobody sends to get zeros
    unless `wrap`.

    Attributes:
      pairs: instead of a shift, who sends to whom, by position in the group; nobody sends or gets twice.
      both_ways: another one of the same size goes the other way at the same time.
    """

    shift: int = 1
    wrap: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    both_ways: bool = False

    name = "permute"

    def resplits(self) -> Mapping[str, tuple[int, Axes]]:
        return {}

    @staticmethod
    def sent(n: int) -> float:
        return 1.0

    def links(self, n: int) -> tuple[tuple[int, int], ...]:
        """(source, target) of every piece that is sent in a group of n devices."""
        if self.pairs:
            return self.pairs
        moves = ((i, i + self.shift) for i in range(n))
        return tuple((i, to % n) for i, to in moves if self.wrap or 0 <= to < n)

    def crossings(self, n: int) -> int:
        """The most pieces that cross one link in one direction, were the group a ring of n devices on which
        every piece goes the short way."""
        return _crossings(self.links(n), n)

    def parameters(self) -> str:
        how = " ".join(f"{i}>{to}" for i, to in self.pairs)
        how = how or f"{self.shift:+d}{', wrap' if self.wrap else ''}"
        return f"{'+'.join(self.axes)}, {how}"


@lru_cache(maxsize=1 << 12)
def _crossings(links: tuple[tuple[int, int], ...], n: int) -> int:
    crossed: Counter[tuple[int, int]] = Counter()
    for i, to in links:
        far = (to - i) % n
        way, steps = (1, far) if 2 * far <= n else (-1, n - far)
        crossed.update(((i + way * k) % n, way) for k in range(steps))
    return max(crossed.values(), default=0)


COLLECTIVES: Mapping[str, type[Collective]] = {
    kind.name: kind for kind in (AllReduce, ReduceScatter, AllGather, AllToAll, Permute)
}
"""Every kind of collective by its name."""


@dataclass(frozen=True, slots=True)
class Slice(Instr):
    """Free of communication: a device keeps its own part of `dim`, split over `axes` from now on."""

    dim: str
    axes: Axes

    def text(self) -> str:
        return f"slice({'+'.join(self.axes)}, {self.dim})"


@dataclass(frozen=True, slots=True)
class Input(Instr):
    """A piece of the batch."""

    feed: str

    def text(self) -> str:
        return f"input({self.feed})"


@dataclass(frozen=True, slots=True)
class ReadVariable(Instr):
    """This device's piece of a variable, as stored."""

    variable: str

    def text(self) -> str:
        return f"read({self.variable})"


@dataclass(frozen=True, slots=True)
class WriteVariable(Instr):
    """Stores this device's piece of a variable."""

    variable: str

    def text(self) -> str:
        return f"write({self.variable})"


@dataclass(frozen=True, slots=True)
class Transfer(Message):
    """Moves this device's piece of a value between its own memory and its host's, over the host link."""


@dataclass(frozen=True, slots=True)
class HostLoad(Transfer):
    """From the host to the device."""

    name = "host_load"


@dataclass(frozen=True, slots=True)
class HostStore(Transfer):
    """From the device to the host."""

    name = "host_store"


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
    """A body's value, and what the loop makes of it outside: its stack, or its sum."""

    inner: int
    outer: int


@dataclass(frozen=True, slots=True)
class Loop(Instr):
    """Runs `body` once per element of `dim`, from the last if `reverse`. The body may read any earlier value.

    Attributes:
      index: body value, the number of the iteration's element (int32 scalar).
      carried: the state.
      sliced: what every iteration reads its part of.
      stacked: what every iteration gives a part of.
      summed: what is added up over the iterations.
      runs: bool scalar, one of the carried or sliced body values or from outside: whether an iteration runs.
        One that does not run passes its carries on, stacks zeros and adds nothing; every device decides the
        same.
      branch: of a choice: the share of the times in which it runs, as a price counts it.
      first: int32 scalar from outside: the element of stacks that are longer than the loop at which its
        iterations begin; what they stack there has zeros elsewhere.
      stops: whether iterations may not run; true also in a part lowered alone, which lacks what decides.
      `inputs` and `outputs` list all values that cross the border, in that order; `inputs` ends with the
      values of outside that the body reads directly.
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
    stops: bool = False

    def text(self) -> str:
        condition = "" if self.runs is None else f", {'if' if self.branch else 'while'} %{self.runs}"
        condition += "" if self.first is None else f", from %{self.first}"
        return f"loop({self.dim}{', reverse' if self.reverse else ''}{condition})"

    @property
    def times(self) -> float:
        """The number of times that a program's price counts the body: a branch as often as it is taken, a
        loop that may stop early as if it did not."""
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
        """Body values that an iteration hands out: the state, what is stacked, what is summed."""
        return *(c.leave for c in self.carried), *(r.inner for r in self.results)

    @property
    def outside(self) -> tuple[int, ...]:
        """Values of outside that the body reads directly, and not by parts."""
        return self.inputs[len(self.carried) + len(self.sliced) :]

    def remade(self, **parts: Any) -> Loop:
        """The loop with some of its parts replaced."""
        names = "origin", "dim", "reverse", "index", "body", "runs", "branch", "first", "stops"
        crossing = Crossing(*(parts.pop(n, getattr(self, n)) for n in Crossing._fields))
        return make_loop(**{**{n: getattr(self, n) for n in names}, **parts}, crossing=crossing)


class Crossing(NamedTuple):
    """The values that go into a loop and come out of it: fields of `Loop`."""

    carried: tuple[Carry, ...] = ()
    sliced: tuple[Sliced, ...] = ()
    stacked: tuple[Result, ...] = ()
    summed: tuple[Result, ...] = ()


def make_loop(
    origin: Origin,
    dim: Dim,
    reverse: bool,
    index: int,
    crossing: Crossing,
    body: tuple[Instr, ...],
    runs: int | None = None,
    branch: Fraction | None = None,
    first: int | None = None,
    stops: bool = False,
) -> Loop:
    """A Loop whose `inputs` and `outputs` follow from its parts."""
    carried, sliced, stacked, summed = crossing
    inside = {index, *(c.enter for c in carried), *(s.inner for s in sliced)}
    read: dict[int, None] = dict.fromkeys(i for i in (runs, first) if i is not None and i not in inside)
    for instr in body:
        for i in instr.inputs:
            if i not in inside:
                read[i] = None
        inside.update(instr.outputs)
    results = (*stacked, *summed)
    leaving = (*(c.leave for c in carried), *(r.inner for r in results))
    read.update((i, None) for i in leaving if i not in inside)
    inputs = (*(c.init for c in carried), *(s.outer for s in sliced), *read)
    outputs = (*(c.final for c in carried), *(r.outer for r in results))
    stops |= runs is not None
    return Loop(inputs, outputs, origin, dim, reverse, index, *crossing, body, runs, branch, first, stops)
