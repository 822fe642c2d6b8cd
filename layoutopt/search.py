"""The search over mesh shapes: each one's integer program, the best of them, and the plan with everything beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from costmodels.hardware import Hardware, load_hardware
from costmodels.topology import Cluster
from layoutopt.baselines import axis_names, batch_dim, mesh_shapes, named_layouts
from layoutopt.domains import domains, parse_rules
from layoutopt.evaluate import Evaluation, alternative, gib
from layoutopt.extract import count_layouts
from layoutopt.mesh_search import Found, MeshSearch
from layoutopt.plan import FORMAT, Alternative, ModelInfo, Plan, PlanFile, Predicted, SolverInfo
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.layout import Axes, Layout
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model

Progress = Callable[[str, float, float], None]
"""on_progress(mesh, best seconds so far, proven bound on this mesh)."""
OBJECTIVES = ("time", "memory", "pareto")
EXACT = 1e-9
"""Relative gap below which a bound equals its objective: solvers count costs in whole units of about this size."""
Rules = str | Mapping[str, Axes] | None


@dataclass(frozen=True)
class Request:
    """What is asked of a search, checked."""

    model: Model
    hardware: Hardware
    limit: float
    objective: str
    pins: Mapping[str, Axes]
    forbid: Mapping[str, Axes]
    top: int
    deadline: float | None
    on_progress: Progress | None


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
) -> Plan:
    """The best layout of a model, with its proof.

    Args:
      mesh: the mesh; or give `devices`, and its shape (up to `max_axes` axes) is searched too.
      hardware: a preset's name, a file, or a Hardware.
      memory: bytes that a device may hold (None: what the hardware has).
      objective: `time` (least seconds that fit), `memory` (least peak), or `pareto` (adds the frontier of both).
      pins, forbid: rules such as "batch:data"; `batch:none` pins a dimension to not being split.
      top: how many of the best layouts to list.
      time_limit: seconds.

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
    )
    results = _Results(request)
    for shape in _meshes(mesh, devices, max_axes, chosen):
        results.add(shape)
    best = results.answer()
    names = axis_names(best.layout, best.mesh, batch_dim(model)) if mesh is None else {}
    return _plan(request, results, best, names, time.monotonic() - started)


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


def _meshes(mesh: Mesh | str | None, devices: int | None, max_axes: int, hardware: Hardware) -> list[Mesh]:
    if mesh is not None:
        return [Mesh(mesh) if isinstance(mesh, str) else mesh]
    assert devices is not None
    shapes = mesh_shapes(devices, max_axes, isinstance(hardware.topology, Cluster))
    return [Mesh([(f"axis{i}", n) for i, n in enumerate(s)]) for s in shapes]


@dataclass
class _Results:
    """The best over the mesh shapes so far, and what is proven about all of them."""

    request: Request
    best: Found | None = None
    bound: float = math.inf
    proven: bool = True
    considered: int = 0
    frontier: list[Found] = field(default_factory=list)
    searches: dict[Mesh, MeshSearch] = field(default_factory=dict)

    def add(self, mesh: Mesh) -> None:
        """Searches one mesh shape."""
        request = self.request
        options = domains(request.model.graph, mesh, request.pins, request.forbid)
        self.considered += count_layouts(options)
        search = self.searches[mesh] = MeshSearch(request.model, mesh, options, request.hardware)
        if request.objective == "time":
            upper = self.best.seconds if self.best else None
            outcomes = [search.fastest(request.limit, upper, request.deadline, lambda a, b: self._tell(mesh, a, b))]
        else:
            outcomes = search.frontier(request.limit, request.deadline)
        for outcome in outcomes:
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
            found = search.least_memory(deadline=request.deadline).found
            if found is not None and (leanest is None or found.peak < leanest.peak):
                leanest = found
        asked = f"no layout of {request.model.name!r} fits into {gib(request.limit)} a device"
        if leanest is None:
            return f"{asked}: the pins and prohibitions allow no legal layout; drop one of them"
        held = ", ".join(f"{h.what} ({gib(h.bytes)})" for h in leanest.judged.memory.holdings[:3])
        return (
            f"{asked}: the leanest one, {str(leanest.layout) or 'replicated'} on {leanest.mesh}, needs "
            f"{gib(leanest.peak)}, {gib(leanest.peak - request.limit)} over; its largest tensors: {held}; "
            "use more devices or more memory, or a smaller batch"
        )


