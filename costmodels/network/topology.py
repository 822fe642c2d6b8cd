r"""The placement of a mesh's axes on hardware, and the links that a group of devices then has.

A *placement* factors every mesh axis over the levels of the hardware: `core` (devices of one chip), the torus
axes `x`, `y`, `z`, and `slice` (over the data-centre network); or `node` and `network` for GPUs; or
`memory` for virtual devices. Within one level the later mesh axes are the inner ones, as in the row-major
device order.

A *route* lists the network of a collective over a set of mesh axes, level by level, innermost first:

(1) torus segment: n chips, `stride` links from one to the next. All groups run at once (the program is the
    same on every device), so `stride` rings share each link, and so do the groups of a chip's cores:
    rate = ports · B / (stride · groups per chip), with 2 ports on a ring and 1 at the end of a line;
(2) a segment is a ring when its torus axis wraps around and the segment reaches the axis' ends, else a line;
(3) node: every GPU has its own link to the switch: rate = what a ring over a group of that size reaches;
(4) network: the network cards of a node (or chip) are shared by all of its devices:
    rate per device = min(card, node egress / devices per node) · efficiency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from costmodels.hardware import GpuCluster, Hardware, SharedMemory, Torus
from costmodels.network.assignments import AxisAssignment, Levels, best_assignment, contiguous_assignment
from costmodels.network.route import Level, Route, TorusSegment, by_group_size
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.mesh import Mesh

TORUS_AXES = ("x", "y", "z")
BETWEEN = ("network", "slice")
"""The levels between nodes, and between slices."""


@dataclass(frozen=True)
class MeshPlacement:
    """The placement of a mesh on hardware.

    Attributes:
      hardware: the hardware.
      mesh: the mesh.
      assignment: for every mesh axis, its number of devices at every level of the network that it uses.
      shape: chips along each torus axis of a slice (empty for other hardware).
      assumptions: assumptions of the prediction where the mesh does not fit real slices or nodes.
    """

    hardware: Hardware = field(compare=False, repr=False)
    mesh: Mesh
    assignment: AxisAssignment
    shape: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = ()
    _routes: dict[frozenset[str], Route] = field(default_factory=dict, compare=False, repr=False)

    def factor(self, axis: str, level: str) -> int:
        """Devices along mesh axis `axis` at `level`."""
        return dict(dict(self.assignment)[axis]).get(level, 1)

    def route(self, axes: Iterable[str]) -> Route:
        """The route of a collective over the mesh axes `axes`; UserError for an unknown axis."""
        key = frozenset(axes)
        if key not in self._routes:
            for axis in key:
                self.mesh.size(axis)
            self._routes[key] = _route(self, key)
        return self._routes[key]

    @property
    def routes(self) -> frozenset[tuple[frozenset[str], Route]]:
        """The routes over all sets of mesh axes, with torus axes distinguished only by their links: the
        inputs of the cost of collectives."""
        names = self.mesh.names
        sets = (s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n))
        return frozenset((frozenset(axes), _anonymous(self.route(axes))) for axes in sets)

    @property
    def near(self) -> tuple[str, ...]:
        """The mesh axes inside nodes, or slices, if others connect these; none if all links are equal."""
        split = [a for a, n in self.mesh.axes if n > 1]
        inside = tuple(a for a in split if not any(self.factor(a, level) > 1 for level in BETWEEN))
        return inside if len(inside) < len(split) else ()

    def renamed(self, names: Mapping[str, str]) -> MeshPlacement:
        """The same with other names for the mesh's axes."""
        mesh = Mesh([(names[a], n) for a, n in self.mesh.axes])
        assignment = tuple((names[a], factors) for a, factors in self.assignment)
        return MeshPlacement(self.hardware, mesh, assignment, self.shape, self.assumptions)

    def describe(self) -> str:
        """The placement in words, one mesh axis after the other."""
        parts = []
        for axis, factors in self.assignment:
            where = " x ".join(f"{n} on {level}" for level, n in factors) or "one device"
            parts.append(f"{axis}: {where}")
        shape = f" (slice {'x'.join(map(str, self.shape))})" if self.shape else ""
        return "; ".join(parts) + shape


