"""From the best layout to a plan: costs, proof, alternatives, names for the axes of a searched mesh.

The proof is about the tables; a plan shows the cost of the lowered program. It is OPTIMAL only if the two
agree on its layout within `layoutopt.solver.TOLERANCE` (relative), whoever found it. If the tables' sum is
less, their bound holds, and the difference is the gap. If it is more, other layouts may also be faster than
their tables. The bound is then one that holds for every program: no device computes less than its share of
the compute on one device. A note has the bound under the assumption that the tables exceed no layout by more
than the compared ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from costmodels.hardware import Hardware
from costmodels.network.topology import BETWEEN, place
from costmodels.repeated import near_sizes
from layoutopt.optimize.answers.alternatives import HEADROOM, Alternatives, Shapes, called, predicted_of
from layoutopt.optimize.driver.search import STOPPED, LayoutSearch
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.heuristics.agreement import TableAgreement, compared, hold_rows, rows_said, summed
from layoutopt.optimize.heuristics.baselines import axis_names, called_mesh, in_names
from layoutopt.optimize.problems.bounds import EXACT, Bound, BoundSource
from layoutopt.optimize.problems.request import BESIDE_SHARE, PLANNED, Request, left_whole, space_of
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import Subproblem
from layoutopt.plan.build import Plan, axes_of, decided, model_info
from layoutopt.plan.schema import PlanFile, ProofStatus, SolverInfo
from layoutopt.plan.trade_names import trade_names
from layoutopt.plan.units import bytes_text, gap_text, memory_option, seconds_text, some, step_change
from layoutopt.solver import TOLERANCE
from layoutopt.space.microbatches import impossible
from layoutopt.space.objective import Objective
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.verify import verify

SHARE = "the lower bound is the compute time of a single device divided by the number of devices"
NO_BOUND = "no lower bound is known to hold for every program"
NO_SHARE = Bound(0.0, BoundSource.SHARE)
NAMED = 5
"""Names that a note lists."""
REPEATED_SHARE = 0.1
"""Work below this share of the products is not called repeated: most layouts repeat a little."""


def make_plan(
    request: Request,
    search: LayoutSearch,
    best: EvaluatedLayout,
    others: Sequence[EvaluatedLayout] = (),
    shapes: Shapes = None,
    bound: Bound | None = None,
    alternatives: bool = True,
    usual: tuple[LayoutSearch, EvaluatedLayout | None] | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """The plan of the best layout.

    Args:
      search: has ended.
      others: the next best layouts.
      shapes: of meshes that baselines may have (None: all of one or two axes).
      bound: no layout takes fewer seconds, or bytes if these are the objective (None: the bound of `search`).
      alternatives: find those beside the answer.
      usual: the search from which `search` went on, and its answer.
      notes: what else is to be said.

    Raises:
      ProgramError: the program of the layout is not well-formed; a defect of lowering.
    """
    subproblem = search.incumbents.subproblem_of(best)
    searched = search.bound if bound is None else bound
    verify(best.evaluation.program)
    names = axis_names(best.layout, best.mesh, request) if search.renames else {}
    # A bound is known of all: then so is a device's share of the work, which needs no time that is left.
    proof, beside = _Proof(search.proven, searched), Alternatives(request, best, names, shapes)
    first, beside.usual = (None, None) if usual is None else (usual[0], usual[0].request)
    before = None if usual is None else _Proof(usual[0].proven, usual[0].bound)
    proof.doubt(request)
    limited = request.clock.limit is not None or not proof.proven
    for each in filter(None, (proof, before)):
        if request.objective != Objective.MEMORY and limited and 0 < each.searched.value < math.inf:
            each.share = share_bound(request, best.mesh)
    repeats: list[str] = []

    def look() -> None:
        if proof.proven:
            hold_rows(request, best, subproblem)
            proof.doubt(request)
        if before and usual and usual[1] and request.objective != Objective.MEMORY:
            known = usual[0].incumbents.subproblem_of(usual[1])
            before.look(usual[0].request, usual[1], known, [])
        if alternatives and request.late:  # only what is predicted already
            beside.look(search, first)
        if request.objective != Objective.MEMORY:
            proof.look(request, best, subproblem, [f for f in others if f.mesh == best.mesh])
        repeats.extend(repeated_work(request, best.evaluation, best.options.microbatches, names))
        if alternatives and not beside.missing and not beside.found:
            beside.look(search, first)
        beside.retry(search)

    with request.beside(0.0 if search.request.late else BESIDE_SHARE):
        request.clock.within(STOPPED if search.stopped else PLANNED, look)
    proof.doubt(request)  # Layouts that the alternatives searched may show it, too.
    missing = [*beside.missing]
    apart = None if search.proven or usual is None else usual[1]  # others are those of its search
    begin = 2 if apart is None or best.same(apart) else 1
    word = "number" if apart is None else "usual number"
    ranks = [f"{word} {n}" for n in range(begin, request.top - 1 + begin)]
    if search.request.late:
        missing += ranks[len(others) :]
    space = space_of(request, best.mesh, search.considered, shapes)
    wider = ", or --allow everything" if usual is None and space.not_looked_at else ""
    wider += ", or a longer --time-limit" if search.request.late else ""
    solver = _solver(request, best, proof, search.considered)
    notes = (
        *notes,  # storage that splits nothing is one sentence as the answer's and as the space's
        *request.model.notes(best.options),
        *best.evaluation.notes,
        *left_whole(request, best.evaluation),
        *_tight(request, best.evaluation, beside, wider),
        *_notes(proof, missing, tuple(search.unsplit), solver),
        *_origin(proof, best),
        *search.unopened,
        *beside.notes(),
        *repeats,
        *_unsplit(request),
        *([f"{said}; their bound therefore proves nothing"] if (said := rows_said(request)) else []),
        *_fewer(search.request, len(others) + 1),
    )
    put = partial(called, request, searched_mesh=search.renames)
    data = PlanFile(
        format="layoutopt-plan/1",
        model=model_info(request.model),
        mesh=called_mesh(best.mesh, names).as_dict(),
        layout=axes_of(best.layout.renamed(names)),
        **decided(
            best.evaluation.decided.renamed(names), best.layout.renamed(names), best.evaluation.pipeline
        ).model_dump(),
        hardware=request.hardware.name,
        framework=request.hardware.framework,
        slices={names.get(axis, axis): n for axis, n in _slices(request.hardware, best.mesh)},
        predicted=predicted_of(best.evaluation, names),
        solver=solver,
        space=space,
        usual=None if usual is None or before is None else _first(*usual, before, solver),
        alternatives=[*beside.done, *map(put, ranks, others)],
        frontier=[put(f"frontier {i}", f) for i, f in enumerate(search.frontier, 1)] or None,
        notes=[in_names(note, names) for note in dict.fromkeys(notes)],
    )
    plan = Plan(data, search.stopped)
    return plan.with_details(parallelism=trade_names(request.model, plan.mesh, plan.layout, data))


def nearest_plan(request: Request, search: LayoutSearch) -> Plan | None:
    """The plan that needs least memory, of a search that proved that none fits; None if none is known."""
    if search.nearest is None:
        return None
    least = Bound(search.least, BoundSource.TABLES)
    memory = replace(request, objective=Objective.MEMORY, top=1)
    plan = make_plan(memory, search, search.nearest, bound=least, alternatives=False)
    proof = plan.solver.model_copy(
        update={"status": ProofStatus.INFEASIBLE, "likely_bound": None, "likely_gap": None}
    )
    return Plan(plan.data.model_copy(update={"solver": proof}), model=request.model.second_runs(False))


def _slices(hardware: Hardware, mesh: Mesh) -> Iterator[tuple[str, int]]:
    """Axes that lie over several slices, or nodes of GPUs, which JAX calls slices, too."""
    placed = place(hardware, mesh)
    factors = ((axis, math.prod(placed.factor(axis, level) for level in BETWEEN)) for axis in mesh.names)
    return ((axis, n) for axis, n in factors if n > 1)


@dataclass
class _Proof:
    """What is known of an answer's bound when the time is over, if seconds are the objective.

    Attributes:
      proven: all meshes were searched to the end.
      searched: by the tables, no layout is better.
      share: no program takes less.
      tables: what they sum to for the answer, however it was found.
    """

    proven: bool
    searched: Bound
    share: Bound = NO_SHARE
    tables: TableAgreement | None = None

    @property
    def by_tables(self) -> bool:
        """True if what the tables prove holds of programs, as far as is known."""
        return self.tables is not None and not self.refuted

    @property
    def refuted(self) -> bool:
        """True if what the tables prove is known not to hold of programs."""
        return self.tables is not None and self.tables.dearer

    @property
    def bound(self) -> Bound:
        """The bound that holds of programs."""
        if not self.by_tables:
            return self.share
        return self.searched if self.proven or self.searched.value > self.share.value else self.share

    @property
    def likely(self) -> float | None:
        """The bound of tables that come to more than the answer's program, if those of no layout come to more
        by a larger share than those that were compared; None where the bound holds without that."""
        searched = self.searched.value
        if self.tables is None or not self.refuted or searched <= 0:
            return None
        return min(searched / (1 + self.tables.over), self.tables.program)

    def doubt(self, request: Request) -> None:
        """Takes back what is proven within memory rows, if any exceeds a program."""
        if request.evaluator.rows_over:
            self.proven, self.searched = False, NO_SHARE

    def look(
        self, request: Request, best: EvaluatedLayout, subproblem: Subproblem, rest: Sequence[EvaluatedLayout]
    ) -> None:
        """Finds it out; `rest`: layouts on the same mesh, to compare."""
        if not self.proven or request.late:
            self.share = share_bound(request, best.mesh)
        self.tables = tables = summed(request, best, subproblem, rest)
        if self.proven and not tables.dearer:
            tables = compared(request, best, subproblem, tables)
        if tables.dearer:
            self.share = share_bound(request, best.mesh)
        self.tables = tables


def _solver(request: Request, best: EvaluatedLayout, proof: _Proof, considered: int) -> SolverInfo:
    memory = request.objective == Objective.MEMORY
    value, found = float(best.peak) if memory else best.seconds, proof.searched if memory else proof.bound
    proven = proof.proven and (memory or proof.by_tables)
    bound = min(found.value, value)  # but for rounding, and what the tables count too much in the tolerance
    gap = (value - bound) / value if value else 0.0
    gap, bound = (0.0, value) if gap < EXACT else (gap, bound)
    likely = None if memory else proof.likely
    return SolverInfo(
        status=ProofStatus.OPTIMAL if proven and gap <= TOLERANCE else ProofStatus.FEASIBLE,
        objective=value,
        bound=bound,
        gap=gap,
        wall_seconds=request.clock.elapsed,
        layouts_considered=f"{considered:,}",
        likely_bound=likely,
        likely_gap=None if likely is None else (value - likely) / value,
    )


def _first(
    search: LayoutSearch, found: EvaluatedLayout | None, proof: _Proof, wider: SolverInfo
) -> SolverInfo:
    """The proof of a search's answer; where nothing is better in a wider space either, that of there."""
    request = search.request
    said: dict[str, Any] = {"wall_seconds": search.seconds, "layouts_considered": f"{search.considered:,}"}
    if found is None:
        none = ProofStatus.INFEASIBLE if search.none else ProofStatus.UNDECIDED
        return SolverInfo(status=none, **said)
    if wider.proven and wider.objective == search.incumbents.order(found)[0]:
        return wider.model_copy(update=said)
    proof.doubt(request)
    return _solver(request, found, proof, search.considered).model_copy(update=said)


