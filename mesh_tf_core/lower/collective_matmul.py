"""Pass `collective matmul`: a gather before products, or a scatter after them, in chunks that go round while
the products run (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models", ASPLOS).

Of n devices, m = (n - 1) // 2 lie on either side of one, and for even n one is opposite. Rewrites, where a
product has one of some dimensions, split over the axes of the message:
  (1) y = product(all_gather(x, a, d), w): device i works on its own chunk, then in step t = 1 .. m on those
      of i - t and i + t, and last on the opposite one. During each step the next two chunks arrive, one from
      either side. Results with d are put in their place of y; other results are added up. All products of one
      gather that do not depend on each other share one step; other readers of the gathered value get it
      reassembled.
  (2) reduce_scatter(product(x, w), a, d): chunks go both ways too, and every device adds its term to what
      comes. A term and the arriving chunk are added in the product's kernel, which therefore waits for the
      message; one direction's message runs during the other direction's product. A device's own chunk comes
      last. A sum of products (of one tensor's gradients) is one: a step has a term of each. A difference does
      not count, nor does a sum of products with other dimensions or another order of them: the arriving chunk
      is added to one of the terms.
Two steps of (1) form one iteration of a loop if there are many steps, because the compiler then need not copy
an arriving chunk to the place of the previous one (v5e:2x4, 2026-11-24). One step of (2) is enough: it has
both directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from mesh_tf_core.ir.builder import ProgramBuilder, ProgramRewriter, inside
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import AllGather, Instr, Local, Loop, Program, ReduceScatter, Value
from mesh_tf_core.lower.nodes import is_product, weights
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.uses import count_uses
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.ops.chunks import AddProduct, ChunkAs, ChunkFirst, ChunkNumber, ChunkOf, ChunkPut
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.ring_pieces import CollectiveSteps, Tree
from mesh_tf_core.ops.shape import Rename
from mesh_tf_core.ops.stages import StageNumbers, StagePart


def decompose(program: Program, dims: Collection[str], oracle: Oracle | None = None) -> Program:
    """Applies the rewrites of the module's text; the same object if nothing changes.

    Args:
      dims: a product with one of these, split over a message's axes, overlaps it.
      oracle: of the program's mesh; records the queries.
    """
    if not dims:
        return program
    state = _Rewriting(program, frozenset(dims), oracle or Oracle.of(program))
    code = tuple(state.decomposed(program.code))
    return program if code == program.code else state.rewritten(code)


class _Rewriting(ProgramRewriter):
    def __init__(self, program: Program, dims: frozenset[str], oracle: Oracle) -> None:
        super().__init__(program)
        self.dims, self.oracle = dims, oracle
        self.uses = count_uses(program.code, program.results.values())
        self.weights = weights(program.outline)

    def decomposed(self, code: Sequence[Instr]) -> list[Instr]:
        """A block rewritten, and the loops in it."""
        out = [inside(i, self.decomposed) if isinstance(i, Loop) else i for i in code]
        for gather in [i for i in out if isinstance(i, AllGather)]:
            self._gather(gather, out)
        for scatter in [i for i in out if isinstance(i, ReduceScatter)]:
            self._scatter(scatter, out)
        return out

    def overlaps(self, instr: Instr, axes: Axes) -> bool:
        """Whether it is a product of two operands with one of the dimensions, split over these axes."""
        if not isinstance(instr, Local) or not is_product(instr.op, instr.inputs):
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
        steps = Decomposed(self.values, self.oracle, gather, gather.inputs[0], count)
        steps.gathered(gather.outputs[0], found.readers, gather.outputs[0] in kept)
        before, behind = found.around(kept)
        self._replace(code, begin, begin + 1 + found.seen, [*before, *steps.code, *behind])

    def _scatter(self, scatter: ReduceScatter, code: list[Instr]) -> None:
        """Rule (2), where it applies."""
        maker = {o: instr for instr in code for o in instr.outputs}
        terms: list[tuple[Local, str]] = []
        names = self.values[scatter.inputs[0]].shape.names

        def made(id: int, dim: str) -> bool:
            instr = maker.get(id)
            called = tuple(scatter.dim if n == dim else n for n in self.values[id].shape.names)
            if self.uses[id] != 1 or called != names or not isinstance(instr, Local):
                return False
            terms.append((instr, dim))
            if instr.op.renames:
                old = next((old for old, new in instr.op.renames if new == dim), dim)
                return instr.op.free and made(instr.inputs[0], old)
            if isinstance(instr.op, AddN) or (isinstance(instr.op, Binary) and instr.op.fn == "add"):
                return all(made(i, dim) for i in instr.inputs)
            return self.overlaps(instr, scatter.axes)

        if not made(scatter.inputs[0], scatter.dim) or (count := self.oracle.ways(scatter.axes)) < 2:
            return
        steps = Decomposed(self.values, self.oracle, scatter, scatter.inputs[0], count)
        steps.scattered(terms[::-1])
        gone = {id(instr) for instr, _ in terms}
        begin = next(i for i, instr in enumerate(code) if id(instr) in gone)
        end = next(i for i, instr in enumerate(code) if instr is scatter)
        rest = [instr for instr in code[begin:end] if id(instr) not in gone]
        self._replace(code, begin, end + 1, [*rest, *steps.code])

    def _replace(self, code: list[Instr], begin: int, end: int, by: list[Instr]) -> None:
        """Puts other code in the place of some. What is gathered may be an operand of products that go in
        chunks of another gather, and then has more readers than before."""
        for instrs, sign in ((code[begin:end], -1), (by, 1)):
            for i, count in count_uses(instrs).items():
                self.uses[i] += sign * count
        code[begin:end] = by


@dataclass
class _Found:
    """What stands behind a gather.

    Attributes:
      readers: the products that may have it in chunks.
      seen: how many instructions there are up to the last of these.
    """

    rewriting: _Rewriting
    gather: AllGather
    readers: list[Reader] = field(default_factory=list)
    seen: int = 0

    def __post_init__(self) -> None:
        self.names: dict[int, tuple[str, tuple[Local, ...]]] = {self.gather.outputs[0]: (self.gather.dim, ())}
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
            if same and self.rewriting.overlaps(instr, self.gather.axes):
                self.readers.append(Reader(instr, known[0], dim, way))
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
        """What comes before the steps, and behind them: what waits for them."""
        gone = {id(r.product) for r in self.readers}
        gone |= {id(way[-1]) for name, (_, way) in self.names.items() if way and name not in kept}
        before: list[Instr] = []
        behind: list[Instr] = []
        for instr in self.order[: self.seen]:
            if id(instr) not in gone:
                waits = any(i in self.later or i in self.names for i in instr.inputs)
                (behind if waits else before).append(instr)
        return before, behind


LOOPED = 2
"""Least number of steps for which they become a loop."""


@dataclass(frozen=True)
class Reader:
    """A product of the gathered value.

    Attributes:
      given: its operand with the gathered value; `dim`: its name of the dimension, `renames`: the renames on
        the way.
    """

    product: Local
    given: int
    dim: str
    renames: tuple[Local, ...]


class Decomposed(ProgramBuilder):
    """The steps in the place of one message.

    Args:
      values: of the program.
      source: the value that is gathered or scattered.
      count: of the devices in a group.
    """

    def __init__(
        self, values: list[Value], oracle: Oracle, message: AllGather | ReduceScatter, source: int, count: int
    ) -> None:
        super().__init__(values, message.origin)
        self.oracle, self.message, self.source, self.count = oracle, message, source, count
        self.dim, self.axes = message.dim, message.axes
        v = values[source]
        at = v.shape.index(self.dim)
        gathers = isinstance(message, AllGather)
        self.size = v.shape.dim(self.dim).size // count
        self.whole: Axes = v.splits[at][: len(v.splits[at]) - len(self.axes)] if gathers else v.splits[at]
        self.sides, self.opposite = (count - 1) // 2, (count - 1) % 2
        self.steps = CollectiveSteps(self, self.axes, self.dim)
        numbers = Dim(f"{self.dim}_chunk", count)
        group = self.applied(StageNumbers(numbers, "int32"), splits=(self.axes,))
        self.own = self.applied(StagePart(numbers.name, None), group, splits=())

    # -- instructions ----------------------------------------------------------------------------------------

    def next_to(self, id: int, shift: int, both: bool = True) -> int:
        """A chunk of the next device on one side."""
        return self.steps.start(id, shift, both)

    def number(self, far: int, each: int = 0, turn: int | None = None) -> int:
        """The number of a chunk: that of the device at this distance, and `each` further per iteration so
        far."""
        inputs = (self.own,) if turn is None else (self.own, turn)
        op = ChunkNumber(self.count, far % self.count, each % self.count if turn is not None else 0)
        return self.applied(op, *inputs)

    def taken(self, id: int, number: int, dim: str) -> int:
        """The chunk of a value by its number, if it has the dimension."""
        if dim not in self.values[id].shape.names:
            return id
        return self.applied(ChunkOf(dim, self.size), id, number)

    def made(self, instr: Local, operands: Sequence[int], dim: str, total: int = -1) -> int:
        """Applies an instruction to chunks of a dimension; a product is added to a total."""
        op, out = instr.op, self.values[instr.outputs[0]]
        if isinstance(op, Einsum):
            dims = (Dim(dim, self.size) if d.name == dim else d for d in op.output)
            op = replace(op, output=Shape(dims))
            if total >= 0:
                op, operands = AddProduct(op), [*operands, total]
        with self.at(instr.origin):
            return self.applied(op, *operands, splits=out.splits, partial=out.partial)

    def multiplied(self, reader: Reader, chunk: int, number: int, total: int) -> int:
        """A product of a chunk, added to a total, if there is one; the chunk's number selects the part of
        other operands with the dimension."""
        product, given, dim = reader.product, reader.given, reader.dim
        for rename in reader.renames:
            chunk = self.applied(rename.op, chunk)
        operands = [chunk if i == given else self.taken(i, number, dim) for i in product.inputs]
        return self.made(product, operands, dim, total)

    # -- rule (1) --------------------------------------------------------------------------------------------

    def gathered(self, whole: int, readers: Sequence[Reader], needed: bool) -> None:
        """The code of a gather with its products.

        Args:
          whole: the gathered value; `needed`: other instructions read it too.
        """
        v = self.values[self.source]
        at = v.shape.index(self.dim)
        splits = tuple(self.whole if i == at else split for i, split in enumerate(v.splits))
        chunk = self.applied(ChunkAs(self.dim, self.size), self.source, splits=splits, partial=v.partial)
        wanted = [(r.product.outputs[0], r.dim) for r in readers] + [(whole, self.dim)] * needed

        def meet(state: Sequence[int], chunk: int, number: int) -> list[int]:
            """One more chunk in all that is wanted."""
            found = []
            for n, (result, dim) in enumerate(wanted):
                reader = readers[n] if n < len(readers) else None
                into = dim in self.values[result].shape.names
                total = state[n] if state and not into else -1
                made = chunk if reader is None else self.multiplied(reader, chunk, number, total)
                if into and state:
                    made = self.applied(ChunkPut(dim, reader is not None), state[n], made, number)
                elif into:
                    made = self.applied(ChunkFirst(dim, self.count), made, number)
                found.append(made)
            return found

        def step(far: int, number: int | None, state: Tree) -> Tree:
            """The chunks of the devices `far` away on either side; in a loop, two further every time."""
            left, right, *found = state
            last = far == self.sides
            further = self.next_to(left, 1, not last) if not last or self.opposite else -1
            back = -1 if last else self.next_to(right, -1)
            found = meet(found, left, self.number(-far, -2, number))
            found = meet(found, right, self.number(far, 2, number))
            return [further, back, *found]

        left = self.next_to(chunk, 1, self.sides > 0)
        right = self.next_to(chunk, -1) if self.sides else -1
        state: Tree = [left, right, *meet((), chunk, self.own)]
        self.steps.done()
        pairs = (self.sides - 1) // 2
        looped = 2 * pairs if pairs >= LOOPED else 0
        if looped:
            state = self.steps.run(state, (1, 2), step, pairs)
        left, _, *state = self.steps.run(state, range(looped + 1, self.sides + 1), step)
        if self.opposite:
            state = meet(state, left, self.number(-self.sides - 1))
        self._called(dict(zip(state, (result for result, _ in wanted), strict=True)))

    def _called(self, names: dict[int, int]) -> None:
        """Gives what the code makes last, which is not a loop, the names that others know."""
        for i, instr in enumerate(self.code):
            if names.keys() & {*instr.outputs}:
                self.code[i] = replace(instr, outputs=tuple(names.get(o, o) for o in instr.outputs))

    # -- rule (2) --------------------------------------------------------------------------------------------

    def scattered(self, terms: Sequence[tuple[Local, str]]) -> None:
        """The code of a scatter with its products, and their sums, operands first; each with its name of the
        dimension."""
        sides, opposite, last = self.sides, self.opposite, terms[-1][0]

        def term(number: int, come: int = -1) -> int:
            """What this device has of a chunk, with what came of it."""
            found: dict[int, int] = {}
            for instr, dim in terms:
                if come >= 0 and dim != self.dim:
                    come = self.applied(Rename(((self.dim, dim),)), come)
                operands = [found[i] if i in found else self.taken(i, number, dim) for i in instr.inputs]
                found[instr.outputs[0]] = self.made(instr, operands, dim, come)
                come = -1  # One term has it.
            return found[last.outputs[0]]

        def step(far: int, number: int | None, state: Tree) -> Tree:
            """A message one way beside a term of the other way's chunk, and the other way round."""
            forth, come = state
            back, on = (
                self.number(far - sides, 1, number),
                self.number(sides + opposite - 1 - far, -1, number),
            )
            gone = self.next_to(forth, 1, False)
            made = term(back, come)
            self.steps.done()
            come = self.next_to(made, -1, False)
            return [term(on, gone), come]

        state: Tree = [term(self.number(sides + opposite)), -1]
        turns = sides - (not opposite)
        state = self.steps.run(state, range(min(turns, 1)), step)
        if turns - 1 >= LOOPED:
            state = self.steps.run(state, (1,), step, turns - 1)
        else:
            state = self.steps.run(state, range(1, turns), step)
        forth, come = state
        home = [self.next_to(forth, 1, False)]
        if opposite:
            home += [come] if sides else []
        elif sides:
            made = term(self.number(-1), come)
            self.steps.done()
            home.append(self.next_to(made, -1, False))
        own = term(self.own)
        self.steps.done()
        with self.at(last.origin):
            total = self.applied(AddN(), own, *home)
        (out,) = self.message.outputs
        # Who else reads it is known of the tensor.
        self.values[total] = self.values[total].of(self.values[out].tensor)
        size = self.values[out].shape.dim(self.dim).size
        self.emit(Local((total,), (out,), self.origin, ChunkAs(self.dim, size)))
