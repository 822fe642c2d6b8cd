"""What all problems about one step have in common, whatever the mesh and the choices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

from costmodels.pricing.pricer import Pricer
from layoutopt.formulation.cluster import Cluster
from layoutopt.formulation.clusters import clusters
from layoutopt.formulation.cuts import LOWERED, most_cells
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.makers import Makers
from layoutopt.formulation.memory_points import Points
from layoutopt.formulation.tables import Tabler
from layoutopt.space.decisions import Decisions
from layoutopt.space.recompute import options_of
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.kept import SETS, Sets
from mesh_tf_core.model import NO_STAGES, Model, TrainingStep
from mesh_tf_core.ops.ticks import GPIPE

ONE = Mesh([("device", 1)])


class Steps(Protocol):
    """What has steps: a model, or what replicas do when they meet."""

    def training_step(
        self, microbatches: int = 1, stages: Mapping[str, int] = NO_STAGES, schedule: str = GPIPE
    ) -> TrainingStep: ...

    def lower(self, mesh: Mesh, layout: Layout, options: Options = ..., *, check: bool = True) -> Program: ...


class SharedContext:
    """A step with some number of microbatches, nothing of it split but layers into stages.

    Attributes:
      dependencies: which of its operations must be priced together; `clusters` of these.
      narrow: see `Tabler`.

    Args:
      cut: additions that are priced apart from their operands.
      further: dimensions that may be split further elsewhere.
      stages: dimensions of layers -> how many stages of a pipeline they are, in what schedule.
      keeps: what loops that run again may keep (`kept.Recomputed`).
      products: dimensions; messages may go in chunks beside products that have one.
    """

    narrow: Mapping[str, str] | None = None

    def __init__(
        self,
        model: Steps,
        microbatches: int = 1,
        cut: frozenset[int] = frozenset(),
        further: frozenset[str] = frozenset(),
        stages: Mapping[str, int] = NO_STAGES,
        schedule: str = GPIPE,
        keeps: Sets = SETS,
        products: frozenset[str] = frozenset(),
    ) -> None:
        step = model.training_step(microbatches, stages, schedule)
        self.stages, self.schedule = stages, schedule
        self._allowed = further, stages, schedule, keeps, products
        self.model, self.microbatches, self.graph = model, microbatches, step.graph
        self._programs: dict[frozenset[str], Program] = {}
        self._tabler: Tabler | None = None
        self._points: dict[tuple[frozenset[str], bool], Points] = {}
        self.cut, self.further = cut, further
        self._more: dict[frozenset[int], SharedContext] = {}
        returned = [t.id for t in step.results.values()]
        given = returned, cut, further, keeps, products
        self.dependencies = Dependencies(self.graph, self.program(), *given)
        self.clusters: tuple[Cluster, ...] = tuple(clusters(self.dependencies))

    @cached_property
    def _uncut(self) -> list[tuple[Cluster, frozenset[int]]]:
        """Clusters with additions that can be cut, and these."""
        open = self.dependencies.additions.keys() - self.cut
        found = ((c, frozenset(i for member in c.members for i in member) & open) for c in self.clusters)
        return [(c, nodes) for c, nodes in found if nodes]

    def bounded(self, decided: Decisions) -> SharedContext:
        """The same, with additions cut until no table needs more than `cuts.LOWERED` operations lowered, or
        until no addition is left in those that may need more."""
        additions = self.dependencies.additions
        large: set[int] = set()
        for cluster, found in self._uncut:
            switches = (*cluster.sums, *cluster.switches)
            cells = most_cells(cluster.dims, switches, cluster.shapes, decided.options)
            if cells * len(cluster.subgraph.nodes) > LOWERED:
                most = max(len(additions[n]) for n in found)
                large |= {n for n in found if len(additions[n]) == most}
        if not large:
            return self
        cut = self.cut | large
        if cut not in self._more:
            self._more[cut] = SharedContext(self.model, self.microbatches, cut, *self._allowed)
        return self._more[cut].bounded(decided)

    def program(self, again: frozenset[str] = frozenset()) -> Program:
        """The step on one device, or one for each stage, where these loops run again; on others it differs in
        its mesh only."""
        if again not in self._programs:
            more = options_of(again)
            options = Options(microbatches=self.microbatches, schedule=self.schedule, **more)
            mesh = Mesh([(dim, n) for dim, n in self.stages.items()]) if self.stages else ONE
            layout = Layout({dim: (dim,) for dim in self.stages})
            self._programs[again] = self.model.lower(mesh, layout, options, check=False)
        return self._programs[again]

    def tabler(self, mesh: Mesh, pricer: Pricer) -> Tabler:
        """Makes its tables on a mesh; what it made for the pricer that was asked for last is known."""
        if self._tabler is None or self._tabler.pricer is not pricer:
            self._tabler = Tabler(self.graph, mesh, pricer, self.narrow)
        return self._tabler

    @cached_property
    def makers(self) -> Makers:
        """Which cluster makes each tensor."""
        return Makers(self.dependencies, self.clusters)

    def points(self, again: frozenset[str], fuses: bool) -> Points:
        """What its points hold; `fuses`: the compiler makes kernels of several operations."""
        if (again, fuses) not in self._points:
            self._points[again, fuses] = Points(self.makers, self.program(again), fuses)
        return self._points[again, fuses]


def shared_context(
    model: Model,
    microbatches: int = 1,
    further: frozenset[str] = frozenset(),
    stages: Mapping[str, int] = NO_STAGES,
    schedule: str = GPIPE,
    keeps: Sets = SETS,
    products: frozenset[str] = frozenset(),
) -> SharedContext:
    """That of a step, made once for all searches of its graph: the next one may be for another machine."""
    step = model.training_step(microbatches, stages, schedule)
    key = SharedContext, further, keeps, products, tuple(t.id for t in step.results.values())
    given = further, stages, schedule, keeps, products
    return step.graph.remembered(key, lambda: SharedContext(model, microbatches, frozenset(), *given))
