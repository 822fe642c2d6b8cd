"""Every axis as a product of factors, from the outermost to the innermost: a reshape splits or merges them,
all else keeps them.

Axes that relations unite have the same factors, so the factors of a reshape apply everywhere: [batch, length,
768] to [batch, length, 12, 64] makes every related 768 the product 12 times 64. An axis of one element has no
factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from layoutopt.importers.arrays.contract import KEY, Equation, EquationBlock, Operand
from layoutopt.importers.arrays.indexing import IndexedPiece, indexing, pieces
from layoutopt.importers.arrays.relations import (
    Axis,
    AxisPart,
    AxisRelation,
    Copies,
    Join,
    Regroup,
    Same,
    relations,
)


@dataclass(eq=False, slots=True)
class _Atom:
    """A factor as far as is known: one may turn out to be the same as another, or a product.

    Attributes:
      piece: it is what an axis was cut into.
      rows: it is examples of the batch.
    """

    size: int
    same: _Atom | None = None
    parts: list[_Atom] = field(default_factory=list)
    piece: bool = False
    rows: bool = False


def _found(atom: _Atom) -> _Atom:
    while atom.same is not None:
        atom = atom.same
    return atom


def _expanded(atoms: Iterable[_Atom]) -> list[_Atom]:
    out = []
    for atom in map(_found, atoms):
        out += _expanded(atom.parts) if atom.parts else [atom]
    return out


def _cut(atom: _Atom, size: int) -> None:
    rest = _Atom(atom.size // size, piece=atom.piece)
    atom.parts = [_Atom(size, piece=atom.piece), rest]


def _unite(left: Sequence[_Atom], right: Sequence[_Atom]) -> bool:
    """Makes two products of equal size the same; False if they cannot be cut at the same places."""
    a, b = _expanded(left), _expanded(right)
    while a and b:
        x, y = _found(a[0]), _found(b[0])
        if x.parts or y.parts:
            a, b = _expanded(a), _expanded(b)
        elif x is y or x.size == y.size:
            if x is not y:
                y.same = x
                x.piece, x.rows = x.piece or y.piece, x.rows or y.rows
            a, b = a[1:], b[1:]
        elif x.size % y.size == 0:
            _cut(x, y.size)
            a = _expanded(a)
        elif y.size % x.size == 0:
            _cut(y, x.size)
            b = _expanded(b)
        else:
            return False
    return not a and not b


@dataclass
class Factors:
    """The known factors of a block's axes.

    Attributes:
      sizes: (id of an operand, axis) -> sizes of its factors.
      operands: id -> operand, of all that occur.
      related: relations with the equations that they are of.
      whole: ids of equations that regroup elements in a form without factors.
      joined: ids of concatenations that rejoin slices.
      pieces: of slices.
    """

    sizes: dict[tuple[int, int], tuple[int, ...]]
    operands: dict[int, Operand]
    related: list[tuple[Equation, AxisRelation]]
    whole: set[int]
    joined: set[int]
    pieces: dict[int, IndexedPiece]

    def of(self, operand: Operand, axis: int) -> tuple[int, ...]:
        """Sizes of the factors of an axis."""
        return self.sizes[id(operand), axis]


def factors(block: EquationBlock, batch: Iterable[Operand] = ()) -> Factors:
    """The factors of all axes of a block; the first axis of each of `batch` is examples."""
    return _Inference(block, batch).result()


class _Inference:
    def __init__(self, block: EquationBlock, batch: Iterable[Operand]) -> None:
        self.atoms: dict[tuple[int, int], list[_Atom]] = {}
        self.operands: dict[int, Operand] = {}
        self.whole: set[int] = set()
        self.joined: set[int] = set()
        self.pieces = pieces(block)
        for v in (*block.ins, *block.outs):
            self._note(v)
        for equation in block.walk():
            inner = [x for b in (equation.body, equation.backward) if b for x in (*b.ins, *b.outs)]
            for v in (*equation.ins, *equation.outs, *inner):
                self._note(v)
        for atom in (a for v in batch for a in self._at((v, 0))):
            atom.rows = True
        self.related: list[tuple[Equation, AxisRelation]] = []
        self.related += [(e, r) for e in block.walk() for r in relations(e, self.pieces)]
        self.related += _Ranges().run(block)
        joins = []
        for equation, relation in self.related:
            match relation:
                case Same():
                    self._same(relation)
                case Regroup():
                    if not _unite(self._all(relation.x), self._all(relation.y)):
                        self.whole.add(id(equation))
                case AxisPart():
                    self._part(relation)
                case Join():
                    joins.append((equation, relation))
        while sum(self._join(e, r) for e, r in joins):
            pass

    def _note(self, v: Operand) -> None:
        if id(v) not in self.operands:
            self.operands[id(v)] = v
            for a, n in enumerate(v.shape if v.dtype != KEY else ()):
                self.atoms[id(v), a] = [_Atom(n)] if n != 1 else []

    def _at(self, axis: Axis) -> list[_Atom]:
        return self.atoms.get((id(axis[0]), axis[1]), [])

    def _all(self, v: Operand) -> list[_Atom]:
        return [atom for a in range(len(v.shape)) for atom in self._at((v, a))]

    def _same(self, r: Same) -> None:
        if r.a[0].shape[r.a[1]] == r.b[0].shape[r.b[1]]:
            _unite(self._at(r.a), self._at(r.b))

    def _part(self, r: AxisPart) -> None:
        if not isinstance(r, Copies):
            for atom in _expanded(self._at(r.y)):
                atom.piece = True
        _unite(self._at(r.x), [_Atom(r.count), *self._at(r.y)])

    def _join(self, equation: Equation, r: Join) -> bool:
        """Whether a concatenation was found to put something back together."""
        if id(equation) in self.joined:
            return False
        each, y = [_expanded(self._at(x)) for x in r.xs], _expanded(self._at(r.y))
        # Views of the same examples, one behind the other, are these examples several times.
        known = any(a.piece for x in each for a in x) or all(any(a.rows for a in x) for x in each)
        known = known or len(r.xs) in {math.prod(a.size for a in y[:n]) for n in range(1, len(y))}
        if not known or not each[0]:
            return False
        self.joined.add(id(equation))
        number = _Atom(len(r.xs))
        for x in r.xs:
            _unite(self._at(r.y), [number, *self._at(x)])
        return True

    def result(self) -> Factors:
        sizes = {key: tuple(atom.size for atom in _expanded(atoms)) for key, atoms in self.atoms.items()}
        return Factors(sizes, self.operands, self.related, self.whole, self.joined, self.pieces)


_KEEPING = frozenset((
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type", "slice", "dynamic_slice",
    "copy", "stop_gradient", "gather", "tile", "select_n", "sort", "split", "max", "min", "clamp",
))  # fmt: skip
"""Primitives whose results are elements of an operand."""
_CLIPS = ("max", "min", "clamp")


class _Ranges:
    """Axes that are the same because numbers that count one are compared with, or look up in, the other.

    Tracks which dimension a number indexes: only this links the experts that a router chose to the experts'
    weights.
    """

    def __init__(self) -> None:
        self.counts: dict[int, Axis] = {}
        self.along: dict[int, int] = {}

    def run(self, block: EquationBlock) -> Iterator[tuple[Equation, Same]]:
        for e in block.equations:
            if e.body is not None:
                for x, inner in zip(e.ins, e.body.ins, strict=True):
                    self.keep(x, inner)
                yield from self.run(e.body)
            else:
                yield from ((e, relation) for relation in self.of(e))

    def of(self, e: Equation) -> Iterator[Same]:
        if e.prim == "top_k":
            self.counts[id(e.outs[1])] = (e.ins[0], len(e.ins[0].shape) - 1)
        elif e.prim in ("argmax", "argmin"):
            self.counts[id(e.out)] = (e.ins[0], e.params["axes"][0])
        elif e.prim == "iota":
            self.along[id(e.out)] = e.params["dimension"]
        elif e.prim == "eq":
            for x, y in (e.ins, e.ins[::-1]):
                if id(x) in self.counts and id(y) in self.along:
                    yield from self.same(self.counts[id(x)], (y, self.along[id(y)]))
        elif e.prim.startswith(("gather", "scatter")) and id(e.ins[1]) in self.counts:
            looked_up = indexing(e).looked_up
            if len(looked_up) == 1:
                yield from self.same(self.counts[id(e.ins[1])], (e.ins[0], looked_up[0][0]))
        if e.prim in _KEEPING:
            sources = e.ins[1:] if e.prim == "select_n" else e.ins[: 3 if e.prim in _CLIPS else 1]
            if e.prim == "sort":
                for x, y in zip(e.ins, e.outs, strict=True):
                    self.keep(x, y)
            for x in reversed(sources):
                for y in e.outs if e.prim == "split" else e.outs[:1]:
                    self.keep(x, y)
            self.follow(e)

    def same(self, a: Axis, b: Axis) -> Iterator[Same]:
        if a[0].shape[a[1]] == b[0].shape[b[1]]:
            yield Same(a, b, "ids")

    def keep(self, x: Operand, y: Operand) -> None:
        if id(x) in self.counts:
            self.counts[id(y)] = self.counts[id(x)]

    def follow(self, e: Equation) -> None:
        """Where 0, 1, ... goes."""
        x = e.ins[0]
        if id(x) not in self.along:
            return
        axis = self.along[id(x)]
        if e.prim == "broadcast_in_dim":
            self.along[id(e.out)] = e.params["broadcast_dimensions"][axis]
        elif e.prim == "transpose":
            self.along[id(e.out)] = list(e.params["permutation"]).index(axis)
        elif e.prim in ("convert_element_type", "copy", "stop_gradient"):
            self.along[id(e.out)] = axis
        elif e.prim == "reshape":
            same = [a for a, n in enumerate(e.out.shape) if n == x.shape[axis]]
            if len(same) == 1:
                self.along[id(e.out)] = same[0]
