"""Attention whose queries and keys are both split along their positions: what is sent instead of gathering
the keys.

    ring        every device's keys and values go round. Beside each, a device attends with its queries and
                joins what it finds by its log-sum-exp (Liu et al. 2023, "Ring Attention with Blockwise
                Transformers"):  l = log(exp l1 + exp l2),  o = exp(l1 - l) o1 + exp(l2 - l) o2.
                Backward sends the gradients of keys and values round with them.
    zigzag      the same for causal attention, with equal work: of 2n pieces of the positions, device i of n
                works on the pieces i and 2n-1-i (Dubey et al. 2024, "The Llama 3 Herd of Models", 3.3.2).
                Operands are sent there, and results back. Of keys from elsewhere, a device's later queries
                see the earlier piece, and either its earlier queries see that too or its later ones see
                the later piece: two products without a mask.
    all_to_all  queries, keys and values are sent to where their heads lie split instead of their positions,
                and results back (Jacobs et al. 2023, "DeepSpeed Ulysses").

In a ring the positions are two dimensions, the piece (`_ring`, split) and the place in it: attention of a
device's own pieces is attention with one more dimension that queries and keys share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.op import Emitter, Op, Roles, TensorType
from mesh_tf_core.ir.program import Local, Permute
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.attending import AnyAttention
from mesh_tf_core.ops.blockwise import HIDDEN, NOTHING_SEEN
from mesh_tf_core.ops.common import all_parallel
from mesh_tf_core.ops.shape import Concat, Reshape, SliceDim

RING, ZIGZAG, ALL_TO_ALL = "ring", "zigzag", "all_to_all"
FORMS = (RING, ZIGZAG, ALL_TO_ALL)
"""What a layout's options may say of a dimension of keys; without a word they are gathered."""
_NEVER = 2 * HIDDEN
"""Log-sum-exp of what is not to count, even beside rows that see nothing."""
_DONE = 1e30
"""Log-sum-exp beside which every weight is 0."""


# -- what a device does between messages ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Step(Op, abstract=True):
    """Attributes:
    ring: the dimension that counts the pieces.
    step: how many places what it takes has come round.
    before: it is of devices that it has come to round the end of the ring, else of the others.
    """

    ring: str
    step: int = 0
    before: bool = False

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def counts(self, k: Kernel, at: At) -> Any:
        """Bool scalar: whether this device is one of those; None if all are."""
        if not self.step:
            return None
        number = k.scalar(at.shard(self.ring), "int32")
        return k.binary("lt" if self.before else "ge", number, k.scalar(self.step, "int32"))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        raise UserError("steps of a ring are made by lowering and have no gradient of their own")


@dataclass(frozen=True)
class JoinParts(_Step):
    """Attention to more keys: (result, log-sum-exp) of some and of others -> of both.

    Attributes:
      dtype: of the result.
    """

    dtype: str = "float32"

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        return TensorType(inputs[0].shape, self.dtype), inputs[1]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        one, low, other, more = slices
        wide, counts = at.inputs[1].dtype, self.counts(k, at)
        seen = k.binary("gt", more, k.scalar(NOTHING_SEEN, wide))
        seen = seen if counts is None else k.binary("and", seen, counts)
        # A row that sees nothing stays as its first part has it.
        more = k.where(seen, more, k.scalar(_NEVER, wide))
        low = k.binary("max", low, k.scalar(HIDDEN, wide))
        top = k.binary("max", low, more)
        shares = [k.unary("exp", k.binary("sub", x, top)) for x in (low, more)]
        total = k.binary("add", *shares)
        rows, names = at.inputs[1].shape.names, at.outputs[0].shape.names
        sizes = [d.size if d.name in rows else 1 for d in at.outputs[0].shape]
        assert [n for n in names if n in rows] == [*rows]
        terms = [
            k.binary("mul", k.cast(x, wide), k.reshape(k.binary("div", share, total), sizes))
            for x, share in zip((one, other), shares, strict=True)
        ]
        return k.cast(k.binary("add", *terms), self.dtype), k.binary("add", top, k.unary("log", total))

    def flops(self, *local: TensorType) -> float:
        return 3.0 * local[0].shape.size + 10.0 * local[1].shape.size


