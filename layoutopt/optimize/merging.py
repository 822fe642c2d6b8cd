"""One mesh axis where two do the same: `data:64` instead of `data:2;data2:32`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from layoutopt.optimize.bounds import EXACT
from layoutopt.optimize.evaluation import Evaluation
from layoutopt.optimize.evaluator import Evaluator
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import Subproblem
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.storage import Stage

AxisLengths = tuple[int, ...]


def merged(
    mesh: Mesh,
    layout: Layout,
    meshes: Mapping[AxisLengths, Mesh],
    evaluate: Callable[[Mesh, Layout], Evaluation],
) -> tuple[Mesh, Layout]:
    """The same splits on a mesh of fewer axes that is as fast and as lean; the given one if there is none.

    Args:
      meshes: those that may be chosen, by shape.
      evaluate: LayoutError where a layout is not legal.
    """
    now = evaluate(mesh, layout)
    for order, alike in _joined(mesh, layout):
        fewer = meshes.get(tuple(order.values()))
        if fewer is None:
            continue
        names = dict(zip(order, fewer.names, strict=True))
        alike = Layout({n: tuple(names[a] for a in axes) for n, axes in alike.written.items()})
        try:
            found = evaluate(fewer, alike)
        except LayoutError:
            continue
        as_fast = found.cost.step_seconds <= now.cost.step_seconds * (1 + EXACT)
        if as_fast and found.memory.peak <= now.memory.peak:
            return merged(fewer, alike, meshes, evaluate)
    return mesh, layout


def simplest(best: EvaluatedLayout, problems: Iterable[Subproblem], evaluator: Evaluator) -> EvaluatedLayout:
    """As good on a mesh with fewer axes, if one of these problems has it; itself where there is none."""
    if any(isinstance(s, Stage) for s in best.options.storage.values()):
        return best  # what names axes by themselves stays on them
    own = best.options.microbatches, best.options.schedule, best.evaluation.pipeline
    alike = (s.mesh for s in problems if (s.microbatches, s.key.schedule, s.stages) == own)

    def evaluate(mesh: Mesh, layout: Layout) -> Evaluation:
        return evaluator(mesh, layout, best.options)

    meshes = {mesh.shape: mesh for mesh in alike}
    mesh, layout = merged(best.mesh, best.layout, meshes, evaluate)
    if mesh == best.mesh:
        return best
    return replace(best, mesh=mesh, layout=layout, evaluation=evaluate(mesh, layout))


def ordered(layout: Layout, mesh: Mesh) -> bool:
    """True if all splits name their axes in the order of the mesh."""
    return all(axes == tuple(a for a in mesh.names if a in axes) for axes in layout.written.values())


def _joined(mesh: Mesh, layout: Layout) -> Iterator[tuple[dict[str, int], Layout]]:
    """Axes that split the same dimensions, or none, made one, the most of them first: two of three can be
    slower where all three are not. The axes are as they are then ordered, the new one in the place of any of
    the old, and those with the largest first, as shapes are searched where the order does not matter."""
    for count in range(len(mesh.names), 1, -1):
        for some in map(set, itertools.combinations(mesh.names, count)):
            if any(len(some & set(axes)) not in (0, count) for _, axes in layout.written.items()):
                continue
            for one in sorted(some, key=mesh.names.index):
                sizes = {a: n for a, n in mesh.axes if a == one or a not in some}
                sizes[one] = mesh.group_size(some)
                for order in (sizes, dict(sorted(sizes.items(), key=lambda axis: -axis[1]))):
                    split = {n: {one if a in some else a for a in axes} for n, axes in layout.written.items()}
                    yield order, Layout({n: tuple(a for a in order if a in split[n]) for n in split})
