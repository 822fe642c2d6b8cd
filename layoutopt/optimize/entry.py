"""The door of the search: a question about a model, and its answer as a plan.

The usual layouts are searched first, then everything; a search that ends early leaves the best so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from costmodels.hardware import Hardware
from layoutopt.optimize.answers.infeasible import diagnose
from layoutopt.optimize.answers.plan_details import with_details
from layoutopt.optimize.answers.planning import make_plan, nearest_plan
from layoutopt.optimize.answers.unrestricted import unrestricted
from layoutopt.optimize.driver.search import NONE_FOUND, STOPPED, LayoutSearch
from layoutopt.optimize.heuristics.agreement import rows_said
from layoutopt.optimize.heuristics.incumbents import Incumbents, WarmStart
from layoutopt.optimize.heuristics.probes import first_recipes, priced_recipes
from layoutopt.optimize.problems.question import Limits, SearchQuestion
from layoutopt.optimize.problems.request import (
    ANSWERED,
    BEYOND,
    SEARCHED,
    OnSearchStatus,
    Request,
    SearchStatus,
)
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import Subproblem, possible, subproblems
from layoutopt.plan.build import Plan, parse_plan
from layoutopt.plan.fields import LARGEST
from layoutopt.runtime.clock import seldom_collected
from layoutopt.space import allow
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.keywords import from_python, gathered
from layoutopt.space.objective import Objective
from layoutopt.space.restriction import EVERYTHING
from mesh_tf_core.errors import InfeasibleError, LimitError, NoLayoutError, UndecidedError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

__all__ = ["AUTO", "Limits", "Objective", "OnSearchStatus", "SearchSpace", "SearchStatus", "search"]
UNDECIDED = "the search ended before it was decided whether another layout fits (--allow everything)"
USUAL_SHARE, LEAST_SHARE = 0.5, 0.25
"""Part of a time limit for the usual layouts, if everything is searched after them; least part of the time
that is left when the first of them fits."""
NOT_SEARCHED = "only the usual layouts were searched"


def search(
    model: Model,
    mesh: Mesh | str | None = None,
    devices: int | None = None,
    hardware: str | Hardware = "cpu-local",
    space: SearchSpace | None = None,
    limits: Limits | None = None,
    objective: Objective | str = Objective.TIME,
    on_progress: OnSearchStatus | None = None,
    framework: str | None = None,
    **asked: Any,
) -> Plan:
    """Finds the best layout of a model and proves that no layout in the search space is better.

    It proves the best usual layout, then searches everything for `time_limit`, else 60 seconds.

    Args:
      model: the model to plan.
      mesh: a mesh, or its axes such as "data:2;model:4". Give either `mesh` or `devices`.
      devices: the number of devices. The shape of the mesh is then searched too.
      hardware: the name of a preset, the path of a hardware file, or a Hardware.
      space: the search space: splits, storage, recomputation, microbatches, pipelines and so on.
      limits: limits of memory, time and output.
      objective: `time` (fastest that fits), `memory` (least peak), or `pareto` (adds the frontier of both).
      on_progress: called with a `SearchStatus` now and then, for example `print`.
      framework: the training software, `NAME[@VERSION][:variant=option,…]` (None: the model's own).
      asked: fields of `SearchSpace` and of `Limits`, such as `pins="batch:data"` or `memory=16e9`; they
        override `space` and `limits`.

    Returns:
      The plan: the layout, its proof, its predicted time and memory, and alternatives.

    Raises:
      InfeasibleError: it is proven that no layout fits in memory. The message names the largest tensors, and
        the error's attribute `nearest` is the plan with the least memory. Its attribute `repairs` lists
        changes under which a layout fits, the cheapest first: `search(model, **error.repairs[0].asked)`
        returns a plan. With `alternatives=False` the message is short, and the error has neither.
      LimitError: the time limit ended the search before it found a layout. Where none of the usual ones fits
        it is an UndecidedError, with the same attributes.
      UserError: an argument is wrong.

    Example:
      >>> import layoutopt, mesh_tf_core
      >>> from examples import mlp
      >>> plan = layoutopt.search(mlp.model(), mesh="data:4", hardware="tpu-v5e", pins="batch:data")
      >>> plan.solver.status, plan.layout["batch"]
      ('OPTIMAL', ('data',))
      >>> try:
      ...     layoutopt.search(mlp.model(), mesh="data:1", hardware="tpu-v5e", memory=4e5, microbatches="1")
      ... except mesh_tf_core.InfeasibleError as error:
      ...     first = error.repairs[0]
      >>> first.change, layoutopt.search(mlp.model(), **first.asked).solver.status
      ('--offload optimizer', 'OPTIMAL')
    """
    if not isinstance(model, Model):
        raise UserError(
            f"search: {model!r} is not a Model; pass what the function model() of a model file returns"
        )
    allowed, limits = gathered("search", asked, (SearchSpace, space), (Limits, limits))
    own = {"mesh": mesh, "devices": devices, "hardware": hardware, "objective": objective}
    question = SearchQuestion.of(model, {**own, "framework": framework}, allowed, limits, on_progress)
    with seldom_collected():
        return _plan_of(_answer_to(question))


@dataclass(frozen=True)
class _Answer:
    """The best layout of a question.

    Attributes:
      question: with what probes added to its spaces.
      looked: the search that found it.
      usual: the search of the usual layouts and its best (None: none fits), if `looked` went on from there.
      notes: what else is to be said.
    """

    question: SearchQuestion
    looked: LayoutSearch
    best: EvaluatedLayout
    usual: tuple[LayoutSearch, EvaluatedLayout | None] | None = None
    notes: tuple[str, ...] = ()


def _answer_to(question: SearchQuestion) -> _Answer:
    """The best of the usual layouts, and then of everything; NoLayoutError if there is none."""
    question = replace(question, request=_telling_once(question.request))
    request, shapes, wider = question.request, question.shapes, question.spaces[1:]
    refused: NoLayoutError | None = None
    start, best = WarmStart(request, shapes, question.limits.start), None
    early, stopped = list[EvaluatedLayout](), False
    try:
        for each in first_recipes(question, start):
            early.append(each)
    except KeyboardInterrupt:
        if not (question.limits.keep_best and early):
            raise
        request.clock.hurry()
        stopped = True
    if early and not wider:
        question = question.beyond(early[-1])
        request, shapes = request.like(allowed=question.spaces[0]), question.shapes
        question = replace(question, request=request)
        start = WarmStart(request, shapes, question.limits.start, early[-1])
    elif wider and (early or request.clock.limit is not None):
        start.request = _shared(request)
    looked = LayoutSearch(start.request, question.renames, start=start, called=allow.USUAL if wider else "")
    looked.stopped = stopped
    try:
        if not (wider and stopped):
            best = _best(question, looked, possible(request.model, shapes, request.allowed, start.problems))
    except InfeasibleError as error:
        if not wider:
            raise _explained(question, error, looked) from None
        refused = error
    except LimitError:
        if not wider or request.clock.over:
            raise
    more_time = wider and (stopped or not (looked.stopped or request.clock.over))
    beyond = _beyond(question, looked, early) if more_time else None
    if isinstance(beyond, tuple):
        question, more, found = beyond
        if found is None:
            raise _explained(question, InfeasibleError(more.none), more)
        return _Answer(question, more, found, usual=(looked, best))
    if best is not None:
        notes = () if beyond is None else (f"{NOT_SEARCHED}: {beyond}",)
        return _Answer(question, looked, best, notes=notes)
    if refused is None:
        raise beyond or LimitError(NONE_FOUND)
    if beyond is None:
        raise _explained(question, UndecidedError(str(refused)), looked, f"; {UNDECIDED}")
    twice = str(beyond) == str(refused)
    raise _explained(question, refused, looked, "" if twice else f"; {NOT_SEARCHED}: {beyond}")


def _shared(request: Request) -> Request:
    """The same with a part of its time, more if something fits late; without a limit, with as much as
    everything has."""
    clock, every = request.clock.again(), request.clock.limit or BEYOND / USUAL_SHARE
    clock.limit = USUAL_SHARE * every
    begun = False

    def better(words: str, seconds: float, size: int) -> None:
        nonlocal begun
        if not begun:  # the first that fits
            least = clock.elapsed + LEAST_SHARE * (every - clock.elapsed)
            begun, clock.limit = True, min(every, max(USUAL_SHARE * every, least))
        if request.on_better is not None:
            request.on_better(words, seconds, size)

    return request.like(clock=clock, on_better=better)


def _beyond(
    question: SearchQuestion, usual: LayoutSearch, early: Sequence[EvaluatedLayout]
) -> tuple[SearchQuestion, LayoutSearch, EvaluatedLayout | None] | UserError | None:
    """The question with what probes add to it, the search of everything, and its best; None for that if it is
    proven that none fits. Whatever ends this search, the usual answer stays: an error is returned, and None
    if the search says nothing."""
    more, probed = None, list[EvaluatedLayout]()
    try:
        request = question.request.wider(question.spaces[1])
        known = Incumbents(request, question.renames)
        known.found += usual.incumbents.found
        for each in early or priced_recipes(question, known):
            probed.append(each)
            known.add(each)
        question, more = _widened(question, request, usual, probed)
        more.stopped = usual.stopped
        assert more.start is not None
        return question, more, _best(question, more, more.start.possible())
    except KeyboardInterrupt:
        if not question.limits.keep_best:
            raise
        if more is None and probed:
            question, more = _widened(question, request, usual, probed)
            more.incumbents.know(WarmStart(more.request, [probed[-1].mesh], probed=probed[-1]))
        (more or usual).stopped = True
        if more is not None:
            more.proven = False
    except LimitError:
        pass
    except UserError as error:
        if more is None or not more.none:
            return error
    found = None if more is None else more.incumbents.best()
    return None if more is None or not (found or more.none) else (question, more, found)


def _telling_once(request: Request) -> Request:
    """The same, which says of a layout once that it is better."""
    told, tell = math.inf, request.on_better

    def better(words: str, seconds: float, size: int) -> None:
        nonlocal told
        value = size if request.objective == Objective.MEMORY else seconds
        if tell is not None and value < told:
            told = value
            tell(words, seconds, size)

    return request.like(on_better=better)


def _widened(
    question: SearchQuestion, request: Request, usual: LayoutSearch, probed: Sequence[EvaluatedLayout]
) -> tuple[SearchQuestion, LayoutSearch]:
    """The question with what the best of some recipes adds to it, and its search of everything."""
    best = probed[-1] if probed else None
    if best is not None:
        question = question.beyond(best)
        request = request.like(allowed=question.spaces[1])
    start = WarmStart(request, question.shapes, question.limits.start, best)
    return question, LayoutSearch(
        request, question.renames, start=start, called=allow.EVERYTHING, after=usual
    )


def _explained(
    question: SearchQuestion, error: NoLayoutError, looked: LayoutSearch, more: str = ""
) -> NoLayoutError:
    """The error with the nearest layout, and what finds repairs."""
    why, request, allowed = list[str](), question.request, looked.request.allowed
    alternatives, beyond = question.limits.alternatives, looked.after is not None
    if looked.none and alternatives:
        stop = suppress(KeyboardInterrupt) if question.limits.keep_best else nullcontext()
        with stop, request.beside():
            request.clock.within(ANSWERED, lambda: why.append(looked.why()), ANSWERED)
    rows = rows_said(looked.request)
    error.args = ("".join((str(error), *why, f" ({rows}: this is not proven)" * bool(rows), more)),)
    if (nearest := nearest_plan(looked.request, looked)) is not None:
        error.nearest = nearest.with_details(search=question.recorded(beyond))
    if alternatives:
        asked = {name: question.own[name] for name in ("mesh", "devices")} | allowed.keywords
        asked |= {"max_axes": question.limits.max_axes, "memory": question.limits.memory}
        asked |= {"hardware": request.hardware, "objective": request.objective}
        if allowed.restriction is not EVERYTHING:
            asked["restriction"] = allowed.restriction
        error.diagnose = partial(diagnose, search, request.model, asked, least=looked.least)
    return error


def _plan_of(answer: _Answer) -> Plan:
    question, looked = answer.question, answer.looked
    request, limits = question.request, question.limits
    if answer.usual is not None:
        request = looked.request.like(clock=request.clock)
    clock, others = request.clock, list[EvaluatedLayout]()
    if looked.stopped:
        clock.hurry(STOPPED if answer.usual else 0.0)  # the plan has its own time

    def plan() -> Plan:
        with suppress(KeyboardInterrupt):
            looked.told("the plan and its alternatives")
        return make_plan(
            request,
            looked,
            answer.best,
            others,
            frozenset(mesh.shape for mesh in question.shapes) if question.renames else None,
            alternatives=limits.alternatives and request.allowed.diloco is None,
            usual=answer.usual,
            notes=answer.notes,
        ).with_details(search=question.recorded(beyond=answer.usual is not None))

    # No function of its own: a plan goes to other processes (pickle) with what completes it.
    model, machine = request.model.second_runs(False), request.hardware
    full = partial(with_details, model=model, hardware=machine, limit=int(min(request.limit, LARGEST)))
    try:
        clock.within(SEARCHED, lambda: _rank(answer, others, 1 if clock.over else limits.top))
        found = plan()
        if limits.alternatives and not found.stopped and request.allowed.restriction is not EVERYTHING:
            with request.beside(0.0 if question.free[1:] else 1.0):
                looked.told(f"layouts that {request.allowed.restriction.name} cannot express")
                asked = question.free[-1], question.shapes, answer.best, question.renames, question.unnamed
                left = unrestricted(request, *asked)
            notes = [*found.data.notes, *left.pop("notes", ())]
            found = Plan(found.data.model_copy(update={**left, "notes": notes}))
        return Plan(found.data, found.stopped, model, full)
    except KeyboardInterrupt:
        if not limits.keep_best:
            raise
        clock.hurry()
        looked.stopped = True
        return Plan(plan().data, True, model, full)


def _rank(answer: _Answer, others: list[EvaluatedLayout], top: int) -> None:
    """Adds the next best layouts, one after the other: of everything if that is proven, else the usual."""
    of, known = answer.looked, answer.best
    if answer.usual is not None and answer.usual[1] is not None and not of.proven:
        of, known = answer.usual[0], answer.usual[1]
    if top > 1 and not of.request.late:
        from layoutopt.optimize.answers.k_best import k_best

        others.extend([known] * (not known.same(answer.best)))
        others.extend(itertools.islice(k_best(of, known), top - 1 - len(others)))


def _best(question: SearchQuestion, looked: LayoutSearch, problems: Iterable[Subproblem]) -> EvaluatedLayout:
    """The best of some problems, or that of tables in which a delay hides nothing, if it is better: those of
    the search hide all that crosses the axis, so where steps are too short for that they do not tell how much
    there is."""
    request, by, keep_best = looked.request, looked.request.allowed.diloco, question.limits.keep_best
    best = looked.run(problems, keep_best)
    if by is None or not by.delay or request.objective != Objective.TIME or request.late:
        return best
    if not any(x.exposed for x in best.evaluation.cost.lines if by.axis in x.axes):
        return best
    at_once = replace(request, allowed=request.allowed.but(diloco=replace(by, delay=0)))
    others = subproblems(request.model, question.shapes, at_once.allowed, request.evaluator.near)
    try:
        found = LayoutSearch(at_once).run(others, keep_best)
    except (InfeasibleError, LimitError):
        return best
    except KeyboardInterrupt:
        if not keep_best:
            raise
        return best
    options = replace(found.options, diloco=by)
    priced = request.evaluator(found.mesh, found.layout, options)
    better = priced.cost.step_seconds < best.seconds and priced.memory.peak <= request.limit
    if not better:
        return best
    looked.incumbents.add(answer := replace(found, options=options, evaluation=priced))
    return answer


class _Auto:
    """The search of `mtf.Trainer(model, mesh, layout="auto")`, named in pyproject.toml."""

    def best(self, model: Model, mesh: Mesh) -> Mapping[str, Any]:
        return from_python(search)(model, mesh=mesh, allow=allow.USUAL).to_json()

    def read(self, plan: Mapping[str, Any]) -> Plan:
        return parse_plan(plan, "of the search")


AUTO = _Auto()
