"""The two programs of an axis that synchronises rarely (`tracing.replicas`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.layout import AT, Layout, within
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Collective, Program
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.pipeline import Options, lower, paths
from mesh_tf_core.lower.storage import narrow_reads
from mesh_tf_core.lower.verify import ProgramError
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.replicas import inner_step, outer_step


@dataclass(frozen=True)
class Rounds:
    """A round is `period` times the inner program, and then the outer one.

    Attributes:
      inner: the training step of every replica; of its variables, those that only the outer program reads are
        there too: they lie beside the others all the time.
      outer: replicas meet, on the variables of the inner one.
    """

    inner: Program
    outer: Program
    period: int

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.inner.mesh.group_size(self.inner.layout.axes(REPLICA))


def rounds(
    graph: Graph,
    results: Mapping[str, Tensor],
    mesh: Mesh,
    layout: Layout,
    options: Options,
    check: bool = True,
) -> Rounds:
    """Lowers a training step for an axis that synchronises rarely.

    Args:
      graph: of a whole step, with its updates.
      results: name -> tensor that a step returns; here, [replica, its dims].
      options: with `diloco`.

    Raises:
      UserError: the mesh has no such axis, or one of a single device.
      LayoutError: the layout splits something over it, or is not legal.
    """
    diloco = options.diloco
    assert diloco is not None
    if diloco.axis not in mesh.names:
        raise UserError(
            f"diloco: mesh {mesh} has no axis {diloco.axis!r}; {known_names(diloco.axis, mesh.names)}"
        )
    count = mesh.size(diloco.axis)
    if count < 2:
        raise UserError(f"diloco: axis {diloco.axis!r} of mesh {mesh} has one device: no replicas to meet")
    if diloco.axis in layout.used:
        raise LayoutError(
            f"layout {layout}: replicas lie along {diloco.axis!r}, which synchronises rarely, so nothing is "
            "split over it; split over another axis"
        )
    inner, found = graph.remembered(("replicas", count), lambda: inner_step(graph, count, results))
    outer = graph.remembered(("meeting", count, diloco), lambda: outer_step(graph, inner, diloco))
    split = layout.with_rules({REPLICA: (diloco.axis,)})
    alone = lower(inner, mesh, split, found, options, check=check)
    check_alone(alone, diloco.axis)
    storage = {name: stage for name, stage in options.storage.items() if name in outer.variables}
    split = _about(split, outer)
    oracle = Oracle(mesh, split, outer.variables, storage, narrow=narrow_reads(inner))
    met = lower(outer, mesh, split, {}, Options(storage), oracle=oracle, check=check)
    kept = {**alone.variables, **met.variables}
    return Rounds(replace(alone, variables=kept), met, diloco.period)


def check_alone(program: Program, axis: str) -> None:
    """ProgramError if something crosses an axis."""
    for instr, _ in program.walk():
        if isinstance(instr, Collective) and axis in instr.axes:
            raise ProgramError(f"{instr.text()} {instr.origin.scope}: replicas along {axis!r} train alone")


def _about(layout: Layout, graph: Graph) -> Layout:
    """The rules that a graph has dimensions and paths for."""
    dims, known = graph.dims(), [*paths(graph)]
    plain = {name: axes for name, axes in layout.written.items() if name.partition(AT)[0] in dims}
    parts = {
        path: {name: axes for name, axes in rules if name in dims}
        for path, rules in layout.refined
        if any(within(each, path) for each in known)
    }
    return Layout(plain, parts)
