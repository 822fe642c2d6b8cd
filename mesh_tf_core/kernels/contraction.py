"""Einsum as one matrix product: the role of each axis, and the cheapest order to transpose them.

A contraction of two operands is a batch of matrix products: batch letters B (in x, y and the output), rows M
(x and the output), columns N (y and the output), summed letters K (x and y). A library multiplies [B M K] by
[B K N] and reads each factor transposed for free, so an operand is only copied when its letters are in
neither order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product


@dataclass(frozen=True)
class ContractionOperand:
    """One operand: `letters` is the order to bring it in; `transposed` if it is then [B K M] (or [B N K])."""

    letters: str
    transposed: bool


@dataclass(frozen=True)
class MatMul:
    """output letters (the order of the product) = first x second, reshaped to [batch rows columns].

    Attributes:
      swapped: the second einsum operand is the first factor.
      batch, rows, columns, summed: letters of each part, in the order of the product.
    """

    first: ContractionOperand
    second: ContractionOperand
    swapped: bool
    batch: str
    rows: str
    columns: str
    summed: str

    @property
    def result(self) -> str:
        return self.batch + self.rows + self.columns


def parse(spec: str) -> tuple[list[str], str]:
    """Terms and output of an einsum with an explicit output."""
    left, _, out = spec.partition("->")
    return left.split(","), out


def matmul(x: str, y: str, out: str, sizes: Mapping[str, int]) -> MatMul:
    """The product that contracts x and y to `out` with the fewest copied elements.

    Every letter of x and y must be in the other operand or in `out`.
    """
    return _matmul(x, y, out, tuple(sorted(sizes.items())))


@lru_cache(maxsize=1024)
def _matmul(x: str, y: str, out: str, sizes: tuple[tuple[str, int], ...]) -> MatMul:
    size = dict(sizes)
    best: tuple[int, MatMul] | None = None
    for swapped in (False, True):
        a, b = (y, x) if swapped else (x, y)
        batch = [c for c in a if c in b and c in out]
        summed = [c for c in a if c in b and c not in out]
        rows, columns = ([c for c in t if c not in o] for t, o in ((a, b), (b, a)))
        orders = [
            _orders(batch, (a, b, out)),
            _orders(summed, (a, b)),
            _orders(rows, (a, out)),
            _orders(columns, (b, out)),
        ]
        for B, K, M, N in product(*orders):
            first, second = _factor(a, B, M, K), _factor(b, B, K, N)
            plan = MatMul(first, second, swapped, B, M, N, K)
            cost = sum(
                math.prod(size[c] for c in have)
                for have, want in ((a, first.letters), (b, second.letters), (out, plan.result))
                if not same_order(have, want, size)
            )
            if best is None or cost < best[0]:
                best = (cost, plan)
    assert best is not None
    return best[1]


def _orders(letters: Sequence[str], terms: Sequence[str]) -> list[str]:
    return list(dict.fromkeys("".join(c for c in term if c in letters) for term in terms))


def _factor(have: str, batch: str, left: str, right: str) -> ContractionOperand:
    """The operand as [batch left right], or transposed if it lies so already."""
    if have == batch + right + left and have != batch + left + right:
        return ContractionOperand(have, True)
    return ContractionOperand(batch + left + right, False)


def same_order(have: str, want: str, sizes: Mapping[str, int]) -> bool:
    """True if bringing `have` into the order `want` moves no data (axes of size 1 do not count)."""
    return [c for c in have if sizes[c] > 1] == [c for c in want if sizes[c] > 1]


def cheapest_pair(terms: Sequence[str], out: str, sizes: Mapping[str, int]) -> tuple[int, int, str]:
    """The two operands to contract first (those with the smallest result), and its letters."""
    best: tuple[int, tuple[int, int, str]] | None = None
    for i in range(len(terms)):
        for j in range(i + 1, len(terms)):
            others = out + "".join(t for n, t in enumerate(terms) if n not in (i, j))
            kept = "".join(dict.fromkeys(c for c in terms[i] + terms[j] if c in others))
            cost = math.prod(sizes[c] for c in kept)
            if best is None or cost < best[0]:
                best = (cost, (i, j, kept))
    assert best is not None
    return best[1]
