"""The pairs of a query and a key that positions let see each other: causal, or within a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visible:
    """Pairs of queries with keys at position - back < key <= position + ahead.

    Attributes:
      starts: the position of the first query, of every shard.
    """

    starts: tuple[int, ...]
    queries: int
    keys: int
    back: int
    ahead: int

    def pairs(self, blocks: Sequence[int] = ()) -> int:
        """Those of the shard that has most. With sizes of blocks, the largest first: all pairs of the blocks
        that contain one, in the first size that divides queries, and the first that divides keys."""
        rest = self.queries, self.keys, self.back, self.ahead
        q, kv = (next((b for b in blocks if size % b == 0), 0) for size in (self.queries, self.keys))
        if q and kv:
            return max(visible_blocks(start, *rest, q, kv) for start in self.starts)
        return max(visible_pairs(start, *rest) for start in self.starts)


def visible_pairs(start: int, queries: int, keys: int, back: int, ahead: int) -> int:
    """Pairs of the queries from `start` with keys at position - back < key <= position + ahead."""

    def below(n: int) -> int:
        """Sum over i < n of min(i, keys)."""
        ramp = min(n, keys)
        return max(0, ramp * (ramp - 1) // 2 + (n - ramp) * keys)

    def summed(shift: int) -> int:
        """Over the queries, of how many keys lie before position + shift."""
        return below(max(0, start + queries + shift)) - below(max(0, start + shift))

    return summed(ahead + 1) - summed(1 - back)


def visible_blocks(start: int, queries: int, keys: int, back: int, ahead: int, q: int, kv: int) -> int:
    """Pairs of the blocks of q queries and kv keys that contain a pair of `visible_pairs`."""
    count = queries // q

    def summed(first: int) -> int:
        """Over the blocks of queries, of how many whole blocks of keys lie before a position; `first`: the
        position of the first block."""
        low, high = (min(count, max(0, -((first - edge) // q))) for edge in (0, keys))
        return _quotients(high - low, q, first + low * q, kv) + (count - high) * (keys // kv)

    return q * kv * (summed(start + q + ahead + kv - 1) - summed(start + 1 - back))


def _quotients(count: int, step: int, first: int, by: int) -> int:
    """Sum over i < count of (first + i * step) // by, as Euclid's algorithm counts it."""
    whole = count * (count - 1) // 2 * (step // by) + count * (first // by)
    step, first = step % by, first % by
    top = step * count + first
    return whole + (_quotients(top // by, by, top % by, step) if top >= by else 0)
