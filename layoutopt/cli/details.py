"""What a plan file carries beside the contract's fields, under `details`, so that a report needs no model.

source      what the user typed as MODEL
search      what was asked besides the model and the mesh
hardware    description, how the mesh lies on it, numbers with their sources
calibration every measurement of a calibrated profile beside its fit
dims        dimension -> size
variables   every variable as it is stored: shape, dtype, splits, bytes whole and on a device
lines       the priced instructions of the answer
by_kind     seconds by kind of work, of the answer and every alternative
memory      the timeline of the answer, and what is held at its peak
sensitivity, robustness, proof   what `explain --sensitivity --check --out` adds
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from costmodels.liveness import Memory
    from costmodels.pricing.pricer import Cost, Line
    from layoutopt.optimize.evaluation import Judge
    from layoutopt.plan.schema import Plan
    from mesh_tf_core import Model, Program

MOST_POINTS = 2000


def with_details(plan: Plan, model: Model, hardware: Hardware, limit: int, source: str) -> Plan:
    """The same plan, with all its `details`."""
    from layoutopt.cli.machine_details import calibration_details, hardware_details
    from layoutopt.cli.plans import details_of
    from layoutopt.optimize.evaluation import Judge
    from layoutopt.plan.schema import Plan

    judge = Judge(model, hardware)
    found = judge(plan.mesh, plan.layout, plan.options)
    details = {
        **details_of(plan),
        "source": source,
        "hardware": hardware_details(hardware, plan.mesh),
        "dims": {name: max(sizes) for name, sizes in model.graph.dims().items()},
        "variables": list(_variables(found.program)),
        "lines": [_line(x) for x in found.cost.lines],
        "by_kind": {"answer": _shares(found.cost), **_alternatives(plan, judge)},
        "memory": _memory(found.memory, limit),
    }
    calibration = calibration_details(hardware)
    if calibration is not None:
        details["calibration"] = calibration
    return Plan(plan.data.model_copy(update={"details": details}))


def _variables(program: Program) -> Iterable[dict[str, Any]]:
    for name, stored in program.variables.items():
        variable = stored.variable
        size = variable.shape.size * _itemsize(variable.dtype)
        ways = program.mesh.group_size(a for axes in stored.splits for a in axes)
        yield {
            "name": name,
            "shape": [[d.name, d.size] for d in variable.shape],
            "dtype": variable.dtype,
            "splits": [list(axes) for axes in stored.splits],
            "bytes": size,
            "local_bytes": size // ways,
            "kind": "parameter" if variable.trainable else "state",
        }


def _itemsize(dtype: str) -> int:
    from mesh_tf_core.ir.dtypes import itemsize

    return itemsize(dtype)


def _line(x: Line) -> dict[str, Any]:
    return {
        "op": x.name,
        "node": x.origin.node,
        "scope": x.origin.scope,
        "phase": x.origin.phase,
        "kind": x.kind,
        "times": x.times,
        "seconds": x.seconds,
        "exposed_seconds": x.exposed,
        "flops": x.flops,
        "bytes": x.bytes,
        "axes": list(x.axes),
        "sent_bytes": x.sent,
        "communication": x.is_communication,
    }


def _shares(cost: Cost) -> dict[str, Any]:
    kinds: dict[str, float] = {}
    for x in cost.lines:
        kinds[x.kind] = kinds.get(x.kind, 0.0) + x.seconds * x.times
    return {
        "compute": cost.compute_seconds,
        "hidden": cost.communication_seconds - cost.exposed_communication_seconds,
        "exposed": cost.exposed_communication_seconds,
        "kinds": kinds,
    }


def _alternatives(plan: Plan, judge: Judge) -> dict[str, Any]:
    from layoutopt.cli.plans import options_of
    from mesh_tf_core import Layout, LayoutError, Mesh

    found = {}
    for each in plan.alternatives:
        try:
            options = options_of(each.storage, each.recompute, each.microbatches)
            judged = judge(Mesh(each.mesh), Layout(each.layout), options)
        except LayoutError:
            continue
        found[each.name] = _shares(judged.cost)
    return found


def _memory(held: Memory, limit: int) -> dict[str, Any]:
    """The timeline, thinned to its local peaks where it is long."""
    step = max(1, -(-len(held.points) // MOST_POINTS))
    kept = [
        max(range(i, min(i + step, len(held.points))), key=lambda j: held.points[j].bytes)
        for i in range(0, len(held.points), step)
    ]
    return {
        "points": [
            {"name": p.name, "scope": p.origin.scope, "phase": p.origin.phase, "bytes": p.bytes}
            for p in (held.points[i] for i in kept)
        ],
        "holdings": [
            {"what": h.what, "bytes": h.bytes, "scope": h.origin.scope if h.origin else ""}
            for h in held.holdings
        ],
        "variables": held.variables,
        "limit": limit,
    }
