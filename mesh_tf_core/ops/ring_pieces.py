"""The pieces of positions on the devices of a ring: their places, the operation's results on them, and the
steps of the ring (see `ops.ring`).

Steps of a decomposed collective: while a device computes on the received shards, the next ones arrive
(Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS; Liu et al. 2023, "Ring Attention with Blockwise Transformers").

    start     every shard that the next step needs is sent to a neighbour (`permute_start`)
    compute   the device works on what it has
    done      it waits for what is on its way (`permute_done`)

Ring attention, its gradient (`ops.ring`), and gathers and scatters of products (`lower.collective_matmul`)
define the moves and the compute. Here is the order, and which steps are a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.builder import Emitter, ProgramBuilder
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.instructions import STEP
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ops.attending import AnyAttention
from mesh_tf_core.ops.ring_steps import ChoosePart, Place, PlaceSent
from mesh_tf_core.ops.shape import Concat, Reshape, SliceDim

T = TypeVar("T")
Tree = list[Any]
"""Ids of values in nested lists."""


class CollectiveSteps:
    """The steps of one decomposed collective.

    Args:
      axes: that the shards lie split over.
      name: of its dimension; loops of steps are called after it.
    """

    def __init__(self, low: Emitter | ProgramBuilder, axes: Axes, name: str) -> None:
        self.low, self.axes, self.name = low, axes, name
        self._on_their_way: list[int] = []

    def start(self, id: int, shift: int, both_ways: bool = False) -> int:
        """Starts sending a shard to the device `shift` places further; returns the arriving shard."""
        came = self.low.sent(id, self.axes, shift, both_ways=both_ways, rule=STEP)
        self._on_their_way.append(came)
        return came

    def done(self) -> None:
        """Waits for arriving shards."""
        if self._on_their_way:
            self.low.done(self._on_their_way)
            self._on_their_way = []

    def run(
        self, state: Tree, steps: Sequence[T], step: Callable[[T, int | None, Tree], Tree], times: int = 1
    ) -> Tree:
        """The state after some steps, or after a loop of them.

        Args:
          step: (which, number of the iteration in a loop, state) -> state; ends with `done`.
          times: how often the steps run.
        """

        def all_of(number: int | None, state: Tree) -> Tree:
            for which in steps:
                state = step(which, number, state)
                self.done()
            return state

        if times == 1:
            return all_of(None, state)
        loop = Dim(f"{self.name}_steps", times)
        left = self.low.loop(
            loop, [*leaves(state)], lambda number, ids: [*leaves(all_of(number, rebuilt(state, iter(ids))))]
        )
        return rebuilt(state, iter(left))


def leaves(tree: Tree) -> Iterator[int]:
    """The ids of a tree, in order."""
    for x in tree:
        if isinstance(x, list):
            yield from leaves(x)
        else:
            yield x


def rebuilt(tree: Tree, ids: Iterator[int]) -> Tree:
    """A tree of the same form with other ids."""
    return [rebuilt(x, ids) if isinstance(x, list) else next(ids) for x in tree]


RING, ZIGZAG, ALL_TO_ALL = "ring", "zigzag", "all_to_all"


def refused(op: AnyAttention, form: str, why: str, instead: str) -> LayoutError:
    """The error for an unavailable form, with the available ones."""
    return LayoutError(f"{op.name}: {form} of {op.memory.name!r} {why}; {instead}")


def summed(low: Emitter, id: int) -> int:
    """A value whose terms are on several devices, as their sum."""
    pending = low.values[id].partial
    return low.joined(id, pending, "sum") if pending else id


class Pieces:
    """The pieces of one attention, or of its gradient.

    Args:
      axes: that split the positions.
      lies: the layout without dimensions that the operation needs whole.
    """

    def __init__(self, op: AnyAttention, low: Emitter, axes: Axes, form: str, lies: Layout) -> None:
        self.op, self.low, self.axes, self.form, self.lies = op, low, axes, form, lies
        self.count = low.oracle.ways(axes)
        self.ring = Dim(f"{op.length.name}_ring", self.count)
        self.steps = CollectiveSteps(low, axes, self.ring.name)

    def local(self, op: Op, *inputs: int) -> list[int]:
        """Applies an operation to values whose dimensions, except the ring, are split as in the layout; sums
        over other split dimensions stay pending."""
        given = [self.low.type_of(i) for i in inputs]
        made = op.infer(*given)
        types = made if isinstance(made, tuple) else (made,)
        reduced = [] if op.regroups or op.linear else op.roles(*given).reduced
        partials = []
        for t in types:
            lacking = (n for n in reduced if n not in t.shape.names and n != self.op.length.name)
            axes = (a for n in lacking for a in self.lies.axes(n))
            pending = self.low.values[inputs[0]].partial if op.linear else self.low.oracle.ordered(axes)
            partials.append(pending)
        return self.low.local(op, inputs, types, [self.splits(t.shape) for t in types], partials)

    def splits(self, shape: Shape) -> tuple[Axes, ...]:
        positions = {self.op.length.name: (), self.op.memory.name: (), self.ring.name: self.axes}
        return tuple(positions.get(n, self.lies.axes(n)) for n in shape.names)

    def parted(self, id: int) -> int:
        """A value with its positions as two dimensions."""
        dims: list[Dim] = []
        for d in self.low.values[id].shape:
            if d.name in (self.op.length.name, self.op.memory.name):
                dims += [self.ring, Dim(d.name, d.size // self.count)]
            else:
                dims.append(d)
        return self.local(Reshape(Shape(dims)), id)[0]

    def joined(self, id: int, type: TensorType) -> int:
        """The inverse."""
        return self.low.local(Reshape(type.shape), [id], [type], [self.lies.axes_of(type.shape.names)])[0]

    def sent(self, id: int, shift: int = 1, pairs: tuple[tuple[int, int], ...] = ()) -> int:
        """Receives the value of the previous device; with `pairs`, of the named one."""
        return self.low.sent(id, self.axes, shift, False, pairs) if pairs else self.steps.start(id, shift)

    def position(self, id: int) -> str | None:
        """The name of a value's positions."""
        names = self.low.values[id].shape.names
        return next((n for n in (self.op.length.name, self.op.memory.name) if n in names), None)

    def homes(self, odd: int) -> tuple[tuple[int, int], ...]:
        """The devices of every earlier or later piece in a zigzag; empty if pieces do not move."""
        n = self.count
        pieces = ((i, 2 * i + odd) for i in range(n))
        pairs = tuple((i, piece if piece < n else 2 * n - 1 - piece) for i, piece in pieces)
        return () if all(i == to for i, to in pairs) else pairs

    def zigzag(self, id: int) -> list[int]:
        """The earlier and the later piece of a device in a zigzag; a value without positions is returned
        twice."""
        name = self.position(id)
        if name is None:
            return [id, id]
        half = self.low.values[id].shape.dim(name).size // 2
        pieces = [self.local(SliceDim(name, n * half, half), id)[0] for n in (0, 1)]
        for odd in (0, 1):
            if pairs := self.homes(odd):
                pieces[odd] = self.sent(pieces[odd], pairs=pairs)
        choose = ChoosePart(self.ring.name)
        return [self.local(choose, *pieces)[0], self.local(choose, *pieces[::-1])[0]]

    def ordered(self, parts: Sequence[int]) -> int:
        """The inverse."""
        choose, name = ChoosePart(self.ring.name), self.position(parts[0])
        assert name is not None
        pieces = [self.local(choose, *parts)[0], self.local(choose, *parts[::-1])[0]]
        for odd in (0, 1):
            if pairs := self.homes(odd):
                pieces[odd] = self.sent(pieces[odd], pairs=tuple((to, i) for i, to in pairs))
        return self.local(Concat(name), *pieces)[0]

    def began(self, half: int, sent: int | None = None, way: int = 1) -> int:
        """The first position of a device's piece, with `half` of the later one of a zigzag; with `sent`, that
        of the previous device (or of the next, in the other direction)."""
        n, size = self.count, self.op.length.size // self.count
        if self.form == ZIGZAG:
            size //= 2
        by = -size if half else size
        if sent is not None:
            name, start = self.ring.name, half * n * size
            return self.local(PlaceSent(name, by=-way * by, start=start, total=n * size), sent)[0]
        return self.local(Place(self.ring, half * (2 * n - 1) * size, by))[0]


