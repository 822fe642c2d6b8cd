"""The outer step of replicas, in addition to the step of each (`mesh_tf_core.tracing.replicas`).

A step with replicas is the step of one, on the other axes of the mesh, and 1/H of every outer step. Each
outer step is a separate graph over the same decisions. Its clusters are added with multiplicity 1/H, and its
state is counted at every point of the step. A replica's step has the cost and the memory of a step in which
nothing is split over the axis (tests/layoutopt/test_search_replicas.py).

With a delay only the part of a fragment's exchange that exceeds the steps of the delay is exposed,

  exposed = max(0, exchange - delay * step)

which is not a sum over clusters. The tables have 0: a bound, and the exact cost if the whole exchange is
hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from layoutopt.formulation.held_bytes import HeldBytes
from layoutopt.formulation.lifetimes import ByteRule
from layoutopt.formulation.shared import SharedContext
from layoutopt.space.decisions import Decisions, Structure
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import GPIPE
from mesh_tf_core.lower import Options, lower
from mesh_tf_core.lower.nodes import assigned
from mesh_tf_core.lower.pipeline import replica_graphs, rules_about
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.storage import narrow_reads, paddable_with
from mesh_tf_core.model import DEFAULT, NO_STAGES, NOTHING, Model, TrainingStep
from mesh_tf_core.tracing.diloco import DiLoCo
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class _Meets:
    """What `SharedContext` asks of a model, of a meeting alone."""

    step: TrainingStep

    def training_step(
        self,
        microbatches: int = 1,
        stages: Mapping[str, int] = NO_STAGES,
        schedule: str = GPIPE,
        again: Policies = NOTHING,
    ) -> TrainingStep:
        return self.step

    def lower(self, mesh: Mesh, layout: Layout, options: Options = DEFAULT, *, check: bool = True) -> Program:
        return lower(self.step.graph, mesh, rules_about(layout, self.step.graph), {}, check=check)


class OuterStepContext(SharedContext):
    """An outer step of some replicas.

    Attributes:
      narrow, padded: see `Tabler`; of the step, and for an outer step also its variables.
      divided: see `Tabler`; of the step, which splits were chosen for: codes of 4 bits are half as many.
      kept: the variables that only this outer step writes, not the step or an earlier one.
    """

    def __init__(
        self,
        step: TrainingStep,
        structure: Structure,
        by: DiLoCo,
        graph: Graph,
        known: Collection[str],
        padded: Mapping[str, frozenset[str]],
    ) -> None:
        super().__init__(_Meets(TrainingStep(graph, {}, ())), structure)
        self.period, self.narrow, self.padded = by.period, narrow_reads(step.graph), padded
        self.divided = step.graph.dims()
        self.kept = tuple(name for name in assigned(graph) if name not in known)
        self.clusters = tuple(replace(c, multiplicity=c.multiplicity / by.period) for c in self.clusters)

    def kept_of(self, cluster: int) -> Counter[str]:
        """Number of `kept` that a cluster represents, by its own variable."""
        made = map(self.makers.variable.__getitem__, self.kept)
        return Counter(like for number, like in made if number == cluster)

    def variables(self) -> Iterator[HeldBytes]:
        """The bytes of variables that every point of the step holds for the outer step."""
        for name in self.kept:
            cluster, like = self.makers.variable[name]
            yield HeldBytes(ByteRule.VARIABLE, cluster, 0, like, "", 1.0)


def meetings(model: Model, mesh: Mesh, decided: Decisions) -> tuple[OuterStepContext, ...]:
    """The outer steps of a problem's replicas in a period, made once for all searches of its graph; none
    without replicas."""
    by = decided.diloco
    if by is None:
        return ()
    structure, count = decided.structure(mesh), mesh.size(by.axis)
    step, key = structure.step_of(model), (OuterStepContext, structure, count, by)
    return step.graph.remembered(key, lambda: tuple(_meetings(step, structure, count, by)))


def _meetings(step: TrainingStep, structure: Structure, count: int, by: DiLoCo) -> Iterator[OuterStepContext]:
    known = set(step.graph.variables)
    inner, _, met = replica_graphs(step.graph, step.results, count, by)
    graphs = [graph for each in met for graph in each.graphs]
    padded = paddable_with(inner, graphs)
    for graph in graphs:
        yield OuterStepContext(step, structure, by, graph, known, padded)
        known |= assigned(graph).keys()
