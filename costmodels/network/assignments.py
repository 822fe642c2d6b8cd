"""Assignments of the axes of a mesh to the levels of hardware, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise

from mesh_tf_core.ir.dims import divisors

AxisSizes = tuple[tuple[str, int], ...]
Levels = tuple[tuple[str, int], ...]
"""Names and capacities of levels, innermost first; the last one (the network) has capacity 0: unlimited."""
AxisAssignment = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""(mesh axis, ((level, factor), …)), factors of 1 left out."""


def best_assignment(
    axes: AxisSizes, levels: Levels, score: Callable[[AxisAssignment], tuple[float, ...]]
) -> tuple[AxisAssignment, tuple[str, ...]]:
    """The assignment of least score, the first of these in a fixed order, and the assumptions.

    `levels` are the cores of a chip, the torus axes, the network. The network is only used by a mesh of more
    chips than one slice has, and there by its first axes, if these can fill it: as jobs number their devices,
    slice by slice. A mesh whose sizes do not fit the torus gets longer axes than exist.
    """
    devices = math.prod(size for _, size in axes)
    (core, cores), *torus, (network, _) = levels
    use = math.gcd(cores, devices)
    assumptions: list[str] = []
    if use < min(cores, devices):
        assumptions.append(
            f"only {use} of the {cores} devices of each chip are used, because {devices} devices are not "
            f"a multiple of {cores}"
        )
    chips, capacity = devices // use, math.prod(n for _, n in torus)
    if chips > capacity:
        slices = next(s for s in range(-(-chips // capacity), chips + 1) if chips % s == 0)
        assumptions.append(f"the {chips} chips form {slices} slices, connected by the data-centre network")
        found = _candidates(axes, ((core, use), *torus, (network, slices)))
        if (first := over_slices(axes, slices)) is not None:
            found = (a for a in found if {n: k for n, f in a if (k := dict(f).get(network, 1)) > 1} == first)
    else:
        found = _candidates(axes, ((core, use), *torus))
    best = min(found, key=score, default=None)
    if best is None:
        sizes = "x".join(str(size) for _, size in axes)
        assumptions.append(
            f"a mesh of {sizes} does not fit the torus of {'x'.join(str(n) for _, n in torus)} chips, so "
            "the prediction assumes longer torus axes"
        )
        longer = tuple((name, chips) for name, _ in torus)
        best = min(_candidates(axes, ((core, use), *longer)), key=score)
    return best, tuple(assumptions)


def over_slices(axes: AxisSizes, slices: int) -> dict[str, int] | None:
    """Number of slices that each axis crosses if the first axes fill them; None if their sizes do not."""
    found = dict[str, int]()
    for axis, size in axes:
        crossed = math.gcd(size, slices)
        slices //= crossed
        if crossed > 1:
            found[axis] = crossed
        if slices == 1 or crossed < size:
            break
    return found if slices == 1 else None


def contiguous_assignment(axes: AxisSizes, node_size: int) -> tuple[AxisAssignment, tuple[str, ...]]:
    """Ranks fill nodes in order: the last mesh axes lie inside a node, the rest over the network."""
    room, out = node_size, []
    for name, size in reversed(axes):
        inside = max(d for d in divisors(size) if d <= room)
        room //= inside
        factors = (("node", inside), ("network", size // inside))
        out.append((name, tuple((level, n) for level, n in factors if n > 1)))
    used = math.prod(dict(factors).get("node", 1) for _, factors in out)
    spread = any("network" in dict(factors) for _, factors in out)
    note = (
        f"only {used} of the {node_size} devices of each node are used, so that all groups have the same size"
    )
    return tuple(reversed(out)), (note,) if spread and used < node_size else ()


def _candidates(axes: AxisSizes, levels: Levels) -> Iterator[AxisAssignment]:
    """Every assignment that fills the cores and slices and stays within the torus axes."""
    exact = {name: n for name, n in levels if name in ("core", "slice")}
    capacities = tuple(n for _, n in levels)
    for factors in _products(tuple(size for _, size in axes), capacities):
        used = [math.prod(column) for column in zip(*factors, strict=True)] if factors else [1] * len(levels)
        if any(exact.get(name, n) != n for (name, _), n in zip(levels, used, strict=True)):
            continue
        if _mirrored(factors, levels):
            continue
        yield tuple(
            (axis, tuple((name, n) for (name, _), n in zip(levels, row, strict=True) if n > 1))
            for (axis, _), row in zip(axes, factors, strict=True)
        )


def _mirrored(factors: tuple[tuple[int, ...], ...], levels: Levels) -> bool:
    """Whether the same assignment comes earlier with two equal torus axes exchanged."""
    columns = list(zip(*factors, strict=True))
    torus = [i for i, (name, _) in enumerate(levels) if name not in ("core", "slice")]
    return any(levels[i][1] == levels[j][1] and columns[i] < columns[j] for i, j in pairwise(torus))


def _products(sizes: tuple[int, ...], room: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not sizes:
        yield ()
        return
    for row in _splits(sizes[0], room):
        left = tuple(r // n for r, n in zip(room, row, strict=True))
        for rest in _products(sizes[1:], left):
            yield (row, *rest)


@lru_cache(maxsize=4096)
def _splits(size: int, room: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every way to write `size` as a product with factor i at most room[i]."""
    if len(room) == 1:
        return ((size,),) if size <= room[0] else ()
    return tuple(
        (n, *rest) for n in reversed(divisors(size)) if n <= room[0] for rest in _splits(size // n, room[1:])
    )
