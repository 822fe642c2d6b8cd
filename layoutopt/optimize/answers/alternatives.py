"""Alternatives to an answer, each with its price: the best of every name, the model's own layouts, the
results of simpler searches, the next best layouts, the points of a frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from layoutopt.optimize.driver.search import LayoutSearch
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.heuristics import baselines
from layoutopt.optimize.heuristics.baselines import HEURISTICS
from layoutopt.optimize.heuristics.best_plans import FAR, BestPlans, StrategyAnswer
from layoutopt.optimize.problems.bounds import EXACT
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import near_axes
from layoutopt.plan.build import axes_of, decided
from layoutopt.plan.schema import Alternative, Predicted
from layoutopt.space.decisions import FEATURES, SearchSpace
from layoutopt.space.kind import GATHER, HYBRID, Feature
from layoutopt.space.objective import Objective
from layoutopt.space.undivided import storage_of, stored_at, undivided
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.nodes import crossed
from mesh_tf_core.lower.storage import MOST_SPLIT, STAGES
from mesh_tf_core.ops.context import FORMS

HEADROOM, TIED = "with memory headroom", "half the memory, time within 0.2 %"
"""The names of the fastest layout that surely fits, if the answer barely does, and of one that is as fast as
the answer, as far as predictions can tell."""
TIE = 0.002
"""Relative difference of times below that of any two measurements of one layout."""

Shapes = Set[tuple[int, ...]] | None
NamedLayout = tuple[Mesh, Layout, Options]


@dataclass
class Alternatives:
    """The best layout of every name on any mesh with the same devices, the model's own layouts, and results
    of simpler searches; without time, only layouts that are predicted already.

    Attributes:
      names: names of the mesh's axes.
      shapes: of meshes that baselines may have (None: all of one or two axes).
      found: results so far.
      missing: names that were skipped for lack of time.
      over, far: names whose plans are all too large, or all so slow that no fitting one was searched.
      none: names that no plan has, as storage splits too little.
      full: it is proven that none of the layouts surely fits.
      plans: of each name.
      usual: the request of the usual layouts, if the search went on from these.
    """

    request: Request
    best: EvaluatedLayout
    names: Mapping[str, str]
    shapes: Shapes
    found: list[Alternative] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    far: list[str] = field(default_factory=list)
    none: list[str] = field(default_factory=list)
    full: bool = False
    plans: Mapping[str, Sequence[baselines.NamedStrategy]] = field(default_factory=dict)
    usual: Request | None = None

    def look(self, searched: LayoutSearch, usual: LayoutSearch | None = None) -> None:
        """Fills them in; `searched` has found the answer, perhaps after `usual`."""
        request, best = self.request, self.best
        first = usual if usual and usual.incumbents.has(best.mesh, best.layout, best.options) else searched
        subproblem = first.incumbents.subproblem_of(best)
        quick = {name: (m, x, o) for name, m, x, o in baselines.by_name(request.model, best.mesh, self.names)}
        quick = {name: own for name, own in quick.items() if searched.incumbents.may_express(*own)}
        self.plans = plans = baselines.Baselines(request.model, best.mesh, self.shapes).plans()
        self.none = [] if {baselines.FSDP, baselines.CONTEXT} & plans.keys() else [baselines.FSDP]
        search = BestPlans((self.usual or self.request), best.seconds)
        self.missing += dict.fromkeys([*plans, *quick, *HEURISTICS])  # until they are found
        self._with_less_memory(searched)
        for name, some in plans.items():
            searched.told(f"alternatives: {name}")
            answer = StrategyAnswer(proven=search.none_fits(some)) if request.late else search.of(some)
            self._add(name, answer, quick.pop(name, None))
        for name, own in quick.items():
            if self._put(name, own, self.names):
                self.missing.remove(name)
        for name, heuristic in HEURISTICS.items():
            searched.told(f"alternatives: {name}")
            known = None if request.late else heuristic((self.usual or self.request), subproblem)
            if known is not None and searched.incumbents.may_express(best.mesh, *known):
                pinned = baselines.Pinned(request.model, best.mesh, known[0])
                self._add(name, search.with_options(pinned), (best.mesh, *known))
            elif not request.late:
                self.missing.remove(name)

    def retry(self, searched: LayoutSearch) -> None:
        """Adds plans of names without one that fits: the fastest known one, else one with little memory."""
        search = BestPlans(self.usual or self.request, self.best.seconds)
        fits = {a.name for a in self.found if a.feasible}
        for name in [n for n in self.plans if n in self.missing and n not in fits]:
            known = searched.incumbents.fitting(self.request.limit)
            found = search.fastest_of(known, self.plans[name]) or search.lean(self.plans[name])
            if found is not None and found.peak <= self.request.limit:
                self.found = [a for a in self.found if a.name != name]
                self._put_found(name, found, self.shapes is not None)

    def _with_less_memory(self, searched: LayoutSearch) -> None:
        """Adds layouts that need less memory than the answer, where that has a use."""
        best, limit = self.best, self.request.limit
        if self.request.objective == Objective.MEMORY:
            return
        room, half = best.evaluation.room(limit), best.peak / 2
        if best.peak > room:
            found, proven = _within(searched, room)
            self.full = proven and found is None
            self._put_found(HEADROOM, found, searched.renames)
            self.missing += [] if proven else [HEADROOM]
        if best.peak > limit / 2:
            found, _ = _within(searched, half, best.seconds * (1 + TIE))
            self._put_found(TIED, found, searched.renames)

    def _put_found(self, name: str, found: EvaluatedLayout | None, renames: bool) -> None:
        if found is not None:
            self.found.append(called(self.request, name, found, renames))

    def _add(self, name: str, answer: StrategyAnswer, quick: NamedLayout | None) -> None:
        """The best of some plans, else the one that is known without a search."""
        found = answer.found
        chosen = quick if found is None else (found.mesh, found.layout, found.options)
        if chosen is not None:
            put = self._put(name, chosen, self.names if chosen[0] == self.best.mesh else {})
            if put and not self.found[-1].feasible and (answer.far or not answer.proven):
                self.found[-1] = self.found[-1].undecided
            if put and answer.proven and not self.found[-1].feasible:
                (self.far if answer.far else self.over).append(name)
        if answer.proven:
            self.missing.remove(name)

    @property
    def done(self) -> list[Alternative]:
        """The results; of a name that was not searched to its end they are marked."""
        return [a.model_copy(update={"cut": bool(a.feasible) and a.name in self.missing}) for a in self.found]

    def _put(self, name: str, own: NamedLayout, names: Mapping[str, str]) -> bool:
        """Whether there was time for it."""
        if self.request.late and not self.request.evaluator.knows(*own):
            return False
        self.found.append(priced(self.request, name, *own, names))
        return True

    def notes(self) -> list[str]:
        """Notes: why names without a fitting plan have none; the cost of the given mesh."""
        notes = []
        if self.over:
            why = "no variant fits in memory with the allowed storage, recomputation and microbatches"
            notes.append(f"{', '.join(self.over)}: {why}")
        if self.far:
            why = f"skipped, because every variant takes at least {FAR:g} times as long as the best layout"
            notes.append(f"{', '.join(self.far)}: {why}")
        if self.none and self._unsplit():
            notes.append(f"no layout is available for {', '.join(self.none)}: {self._unsplit()}")
        return notes + self._faster() + self._gathers() + self._not_by_name()

    def _not_by_name(self) -> list[str]:
        """What could be chosen, and layouts by name could not; and what of it the answer has."""
        request, best = self.request, self.best
        whole, few = request.allowed, baselines.chosen_by_name((self.usual or self.request).allowed)
        if not near_axes(best.mesh, whole, request.evaluator.near):  # hybrid means nothing here
            whole = whole.but(storage=tuple(stage for stage in whole.storage if stage != HYBRID))

        def allows(said: SearchSpace, feature: Feature) -> bool:
            return any(map(feature.means, getattr(said, feature.field)))

        lost = [f for f in FEATURES.values() if allows(whole, f) and not allows(few, f)]
        used = [f for f in lost if f.used(best.layout, best.options)]
        if not request.model.stages(best.mesh, best.layout):  # a layout does not say what counts layers
            used = [f for f in used if f.field != "pipeline"]
        if not lost:
            return []
        without, had = (", ".join(f.name for f in some) for some in (lost, used))
        said = f"named layouts were searched without {without}"
        return [said + (f"; the best layout uses {had}" if had else "")]

    def _unsplit(self) -> str:
        """Why storage splits too little where nothing else is split; '' if it does not."""
        graph, mesh = self.request.model.step_graph, self.best.mesh
        found = undivided(storage_of(graph, mesh, Layout(), stored_at(graph.variables.values(), MOST_SPLIT)))
        return str(found[0]) if found else ""

    def _gathers(self) -> list[str]:
        """That the answer gathers keys that it splits, where nothing else was asked for."""
        best, graph = self.best, self.request.model.graph
        split = [n for n in crossed(graph) if best.mesh.group_size(best.layout.axes(n)) > 1]
        if not split or self.request.allowed.context != (GATHER,):
            return []
        forms = ",".join((GATHER, *FORMS))
        return [
            (
                f"the best layout splits {', '.join(split)} and gathers the keys and values for "
                f"attention; to consider other forms of attention, search with --context {forms}"
            )
        ]

    def _faster(self) -> list[str]:
        """Why the search did not find layouts by name that are faster than its answer."""
        best = self.best
        if self.request.objective == Objective.MEMORY:
            return []
        seconds = best.seconds * (1 - EXACT)
        faster = [a for a in self.found if a.feasible and a.predicted and a.predicted.step_seconds < seconds]
        meshes = [
            f"{a.name} on {Mesh(a.mesh)} is faster than the best layout on {best.mesh}; to search every "
            f"mesh, use --devices {best.mesh.devices}"
            for a in faster
            if sorted(a.mesh.values()) != sorted(best.mesh.shape)
        ]
        why: dict[str, list[str]] = {}
        for a in faster:
            if sorted(a.mesh.values()) == sorted(best.mesh.shape):
                why.setdefault(self._not_allowed(a), []).append(a.name)
        return meshes + [
            (
                f"faster than the best layout found, but with {what}, which the search did not allow: "
                f"{', '.join(names)}"
            )
            for what, names in why.items()
            if what
        ]

    def _not_allowed(self, a: Alternative) -> str:
        """What a layout by name has that the search could not choose, as options."""
        allowed = self.request.allowed
        stages = {*a.storage.values()} or {STAGES[0]}
        found = [f"--storage {stage}" for stage in sorted(stages - {*allowed.storage})]
        found += ["--recompute never"] * (not a.recompute and False not in allowed.recompute)
        found += [f"--microbatches {a.microbatches}"] * (a.microbatches not in allowed.microbatches)
        found += ["splits other than those of --pin"] * bool(allowed.pins and not found)
        return " and ".join(found)


def _within(
    searched: LayoutSearch, limit: float, most: float = math.inf
) -> tuple[EvaluatedLayout | None, bool]:
    """The fastest layout that holds at most `limit` bytes and takes at most `most` seconds, after a search
    with more memory, and whether that is proven. Without time, it is one that was priced."""
    late, incumbents, proven = searched.request.late, searched.incumbents, searched.proven
    searched.proven, incumbents.most = not late, most
    try:
        found = incumbents.fastest(limit) if late else searched.fastest(limit)
        if found is None or found.seconds > most:
            return None, searched.proven
        return found if searched.request.late else searched.simpler(found), searched.proven
    finally:
        searched.proven, incumbents.most = proven, math.inf


def called(request: Request, name: str, found: EvaluatedLayout, searched_mesh: bool) -> Alternative:
    """A layout that was searched, with names for its own axes."""
    names = baselines.axis_names(found.layout, found.mesh, request) if searched_mesh else {}
    return priced(request, name, found.mesh, found.layout, found.options, names)


def priced(
    request: Request, name: str, mesh: Mesh, layout: Layout, options: Options, names: Mapping[str, str]
) -> Alternative:
    """A layout beside the answer, predicted, or with the reason why it is illegal; `names`: of the axes."""
    rules, used = layout.renamed(names), options
    predicted: Predicted | None = None
    reason: str | None
    try:
        evaluation = request.evaluator(mesh, layout, options)
    except LayoutError as error:
        reason = str(error)
    else:
        predicted, used = predicted_of(evaluation, names), evaluation.decided
        reason = evaluation.reason(request.limit)
    return Alternative(
        name=name,
        mesh=baselines.called_mesh(mesh, names).as_dict(),
        layout=axes_of(rules),
        predicted=predicted,
        feasible=reason is None,
        reason=None if reason is None else baselines.in_names(reason, names),
        **decided(used.renamed(names), rules, request.model.stages(mesh, layout)).model_dump(),
    )


def predicted_of(evaluation: Evaluation, names: Mapping[str, str]) -> Predicted:
    """The predicted step of an evaluation, with the given names of axes."""
    found = evaluation.predicted
    sent = {baselines.in_names(key, names): n for key, n in found.communication_bytes_per_device.items()}
    return found.model_copy(update={"communication_bytes_per_device": sent})
