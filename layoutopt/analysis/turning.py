"""The link speed at which rare synchronisation starts to pay: the ways that a search compared, with faster
and slower links between replicas.

Either the layouts of the search are predicted on every link, or every way is searched again there.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from costmodels.hardware import Hardware
from costmodels.hardware.vary import NETWORK, varied
from costmodels.network.topology import MeshPlacement, place
from costmodels.pricing.pricer import pricer
from layoutopt.optimize.evaluator import evaluate
from layoutopt.plan.build import options_of
from layoutopt.plan.schema import Predicted
from layoutopt.plan.ways import AtLink, ReplicaStrategy, Turning
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.space.decisions import SearchSpace
from mesh_tf_core.errors import InfeasibleError, LimitError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.diloco import DiLoCo

FACTORS = tuple(4.0**power for power in range(-4, 5))
"""Factors of the link's bandwidth, where layouts are only priced again."""
SEARCHED = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""Factors of the link's bandwidth, where layouts are searched again."""
HALVINGS = 12
LINKS = {
    "slice": ("topology.network_bandwidth",),
    "network": ("topology.nic_bandwidth", "topology.node_egress"),
}
"""Level of a placement -> the numbers that determine its speed."""


def link_times(hardware: Hardware, mesh: Mesh, axis: str, times: float) -> Hardware:
    """The hardware with the link of an axis times as fast; where that is like all others, with all."""
    placed = place(hardware, mesh)
    paths = next((paths for level, paths in LINKS.items() if placed.factor(axis, level) > 1), NETWORK)
    return varied(hardware, lambda path, _: times if path.startswith(paths) else 1.0)


def gigabits(placed: MeshPlacement, axis: str) -> float:
    """Gbit/s between a replica and the others, summed over its devices."""
    return 8e-9 * placed.route((axis,)).levels[-1].rate * placed.mesh.devices / placed.mesh.size(axis)


def turning(
    ways: Sequence[ReplicaStrategy],
    build: Callable[[ReplicaStrategy], Model],
    hardware: Hardware,
    factors: Sequence[float] = FACTORS,
) -> Turning | None:
    """The comparison of some ways on other links, for the link of the fastest way that synchronises rarely;
    None if there is none besides the synchronous way.

    Args:
      build: returns the model of a way.
    """
    rare = _rare(ways)
    if rare is None:
        return None
    axis, mesh = DiLoCo.parse(rare.diloco).axis, Mesh(rare.mesh)
    priced = [way for way in ways if way.step_seconds is not None]
    layouts = ((way, Layout(way.layout, way.refined), options_of(way)) for way in priced)
    known = {w.name: evaluate(build(w), Mesh(w.mesh), layout, hardware, o) for w, layout, o in layouts}

    def at(times: float) -> AtLink:
        machine = link_times(hardware, mesh, axis, times)
        found = {name: replace(each, prices=pricer(machine, mesh)).predicted for name, each in known.items()}
        return _point(found, times, gigabits(place(machine, mesh), axis))

    points = tuple(map(at, factors))
    return Turning(axis=axis, at=points, turns=_turns(points, at))


def searched(
    ways: Sequence[ReplicaStrategy],
    build: Callable[[ReplicaStrategy], Model],
    hardware: Hardware,
    asked: SearchSpace,
    limit: float,
    clock: Clock = UNLIMITED,
    factors: Sequence[float] = SEARCHED,
) -> Turning | None:
    """The same with the best layouts on every link; ways that ran out of time are left out there.

    Args:
      asked: further arguments of the searches.
      limit: bytes that a device may hold.
    """
    from layoutopt.optimize.entry import Limits, search

    rare = _rare(ways)
    if rare is None:
        return None
    axis, mesh = DiLoCo.parse(rare.diloco).axis, Mesh(rare.mesh)
    known = [(way, build(way)) for way in ways if way.step_seconds is not None]
    left = itertools.count(len(factors) * len(known), -1)
    points = []
    for times in factors:
        machine = link_times(hardware, mesh, axis, times)
        found: dict[str, Predicted] = {}
        for way, model in known:
            own = clock.part(1 / next(left))
            space = asked.but(diloco=way.diloco or None)
            limits = Limits(memory=limit, time_limit=own.rest, alternatives=False)
            with suppress(LimitError, InfeasibleError):
                plan = search(model, mesh, None, machine, space, limits)
                found[way.name] = plan.predicted
        points.append(_point(found, times, gigabits(place(machine, mesh), axis)))
    known_ends = (
        math.sqrt(a.gigabits * b.gigabits) for a, b in itertools.pairwise(points) if a.pays != b.pays
    )
    return Turning(axis=axis, at=tuple(points), turns=tuple(known_ends), searched=True)


def _point(found: Mapping[str, Predicted], times: float, rate: float) -> AtLink:
    seconds = {name: p.step_seconds for name, p in found.items()}
    mfu = {name: p.mfu for name, p in found.items() if p.mfu is not None}
    return AtLink(times=times, gigabits=rate, seconds=seconds, mfu=mfu)


def _rare(ways: Sequence[ReplicaStrategy]) -> ReplicaStrategy | None:
    """The fastest way that synchronises rarely, if the synchronous one is there too."""
    priced = [way for way in ways if way.step_seconds is not None]
    if not any(not way.diloco for way in priced):
        return None
    return min((w for w in priced if w.diloco), key=lambda w: w.step_seconds or math.inf, default=None)


def _turns(points: Sequence[AtLink], at: Callable[[float], AtLink]) -> tuple[float, ...]:
    """Gigabits at which the fastest way begins, or ends, to meet rarely."""
    found = []
    for low, high in itertools.pairwise(points):
        if low.pays == high.pays:
            continue
        before = low.pays
        for _ in range(HALVINGS):
            middle = at(math.sqrt(low.times * high.times))
            low, high = (middle, high) if middle.pays == before else (low, middle)
        found.append(math.sqrt(low.gigabits * high.gigabits))
    return tuple(found)
