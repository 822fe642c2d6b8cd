"""One mesh axis where two do the same: `data:64` instead of `data:2;data2:32`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from layoutopt.evaluator import Evaluation
from layoutopt.optimize.request import EXACT
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh

Shape = tuple[int, ...]


def merged(
    mesh: Mesh,
    layout: Layout,
    meshes: Mapping[Shape, Mesh],
    evaluate: Callable[[Mesh, Layout], Evaluation],
) -> tuple[Mesh, Layout]:
    """The same splits on a mesh of fewer axes that is as fast and as lean; the given one if there is none.

    Args:
      meshes: those that may be chosen, by shape.
      evaluate: LayoutError where a layout is not legal.
    """
    now = evaluate(mesh, layout)
    for order, alike in _pairs(mesh, layout):
        fewer = meshes.get(tuple(order.values()))
        if fewer is None:
            continue
        names = dict(zip(order, fewer.names, strict=True))
        alike = Layout({n: tuple(names[a] for a in axes) for n, axes in alike.items()})
        if not ordered(alike, fewer):
            continue
        try:
            found = evaluate(fewer, alike)
        except LayoutError:
            continue
        as_fast = found.cost.step_seconds <= now.cost.step_seconds * (1 + EXACT)
        if as_fast and found.memory.peak <= now.memory.peak:
            return merged(fewer, alike, meshes, evaluate)
    return mesh, layout


def ordered(layout: Layout, mesh: Mesh) -> bool:
    """Whether all splits name their axes in the order of the mesh."""
    return all(axes == tuple(a for a in mesh.names if a in axes) for axes in layout.values())


def _pairs(mesh: Mesh, layout: Layout) -> Iterator[tuple[dict[str, int], Layout]]:
    """Every two axes that split the same dimensions, side by side, or nothing, made one: the axes as they are
    then ordered, and those with the largest first, as shapes are searched where the order does not matter."""
    for one, two in itertools.permutations(mesh.names, 2):
        if not all(_alike(axes, one, two) for _, axes in layout.items()):
            continue
        sizes = {a: n for a, n in mesh.axes if a != two}
        sizes[one] *= mesh.size(two)
        alike = Layout({n: tuple(a for a in axes if a != two) for n, axes in layout.items()})
        for order in (sizes, dict(sorted(sizes.items(), key=lambda axis: -axis[1]))):
            yield order, alike


def _alike(axes: Axes, one: str, two: str) -> bool:
    """Whether a dimension is split over both, the second right after the first, or over neither."""
    if one in axes and two in axes:
        return axes.index(two) == axes.index(one) + 1
    return one not in axes and two not in axes