def share_bound(request: Request, mesh: Mesh) -> Bound:
    """Seconds of a device's share of the compute on one device: no layout takes less, if pieces cost at least
    their share of the whole; else 0."""
    return Bound(request.evaluator.alone() / mesh.devices, BoundSource.SHARE)


def _notes(proof: _Proof, missing: Sequence[str], unsplit: Sequence[str], solver: SolverInfo) -> list[str]:
    why = "the searches of some named layouts reached their time limit, so others of the name may be faster"
    notes = [f"{why}: {', '.join(missing)}"] if missing else []
    tables = proof.tables
    if unsplit and not proof.proven:
        notes.append(
            "some operations have too many dimensions to enumerate all their splits, so the search did "
            f"not split {some(unsplit, NAMED)} there and optimality is not proven; pin some of these "
            "dimensions (--pin)"
        )
    elif not proof.proven and proof.bound is proof.share and proof.share.value > 0 and not proof.refuted:
        notes.append(f"{SHARE}, because the search proved no better bound within the time limit")
    if tables is None or not tables.said:
        return notes
    notes.append(tables.said)
    if solver.likely_bound is not None and solver.likely_gap is not None:
        known = f"{SHARE}, and the gap refers to this bound" if proof.share.value > 0 else NO_BOUND
        notes.append(
            f"{known}; in {tables.count} layouts compared, the cost "
            f"tables predict at most {tables.over * 100:.2g} % more than the lowered program, and if this "
            f"is true of every layout, none takes less than {seconds_text(solver.likely_bound)} and the gap "
            f"is {gap_text(solver.likely_gap)}"
        )
    return notes


