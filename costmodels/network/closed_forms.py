"""Seconds of a collective by closed forms, for each kind of topology (`costmodels.network.closed_forms`).

Closed forms for collectives.

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

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import comb

from costmodels.hardware import GpuCluster, Hardware, Protocol, SharedMemory, Torus
from costmodels.network.route import Level, Route, by_group_size
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


ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Kinds that are predicted as gathers of the array -> number of gathers, one after the other."""
OWN = ("all_to_all", "permute")
"""Kinds with their own closed forms on every network."""


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The predicted time of a collective.

    Attributes:
      seconds: the predicted seconds.
      algorithm: the algorithm, such as a ring; "measured" if a measured curve gave the time.
      words: the formula with its numbers.
    """

    seconds: float
    algorithm: str
    words: str


def closed_forms(
    hardware: Hardware, kind: str, size: float, route: Route, experts: SparseDim | None = None
) -> Iterator[CollectiveCost]:
    """The algorithms that the network can use, each with its time; `size` is the bytes of the whole array,
    `experts` as of `collective_cost`."""
    topology = hardware.topology
    if isinstance(topology, Torus):
        yield _torus(kind, size, route)
    elif isinstance(topology, GpuCluster):
        yield from _cluster(topology, kind, size, route, experts)
    else:
        yield _shared_memory(topology, kind, size, route)


# -------------------------------------------------------------------------------------------------- torus


def _torus(kind: str, size: float, route: Route) -> CollectiveCost:
    """Inside a slice over all torus axes at once (formulas 5 to 7); over slices level by level."""
    inner = route.size_at("core") * route.size_at("torus")
    within, between = _slice_seconds(kind, size, route), 0.0
    level = route.level("slice")
    if level is not None:
        if kind == "all_to_all":
            moved = size / route.size * (level.size - 1) / level.size
            between = (level.size - 1) * level.latency + moved / level.rate
        elif kind == "permute":
            between = permute(size, level.rate, 1, level.latency)
        else:
            rounds = ROUNDS[kind]
            between = rounds * ring_gather(level.size, size / inner, level.rate, level.latency)
    algorithm = "torus" if level is None else "torus, then slices"
    words = f"{amount(size)} over {_torus_words(route)}"
    return CollectiveCost(within + between, algorithm, words)


def _slice_seconds(kind: str, size: float, route: Route) -> float:
    """Within one slice: the links between chips and those between a chip's cores work at the same time."""
    core, torus = route.level("core"), route.level("torus")
    if kind == "permute":
        return max(size / core.rate if core else 0.0, _torus_permute(size, torus))
    if kind == "all_to_all":
        over = 0.0
        if torus is not None:
            axes = ((s.size, s.rate) for s in torus.segments)
            over = torus_all_to_all(size / route.size_at("slice"), axes, _hops(torus))
        cores = core.size if core else 1
        return max(over, size / route.size * (cores - 1) / cores / core.rate if core else 0.0)
    once = max(
        switch_gather(core.size, size, core.rate) if core else 0.0,
        torus_gather(torus.size, size, torus.rate, all(s.ring for s in torus.segments), _hops(torus))
        if torus
        else 0.0,
    )
    return once * ROUNDS[kind]


def _hops(torus: Level) -> float:
    """Seconds of latency through all axes."""
    return torus.latency * sum(segment.hops for segment in torus.segments)


def _torus_permute(size: float, torus: Level | None) -> float:
    """A shift by one along every axis of the group: the slowest link, all hops; formula (4)."""
    if torus is None:
        return 0.0
    link = min(segment.rate / segment.ports for segment in torus.segments)
    return permute(size, link, sum(s.shift_hops for s in torus.segments), torus.latency)


def _torus_words(route: Route) -> str:
    parts = []
    for level in route.levels:
        if level.name == "core":
            parts.append(f"{level.size} cores at {_rate(level.rate)}")
        for s in level.segments:
            form = f"{'ring' if s.ring else 'line'} {s.axis} of {s.size}"
            parts.append(f"{form}{f' (stride {s.stride})' if s.stride > 1 else ''} at {_rate(s.rate)}")
        if level.segments:
            parts.append(f"{_hops(level) * 1e6:g} us for hops")
        if level.name == "slice":
            parts.append(f"{level.size} slices at {_rate(level.rate)} + {level.latency * 1e6:g} us per step")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------ cluster


def _cluster(
    topology: GpuCluster, kind: str, size: float, route: Route, experts: SparseDim | None
) -> Iterator[CollectiveCost]:
    """Algorithms and protocols that a GPU collective library can choose from."""
    bandwidth = _ring_bandwidth(route)
    for protocol in topology.protocols:
        if kind == "all_to_all":
            yield _exchange(topology, protocol, size, route, experts)
        elif kind == "permute":
            yield _send(topology, protocol, size, route)
        else:
            yield _ring(topology, protocol, kind, size, route, bandwidth)
        if kind == "all_reduce":
            yield _tree(topology, protocol, size, route, bandwidth)
    switch = topology.switch_reduce
    if (
        kind == "all_reduce"
        and switch
        and route.level("network") is None
        and route.size >= switch.bandwidth[0][0]
    ):
        rate = by_group_size(switch.bandwidth, route.size)
        latency = _launch(topology, route) + switch.latency.value
        seconds = latency + 2 * switch_gather(route.size, size, rate)
        yield _cost(seconds, "switch reduction", size, route, rate, latency)


