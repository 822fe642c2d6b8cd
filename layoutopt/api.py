"""The door of the search: a question about a model, checked, and its answer as a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from costmodels.hardware import Hardware, machine_of
from layoutopt.clock import Clock
from layoutopt.details.of_plan import with_details
from layoutopt.evaluator import check_limit
from layoutopt.keywords import from_python
from layoutopt.optimize.k_best import k_best
from layoutopt.optimize.planning import make_plan, nearest_plan
from layoutopt.optimize.request import OBJECTIVES, SEARCHED, Better, Progress, Request, Rules, Standing
from layoutopt.optimize.search import Search
from layoutopt.optimize.subproblem import Found
from layoutopt.optimize.subproblems import subproblems
from layoutopt.plan.build import Plan, parse_plan
from layoutopt.plan.details import Searched
from layoutopt.plan.fields import LARGEST
from layoutopt.space.context import usual
from layoutopt.space.kind import STORED, Allowed
from layoutopt.space.mesh_shapes import meshes
from layoutopt.space.microbatches import USUAL
from layoutopt.space.recorded import recorded
from layoutopt.space.splits import parse_forbid, parse_rules
from mesh_tf_core.arguments import is_number, is_whole
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model
from mesh_tf_core.ops.ticks import GPIPE
from mesh_tf_core.tracing.diloco import DiLoCo

__all__ = ["AUTO", "OBJECTIVES", "Progress", "Standing", "search"]
MOST_LISTED = 1000
"""Of the best layouts: each takes a search of its own."""


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
    time_limit: float | Clock | None = None,
    max_axes: int = 2,
    on_progress: Progress | None = None,
    storage: Sequence[str] = STORED,
    recompute: Sequence[bool | str] = (False, True),
    microbatches: Sequence[int] = USUAL,
    on_better: Better | None = None,
    keep_best: bool = False,
    orders: str = "mesh",
    elsewhere: Sequence[str] = (),
    refine: bool = False,
    alternatives: bool = True,
    context: Sequence[str] | None = None,
    pipeline: Sequence[str] = (),
    offload: Sequence[str] = (),
    diloco: DiLoCo | str | None = None,
    schedule: Sequence[str] = (GPIPE,),
    collective_matmul: Sequence[str] = (),
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
      time_limit: seconds, or a clock that counts them already; the best so far, with what is proven of it, is
        there at most two seconds later.
      storage: stages that variables may be stored at, of "layout", "zero1", "zero2", "zero3", or over some
        axes alone as "zero3@data"; "hybrid" is zero3 over the axes inside a node or slice, where there are
        others.
      recompute: whether the bodies of loops may, must or must not run again in backward: of False, True and
        "selective", which lets them keep some of their values, or sets of your own, as "keep=attention+wi".
      microbatches: numbers of parts that the batch may be split into; those that do not divide it, or into
      which the model cannot be split, are left out.
      orders: whether a split over several axes has these in the order of the mesh ("mesh") or in every order
      ("all", which takes longer). A pin may have any order.
      elsewhere: dimensions that may be split further where mesh axes split nothing else: ("length",) is
        sequence parallelism.
      refine: then place dimensions otherwise in single operations, as if they had other names there, where
        that takes less time (at most 40 s of looking).
      alternatives: look for named and simpler layouts to stand beside the answer, which take longer than it.
      context: how attention may be done to keys that lie split as its queries do: of "gather", "ring",
        "zigzag" and "all_to_all" (None: all for the least time, else "gather").
      pipeline: dimensions of layers that mesh axes may split into stages, which the microbatches go through.
      offload: what may lie in the hosts' memory, where the hardware file knows the link: of "optimizer" (its
        state), "weights" (variables themselves) and "activations" (what loops save for their second runs).
      diloco: an axis of the mesh along which replicas lie that meet rarely, as "sites:period=30": each is the
        model, on the other axes, with batches of its own (`choose_replicas` compares such plans).
      schedule: when stages go backward: of "gpipe", after all microbatches, and "1f1b", each microbatch as
        soon as it has gone through them, so that what is in flight grows with the stages; and "circular:R"
        and "interleaved:R", as these, with R chunks of layers in each stage, which microbatches go round.
        Stages keep what backward reads, or run again as `recompute` allows: layers, or a whole stage.
      collective_matmul: dimensions: what products with one of them gather, and what is scattered of them, may
        go in chunks beside the products.
      keep_best: Ctrl-C is not raised, but ends the search with the best layout so far, which is not proven;
      the plan is then `stopped`.

    Raises:
      InfeasibleError: proven that nothing fits; the message names the largest tensors, `nearest` is the plan
        that needs least, where one is legal; without `alternatives` it says no more than that.
      LimitError: nothing was found in time.
      UserError: wrong input.
    """
    clock = time_limit.again() if isinstance(time_limit, Clock) else Clock(time_limit)
    if not isinstance(model, Model):
        raise UserError(f"search: {model!r} is no Model; build one, as a model file's model() does")
    chosen = machine_of(hardware)
    context = usual(objective) if context is None else context
    steps = storage, recompute, microbatches, context, elsewhere, pipeline, offload, schedule
    lists = (*steps, collective_matmul)
    _check(mesh, devices, memory, objective, refine, top, clock.limit, max_axes, pins, forbid, *lists)
    allowed = Allowed(
        parse_rules(pins),
        parse_forbid(forbid),
        orders,
        tuple(dict.fromkeys(storage)),
        tuple(r if isinstance(r, str) else bool(r) for r in recompute),
        tuple(sorted(set(microbatches))),
        context=tuple(dict.fromkeys(context)),
        elsewhere=tuple(dict.fromkeys(elsewhere)),
        pipeline=tuple(dict.fromkeys(pipeline)),
        offload=tuple(dict.fromkeys(offload)),
        diloco=DiLoCo.parse(diloco) if isinstance(diloco, str) else diloco,
        schedule=tuple(dict.fromkeys(schedule)),
        collective_matmul=tuple(dict.fromkeys(collective_matmul)),
    )
    if allowed.diloco is not None:
        _check_replicas(mesh, refine, allowed)
    if allowed.offload:
        _check_host(chosen)
    request = Request(
        model,
        chosen,
        chosen.usable_memory_bytes if memory is None else float(memory),
        objective,
        allowed,
        top,
        clock,
        on_progress,
        on_better,
        alternatives,
    )
    shapes = meshes(mesh, devices, max_axes, chosen)
    asked = Searched(
        hardware=hardware if isinstance(hardware, str) else hardware.name,
        memory_bytes=int(min(request.limit, LARGEST)),
        devices=None if devices is None else int(devices),
        max_axes=int(max_axes),
        objective=objective,
        **recorded(allowed),
    )

    # No function of its own: a plan goes to other processes (pickle) with what completes it.
    full = partial(with_details, model=model, hardware=chosen, limit=int(min(request.limit, LARGEST)))
    candidates = Search(request, renames=mesh is None)
    try:
        best = candidates.run(subproblems(model, shapes, allowed, request.evaluator.near), keep_best)
    except InfeasibleError as error:
        if (nearest := nearest_plan(request, candidates, mesh is None)) is not None:
            error.nearest = nearest.with_details(search=asked)
        raise
    best = _waiting(request, best, shapes, keep_best)
    if candidates.stopped:
        clock.hurry()  # the plan has its own time
    others: list[Found] = []

    def rank() -> None:
        if top > 1 and not request.late:
            for other in itertools.islice(k_best(candidates, best), top - 1):
                others.append(other)

    def plan() -> Plan:
        return make_plan(
            request,
            best,
            candidates.subproblem_of(best),
            others,
            candidates.frontier,
            candidates.bound,
            candidates.proven,
            candidates.considered,
            mesh is None,
            frozenset(m.shape for m in shapes) if mesh is None else None,
            clock.elapsed,
            candidates.stopped,
            tuple(candidates.unsplit),
            alternatives and allowed.diloco is None,
        ).with_details(search=asked)

    try:
        clock.within(SEARCHED, rank)
        found = plan()
        if refine and not candidates.stopped:
            from layoutopt.refine.answer import refined

            found = refined(found, request, keep_best)
        return Plan(found.data, found.stopped, model, full)
    except KeyboardInterrupt:
        if not keep_best:
            raise
        clock.hurry()
        candidates.stopped = True
        return Plan(plan().data, True, model, full)


