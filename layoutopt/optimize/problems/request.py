"""The request of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from costmodels.hardware import Hardware
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.plan.covered import CoveredSpace, UncoveredChoices
from layoutopt.runtime.clock import Clock
from layoutopt.space.decisions import KINDS, SearchSpace, left_out
from layoutopt.space.kind import UNEQUAL, LeftOut, Target
from layoutopt.space.mesh_shapes import of_shape, other_meshes
from layoutopt.space.objective import Objective
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.model import Model


@dataclass(frozen=True)
class SearchStatus:
    """The progress of a search.

    Attributes:
      looked: the current mesh, with its further choices in words.
      number, count: position of the problem, and number of unsettled problems.
      best: the objective of the best layout so far; inf: none fits yet.
      bound: no layout of the whole search is better.
      part: share of the tables of the current problem that are complete.
      space: `usual`, and then `everything`, where a search is of both.
    """

    looked: str
    number: int
    count: int
    best: float
    bound: float
    part: float = 0.0
    space: str = ""


OnSearchStatus = Callable[[SearchStatus], None]
Better = Callable[[str, float, int], None]
"""on_better(layout in words, its seconds, its bytes): the best so far that fits is now another one."""
SEARCHED, ANSWERED, PLANNED = 0.6, 1.3, 1.6
"""Seconds after the time limit for solvers to end and for their answers to be evaluated; for finding any
layout that fits, if none is known, or as many of computing; for predicting alternatives."""
BEYOND = 60.0
"""Seconds for what is not usual, if no time limit is given."""
BESIDE, BESIDE_SHARE = 20.0, 4.0
"""Largest seconds for alternatives without a time limit, and their limit as a multiple of the answer's time,
if that is more: a name's best plan can be harder to find than the best of all. No answer waits for them for
longer than `BEYOND`, and one that its own limit ended only for the first."""


@dataclass(frozen=True)
class Request:
    """The question, checked.

    Attributes:
      limit: bytes a device may hold.
      allowed: the choices.
      clock: when to end.
    """

    model: Model
    hardware: Hardware
    limit: float
    objective: Objective
    allowed: SearchSpace
    top: int
    clock: Clock
    on_progress: OnSearchStatus | None
    on_better: Better | None

    def __post_init__(self) -> None:
        for kind in KINDS:
            kind.check(self.allowed)

    @cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator of this request: no layout is evaluated twice."""
        return Evaluator(self.model, self.hardware)

    def beside(self, share: float = 0.0) -> AbstractContextManager[None]:
        """The limit, if there is none yet, of what stands beside an answer: a share of the answer's time."""
        return self.clock.at_most(max(BESIDE, min(share * self.clock.elapsed, BEYOND)))

    def wider(self, allowed: SearchSpace) -> Request:
        """The same about a wider space, for `BEYOND` seconds unless there is a limit."""
        clock = self.clock if self.clock.limit is not None else Clock(BEYOND)
        return self.like(allowed=allowed, clock=clock)

    def like(self, **changed: Any) -> Request:
        """A changed request; what is predicted is not predicted again."""
        other = replace(self, **changed)
        vars(other)["evaluator"] = self.evaluator
        return other

    def meeting(self, options: Options) -> Options:
        """Options with the requested replicas."""
        return options if self.allowed.diloco is None else replace(options, diloco=self.allowed.diloco)

    @property
    def late(self) -> bool:
        """True if the time is over."""
        return self.clock.over


def left_whole(request: Request, of: Evaluation) -> list[str]:
    """Variables that the search could not store split, where it was allowed to."""
    stages = [stage for stage in STAGES[1:] if stage in request.allowed.storage]
    return [] if not stages else [str(each) for each in of.left_whole(stages[-1])]


def uneven(request: Request, meshes: Iterable[Mesh]) -> bool:
    """True if unequal shards could split more on some mesh."""
    targets = (Target(request.model, mesh) for mesh in dict.fromkeys(meshes))
    return any(UNEQUAL in left.what for target in targets for left in left_out(target, request.allowed))


def space_of(
    request: Request, mesh: Mesh, considered: int, shapes: Set[tuple[int, ...]] | None
) -> CoveredSpace:
    """The space that a search covered, and the choices outside it.

    Args:
      mesh: of its answer.
      considered: number of layouts.
      shapes: of the meshes that it looked at; None: the mesh was given.
    """
    left = _left_out(request, [mesh, *(of_shape(s) for s in sorted(shapes or ()) if s != mesh.shape)])
    return CoveredSpace(
        layouts=considered,
        expressed_by=request.allowed.restriction.name,
        not_looked_at=tuple(
            UncoveredChoices(**asdict(each)) for each in (*left, *other_meshes(mesh, shapes))
        ),
    )


def _left_out(request: Request, meshes: Sequence[Mesh]) -> list[LeftOut]:
    """The choices outside a search on any of its meshes, each at its widest: a mesh of one axis has no stages
    of a pipeline that would be faster, and others may have some."""
    found: dict[tuple[str, str, str], LeftOut] = {}
    for mesh in meshes:
        for left in left_out(Target.on(request.hardware, request.model, mesh), request.allowed):
            key = left.kind, left.what.partition(":")[0], left.allow.partition(" ")[0]
            found[key] = max(found.get(key, left), left, key=lambda x: (not x.finer, x.allow.count(",")))
    order = [kind.label for kind in KINDS]
    every = sorted(found.values(), key=lambda left: order.index(left.kind))
    return [left for left in every if not any(_contains(other, left) for other in every)]


def _contains(wide: LeftOut, left: LeftOut) -> bool:
    """True if an entry allows the values of another one, and more."""
    (option, _, values), (own, _, fewer) = (x.allow.partition(" ") for x in (wide, left))
    same = (wide.kind, wide.finer, option) == (left.kind, left.finer, own)
    return same and {*fewer.split(",")} < {*values.split(",")}