def place(
    hardware: Hardware, mesh: Mesh, assignment: Mapping[str, Mapping[str, int]] | None = None
) -> MeshPlacement:
    """Places a mesh on hardware. Equal arguments give equal placements.

    On a torus, the placement minimises the time of an all-gather of equal size over each mesh axis in turn.
    On GPU nodes, devices are in rank order, so the last mesh axes are inside a node. If the mesh does not fit
    the hardware, the attribute `assumptions` of the placement says what the prediction assumes.

    Args:
      hardware: the hardware.
      mesh: the mesh.
      assignment: an explicit placement: mesh axis -> level -> number of devices (1 for levels that are not
        given). None: the best placement.

    Raises:
      UserError: the explicit placement names an unknown axis or level, or the product of an axis's numbers is
        not the size of the axis.

    Example:
      >>> import costmodels, mesh_tf_core as mtf
      >>> costmodels.place(costmodels.load_hardware("h100"), mtf.Mesh("data:4;model:8")).assumptions
      ()
    """
    topology = hardware.topology
    levels = _levels(hardware)
    if assignment is not None:
        chosen = _checked(mesh, assignment, levels)
        assumptions: tuple[str, ...] = ()
    elif isinstance(topology, Torus):
        chosen, assumptions = best_assignment(mesh.axes, levels, lambda a: _score(hardware, mesh, a))
    elif isinstance(topology, GpuCluster):
        chosen, assumptions = contiguous_assignment(mesh.axes, int(topology.node_size.value))
    else:
        chosen, assumptions = tuple((n, (("memory", s),) if s > 1 else ()) for n, s in mesh.axes), ()
    placement = MeshPlacement(hardware, mesh, chosen, _shape(topology, chosen), assumptions)
    return _with_wrap_note(placement)


def one_slice(hardware: Hardware, devices: int) -> bool:
    """True if this many devices need no network between slices."""
    if not isinstance(hardware.topology, Torus):
        return True
    return hardware.chips(devices) <= math.prod(int(axis.value) for axis in hardware.topology.axes)


def _levels(hardware: Hardware) -> Levels:
    """Names and capacities of the hardware's levels, innermost first; 0 = unlimited."""
    topology = hardware.topology
    if isinstance(topology, Torus):
        dims = tuple((n, int(a.value)) for n, a in zip(TORUS_AXES, topology.axes, strict=False))
        return (("core", hardware.devices_per_chip), *dims, ("slice", 0))
    if isinstance(topology, GpuCluster):
        return (("node", int(topology.node_size.value)), ("network", 0))
    return (("memory", 0),)


def _checked(mesh: Mesh, assignment: Mapping[str, Mapping[str, int]], levels: Levels) -> AxisAssignment:
    names = [name for name, _ in levels]
    for axis, factors in assignment.items():
        product = math.prod(factors.values())
        if product != mesh.size(axis):
            raise UserError(
                f"placement of mesh axis {axis!r}: the product of its factors is {product}, but the axis "
                f"has {mesh.size(axis)} devices ({mesh}); make the two equal"
            )
        for level in factors:
            if level not in names:
                raise UserError(
                    f"placement of mesh axis {axis!r}: the hardware has no level {level!r}; "
                    f"{known_names(level, names)}"
                )
    missing = [n for n, s in mesh.axes if s > 1 and n not in assignment]
    if missing:
        raise UserError(
            f"placement of mesh {mesh}: axis {missing[0]!r} is missing; give the levels of every axis"
        )
    for level, capacity in levels:
        used = math.prod(factors.get(level, 1) for factors in assignment.values())
        if capacity and used > capacity:
            raise UserError(
                f"placement of mesh {mesh}: level {level!r} has {capacity} devices, but the placement "
                f"uses {used}; reduce the factors of this level"
            )
    return tuple(
        (
            n,
            tuple(
                (lv, assignment[n][lv]) for lv in names if n in assignment and assignment[n].get(lv, 1) > 1
            ),
        )
        for n, _ in mesh.axes
    )


def _shape(topology: Torus | GpuCluster | SharedMemory, assignment: AxisAssignment) -> tuple[int, ...]:
    if not isinstance(topology, Torus):
        return ()
    names = TORUS_AXES[: len(topology.axes)]
    return tuple(math.prod(dict(factors).get(t, 1) for _, factors in assignment) for t in names)