@dataclass(frozen=True)
class Turn:
    """A turn of a ring, or a loop of turns.

    Attributes:
      step: distance that keys have come, in the first step of a loop.
      way: 1 if they come from previous devices, -1 if from following ones.
      both: a query sees keys on either side; otherwise only devices count whose keys did not pass the end of
        the ring.
      whole: no window hides them from the devices that count.
      times: number of steps in a loop.
      number: the value that counts the steps of a loop.
      closes: True for the last step of its direction.
      last: nothing is sent on.
    """

    step: int
    way: int = 1
    both: bool = False
    whole: bool = True
    times: int = 1
    number: int | None = None
    closes: bool = False
    last: bool = False


def turns_of(count: int, size: int, causal: bool, window: int) -> list[Turn]:
    """The turns that bring every device all keys that its queries see, each once.

    With r pieces in reach, r turns bring keys from before. For a device behind the end of the ring, they come
    from n - step places away; the remaining following pieces come in the other direction.

    Args:
      count: n, devices; `size`: positions of a piece.
      causal, window: as of `Attending`.
    """
    reach = min(count - 1, -((1 - window) // size)) if window else count - 1
    behind = 0 if causal else min(reach, count - 1 - reach)

    def turn(step: int, way: int) -> Turn:
        both = not causal and way > 0 and count - step <= reach
        far = max(step, count - step) if both else step
        return Turn(step, way, both, not window or (far + 1) * size <= window)

    found: list[Turn] = []
    for way, steps in ((1, reach), (-1, behind)):
        if steps:
            *others, end = (turn(step, way) for step in range(1, steps + 1))
            found += [*_looped(others), replace(end, closes=True)]
    return [*found[:-1], *(replace(turn, last=True) for turn in found[-1:])]


def _looped(turns: Iterable[Turn]) -> Iterable[Turn]:
    """The same, those that follow each other and are alike as one."""
    for (whole, _), run in groupby(turns, key=lambda turn: (turn.whole, turn.both)):
        first, *more = run
        if whole:
            yield replace(first, times=1 + len(more))
        else:
            yield from (first, *more)
