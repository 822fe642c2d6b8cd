"""The instructions of a program: frozen, plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.values import Instr


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
"""The rules by which messages start before they are waited for (`lower.messages`)."""


@dataclass(frozen=True, slots=True)
class Message(Instr):
    """Moves pieces while the device may compute: between devices, or between a device and its host.

    Attributes:
      rule: why the device computes on after the start, until the message's `Done`; empty: the device waits.
      pipelined: done is one iteration of their block after start. A value that an iteration reads was started
        in the iteration before, and a value that leaves it is done in the next one (XLA's collective
        pipeliner). Iterations of the outermost block are steps.
    """

    rule: str = field(default="", kw_only=True)
    pipelined: bool = field(default=False, kw_only=True)
    name: ClassVar[str]

    def text(self) -> str:
        if not self.rule:
            return Instr.text(self)
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
      part: a device contributes a part of the array of its group, not an array of the same size.
      sums: it adds up values that are partial over its axes.
    """

    axes: Axes
    part: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    def resplits(self) -> Mapping[str, tuple[int, Axes]]:
        """Dimension -> (1, axes that split it further afterwards), or (-1, axes that no longer do)."""
        raise NotImplementedError

    @staticmethod
    def sent(n: int) -> float:
        """Factor between the bytes that each of n devices sends and its input, by the bandwidth-optimal
        algorithm (Chan et al. 2007, "Collective communication: theory, practice, and experience", table
        1)."""
        raise NotImplementedError

    def parameters(self) -> str:
        return ", ".join(filter(None, ("+".join(self.axes), getattr(self, "dim", ""))))


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """Joins partial values by `combine` (sum, max, min); several values of one dtype may travel together."""

    combine: str = "sum"

    name = "all_reduce"

    @property
    def sums(self) -> bool:  # type: ignore[override]
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
    sums = True

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
    """Every device sends its shard `shift` places along its group; places without a sender get zeros unless
    `wrap`.

    Attributes:
      pairs: instead of a shift, (sender, receiver) by position in the group; each position occurs at most
        once as sender and as receiver.
      both_ways: another permute of the same size runs in the opposite direction at the same time.
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
        """The largest number of pieces that cross one link in one direction, if the group were a ring of n
        devices with shortest paths."""
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

    def parameters(self) -> str:
        return f"{'+'.join(self.axes)}, {self.dim}"


@dataclass(frozen=True, slots=True)
class Input(Instr):
    """A piece of the batch."""

    feed: str

    def parameters(self) -> str:
        return self.feed


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
