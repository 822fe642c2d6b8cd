"""Attention on a ring of devices: the values that rotate, and the work of each device in its steps.

The positions are two dimensions, the piece (`_ring`, split) and the place in it: attention of a device's own
pieces is attention with one more dimension that queries and keys share. All turns but the last are one loop,
however many devices there are. `ops.context` has the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.attending import PLACES, AnyAttention
from mesh_tf_core.ops.basic import Cast
from mesh_tf_core.ops.ring_pieces import RING, ZIGZAG, Pieces, Tree, Turn, refused, summed, turns_of
from mesh_tf_core.ops.ring_steps import AddPart, ChoosePart, JoinParts, LaterRows, RingStep

RingParts = list[list[int]]
"""The pieces of positions that a device works on, one or two, each with some values."""


Turned = Callable[[RingParts, RingParts, Turn], RingParts]
"""The results of one step: from the received keys and the state."""
Ended = Callable[[RingParts, Turn], RingParts]
"""A function of the state before or after the steps in one direction."""


class Ring(Pieces):
    """One attention, or its gradient, on a ring."""

    def __init__(self, op: AnyAttention, low: Emitter, axes: Axes, form: str, lies: Layout) -> None:
        super().__init__(op, low, axes, form, lies)
        self.turns = turns_of(self.count, op.length.size // self.count, op.causal, op.window)
        self.placed = bool(op.rate) or any(turn.both and not turn.whole for turn in self.turns)
        """Whether pieces must say where they lie."""
        self.backward = op.name == "attentiongrad"
        self._check()

    def _check(self) -> None:
        op, form = self.op, self.form
        if op.window and form == ZIGZAG:
            raise refused(op, form, f"does not support a window (found window={op.window})", f"use {RING}")
        n, m = op.length, op.memory
        if (op.causal or op.window) and n.size != m.size:
            which = "causal attention" if op.causal else "a window"
            raise refused(
                op,
                form,
                f"with {which} needs as many queries as keys, found {n} and {m}",
                "make the lengths equal, or remove the context form",
            )
        if form == ZIGZAG and not op.causal:
            raise refused(op, form, "supports only causal attention", f"use {RING}")
        if form == ZIGZAG and n.size % (2 * self.count):
            raise refused(
                op,
                form,
                f"needs a size of {n.name!r} that is divisible by {2 * self.count}, found {n.size}",
                f"use {RING}",
            )

    def run(
        self, inputs: Sequence[int], types: Sequence[TensorType], wanted: Sequence[bool]
    ) -> Sequence[int]:
        """The outputs, where the operation makes them."""
        length, memory, self.query = self.op.length.name, self.op.memory.name, inputs[0]
        names = [self.low.values[i].shape.names for i in inputs]
        both = next((n for n in names if length in n and memory in n), None)
        assert both is None, (
            "one operand has both the dimensions of queries and of keys, so the layout would split two of "
            "its dimensions over one axis"
        )
        self.keys = {n for n, found in enumerate(names) if memory in found}
        parted = [self.parted(i) for i in inputs]
        parts = [self.zigzag(x) if self.form == ZIGZAG else [x] for x in parted]
        if self.placed:
            at = 3 + len(self.op.extras)
            self.keys = {n if n < at else n + len(PLACES) for n in self.keys} | {at + 1}
            parts[at:at] = [[self.began(half) for half in range(len(parts[0]))]] * len(PLACES)
        made = self.gradient(parts) if self.backward else self.attention(parts)
        out = []
        for found, type, read in zip(made, types, wanted, strict=True):
            whole = found[0] if len(found) == 1 or not read else self.ordered(found)
            out.append(self.joined(whole, type) if read else whole)
        return out

    # -- round the ring --------------------------------------------------------------------------------------

    def round(self, keys: Sequence[int], way: int, half: int = 0) -> list[int]:
        """Sends keys and values, and other arrays with their positions, to the next device of the ring or to
        the previous one."""
        found = [self.sent(x, way) if n in self.keys and n != self.place else x for n, x in enumerate(keys)]
        if self.placed:
            found[self.place] = self.began(half, found[self.place], way)
        return found

    def rounds(self, keys: RingParts, way: int) -> RingParts:
        """Applies `round` to all pieces."""
        return [self.round(each, way, half) for half, each in enumerate(keys)]

    def around(
        self,
        rows: RingParts,
        begun: Callable[[], RingParts],
        turned: Turned,
        opened: Ended = lambda state, turn: state,
        closed: Ended = lambda state, turn: state,
        landed: Callable[[], None] = lambda: None,
    ) -> RingParts:
        """Runs all steps of the ring; returns the final state.

        Args:
          begun: the state after a device's own keys; `turned`: computes a step from other keys, a state, and
            the step.
          opened, closed: called with the state before the first step of a direction, and after the last one.
          landed: receives the values that `closed` sent.
        """
        steps, turns = self.steps, self.turns

        def going(keys: RingParts, way: int) -> RingParts:
            """What of the keys is sent on."""
            return [[x for n, x in enumerate(e) if n in self.keys] for e in self.rounds(keys, way)]

        def came(going: RingParts) -> RingParts:
            pairs = zip(rows, map(iter, going), strict=True)
            return [[next(ids) if n in self.keys else x for n, x in enumerate(row)] for row, ids in pairs]

        def step(which: tuple[Turn, Turn | None], number: int | None, state: Tree) -> Tree:
            (turn, following), (coming, found) = which, state
            keys = came(coming)
            if following:
                coming = going(rows if turn.closes else keys, following.way)
            return [coming, turned(keys, found, replace(turn, number=number))]

        coming = going(rows, turns[0].way) if turns else []
        state = begun()
        steps.done()
        for turn, following in zip(turns, [*turns, None][1:], strict=True):
            if turn.times > 1:
                steps.done()
                landed()
            state = opened(state, turn) if turn.step == 1 else state
            coming, state = steps.run([coming, state], [(turn, following)], step, turn.times)
            landed()
            state = closed(state, turn) if turn.closes else state
        steps.done()
        landed()
        return state

    @property
    def place(self) -> int:
        """The operand that holds the position of the first key."""
        return 4 + len(self.op.extras) if self.placed else -1

    def met(self, rows: Sequence[int], keys: Sequence[int]) -> list[int]:
        """Operands: queries of some, keys of others."""
        return [y if n in self.keys else x for n, (x, y) in enumerate(zip(rows, keys, strict=True))]

    def part(
        self, operands: Sequence[int], first: bool = False, own: bool = False, turn: Turn | None = None
    ) -> list[int]:
        """Applies the operation to some queries and some keys.

        Args:
          first: these queries have seen no other keys.
          own: both are of the same positions.
          turn: that brought the keys, if a window may hide some of them.
        """
        operands, extras = [*operands], self.op.extras
        apart: tuple[int, ...] = (0,)
        shapes = [self.low.values[i].shape for i in operands[:2]]
        size = shapes[0].dim(self.op.length.name).size
        whole = turn.whole if turn else size <= self.op.window
        if turn and not whole:
            far = turn.way * turn.step * size
            apart = (far - self.op.length.size, far) if turn.both else (far,)
        if self.op.rate or len(apart) > 1:
            extras += PLACES
        elif self.placed:
            del operands[self.place - 1 : self.place + 1]
        op = replace(
            self.op,
            length=shapes[0].dim(self.op.length.name),
            memory=shapes[1].dim(self.op.memory.name),
            causal=self.op.causal and own,
            window=0 if whole else self.op.window,
            apart=apart,
            positions=self.op.length.size if self.op.rate else 0,
            extra_logit=self.op.extra_logit if first else None,
            extras=extras,
            partial=True,
        )
        return self.local(op, *operands)

    def step(self, kind: type[RingStep], turn: Turn | None, *operands: int, **fields: Any) -> list[int]:
        """Runs one step whose work depends on the step's number; None: the same on all devices."""
        if turn is None or turn.both:
            return self.local(kind(self.ring.name, **fields), *operands)
        number = () if turn.number is None else (turn.number,)
        end = self.count - 1 if turn.way < 0 else 0
        return self.local(
            kind(self.ring.name, turn.step, bool(number), end=end, **fields), *operands, *number
        )

    def chosen(self, turn: Turn, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """Chooses between two pieces of the operands: the earlier one on devices whose keys did not pass the
        end of the ring, the later one on others."""
        pairs = zip(one, other, strict=True)
        return [x if x == y else self.step(ChoosePart, turn, x, y)[0] for x, y in pairs]

    def dtype(self, last: bool) -> str:
        """The dtype of sums over keys that a device accumulates: wide until the last is added."""
        own = self.low.values[self.query].dtype
        return own if last or own == "float64" else "float32"

    def wide(self, id: int) -> int:
        """Such a sum as a loop carries it."""
        if all(turn.times == 1 for turn in self.turns) or self.low.values[id].dtype == self.dtype(False):
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

        def begun() -> RingParts:
            found = [self.part(own, first=True, own=True) for own in rows]
            if self.form == ZIGZAG:
                found[1] = self.join(found[1], self.part(self.met(rows[1], rows[0])))
            return [[self.wide(out), lse] for out, lse in found]

        def turned(keys: RingParts, found: RingParts, turn: Turn) -> RingParts:
            if self.form == RING:
                new = self.part(self.met(rows[0], keys[0]), turn=turn)
                return [self.join(found[0], new, turn.last, turn)]
            later = self.join(found[1], self.part(self.met(rows[1], keys[0])))
            new = self.part(self.chosen(turn, *map(self.met, rows, keys)))
            pairs = enumerate((found[0], later))
            return [self.join(x, new, turn.last, turn, at == 1) for at, x in pairs]

        return [[*xs] for xs in zip(*self.around(rows, begun, turned), strict=True)]

    def gradient(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Gradients of query, key and value, each in one or two pieces: the first for values that a device
        keeps, the others for values that rotate."""
        rows = [list(xs) for xs in zip(*parts, strict=True)]
        after, home, landing = list[list[int]](), list[list[int]](), list[list[int]]()

        def begun() -> RingParts:
            after.extend(self.later(each, None) for each in rows)
            made = [self.part(own, first=True, own=True) for own in rows]
            queries, found = [each[0] for each in made], [each[1:] for each in made]
            if self.form == ZIGZAG:
                new = self.part(self.met(after[1], rows[0]))
                queries[1], found[0] = self.add(queries[1], new[0]), self.added(found[0], new[1:])
            home.extend(found)
            return [[self.wide(x) for x in queries], *([] for _ in rows)]

        def opened(state: RingParts, turn: Turn) -> RingParts:
            """What begins with the first turn begins empty; a loop, and a turn that is not for all pieces,
            add to what there is."""
            if turn.times == 1 and self.form == RING:
                return state
            state, home[:] = [state[0], *home], [[] for _ in rows]
            return state

        def turned(keys: RingParts, state: RingParts, turn: Turn) -> RingParts:
            queries, *found = state
            queries, found = [*queries], [[self.sent(x, turn.way) for x in each] for each in found]
            if self.form == RING:
                rest = after[0] if turn.both else self.later(rows[0], turn)
                new = self.part(self.met(rest, keys[0]), turn=turn)
                self.steps.done()
                return [[self.add(queries[0], new[0], turn.last)], self.added(found[0], new[1:])]
            first = self.part(self.met(after[1], keys[0]))
            new = self.part(self.chosen(turn, *map(self.met, after, keys)))
            self.steps.done()
            queries[1], found[0] = self.add(queries[1], first[0]), self.added(found[0], first[1:])
            sums = [self.add(x, new[0], turn.last, turn, at == 1) for at, x in enumerate(queries)]
            return [sums, *(self.added(xs, new[1:], turn, at == 1) for at, xs in enumerate(found))]

        def closed(state: RingParts, turn: Turn) -> RingParts:
            """Gradients of keys and values go home by the short way."""
            queries, *found = state
            back = turn.way * (self.count - turn.step if 2 * turn.step >= self.count else -turn.step)
            landing[:] = [[self.sent(x, back) for x in each] for each in found]
            return [queries, *([] for _ in rows)]

        def landed() -> None:
            if landing:
                home[:] = [self.added(*xs) for xs in zip(home, landing, strict=True)]
                landing.clear()

        queries, *_ = self.around(rows, begun, turned, opened, closed, landed)
        whole = [[summed(self.low, x) for x in each] for each in home]
        return [queries, *([*xs] for xs in zip(*whole, strict=True))]

    def later(self, rows: Sequence[int], turn: Turn | None) -> list[int]:
        """Rows in the form that later keys need."""
        lse = 4 + len(self.op.extras) + len(PLACES) * self.placed
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
        """Gradients of keys and values that rotate: in their own dtype, as sums over devices are."""
        if not totals or not terms:
            return [*totals, *terms]
        pairs, dtype = zip(totals, terms, strict=True), self.dtype(True)
        return [self.step(AddPart, turn, *pair, before=before, dtype=dtype)[0] for pair in pairs]
