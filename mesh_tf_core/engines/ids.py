"""Numbers of a batch that name elements of a dimension: class labels, tokens, rows of a table.

A number beyond the dimension would train on without a word: a look-up gives zeros, a cross-entropy a loss
that is too low. Which inputs are such numbers is read off the program. A value is followed from an input
through operations that move elements, and through element-wise operations on this input and constants, up to
an operation with labels (`Op.labels`), or up to a one-hot over a trained dimension: an element-wise
operation that marks, along a further dimension, only the element with that number. Along the way it is a
function f of one number. A number v of the input is therefore wrong if f(v) indexes no element (negative
numbers are allowed in look-ups and one-hots), unless the model itself may exclude it, in one of two ways:

  compared   it compares the input (`labels != -1`, `labels < classes`), and fewer than half of the numbers
             that name elements have the answer of v. Comparisons that are only inputs of f do not count. A
             factor of the look-up's results that is computed from the input (`minimum(labels + 1, 1)`)
             compares it too: with the number that makes the factor 0.
  weighted   the looked-up value, or a result of it, is multiplied by, or selected with, another array of the
             batch (a mask), or an element of a table that is not trained, which may exclude v. The mask is
             not compared with the numbers, so every v is allowed.

Each step checks the least and the greatest number of every such input, and the next ones if these are
excluded: two passes over integers. A wrong number between excluded ones may be missed; every refused number
is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import INTEGERS, TensorType
from mesh_tf_core.ir.instructions import AllGather, AllToAll, Permute, Slice, Transfer
from mesh_tf_core.ir.kernel import At
from mesh_tf_core.ir.program import Input, Instr, Local, Loop, Program, ReadVariable
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel

_SAMPLE = 1024
"""How many of a dimension's elements the answers of comparisons are looked at for."""
_ROUNDS = 4
"""How many numbers that are set apart are passed over at each end."""
_WEIGHING = ("elementwise", "matmul")
"""Kinds of operations that multiply or choose: a product may be a contraction with the mask."""
_MOVES = (AllGather, AllToAll, Permute, Slice, Transfer)

Function = Callable[[Any], Any]
"""Numbers of an input -> their values after the operations so far."""


@dataclass(frozen=True)
class _Of:
    """A value of the program whose elements are a function of an input's; of no input, a constant."""

    feed: str
    made: Function


@dataclass(frozen=True)
class _Use:
    """An operation that looks numbers up.

    Attributes:
      padding: negative numbers stand for no element, as the operation defines.
      apart: comparisons of the input.
      weighted: something else of the batch may leave out what was looked up.
    """

    dim: Dim
    made: Function
    padding: bool
    apart: Sequence[Function]
    weighted: bool

    def wrong(self, numbers: Any) -> Any:
        """Which of some numbers name no element, bool."""
        found = np.asarray(self.made(numbers))
        return (found >= self.dim.size) | ((found < 0) & (not self.padding))

    def is_set_apart(self, number: Any) -> bool:
        """Whether the model may leave a wrong number out."""
        if self.weighted:
            return True
        valid = np.unique(np.linspace(0, self.dim.size - 1, _SAMPLE).astype(number.dtype))
        valid = valid[~self.wrong(valid)]
        return any(2 * np.sum(g(valid) == g(number[None])) < len(valid) for g in self.apart)


@dataclass(frozen=True)
class Ids:
    """The inputs of a program with indices, and the dimensions that they index."""

    uses: Mapping[str, Sequence[_Use]]

    def check(self, name: str, array: Any) -> None:
        """UserError, naming the input, the number and the dimension, for a number that names no element."""
        uses = self.uses.get(name)
        if not uses or not array.size:
            return
        for end, beyond in ((np.min, np.greater), (np.max, np.less)):
            rest = array
            for _ in range(_ROUNDS):
                number = end(rest)
                wrong = [use for use in uses if use.wrong(number[None])[0]]
                for use in wrong:
                    if not use.is_set_apart(number):
                        n = use.dim.size
                        raise UserError(
                            f"input {name!r} contains the id {number}, but the ids of dimension "
                            f"{use.dim.name!r} must be from 0 to {n - 1:,}; correct the data, or mask "
                            "such ids in the model, e.g. with not_equal(labels, -1)"
                        )
                rest = rest[beyond(rest, number)] if wrong else rest[:0]
                if not rest.size:
                    break


