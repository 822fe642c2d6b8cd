r"""A bound on a network's cost and its choices' likely costs: sequential tree-reweighted message passing.

A message M_ij moves cost from a pair's table to the choices of j. With variables in a fixed order, each sends
in turn to those after it, and then, backwards, to those before it,

    M_ij(x_j) = min over x_i of  g_i (unary_i + sum_k M_ki)(x_i) - M_ji(x_i) + table_ij(x_i, x_j),

where g_i is 1 / the larger number of neighbours on one side. The constants that are removed on the way back
add up to a lower bound, which never falls (Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy
Minimization", PAMI 2006). Variables of one colour have no pair, so they send at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layoutopt.solver.anytime.network import Network
from layoutopt.solver.form import Floats, Ints


@dataclass(frozen=True, eq=False)
class MessageBatch:
    """The messages that the variables of one colour send in one direction.

    Attributes:
      members: (choices,) the senders' choices, counted through; `begins` where each sender's begin.
      source: (inputs,) choices of the sender of each message; `share` is g of it, `back` is the position of
        the opposite message.
      cells, at: the tables, receiver's choice first, and the input of each cell.
      rows: start of each receiver's choice in `cells`.
      heads, lengths: start and length of each message in `rows`.
      out, target: destination of each number: the message, and the receiver's choice.
    """

    members: Ints
    begins: Ints
    sizes: Ints
    source: Ints
    share: Floats
    back: Ints
    cells: Floats
    at: Ints
    rows: Ints
    heads: Ints
    lengths: Ints
    out: Ints
    target: Ints


class Messages:
    """The messages of one network; `bound` is that of the last `turn`.

    Attributes:
      total: (choices,) the unary costs with all messages.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        first, second = network.ends.T
        sizes = network.sizes
        # the message to the first of pair p begins at to_first[p], the one to the second at to_second[p]
        lengths = np.stack([sizes[first], sizes[second]], axis=1).ravel()
        begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.to_first, self.to_second = begins[:-1:2], begins[1::2]
        self.values = np.zeros(begins[-1])
        self.total = np.zeros(len(network.unary))
        takers = np.stack([first, second], axis=1).ravel()
        self.targets = _ranges(network.offsets[takers], lengths)
        colour = _colours(network)
        later = np.bincount(np.where(colour[first] < colour[second], first, second), minlength=len(sizes))
        sooner = np.bincount(np.where(colour[first] < colour[second], second, first), minlength=len(sizes))
        share = 1.0 / np.maximum(1, np.maximum(later, sooner))
        count = int(colour.max(initial=0)) + 1
        self.forth = [self._batch(colour, share, c, 1) for c in range(count)]
        self.back = [self._batch(colour, share, c, -1) for c in range(count - 1, -1, -1)]
        self.bound = -np.inf

    def _batch(self, colour: Ints, share: Floats, now: int, way: int) -> MessageBatch:
        network, sizes, offsets = self.network, self.network.sizes, self.network.offsets
        first, second = network.ends.T
        mine = np.flatnonzero(colour == now)
        members = _ranges(offsets[mine], sizes[mine])
        begins = np.cumsum(sizes[mine]) - sizes[mine]
        ahead = (colour[second] - colour[first]) * way > 0
        sends_first = np.flatnonzero((colour[first] == now) & ahead)
        sends_second = np.flatnonzero((colour[second] == now) & ~ahead)
        pairs = np.concatenate([sends_first, sends_second])
        straight = np.arange(len(pairs)) < len(sends_first)
        sender = np.where(straight, first[pairs], second[pairs])
        taker = np.where(straight, second[pairs], first[pairs])
        ns, nt = sizes[sender], sizes[taker]
        source = _ranges(offsets[sender], ns)
        back = _ranges(np.where(straight, self.to_first[pairs], self.to_second[pairs]), ns)
        out = _ranges(np.where(straight, self.to_second[pairs], self.to_first[pairs]), nt)
        target = _ranges(offsets[taker], nt)
        blocks = [
            (network.tables[p].T if is_first else network.tables[p]).ravel()
            for p, is_first in zip(pairs.tolist(), straight.tolist(), strict=True)
        ]
        cells = np.concatenate([np.zeros(0), *blocks])
        inputs = np.cumsum(ns) - ns
        at = _ranges(np.repeat(inputs, nt), np.repeat(ns, nt))
        widths = np.repeat(ns, nt)
        rows = np.cumsum(widths) - widths
        heads = np.cumsum(nt) - nt
        return MessageBatch(
            members,
            begins,
            sizes[mine],
            source,
            np.repeat(share[sender], ns),
            back,
            cells,
            at,
            rows,
            heads,
            nt,
            out,
            target,
        )

    def turn(self, unary: Floats) -> None:
        """Forth and back once, under (choices,) unary costs."""
        self.total = unary + np.bincount(self.targets, self.values, len(unary))
        for batch in self.forth:
            self._send(batch)
        self.bound = self.network.constant + sum(self._send(batch) for batch in self.back)

    def _send(self, batch: MessageBatch) -> float:
        own = self.total[batch.members]
        least = np.minimum.reduceat(own, batch.begins)
        bound = float(least.sum())
        if not len(batch.rows):
            return bound
        normal = self.total
        normal[batch.members] = own - np.repeat(least, batch.sizes)
        given = batch.share * normal[batch.source] - self.values[batch.back]
        normal[batch.members] = own
        found = np.minimum.reduceat(given[batch.at] + batch.cells, batch.rows)
        low = np.minimum.reduceat(found, batch.heads)
        found -= np.repeat(low, batch.lengths)
        self.total += np.bincount(batch.target, found - self.values[batch.out], len(self.total))
        self.values[batch.out] = found
        return bound + float(low.sum())


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... lengths[0] of them, then those of the next."""
    inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + inside


def _colours(network: Network) -> Ints:
    """(variables,) colours from 0 that differ along each pair: each variable takes the first that is free,
    those with most neighbours first."""
    near: list[list[int]] = [[] for _ in network.sizes]
    for a, b in network.ends.tolist():
        near[a].append(b)
        near[b].append(a)
    colour = [-1] * len(near)
    for v in sorted(range(len(near)), key=lambda v: (-len(near[v]), v)):
        taken = {colour[u] for u in near[v]}
        colour[v] = next(c for c in range(len(near)) if c not in taken)
    return np.array(colour, np.int64)
