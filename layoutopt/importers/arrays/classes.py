"""The factors that are one dimension, and so have one name.

Two factors of one array never are: a dimension would occur twice there (the lengths of queries and keys in
self-attention, the two sides of a square weight), so one of the relations that would unite them is refused.
Relations are applied in the order of their certainty: those of parameters and the residual stream come before
those of positions, masks and products of two activations. A relation that was refused is a change of names
when the model runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_

from layoutopt.importers.arrays.contract import Equation, EquationBlock, Operand, Var, has_fractions
from layoutopt.importers.arrays.factors import Factors
from layoutopt.importers.arrays.relations import Axis, AxisPart, AxisRelation, Copies, Join, Regroup, Same

FactorNode = int

PARAMETER, FLOAT, WHOLE = 1, 2, 4
"""The kinds of values by origin: parameters, the batch's fractions, the batch's whole numbers."""


@dataclass
class Classes:
    """Dimensions.

    Attributes:
      nodes: (id of an operand, axis) -> the classes of its factors, filled by `find`.
      size: node -> its size.
      refused: pairs of nodes that a relation wanted to unite.
      made_of: id of an operand -> the arguments that it is computed from; 0 if from none.
    """

    factors: Factors
    nodes: dict[tuple[int, int], tuple[FactorNode, ...]] = field(default_factory=dict)
    size: list[int] = field(default_factory=list)
    refused: list[tuple[FactorNode, FactorNode]] = field(default_factory=list)
    made_of: dict[int, int] = field(default_factory=dict)
    _parent: list[int] = field(default_factory=list)
    _apart: list[set[int]] = field(default_factory=list)

    def find(self, node: FactorNode) -> FactorNode:
        """The node that represents the class."""
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def of(self, operand: Operand, axis: int) -> tuple[FactorNode, ...]:
        """The classes of an axis, one per factor."""
        return tuple(map(self.find, self.nodes.get((id(operand), axis), ())))

    def all(self, operand: Operand) -> tuple[FactorNode, ...]:
        """The classes of all axes."""
        return tuple(c for a in range(len(operand.shape)) for c in self.of(operand, a))

    def apart(self, node: FactorNode) -> frozenset[FactorNode]:
        """The classes that share an array with it."""
        return frozenset(map(self.find, self._apart[self.find(node)]))

    def unite(self, a: FactorNode, b: FactorNode) -> bool:
        """Makes two classes one, unless they share an array."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if b in self._apart[a]:
            self.refused.append((a, b))
            return False
        if len(self._apart[a]) < len(self._apart[b]):
            a, b = b, a
        self._parent[b] = a
        for other in self._apart[b]:
            self._apart[other].discard(b)
            self._apart[other].add(a)
        self._apart[a] |= self._apart[b]
        self._apart[b] = set()
        return True

    def add(self, operand: Operand) -> None:
        """Adds an operand, with factors in separate classes."""
        own: list[int] = []
        for axis in range(len(operand.shape)):
            found = []
            for size in self.factors.sizes.get((id(operand), axis), ()):
                node = len(self._parent)
                self._parent.append(node)
                self.size.append(size)
                self._apart.append(set())
                found.append(node)
            self.nodes[id(operand), axis] = tuple(found)
            own += found
        for node in own:
            self._apart[node].update(n for n in own if n != node)

    def free(self) -> set[FactorNode]:
        """Classes that contain only positions and masks before they are united with classes of the model."""
        used = {self.find(n) for (v, _), nodes in self.nodes.items() if self.made_of.get(v) for n in nodes}
        return set(self.members()) - used

    def members(self) -> dict[FactorNode, list[FactorNode]]:
        """Class -> its nodes."""
        found: dict[FactorNode, list[FactorNode]] = defaultdict(list)
        for node in range(len(self._parent)):
            found[self.find(node)].append(node)
        return found


def classes(
    block: EquationBlock,
    factors: Factors,
    parameters: Sequence[Var],
    batch: Sequence[Var],
    hints: Iterable[Sequence[Axis]] = (),
    alike: Iterable[Sequence[Axis]] = (),
    stacks: Collection[Var] = (),
) -> Classes:
    """The dimensions of a block.

    Args:
      parameters, batch: the operands that are parameters, and those that are inputs.
      hints: axes that the user or the library declares equal.
      alike: axes that are equal unless other relations contradict.
      stacks: parameters of several layers, one behind the other.
    """
    found = Classes(factors)
    for operand in factors.operands.values():
        found.add(operand)
    for axes in hints:
        for axis in axes[1:]:
            _unite_axes(found, axes[0], axis)
    related = [(e, r, [*_edges(found, factors, e, r)]) for e, r in factors.related]
    _unite_rows(found, [pair for _, _, pairs in related for pair in pairs], batch)
    made_of, layers = _made_of(block, parameters, batch), _templates(found, parameters, stacks)
    found.made_of = made_of
    edges: dict[int, dict[int, list[tuple[FactorNode, FactorNode]]]] = defaultdict(lambda: defaultdict(list))
    owner = {n: factors.operands[v] for (v, _), nodes in found.nodes.items() for n in nodes}
    for equation, relation, pairs in related:
        ends = {owner[n] for pair in pairs for n in pair}
        edges[_certainty(equation, relation, ends, made_of)][id(equation)] += pairs
    for level in sorted(edges):
        listed = list(edges[level].values())
        # The product of weights and values knows its queries, which that of queries and keys must follow.
        for pairs in reversed(listed) if level == _PRODUCTS else listed:
            for a, b in pairs:
                found.unite(a, b)
        if level == _CERTAIN:
            _unite_layers(found, layers)
    _counts(found)
    _unite_layers(found, layers)
    _twins(found, {c for v in parameters for c in found.all(v)})
    for axes in alike:
        for axis in axes[1:]:
            _unite_axes(found, axes[0], axis)
    return found


