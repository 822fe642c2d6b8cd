"""The door of the search: a question about a model, checked, and its answer as a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from costmodels.hardware import Hardware, machine_of
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.agreement import rows_said
from layoutopt.optimize.evaluator import check_limit
from layoutopt.optimize.infeasible import diagnose
from layoutopt.optimize.plan_details import with_details
from layoutopt.optimize.planning import make_plan, nearest_plan
from layoutopt.optimize.request import (
    ANSWERED,
    BESIDE,
    SEARCHED,
    Better,
    OnSearchStatus,
    Request,
    SearchStatus,
)
from layoutopt.optimize.search import LayoutSearch
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import possible, subproblems
from layoutopt.optimize.unrestricted import unrestricted
from layoutopt.optimize.warm_start import WarmStart
from layoutopt.plan.build import Plan, parse_plan
from layoutopt.plan.details import Searched
from layoutopt.plan.fields import LARGEST
from layoutopt.runtime.clock import Clock
from layoutopt.space import allow
from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from layoutopt.space.keywords import from_python, gathered
from layoutopt.space.kind import Target
from layoutopt.space.mesh_shapes import meshes
from layoutopt.space.objective import Objective
from layoutopt.space.recorded import recorded
from layoutopt.space.restriction import EVERYTHING
from mesh_tf_core.arguments import is_number, is_whole
from mesh_tf_core.errors import InfeasibleError, LimitError, NoLayoutError, UndecidedError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

__all__ = ["AUTO", "Limits", "Objective", "OnSearchStatus", "SearchSpace", "SearchStatus", "search"]
MOST_LISTED = 1000
"""The largest number of best layouts in a list: each takes a separate search."""
UNDECIDED = "the search ended before it was decided whether another layout fits (--allow everything)"
NOT_SEARCHED = "only the usual layouts were searched"
STOPPING = 2.0
"""Seconds after Ctrl-C for what is beside the usual answer."""


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
    clock = Clock.of(limits.time_limit).again()
    chosen = machine_of(hardware, framework, model.framework)
    _check(mesh, devices, objective, limits, clock.limit, allowed)
    shapes = meshes(mesh, devices, limits.max_axes, chosen)
    restriction = allowed.restriction
    if restriction is EVERYTHING:
        restriction = restriction_of(chosen.framework)
    restriction = restriction.of(model)
    restriction.narrowed(allowed, SearchSpace())  # refuses what somebody set
    if allowed.offload:
        _check_host(chosen)
    objective = Objective(objective)
    targets = [Target.on(chosen, model, shape) for shape in shapes]
    every = [
        each.settled(objective).but(restriction=EVERYTHING)
        for each in allow.spaces(allowed, targets, objective)
    ]
    within = [restriction.narrowed(each).but(restriction=restriction) for each in every]
    keep_best, top, renames = limits.keep_best, limits.top, mesh is None
    request = Request(
        model,
        chosen,
        chosen.usable_memory_bytes if limits.memory is None else float(limits.memory),
        objective,
        within[0],
        top,
        clock,
        on_progress,
        limits.on_better,
    )
    question = Searched(
        hardware=hardware if isinstance(hardware, str) else hardware.name,
        memory_bytes=None if limits.memory is None else int(min(request.limit, LARGEST)),
        devices=None if devices is None else int(devices),
        max_axes=int(limits.max_axes),
        objective=objective,
        **recorded(every[0]),
    )
    own = {"mesh": mesh, "devices": devices, "max_axes": limits.max_axes, "hardware": chosen}
    own |= {"memory": limits.memory, "objective": objective}
    own |= {} if restriction is EVERYTHING else {"restriction": restriction}

    def explain(error: NoLayoutError, looked: LayoutSearch, more: str = "") -> NoLayoutError:
        """The error with the nearest layout, and what finds repairs."""
        why = list[str]()
        if looked.none and limits.alternatives:
            with suppress(KeyboardInterrupt) if keep_best else nullcontext(), clock.at_most(BESIDE):
                clock.within(ANSWERED, lambda: why.append(looked.why()))
        rows = rows_said(looked.request)
        error.args = ("".join((str(error), *why, f" ({rows}: this is not proven)" * bool(rows), more)),)
        if (nearest := nearest_plan(looked.request, looked)) is not None:
            error.nearest = nearest.with_details(search=question)
        if limits.alternatives:
            asked = {**own, **looked.request.allowed.keywords}
            error.diagnose = partial(diagnose, search, model, asked, least=looked.least)
        return error

    # No function of its own: a plan goes to other processes (pickle) with what completes it.
    full = partial(with_details, model=model, hardware=chosen, limit=int(min(request.limit, LARGEST)))
    start = WarmStart(request, shapes, limits.start)
    wider = within[1:] if within[-1] != within[0] else []
    looked = LayoutSearch(request, renames, start=start, called=allow.USUAL if wider else "")
    best, usual, failed, refused = None, None, None, InfeasibleError()
    try:
        best = looked.run(possible(model, shapes, request.allowed, start.problems), keep_best)
        best = _waiting(looked, best, shapes, keep_best)
    except InfeasibleError as error:
        if not wider:
            raise explain(error, looked) from None
        refused = error
    if wider and not (looked.stopped or clock.over):
        more, other = looked, best
        try:  # whatever ends this search, the usual answer stays
            start = WarmStart(request.wider(wider[0]), shapes, limits.start)
            more = LayoutSearch(start.request, renames, start=start, called=allow.EVERYTHING, after=looked)
            other = more.run(start.possible(), keep_best)
            other = _waiting(more, other, shapes, keep_best)
        except (UserError, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt):
                if not keep_best:
                    raise
                more.stopped, more.proven = True, False
            elif not isinstance(error, LimitError) and (more is looked or not more.none):
                failed = error
            other = more.incumbents.best()
        if failed is None and more is not looked and (other is not None or more.none):
            usual, looked, best = (looked, best), more, other
            first = {n: v for n, v in recorded(every[0]).items() if v != recorded(every[1])[n]}
            question = question.model_copy(update={**recorded(every[1]), "first": first})
            request = looked.request.like(clock=clock)
    if best is None and usual is not None:
        raise explain(InfeasibleError(looked.none), looked)
    if best is None and failed is not None:
        raise explain(refused, looked, f"; {NOT_SEARCHED}: {failed}")
    if best is None:
        raise explain(UndecidedError(str(refused)), looked, f"; {UNDECIDED}")
    answer = best
    if looked.stopped:
        clock.hurry(STOPPING if usual else 0.0)  # the plan has its own time
    others: list[EvaluatedLayout] = []

    def rank() -> None:
        first = None if usual is None or looked.proven else usual[1]
        of, known = (looked, answer) if usual is None or first is None else (usual[0], first)
        if top > 1 and not (of.request.late or clock.over):
            from layoutopt.optimize.k_best import k_best

            others.extend([known] * (not known.same(answer)))
            others.extend(itertools.islice(k_best(of, known), top - 1 - len(others)))  # one after the other

    def plan() -> Plan:
        with suppress(KeyboardInterrupt):
            looked.told("the plan and its alternatives")
        return make_plan(
            request,
            looked,
            answer,
            others,
            frozenset(m.shape for m in shapes) if mesh is None else None,
            alternatives=limits.alternatives and request.allowed.diloco is None,
            usual=usual,
            notes=[] if failed is None else [f"{NOT_SEARCHED}: {failed}"],
        ).with_details(search=question)

    try:
        clock.within(SEARCHED, rank)
        found = plan()
        if limits.alternatives and not found.stopped and restriction is not EVERYTHING:
            unnamed = framework is None and chosen.framework == model.framework
            with clock.at_most(BESIDE) if every[1:] else nullcontext():
                left = unrestricted(request, every[-1], shapes, answer, renames, unnamed)
            notes = [*found.data.notes, *left.pop("notes", ())]
            found = Plan(found.data.model_copy(update={**left, "notes": notes}))
        return Plan(found.data, found.stopped, model, full)
    except KeyboardInterrupt:
        if not keep_best:
            raise
        clock.hurry()
        looked.stopped = True
        return Plan(plan().data, True, model, full)


def _waiting(
    looked: LayoutSearch, best: EvaluatedLayout, shapes: Sequence[Mesh], keep_best: bool
) -> EvaluatedLayout:
    """An answer, or that of tables in which a delay hides nothing, if it is better: those of the search hide
    all that crosses the axis, so where steps are too short for that they do not tell how much there is."""
    request, by = looked.request, looked.request.allowed.diloco
    if by is None or not by.delay or request.objective != Objective.TIME or request.late:
        return best
    if not any(x.exposed for x in best.evaluation.cost.lines if by.axis in x.axes):
        return best
    at_once = replace(request, allowed=replace(request.allowed, diloco=replace(by, delay=0)))
    problems = subproblems(request.model, shapes, at_once.allowed, request.evaluator.near)
    try:
        found = LayoutSearch(at_once).run(problems, keep_best)
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
    for name, argument in ARGUMENTS.items() if mesh is None else ():
        if argument.names_axes and getattr(allowed, name):
            option = argument.options[0].name
            raise UserError(
                f"{option} refers to mesh axes by name; give the mesh with --mesh instead of --devices"
            )


def _check_host(hardware: Hardware) -> None:
    """UserError unless something may lie on the hosts of some hardware."""
    if hardware.is_host:
        raise UserError(
            f"--offload: on {hardware.name}, devices and host share one memory, so offloading gains "
            "nothing; remove --offload"
        )
    hardware.host_seconds(0.0)


class _Auto:
    """The search of `mtf.Trainer(model, mesh, layout="auto")`, named in pyproject.toml."""

    def best(self, model: Model, mesh: Mesh) -> Mapping[str, Any]:
        return from_python(search)(model, mesh=mesh, allow=allow.USUAL).to_json()

    def read(self, plan: Mapping[str, Any]) -> Plan:
        return parse_plan(plan, "of the search")


AUTO = _Auto()