def _origin(proof: _Proof, best: EvaluatedLayout) -> list[str]:
    """Where an answer comes from that was known without the search, which did not end."""
    if proof.proven or not best.origin:
        return []
    found = "within the time limit, the search found no layout that is faster than the one it began with"
    return [f"{found}: {best.origin}"]


def repeated_work(request: Request, of: Evaluation, microbatches: int, names: Mapping[str, str]) -> list[str]:
    """The devices that repeat work, and the sizes that would let them share it."""
    notes, batch, mesh, layout = [], request.model.batch_dim, of.program.mesh, of.program.layout
    for axis, found in of.repeated.items():
        if found.share < REPEATED_SHARE:
            continue
        ways, name = mesh.size(axis), names.get(axis, axis)
        repeated_share = f"repeat {found.share:.0%} of the matmuls' FLOPs"
        what = "all do the same work" if found.share == 1 else repeated_share
        split = {n: mesh.group_size(layout.axes(n)) for n in found.dims}
        large = {n: size for n, size in found.dims.items() if size > 1}
        uneven = {n: size for n, size in large.items() if size % (ways * split[n])}
        why = "splitting more dimensions over this axis is slower or not allowed"
        if batch in uneven or uneven.keys() == large.keys():
            dims = [batch] if batch in uneven else sorted(uneven)
            pieces = {batch: microbatches}
            why = "; ".join(_uneven(n, large[n], ways, split[n], pieces.get(n, 1)) for n in dims)
        notes.append(f"the {ways} devices along axis {name!r} {what}: {why}")
    return notes


