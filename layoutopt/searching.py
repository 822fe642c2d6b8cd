"""The search over mesh shapes and microbatches: each one's integer program, and the best of them.

The best time of a mesh without a memory limit bounds all its layouts; where that is no better than what was
found already, nothing else is solved. Where the hardware's prices say that a piece never costs less than its
share of the whole (`Pricer.pieces_cost_more`), the bound holds for every larger number of microbatches too,
and their tables are not even made; a calibrated machine may be faster in pieces, so there each is looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from costmodels.hardware import Hardware, load_hardware
from layoutopt.domains import parse_rules
from layoutopt.evaluate import gib
from layoutopt.extract import count_layouts
from layoutopt.mesh_search import Found, MeshSearch, Outcome
from layoutopt.plan import Plan
from layoutopt.planning import make_plan
from layoutopt.request import EXACT, OBJECTIVES, Progress, Request, Rules
from layoutopt.space import Space, meshes, spaces
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model

__all__ = ["OBJECTIVES", "Progress", "search"]


def search(
    model: Model,
    mesh: Mesh | str | None = None,
    devices: int | None = None,
    hardware: str | Hardware = "cpu-local",
    memory: float | None = None,
    objective: str = "time",
    pins: Rules = None,
    forbid: Rules = None,
    top: int = 1,
    time_limit: float | None = None,
    max_axes: int = 2,
    on_progress: Progress | None = None,
    storage: Sequence[str] = STAGES,
    recompute: Sequence[bool] = (False, True),
    microbatches: Sequence[int] = (1, 2, 4, 8),
) -> Plan:
    """The best layout of a model, with its proof.

    Args:
      mesh: the mesh; or give `devices`, and its shape (up to `max_axes` axes) is searched too.
      hardware: a preset's name, a file, or a Hardware.
      memory: bytes that a device may hold (None: what the hardware has).
      objective: `time` (least seconds that fit), `memory` (least peak), or `pareto` (adds the frontier of
      both).
      pins, forbid: rules such as "batch:data"; `batch:none` pins a dimension to not being split.
      top: how many of the best layouts to list.
      time_limit: seconds.
      storage: stages that variables may be stored at, of "layout", "zero1", "zero2", "zero3".
      recompute: whether the bodies of loops may, must or must not run again in backward.
      microbatches: numbers of parts that the batch may be split into; those that do not divide it are left
      out.

    Raises:
      InfeasibleError: proven that nothing fits; the message names the largest tensors.
      LimitError: nothing was found in time.
      UserError: wrong input.
    """
    started = time.monotonic()
    chosen = load_hardware(hardware) if isinstance(hardware, str) else hardware
    _check(mesh, devices, memory, objective, top, time_limit, bool(pins or forbid))
    request = Request(
        model,
        chosen,
        chosen.usable_memory_bytes if memory is None else float(memory),
        objective,
        parse_rules(pins),
        parse_rules(forbid),
        top,
        None if time_limit is None else started + time_limit,
        on_progress,
        tuple(storage),
        tuple(recompute),
        tuple(sorted(set(microbatches))),
    )
    results = _Results(request)
    r = request
    shapes = meshes(mesh, devices, max_axes, chosen)
    results.add(spaces(model, shapes, r.pins, r.forbid, r.storage, r.recompute, r.microbatches))
    best = results.answer()
    known = results.searches[best.mesh, best.options.microbatches]
    return make_plan(
        request,
        best,
        known,
        results.frontier,
        results.bound,
        results.proven,
        results.considered,
        mesh is None,
        time.monotonic() - started,
    )


def _check(
    mesh: Mesh | str | None,
    devices: int | None,
    memory: float | None,
    objective: str,
    top: int,
    time_limit: float | None,
    ruled: bool,
) -> None:
    if objective not in OBJECTIVES:
        raise UserError(f"objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if (mesh is None) == (devices is None):
        raise UserError("give either a mesh (--mesh 'data:2;model:4') or a number of devices (--devices 8)")
    if memory is not None and not memory > 0:
        raise UserError(f"memory {memory}: needs a positive number of bytes")
    if top < 1:
        raise UserError(f"--top {top}: needs at least 1")
    if time_limit is not None and not time_limit > 0:
        raise UserError(f"--time-limit {time_limit}: needs a positive number of seconds")
    if mesh is None and ruled:
        raise UserError("--pin and --forbid name mesh axes: give the mesh with --mesh instead of --devices")


@dataclass
class _Results:
    """The best over the mesh shapes so far, and what is proven about all of them.

    Attributes:
      searches: of a mesh and a number of microbatches.
      least: seconds that no layout of these is faster than, nor of a multiple of the microbatches.
    """

    request: Request
    best: Found | None = None
    bound: float = math.inf
    proven: bool = True
    considered: int = 0
    frontier: list[Found] = field(default_factory=list)
    searches: dict[tuple[Mesh, int], MeshSearch] = field(default_factory=dict)
    least: dict[tuple[Mesh, int], float] = field(default_factory=dict)

    def add(self, found: Iterable[Space]) -> None:
        """Searches every space."""
        for space in found:
            self.considered += count_layouts(space.decided.options)
            if self.request.deadline is not None and time.monotonic() > self.request.deadline:
                self._take(Outcome(None, 0.0, False))
                continue
            if self.request.objective == "time":
                self._add_fastest(space)
            else:
                limit, deadline = self.request.limit, self.request.deadline
                for outcome in self._open(space).frontier(limit, deadline, self.request.objective):
                    self._take(outcome)

    def _add_fastest(self, space: Space) -> None:
        """Searches a space, unless what is known of fewer microbatches rules it out."""
        known = (t for (m, whole), t in self.least.items() if m == space.mesh and space.parts % whole == 0)
        if self._promising(max(known, default=0.0)):
            search = self._open(space)
            seconds = self._fastest(search, space.mesh)
            if search.prices.pieces_cost_more:
                self.least[space.mesh, space.parts] = seconds

    def _promising(self, bound: float) -> bool:
        """Whether something with this bound on its seconds may still be the best."""
        return self.best is None or bound < self.best.seconds * (1 - EXACT)

    def _open(self, space: Space) -> MeshSearch:
        search = MeshSearch(self.request.model, space.mesh, space.decided, self.request.hardware)
        self.searches[space.mesh, space.parts] = search
        return search

    def _fastest(self, search: MeshSearch, mesh: Mesh) -> float:
        """Looks for something faster than the best so far; returns a bound on `search`, whatever memory
        it takes."""
        request = self.request
        least = search.relaxed(request.deadline)
        if self._promising(least):
            upper = self.best.seconds if self.best else None
            self._take(
                search.fastest(request.limit, upper, request.deadline, lambda a, b: self._tell(mesh, a, b))
            )
        return least

    def _take(self, outcome: Outcome) -> None:
        self.proven &= outcome.proven
        self.bound = min(self.bound, outcome.bound)
        if outcome.found is not None:
            self._consider(outcome.found)

    def _consider(self, found: Found) -> None:
        by_memory = self.request.objective == "memory"
        if self.best is None or self._rank(found, by_memory) < self._rank(self.best, by_memory):
            self.best = found
        if self.request.objective == "pareto":
            kept = [f for f in self.frontier if not (found.seconds <= f.seconds and found.peak <= f.peak)]
            if not any(f.seconds <= found.seconds and f.peak <= found.peak for f in kept):
                kept.append(found)
            self.frontier = sorted(kept, key=lambda f: f.seconds)

    @staticmethod
    def _rank(found: Found, by_memory: bool) -> tuple[float, float]:
        return (found.peak, found.seconds) if by_memory else (found.seconds, found.peak)

    def _tell(self, mesh: Mesh, best: float, bound: float) -> None:
        if self.request.on_progress:
            known = self.best.seconds if self.best else math.inf
            self.request.on_progress(str(mesh), min(best, known), min(bound, known))

    def answer(self) -> Found:
        """The best layout, or the error that says why there is none."""
        if self.best is not None:
            return self.best
        if not self.proven:
            raise LimitError("nothing was found in the time given; raise --time-limit")
        raise InfeasibleError(self._infeasible())

    def _infeasible(self) -> str:
        """Names the least memory that any layout needs, and what fills it."""
        request = self.request
        leanest: Found | None = None
        for search in self.searches.values():
            found = search.lean(request.deadline)
            if found is not None and (leanest is None or found.peak < leanest.peak):
                leanest = found
        asked = f"no layout of {request.model.name!r} fits into {gib(request.limit)} a device"
        if leanest is None:
            return f"{asked}: the pins and prohibitions allow no legal layout; drop one of them"
        held = ", ".join(f"{h.what} ({gib(h.bytes)})" for h in leanest.judged.memory.holdings[:3])
        return (
            f"{asked}: the leanest one found, {str(leanest.layout) or 'replicated'} on {leanest.mesh}, needs "
            f"{gib(leanest.peak)}, {gib(leanest.peak - request.limit)} over; its largest tensors: {held}; "
            "use more devices or more memory, or a smaller batch"
        )
