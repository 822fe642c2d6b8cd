"""From the best layout to a plan: prices, proof, the baselines beside it, names for the axes of a searched
mesh.

Seconds are proven of the tables; what a plan shows is the price of the lowered program. It is OPTIMAL only if
the two agree on its layout within `layoutopt.problem.TOLERANCE` (relative), whoever found it. Where the
tables come to less, their bound holds, and the difference is the gap. Where they come to more, other layouts
may be cheaper than their tables, too: the bound is what is proven of every program, that no device computes
less than its share of what one would alone. A note says what the bound would be if the tables counted no
layout dearer than the ones at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from costmodels.repeated import near_sizes, repeated
from layoutopt.evaluator import Evaluation
from layoutopt.optimize.baselines import Baselines, Pinned, axis_names, by_name
from layoutopt.optimize.heuristics import HEURISTICS
from layoutopt.optimize.request import EXACT, Request
from layoutopt.optimize.restricted import Answer, BestPlans
from layoutopt.optimize.subproblem import Found
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.plan.build import Plan, axes_of, decided, model_info
from layoutopt.plan.schema import Alternative, PlanFile, Predicted, SolverInfo
from layoutopt.problem import TOLERANCE
from layoutopt.space.microbatches import impossible
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.verify import verify

Shapes = Set[tuple[int, ...]] | None
REPEATED_SHARE = 0.1
"""Work below this share of the products is not called repeated: most layouts repeat a little."""


def make_plan(
    request: Request,
    best: Found,
    subproblem: Subproblem,
    others: Sequence[Found],
    frontier: Sequence[Found],
    bound: float,
    proven: bool,
    considered: int,
    searched_mesh: bool,
    shapes: Shapes,
    seconds: float,
    stopped: bool = False,
) -> Plan:
    """The plan of the best layout.

    Args:
      subproblem: what was decided where `best` is.
      others: the next best layouts.
      bound: no layout takes fewer seconds (or bytes, if these are the objective); `proven` says whether all
        meshes were searched to the end.
      considered: number of combinations of decisions.
      searched_mesh: give the mesh's axes speaking names.
      shapes: of meshes that baselines may have (None: all of one or two axes).
      seconds: wall time of the search.
      stopped: Ctrl-C ended it.

    Raises:
      ProgramError: the program of the layout is not well-formed; a defect of lowering.
    """
    verify(best.evaluation.program)
    tables = _tables(request, best, subproblem, [f for f in others if f.mesh == best.mesh])
    names = axis_names(best.layout, best.mesh, request.model.batch_dim) if searched_mesh else {}
    alternatives, missing, notes = _alternatives(request, subproblem, best, names, shapes)
    ranked = _ranked(request, others, searched_mesh)
    if request.late:
        missing += [f"number {n}" for n in range(len(others) + 2, request.top + 1)]
    data = PlanFile(
        format="layoutopt-plan/1",
        model=model_info(request.model),
        mesh=_mesh(best.mesh, names).as_dict(),
        layout=axes_of(_renamed(best.layout, names)),
        **decided(best.options).model_dump(),
        hardware=request.hardware.name,
        predicted=_predicted(best.evaluation, names),
        solver=_solver(request, best, tables, bound, proven, considered, seconds),
        alternatives=[*alternatives, *ranked],
        frontier=[_point(request, f, i, searched_mesh) for i, f in enumerate(frontier)] or None,
        notes=[
            *best.evaluation.notes,
            *_notes(request, best, tables, bound, missing),
            *notes,
            *_repeated(request, best, names),
            *_unsplit(request),
            *_fewer(request, len(others) + 1),
        ],
    )
    return Plan(data, stopped)


@dataclass(frozen=True)
class _Tables:
    """What the tables say of layouts whose whole programs were priced.

    Attributes:
      seconds: their sum for the answer.
      program: seconds of the answer's program.
      over: by how much of a program's seconds they come to more, at most, of `count` layouts on its mesh.
    """

    seconds: float
    program: float
    over: float
    count: int

    @property
    def dearer(self) -> bool:
        """Whether their bound on the answer is none on programs."""
        return self.seconds > self.program * (1 + TOLERANCE)


def _tables(request: Request, best: Found, subproblem: Subproblem, others: Sequence[Found]) -> _Tables | None:
    """What the tables sum to for the answer, however it was found; None if seconds are not the objective."""
    if request.objective == "memory":
        return None
    summed = request.evaluator.table_prices(best.mesh, subproblem.decided).seconds
    found = _Tables(summed(best.layout, best.options), best.seconds, 0.0, 1)
    if not found.dearer:
        return found
    ratios = [found.seconds / found.program]
    named = [(n.layout, n.options) for n in others]
    named += [(layout, options) for _, mesh, layout, options in by_name(request.model, best.mesh)]
    for layout, options in named:
        options = replace(options, microbatches=best.options.microbatches)
        seconds = summed(layout, options)
        if seconds < math.inf:
            ratios.append(seconds / request.evaluator(best.mesh, layout, options).cost.step_seconds)
    return replace(found, over=max(ratios) - 1, count=len(ratios))


def _solver(
    request: Request,
    best: Found,
    tables: _Tables | None,
    bound: float,
    proven: bool,
    considered: int,
    seconds: float,
) -> SolverInfo:
    value = float(best.peak) if tables is None else best.seconds
    bound = min(bound, value)  # but for rounding, and what the tables count too much within the tolerance
    if tables is not None and tables.dearer:
        bound, proven = min(bound, _share(request, best.mesh)), False
    gap = (value - bound) / value if value else 0.0
    gap, bound = (0.0, value) if gap < EXACT else (gap, bound)
    return SolverInfo(
        status="OPTIMAL" if proven and gap <= TOLERANCE else "FEASIBLE",
        objective=value,
        bound=bound,
        gap=gap,
        wall_seconds=seconds,
        layouts_considered=f"{considered:,}",
    )


def _share(request: Request, mesh: Mesh) -> float:
    """Seconds of a device's share of what one device would compute alone: no layout takes less, as far as
    pieces never cost less than their share of the whole; else 0."""
    if not request.evaluator.prices(mesh).pieces_cost_more:
        return 0.0
    return request.evaluator(mesh, Layout()).cost.compute_seconds / mesh.devices


def _notes(
    request: Request, best: Found, tables: _Tables | None, bound: float, missing: Sequence[str]
) -> list[str]:
    notes = [f"no time was left for these layouts beside the answer: {', '.join(missing)}"] if missing else []
    if tables is None or abs(tables.seconds - tables.program) <= EXACT * tables.program:
        return notes
    notes.append(
        f"the tables sum to {tables.seconds:.9g} s and the lowered program costs {tables.program:.9g} s "
        f"({(tables.seconds / tables.program - 1) * 100:+.2g} %): what operations share is not all in the "
        "tables"
    )
    if tables.dearer:
        notes.append(
            "the bound is a device's share of what one device would compute: no program is below it; if the "
            f"tables come to at most {tables.over * 100:.2g} % more than the program of any layout, the most "
            f"of {tables.count} compared, no layout takes less than {bound / (1 + tables.over):.9g} s"
        )
    return notes


def _repeated(request: Request, best: Found, names: Mapping[str, str]) -> list[str]:
    """Which devices do the same work, and what would have to be another size for them to share it."""
    notes, batch = [], request.model.batch_dim
    for axis, found in repeated(best.evaluation.program).items():
        if found.share < REPEATED_SHARE:
            continue
        ways, name = best.mesh.size(axis), names.get(axis, axis)
        what = "all do the same work" if found.share == 1 else f"repeat {found.share:.0%} of the products"
        split = {n: best.mesh.group_size(best.layout.axes(n)) for n in found.dims}
        large = {n: size for n, size in found.dims.items() if size > 1}
        uneven = {n: size for n, size in large.items() if size % (ways * split[n])}
        why = "to split more takes longer, or is not allowed"
        if batch in uneven or uneven.keys() == large.keys():
            dims = [batch] if batch in uneven else sorted(uneven)
            why = "; ".join(_uneven(n, large[n], ways, split[n]) for n in dims)
        notes.append(f"the {ways} devices of axis {name!r} {what}: {why}")
    return notes


def _uneven(name: str, size: int, ways: int, split: int) -> str:
    """The nearest sizes of a dimension, and of an axis, that would divide."""
    parts, own = ways * split, size // split
    axes = [
        max(n for n in range(1, ways) if own % n == 0),
        next((n for n in range(ways, own) if own % n == 0), own),
    ]
    would = " or ".join(map(str, near_sizes(size, parts)))
    return (
        f"{name!r} of size {size} does not divide into {parts} parts; a size of {would} would, or an axis of "
        f"{' or '.join(map(str, dict.fromkeys(axes)))}"
    )


def _unsplit(request: Request) -> list[str]:
    """Which numbers of microbatches were left out, and why."""
    refused = impossible(request.model, request.allowed.microbatches)
    if not refused:
        return []
    return [f"not searched: --microbatches {','.join(map(str, refused))} ({next(iter(refused.values()))})"]


def _fewer(request: Request, count: int) -> list[str]:
    """Why fewer of the best layouts are listed than were asked for, unless the time was over."""
    if count >= request.top or request.late:
        return []
    if request.objective == "memory":
        return [
            f"--top {request.top}: layouts that hold more are in --objective pareto, {count} hold as little"
        ]
    return [f"--top {request.top}: {count} {'layout fits' if count == 1 else 'layouts fit'}"]


def _mesh(mesh: Mesh, names: Mapping[str, str]) -> Mesh:
    return Mesh([(names.get(a, a), n) for a, n in mesh.axes])


def _renamed(layout: Layout, names: Mapping[str, str]) -> Layout:
    return Layout({n: tuple(names.get(a, a) for a in axes) for n, axes in layout.items()})


def _predicted(evaluation: Evaluation, names: Mapping[str, str]) -> Predicted:
    found = evaluation.predicted
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
        layout=axes_of(_renamed(found.layout, names)),
        predicted=_predicted(found.evaluation, names),
        feasible=True,
        **decided(found.options).model_dump(),
    )


def _alternatives(
    request: Request, subproblem: Subproblem, best: Found, names: Mapping[str, str], shapes: Shapes
) -> tuple[list[Alternative], list[str], list[str]]:
    """The best of every name on any mesh of as many devices, the model's own layouts, and what simpler
    searches find; the names of those for which there was no time; notes."""
    out: list[Alternative] = []
    missing: list[str] = []
    over: list[str] = []
    far: list[str] = []

    def add(name: str, answer: Answer, quick: tuple[Mesh, Layout, Options] | None) -> None:
        """The best of some plans, else the one that is known without a search."""
        if not answer.proven:
            missing.append(name)
        found = answer.found
        chosen = quick if found is None else (found.mesh, found.layout, found.options)
        if chosen is not None:
            out.append(_beside(request, name, *chosen, names if chosen[0] == best.mesh else {}))
            if answer.proven and not out[-1].feasible:
                (far if answer.far else over).append(name)

    quick = {name: (m, x, o) for name, m, x, o in by_name(request.model, best.mesh, names)}
    baselines, search = Baselines(request.model, best.mesh, shapes), BestPlans(request, best.seconds)
    for name, plans in baselines.restrictions().items():
        add(name, Answer(proven=False) if request.late else search.of(plans), quick.pop(name, None))
    out += [_beside(request, name, *own, names) for name, own in quick.items()]
    for name, heuristic in HEURISTICS.items():
        known = None if request.late else heuristic(request, subproblem)
        if known is not None:
            add(name, search.with_options(Pinned(request.model, best.mesh, known[0])), (best.mesh, *known))
        elif request.late:
            missing.append(name)
    return out, missing, [*_never(over, far), *_elsewhere(request, best, out)]


def _never(over: Sequence[str], far: Sequence[str]) -> list[str]:
    """Why names whose plan does not fit have no other."""
    return [
        *(
            [
                "too large with every storage, recomputation and number of microbatches that was allowed: "
                + ", ".join(over)
            ]
            if over
            else []
        ),
        *([f"too slow to look for plans that fit: {', '.join(far)}"] if far else []),
    ]


def _elsewhere(request: Request, best: Found, out: Sequence[Alternative]) -> list[str]:
    """Where the mesh that was given costs time."""
    if request.objective == "memory":
        return []
    seconds = best.seconds * (1 - EXACT)
    faster = [a for a in out if a.feasible and a.predicted and a.predicted.step_seconds < seconds]
    return [
        f"{a.name} on {Mesh(a.mesh)} is faster than the answer on {best.mesh}; "
        f"search --devices {best.mesh.devices} looks at every mesh"
        for a in faster
        if sorted(a.mesh.values()) != sorted(best.mesh.shape)
    ]


def _ranked(request: Request, others: Sequence[Found], searched_mesh: bool) -> list[Alternative]:
    """The second best layout, the third, and so on, each with names for its own axes."""
    out = []
    for number, other in enumerate(others, start=2):
        names = axis_names(other.layout, other.mesh, request.model.batch_dim) if searched_mesh else {}
        out.append(_beside(request, f"number {number}", other.mesh, other.layout, other.options, names))
    return out


def _tried(
    request: Request, mesh: Mesh, layout: Layout, options: Options, names: Mapping[str, str]
) -> tuple[Predicted | None, str | None]:
    """What a layout comes to, and why it does not fit or is not legal."""
    try:
        evaluation = request.evaluator(mesh, layout, options)
    except LayoutError as error:
        return None, str(error)
    return _predicted(evaluation, names), evaluation.reason(request.limit)


def _beside(
    request: Request, name: str, mesh: Mesh, layout: Layout, options: Options, names: Mapping[str, str]
) -> Alternative:
    """A layout beside the answer, priced, or with the reason why it is not legal; `names`: of the axes."""
    called, rules = _mesh(mesh, names), _renamed(layout, names)
    predicted, reason = _tried(request, mesh, layout, options, names)
    if reason is not None and called != mesh:
        # Reasons speak of axes.
        predicted, reason = _tried(request, called, rules, options, {})
    return Alternative(
        name=name,
        mesh=called.as_dict(),
        layout=axes_of(rules),
        predicted=predicted,
        feasible=reason is None,
        reason=reason,
        **decided(options).model_dump(),
    )
