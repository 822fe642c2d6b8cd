"""A program under construction, or one that a pass rewrites: values, and the code of the block that is being
written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.instructions import AllReduce, Done, Local, Permute
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.op import Op, inferred
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.tensor import Inside, having
from mesh_tf_core.ir.values import Carry, Instr, Loop, Origin, Splits, Value


class ProgramBuilder:
    """Makes values and appends the instructions that compute them.

    Attributes:
      values: of the whole program; several builders of one program share the list.
      code: of the block under construction.
      origin: origin of the code that is appended next.
    """

    def __init__(self, values: list[Value] | None = None, origin: Origin | None = None) -> None:
        self.values = [] if values is None else values
        self.code: list[Instr] = []
        self.origin = origin or Origin(-1, "", Phase.FORWARD)

    def new(
        self, type: TensorType, splits: Splits, partial: Axes = (), tensor: int = -1, host: bool = False
    ) -> int:
        """A value, which an instruction must compute."""
        values = self.values
        id = len(values)
        values.append(Value(id, type.shape, type.dtype, splits, partial, tensor, host))
        return id

    def like(self, value: Value, splits: Splits, partial: Axes = ()) -> int:
        """A new value of the same type."""
        id = len(self.values)
        self.values.append(Value(id, value.shape, value.dtype, splits, partial))
        return id

    def type_of(self, id: int) -> TensorType:
        """The global type of a value."""
        v = self.values[id]
        return TensorType(v.shape, v.dtype)

    def emit(self, instr: Instr) -> None:
        """Appends an instruction."""
        self.code.append(instr)

    def local(
        self,
        op: Op,
        inputs: Sequence[int],
        types: Sequence[TensorType],
        splits: Sequence[Splits],
        partials: Iterable[Axes] = (),
    ) -> list[int]:
        """New values that every device computes from its pieces of the inputs.

        Args:
          partials: axes over which each result is pending; without them, none is.
        """
        pending = partials or ((),) * len(types)
        outs = [self.new(t, s, p) for t, s, p in zip(types, splits, pending, strict=True)]
        self.emit(Local(tuple(inputs), tuple(outs), self.origin, op))
        return outs

    def applied(self, op: Op, *inputs: int, splits: Splits | None = None, partial: Axes = ()) -> int:
        """The one result of a local operation, of the type that it infers.

        Args:
          splits, partial: of the result; without `splits`, both are those of the first input.
        """
        if splits is None:
            splits, partial = self.values[inputs[0]].splits, self.values[inputs[0]].partial
        types = inferred(op, op.infer(*map(self.type_of, inputs)))
        return self.local(op, inputs, types, [splits], [partial])[0]

    def sent(
        self,
        id: int,
        axes: Axes,
        shift: int = 1,
        wrap: bool = True,
        pairs: tuple[tuple[int, int], ...] = (),
        both_ways: bool = False,
        rule: str = "",
    ) -> int:
        """The piece that another device of the group sends (see `Permute`)."""
        v = self.values[id]
        out = self.like(v, v.splits, v.partial)
        self.emit(Permute((id,), (out,), self.origin, axes, shift, wrap, pairs, both_ways, rule=rule))
        return out

    def done(self, ids: Sequence[int]) -> None:
        """Waits for pieces that were sent by a rule."""
        self.emit(Done(tuple(ids), (), self.origin, Permute.name))

    def reduced(self, id: int, axes: Axes, combine: str = "sum") -> int:
        """The value with its pieces on all devices of the groups combined."""
        v = self.values[id]
        out = self.like(v, v.splits)
        self.emit(AllReduce((id,), (out,), self.origin, axes, combine))
        return out

    def at(self, origin: Origin) -> Inside:
        """Instructions that are appended inside have this origin."""
        return having(self, origin=origin)

    @contextmanager
    def block(self) -> Iterator[list[Instr]]:
        """Code that is appended inside goes to the returned list."""
        with having(self, code=[]):
            yield self.code

    def loop(
        self, dim: Dim, state: Sequence[int], body: Callable[[int, list[int]], Sequence[int]]
    ) -> list[int]:
        """A loop that hands a state on; the state after the last iteration. Pending sums stay pending.

        Args:
          dim: an iteration for each element.
          body: (number of the iteration, state) -> the state that it leaves.
        """
        number = self.new(TensorType(Shape(()), "int32"), ())
        enter = [self._same(i) for i in state]
        with self.block() as code:
            leave = body(number, enter)
        final = [self._same(i) for i in state]
        carried = tuple(Carry(*c) for c in zip(state, enter, leave, final, strict=True))
        made = Loop((), (), self.origin, dim, False, number, carried, (), (), (), tuple(code))
        self.emit(made.closed())
        return final

    def _same(self, id: int) -> int:
        v = self.values[id]
        return self.like(v, v.splits, v.partial)


class MeshContext(Protocol):
    """The mesh as an operation sees it while it is lowered."""

    def ways(self, axes: Axes) -> int:
        """Number of devices in a group over some axes."""

    def ordered(self, axes: Iterable[str]) -> Axes:
        """Axes in the order of the mesh."""


class Emitter(ProgramBuilder):
    """The lowering as an operation with its own `lower` sees it: a builder that also places values.

    Attributes:
      layout: in force.
      oracle: the mesh's sizes and order of axes.
    """

    layout: Layout
    oracle: MeshContext

    def natural(self, shape: Shape) -> Splits:
        """The placement that the layout gives a shape; LayoutError if it is not legal."""
        raise NotImplementedError

    def check_disjoint(self, op: Op, names: Iterable[str]) -> None:
        """LayoutError if two of an operation's dimensions are split over the same axis."""
        raise NotImplementedError

    def placed(self, id: int, splits: Splits) -> int:
        """The value with other splits."""
        raise NotImplementedError

    def parted(self, id: int, dim: str) -> Splits:
        """The splits of a value, with another dimension than `dim` split over all axes that split none."""
        raise NotImplementedError

    def without(self, id: int, whole: Iterable[str]) -> int:
        """The value with the dimensions `whole` gathered."""
        raise NotImplementedError

    def joined(self, id: int, axes: Axes, combine: str) -> int:
        """The value all-reduced."""
        raise NotImplementedError


class ProgramRewriter(ProgramBuilder):
    """Adds values to a program and replaces its code.

    Ids of the program stay the same; new values follow them. `dead` and `compact` remove unused values.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(list(program.values))
        self.program = program

    def rewritten(self, code: Sequence[Instr], **more: Any) -> Program:
        """The program with other code and the values made so far.

        Args:
          more: other fields of it.
        """
        return replace(self.program, values=tuple(self.values), code=tuple(code), **more)

    def otherwise(
        self, id: int, splits: Splits | None = None, partial: Axes = (), dtype: str | None = None
    ) -> int:
        """A new value of the same tensor of the graph with other splits, pending sums or another dtype."""
        v = self.values[id]
        type = TensorType(v.shape, dtype or v.dtype)
        return self.new(type, v.splits if splits is None else splits, partial, v.tensor)


def inside(loop: Loop, block: Callable[[Sequence[Instr]], Sequence[Instr]]) -> Loop:
    """A loop with a rewritten body; the same object if nothing changed."""
    body = tuple(block(loop.body))
    return loop if body == loop.body else loop.remade(body=body)


def take_out(instr: Instr, code: list[Instr]) -> None:
    """Takes an instruction, mostly one of the last, out of the code."""
    for at in range(len(code) - 1, -1, -1):
        if code[at] is instr:
            del code[at]
            return
    raise AssertionError(f"instruction {instr} is not in this block")
