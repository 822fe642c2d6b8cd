"""The links between devices: a torus, a cluster of nodes, or processes that share memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from costmodels.frameworks.framework import Text
from costmodels.hardware.numbers import (
    Bandwidth,
    ByGroup,
    Checked,
    Count,
    Number,
    PositiveFraction,
    Time,
    listing,
)

ABOVE = 1 + 1e-9
"""Factor of a physical limit that rounding may come to."""


@dataclass(frozen=True, slots=True)
class Wraparound(Checked):
    """When the ends of a torus axis are joined.

    Rules: 'axis_size' (axes of `value` chips), 'multiples' (every axis is a multiple of `value`),
    'full_slice' (only the largest slice), 'never'.
    """

    rule: Literal["axis_size", "multiples", "full_slice", "never"]
    value: Count | None = None

    def fault(self) -> str | None:
        needed = self.rule in ("axis_size", "multiples") and self.value is None
        return f'the rule {self.rule!r} requires the field "value"' if needed else None


@dataclass(frozen=True, slots=True)
class Torus(Checked):
    """Chips on a 2-D or 3-D torus, slices joined by a data-centre network; bandwidths are one way."""

    kind: Literal["torus"]
    axes: Annotated[tuple[Number, ...], listing(Count, 1, 3)]
    links_per_axis: Count
    link_bandwidth_spec: Bandwidth | None = field(default=None, kw_only=True)
    link_bandwidth: Bandwidth
    hop_latency: Time
    wraparound: Wraparound
    network_bandwidth: Bandwidth
    network_latency: Time
    core_bandwidth: Bandwidth | None = None

    def fault(self) -> str | None:
        spec = self.link_bandwidth_spec
        above = spec is not None and self.link_bandwidth.value > spec.value * ABOVE
        return "link_bandwidth must not be above link_bandwidth_spec, the physical limit" if above else None


@dataclass(frozen=True, slots=True)
class Protocol:
    """One protocol of a GPU collective library: latency of a ring or tree and of a step, bandwidth."""

    name: Text
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
class GpuCluster(Checked):
    """Nodes of GPUs on a switch or on links, joined by network cards; bandwidths are one way per GPU.

    `node_bandwidth` is the rate of a ring over a group of that many GPUs; `launch` starts a collective,
    `network_launch` is added to one that leaves the node. Rows go to each of a token's experts, or `once` to
    all that a node or a device has (`dispatch`).
    """

    kind: Literal["cluster"]
    node_size: Count
    node_bandwidth_spec: Bandwidth
    node_bandwidth: ByGroup
    nic_bandwidth: Bandwidth
    node_egress: Bandwidth
    network_efficiency: PositiveFraction
    launch: Time
    network_launch: Time
    tree_efficiency: PositiveFraction
    protocols: Annotated[tuple[Protocol, ...], listing(Protocol, 1)]
    switch_reduce: SwitchReduce | None = None
    dispatch: Literal["once"] | None = None

    def fault(self) -> str | None:
        for size, number in self.node_bandwidth:
            if number.value > self.node_bandwidth_spec.value * ABOVE:
                return f"node_bandwidth.{size} must not be above node_bandwidth_spec, the physical limit"
        return None


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Devices that exchange data through one memory by copies; or, if the numbers were measured so, through
    collectives between processes that hold `devices_per_process` of them each, in the order of ranks."""

    kind: Literal["shared_memory"]
    copy_bandwidth: Bandwidth
    latency: Time
    devices_per_process: Count | None = None


TOPOLOGIES = {"torus": Torus, "cluster": GpuCluster, "shared_memory": SharedMemory}
"""All kinds of networks by their names in hardware files."""