def _waiting(request: Request, best: Found, shapes: Sequence[Mesh], keep_best: bool) -> Found:
    """An answer, or that of tables in which a delay hides nothing, if it is better: those of the search hide
    all that crosses the axis, so where steps are too short for that they do not tell how much there is."""
    by = request.allowed.diloco
    if by is None or not by.delay or request.objective != "time" or request.late:
        return best
    if not any(x.exposed for x in best.evaluation.cost.lines if by.axis in x.axes):
        return best
    at_once = replace(request, allowed=replace(request.allowed, diloco=replace(by, delay=0)))
    problems = subproblems(request.model, shapes, at_once.allowed, request.evaluator.near)
    try:
        found = Search(at_once).run(problems, keep_best)
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
    mesh: Any,
    devices: Any,
    memory: Any,
    objective: Any,
    refine: Any,
    top: Any,
    time_limit: Any,
    max_axes: Any,
    pins: Any,
    forbid: Any,
    storage: Any,
    recompute: Any,
    microbatches: Any,
    context: Any,
    elsewhere: Any,
    pipeline: Any,
    offload: Any,
    schedule: Any,
    collective_matmul: Any,
) -> None:
    """Refuses arguments of the wrong kind, whatever their annotations say."""
    if objective not in OBJECTIVES:
        raise UserError(f"objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if not isinstance(mesh, Mesh | str | None):
        raise UserError(f"mesh {mesh!r}: give a Mesh, or its axes as 'data:2;model:4'")
    if mesh is not None and not str(mesh).strip():
        raise UserError("--mesh '' names no axis; write for example --mesh 'data:2;model:4'")
    if refine and objective != "time":
        raise UserError(
            f"--refine looks for less time, not for less memory; leave --objective {objective} out"
        )
    if (mesh is None) == (devices is None):
        raise UserError("give either a mesh (--mesh 'data:2;model:4') or a number of devices (--devices 8)")
    for name, number in (("--devices", devices), ("--max-axes", max_axes), ("--top", top)):
        if number is not None and not is_whole(number):
            raise UserError(f"{name} {number!r}: needs a whole number")
    check_limit(memory)
    if top < 1:
        raise UserError(f"--top {top}: needs at least 1")
    if top > MOST_LISTED:
        raise UserError(f"--top {top}: at most {MOST_LISTED:,} are listed")
    if time_limit is not None and not (is_number(time_limit) and 0 < float(time_limit) < math.inf):
        raise UserError(f"--time-limit {time_limit!r}: needs a positive number of seconds")
    for name, rules in (("pins", pins), ("forbid", forbid)):
        if not isinstance(rules, str | Mapping | None):
            raise UserError(f"{name} {rules!r}: write them as 'batch:data', or as a dict of dimensions")
    lists = {
        "storage": storage,
        "recompute": recompute,
        "microbatches": microbatches,
        "context": context,
        "elsewhere": elsewhere,
        "pipeline": pipeline,
        "offload": offload,
        "schedule": schedule,
        "collective_matmul": collective_matmul,
    }
    for name, found in lists.items():
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise UserError(f"{name} {found!r}: needs a list of what is allowed")
    if refine and pipeline:
        raise UserError("--refine knows no stages of pipelines; leave it or --pipeline out")
    if mesh is None and (pins or forbid):
        raise UserError("--pin and --forbid name mesh axes: give the mesh with --mesh instead of --devices")


def _check_replicas(mesh: Mesh | str | None, refine: bool, allowed: Allowed) -> None:
    """UserError where a search knows no replicas."""
    if mesh is None:
        raise UserError("--diloco names a mesh axis: give the mesh with --mesh instead of --devices")
    if refine:
        raise UserError("--refine knows no replicas; leave it or --diloco out")
    if allowed.offload:
        raise UserError("--diloco: of replicas nothing can lie on the hosts; leave --offload out")


def _check_host(hardware: Hardware) -> None:
    """UserError unless something may lie on the hosts of some hardware."""
    if hardware.is_host:
        raise UserError(
            f"--offload: on {hardware.name} devices and host have one memory, so there is nothing to gain; "
            "leave it out"
        )
    hardware.host_seconds(0.0)


class _Auto:
    """The search of `mtf.Trainer(model, mesh, layout="auto")`, named in pyproject.toml."""

    def best(self, model: Model, mesh: Mesh) -> Mapping[str, Any]:
        return from_python(search)(model, mesh=mesh).to_json()

    def read(self, plan: Mapping[str, Any]) -> Plan:
        return parse_plan(plan, "of the search")


AUTO = _Auto()
