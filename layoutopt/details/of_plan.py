"""Fills in the `details` of a plan file (`layoutopt.plan.details`) from its model and its hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from costmodels.liveness import Memory
    from costmodels.pricing.pricer import Cost, Line
    from layoutopt.evaluator import Evaluator
    from layoutopt.plan.build import Plan
    from layoutopt.plan.details import MemoryTimeline, PricedLine, Shares, Variable
    from mesh_tf_core import Mesh, Model, Program
    from mesh_tf_core.ir.initializers import Variable as InitialValue
    from mesh_tf_core.ir.layout import Axes
    from mesh_tf_core.ir.values import Value

NOTHING: Mapping[str, str] = {}
MOST_POINTS = 2000


def with_details(
    plan: Plan,
    model: Model,
    hardware: Hardware,
    limit: int,
    source: str = "",
    hashes: Mapping[str, str] = NOTHING,
) -> Plan:
    """The same plan, with all its `details`.

    Args:
      limit: bytes that a device may hold.
      source, hashes: what the model was made from, if that is a file.
    """
    from layoutopt.details.of_machine import calibration_details, hardware_details
    from layoutopt.evaluator import Evaluator
    from layoutopt.plan.build import AppliesPlans
    from layoutopt.plan.trade_names import trade_names

    evaluator = Evaluator(model, hardware)
    found = evaluator(plan.mesh, plan.layout, plan.options)
    calibration = calibration_details(hardware)
    return plan.with_details(
        source=source,
        source_sha256=dict(hashes),
        hardware=hardware_details(hardware, plan.mesh),
        parallelism=trade_names(model, plan.mesh, plan.layout, plan.data),
        dims={name: max(sizes) for name, sizes in model.graph.dims().items()},
        variables=tuple(_variables(found.program)),
        inputs=tuple(_inputs(found.program)),
        lines=tuple(_line(x) for x in found.cost.lines),
        by_kind={"answer": _shares(found.cost), **_alternatives(plan, evaluator)},
        memory=_memory(found.memory, limit),
        **({"applies": True} if isinstance(model, AppliesPlans) else {}),
        **({"calibration": calibration} if calibration is not None else {}),
    )


def _variables(program: Program) -> Iterable[Variable]:
    for name, stored in program.variables.items():
        kind = "parameter" if stored.variable.trainable else "state"
        yield _held(program.mesh, name, stored.variable, stored.splits, kind)


def _inputs(program: Program) -> Iterable[Variable]:
    for name, at in program.feeds.items():
        yield _held(program.mesh, name, program.values[at], program.values[at].splits, "input")


def _held(mesh: Mesh, name: str, of: InitialValue | Value, splits: Sequence[Axes], kind: str) -> Variable:
    from layoutopt.plan.details import Variable
    from mesh_tf_core.ir.dtypes import itemsize

    size = of.shape.size * itemsize(of.dtype)
    return Variable(
        name=name,
        shape=tuple((d.name, d.size) for d in of.shape),
        dtype=of.dtype,
        splits=tuple(tuple(axes) for axes in splits),
        bytes=size,
        local_bytes=size // mesh.group_size(a for axes in splits for a in axes),
        kind=kind,
    )


def _line(x: Line) -> PricedLine:
    from layoutopt.plan.details import PricedLine

    return PricedLine(
        op=x.name,
        node=x.origin.node,
        scope=x.origin.scope,
        phase=x.origin.phase,
        kind=x.kind,
        times=x.times,
        seconds=x.seconds,
        exposed_seconds=x.exposed,
        flops=x.flops,
        bytes=x.bytes,
        axes=tuple(x.axes),
        sent_bytes=x.sent,
        communication=x.is_communication,
    )


def _shares(cost: Cost) -> Shares:
    from layoutopt.plan.details import Shares

    kinds: dict[str, float] = {}
    for x in cost.lines:
        kinds[x.kind] = kinds.get(x.kind, 0.0) + x.seconds * x.times
    return Shares(
        compute=cost.compute_seconds,
        hidden=cost.communication_seconds - cost.exposed_communication_seconds,
        exposed=cost.exposed_communication_seconds,
        kinds=kinds,
    )


def _alternatives(plan: Plan, evaluator: Evaluator) -> dict[str, Shares]:
    from layoutopt.plan.build import layout_of, options_of
    from mesh_tf_core import LayoutError, Mesh

    found = {}
    for each in plan.alternatives:
        try:
            options = options_of(each)
            evaluation = evaluator(Mesh(each.mesh), layout_of(each), options)
        except LayoutError:
            continue
        found[each.name] = _shares(evaluation.cost)
    return found


def _memory(held: Memory, limit: int) -> MemoryTimeline:
    """The timeline, thinned to its local peaks where it is long."""
    from layoutopt.plan.details import Held, MemoryTimeline, Point

    step = max(1, -(-len(held.points) // MOST_POINTS))
    kept = [max(held.points[i : i + step], key=lambda p: p.bytes) for i in range(0, len(held.points), step)]
    return MemoryTimeline(
        points=tuple(
            Point(name=p.name, scope=p.origin.scope, phase=p.origin.phase, bytes=p.bytes) for p in kept
        ),
        holdings=tuple(
            Held(what=h.what, bytes=h.bytes, scope=h.origin.scope if h.origin else "") for h in held.holdings
        ),
        variables=held.variables,
        limit=limit,
    )
