"""The context that all problems about one step share, whatever the mesh and the choices."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property
from typing import Protocol

from costmodels.held_by_frameworks import gradients
from costmodels.liveness import MemoryRules
from costmodels.pricing.pricer import Pricer
from layoutopt.formulation.clusters import clusters
from layoutopt.formulation.cuts import LOWERED, most_cells
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.makers import Makers, OpCluster
from layoutopt.formulation.memory_points import ProgramPoints
from layoutopt.formulation.tables import Tabler
from layoutopt.space.decisions import Decisions, HasTrainingStep, Structure
from layoutopt.space.recompute import RunsAgain, options_of
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import paddable
from mesh_tf_core.model import Model

ONE = Mesh([("device", 1)])
PLAIN = Structure()
TABLERS = 16
"""Number of meshes whose tables are kept: alternatives of an answer ask for them again."""


class Lowered(HasTrainingStep, Protocol):
    """Steps that can be lowered."""

    def lower(self, mesh: Mesh, layout: Layout, options: Options = ..., *, check: bool = True) -> Program: ...


class SharedContext:
    """A step with nothing of it split but layers into stages.

    Attributes:
      dependencies: which of its operations must be priced together; `clusters` of these.
      narrow, padded, divided: see `Tabler`.

    Args:
      structure: effects of the decisions.
      cut: additions that are predicted separately from their operands.
    """

    narrow: Mapping[str, str] | None = None
    padded: Mapping[str, frozenset[str]] | None = None
    divided: Mapping[str, Set[int]] | None = None

    def __init__(
        self, model: Lowered, structure: Structure = PLAIN, cut: frozenset[int] = frozenset()
    ) -> None:
        step = structure.step_of(model)
        self.model, self.structure, self.graph = model, structure, step.graph
        self._programs, self._tablers = dict[RunsAgain, Program](), list[Tabler]()
        self._points: dict[tuple[RunsAgain, MemoryRules], list[ProgramPoints]] = {}
        self.cut = cut
        self._more: dict[frozenset[int], SharedContext] = {}
        returned = [t.id for t in step.results.values()]
        self.dependencies = Dependencies(self.graph, self.program(), structure, returned, cut)
        self.clusters: tuple[OpCluster, ...] = tuple(clusters(self.dependencies))

    @cached_property
    def _uncut(self) -> list[tuple[OpCluster, frozenset[int]]]:
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
            self._more[cut] = SharedContext(self.model, self.structure, cut)
        return self._more[cut].bounded(decided)

    def program(self, again: RunsAgain = frozenset()) -> Program:
        """The step on one device, or one for each stage, where these loops run again; on others it differs in
        its mesh only."""
        if again not in self._programs:
            more = options_of(again)
            own, stages = self.structure, dict(self.structure.stages)
            more["recompute"] = more.get("recompute", frozenset()) | own.again
            options = Options(microbatches=own.microbatches, schedule=own.schedule, **more)
            mesh = Mesh([*stages.items()]) if stages else ONE
            layout = Layout({dim: (dim,) for dim in stages})
            self._programs[again] = self.model.lower(mesh, layout, options, check=False)
        return self._programs[again]

    def tabler(
        self, mesh: Mesh, pricer: Pricer, padded: Mapping[str, frozenset[str]] | None = None, apart: Axes = ()
    ) -> Tabler:
        """Makes its tables on a mesh; those of the last `TABLERS` are cached.

        Args:
          padded, apart: see `Tabler`; `padded` None: the context's own.
        """
        padded = self.padded if padded is None else padded
        padded = paddable(self.graph) if padded is None else padded
        more = self.narrow, padded, self.divided, apart
        alike = (t for t in self._tablers if t.pricer is pricer and (t.padded, t.apart) == (padded, apart))
        found = next(alike, None) or Tabler(self.graph, mesh, pricer, *more)
        self._tablers = [found, *(t for t in self._tablers if t is not found)][:TABLERS]
        return found

    @cached_property
    def makers(self) -> Makers:
        """The cluster that makes each tensor."""
        return Makers(self.dependencies, self.clusters)

    @cached_property
    def gradients(self) -> frozenset[int]:
        """The tensors that add up gradients."""
        program = self.program()
        return frozenset(program.values[i].tensor for i in gradients(program)[0]) - {-1}

    def points(self, again: RunsAgain, rules: MemoryRules) -> list[ProgramPoints]:
        """The points of the step and the values at each, by the compiler's rules, for each of the stages that
        hold most."""
        if (again, rules) not in self._points:
            program, recompute = self.program(again), options_of(again).get("recompute", frozenset())
            self._points[again, rules] = [
                ProgramPoints(self.makers, program, rules, recompute, end) for end in rules.ends(program)
            ]
        return self._points[again, rules]


def shared_context(model: Model, structure: Structure) -> SharedContext:
    """The context of a step, made once for all searches of its graph, also for other machines."""
    step = structure.step_of(model)
    key = SharedContext, structure, tuple(t.id for t in step.results.values())
    return step.graph.remembered(key, lambda: SharedContext(model, structure))
