"""Einsum as one matrix product: the role of each axis, and the cheapest order to transpose them.

A contraction of two operands is a batch of matrix products: batch letters B (in x, y and the output), rows M
(x and the output), columns N (y and the output), summed letters K (x and y). A library multiplies [B M K] by
[B K N] and reads each factor transposed for free, so an operand is only copied when its letters are in
neither order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

A = Any
"""An array of some kernel."""


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
                if [c for c in have if size[c] > 1] != [c for c in want if size[c] > 1]
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


class PairwiseEinsum(ABC):
    """The contractions of a kernel whose library multiplies matrices: two operands at a time.

    Attributes:
      binary, reduce, reshape, transpose: as in the protocol of kernels.
    """

    binary: Callable[..., Any]
    reduce: Callable[..., Any]
    reshape: Callable[..., Any]
    transpose: Callable[..., Any]

    @abstractmethod
    def product(self, a: A, b: A, plan: MatMul, sizes: Mapping[str, int]) -> A:
        """The matrix product of factors that lie as `plan` has them; its axes are those of `plan.result`."""

    def contracted(self, spec: str, *xs: A) -> A:
        """An einsum of arrays whose type the library multiplies."""
        terms, out = parse(spec)
        sizes = {c: n for term, x in zip(terms, xs, strict=True) for c, n in zip(term, x.shape, strict=True)}
        rest = list(xs)
        while len(rest) > 2:
            i, j, kept = cheapest_pair(terms, out, sizes)
            joined = self._pair(rest[i], rest[j], terms[i], terms[j], kept, sizes)
            terms = [t for n, t in enumerate(terms) if n not in (i, j)] + [kept]
            rest = [x for n, x in enumerate(rest) if n not in (i, j)] + [joined]
        if len(rest) == 1:
            return self._ordered(*self._summed(rest[0], terms[0], out), out)
        return self._pair(rest[0], rest[1], terms[0], terms[1], out, sizes)

    def _pair(self, x: A, y: A, tx: str, ty: str, out: str, sizes: dict[str, int]) -> A:
        """Two operands as a product and a sum (nothing to share) or as matrix products."""
        x, tx = self._summed(x, tx, ty + out)
        y, ty = self._summed(y, ty, tx + out)
        shared = [c for c in tx if c in ty and c not in out]
        alone = [c for c in tx + ty if (c in tx) != (c in ty)]
        if not shared or (not alone and len(out)):
            return self._multiplied(x, y, tx, ty, out, sizes)
        plan = matmul(tx, ty, out, sizes)
        a, b, ta, tb = (y, x, ty, tx) if plan.swapped else (x, y, tx, ty)
        a, b = self._ordered(a, ta, plan.first.letters), self._ordered(b, tb, plan.second.letters)
        return self._ordered(self.product(a, b, plan, sizes), plan.result, out)

    def _multiplied(self, x: A, y: A, tx: str, ty: str, out: str, sizes: dict[str, int]) -> A:
        """Element by element over all letters, then the sum over those that `out` lacks."""
        largest = max((tx, ty), key=len)
        order = largest + "".join(c for c in tx + ty if c not in largest)
        if not set(order) - set(out):
            order = out
        aligned = []
        for z, term in ((x, tx), (y, ty)):
            z = self._ordered(z, term, "".join(c for c in order if c in term))
            aligned.append(self.reshape(z, [sizes[c] if c in term else 1 for c in order]))
        return self._ordered(*self._summed(self.binary("mul", *aligned), order, out), out)

    def _summed(self, x: A, term: str, kept: str) -> tuple[A, str]:
        """An array without the letters that nothing else needs."""
        axes = [i for i, c in enumerate(term) if c not in kept]
        return self.reduce("sum", x, axes), "".join(c for c in term if c in kept)

    def _ordered(self, x: A, term: str, out: str) -> A:
        """An array with its axes in the order of `out`."""
        return x if term == out else self.transpose(x, [term.index(c) for c in out])