_CERTAIN, _PRODUCTS, _FREE = 1, 2, 3


def _certainty(
    equation: Equation, relation: AxisRelation, ends: Iterable[Operand], made_of: Mapping[int, int]
) -> int:
    if isinstance(relation, Same) and relation.kind == "ids":
        return _CERTAIN
    strong = PARAMETER | FLOAT
    if not all(made_of.get(id(v), 0) & strong and has_fractions(v) for v in ends):
        return _FREE
    if isinstance(relation, Same) and relation.kind == "product":
        x, y = (made_of.get(id(v), 0) for v in equation.ins[:2])
        if x & ~PARAMETER and y & ~PARAMETER:
            return _PRODUCTS
    return _CERTAIN


def _made_of(block: EquationBlock, parameters: Sequence[Var], batch: Sequence[Var]) -> dict[int, int]:
    """id of an operand -> what it is made of."""
    found: dict[int, int] = {id(v): PARAMETER for v in parameters}
    found.update({id(v): FLOAT if has_fractions(v) else WHOLE for v in batch})

    def run(inner: EquationBlock) -> None:
        for e in inner.equations:
            for sub, given in ((e.body, e.ins), (e.backward, [*e.ins, *e.outs])):
                if sub is None:
                    continue
                for x, v in zip(given, sub.ins, strict=False):
                    found[id(v)] = found.get(id(v), 0) | found.get(id(x), 0)
                run(sub)
                if e.prim == "scan":
                    n, c = e.params["consts"], e.params["carry"]
                    for v, y in zip(sub.ins[n : n + c], sub.outs[:c], strict=True):
                        found[id(v)] = found.get(id(v), 0) | found.get(id(y), 0)
                    run(sub)
            if e.body is not None:
                own = zip(e.outs, e.body.outs, strict=True)
                found.update((id(y), found.get(id(inner_y), 0)) for y, inner_y in own)
            else:
                made = reduce(or_, (found.get(id(x), 0) for x in e.ins), 0)
                found.update(dict.fromkeys(map(id, e.outs), made))

    run(block)
    return found


def _edges(
    found: Classes, factors: Factors, equation: Equation, relation: AxisRelation
) -> Iterator[tuple[FactorNode, FactorNode]]:
    def nodes(axis: Axis) -> tuple[FactorNode, ...]:
        return found.nodes.get((id(axis[0]), axis[1]), ())

    def all_nodes(v: Operand) -> list[FactorNode]:
        return [n for a in range(len(v.shape)) for n in nodes((v, a))]

    def ends(whole: Axis, part: Axis) -> Iterator[tuple[FactorNode, FactorNode]]:
        x, y = nodes(whole)[-len(nodes(part)) :], nodes(part)
        return zip(x, y, strict=True) if _sizes(found, x) == _sizes(found, y) else iter(())

    match relation:
        case Same(kind="cut"):
            return
        case Same():
            a, b = nodes(relation.a), nodes(relation.b)
            sized = relation.kind == "sized" and len(a) == len(b) == 1
            if sized or _sizes(found, a) == _sizes(found, b):
                yield from zip(a, b, strict=True)
        case Regroup():
            if id(equation) not in factors.whole:
                yield from zip(all_nodes(relation.x), all_nodes(relation.y), strict=True)
        case AxisPart():
            yield from ends(relation.x, relation.y)
        case Join() if id(equation) in factors.joined:
            for axis in relation.xs:
                yield from ends(relation.y, axis)


def _unite_rows(found: Classes, pairs: Sequence[tuple[FactorNode, FactorNode]], batch: Sequence[Var]) -> None:
    """Examples stay examples in all that is made of them: where all are compared with all, the other side of
    the pairs is a dimension of its own, and not the whole tower that made it."""
    find = found.find
    for first in {find(n) for v in batch if v.shape for n in found.of(v, 0)[:1]}:
        left, more = [*pairs], True
        while more:
            row, before, left, more = find(first), left, [], False
            for a, b in before:
                inside = (find(a) == row) + (find(b) == row)
                if inside == 1 and found.unite(a, b):
                    row, more = find(first), True
                elif not inside:
                    left.append((a, b))


def _sizes(found: Classes, nodes: Sequence[FactorNode]) -> list[int]:
    return [found.size[n] for n in nodes]


