"""The steps that replace one gather or scatter (see `collective_matmul`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mesh_tf_core.ir.builder import ProgramBuilder
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import AllGather, Local, ReduceScatter, Value
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.chunks import AddProduct, ChunkAs, ChunkFirst, ChunkNumber, ChunkOf, ChunkPut
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.ring_pieces import CollectiveSteps, Tree
from mesh_tf_core.ops.shape import Rename
from mesh_tf_core.ops.stages import StageNumbers, StagePart

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
                    put = ChunkPut(dim, reader is not None)
                    made = self.applied(put, state[n], made, number)
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
