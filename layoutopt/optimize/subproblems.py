"""What a search goes through: mesh shapes, and numbers of microbatches on each, with what is decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from costmodels.hardware import Cluster, Hardware
from layoutopt.optimize.baselines import mesh_shapes
from layoutopt.space.decisions import Decisions, decisions
from layoutopt.space.domains import domains
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model


@dataclass(frozen=True)
class Space:
    """One mesh shape with one number of microbatches: a problem of its own."""

    mesh: Mesh
    decided: Decisions

    @property
    def parts(self) -> int:
        """The number of microbatches."""
        return self.decided.microbatches


def meshes(mesh: Mesh | str | None, devices: int | None, max_axes: int, hardware: Hardware) -> list[Mesh]:
    """The mesh that is given, or all shapes of a number of devices, with axes axis0, axis1, …"""
    if mesh is not None:
        return [Mesh(mesh) if isinstance(mesh, str) else mesh]
    assert devices is not None
    shapes = mesh_shapes(devices, max_axes, isinstance(hardware.topology, Cluster))
    return [Mesh([(f"axis{i}", n) for i, n in enumerate(s)]) for s in shapes]


def spaces(
    model: Model,
    shapes: Sequence[Mesh],
    pins: Mapping[str, Axes],
    forbid: Mapping[str, Axes],
    storage: Sequence[str],
    recompute: Sequence[bool],
    microbatches: Sequence[int],
) -> Iterator[Space]:
    """Every problem of a search, the fewest microbatches of every mesh first.

    More microbatches than can be had are left out: the model cannot be split so, or what is pinned does not
    divide the smaller batch.

    Raises:
      UserError: the batch cannot be split into any of these numbers, or what is pinned or forbidden does not
        suit even the fewest.
    """
    numbers = _parts(model, microbatches)
    for parts in numbers:
        for mesh in shapes:
            try:
                graph = model.training_step(parts).graph
                splits = domains(graph, mesh, pins, forbid)
            except UserError:
                if parts == numbers[0]:
                    raise
                continue
            yield Space(mesh, decisions(graph, splits, storage, recompute, parts))


def _parts(model: Model, microbatches: Sequence[int]) -> list[int]:
    """The numbers of microbatches that divide the batch."""
    size = 1
    if model.batch_dim is not None:
        size = min(t.shape.dims[0].size for t in model.graph.inputs.values() if len(t.shape))
    found = [m for m in sorted(set(microbatches)) if size % m == 0]
    if not found:
        has = "the model has no batch" if model.batch_dim is None else f"{model.batch_dim!r} has size {size}"
        raise UserError(
            f"--microbatches {','.join(map(str, microbatches))}: {has}, which none of these divides; "
            f"allow 1{' or another divisor' if size > 1 else ''}"
        )
    return found
