"""Seconds of a collective by closed forms, for each kind of topology (`costmodels.network.formulas`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from costmodels.hardware import GpuCluster, Hardware, Protocol, SharedMemory, Torus
from costmodels.network import formulas
from costmodels.network.route import Level, Route, by_group_size
from mesh_tf_core.ir.dims import SparseDim

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
            between = formulas.permute(size, level.rate, 1, level.latency)
        else:
            rounds = ROUNDS[kind]
            between = rounds * formulas.ring_gather(level.size, size / inner, level.rate, level.latency)
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
            over = formulas.torus_all_to_all(size / route.size_at("slice"), axes, _hops(torus))
        cores = core.size if core else 1
        return max(over, size / route.size * (cores - 1) / cores / core.rate if core else 0.0)
    once = max(
        formulas.switch_gather(core.size, size, core.rate) if core else 0.0,
        formulas.torus_gather(torus.size, size, torus.rate, all(s.ring for s in torus.segments), _hops(torus))
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
    return formulas.permute(size, link, sum(s.shift_hops for s in torus.segments), torus.latency)


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
        seconds = latency + 2 * formulas.switch_gather(route.size, size, rate)
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
    seconds = latency + rounds * formulas.switch_gather(n, size, rate)
    return _cost(seconds, f"ring, {protocol.name}", size, route, rate, latency)


def _tree(
    topology: GpuCluster, protocol: Protocol, size: float, route: Route, bandwidth: float
) -> CollectiveCost:
    """Formula (5): a chain inside each node, a tree over the nodes."""
    chain = (route.size_at("node") - 1) * protocol.tree_step_node.value
    depth = math.ceil(math.log2(route.size_at("network"))) * protocol.tree_step_network.value
    rate = _limited(protocol, bandwidth) * topology.tree_efficiency.value
    fixed = _launch(topology, route) + protocol.tree_latency.value
    seconds = fixed + formulas.tree_all_reduce(size, rate, chain + depth)
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
        here, there = (formulas.sent_once(experts, k * experts.size) for k in (1, inside))
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
    seconds = formulas.permute(size, rate, 0, 0.0) + latency
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
        seconds = formulas.permute(size, level.rate, 1, latency)
    elif kind == "all_to_all":
        seconds = (n - 1) * latency + formulas.switch_all_to_all(n, size, level.rate)
    else:
        rounds = ROUNDS[kind]
        seconds = rounds * formulas.ring_gather(n, size, level.rate, latency)
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
