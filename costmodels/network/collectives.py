"""Seconds of a collective over axes of a placed mesh.

BYTES ARE THOSE OF THE WHOLE ARRAY OF ONE GROUP, not those of one device:

| collective     | `bytes` is the size of                                         | on a device before |
|----------------|----------------------------------------------------------------|--------------------|
| all_reduce     | the array that every device holds (whole, but a partial sum)   | bytes              |
| reduce_scatter | the array before it is scattered                               | bytes              |
| all_gather     | the array after it is gathered                                 | bytes / n          |
| all_to_all     | the array of the whole group                                   | bytes / n          |
| permute        | what ONE device sends (the one exception: nothing is gathered) | bytes              |

`full_bytes` converts the bytes of one device. Every time is zero in a group of one and never falls with
bytes: all closed forms are sums, maxima and minima of non-decreasing functions, and measured curves are
monotone.

Where hardware carries measured curves they are used; otherwise the closed forms of
`costmodels.network.closed_forms`: torus rings over all axes at once, hierarchical over slices; rings, trees
and the switch's own reduction on GPU nodes, whichever is least, as the library chooses too.
"""

from collections.abc import Iterable, Iterator

from costmodels.hardware import CollectiveCurve, Hardware, Torus
from costmodels.network.closed_forms import OWN, ROUNDS, CollectiveCost, amount, closed_forms
from costmodels.network.route import Route
from costmodels.network.topology import MeshPlacement
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir import program
from mesh_tf_core.ir.dims import SparseDim

COLLECTIVES = tuple(program.COLLECTIVES)
"""Names of all kinds."""


def check_prices(kinds: Iterable[str]) -> None:
    """Raises TypeError if a kind of collective has no closed form."""
    for kind in kinds:
        if kind not in (*ROUNDS, *OWN):
            raise TypeError(
                f"collective {kind!r} has no formula for its time; write the formula in "
                f"costmodels/network/closed_forms.py and add {kind!r} to OWN, or, if it takes as long as a "
                "number of all-gathers, add that number to ROUNDS"
            )


check_prices(COLLECTIVES)


def full_bytes(kind: str, local_bytes: float, group_size: int) -> float:
    """The bytes of the whole array of a collective, from the bytes of its input on one device.

    Args:
      kind: one of COLLECTIVES.
      local_bytes: bytes of the input on one device.
      group_size: the number of devices in a group.

    Raises:
      UserError: the kind is unknown.
    """
    _check(kind)
    return local_bytes * group_size if program.COLLECTIVES[kind].part else local_bytes


def collective_seconds(
    hardware: Hardware, placement: MeshPlacement, kind: str, axes: Iterable[str], bytes: float
) -> float:
    """Predicts the seconds of a collective.

    Args:
      hardware: the hardware of `placement`, or hardware with the same levels.
      placement: the placement of the mesh.
      kind: one of COLLECTIVES.
      axes: mesh axes that form the group.
      bytes: bytes of the whole array of one group, not of a device's part; for permute, the bytes that one
        device sends.

    Raises:
      UserError: the collective or an axis is unknown, or `bytes` is negative.

    Example:
      >>> import costmodels, mesh_tf_core as mtf
      >>> machine = costmodels.load_hardware("h100")
      >>> placement = costmodels.place(machine, mtf.Mesh("data:8"))
      >>> seconds = costmodels.collective_seconds(machine, placement, "all_reduce", ["data"], 1e9)
      >>> 0.001 < seconds < 0.01
      True
    """
    return collective_cost(hardware, placement, kind, axes, bytes).seconds


def collective_cost(
    hardware: Hardware,
    placement: MeshPlacement,
    kind: str,
    axes: Iterable[str],
    bytes: float,
    experts: SparseDim | None = None,
) -> CollectiveCost:
    """Predicts the seconds, the algorithm and the formula of a collective.

    The other arguments and the errors are those of `collective_seconds`.

    Args:
      experts: those of a device, between which and their tokens an all-to-all carries rows.
    """
    _check(kind)
    if bytes < 0:
        raise UserError(f"{kind}: the number of bytes is {bytes:g}; give at least 0")
    route = placement.route(axes)
    if route.size == 1 or bytes == 0:
        return CollectiveCost(0.0, "none", "nothing to send")
    found = _candidates(hardware, kind, float(bytes), route, experts)
    return min(found, key=lambda cost: cost.seconds)


def _check(kind: str) -> None:
    if kind not in COLLECTIVES:
        raise UserError(f"collective {kind!r} is not known; {known_names(kind, COLLECTIVES)}")


def _candidates(
    hardware: Hardware, kind: str, size: float, route: Route, experts: SparseDim | None = None
) -> Iterator[CollectiveCost]:
    measured = _measured(hardware, kind, size, route)
    if measured is not None:
        yield measured
        return
    yield from closed_forms(hardware, kind, size, route, experts)
    if kind in ("reduce_scatter", "all_gather") and not isinstance(hardware.topology, Torus):
        # An all-reduce of the whole array (of the padded shards, for a gather) holds every result too; where
        # it has a tree or a measured curve and these have not, it can be the faster way.
        for whole in _candidates(hardware, "all_reduce", size, route):
            yield CollectiveCost(whole.seconds, f"all-reduce by {whole.algorithm}", whole.words)


# ----------------------------------------------------------------------------------------------- measured


def _measured(hardware: Hardware, kind: str, size: float, route: Route) -> CollectiveCost | None:
    """From measured curves: linear between group sizes, proportional beyond; None without curves."""
    curves = _curves_by_group(hardware, kind, route)
    if not curves:
        return None
    n, sizes = route.size, sorted(curves)
    above = next((s for s in sizes if s >= n), None)
    below = next((s for s in reversed(sizes) if s <= n), None)
    if above is None or below is None:
        nearest = sizes[-1] if above is None else sizes[0]
        seconds = curves[nearest].seconds(size) * n / nearest
        words = f"measured for groups of {nearest} devices, scaled to {n}"
    elif above == below:
        seconds, words = curves[n].seconds(size), f"measured for groups of {n} devices"
    else:
        t0, t1 = curves[below].seconds(size), curves[above].seconds(size)
        seconds = t0 + (t1 - t0) * (n - below) / (above - below)
        words = f"measured for groups of {below} and {above} devices, interpolated for {n}"
    if hardware.devices_per_process is not None:
        used, wanted = curves[sizes[0]].processes, route.processes
        words += f" {_over(used)}" + (
            f", because no curve was measured {_over(wanted)}" if used != wanted else ""
        )
    return CollectiveCost(seconds, "measured", f"{words}, at {amount(size)}")


def _over(processes: int) -> str:
    return "inside a process" if processes == 1 else f"over {processes} processes"


def _curves_by_group(hardware: Hardware, kind: str, route: Route) -> dict[int, CollectiveCurve]:
    """For each group size the curve measured with the number of busy devices nearest to the route's.

    Only curves of groups over one number of processes count: the route's; else the nearest one, the larger
    of two, and never one process for several or several for one while there is another choice.
    """
    known = [c for c in hardware.collective_curves if c.collective == kind]
    over = route.processes
    nearest = min(
        {c.processes for c in known}, key=lambda p: ((p > 1) != (over > 1), abs(p - over), -p), default=over
    )
    best: dict[int, CollectiveCurve] = {}
    for curve in known:
        other = best.get(curve.group_size)
        fewer = other is None or abs(curve.devices - route.devices) < abs(other.devices - route.devices)
        if curve.processes == nearest and fewer:
            best[curve.group_size] = curve
    return best
