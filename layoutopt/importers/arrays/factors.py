"""Every axis as a product of factors, from the outermost to the innermost: a reshape splits or merges them,
all else keeps them.

Axes that relations unite have the same factors, so the factors of a reshape apply everywhere: [batch, length,
768] to [batch, length, 12, 64] makes every related 768 the product 12 times 64. An axis of one element has no
factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from layoutopt.importers.arrays.axis_relations import (
    Axis,
    AxisPart,
    AxisRelation,
    Copies,
    Join,
    Regroup,
    Same,
)
from layoutopt.importers.arrays.contract import KEY, Equation, EquationBlock, Operand
from layoutopt.importers.arrays.indexing import IndexedPiece, pieces
from layoutopt.importers.arrays.ranges import index_relations
from layoutopt.importers.arrays.relations import relations


@dataclass(eq=False, slots=True)
class _Atom:
    """A factor as far as is known: one may turn out to be the same as another, or a product.

    Attributes:
      piece: it is what an axis was cut into.
    """

    size: int
    same: _Atom | None = None
    parts: list[_Atom] = field(default_factory=list)
    piece: bool = False


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
                x.piece = x.piece or y.piece
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


def factors(block: EquationBlock) -> Factors:
    """The factors of all axes of a block."""
    return _Inference(block).result()


class _Inference:
    def __init__(self, block: EquationBlock) -> None:
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
        self.related: list[tuple[Equation, AxisRelation]] = []
        self.related += [(e, r) for e in block.walk() for r in relations(e, self.pieces)]
        self.related += index_relations(block)
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
        first = _expanded(self._at(r.xs[0]))
        known = any(atom.piece for x in r.xs for atom in _expanded(self._at(x)))
        for count in range(1, len(_expanded(self._at(r.y)))):
            lead = _expanded(self._at(r.y))[:count]
            known = known or math.prod(atom.size for atom in lead) == len(r.xs)
        if not known or not first:
            return False
        self.joined.add(id(equation))
        number = _Atom(len(r.xs))
        for x in r.xs:
            _unite(self._at(r.y), [number, *self._at(x)])
        return True

    def result(self) -> Factors:
        sizes = {key: tuple(atom.size for atom in _expanded(atoms)) for key, atoms in self.atoms.items()}
        return Factors(sizes, self.operands, self.related, self.whole, self.joined, self.pieces)