@dataclass(frozen=True)
class AddPart(_Step):
    """A sum and one more term, on the devices that the term is for.

    Attributes:
      dtype: of the sum afterwards.
    """

    dtype: str = "float32"
    linear: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        wide = "float64" if self.dtype == "float64" else "float32"
        total, term = (k.cast(x, wide) for x in slices)
        counts = self.counts(k, at)
        if counts is not None:
            term = k.where(counts, term, k.scalar(0.0, wide))
        return k.cast(k.binary("add", total, term), self.dtype)

    def flops(self, *local: TensorType) -> float:
        return float(local[0].shape.size)


@dataclass(frozen=True)
class ChoosePart(_Step):
    """The first of two operands on devices that `step` says, or (no step) on every second; else the other."""

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        counts = self.counts(k, at)
        if counts is None:
            number = k.scalar(at.shard(self.ring), "int32")
            counts = k.binary("eq", k.binary("mod", number, k.scalar(2, "int32")), k.scalar(0, "int32"))
        return k.where(counts, *slices)

    def flops(self, *local: TensorType) -> float:
        return float(local[0].shape.size)


@dataclass(frozen=True)
class LaterRows(_Step):
    """The log-sum-exp of rows as keys that are not the first ones take it: rows that see nothing, and those
    of devices that the keys are hidden from, give them no weight."""

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (lse,), wide, counts = slices, at.inputs[0].dtype, self.counts(k, at)
        seen = k.binary("gt", lse, k.scalar(NOTHING_SEEN, wide))
        return k.where(seen if counts is None else k.binary("and", seen, counts), lse, k.scalar(_DONE, wide))

    def flops(self, *local: TensorType) -> float:
        return 2.0 * local[0].shape.size


# -- lowering ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread(AnyAttention, abstract=True):
    """What need not gather its keys: attention, and its gradients but that of a bias."""

    def spread(
        self,
        low: Emitter,
        inputs: Sequence[int],
        types: Sequence[TensorType],
        form: str,
        wanted: Sequence[bool],
    ) -> Sequence[int] | None:
        """As `Op.spread`; LayoutError if the operands or the layout do not allow the form."""
        axes = low.layout.axes(self.memory.name)
        if not axes or axes != low.layout.axes(self.length.name):
            both = f"{self.length.name} and {self.memory.name}"
            raise _refused(
                self, form, f"needs {both} split over the same axes", f"split both, or leave {form} out"
            )
        if low.oracle.ways(axes) == 1:
            return None
        # All else that it needs whole is gathered as ever.
        others = [n for n in self.roles(*(_type(low, i) for i in inputs)).whole if n != self.memory.name]
        if whole := low.layout.split(others):
            inputs = [low.without(i, whole) for i in inputs]
        lies = low.layout.with_rules(dict.fromkeys(others, ()))
        if form == ALL_TO_ALL:
            return _exchanged(self, low, inputs, types, axes, lies)
        return _Ring(self, low, axes, form, lies).run(inputs, types, wanted)


def _refused(op: AnyAttention, form: str, why: str, instead: str) -> LayoutError:
    return LayoutError(f"{op.name}: {form} of {op.memory.name!r} {why}; {instead}")


def _type(low: Emitter, id: int) -> TensorType:
    return TensorType(low.values[id].shape, low.values[id].dtype)


