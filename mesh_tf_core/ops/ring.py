"""Attention on a ring of devices: what is sent round, and what each device makes of it in its turns.

The positions are two dimensions, the piece (`_ring`, split) and the place in it: attention of a device's own
pieces is attention with one more dimension that queries and keys share. All turns but the last are one loop,
however many devices there are. `ops.context` has the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.op import Emitter, Op, TensorType
from mesh_tf_core.ir.program import Local, Permute
from mesh_tf_core.ops.attending import AnyAttention
from mesh_tf_core.ops.basic import Cast
from mesh_tf_core.ops.ring_steps import AddPart, ChoosePart, JoinParts, LaterRows, RingStep
from mesh_tf_core.ops.shape import Concat, Reshape, SliceDim

RING, ZIGZAG, ALL_TO_ALL = "ring", "zigzag", "all_to_all"
Parts = list[list[int]]
"""The pieces of positions that a device works on, one or two, each with some values."""


@dataclass(frozen=True)
class Turn:
    """A turn of a ring, or one of a loop of turns.

    Attributes:
      step: how many places keys have come round, in the first of a loop.
      number: the value that counts those of a loop.
      last: nothing is sent on.
    """

    step: int
    number: int | None = None
    last: bool = False


Turned = Callable[[Parts, Parts, Turn], Parts]
"""What a turn makes of the keys that came and of some state."""


def refused(op: AnyAttention, form: str, why: str, instead: str) -> LayoutError:
    """That a form cannot be had, and what can."""
    return LayoutError(f"{op.name}: {form} of {op.memory.name!r} {why}; {instead}")


def type_of(low: Emitter, id: int) -> TensorType:
    """Of a value."""
    return TensorType(low.values[id].shape, low.values[id].dtype)


def summed(low: Emitter, id: int) -> int:
    """A value whose terms lie on several devices, as their sum."""
    pending = low.values[id].partial
    return low.joined(id, pending, "sum") if pending else id


class Ring:
    """One attention, or its gradient, on a ring.

    Args:
      axes: that split the positions.
      lies: the layout in force, less what the operation needs whole.
    """

    def __init__(self, op: AnyAttention, low: Emitter, axes: Axes, form: str, lies: Layout) -> None:
        self.op, self.low, self.axes, self.form, self.lies = op, low, axes, form, lies
        self.count = low.oracle.ways(axes)
        self.ring = Dim(f"{op.length.name}_ring", self.count)
        self.turns = self.count - 1
        """How often keys are sent on: to all that see any of them."""
        if op.window:
            self.turns = min(self.turns, -((1 - op.window) // (op.length.size // self.count)))
        self.backward = op.name == "attentiongrad"
        self._check()

    def _check(self) -> None:
        op, form = self.op, self.form
        if op.rate:
            other = f"leave {form} out, or use {ALL_TO_ALL}"
            raise refused(op, form, "cannot have dropout of its weights", other)
        if op.window and form == ZIGZAG:
            raise refused(op, form, f"cannot have a window of {op.window}", f"use {RING}")
        if op.window and not op.causal:
            what = f"cannot have a window of {op.window} to both sides"
            raise refused(op, form, what, f"leave {form} out, or use {ALL_TO_ALL}")
        n, m = op.length, op.memory
        if op.causal and n.size != m.size:
            raise refused(
                op, form, f"and causal needs as many queries as keys, found {n} and {m}", "leave one out"
            )
        if form == ZIGZAG and not op.causal:
            raise refused(op, form, "is for causal attention", f"use {RING}")
        if form == ZIGZAG and n.size % (2 * self.count):
            raise refused(op, form, f"needs {n} in {2 * self.count} equal pieces", f"use {RING}")

    def run(
        self, inputs: Sequence[int], types: Sequence[TensorType], wanted: Sequence[bool]
    ) -> Sequence[int]:
        """The outputs, where the operation makes them."""
        length, memory, self.query = self.op.length.name, self.op.memory.name, inputs[0]
        names = [self.low.values[i].shape.names for i in inputs]
        both = next((n for n in names if length in n and memory in n), None)
        assert both is None, "the layout would split two dimensions of one operand over an axis"
        self.keys = {n for n, found in enumerate(names) if memory in found}
        parted = [self.parted(i) for i in inputs]
        parts = [[x] for x in parted]
        if self.form == ZIGZAG:
            parts = [self.zigzag(x) for x in parted]
        made = self.gradient(parts) if self.backward else self.attention(parts)
        out = []
        for found, type, read in zip(made, types, wanted, strict=True):
            whole = found[0] if len(found) == 1 or not read else self.ordered(found)
            out.append(self.joined(whole, type) if read else whole)
        return out

    # -- the pieces of the positions -------------------------------------------------------------------------

    def local(self, op: Op, *inputs: int) -> list[int]:
        """What an operation makes of values whose dimensions, but the ring, lie as the layout says; sums over
        what else is split are still to be taken."""
        given = [type_of(self.low, i) for i in inputs]
        made = op.infer(*given)
        types = made if isinstance(made, tuple) else (made,)
        reduced = [] if op.regroups or op.linear else op.roles(*given).reduced
        out = []
        for t in types:
            lacking = (n for n in reduced if n not in t.shape.names and n != self.op.length.name)
            axes = (a for n in lacking for a in self.lies.axes(n))
            pending = self.low.values[inputs[0]].partial if op.linear else self.low.oracle.ordered(axes)
            out.append(self.low.new(t, self.splits(t.shape), pending))
        self.low.emit(Local(tuple(inputs), tuple(out), self.low.origin, op))
        return out

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
        """What lies on the device before; with `pairs`, on the one that is named."""
        v = self.low.values[id]
        out = self.low.new(type_of(self.low, id), v.splits, v.partial)
        wrap = not pairs
        self.low.emit(Permute((id,), (out,), self.low.origin, self.axes, shift, wrap, pairs))
        return out

    def position(self, id: int) -> str | None:
        """The name of a value's positions."""
        names = self.low.values[id].shape.names
        return next((n for n in (self.op.length.name, self.op.memory.name) if n in names), None)

    def homes(self, odd: int) -> tuple[tuple[int, int], ...]:
        """Where every device's earlier or later piece lies in a zigzag; empty if that is where it is."""
        n = self.count
        pieces = ((i, 2 * i + odd) for i in range(n))
        pairs = tuple((i, piece if piece < n else 2 * n - 1 - piece) for i, piece in pieces)
        return () if all(i == to for i, to in pairs) else pairs

    def zigzag(self, id: int) -> list[int]:
        """The earlier and the later piece of a device of a zigzag; of what has no positions, itself twice."""
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

    # -- round the ring --------------------------------------------------------------------------------------

    @property
    def alike(self) -> int:
        """How many turns, the first ones, are one body of a loop: all but the last, which sends nothing on,
        and but those of which a window shows a part."""
        size = self.op.length.size // self.count
        whole = self.op.window // size - 1 if self.op.window else self.turns
        found = min(whole, self.turns - 1)
        return found if found > 1 else 0

    def round(self, keys: Sequence[int]) -> list[int]:
        """Keys and values, and what else has their positions, of the device before."""
        return [self.sent(x) if n in self.keys else x for n, x in enumerate(keys)]

    def around(self, rows: Parts, begun: Callable[[], Parts], turn: Turned) -> Parts:
        """What is left of some state after the last turn.

        Args:
          begun: the state that a device's own keys make; `turn`: that of other keys, a state, and the turn.
        """
        coming = [self.round(each) for each in rows] if self.turns else []
        state, first = begun(), 1
        if self.alike:
            coming, state = self.looped(coming, state, turn)
            first += self.alike
        for step in range(first, self.turns + 1):
            keys, last = coming, step == self.turns
            coming = keys if last else [self.round(each) for each in keys]
            state = turn(keys, state, Turn(step, last=last))
        return state

    def looped(self, coming: Parts, state: Parts, turn: Turned) -> tuple[Parts, Parts]:
        """What comes next, and the state, after the turns that are alike."""
        going = [x for each in coming for n, x in enumerate(each) if n in self.keys]

        def parted(ids: Sequence[int]) -> tuple[Parts, Parts]:
            given = iter(ids)
            keys = [[next(given) if n in self.keys else x for n, x in enumerate(each)] for each in coming]
            return keys, [[next(given) for _ in each] for each in state]

        def body(number: int, ids: Sequence[int]) -> list[int]:
            keys, before = parted(ids)
            more = [self.round(each) for each in keys]
            after = turn(keys, before, Turn(1, number))
            sent = [x for each in more for n, x in enumerate(each) if n in self.keys]
            return [*sent, *(x for each in after for x in each)]

        turns = Dim(f"{self.ring.name}_turns", self.alike)
        return parted(self.low.repeated(turns, [*going, *(x for each in state for x in each)], body))

    def met(self, rows: Sequence[int], keys: Sequence[int]) -> list[int]:
        """Operands: queries of some, keys of others."""
        return [y if n in self.keys else x for n, (x, y) in enumerate(zip(rows, keys, strict=True))]

    def part(
        self, operands: Sequence[int], first: bool = False, own: bool = False, step: int = 0
    ) -> list[int]:
        """What the operation makes of some queries and some keys.

        Args:
          first: no other keys of these queries come before.
          own: both are of the same positions.
          step: by how many pieces these keys, if they count, come before the queries.
        """
        shapes = [self.low.values[i].shape for i in operands[:2]]
        size = shapes[0].dim(self.op.length.name).size
        within = (step + 1) * size <= self.op.window
        op = replace(
            self.op,
            length=shapes[0].dim(self.op.length.name),
            memory=shapes[1].dim(self.op.memory.name),
            causal=self.op.causal and own,
            window=0 if within else self.op.window,
            apart=0 if within or not self.op.window else step * size,
            extra_logit=self.op.extra_logit if first else None,
            partial=True,
        )
        return self.local(op, *operands)

    def step(self, kind: type[RingStep], turn: Turn | None, *operands: int, **fields: Any) -> list[int]:
        """What a step makes that depends on the turn; None: of all devices alike."""
        if turn is None:
            return self.local(kind(self.ring.name, **fields), *operands)
        number = () if turn.number is None else (turn.number,)
        return self.local(kind(self.ring.name, turn.step, bool(number), **fields), *operands, *number)

    def chosen(self, turn: Turn, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """Of two pieces of the operands, the earlier on devices that keys have come to without passing the
        end of the ring, and on others the later."""
        pairs = zip(one, other, strict=True)
        return [x if x == y else self.step(ChoosePart, turn, x, y)[0] for x, y in pairs]

    def dtype(self, last: bool) -> str:
        """Of sums over keys that a device keeps: wide until the last is in."""
        own = self.low.values[self.query].dtype
        return own if last or own == "float64" else "float32"

    def wide(self, id: int) -> int:
        """Such a sum as a loop carries it."""
        if not self.alike or self.low.values[id].dtype == self.dtype(False):
            return id
        return self.local(Cast(self.dtype(False)), id)[0]

    def join(
        self,
        one: Sequence[int],
        other: Sequence[int],
        last: bool = False,
        turn: Turn | None = None,
        before: bool = False,
    ) -> list[int]:
        return self.step(JoinParts, turn, *one, *other, before=before, dtype=self.dtype(last))

    def attention(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Result and log-sum-exp, each in one or two pieces."""
        rows = [list(xs) for xs in zip(*parts, strict=True)]

        def begun() -> Parts:
            found = [self.part(own, first=True, own=True) for own in rows]
            if self.form == ZIGZAG:
                found[1] = self.join(found[1], self.part(self.met(rows[1], rows[0])))
            return [[self.wide(out), lse] for out, lse in found]

        def turned(keys: Parts, found: Parts, turn: Turn) -> Parts:
            if self.form == RING:
                new = self.part(self.met(rows[0], keys[0]), step=turn.step)
                return [self.join(found[0], new, turn.last, turn if self.op.causal else None)]
            later = self.join(found[1], self.part(self.met(rows[1], keys[0])))
            new = self.part(self.chosen(turn, *map(self.met, rows, keys)))
            pairs = enumerate((found[0], later))
            return [self.join(x, new, turn.last, turn, at == 1) for at, x in pairs]

        return [[*xs] for xs in zip(*self.around(rows, begun, turned), strict=True)]

    def gradient(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Gradients of query, key and value, each in one or two pieces: the first in what a device keeps, the
        others in what goes round."""
        rows, after = [list(xs) for xs in zip(*parts, strict=True)], list[list[int]]()

        def earlier(queries: list[int], found: Parts, keys: Parts) -> None:
            """Of the later queries with the earlier keys."""
            new = self.part(self.met(after[1], keys[0]))
            queries[1], found[0] = self.add(queries[1], new[0]), self.added(found[0], new[1:])

        def begun() -> Parts:
            after.extend(self.later(each, None) for each in rows)
            made = [self.part(own, first=True, own=True) for own in rows]
            queries, found = [each[0] for each in made], [each[1:] for each in made]
            if self.form == ZIGZAG:
                earlier(queries, found, rows)
            return [[self.wide(x) for x in queries], *found]

        def turned(keys: Parts, state: Parts, turn: Turn) -> Parts:
            queries, *found = state
            queries, found = [*queries], [[self.sent(x) for x in each] for each in found]
            if self.form == RING:
                rest = self.later(rows[0], turn) if self.op.causal else after[0]
                new = self.part(self.met(rest, keys[0]), step=turn.step)
                return [[self.add(queries[0], new[0], turn.last)], self.added(found[0], new[1:])]
            earlier(queries, found, keys)
            new = self.part(self.chosen(turn, *map(self.met, after, keys)))
            sums = [self.add(x, new[0], turn.last, turn, at == 1) for at, x in enumerate(queries)]
            return [sums, *(self.added(xs, new[1:], turn, at == 1) for at, xs in enumerate(found))]

        queries, *found = self.around(rows, begun, turned)
        if self.turns:
            back = -self.turns if self.turns + 1 < self.count else 1
            found = [[self.sent(x, back) for x in each] for each in found]
        home = [[summed(self.low, x) for x in each] for each in found]
        return [queries, *([*xs] for xs in zip(*home, strict=True))]

    def later(self, rows: Sequence[int], turn: Turn | None) -> list[int]:
        """Rows as keys that are not the first ones take them."""
        lse = 4 + len(self.op.extras)
        if turn is None and not self.op.extras:
            return [*rows]
        return [self.step(LaterRows, turn, x)[0] if n == lse else x for n, x in enumerate(rows)]

    def add(
        self, total: int, term: int, last: bool = False, turn: Turn | None = None, before: bool = False
    ) -> int:
        return self.step(AddPart, turn, total, term, before=before, dtype=self.dtype(last))[0]

    def added(
        self, totals: Sequence[int], terms: Sequence[int], turn: Turn | None = None, before: bool = False
    ) -> list[int]:
        """Gradients of keys and values on their way: in their own dtype, as sums over devices are."""
        pairs, dtype = zip(totals, terms, strict=True), self.dtype(True)
        return [self.step(AddPart, turn, *pair, before=before, dtype=dtype)[0] for pair in pairs]
