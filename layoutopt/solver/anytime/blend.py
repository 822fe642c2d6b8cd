"""Blends two choice vectors into one that satisfies the rows: the differences form parts that no pair links.

The parts' costs add up, so each may be taken on its own.
"""

from __future__ import annotations

import numpy as np

from layoutopt.solver.anytime.network import Network
from layoutopt.solver.form import Floats, Ints


class DifferingParts:
    """The parts in which `other` differs from `base`.

    Attributes:
      label: (variables,) the part of each variable, -1 where nothing differs.
      gain: (parts,) saving of the part.
    """

    def __init__(self, network: Network, base: Ints, other: Ints) -> None:
        # Commands that solve nothing import this module too, and should not wait for SciPy.
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        self.network, self.base, self.other = network, base, other
        differs = base != other
        changed = np.flatnonzero(differs)
        number = np.full(len(base), -1)
        number[changed] = np.arange(len(changed))
        first, second = network.ends.T
        both = differs[first] & differs[second]
        links = coo_array(
            (np.ones(both.sum()), (number[first[both]], number[second[both]])), shape=(len(changed),) * 2
        )
        self.count, found = connected_components(links, directed=False)
        self.label = np.full(len(base), -1)
        self.label[changed] = found
        touched = differs[first] | differs[second]
        of_pair = np.maximum(self.label[first[touched]], self.label[second[touched]])
        a, b = first[touched], second[touched]
        starts, width = network.starts[touched], network.sizes[b]
        saved = (
            network.cells[starts + base[a] * width + base[b]]
            - network.cells[starts + other[a] * width + other[b]]
        )
        gain = np.bincount(of_pair, saved, self.count).astype(float)
        at = network.offsets[:-1][changed]
        gain += np.bincount(
            found, network.unary[at + base[changed]] - network.unary[at + other[changed]], self.count
        )
        self.gain = gain
        more = network.uses(other) - network.uses(base)
        items = np.flatnonzero(more)
        part = self.label[network.owner[items]]
        order = np.argsort(part, kind="stable")
        self.items, self.more = items[order], more[items[order]]
        self.cuts = np.searchsorted(part[order], np.arange(self.count + 1))

    def paid(self, prices: Floats) -> Floats:
        """(parts,) additional cost of each part's uses at these prices."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        network = self.network
        each = self.more * (paid[network.end[self.items]] - paid[network.begin[self.items]])
        return np.bincount(self.label[network.owner[self.items]], each, self.count).astype(float)

    def change(self, part: int) -> tuple[int, int, Floats]:
        """The points [first, last) that a part touches, and how much more it uses there."""
        a, b = self.cuts[part], self.cuts[part + 1]
        if a == b:
            return 0, 0, np.zeros(0)
        begin, end = self.network.begin[self.items[a:b]], self.network.end[self.items[a:b]]
        first, last = int(begin.min()), int(end.max())
        change = np.bincount(begin - first, self.more[a:b], last - first + 1)
        change -= np.bincount(end - first, self.more[a:b], last - first + 1)
        return first, last, np.cumsum(change, dtype=float)[:-1]


def blended(network: Network, base: Ints, other: Ints, prices: Floats) -> Ints:
    """Choices between `base`, which keeps the rows, and `other`, that keep them too."""
    slack = network.room - network.profile(base)
    if (base == other).all():
        return base
    parts = DifferingParts(network, base, other)
    rest = np.argsort(parts.paid(prices) - parts.gain, kind="stable").tolist()
    taken: list[int] = []
    while rest:
        left = []
        released = False
        for part in rest:
            first, last, more = parts.change(part)
            if (more <= slack[first:last]).all():
                slack[first:last] -= more
                taken.append(part)
                released |= bool(parts.gain[part] < 0)
            else:
                left.append(part)
        if len(left) == len(rest) or not released:
            break
        rest = left
    # what only made room, and need not
    for part in sorted((p for p in taken if parts.gain[p] < 0), key=lambda p: parts.gain[p]):
        first, last, more = parts.change(part)
        if (-more <= slack[first:last]).all():
            slack[first:last] += more
            taken.remove(part)
    mine = np.zeros(parts.count + 1, bool)
    mine[taken] = True
    return np.where(mine[parts.label], other, base)
