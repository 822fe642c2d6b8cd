"""The links between devices: a torus, a cluster of nodes, or processes that share memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from costmodels.hardware.numbers import Bandwidth, ByGroup, Count, Length, PositiveFraction, Time


@dataclass(frozen=True, slots=True)
class Wraparound:
    """When the ends of a torus axis are joined.

    Rules: 'axis_size' (axes of `value` chips), 'multiples' (every axis is a multiple of `value`),
    'full_slice' (only the largest slice), 'never'.
    """

    rule: Literal["axis_size", "multiples", "full_slice", "never"]
    value: Count | None


@dataclass(frozen=True, slots=True)
class Torus:
    """Chips on a 2-D or 3-D torus, slices joined by a data-centre network; bandwidths are one way."""

    kind = "torus"
    """In hardware files."""
    axes: Annotated[tuple[Count, ...], Length(1, 3)]
    links_per_axis: Count
    link_bandwidth_spec: Bandwidth | None
    link_bandwidth: Bandwidth
    hop_latency: Time
    wraparound: Wraparound
    network_bandwidth: Bandwidth
    network_latency: Time
    core_bandwidth: Bandwidth | None = None


@dataclass(frozen=True, slots=True)
class Protocol:
    """One protocol of a GPU collective library: latency of a ring or tree and of a step, bandwidth."""

    name: str
    ring_latency: Time
    tree_latency: Time
    ring_step_node: Time
    ring_step_network: Time
    tree_step_node: Time
    tree_step_network: Time
    bandwidth_factor: PositiveFraction
    bandwidth_limit: Bandwidth | None = None


@dataclass(frozen=True, slots=True)
class SwitchReduce:
    """All-reduce done by the switch: algorithm bandwidth by group size, and its latency."""

    bandwidth: ByGroup
    latency: Time


@dataclass(frozen=True, slots=True)
class GpuCluster:
    """Nodes of GPUs on a switch or on links, joined by network cards; bandwidths are one way per GPU.

    `node_bandwidth` is the rate of a ring over a group of that many GPUs; `launch` starts a collective,
    `network_launch` is added to one that leaves the node. Rows go to each of a token's experts, or `once` to
    all that a node or a device has (`dispatch`).
    """

    kind = "cluster"
    """In hardware files."""
    node_size: Count
    node_bandwidth_spec: Bandwidth
    node_bandwidth: ByGroup
    nic_bandwidth: Bandwidth
    node_egress: Bandwidth
    network_efficiency: PositiveFraction
    launch: Time
    network_launch: Time
    tree_efficiency: PositiveFraction
    protocols: Annotated[tuple[Protocol, ...], Length(1)]
    switch_reduce: SwitchReduce | None = None
    dispatch: Literal["once"] | None = None


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Devices that exchange data through one memory by copies; or, if the numbers were measured so, through
    collectives between processes that hold `devices_per_process` of them each, in the order of ranks."""

    kind = "shared_memory"
    """In hardware files."""
    copy_bandwidth: Bandwidth
    latency: Time
    devices_per_process: Count | None = None


TOPOLOGIES: tuple[type[Torus] | type[GpuCluster] | type[SharedMemory], ...] = (
    Torus,
    GpuCluster,
    SharedMemory,
)
"""All kinds of networks."""
