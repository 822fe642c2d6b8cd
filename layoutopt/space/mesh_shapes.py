"""The shape of the mesh: the one that is given, or every factorisation of a number of devices.

Another shape is another machine, so every shape is a separate subproblem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set

from costmodels.hardware import GpuCluster, Hardware
from costmodels.network.topology import one_slice
from layoutopt.space.kind import LeftOut
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.mesh import MOST_DEVICES, Mesh

MOST_AXES = 8
"""More have more shapes than a search ends with."""
NAMELESS: Mapping[int, str] = {}


def meshes(
    mesh: Mesh | str | None, devices: int | None, max_axes: int, hardware: Hardware, named: Sequence[str] = ()
) -> list[Mesh]:
    """The mesh that is given, or all shapes of a number of devices, with axes axis0, axis1, …

    Args:
      named: axes that rules name. Every mesh has them, in every place; there may be as many as these.
    """
    if max_axes < 1:
        raise UserError(f"--max-axes {max_axes}: write at least 1")
    if max_axes > MOST_AXES:
        raise UserError(f"--max-axes {max_axes}: a search supports at most {MOST_AXES} axes")
    if mesh is not None:
        return [Mesh(mesh) if isinstance(mesh, str) else mesh]
    assert devices is not None
    ordered = isinstance(hardware.topology, GpuCluster)
    shapes = mesh_shapes(devices, max(max_axes, len(named)), ordered)
    if not ordered and not one_slice(hardware, devices):
        # With each of its axes first in turn: the first ones lie over slices.
        led = ((size, *shape[:i], *shape[i + 1 :]) for shape in shapes for i, size in enumerate(shape))
        shapes = [*dict.fromkeys(led)]
    found = [
        of_shape(shape, dict(zip(places, named, strict=True)))
        for shape in shapes
        for places in itertools.permutations(range(len(shape)), len(named))
    ]
    if not found:
        raise UserError(
            f"--pin and --forbid name {len(named)} axes ({', '.join(named)}), but no mesh of {devices} "
            "devices has as many; name fewer, or use more devices"
        )
    return found


def of_shape(shape: tuple[int, ...], named: Mapping[int, str] = NAMELESS) -> Mesh:
    """The mesh of a shape, with axes axis0, axis1, …, but for those in places that have a name."""
    known = (*named.values(),)
    return Mesh([(named.get(i, f"axis{i}{'_' * (f'axis{i}' in known)}"), n) for i, n in enumerate(shape)])


def other_meshes(mesh: Mesh, shapes: Set[tuple[int, ...]] | None) -> Iterator[LeftOut]:
    """Meshes of as many devices that a search did not look at.

    Args:
      shapes: that it looked at; None: `mesh` was given.
    """
    axes = 0 if shapes is None else _complete(shapes)
    if shapes is None and mesh.devices > 1:
        yield LeftOut("meshes", "other meshes", f"--devices {mesh.devices}", finer=True)
    elif shapes is not None and any(
        len(divisors(size)) > 2 for shape in shapes for size in shape if len(shape) == axes
    ):
        yield LeftOut("meshes", f"meshes of more than {axes} axes", f"--max-axes {axes + 1}", finer=True)


def _complete(shapes: Set[tuple[int, ...]]) -> int:
    """The most axes of which every mesh is among these shapes, in some order."""
    known, most = {tuple(sorted(shape, reverse=True)) for shape in shapes}, max(map(len, shapes))
    devices = math.prod(next(iter(shapes)))
    counts = (n for n in range(1, most) if not known.issuperset(mesh_shapes(devices, n + 1, ordered=False)))
    return next(counts, most)


def mesh_shapes(devices: int, max_axes: int, ordered: bool) -> list[tuple[int, ...]]:
    """Factorisations of a number of devices into at most `max_axes` axes of size >= 2.

    Args:
      ordered: distinguish different orders of the same sizes (they use the hardware differently).
    """
    if devices < 1:
        raise UserError(f"--devices {devices}: write at least 1")
    if devices > MOST_DEVICES:
        raise UserError(f"--devices {devices}: a search supports at most {MOST_DEVICES:,} devices")
    found: set[tuple[int, ...]] = set()

    def split(left: int, sizes: tuple[int, ...]) -> None:
        if left == 1:
            found.add(sizes or (1,))
            return
        if len(sizes) == max_axes:
            return
        for size in divisors(devices)[1:]:
            if left % size == 0:
                split(left // size, (*sizes, size))

    split(devices, ())
    if ordered:
        return sorted(found)
    return sorted({tuple(sorted(sizes, reverse=True)) for sizes in found})
