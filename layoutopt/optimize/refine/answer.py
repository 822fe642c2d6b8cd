"""From the plan of a search to a refined one, with its gain in the user's terms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count

from costmodels.pricing.pricer import pricer
from layoutopt.optimize.evaluation import Evaluation
from layoutopt.optimize.evaluator import evaluate
from layoutopt.optimize.planning import repeated_work, share_bound
from layoutopt.optimize.refine.improve import RefineSearch
from layoutopt.optimize.refine.model_places import regions
from layoutopt.optimize.request import Request
from layoutopt.plan.build import Plan, axes_of, decided
from layoutopt.plan.decided import Decided
from layoutopt.plan.schema import Alternative, PlanFile, ProofStatus, Refinement, Renaming, SolverInfo
from layoutopt.plan.units import seconds_text, share_text, some
from layoutopt.runtime.clock import Clock
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.tracing.graph import Graph

LONGEST, ENDED = 40.0, 0.5
"""Largest seconds of a refinement, and seconds after which current work is ended."""
NAMED = 6
"""Places that a sentence names."""
PLAIN = "no renaming"
"""Name of the layout that was refined, among the alternatives."""


def refined(plan: Plan, request: Request, keep_best: bool = False) -> Plan:
    """The plan with dimensions placed otherwise in single places, as far as that takes less time and fits;
    the same plan, with a note, if nothing does.

    Args:
      request: the request of the plan.
      keep_best: Ctrl-C ends the looking for better, and the plan is `stopped`.
    """
    stopped, limit = plan.stopped, request.clock.left
    clock = Clock(LONGEST if limit is None else min(LONGEST, limit))
    prices = pricer(request.hardware, plan.mesh)
    search = RefineSearch(
        request.model,
        plan.mesh,
        plan.options,
        request.allowed,
        prices,
        request.limit,
        clock,
        lambda seconds, peak: _tell(request, seconds, peak),
    )
    answer: list[Layout] = []
    try:
        if limit != 0.0:
            clock.within(ENDED, lambda: answer.append(search.best(plan.layout)))
    except KeyboardInterrupt:
        if not keep_best:
            raise
        stopped = True
    layout = answer[0] if answer else search.found or plan.layout
    spent = clock.elapsed
    priced = sum(seconds < math.inf for seconds in search.seconds.values())
    if layout == plan.layout:
        why = (
            "the time limit was reached before the search evaluated"
            if priced < 2
            else (
                f"none of the {priced - 1:,} layouts evaluated is faster than the plan, so the result "
                "keeps one placement per dimension instead of"
            )
        )
        note = f"--refine: {why} other placements in single operations"
        return Plan(plan.data.model_copy(update={"notes": [*plan.data.notes, note]}), stopped)
    found = evaluate(request.model, plan.mesh, layout, request.hardware, plan.options, prices)
    return Plan(_data(plan, request, search, layout, found, priced, spent), stopped)


def _tell(request: Request, seconds: float, peak: int) -> None:
    if request.on_better:
        request.on_better("refined", seconds, peak)


def _data(
    plan: Plan,
    request: Request,
    search: RefineSearch,
    layout: Layout,
    found: Evaluation,
    priced: int,
    spent: float,
) -> PlanFile:
    """The plan file of a refined layout; the layout that it was made of is among its alternatives."""
    own, graph = plan.data, request.model.training_step(plan.options.microbatches).graph
    seconds, before = found.cost.step_seconds, plan.predicted.step_seconds
    bound = min(seconds, share_bound(request, plan.mesh).value)
    solver = SolverInfo(
        status=ProofStatus.FEASIBLE,
        objective=seconds,
        bound=bound,
        gap=(seconds - bound) / seconds,
        wall_seconds=(plan.solver.wall_seconds or 0.0) + spent,
        layouts_considered=f"{plan.solver.layouts_considered} and {priced:,} refined",
    )
    renamed, rules = new_names(layout, graph), {path: dict(found) for path, found in layout.refined}
    renamings = []
    for paths in regions(layout, graph):
        saves = search.worth(layout, paths)
        changes: dict[tuple[str, Axes], list[str]] = {}
        for path in paths:
            for change in rules[path].items():
                changes.setdefault(change, []).append(_where(path, graph))
        renamings.append(
            Renaming(
                where=list(paths),
                names={renamed[change]: change[0] for change in changes},
                saves_seconds=saves,
                words=_words(
                    {renamed[change]: (change, where) for change, where in changes.items()}, saves, seconds
                ),
            )
        )
    renamings.sort(key=lambda r: -(r.saves_seconds or 0.0))
    total = f"{seconds_text(before - seconds)} ({share_text(before - seconds, before)})"
    proof = "proven" if plan.solver.proven else "not proven"
    notes = [
        f"refined: the step is {total} shorter than the {seconds_text(before)} of the best layout with "
        f"one placement per dimension name ({proof}; listed as the first alternative)",
        *(r.words for r in renamings),
    ]
    whole = evaluate(request.model, plan.mesh, plan.layout, request.hardware, plan.options, search.pricer)
    parts = plan.options.microbatches
    stale = {*whole.notes, *repeated_work(request, whole, parts, {})}
    again = repeated_work(request, found, parts, {})
    plain = Alternative(
        name=PLAIN,
        mesh=own.mesh,
        layout=own.layout,
        predicted=own.predicted,
        **{name: getattr(own, name) for name in Decided.model_fields},
    )
    beside = decided(plan.options, layout, request.model.stages(plan.mesh, layout))
    return own.model_copy(
        update={
            "layout": axes_of(layout),
            **{n: getattr(beside, n) for n in Decided.model_fields},
            "predicted": found.predicted,
            "solver": solver,
            "alternatives": [plain, *own.alternatives],
            "notes": [*(n for n in own.notes if n not in stale), *found.notes, *again, *notes],
            "refinement": Refinement(
                plain_seconds=before,
                plain_status=plan.solver.status,
                saves_seconds=before - seconds,
                renamings=renamings,
            ),
        }
    )


def new_names(layout: Layout, graph: Graph) -> dict[tuple[str, Axes], str]:
    """New names, unused in the model, for each dimension and each placement that it has in single places."""
    taken, found = {*graph.dims()}, dict[tuple[str, Axes], str]()
    for _, rules in layout.refined:
        for dim, axes in rules:
            if (dim, axes) not in found:
                found[dim, axes] = next(n for i in count(2) if (n := f"{dim}{i}") not in taken)
                taken.add(found[dim, axes])
    return found


def _where(path: str, graph: Graph) -> str:
    """A place in words: a loop stands for what it carries."""
    for node, _ in graph.walk():
        if node.path == path and node.body is not None and node.body.dim is not None:
            return f"the values that the loop over {node.body.dim.name} carries"
    return path


def _words(
    changes: Mapping[str, tuple[tuple[str, Axes], Sequence[str]]], saves: float | None, seconds: float
) -> str:
    """'renaming heads to heads2 (over data) in decoder/attention: saves 1.2 ms (3.0%)'."""
    parts = [
        f"{dim} to {name} ({'over ' + '+'.join(axes) if axes else 'not split'}) in {some(where, NAMED)}"
        for name, ((dim, axes), where) in changes.items()
    ]
    gain = "" if saves is None else f": saves {seconds_text(saves)} ({share_text(saves, seconds + saves)})"
    return f"renaming {'; '.join(parts)}{gain}"