def wraps(topology: Torus, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """The axes of a slice of `shape` chips whose ends are joined."""
    rule, value = topology.wraparound.rule, topology.wraparound.value
    if rule == "axis_size" and value is not None:
        return tuple(n == value.value for n in shape)
    if rule == "multiples" and value is not None:
        return (all(n % value.value == 0 for n in shape),) * len(shape)
    if rule == "full_slice":
        return (all(n == full.value for n, full in zip(shape, topology.axes, strict=True)),) * len(shape)
    return (False,) * len(shape)


def _with_wrap_note(placement: MeshPlacement) -> MeshPlacement:
    topology = placement.hardware.topology
    if not isinstance(topology, Torus):
        return placement
    names = TORUS_AXES[: len(topology.axes)]
    open_axes = [
        f"{name} ({size})"
        for name, size, wrapped in zip(names, placement.shape, wraps(topology, placement.shape), strict=True)
        if size > 2 and not wrapped
    ]
    if not open_axes:
        return placement
    note = (
        f"no wraparound links on torus axis {', '.join(open_axes)}, by the rule "
        f"{topology.wraparound.rule!r} of this hardware"
    )
    return replace(placement, assumptions=(*placement.assumptions, note))


def _score(hardware: Hardware, mesh: Mesh, assignment: AxisAssignment) -> tuple[float, ...]:
    """Least is best.

    First whole torus axes (each mesh axis that shares one with another counts), as runtimes lay meshes out;
    then seconds per byte of all-gathers over each mesh axis in turn; then the most compact slice.
    """
    shape = _shape(hardware.topology, assignment)
    placement = MeshPlacement(hardware, mesh, assignment, shape)
    users = [level for _, factors in assignment for level, _ in factors if level != "core"]
    seconds = sum(_seconds_per_byte(_route(placement, frozenset((n,)))) for n, size in mesh.axes if size > 1)
    return len(users) - len(set(users)), float(f"{seconds:.9e}"), sum(shape)


def _seconds_per_byte(route: Route) -> float:
    """Seconds of an all-gather, without latency: inside the slice, then between slices."""
    inner, within, between = route.size_at("core") * route.size_at("torus"), 0.0, 0.0
    for level in route.levels:
        share = (
            1.0 if level.segments and all(s.ring for s in level.segments) else (level.size - 1) / level.size
        )
        if level.name == "slice":
            between = share / inner / level.rate
        else:
            within = max(within, share / level.rate)
    return within + between


def _route(placement: MeshPlacement, axes: frozenset[str]) -> Route:
    topology = placement.hardware.topology
    names = tuple(n for n in placement.mesh.names if n in axes)
    size, devices = placement.mesh.group_size(names), placement.mesh.devices
    if isinstance(topology, Torus):
        levels = _torus_levels(placement, topology, axes)
    elif isinstance(topology, GpuCluster):
        levels = _cluster_levels(placement, topology, axes)
    else:
        rate = topology.copy_bandwidth.value / devices
        levels = (Level("memory", size, rate, topology.latency.value),)
    spanned = processes_spanned(placement.mesh, names, placement.hardware.devices_per_process)
    return Route(names, size, devices, tuple(level for level in levels if level.size > 1), spanned)


def _anonymous(route: Route) -> Route:
    """The route without the names of mesh and torus axes."""
    levels = (
        replace(level, segments=tuple(replace(segment, axis="") for segment in level.segments))
        for level in route.levels
    )
    return replace(route, axes=(), levels=tuple(levels))


def processes_spanned(mesh: Mesh, axes: Iterable[str], devices_per_process: int | None) -> int:
    """Number of processes of the widest group over `axes`, if each process holds this many devices, in the
    order of ranks (None: one process holds all)."""
    if devices_per_process is None:
        return 1
    return max(len({rank // devices_per_process for rank in group}) for group in mesh.groups(axes))


def _product(placement: MeshPlacement, level: str, axes: Iterable[str]) -> int:
    return math.prod(placement.factor(axis, level) for axis in axes)


def _torus_levels(placement: MeshPlacement, topology: Torus, axes: frozenset[str]) -> tuple[Level, ...]:
    names = placement.mesh.names
    cores, cores_used = _product(placement, "core", axes), _product(placement, "core", names)
    groups_per_chip = cores_used // cores
    torus_names = TORUS_AXES[: len(topology.axes)]
    wrapped = wraps(topology, placement.shape)
    segments = tuple(
        segment
        for name, wrap in zip(torus_names, wrapped, strict=True)
        if (segment := _segment(placement, topology, name, wrap, axes, groups_per_chip)) is not None
    )
    chips = math.prod(s.size for s in segments)
    core_rate = topology.core_bandwidth.value if topology.core_bandwidth else topology.link_bandwidth.value
    slices = _product(placement, "slice", axes)
    return (
        Level("core", cores, core_rate, 0.0),
        Level("torus", chips, sum(s.rate for s in segments), topology.hop_latency.value, segments),
        Level("slice", slices, topology.network_bandwidth.value / cores_used, topology.network_latency.value),
    )


def _segment(
    placement: MeshPlacement, topology: Torus, name: str, wrap: bool, axes: frozenset[str], groups: int
) -> TorusSegment | None:
    """Equations (1) and (2) for one torus axis; None when the group does not extend along it."""
    size, stride, inner, outermost = 1, 1, 1, True
    for axis in reversed(placement.mesh.names):  # innermost first
        factor = placement.factor(axis, name)
        if factor == 1:
            continue
        if axis in axes:
            size, stride, outermost = size * factor, inner, True
        else:
            inner, outermost = inner * factor, False
    if size == 1:
        return None
    ring = wrap and outermost and size > 2
    per_side = topology.links_per_axis.value / 2
    ports = 2 if ring else 1
    rate = ports * per_side * topology.link_bandwidth.value / (stride * groups)
    return TorusSegment(name, size, stride, ring, ports, rate)


def _cluster_levels(
    placement: MeshPlacement, topology: GpuCluster, axes: frozenset[str]
) -> tuple[Level, ...]:
    """Equations (3) and (4)."""
    in_node, nodes = _product(placement, "node", axes), _product(placement, "network", axes)
    per_node = _product(placement, "node", placement.mesh.names)
    card = min(topology.nic_bandwidth.value, topology.node_egress.value / per_node)
    return (
        Level("node", in_node, by_group_size(topology.node_bandwidth, in_node), 0.0),
        Level("network", nodes, card * topology.network_efficiency.value, 0.0),
    )