def _uneven(name: str, size: int, ways: int, split: int, microbatches: int) -> str:
    """The nearest sizes of a dimension, and of an axis, that would divide; `size`: in one microbatch."""
    parts, own = ways * split, size // split
    known = divisors(own)
    axes = [max(n for n in known if n < ways), next((n for n in known if n >= ways), own)]
    would = " or ".join(map(str, near_sizes(size * microbatches, parts * microbatches)))
    each = f" in each of {microbatches} microbatches" if microbatches > 1 else ""
    return (
        f"{name!r} of size {size * microbatches} does not divide into {parts} equal parts{each}; use a "
        f"size of {would}, or a mesh axis of size {' or '.join(map(str, dict.fromkeys(axes)))}"
    )


def _tight(request: Request, of: Evaluation, beside: Alternatives, wider: str) -> list[str]:
    """That a plan barely fits, why that may not be enough, and what leaves more memory."""
    room, step, doubt = of.room(request.limit), of.cost.step_seconds, of.doubt(request.limit)
    if not doubt or request.objective == Objective.MEMORY:
        return [doubt] if doubt else []
    ease = f"for more headroom, search with --memory {memory_option(room)}"
    if beside.full:
        ease = "no layout searched leaves enough, so use more devices or a smaller batch"
    priced = [(a.predicted, a.name) for a in beside.found if a.predicted is not None and a.feasible]
    roomy = [(p, name) for p, name in priced if p.peak_memory_bytes <= room]
    if roomy:
        found, name = min(roomy, key=lambda each: (each[1] != HEADROOM, each[0].step_seconds))
        ease += (
            f" ({name}: peak memory {bytes_text(found.peak_memory_bytes)}, step "
            f"{step_change(found.step_seconds, step)})"
        )
    return [f"{doubt}; {ease}{wider}"]


def _unsplit(request: Request) -> list[str]:
    """Which numbers of microbatches were left out, and why."""
    refused = impossible(request.model, request.allowed.microbatches)
    if not refused:
        return []
    return [
        (f"--microbatches {','.join(map(str, refused))} was not searched ({next(iter(refused.values()))})")
    ]


def _fewer(request: Request, count: int) -> list[str]:
    """Why fewer of the best layouts are listed than were asked for, unless the time was over."""
    if count >= request.top or request.late:
        return []
    if request.objective == Objective.MEMORY:
        return [
            (
                f"--top {request.top}: only {count} layouts have the least peak memory; for others, use "
                "--objective pareto"
            )
        ]
    return [(f"--top {request.top}: only {count} {'layout fits' if count == 1 else 'layouts fit'} in memory")]
