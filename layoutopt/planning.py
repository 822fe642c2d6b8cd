"""From the best layout to a plan: prices, proof, the baselines beside it, names for the axes of a searched
mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layoutopt.baselines import axis_names, named_layouts
from layoutopt.domains import domains
from layoutopt.evaluate import Evaluation, alternative
from layoutopt.mesh_search import Found, MeshSearch
from layoutopt.plan import Alternative, ModelInfo, Plan, PlanFile, Predicted, SolverInfo
from layoutopt.request import EXACT, Request
from layoutopt.rivals import greedy, least_memory, model_parallel
from layoutopt.space import Space
from mesh_tf_core.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.mesh import Mesh


def make_plan(
    request: Request,
    best: Found,
    space: Space,
    search: MeshSearch | None,
    frontier: Sequence[Found],
    bound: float,
    proven: bool,
    considered: int,
    searched_mesh: bool,
    seconds: float,
) -> Plan:
    """The plan of the best layout.

    Args:
      space: what was decided where `best` is; search: its whole problem, for more than one best, if there
        was time to make it.
      bound: no layout takes fewer seconds (or bytes, if these are the objective); `proven` says whether all
        meshes were searched to the end.
      considered: number of combinations of decisions.
      searched_mesh: give the mesh's axes speaking names.
      seconds: wall time of the search.
    """
    names = axis_names(best.layout, best.mesh, request.model.batch_dim) if searched_mesh else {}
    data = PlanFile(
        format="layoutopt-plan/1",
        model=ModelInfo(
            name=request.model.name,
            fingerprint=request.model.fingerprint,
            hparams=dict(request.model.hparams),
            parameters=request.model.parameters,
        ),
        mesh=_mesh(best.mesh, names).as_dict(),
        layout=_form(_renamed(best.layout, names)),
        storage=_storage(best.options),
        recompute=sorted(best.options.recompute),
        microbatches=best.options.microbatches,
        hardware=request.hardware.name,
        predicted=_predicted(best.judged, names),
        solver=_solver(request, best, bound, proven, considered, seconds),
        alternatives=_alternatives(request, space, search, best, names),
        frontier=[_point(request, f, i, searched_mesh) for i, f in enumerate(frontier)] or None,
        notes=_notes(best),
    )
    return Plan(data)


def _storage(options: Options) -> dict[str, str]:
    return {name: STAGES[stage] for name, stage in sorted(options.storage.items()) if stage}


def _solver(
    request: Request, best: Found, bound: float, proven: bool, considered: int, seconds: float
) -> SolverInfo:
    value = float(best.peak) if request.objective == "memory" else best.seconds
    bound = min(bound, value)
    gap = (value - bound) / value if value else 0.0
    gap, bound = (0.0, value) if gap < EXACT else (gap, bound)
    return SolverInfo(
        status="OPTIMAL" if proven and gap <= 1e-6 else "FEASIBLE",
        objective=value,
        bound=bound,
        gap=gap,
        wall_seconds=seconds,
        layouts_considered=f"{considered:,}",
    )


def _notes(best: Found) -> list[str]:
    table, value = best.solution.objective, best.seconds
    if abs(table - value) <= EXACT * value:
        return []
    return [
        f"the tables sum to {table:.9g} s and the lowered program costs {value:.9g} s "
        f"({(table / value - 1) * 100:+.2g} %): what operations share is not all in the tables"
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


def _point(request: Request, found: Found, number: int, searched_mesh: bool) -> Alternative:
    names = axis_names(found.layout, found.mesh, request.model.batch_dim) if searched_mesh else {}
    return Alternative(
        name=f"frontier {number + 1}",
        mesh=_mesh(found.mesh, names).as_dict(),
        layout=_form(_renamed(found.layout, names)),
        predicted=_predicted(found.judged, names),
        feasible=True,
        storage=_storage(found.options),
        recompute=sorted(found.options.recompute),
        microbatches=found.options.microbatches,
    )


def _alternatives(
    request: Request, space: Space, search: MeshSearch | None, best: Found, names: Mapping[str, str]
) -> list[Alternative]:
    """Named baselines on the answer's mesh, the best one that leaves the batch whole, what simpler searches
    find, and the next best ones."""
    model, hardware, limit = request.model, request.hardware, request.limit
    mesh = _mesh(best.mesh, names)
    options = domains(model.graph, mesh)
    out = [
        alternative(name, model, its_mesh, layout, hardware, limit, opts)
        for name, its_mesh, layout, opts in named_layouts(model, mesh, options)
    ]

    def add(name: str, found: Found) -> None:
        layout = _renamed(found.layout, names)
        out.append(alternative(name, model, mesh, layout, hardware, limit, found.options))

    if (whole := model_parallel(request, space)) is not None:
        add("model parallel (best)", whole)
    splits = _renamed(greedy(request, space), names)
    out.append(alternative("greedy", model, mesh, splits, hardware, limit))
    if (lean := least_memory(request, space)) is not None:
        add("least memory (as auto_mtf)", lean)
    next_best = [] if search is None else _next_best(request, search, best)
    for number, found in enumerate(next_best, start=2):
        add(f"number {number}", found)
    return out


def _next_best(request: Request, search: MeshSearch, best: Found) -> list[Found]:
    """The second best distinct plan on the answer's mesh, the third, and so on."""
    out: list[Found] = []
    banned = [search.extraction.choices(best.layout, best.options) or ()]
    while len(out) < request.top - 1:
        found = search.fastest(request.limit, deadline=request.deadline, excluded=tuple(banned)).found
        if found is None:
            break
        banned.append(found.claimed)
        out.append(found)
    return out