def _ring_bandwidth(route: Route) -> float:
    """Bytes/s of a ring over the group: its slowest part; the cards of all its members carry it."""
    node, network = route.level("node"), route.level("network")
    members = node.size if node else 1
    rates = ([node.rate] if node else []) + ([network.rate * members] if network else [])
    return min(rates)


def _launch(topology: GpuCluster, route: Route) -> float:
    return topology.launch.value + (topology.network_launch.value if route.level("network") else 0.0)


def _limited(protocol: Protocol, bandwidth: float) -> float:
    limit = protocol.bandwidth_limit.value if protocol.bandwidth_limit else math.inf
    return min(bandwidth * protocol.bandwidth_factor.value, limit)


def _ring(
    topology: GpuCluster, protocol: Protocol, kind: str, size: float, route: Route, bandwidth: float
) -> CollectiveCost:
    """Formula (1) or (2); the steps that cross nodes are slower ones."""
    n, nodes = route.size, route.size_at("network")
    rounds = ROUNDS[kind]
    steps = rounds * (n - 1)
    crossing = min(steps, rounds * nodes if kind == "all_reduce" else nodes - 1) if nodes > 1 else 0
    latency = _launch(topology, route) + protocol.ring_latency.value
    latency += (
        steps - crossing
    ) * protocol.ring_step_node.value + crossing * protocol.ring_step_network.value
    rate = _limited(protocol, bandwidth)
    seconds = latency + rounds * switch_gather(n, size, rate)
    return _cost(seconds, f"ring, {protocol.name}", size, route, rate, latency)


def _tree(
    topology: GpuCluster, protocol: Protocol, size: float, route: Route, bandwidth: float
) -> CollectiveCost:
    """Formula (5): a chain inside each node, a tree over the nodes."""
    chain = (route.size_at("node") - 1) * protocol.tree_step_node.value
    depth = math.ceil(math.log2(route.size_at("network"))) * protocol.tree_step_network.value
    rate = _limited(protocol, bandwidth) * topology.tree_efficiency.value
    fixed = _launch(topology, route) + protocol.tree_latency.value
    seconds = fixed + tree_all_reduce(size, rate, chain + depth)
    return _cost(seconds, f"tree, {protocol.name}", size, route, rate, fixed + 2 * (chain + depth))


def _exchange(
    topology: GpuCluster, protocol: Protocol, size: float, route: Route, experts: SparseDim | None
) -> CollectiveCost:
    """Formula (9) inside the node, and what leaves it through the network cards, at the same time.

    Of rows that travel `once`, a node receives a token's if it has any of its experts, and passes it on to
    each device that has any (10).
    """
    node, network = route.level("node"), route.level("network")
    n, inside = route.size, route.size_at("node")
    how, here, there, arrived = "exchange", 1.0, 1.0, inside
    if topology.dispatch == "once" and experts is not None:
        here, there = (sent_once(experts, k * experts.size) for k in (1, inside))
        how, arrived = f"exchange of {there:.0%} of the rows between nodes, {here:.0%} inside", n
    each = size / n**2  # between two devices
    within = here * each * arrived * (1 - 1 / inside) / _limited(protocol, node.rate) if node else 0.0
    across = there * each * (n - inside) / _limited(protocol, network.rate) if network else 0.0
    latency = _one_step(topology, protocol, route)
    rate = size / n / max(within, across)
    return _cost(latency + max(within, across), f"{how}, {protocol.name}", size, route, rate, latency)


def _send(topology: GpuCluster, protocol: Protocol, size: float, route: Route) -> CollectiveCost:
    """Formula (4): the devices at a node's end send through the network card."""
    rate = _limited(protocol, min(level.rate for level in route.levels))
    latency = _one_step(topology, protocol, route)
    seconds = permute(size, rate, 0, 0.0) + latency
    return _cost(seconds, f"send, {protocol.name}", size, route, rate, latency)


def _one_step(topology: GpuCluster, protocol: Protocol, route: Route) -> float:
    step = protocol.ring_step_network if route.level("network") else protocol.ring_step_node
    return _launch(topology, route) + protocol.ring_latency.value + step.value


def _cost(
    seconds: float, algorithm: str, size: float, route: Route, rate: float, latency: float
) -> CollectiveCost:
    where = " x ".join(f"{level.size} {level.name}" for level in route.levels)
    words = f"{amount(size)} over {route.size} ({where}) at {_rate(rate)} + {latency * 1e6:.3g} µs"
    return CollectiveCost(seconds, algorithm, words)


# ------------------------------------------------------------------------------------------ shared memory


def _shared_memory(topology: SharedMemory, kind: str, size: float, route: Route) -> CollectiveCost:
    """Every device copies what it lacks through the one memory; all groups of the mesh do so at once."""
    (level,) = route.levels
    n, latency = route.size, topology.latency.value
    if kind == "permute":
        seconds = permute(size, level.rate, 1, latency)
    elif kind == "all_to_all":
        seconds = (n - 1) * latency + switch_all_to_all(n, size, level.rate)
    else:
        seconds = ROUNDS[kind] * ring_gather(n, size, level.rate, latency)
    words = f"{amount(size)} over {n} at {_rate(level.rate)} + {latency * 1e6:g} us per step"
    return CollectiveCost(seconds, "copies", words)


def amount(size: float) -> str:
    """Bytes as text, such as \"1.5 GiB\"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:,.0f} B"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.4g} GB/s"