def _exchanged(
    op: AnyAttention,
    low: Emitter,
    inputs: Sequence[int],
    types: Sequence[TensorType],
    axes: Axes,
    lies: Layout,
) -> Sequence[int]:
    sides = op.sides(*(_type(low, i) for i in inputs[:3]))
    heads = (*reversed(sides.shared.dims), *reversed(sides.group.dims))
    fits = (d for d in heads if not d.size % low.oracle.ways((*lies.axes(d.name), *axes)))
    dim = next(fits, None)
    if dim is None:
        found = ", ".join(map(str, heads)) or "none"
        ways = low.oracle.ways(axes)
        raise _refused(op, ALL_TO_ALL, f"needs heads that {ways} devices divide, found {found}", "use ring")

    taken = {op.length.name: (), op.memory.name: (), dim.name: (*lies.axes(dim.name), *axes)}

    def split(names: Sequence[str]) -> tuple[Axes, ...]:
        """The natural ones, with the axes taken from the positions to the heads."""
        return tuple(taken.get(n, lies.axes(n)) for n in names)

    given = [_type(low, i) for i in inputs]
    placed = [low.placed(i, split(t.shape.names)) for i, t in zip(inputs, given, strict=True)]
    reduced, made = op.roles(*given).reduced, []
    for t in types:
        lacking = split([n for n in reduced if n not in t.shape.names])
        made.append(
            low.new(t, split(t.shape.names), low.oracle.ordered(a for found in lacking for a in found))
        )
    low.emit(Local(tuple(placed), tuple(made), low.origin, op))
    return [_summed(low, o) for o in made]


def _summed(low: Emitter, id: int) -> int:
    pending = low.values[id].partial
    return low.joined(id, pending, "sum") if pending else id


