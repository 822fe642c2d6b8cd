"""The door of the search: a question about a model, checked, and its answer as a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from costmodels.frameworks import load_framework
from costmodels.hardware import Hardware, machine_of
from layoutopt.frameworks import says
from layoutopt.optimize.evaluator import check_limit
from layoutopt.optimize.infeasible import diagnose
from layoutopt.optimize.plan_details import with_details
from layoutopt.optimize.planning import make_plan, nearest_plan
from layoutopt.optimize.request import SEARCHED, Better, OnSearchStatus, Request, SearchStatus
from layoutopt.optimize.search import LayoutSearch
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import subproblems
from layoutopt.optimize.unrestricted import unrestricted
from layoutopt.optimize.warm_start import WarmStart
from layoutopt.plan.build import Plan, parse_plan
from layoutopt.plan.details import Searched
from layoutopt.plan.fields import LARGEST
from layoutopt.runtime.clock import Clock
from layoutopt.space.allow import resolved
from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from layoutopt.space.keywords import from_python, gathered
from layoutopt.space.kind import Target
from layoutopt.space.mesh_shapes import meshes
from layoutopt.space.objective import Objective
from layoutopt.space.recorded import recorded
from layoutopt.space.restriction import EVERYTHING
from mesh_tf_core.arguments import is_number, is_whole
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

__all__ = ["AUTO", "Limits", "Objective", "OnSearchStatus", "SearchSpace", "SearchStatus", "search"]
MOST_LISTED = 1000
"""The largest number of best layouts in a list: each takes a separate search."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a search.

    Attributes:
      memory: bytes of a device that a layout may use (None: the hardware's memory).
      max_axes: the largest number of axes of a mesh, when `devices` is given instead of a mesh.
      top: number of best layouts to list.
      time_limit: seconds, or a running clock (None: no limit). The search ends at most two seconds later with
        the best layout found and its lower bound.
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

    Args:
      model: the model to plan.
      mesh: a mesh, or its axes such as "data:2;model:4". Give either `mesh` or `devices`.
      devices: the number of devices. The shape of the mesh is then searched too.
      hardware: the name of a preset, the path of a hardware file, or a Hardware.
      space: the search space: splits, storage, recomputation, microbatches, pipelines and so on.
      limits: limits of memory, time and output.
      objective: `time` (fastest that fits), `memory` (least peak), or `pareto` (adds the frontier of both).
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
      LimitError: the time limit ended the search before it found a layout.
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
        restriction = says(load_framework(chosen.framework).says)
    restriction = restriction.of(model)
    restriction.narrowed(allowed, SearchSpace())  # refuses what somebody set
    allowed = resolved(allowed, [Target(model, shape, chosen.hosts_apart) for shape in shapes])
    objective = Objective(objective)
    whole = allowed.settled(objective).but(restriction=EVERYTHING)
    allowed = restriction.narrowed(whole).but(restriction=restriction)
    if allowed.offload:
        _check_host(chosen)
    keep_best, top = limits.keep_best, limits.top
    request = Request(
        model,
        chosen,
        chosen.usable_memory_bytes if limits.memory is None else float(limits.memory),
        objective,
        allowed,
        top,
        clock,
        on_progress,
        limits.on_better,
        limits.alternatives,
    )
    question = Searched(
        hardware=hardware if isinstance(hardware, str) else hardware.name,
        memory_bytes=None if limits.memory is None else int(min(request.limit, LARGEST)),
        devices=None if devices is None else int(devices),
        max_axes=int(limits.max_axes),
        objective=objective,
        **recorded(whole),
    )

    # No function of its own: a plan goes to other processes (pickle) with what completes it.
    full = partial(with_details, model=model, hardware=chosen, limit=int(min(request.limit, LARGEST)))
    looked = LayoutSearch(request, mesh is None, start=WarmStart(request, shapes, limits.start))
    try:
        best = looked.run(subproblems(model, shapes, allowed, request.evaluator.near), keep_best)
    except InfeasibleError as error:
        if (nearest := nearest_plan(request, looked)) is not None:
            error.nearest = nearest.with_details(search=question)
        if limits.alternatives:
            own = {"mesh": mesh, "devices": devices, "max_axes": limits.max_axes, "hardware": chosen}
            own |= {"memory": limits.memory, "objective": objective, **allowed.keywords}
            own |= {} if restriction is EVERYTHING else {"restriction": restriction}
            error.diagnose = partial(diagnose, search, model, own, least=looked.least)
        raise
    best = _waiting(request, best, shapes, keep_best)
    if looked.stopped:
        clock.hurry()  # the plan has its own time
    others: list[EvaluatedLayout] = []

    def rank() -> None:
        if top > 1 and not request.late:
            from layoutopt.optimize.k_best import k_best

            for other in itertools.islice(k_best(looked, best), top - 1):
                others.append(other)

    def plan() -> Plan:
        return make_plan(
            request,
            looked,
            best,
            others,
            frozenset(m.shape for m in shapes) if mesh is None else None,
            alternatives=limits.alternatives and allowed.diloco is None,
        ).with_details(search=question)

    try:
        clock.within(SEARCHED, rank)
        found = plan()
        if limits.alternatives and not found.stopped and restriction is not EVERYTHING:
            unnamed = framework is None and chosen.framework == model.framework
            more = unrestricted(request, whole, shapes, best, mesh is None, unnamed)
            notes = [*found.data.notes, *more.pop("notes", ())]
            found = Plan(found.data.model_copy(update={**more, "notes": notes}))
        return Plan(found.data, found.stopped, model, full)
    except KeyboardInterrupt:
        if not keep_best:
            raise
        clock.hurry()
        looked.stopped = True
        return Plan(plan().data, True, model, full)


def _waiting(
    request: Request, best: EvaluatedLayout, shapes: Sequence[Mesh], keep_best: bool
) -> EvaluatedLayout:
    """An answer, or that of tables in which a delay hides nothing, if it is better: those of the search hide
    all that crosses the axis, so where steps are too short for that they do not tell how much there is."""
    by = request.allowed.diloco
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
    return replace(found, options=options, evaluation=priced) if better else best


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
        return from_python(search)(model, mesh=mesh).to_json()

    def read(self, plan: Mapping[str, Any]) -> Plan:
        return parse_plan(plan, "of the search")


AUTO = _Auto()