def _unite_axes(found: Classes, a: Axis, b: Axis) -> None:
    """The factors of two axes of one size, pair by pair; none where they are cut differently."""
    pairs = list(zip(found.of(*a), found.of(*b), strict=False))
    for x, y in pairs if all(found.size[x] == found.size[y] for x, y in pairs) else ():
        found.unite(x, y)


def _counts(found: Classes) -> None:
    """What is cut and put together again is one axis: the same number counts its pieces."""
    first: dict[tuple[FactorNode, ...], FactorNode] = {}
    for equation, relation in found.factors.related:
        match relation:
            case Copies():
                continue
            case AxisPart():
                whole, piece = found.of(*relation.x), found.of(*relation.y)
            case Join() if id(equation) in found.factors.joined:
                whole, piece = found.of(*relation.y), found.of(*relation.xs[0])
            case _:
                continue
        lead = whole[: len(whole) - len(piece)]
        if len(lead) == 1 and piece:
            found.unite(first.setdefault((*piece, -found.size[lead[0]]), lead[0]), lead[0])


_NUMBER = re.compile(r"_?\d+(-\d+)?")


@lru_cache(1 << 16)
def template(path: str) -> str:
    """A path without numbers, alike for a parameter in every layer (Keras leaves out the first number)."""
    return _NUMBER.sub("", path)


def _templates(found: Classes, parameters: Sequence[Var], stacks: Collection[Var]) -> list[list[list[Axis]]]:
    """The axes of parameters of equal layers, of each such kind layer by layer.

    Their paths differ by one number, and all parameters beside them have the sizes of those beside the other:
    numbers at two places (`stage_0/fc_1/b`, `stage_1/fc_2/b`), or equal sizes of one of several parameters
    (`fc_1/b`, `fc_3/b` of kernels that are unlike), are no evidence.
    """
    axes: dict[Var, list[Axis]]
    axes = {v: [(v, a) for a in range(int(v in stacks), len(v.shape))] for v in parameters}
    sizes = {v: tuple(found.factors.of(*axis) for axis in axes[v]) for v in parameters}
    beside: dict[str, list[Var]] = defaultdict(list)
    for v in parameters:
        beside[v.path.rpartition("/")[0]].append(v)
    alike: dict[tuple[object, ...], list[list[Axis]]] = defaultdict(list)
    numbers, counted = _numbers(parameters)
    for v in parameters:
        folder = v.path.rpartition("/")[0]
        own = {at: n for at, n in numbers[v].items() if at >= len(template(folder))}
        for place in numbers[v].keys() - counted:
            group = beside[folder]
            if place in own:  # w_0 and b_0 are a layer
                group = [x for x in group if own.items() <= numbers[x].items()]
            layer = frozenset((template(x.path), sizes[x]) for x in group)
            rest = frozenset((at, n) for at, n in numbers[v].items() if at not in (place, *counted))
            alike[template(v.path), place, rest, sizes[v], layer].append(axes[v])
    return [layers for layers in alike.values() if len(layers) > 1]


def _unite_layers(found: Classes, alike: Iterable[list[list[Axis]]]) -> None:
    """Parameters of equal layers have the same dimensions, where that is possible."""
    for layers in alike:
        for first, *others in zip(*layers, strict=True):
            nodes = list(zip(*(found.of(*axis) for axis in (first, *others)), strict=True))
            # Layers that feed each other have dimensions of their own, all of them.
            if all(found.apart(x).isdisjoint(group) for group in nodes for x in group):
                for other in others:
                    _unite_axes(found, first, other)


def _numbers(parameters: Sequence[Var]) -> tuple[dict[Var, dict[int, str]], set[int]]:
    """The numbers of each path by their place in its template, "" for one that others have there; and the
    places of numbers that count all arrays one by one, which say nothing of layers."""
    found: dict[Var, dict[int, str]] = {}
    places: dict[str, set[int]] = defaultdict(set)
    for v in parameters:
        found[v], gone = {}, 0
        for number in _NUMBER.finditer(v.path):
            found[v][number.start() - gone] = number[0]
            gone += len(number[0])
        places[template(v.path)].update(found[v])
    for v, own in found.items():
        own.update((at, "") for at in places[template(v.path)] - own.keys())
    shared = set.intersection(*(set(own) for own in found.values())) if found else set()
    counted = {at for at in shared if len({own[at] for own in found.values()}) == len(found) > 1}
    return found, counted


def _twins(found: Classes, of_parameters: set[FactorNode]) -> None:
    """Dimensions that one refused are its other side, all of one name; so are those that meet the same."""
    sides: dict[tuple[FactorNode, int], list[FactorNode]] = defaultdict(list)
    for a, b in list(found.refused):
        for x, y in ((a, b), (b, a)):
            sides[found.find(x), found.size[x]].append(y)
    before = len(found.refused)
    for others in sides.values():
        for other in others[1:]:
            found.unite(others[0], other)
    for _ in range(3):
        alike: dict[tuple[int, frozenset[int]], list[FactorNode]] = defaultdict(list)
        for root in set(found.members()) - {found.find(c) for c in of_parameters}:
            alike[found.size[root], found.apart(root)].append(root)
        for group in alike.values():
            for other in group[1:]:
                found.unite(group[0], other)
    del found.refused[before:]
