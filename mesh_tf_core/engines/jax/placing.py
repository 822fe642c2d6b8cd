"""The device for each position in a mesh: on a torus in JAX's order of axes, over slices in the plan's.

A slice is a set of devices with fast links: the chips of a TPU slice, the GPUs of one host or NVLink domain
(JAX's `slice_index`). Between slices is the data-centre network. A mesh axis of n devices over s slices has n
/ s of them in each; all axes' s together are the number of slices:

    device[a] = slice[a // (n / s)] and in it place [a % (n / s)], for every axis alike
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mesh_tf_core.ir.mesh import Mesh


def placed(mesh: Mesh, found: Sequence[Any], slices: Mapping[str, int] | None = None) -> list[Any]:
    """JAX's devices by rank of the mesh.

    Args:
      found: as many as the mesh has, of one slice after the other.
      slices: mesh axis -> number of slices that it spans in the predicted plan. If the machine has other
        slices, the first axes span them, because the last axes communicate most.
    """
    groups: dict[int, list[Any]] = {}
    for device in found:
        groups.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    over = _over(mesh, len(groups), slices or {})
    if over is None or len({len(group) for group in groups.values()}) > 1:
        return list(found)  # no axes fill the slices evenly: rank by rank
    inside = [n // s for n, s in zip(mesh.shape, over, strict=True)]
    grid = np.empty((len(groups), *inside), dtype=object)
    for at, group in enumerate(groups.values()):
        grid[at] = _on_links(inside, group)
    count = len(inside)
    pairs = [i for axis in range(count) for i in (axis, count + axis)]
    return list(grid.reshape(*over, *inside).transpose(pairs).flat)


def _over(mesh: Mesh, count: int, slices: Mapping[str, int]) -> list[int] | None:
    """For every axis over how many slices it lies; None if no such axes fill them all."""
    given = [slices.get(axis, 1) for axis in mesh.names]
    if math.prod(given) == count and all(n % s == 0 for n, s in zip(mesh.shape, given, strict=True)):
        return given
    out = []
    for size in mesh.shape:
        out.append(math.gcd(size, count))
        count //= out[-1]
    return out if count == 1 else None


def _on_links(shape: Sequence[int], devices: Sequence[Any]) -> Any:
    """Devices of one slice as a grid of that shape: on a TPU's torus by JAX's own rules, else in order."""
    plain = np.empty(len(devices), dtype=object)
    plain[:] = devices
    if devices[0].platform != "tpu":
        return plain.reshape(shape)
    from jax.experimental import mesh_utils

    try:
        return np.asarray(mesh_utils.create_device_mesh(shape, list(devices)), dtype=object).reshape(shape)
    except (
        NotImplementedError,
        ValueError,
        AssertionError,
    ):  # axes that fit no torus axes, or chips with gaps
        return plain.reshape(shape)
