"""Values, their pieces and their origins: the operands of instructions; and the loop, an instruction with a
body, and the values that cross its border."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import TensorType, itemsize
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase

Splits = tuple[Axes, ...]
"""For every dimension of a value, the mesh axes that it is split over."""


@lru_cache(maxsize=1 << 16)
def local_type(shape: Shape, dtype: str, splits: tuple[Axes, ...], mesh: Mesh) -> TensorType:
    """Type of the piece on one device of a value."""
    dims = [d.part(mesh.group_size(axes)) if axes else d for d, axes in zip(shape, splits, strict=True)]
    return TensorType(Shape(dims), dtype)


@lru_cache(maxsize=1 << 16)
def _ways(splits: tuple[Axes, ...], mesh: Mesh) -> int:
    return math.prod(mesh.size(a) for axes in splits for a in axes)


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a program, one piece of it on every device.

    Attributes:
      shape: the global shape.
      splits: for every dimension, the mesh axes it is split over.
      partial: axes over which pieces must still be added up.
      tensor: the graph's tensor that this is, -1 for values that lowering made.
      host: the pieces lie in the memory of the devices' hosts.
    """

    id: int
    shape: Shape
    dtype: str
    splits: tuple[Axes, ...]
    partial: Axes = ()
    tensor: int = -1
    host: bool = False

    def local(self, mesh: Mesh) -> TensorType:
        """Type of the piece on one device."""
        return local_type(self.shape, self.dtype, self.splits, mesh)

    def local_bytes(self, mesh: Mesh) -> int:
        if self.shape.sparse is not None:
            return self.local(mesh).bytes
        return self.shape.size // _ways(self.splits, mesh) * itemsize(self.dtype)

    def begin(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Index of the first element of a device's piece, per dimension."""
        sizes = self.local(mesh).shape.sizes
        return tuple(mesh.group_index(rank, axes) * n for axes, n in zip(self.splits, sizes, strict=True))

    def of(self, tensor: int) -> Value:
        """The same as a tensor of the graph."""
        if self.tensor == tensor:
            return self
        return Value(self.id, self.shape, self.dtype, self.splits, self.partial, tensor, self.host)

    def split_of(self, name: str) -> Axes:
        return self.splits[self.shape.index(name)]

    def __str__(self) -> str:
        dims = " ".join(
            f"{d}" + (f"/{'+'.join(axes)}" if axes else "")
            for d, axes in zip(self.shape, self.splits, strict=True)
        )
        partial = f" partial({'+'.join(self.partial)})" if self.partial else ""
        return f"{self.dtype}[{dims}]{partial}{' on host' if self.host else ''}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an instruction: graph node, the model's scope, phase."""

    node: int
    scope: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction: value ids in, value ids out."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    origin: Origin

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def parameters(self) -> str:
        """The text in brackets after its name."""
        return ""

    def text(self) -> str:
        """Name and parameters."""
        return f"{self.name}({self.parameters()})" if self.parameters() else self.name


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
    """A value of the body, and its result outside the loop: a stack or a sum."""

    inner: int
    outer: int


def every(code: Iterable[Instr]) -> Iterator[Instr]:
    """Every instruction of some code once, loops before their bodies."""
    for instr in code:
        yield instr
        if isinstance(instr, Loop):
            yield from every(instr.body)


@dataclass(frozen=True, slots=True)
class Loop(Instr):
    """Runs `body` once per element of `dim`, from the last if `reverse`. The body may read any earlier value.

    Attributes:
      index: body value, the number of the iteration's element (int32 scalar).
      carried: the state.
      sliced: stacks of which every iteration reads its part.
      stacked: stacks to which every iteration contributes a part.
      summed: values that are added up over the iterations.
      runs: bool scalar, one of the carried or sliced body values or from outside: whether an iteration runs.
        One that does not run passes its carries on, stacks zeros and adds nothing; every device decides the
        same.
      branch: of a choice: the share of the times in which it runs, as a price counts it.
      first: int32 scalar from outside: the element of stacks that are longer than the loop at which
        iterations begin; other elements of their results are zero.
      offset: the first element, of a loop over a part of its dimension; its stacks have this part alone, or
        with `first` are as long as the whole, and this part is as far behind that.
      undecided: in a part that is lowered alone, without the value that decides whether an iteration runs.
      `inputs` and `outputs` list all values that cross the border, in that order; `inputs` ends with the
      values of outside that the body reads directly (`closed`).
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
    undecided: bool = False
    offset: int | None = None

    @property
    def stops(self) -> bool:
        """True if an iteration may not run."""
        return self.undecided or self.runs is not None

    def text(self) -> str:
        condition = "" if self.runs is None else f", {'if' if self.branch else 'while'} %{self.runs}"
        condition += "" if self.first is None else f", from %{self.first}"
        condition += "" if self.offset is None else f", from {self.offset}"
        return f"loop({self.dim}{', reverse' if self.reverse else ''}{condition})"

    @property
    def times(self) -> float:
        """The number of times that the program's cost counts the body: for a branch the number of times it is
        taken, for a loop that may stop early its full length."""
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
        """Body values that an iteration returns: the state, stacked values, summed values."""
        return *(c.leave for c in self.carried), *(r.inner for r in self.results)

    @property
    def outside(self) -> tuple[int, ...]:
        """Values of outside that the body reads directly, and not by parts."""
        return self.inputs[len(self.carried) + len(self.sliced) :]

    def remade(self, **parts: Any) -> Loop:
        """The loop with some of its parts replaced."""
        return replace(self, **parts).closed()

    def closed(self) -> Loop:
        """The same with the `inputs` and `outputs` that follow from its parts."""
        inside = {self.index, *self.entering}
        read = dict.fromkeys(i for i in (self.runs, self.first) if i is not None and i not in inside)
        for instr in self.body:
            for i in instr.inputs:
                if i not in inside:
                    read[i] = None
            inside.update(instr.outputs)
        read.update((i, None) for i in self.leaving if i not in inside)
        inputs = (*(c.init for c in self.carried), *(s.outer for s in self.sliced), *read)
        outputs = (*(c.final for c in self.carried), *(r.outer for r in self.results))
        return replace(self, inputs=inputs, outputs=outputs)
