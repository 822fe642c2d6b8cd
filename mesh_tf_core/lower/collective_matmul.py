"""Pass `collective matmul`: a gather before products, or a scatter behind them, in chunks that go round beside
the products (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models", ASPLOS).

Of n devices, m = (n - 1) // 2 lie on either side of one, and for even n one is opposite. Chunks go both ways.
Rewrites, where a product has one of some dimensions, split over the axes of the message:
  (1) y = product(all_gather(x, a, d), w): device i works on its own chunk, then in turn t = 1 .. m on those of
      i - t and i + t, and last on the opposite one; beside each turn the next chunks come. What has d of y is put
      in its place, else chunks are added up. All products of one gather that wait for none of the others are
      in one turn; who else reads what is gathered finds it put together.
  (2) reduce_scatter(product(x, w), a, d): in each turn device i computes one more term of two chunks, of those
      that lie t to either side, and adds it to what others have sent of these; its own chunk comes last. A sum
      of products (of one tensor's gradients) is one: a turn has a term of each.
Two turns are one iteration of a loop where there are many: so what comes need not be copied to where it came
from (rule 1; of rule 2 that holds for one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.program import (
    AllGather,
    Instr,
    Local,
    Loop,
    Origin,
    Permute,
    Program,
    ReduceScatter,
    Value,
)
from mesh_tf_core.ir.values import Splits
from mesh_tf_core.lower.nodes import is_product, weights
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placing import carried_loop
from mesh_tf_core.lower.uses import count_uses
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.ops.chunks import ChunkAs, ChunkFirst, ChunkNumber, ChunkOf, ChunkPut
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.stages import StageNumbers, StagePart
from mesh_tf_core.tracing.graph import Graph

LOOPED = 2
"""Turns are a loop where it has at least so many iterations."""


def in_chunks(program: Program, dims: Collection[str], oracle: Oracle | None = None) -> Program:
    """Applies the rewrites of the module's text.

    Args:
      dims: a product with one of these, split over a message's axes, is beside it.
      oracle: of the program's mesh; notes what is asked of it.
    """
    if not dims:
        return program
    state = _Rewriting(program, frozenset(dims), oracle or Oracle(program.mesh, program.layout, {}, {}))
    code = state.block(program.code)
    return replace(program, values=tuple(state.values), code=tuple(code))


class _Rewriting:
    def __init__(self, program: Program, dims: frozenset[str], oracle: Oracle) -> None:
        self.values, self.dims, self.oracle = list(program.values), dims, oracle
        self.uses = count_uses(program.code, program.results.values())
        self.weights = weights(program.graph) if isinstance(program.graph, Graph) else {}

    def block(self, code: Sequence[Instr]) -> list[Instr]:
        """A block rewritten, and the loops in it."""
        out = [self._loop(instr) if isinstance(instr, Loop) else instr for instr in code]
        for instr in [i for i in out if isinstance(i, AllGather)]:
            self._gather(instr, out)
        for instr in [i for i in out if isinstance(i, ReduceScatter)]:
            self._scatter(instr, out)
        return out

    def _loop(self, loop: Loop) -> Loop:
        body = tuple(self.block(loop.body))
        return loop if body == loop.body else loop.remade(body=body)

    def beside(self, instr: Instr, axes: Axes) -> bool:
        """Whether it is a product of two operands with one of the dimensions, split over these axes."""
        if not isinstance(instr, Local) or not is_product(instr.op) or len(instr.inputs) != 2:
            return False
        found = (self.values[i] for i in (*instr.inputs, *instr.outputs))
        return any(
            name in self.dims and set(axes) <= set(split)
            for v in found
            for name, split in zip(v.shape.names, v.splits, strict=True)
        )

    def _gather(self, gather: AllGather, code: list[Instr]) -> None:
        """Rule (1), where it applies."""
        if self.values[gather.inputs[0]].tensor in self.weights:
            return  # They are gathered ahead, and once for all of a pass.
        begin = next(i for i, instr in enumerate(code) if instr is gather)
        found = _Found(self, gather)
        for instr in code[begin + 1 :]:
            found.see(instr)
        if not found.readers or (count := self.oracle.ways(gather.axes)) < 2:
            return
        kept = found.kept()
        turns = _Turns(self.values, self.oracle, gather, gather.inputs[0], count)
        turns.gathered(gather.outputs[0], found.readers, gather.outputs[0] in kept)
        before, behind = found.around(kept)
        code[begin : begin + 1 + found.seen] = [*before, *turns.code, *behind]

    def _scatter(self, scatter: ReduceScatter, code: list[Instr]) -> None:
        """Rule (2), where it applies."""
        maker = {o: instr for instr in code for o in instr.outputs}
        terms: list[tuple[Local, str]] = []

        def made(id: int, dim: str) -> bool:
            instr = maker.get(id)
            if self.uses[id] != 1 or not isinstance(instr, Local):
                return False
            terms.append((instr, dim))
            if instr.op.renames:
                old = next((old for old, new in instr.op.renames if new == dim), dim)
                return instr.op.free and made(instr.inputs[0], old)
            adds = isinstance(instr.op, AddN) or (isinstance(instr.op, Binary) and instr.op.linear)
            if adds:
                return all([made(i, dim) for i in instr.inputs])
            return self.beside(instr, scatter.axes)

        if not made(scatter.inputs[0], scatter.dim) or (count := self.oracle.ways(scatter.axes)) < 2:
            return
        turns = _Turns(self.values, self.oracle, scatter, scatter.inputs[0], count)
        turns.scattered(terms[::-1])
        gone = {id(instr) for instr, _ in terms}
        at = next(i for i, instr in enumerate(code) if instr is scatter)
        code[at : at + 1] = turns.code
        code[:] = [instr for instr in code if id(instr) not in gone]


@dataclass(frozen=True)
class _Reader:
    """A product of what is gathered.

    Attributes:
      given: its operand that this is; `dim` is what it calls the dimension, `renames` by which way.
    """

    product: Local
    given: int
    dim: str
    renames: tuple[Local, ...]


@dataclass
class _Found:
    """What stands behind a gather.

    Attributes:
      readers: the products that may have it in chunks.
      seen: how many instructions there are up to the last of these.
    """

    rewriting: _Rewriting
    gather: AllGather
    readers: list[_Reader] = field(default_factory=list)
    seen: int = 0

    def __post_init__(self) -> None:
        self.names: dict[int, tuple[str, tuple[Local, ...]]] = {
            self.gather.outputs[0]: (self.gather.dim, ())
        }
        self.later: set[int] = set()
        self.order: list[Instr] = []

    def see(self, instr: Instr) -> None:
        """One more instruction."""
        self.order.append(instr)
        known = [i for i in instr.inputs if i in self.names]
        if self.later.isdisjoint(instr.inputs) and len(known) == 1 and isinstance(instr, Local):
            dim, way = self.names[known[0]]
            if instr.op.renames and instr.op.free:
                self.names[instr.outputs[0]] = dict(instr.op.renames).get(dim, dim), (*way, instr)
                return
            same = instr.origin.phase == self.gather.origin.phase
            if same and self.rewriting.beside(instr, self.gather.axes):
                self.readers.append(_Reader(instr, known[0], dim, way))
                self.seen = len(self.order)
                self.later.update(instr.outputs)
                return
        if known or not self.later.isdisjoint(instr.inputs):
            self.later.update(instr.outputs)

    def kept(self) -> set[int]:
        """What is gathered, and its other names, as far as others than the products read them."""
        reads = Counter(r.given for r in self.readers)
        found: set[int] = set()
        for name, (_, way) in reversed(self.names.items()):
            if self.rewriting.uses[name] > reads[name]:
                found.add(name)
            elif way:
                reads[way[-1].inputs[0]] += 1
        return found

    def around(self, kept: set[int]) -> tuple[list[Instr], list[Instr]]:
        """What comes before the turns, and behind them: what waits for them."""
        gone = {id(r.product) for r in self.readers}
        gone |= {id(way[-1]) for name, (_, way) in self.names.items() if way and name not in kept}
        before: list[Instr] = []
        behind: list[Instr] = []
        for instr in self.order[: self.seen]:
            if id(instr) not in gone:
                waits = any(i in self.later or i in self.names for i in instr.inputs)
                (behind if waits else before).append(instr)
        return before, behind


@dataclass
class _Turns:
    """The turns in the place of one message.

    Attributes:
      source: what is gathered or scattered.
      count: of the devices in a group.
    """

    values: list[Value]
    oracle: Oracle
    message: AllGather | ReduceScatter
    source: int
    count: int
    code: list[Instr] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dim, self.axes = self.message.dim, self.message.axes
        v = self.values[self.source]
        at = v.shape.index(self.dim)
        gathers = isinstance(self.message, AllGather)
        self.size = v.shape.dim(self.dim).size // self.count
        self.whole: Axes = v.splits[at][: len(v.splits[at]) - len(self.axes)] if gathers else v.splits[at]
        self.sides, self.opposite = (self.count - 1) // 2, (self.count - 1) % 2
        numbers = Dim(f"{self.dim}_chunk", self.count)
        (group,) = self.local(StageNumbers(numbers, "int32"), (), [(self.axes,)])
        self.own = self.local(StagePart(numbers.name, None), (group,), [()])[0]

    # -- instructions ----------------------------------------------------------------------------------------

    @property
    def origin(self) -> Origin:
        return self.message.origin

    def local(
        self,
        op: Op,
        inputs: Sequence[int],
        splits: Sequence[Splits],
        partial: Axes = (),
        origin: Origin | None = None,
    ) -> list[int]:
        """What an operation makes of values."""
        found = op.infer(*(self.type(i) for i in inputs))
        types = found if isinstance(found, tuple) else (found,)
        outs = []
        for type, split in zip(types, splits, strict=True):
            outs.append(len(self.values))
            self.values.append(Value(len(self.values), type.shape, type.dtype, split, partial))
        self.code.append(Local(tuple(inputs), tuple(outs), origin or self.origin, op))
        return outs

    def type(self, id: int) -> TensorType:
        return TensorType(self.values[id].shape, self.values[id].dtype)

    def alike(self, op: Op, like: int, *inputs: int, origin: Origin | None = None) -> int:
        """What an operation makes, where it lies as one of the operands does."""
        v = self.values[like]
        return self.local(op, inputs, [v.splits], v.partial, origin)[0]

    def sent(self, id: int, shift: int, both: bool = True) -> int:
        """A chunk of the next device on one side."""
        v = self.values[id]
        out = len(self.values)
        self.values.append(Value(out, v.shape, v.dtype, v.splits, v.partial))
        around = Permute((id,), (out,), self.origin, self.axes, shift, True, (), Einsum.kind, both)
        self.code.append(around)
        return out

    def number(self, far: int, each: int = 0, turn: int | None = None) -> int:
        """Whose chunk it is: of the device so far away, and `each` further for every iteration so far."""
        inputs = (self.own,) if turn is None else (self.own, turn)
        op = ChunkNumber(self.count, far % self.count, each % self.count if turn is not None else 0)
        return self.local(op, inputs, [()])[0]

    def looped(
        self, count: int, state: Sequence[int], body: Callable[[int, list[int]], Sequence[int]]
    ) -> list[int]:
        """A loop of turns."""

        def inside(turn: int, enter: list[int]) -> tuple[Sequence[int], Sequence[Instr]]:
            around, self.code = self.code, []
            leave = body(turn, enter)
            found, self.code = self.code, around
            return leave, found

        dim = Dim(f"{self.dim}_turns", count)
        loop, finals = carried_loop(self.values, self.origin, dim, state, inside)
        self.code.append(loop)
        return finals

    def taken(self, id: int, number: int, dim: str) -> int:
        """The chunk of a value by its number, if it has the dimension."""
        if dim not in self.values[id].shape.names:
            return id
        return self.alike(ChunkOf(dim, self.size), id, id, number)

    def made(self, instr: Local, operands: Sequence[int], dim: str) -> int:
        """What an instruction makes of chunks of a dimension."""
        op, out = instr.op, self.values[instr.outputs[0]]
        if isinstance(op, Einsum):
            dims = (Dim(dim, self.size) if d.name == dim else d for d in op.output)
            op = replace(op, output=Shape(dims))
        return self.local(op, operands, [out.splits], out.partial, instr.origin)[0]

    def multiplied(self, reader: _Reader, chunk: int, number: int) -> int:
        """A product of a chunk; what else has the dimension is taken by its number."""
        product, given, dim = reader.product, reader.given, reader.dim
        for rename in reader.renames:
            chunk = self.alike(rename.op, chunk, chunk)
        operands = [chunk if i == given else self.taken(i, number, dim) for i in product.inputs]
        return self.made(product, operands, dim)

    # -- rule (1) --------------------------------------------------------------------------------------------

    def gathered(self, whole: int, readers: Sequence[_Reader], needed: bool) -> None:
        """The code of a gather with its products.

        Args:
          whole: what it would make; `needed`: others read that, too.
        """
        v = self.values[self.source]
        at = v.shape.index(self.dim)
        splits = tuple(self.whole if i == at else split for i, split in enumerate(v.splits))
        (chunk,) = self.local(ChunkAs(self.dim, self.size), (self.source,), [splits], v.partial)
        wanted = [(r.product.outputs[0], r.dim) for r in readers] + [(whole, self.dim)] * needed

        def meet(state: Sequence[int], chunk: int, number: int) -> list[int]:
            """One more chunk in all that is wanted."""
            found = []
            for n, (result, dim) in enumerate(wanted):
                reader = readers[n] if n < len(readers) else None
                made = chunk if reader is None else self.multiplied(reader, chunk, number)
                into = dim in self.values[result].shape.names
                if into and state:
                    made = self.alike(ChunkPut(dim), state[n], state[n], made, number)
                elif into:
                    made = self.alike(ChunkFirst(dim, self.count), made, made, number)
                elif state:
                    assert reader is not None
                    made = self.alike(Binary("add"), made, state[n], made, origin=reader.product.origin)
                found.append(made)
            return found

        left = self.sent(chunk, 1, self.sides > 0)
        right = self.sent(chunk, -1) if self.sides else -1
        state, turn = meet((), chunk, self.own), 1
        pairs = (self.sides - 1) // 2
        if pairs >= LOOPED:

            def body(number: int, ids: list[int]) -> list[int]:
                left, right, *state = ids
                for far in (1, 2):
                    more = self.sent(left, 1), self.sent(right, -1)
                    state = meet(state, left, self.number(-far, -2, number))
                    state = meet(state, right, self.number(far, 2, number))
                    left, right = more
                return [left, right, *state]

            left, right, *state = self.looped(pairs, [left, right, *state], body)
            turn += 2 * pairs
        for far in range(turn, self.sides + 1):
            last = far == self.sides
            further = self.sent(left, 1, not last) if not last or self.opposite else -1
            back = -1 if last else self.sent(right, -1)
            state = meet(state, left, self.number(-far))
            state = meet(state, right, self.number(far))
            left, right = further, back
        if self.opposite:
            state = meet(state, left, self.number(-self.sides - 1))
        self._called(dict(zip(state, (result for result, _ in wanted), strict=True)))

    def _called(self, names: dict[int, int]) -> None:
        """Gives what the code makes last the names that others know."""
        for i in range(len(self.code) - 1, -1, -1):
            instr = self.code[i]
            if not names.keys() & {*instr.outputs}:
                continue
            if isinstance(instr, Loop):
                carried = tuple(c._replace(final=names.get(c.final, c.final)) for c in instr.carried)
                self.code[i] = instr.remade(carried=carried)
            else:
                self.code[i] = replace(instr, outputs=tuple(names.get(o, o) for o in instr.outputs))

    # -- rule (2) --------------------------------------------------------------------------------------------

    def scattered(self, terms: Sequence[tuple[Local, str]]) -> None:
        """The code of a scatter with its products, and the sums of these, operands first; each with what it
        calls the dimension."""
        sides, opposite, last = self.sides, self.opposite, terms[-1][0]

        def term(number: int) -> int:
            """What this device has of a chunk."""
            found: dict[int, int] = {}
            for instr, dim in terms:
                operands = [found[i] if i in found else self.taken(i, number, dim) for i in instr.inputs]
                found[instr.outputs[0]] = self.made(instr, operands, dim)
            return found[last.outputs[0]]

        def more(come: int, number: int) -> int:
            added = term(number)
            return self.alike(Binary("add"), added, come, added, origin=last.origin)

        forth = term(self.number(sides + opposite))
        back = -1
        if opposite and sides:
            forth = more(self.sent(forth, 1, False), self.number(sides))
        if sides:
            back = term(self.number(-sides))
        far = sides - 1
        if far >= LOOPED:

            def body(turn: int, ids: list[int]) -> list[int]:
                come = self.sent(ids[0], 1), self.sent(ids[1], -1)
                return [
                    more(come[0], self.number(sides - 1, -1, turn)),
                    more(come[1], self.number(1 - sides, 1, turn)),
                ]

            forth, back = self.looped(far, [forth, back], body)
            far = 0
        for at in range(far, 0, -1):
            come = self.sent(forth, 1), self.sent(back, -1)
            forth, back = more(come[0], self.number(at)), more(come[1], self.number(-at))
        home = [self.sent(forth, 1, sides > 0)] + ([self.sent(back, -1)] if sides else [])
        own = term(self.own)
        total = self.alike(AddN(), own, own, *home, origin=last.origin)
        (out,) = self.message.outputs
        # Who else reads it is known of the tensor.
        self.values[total] = self.values[total].of(self.values[out].tensor)
        size = self.values[out].shape.dim(self.dim).size
        self.code.append(Local((total,), (out,), self.origin, ChunkAs(self.dim, size)))