def ids_of(program: Program) -> Ids:
    """The inputs of a program that name elements."""
    return _IdReading(program).ids()


class _IdReading:
    """Follows values through the instructions of a program.

    Attributes:
      of: value -> what it is of one input, where that is known.
      read_off: values that are looked up in tables, or made of these.
      counts: value -> the dimension along which it is 0, 1, ...
      sources: value -> the inputs that it depends on; "" stands for variables that are trained.
      readers: value -> what is made of it, with what makes it: None for the border of a loop.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.k = program, NumpyKernel()
        self.of: dict[int, _Of] = {}
        self.parents: dict[int, list[int]] = defaultdict(list)
        self.sources: dict[int, frozenset[str]] = defaultdict(frozenset)
        self.readers: dict[int, list[tuple[int, Local | None]]] = defaultdict(list)
        self.read_off: set[int] = set()
        self.counts: dict[int, Dim] = {}
        self.looked_up: list[tuple[Local, int, Dim, bool]] = []
        self.trained = {
            n for s in program.variables.values() if s.variable.trainable for n in s.variable.shape.names
        }
        self._code(program.code)

    def ids(self) -> Ids:
        looked_up = [x for x in self.looked_up if self.of[x[1]].feed]
        cone = _reached((id for _, id, _, _ in looked_up), self.parents)  # and all that they are functions of
        apart: dict[str, list[Function]] = defaultdict(list)
        for id, found in self.of.items():
            own = found.feed and self.program.values[id].dtype == "bool"
            if own and (id not in cone or any(y not in cone for y, _ in self.readers[id])):
                apart[found.feed].append(found.made)
        uses: dict[str, list[_Use]] = defaultdict(list)
        forward = self._forward()
        for instr, id, dim, padding in looked_up:
            feed, made = self.of[id].feed, self.of[id].made
            met = self._met(instr, forward)
            zeros = [_is_zero(self.of[x].made) for x in met if x in self.of and self.of[x].feed == feed]
            weighted = any(self._weighs(x, id, feed) for x in met)
            uses[feed].append(_Use(dim, made, padding, [*apart[feed], *zeros], weighted))
        return Ids(uses)

    # -- reading -------------------------------------------------------------------------------------------

    def _code(self, code: Iterable[Instr]) -> None:
        for instr in code:
            if isinstance(instr, Loop):
                self._loop(instr)
                continue
            for y in instr.outputs:
                self.sources[y] = frozenset[str]().union(*(self.sources[x] for x in instr.inputs))
                for x in instr.inputs:
                    self.readers[x].append((y, instr if isinstance(instr, Local) else None))
            self.read_off.update(instr.outputs if self.read_off.intersection(instr.inputs) else ())
            if isinstance(instr, Input):
                (y,) = instr.outputs
                self.sources[y] = frozenset((instr.feed,))
                if self.program.values[y].dtype != "bool":  # fractions may be cast to numbers of elements
                    self.of[y] = _Of(instr.feed, lambda numbers: numbers)
            elif isinstance(instr, ReadVariable):
                trained = self.program.variables[instr.variable].variable.trainable
                self.sources[instr.outputs[0]] = frozenset(("",) * trained)
            elif isinstance(instr, Local):
                self._local(instr)
            elif isinstance(instr, _MOVES) and len(instr.inputs) == 1:
                self._same(instr.inputs[0], instr.outputs[0])

    def _loop(self, loop: Loop) -> None:
        ends = [(c.init, c.enter) for c in loop.carried] + [(s.outer, s.inner) for s in loop.sliced]
        for x, y in ends:
            self.sources[y] = self.sources[x]
            self.read_off.update({y} if x in self.read_off else ())
            self.readers[x].append((y, None))
        for outer, inner in loop.sliced:
            self._same(outer, inner)
        self._code(loop.body)
        left = [(c.leave, c.final) for c in loop.carried] + [(r.inner, r.outer) for r in loop.results]
        for x, y in left:
            self.sources[y] = self.sources[x]
            self.read_off.update({y} if x in self.read_off else ())
            self.readers[x].append((y, None))
        for inner, outer in loop.stacked:
            self._same(inner, outer)
        for c in loop.carried:
            self.readers[c.leave].append((c.enter, None))

    def _same(self, x: int, y: int) -> None:
        """y has elements of x."""
        if x in self.of:
            self.of[y] = self.of[x]
            self.parents[y].append(x)

    def _local(self, instr: Local) -> None:
        types = [self._type(x) for x in instr.inputs]
        label = instr.op.labels(*types)
        if label is not None and instr.inputs[label[0]] in self.of:
            self.looked_up.append((instr, instr.inputs[label[0]], *label[1:]))
        if label is not None:
            self.read_off.update(instr.outputs)
        if len(instr.outputs) != 1:
            return
        (y,) = instr.outputs
        if (dim := self._counted(instr)) is not None:
            self.counts[y] = dim
            return
        if (marked := self._marked(instr)) is not None:
            self.looked_up.append((instr, *marked, True))
            return
        made_of = [self.of.get(x) for x in instr.inputs]
        feeds = {f.feed for f in made_of if f is not None} - {""}
        if instr.op.kind == "data" and instr.inputs:
            known = [x for x, f in zip(instr.inputs, made_of, strict=True) if f is not None and f.feed]
            if len(known) == 1 or (len(instr.inputs) == 1 and made_of[0] is not None):
                self._same((known or list(instr.inputs))[0], y)
        elif len(feeds) <= 1 and all(f is not None for f in made_of) and self._is_by_element(instr):
            known_of = [f for f in made_of if f is not None]
            self.of[y] = _Of("".join(feeds), self._function(instr, known_of))
            self.parents[y] += instr.inputs

    def _counted(self, instr: Local) -> Dim | None:
        """The one dimension of a result that is 0, 1, ... along it: made of nothing, or moved or cast."""
        dims = self._type(instr.outputs[0]).shape.dims
        if len(dims) != 1 or len(instr.inputs) > 1:
            return None
        if instr.inputs:
            keeps = instr.op.converts or instr.op.kind == "data"
            known = self.counts.get(instr.inputs[0])
            return dims[0] if keeps and known is not None and known.size == dims[0].size else None
        if instr.op.kind != "data" or self._type(instr.outputs[0]).dtype == "bool":
            return None
        found = instr.op.kernel(self.k, At((), (self._type(instr.outputs[0]),), frozenset(), lambda name: 0))
        return dims[0] if np.array_equal(found, np.arange(dims[0].size)) else None

    def _marked(self, instr: Local) -> tuple[int, Dim] | None:
        """The numbers whose elements an operation marks, and their dimension, if that is what it does."""
        ids = [x for x in instr.inputs if x in self.of and self.of[x].feed]
        others = [x for x in instr.inputs if x not in ids]
        out = self._type(instr.outputs[0])
        if instr.op.kind != "elementwise" or len(ids) != 1 or any(x not in self.counts for x in others):
            return None
        more = [d for d in out.shape if d not in self._type(ids[0]).shape.dims]
        if len(more) != 1 or more[0].name not in self.trained:
            return None
        numbers = np.unique(np.linspace(0, more[0].size - 1, 8).astype(np_dtype(self._type(ids[0]).dtype)))
        given = [numbers if x == ids[0] else np.arange(more[0].size) for x in instr.inputs]
        own = Dim("numbers", len(numbers))
        types = [Shape([own if x == ids[0] else more[0]]) for x in instr.inputs]
        at = At(
            tuple(TensorType(s, self._type(x).dtype) for s, x in zip(types, instr.inputs, strict=True)),
            (TensorType(Shape([own, more[0]]), out.dtype),),
            frozenset(),
            lambda name: 0,
        )
        marks = np.asarray(instr.op.kernel(self.k, at, *given)) != 0
        alone = np.array_equal(marks, numbers[:, None] == np.arange(more[0].size))
        return (ids[0], more[0]) if alone else None

    def _type(self, id: int) -> TensorType:
        value = self.program.values[id]
        return TensorType(value.shape, value.dtype)

    def _is_by_element(self, instr: Local) -> bool:
        """Whether each element of the result is of the same elements of the operands; a scalar of nothing is
        a constant."""
        shape = self._type(instr.outputs[0]).shape
        if not instr.inputs:
            return not len(shape)
        names = {n for x in instr.inputs for n in self._type(x).shape.names}
        return instr.op.kind == "elementwise" and names == set(shape.names)

    def _function(self, instr: Local, made_of: Sequence[_Of]) -> Function:
        """What an operation makes of numbers, by its own kernel."""
        out = self._type(instr.outputs[0]).dtype
        dtypes = [self._type(x).dtype for x in instr.inputs]

        def made(numbers: Any) -> Any:
            shape = Shape([Dim("numbers", len(numbers))])
            at = At(
                tuple(TensorType(shape, dtype) for dtype in dtypes),
                (TensorType(shape, out),),
                frozenset(),
                lambda name: 0,
            )
            given = (np.broadcast_to(f.made(numbers), shape.sizes) for f in made_of)
            slices = [x.astype(np_dtype(dtype)) for x, dtype in zip(given, dtypes, strict=True)]
            with np.errstate(all="ignore"):
                return instr.op.kernel(self.k, at, *slices)

        return made

    # -- what is set apart ---------------------------------------------------------------------------------

    def _forward(self) -> set[int]:
        """Values that a result is made of: no gradients, which are products with the batch anyhow."""
        parents: dict[int, list[int]] = defaultdict(list)
        for x, read in self.readers.items():
            for y, _ in read:
                parents[y].append(x)
        return _reached(self.program.results.values(), parents)

    def _met(self, instr: Local, among: set[int]) -> list[int]:
        """What multiplies, or chooses, what an operation looked up, or what comes of it among some values."""
        found: list[int] = []
        seen: set[int] = set()
        left = list(instr.outputs)
        while left:
            id = left.pop()
            if id in seen:
                continue
            seen.add(id)
            for y, by in self.readers[id]:
                if y not in among:
                    continue
                left.append(y)
                if by is not None and by.op.kind in _WEIGHING and not by.op.linear:
                    found += [x for x in by.inputs if x != id]
        return found

    def _weighs(self, x: int, ids: int, feed: str) -> bool:
        """Whether a value is of the batch alone, not of these numbers alone, and no numbers itself."""
        of, type = self.sources[x], self._type(x)
        fed = bool(of) and "" not in of and (of != {feed} or x in self.read_off)
        names = set(self._type(ids).shape.names)
        return fed and type.dtype not in INTEGERS and not names.isdisjoint(type.shape.names)


def _is_zero(made: Function) -> Function:
    return lambda numbers: np.asarray(made(numbers)) == 0


def _reached(ids: Iterable[int], parents: Mapping[int, Sequence[int]]) -> set[int]:
    """Values and all that they come of."""
    found: set[int] = set()
    left = list(ids)
    while left:
        id = left.pop()
        if id not in found:
            found.add(id)
            left += parents.get(id, ())
    return found