class _Ring:
    """One attention, or its gradient, on a ring.

    Args:
      axes: that split the positions.
      lies: the layout in force, less what the operation needs whole.
    """

    def __init__(self, op: AnyAttention, low: Emitter, axes: Axes, form: str, lies: Layout) -> None:
        self.op, self.low, self.axes, self.form, self.lies = op, low, axes, form, lies
        self.count = low.oracle.ways(axes)
        self.ring = Dim(f"{op.length.name}_ring", self.count)
        self.backward = op.name == "attentiongrad"
        self._check()

    def _check(self) -> None:
        op, form = self.op, self.form
        for holds, what in ((op.rate, "dropout of its weights"), (op.window, f"a window of {op.window}")):
            if holds:
                raise _refused(op, form, f"cannot have {what}", f"leave {form} out, or use {ALL_TO_ALL}")
        n, m = op.length, op.memory
        if op.causal and n.size != m.size:
            raise _refused(
                op, form, f"and causal needs as many queries as keys, found {n} and {m}", "leave one out"
            )
        if form == ZIGZAG and not op.causal:
            raise _refused(op, form, "is for causal attention", f"use {RING}")
        if form == ZIGZAG and n.size % (2 * self.count):
            raise _refused(op, form, f"needs {n} in {2 * self.count} equal pieces", f"use {RING}")

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
        given = [_type(self.low, i) for i in inputs]
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
        out = self.low.new(_type(self.low, id), v.splits, v.partial)
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

    def round(self, keys: Sequence[int]) -> list[int]:
        """Keys and values, and what else has their positions, of the device before."""
        return [self.sent(x) if n in self.keys else x for n, x in enumerate(keys)]

    def met(self, rows: Sequence[int], keys: Sequence[int]) -> list[int]:
        """Operands: queries of some, keys of others."""
        return [y if n in self.keys else x for n, (x, y) in enumerate(zip(rows, keys, strict=True))]

    def part(self, operands: Sequence[int], first: bool = False, own: bool = False) -> list[int]:
        """What the operation makes of some queries and some keys.

        Args:
          first: no other keys of these queries come before.
          own: both are of the same positions.
        """
        shapes = [self.low.values[i].shape for i in operands[:2]]
        op = replace(
            self.op,
            length=shapes[0].dim(self.op.length.name),
            memory=shapes[1].dim(self.op.memory.name),
            causal=self.op.causal and own,
            extra_logit=self.op.extra_logit if first else None,
            partial=True,
        )
        return self.local(op, *operands)

    def chosen(self, step: int, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """Of two pieces of the operands, the earlier on devices that keys have come to without passing the
        end of the ring, and on others the later."""
        choose = ChoosePart(self.ring.name, step)
        return [x if x == y else self.local(choose, x, y)[0] for x, y in zip(one, other, strict=True)]

    def dtype(self, last: bool) -> str:
        """Of sums over keys that a device keeps: wide until the last is in."""
        own = self.low.values[self.query].dtype
        return own if last or own == "float64" else "float32"

    def join(
        self,
        one: Sequence[int],
        other: Sequence[int],
        last: bool = False,
        step: int = 0,
        before: bool = False,
    ) -> list[int]:
        op = JoinParts(self.ring.name, step, before, self.dtype(last))
        return self.local(op, *one, *other)

    def attention(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Result and log-sum-exp, each in one or two pieces."""
        rows = keys = [list(xs) for xs in zip(*parts, strict=True)]
        coming = [self.round(each) for each in keys]
        found = [self.part(own, first=True, own=True) for own in rows]
        if self.form == ZIGZAG:
            found[1] = self.join(found[1], self.part(self.met(rows[1], keys[0])))
        for step in range(1, self.count):
            keys, last = coming, step == self.count - 1
            coming = keys if last else [self.round(each) for each in keys]
            if self.form == RING:
                new = self.part(self.met(rows[0], keys[0]))
                found = [self.join(found[0], new, last, step if self.op.causal else 0)]
                continue
            found[1] = self.join(found[1], self.part(self.met(rows[1], keys[0])))
            new = self.part(self.chosen(step, *map(self.met, rows, keys)))
            found = [self.join(x, new, last, step, at == 1) for at, x in enumerate(found)]
        return [[*xs] for xs in zip(*found, strict=True)]

    def gradient(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Gradients of query, key and value, each in one or two pieces."""
        rows = keys = [list(xs) for xs in zip(*parts, strict=True)]
        coming = [self.round(each) for each in keys]
        after = [self.later(each, 0) for each in rows]
        made = [self.part(own, first=True, own=True) for own in rows]
        queries, found = [each[0] for each in made], [each[1:] for each in made]

        def earlier() -> None:
            """Of the later queries with the earlier keys."""
            new = self.part(self.met(after[1], keys[0]))
            queries[1], found[0] = self.add(queries[1], new[0]), self.added(found[0], new[1:])

        if self.form == ZIGZAG:
            earlier()
        for step in range(1, self.count):
            keys, last = coming, step == self.count - 1
            coming = keys if last else [self.round(each) for each in keys]
            found = [[self.sent(x) for x in each] for each in found]
            if self.form == RING:
                rest = self.later(rows[0], step) if self.op.causal else after[0]
                new = self.part(self.met(rest, keys[0]))
                queries, found = [self.add(queries[0], new[0], last)], [self.added(found[0], new[1:])]
                continue
            earlier()
            new = self.part(self.chosen(step, *map(self.met, after, keys)))
            queries = [self.add(x, new[0], last, step, at == 1) for at, x in enumerate(queries)]
            found = [self.added(xs, new[1:], step, at == 1) for at, xs in enumerate(found)]
        home = [[_summed(self.low, self.sent(x)) for x in each] for each in found]
        return [queries, *([*xs] for xs in zip(*home, strict=True))]

    def later(self, rows: Sequence[int], step: int) -> list[int]:
        """Rows as keys that are not the first ones take them."""
        lse = 4 + len(self.op.extras)
        if not step and not self.op.extras:
            return [*rows]
        op = LaterRows(self.ring.name, step)
        return [self.local(op, x)[0] if n == lse else x for n, x in enumerate(rows)]

    def add(self, total: int, term: int, last: bool = False, step: int = 0, before: bool = False) -> int:
        return self.local(AddPart(self.ring.name, step, before, self.dtype(last)), total, term)[0]

    def added(
        self, totals: Sequence[int], terms: Sequence[int], step: int = 0, before: bool = False
    ) -> list[int]:
        """Gradients of keys and values on their way: in their own dtype, as sums over devices are."""
        op = AddPart(self.ring.name, step, before, self.dtype(True))
        return [self.local(op, *pair)[0] for pair in zip(totals, terms, strict=True)]
