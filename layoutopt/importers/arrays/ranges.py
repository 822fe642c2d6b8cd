"""Tracks which dimension a number indexes: only this links the experts that a router chose to the experts'
weights."""

from __future__ import annotations

from collections.abc import Iterator

from layoutopt.importers.arrays.axis_relations import Axis, Same
from layoutopt.importers.arrays.contract import Equation, EquationBlock, Operand
from layoutopt.importers.arrays.indexing import indexing

_KEEPING = frozenset((
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type", "slice", "dynamic_slice",
    "copy", "stop_gradient", "gather", "tile", "select_n", "sort", "split", "max", "min", "clamp",
))  # fmt: skip
"""Primitives whose results are elements of an operand."""
_CLIPS = ("max", "min", "clamp")


def index_relations(block: EquationBlock) -> list[tuple[Equation, Same]]:
    """Axes that are the same because numbers that count one are compared with, or look up in, the other."""
    found: list[tuple[Equation, Same]] = []
    _Ranges(found).run(block)
    return found


class _Ranges:
    def __init__(self, found: list[tuple[Equation, Same]]) -> None:
        self.found = found
        self.counts: dict[int, Axis] = {}
        self.along: dict[int, int] = {}

    def run(self, block: EquationBlock) -> None:
        for e in block.equations:
            if e.body is not None:
                for x, inner in zip(e.ins, e.body.ins, strict=True):
                    if id(x) in self.counts:
                        self.counts[id(inner)] = self.counts[id(x)]
                self.run(e.body)
                continue
            for relation in self.of(e):
                self.found.append((e, relation))

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
