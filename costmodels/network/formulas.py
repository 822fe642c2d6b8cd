r"""Closed forms for collectives.

V bytes of the FULL array of a group, n members, B bytes/s one way, a seconds a step.

Ring (one direction) and any alpha-beta link:
(1) all-gather, reduce-scatter: (n-1) a + V (n-1) / (n B)
(2) all-reduce: twice (1)
(3) all-to-all (V/n with each member): (n-1) a + V (n-1) / (2 n B)
(4) permute (S bytes sent by each member): hops a + S / B
(5) all-reduce by a tree: 2 depth a + 2 V / B

Torus, several axes i at once, p_i links into each chip (2 on a ring, 1 at the end of a line), R = sum of
p_i B:
(6) all-gather, reduce-scatter: max(a sum of hops, V f / R), f = 1 if every axis is a ring, else (n-1)/n
(7) all-reduce: twice (6)
(8) all-to-all: max(a sum of hops, max over i of V n_i / (4 n p_i B)): the cut across axis i

Switch (every member has its own link of B):
(9) all-gather, reduce-scatter: V (n-1) / (n B); all-reduce twice that
(10) all-to-all: V (n-1) / (n² B)

Levels (M outer groups of g members, inner rate W, outer rate N for each member):
(11) all-gather: (M-1)/M (V/g) / N + (g-1)/g V / W; all-reduce: twice that
(12) all-gather whose levels overlap: V max over i of (D_i-1) / (D_i max(Y, S_{i-1}) W_i), with degree D_i,
     S_{i-1} devices below level i and W_i per device, for an array that is also split Y ways

Sources: jax-ml/scaling-book sharding.md and gpus.md for (1)-(4), (6)-(10), (12); Chan et al. 2007 for (1),
(2), (5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ring_gather(size: int, full_bytes: float, bandwidth: float, step: float) -> float:
    """Equation (1), in seconds."""
    return (size - 1) * step + full_bytes * (size - 1) / (size * bandwidth)


def ring_all_to_all(size: int, full_bytes: float, bandwidth: float, step: float) -> float:
    """Equation (3), in seconds."""
    return (size - 1) * step + full_bytes * (size - 1) / (2 * size * bandwidth)


def permute(sent_bytes: float, bandwidth: float, hops: float, step: float) -> float:
    """Equation (4), in seconds."""
    return hops * step + sent_bytes / bandwidth


def tree_all_reduce(full_bytes: float, bandwidth: float, latency: float) -> float:
    """Equation (5), in seconds; `latency` is that of one way through the tree, depth · a."""
    return 2 * latency + 2 * full_bytes / bandwidth


def torus_gather(size: int, full_bytes: float, rate: float, rings: bool, hop_seconds: float) -> float:
    """Equation (6), in seconds; `rate` is R, `hop_seconds` the latency of all hops."""
    share = 1.0 if rings else (size - 1) / size
    return max(hop_seconds, full_bytes * share / rate)


def torus_all_to_all(full_bytes: float, axes: Iterable[tuple[int, float]], hop_seconds: float) -> float:
    """Equation (8), in seconds; `axes` are pairs (n_i, p_i B)."""
    axes = tuple(axes)
    size = 1
    for n, _ in axes:
        size *= n
    return max([hop_seconds, *(full_bytes * n / (4 * size * rate) for n, rate in axes)])


def switch_gather(size: int, full_bytes: float, bandwidth: float) -> float:
    """Equation (9), in seconds."""
    return full_bytes * (size - 1) / (size * bandwidth)


def switch_all_to_all(size: int, full_bytes: float, bandwidth: float) -> float:
    """Equation (10), in seconds."""
    return full_bytes * (size - 1) / (size**2 * bandwidth)


def hierarchical_gather(
    inner: int, outer: int, full_bytes: float, inner_bandwidth: float, outer_bandwidth: float
) -> float:
    """Equation (11), in seconds."""
    over = switch_gather(outer, full_bytes / inner, outer_bandwidth)
    return over + switch_gather(inner, full_bytes, inner_bandwidth)


def overlapped_gather(
    full_bytes: float, degrees: Sequence[int], bandwidths: Sequence[float], split: int = 1
) -> float:
    """Equation (12), in seconds; levels innermost first, bandwidths per device."""
    below, worst = 1, 0.0
    for degree, bandwidth in zip(degrees, bandwidths, strict=True):
        worst = max(worst, (degree - 1) / (degree * max(split, below) * bandwidth))
        below *= degree
    return full_bytes * worst
