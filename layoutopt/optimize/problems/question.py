"""The question of a search: its arguments, checked, and the spaces that they ask about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodels.hardware import Hardware, machine_of
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.evaluation.evaluation import as_run
from layoutopt.optimize.evaluation.evaluator import check_limit
from layoutopt.optimize.problems.request import Better, OnSearchStatus, Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.plan.build import Plan
from layoutopt.plan.details import Searched
from layoutopt.plan.fields import LARGEST
from layoutopt.runtime.clock import Clock
from layoutopt.space import allow
from layoutopt.space.allow import recorded
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.kind import Target
from layoutopt.space.mesh_shapes import meshes
from layoutopt.space.microbatches import USUAL, usual
from layoutopt.space.objective import Objective
from layoutopt.space.recompute import COUNT
from layoutopt.space.restriction import EVERYTHING
from layoutopt.space.stages import suited
from mesh_tf_core.arguments import is_number, is_whole
from mesh_tf_core.errors import LimitError, UserError
from mesh_tf_core.ir.blocks import loop_dims
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

MOST_LISTED = 1000
"""The largest number of best layouts in a list: each takes a separate search."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a search.

    Attributes:
      memory: bytes of a device that a layout may use (None: the hardware's memory).
      max_axes: the largest number of axes of a mesh, when `devices` is given instead of a mesh.
      top: number of best layouts to list.
      time_limit: seconds, or a running clock (None: no limit, but 60 seconds beyond the usual decisions, see
        `SearchSpace.allow`). The search ends at most two seconds later with the best layout found and its
        lower bound; without any, after two seconds of computing.
      alternatives: also find named layouts, such as data parallel, and simpler layouts, to compare with.
      keep_best: Ctrl-C, or KeyboardInterrupt raised by `on_better`, ends the search with the best layout
        found, without a proof. `Plan.stopped` is then True.
      start: a plan, such as an earlier answer. Its layout is predicted first, if the search space has it.
      on_better: called with every better layout: its words, seconds and bytes.

    Example:
      >>> import layoutopt
      >>> layoutopt.Limits(memory=16e9, time_limit=60).top
      1
    """

    memory: float | None = None
    max_axes: int = 2
    top: int = 1
    time_limit: float | Clock | None = None
    alternatives: bool = True
    keep_best: bool = False
    start: Plan | None = None
    on_better: Better | None = None


@dataclass(frozen=True)
class SearchQuestion:
    """A checked question.

    Attributes:
      request: about the first space.
      spaces: the usual one, and everything if that is asked about too.
      free: the same without the framework's restriction.
      shapes: the meshes.
      own: the arguments of `layoutopt.search`, without those of the space.
      everything: the first space is that of everything already.
    """

    request: Request
    spaces: Sequence[SearchSpace]
    free: Sequence[SearchSpace]
    shapes: Sequence[Mesh]
    limits: Limits
    own: Mapping[str, Any]
    everything: bool = False

    @classmethod
    def of(
        cls,
        model: Model,
        own: Mapping[str, Any],
        allowed: SearchSpace,
        limits: Limits,
        on_progress: OnSearchStatus | None,
    ) -> SearchQuestion:
        """The question of some arguments; UserError if one is wrong."""
        clock = Clock.of(limits.time_limit).again()
        if isinstance(limits.time_limit, Clock) and clock.limit == 0:  # a part of no time
            raise LimitError("the time limit was reached before this search")
        machine = machine_of(own["hardware"], own["framework"], model.framework)
        _check(own["mesh"], own["devices"], own["objective"], limits, clock.limit, allowed)
        shapes = meshes(own["mesh"], own["devices"], limits.max_axes, machine, allowed.named)
        model = as_run(model, machine)
        layers = [dim for dim in loop_dims(model.graph) if allowed.pins.get(dim)]
        if layers:  # a pin of layers asks for stages
            stages = tuple(dict.fromkeys((*allowed.pipeline, *layers)))
            allowed = allowed.but(pipeline=stages, given=allowed.given | {"pipeline"})
        shapes = suited(model, shapes, allowed)
        restriction = allowed.restriction
        if restriction is EVERYTHING:
            restriction = restriction_of(machine.framework)
        restriction = restriction.of(model)
        restriction.narrowed(allowed, SearchSpace())  # refuses what somebody set
        if allowed.offload:
            _check_host(machine)
        objective = Objective(own["objective"])
        targets = [Target.on(machine, model, shape) for shape in shapes]
        spaces = allow.spaces(allowed, targets, objective)

        def ranks(mesh: Mesh) -> int:
            """Those that share the batch: as pinned, else all that are no stages."""
            if (over := allowed.pins.get(model.batch_dim or "")) is not None:
                return mesh.group_size(over)
            return mesh.devices // math.prod(mesh.group_size(allowed.pins[dim]) for dim in layers)

        free = [each.settled(objective).but(restriction=EVERYTHING) for each in spaces]
        if "microbatches" not in allowed.given:
            parts = {USUAL: tuple(sorted({n for mesh in shapes for n in usual(model, ranks(mesh))}))}
            free = [s.but(microbatches=parts.get(s.microbatches, s.microbatches)) for s in free]
        within = [restriction.narrowed(each).but(restriction=restriction) for each in free]
        memory = machine.usable_memory_bytes if limits.memory is None else float(limits.memory)
        asked = (memory, objective, within[0], limits.top, clock, on_progress, limits.on_better)
        request = Request(model, machine, *asked)
        everything = allow.EVERYTHING in (allowed.allow or allow.unsaid())
        return cls(request, within[: 1 + (within[-1] != within[0])], free, shapes, limits, own, everything)

    def beyond(self, found: EvaluatedLayout) -> SearchQuestion:
        """The same with a wider last space: with the mesh, schedule, microbatches and numbers of recomputed
        layers of a layout."""
        last, free = (self._with(each[-1], found) for each in (self.spaces, self.free))
        shapes = [*self.shapes, found.mesh] if found.mesh not in self.shapes else self.shapes
        return replace(self, spaces=[*self.spaces[:-1], last], free=[*self.free[:-1], free], shapes=shapes)

    @staticmethod
    def _with(space: SearchSpace, found: EvaluatedLayout) -> SearchSpace:
        options, own = found.options, (found.options.schedule,) if found.evaluation.pipeline else ()
        some = (f"{COUNT}{each.only}" for each in options.recompute if each.only)
        return space.but(
            microbatches=tuple(sorted({*space.microbatches, options.microbatches})),
            schedule=tuple(dict.fromkeys((*space.schedule, *own))),
            recompute=tuple(dict.fromkeys((*space.recompute, *some))),
        )

    @property
    def renames(self) -> bool:
        """True if a plan gives the axes of its mesh other names."""
        return self.own["mesh"] is None

    @property
    def unnamed(self) -> bool:
        """True if nobody named the framework: it is the model's own."""
        chosen = self.request.hardware.framework
        return self.own["framework"] is None and chosen == self.request.model.framework

    def recorded(self, beyond: bool = False) -> Searched:
        """The question as plans have it; `beyond`: about everything, after the usual."""
        own, request, first, every = self.own, self.request, recorded(self.free[0]), recorded(self.free[-1])
        space = every if beyond else first
        return Searched(
            hardware=own["hardware"] if isinstance(own["hardware"], str) else own["hardware"].name,
            memory_bytes=None if self.limits.memory is None else int(min(request.limit, LARGEST)),
            devices=None if own["devices"] is None else int(own["devices"]),
            max_axes=int(self.limits.max_axes),
            objective=request.objective,
            by_ranks="microbatches" not in request.allowed.given and first["microbatches"] != USUAL,
            **space,
            **({"first": {n: v for n, v in first.items() if v != space[n]}} if beyond else {}),
        )


def _check(
    mesh: Any, devices: Any, objective: Any, limits: Limits, seconds: Any, allowed: SearchSpace
) -> None:
    """Refuses arguments of the wrong kind, whatever their annotations say."""
    if objective not in (*Objective,):
        raise UserError(f"objective {objective!r} is unknown; choose one of {', '.join(Objective)}")
    if not isinstance(mesh, Mesh | str | None):
        raise UserError(
            f"{mesh!r} is not a mesh; give a Mesh, or its axes as a string, e.g. 'data:2;model:4'"
        )
    if mesh is not None and not str(mesh).strip():
        raise UserError("--mesh is empty; give its axes, e.g. --mesh 'data:2;model:4'")
    if (mesh is None) == (devices is None):
        raise UserError("give either a mesh (--mesh 'data:2;model:4') or a number of devices (--devices 8)")
    top = limits.top
    for name, number in (("--devices", devices), ("--max-axes", limits.max_axes), ("--top", top)):
        if number is not None and not is_whole(number):
            raise UserError(f"{name} is {number!r}; give a whole number")
    check_limit(limits.memory)
    if not isinstance(limits.start, Plan | None):
        raise UserError(f"start is {limits.start!r}; pass a Plan, e.g. of layoutopt.load_plan")
    if top < 1:
        raise UserError(f"--top is {top}; give a whole number of at least 1")
    if top > MOST_LISTED:
        raise UserError(f"--top is {top}; give at most {MOST_LISTED:,}")
    if seconds is not None and not (is_number(seconds) and 0 < float(seconds) < math.inf):
        raise UserError(f"--time-limit is {seconds!r}; give a positive number of seconds")
    if mesh is None and allowed.diloco:
        raise UserError(
            "--diloco refers to mesh axes by name; give the mesh with --mesh instead of --devices"
        )


def _check_host(hardware: Hardware) -> None:
    """UserError unless something may lie on the hosts of some hardware."""
    if hardware.is_host:
        raise UserError(
            f"--offload: on {hardware.name}, devices and host share one memory, so offloading gains "
            "nothing; remove --offload"
        )
    hardware.host_seconds(0.0)