def _plan(request: Request, results: _Results, best: Found, names: Mapping[str, str], seconds: float) -> Plan:
    data = PlanFile(
        format=FORMAT,
        model=ModelInfo(
            name=request.model.name,
            fingerprint=request.model.fingerprint,
            hparams=dict(request.model.hparams),
            parameters=request.model.parameters,
        ),
        mesh=_mesh(best.mesh, names).as_dict(),
        layout=_form(_renamed(best.layout, names)),
        hardware=request.hardware.name,
        predicted=_predicted(best.judged, names),
        solver=_solver(request, results, best, seconds),
        alternatives=_alternatives(request, results, best, names),
        frontier=[_point(f, i) for i, f in enumerate(results.frontier)] or None,
        notes=_notes(best),
    )
    return Plan(data)


def _solver(request: Request, results: _Results, best: Found, seconds: float) -> SolverInfo:
    value = float(best.peak) if request.objective == "memory" else best.seconds
    bound = value if request.objective == "memory" and results.proven else min(results.bound, value)
    gap = (value - bound) / value if value else 0.0
    gap, bound = (0.0, value) if gap < EXACT else (gap, bound)
    return SolverInfo(
        status="OPTIMAL" if results.proven and gap <= 1e-6 else "FEASIBLE",
        objective=value,
        bound=bound,
        gap=gap,
        wall_seconds=seconds,
        layouts_considered=f"{results.considered:,}",
    )


def _notes(best: Found) -> list[str]:
    table, value = best.solution.objective, best.seconds
    if abs(table - value) <= EXACT * value:
        return []
    return [
        f"the tables sum to {table:.9g} s and the lowered program costs {value:.9g} s "
        f"({(table / value - 1) * 100:+.2g} %), because messages that travel together share more than their latency"
    ]


def _mesh(mesh: Mesh, names: Mapping[str, str]) -> Mesh:
    return Mesh([(names.get(a, a), n) for a, n in mesh.axes])


def _renamed(layout: Layout, names: Mapping[str, str]) -> Layout:
    return Layout({n: tuple(names.get(a, a) for a in axes) for n, axes in layout.items()})


def _form(layout: Layout) -> dict[str, list[str]]:
    return {n: list(a) for n, a in layout.items()}


def _predicted(judged: Evaluation, names: Mapping[str, str]) -> Predicted:
    found = judged.predicted
    sent = {
        "+".join(names.get(a, a) for a in key.split("+")): n
        for key, n in found.communication_bytes_per_device.items()
    }
    return found.model_copy(update={"communication_bytes_per_device": sent})


def _point(found: Found, number: int) -> Alternative:
    return Alternative(
        name=f"frontier {number + 1}",
        mesh=found.mesh.as_dict(),
        layout=_form(found.layout),
        predicted=found.judged.predicted,
        feasible=True,
    )


def _alternatives(
    request: Request, results: _Results, best: Found, names: Mapping[str, str]
) -> list[Alternative]:
    """Named baselines on the answer's mesh, the best layout that leaves the batch whole, and the next best ones."""
    model, hardware, limit = request.model, request.hardware, request.limit
    mesh = _mesh(best.mesh, names)
    options = domains(model.graph, mesh)
    out = [
        alternative(name, model, its_mesh, layout, hardware, limit)
        for name, its_mesh, layout in named_layouts(model, mesh, options)
    ]
    batch = batch_dim(model)
    if batch and len(options[batch]) > 1:
        whole = MeshSearch(model, mesh, {**options, batch: ((),)}, hardware)
        found = whole.fastest(math.inf, deadline=request.deadline).found
        if found is not None:
            out.append(alternative("model parallel (best)", model, mesh, found.layout, hardware, limit))
    out += _next_best(request, results.searches[best.mesh], best, names)
    return out


def _next_best(request: Request, search: MeshSearch, best: Found, names: Mapping[str, str]) -> list[Alternative]:
    """The second best distinct layout on the answer's mesh, the third, and so on."""
    out: list[Alternative] = []
    banned = [best.solution.choices or ()]
    seen = {best.layout}
    while len(out) < request.top - 1:
        found = search.fastest(request.limit, deadline=request.deadline, excluded=tuple(banned)).found
        if found is None:
            break
        banned.append(found.solution.choices or ())
        if found.layout in seen:  # the same layout with a message group opened in vain
            continue
        seen.add(found.layout)
        layout, mesh = _renamed(found.layout, names), _mesh(found.mesh, names)
        name = f"number {len(seen)}"
        out.append(alternative(name, request.model, mesh, layout, request.hardware, request.limit))
    return out
