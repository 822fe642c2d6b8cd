r"""Closed forms for collectives.

V bytes of the WHOLE array of a group, n members, B bytes/s in one direction, a seconds per step.

Ring (one direction) and any alpha-beta link:
(1) all-gather, reduce-scatter: (n-1) a + V (n-1) / (n B)
(2) all-reduce: twice (1)
(3) permute (S bytes sent by each member): hops a + S / B
(4) all-reduce by a tree: 2 depth a + 2 V / B

Torus, several axes i at once, p_i links into each chip (2 on a ring, 1 at the end of a line), R = sum of
p_i B:
(5) all-gather, reduce-scatter: max(a sum of hops, V f / R), f = 1 if every axis is a ring, else (n-1)/n
(6) all-reduce: twice (5)
(7) all-to-all: max(a sum of hops, max over i of V n_i / (4 n p_i B)): the cut across axis i

Switch (every member has its own link of B):
(8) all-gather, reduce-scatter: V (n-1) / (n B); all-reduce twice that
(9) all-to-all: V (n-1) / (n² B)

Rows between tokens and their k of E experts, where a device or a node has e of these:
(10) rows that travel once for all of a token's experts there, over those that travel to each:
     (1 - C(S - e, k) / C(S, k)) E / (k e), where S = E; if the k are in g of G groups, S = E g / G, e are
     those in the i of these groups that it has a part of, and (10) is the mean over i

Levels (M outer groups of g members) add up: (8) of V/g bytes between the groups, then (8) of V bytes inside.

Sources: jax-ml/scaling-book sharding.md and gpus.md for (1)-(3), (5)-(9); Chan et al. 2007 for (1), (2), (4);
DeepSeek-AI 2024, arXiv 2412.19437, sections 2.1.2 and 3.2.2, for the rows that travel in (10).
"""

from collections.abc import Iterable
from math import comb

from mesh_tf_core.ir.dims import SparseDim


def ring_gather(size: int, full_bytes: float, bandwidth: float, step: float) -> float:
    """Equation (1), in seconds."""
    return (size - 1) * step + full_bytes * (size - 1) / (size * bandwidth)


def permute(sent_bytes: float, bandwidth: float, hops: float, step: float) -> float:
    """Equation (3), in seconds."""
    return hops * step + sent_bytes / bandwidth


def tree_all_reduce(full_bytes: float, bandwidth: float, latency: float) -> float:
    """Equation (4), in seconds; `latency` is that of one way through the tree, depth · a."""
    return 2 * latency + 2 * full_bytes / bandwidth


def torus_gather(size: int, full_bytes: float, rate: float, rings: bool, hop_seconds: float) -> float:
    """Equation (5), in seconds; `rate` is R, `hop_seconds` the latency of all hops."""
    share = 1.0 if rings else (size - 1) / size
    return max(hop_seconds, full_bytes * share / rate)


def torus_all_to_all(full_bytes: float, axes: Iterable[tuple[int, float]], hop_seconds: float) -> float:
    """Equation (7), in seconds; `axes` are pairs (n_i, p_i B)."""
    axes = tuple(axes)
    size = 1
    for n, _ in axes:
        size *= n
    return max([hop_seconds, *(full_bytes * n / (4 * size * rate) for n, rate in axes)])


def switch_gather(size: int, full_bytes: float, bandwidth: float) -> float:
    """Equation (8), in seconds."""
    return full_bytes * (size - 1) / (size * bandwidth)


def switch_all_to_all(size: int, full_bytes: float, bandwidth: float) -> float:
    """Equation (9), in seconds."""
    return full_bytes * (size - 1) / (size**2 * bandwidth)


def sent_once(experts: SparseDim, here: int) -> float:
    """Equation (10), where `here` of the experts of a token's k are together."""
    k, groups, most = experts.filled, experts.groups, experts.groups_filled
    of_group = experts.whole // groups
    parts = max(1, here // of_group)  # groups that are here, in whole or in part
    none = 0.0
    for i in range(max(0, most - groups + parts), min(parts, most) + 1):
        chosen = comb(parts, i) * comb(groups - parts, most - i) / comb(groups, most)
        none += chosen * comb(most * of_group - i * here // parts, k) / comb(most * of_group, k)
    return (1 - none) * experts.whole / (k * here)
