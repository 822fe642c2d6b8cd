"""Fills in the `details` of a plan file (`layoutopt.plan.details`) from its model and its hardware."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from costmodels.liveness import MemoryProfile
    from costmodels.pricing.pricer import Cost, Line
    from layoutopt.optimize.evaluation.evaluator import Evaluator
    from layoutopt.plan.build import Plan
    from layoutopt.plan.details import MemoryTimeline, PricedLine, TimeShares, VariableDetail
    from mesh_tf_core import Mesh, Model, Program
    from mesh_tf_core.ir.initializers import Variable as InitialValue
    from mesh_tf_core.ir.values import Origin, Value

NOTHING: Mapping[str, str] = {}
MOST_POINTS = 2000
LONGEST = 160
"""Characters of a line of code."""


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
      limit: bytes of a device.
      source, hashes: origin of the model, if it is a file.
    """
    from layoutopt.optimize.evaluation.evaluation import computed_in
    from layoutopt.optimize.evaluation.evaluator import Evaluator
    from layoutopt.plan.build import AppliesPlans, NamesModules
    from layoutopt.plan.machine_details import calibration_details, hardware_details
    from layoutopt.plan.trade_names import trade_names

    evaluator = Evaluator(model, hardware)
    found = evaluator(plan.mesh, plan.layout, plan.options)
    calibration = calibration_details(hardware)
    graph = evaluator.model.step_of(plan.mesh, plan.layout, plan.options).graph
    nodes = {(n.index, n.scope): model.graph.places.get(n.path, "") for n, _ in graph.walk()}
    places = [nodes.get((x.origin.node, x.origin.scope), "") for x in found.cost.lines]
    shown = _shown(places, source)
    return plan.with_details(
        source=source,
        source_sha256=dict(hashes),
        hardware=hardware_details(hardware, plan.mesh, found.known),
        parallelism=trade_names(model, plan.mesh, plan.layout, plan.data),
        dims={name: max(sizes) for name, sizes in model.graph.dims().items()},
        dtype=computed_in(model),
        variables=tuple(_variables(found.program)),
        inputs=tuple(_inputs(found.program)),
        lines=tuple(
            _line(x, shown.get(place, "")) for x, place in zip(found.cost.lines, places, strict=True)
        ),
        sources=_code(shown),
        by_kind={"answer": _shares(found.cost), **_alternatives(plan, evaluator)},
        memory=_memory(found.memory, found.cost, limit),
        **({"slots": found.slots} if found.slots else {}),
        **({"applies": True} if isinstance(model, AppliesPlans | NamesModules) else {}),
        **({"calibration": calibration} if calibration is not None else {}),
    )


def _variables(program: Program) -> Iterable[VariableDetail]:
    for name, stored in program.variables.items():
        kind = "parameter" if stored.variable.trainable else "state"
        yield _held(program.mesh, name, stored.variable, stored.value, kind)


def _inputs(program: Program) -> Iterable[VariableDetail]:
    for name, at in program.feeds.items():
        yield _held(program.mesh, name, program.values[at], program.values[at], "input")


def _held(mesh: Mesh, name: str, of: InitialValue | Value, held: Value, kind: str) -> VariableDetail:
    """A tensor, and the bytes of a device's piece as it is held: padded, where devices do not divide it."""
    from layoutopt.plan.details import VariableDetail
    from mesh_tf_core.ir.dtypes import itemsize

    size = of.shape.size * itemsize(of.dtype)
    return VariableDetail(
        name=name,
        shape=tuple((d.name, d.size) for d in of.shape),
        dtype=of.dtype,
        splits=tuple(tuple(axes) for axes in held.splits),
        bytes=size,
        local_bytes=held.local_bytes(mesh),
        kind=kind,
        stacked=getattr(of, "stacked", 0) > 0,
    )


def _shown(places: Iterable[str], source: str) -> dict[str, str]:
    """Places in the code, by what is shown of them: files by their path from the model file's folder, or by
    their name alone."""
    home = Path(source.rpartition(":")[0] or source).resolve().parent if source else Path.cwd()
    found = {}
    for place in filter(None, places):
        path = Path(place.rpartition(":")[0])
        name = path.relative_to(home) if path.is_relative_to(home) else path.name
        found[place] = f"{name}:{place.rpartition(':')[2]}"
    return found


def _code(shown: Mapping[str, str]) -> dict[str, str]:
    """The lines of code at these places, as far as they can be read."""
    import linecache

    found = {}
    for place, name in shown.items():
        file, _, number = place.rpartition(":")
        if text := linecache.getline(file, int(number)).strip():
            found[name] = text[:LONGEST]
    return found


def _line(x: Line, place: str) -> PricedLine:
    from layoutopt.plan.details import PricedLine

    said = x.facts()
    said |= {"op": x.name, "node": x.origin.node, "kind": x.kind, "times": said.pop("runs")}
    return PricedLine(**said, communication=x.is_communication, place=place)


def _shares(cost: Cost) -> TimeShares:
    from layoutopt.plan.details import TimeShares

    kinds: dict[str, float] = {}
    for x in cost.lines:
        kinds[x.kind] = kinds.get(x.kind, 0.0) + x.seconds * x.times
    return TimeShares(
        compute=cost.compute_seconds,
        hidden=cost.communication_seconds - cost.exposed_communication_seconds,
        exposed=cost.exposed_communication_seconds,
        kinds=kinds,
    )


def _alternatives(plan: Plan, evaluator: Evaluator) -> dict[str, TimeShares]:
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


def _memory(held: MemoryProfile, cost: Cost, limit: int) -> MemoryTimeline:
    """The timeline, thinned to its local peaks where it is long."""
    from layoutopt.plan.details import LiveTensor, MemoryTimeline, Point

    # What an instruction adds to the step passes where it is first seen; kernels of several have one line.
    adds: defaultdict[Origin, float] = defaultdict(float)
    for line in cost.lines:
        adds[line.origin] += line.exposed * line.times
    spent = [adds.pop(p.origin, 0.0) for p in held.points]
    step = max(1, -(-len(held.points) // MOST_POINTS))
    points = []
    for i in range(0, len(held.points), step):
        p = max(held.points[i : i + step], key=lambda p: p.bytes)
        points.append(
            Point(
                name=p.name,
                scope=p.origin.scope,
                phase=p.origin.phase,
                bytes=p.bytes,
                seconds=sum(spent[i : i + step]),
            )
        )
    return MemoryTimeline(
        points=tuple(points),
        holdings=tuple(
            LiveTensor(what=h.what, bytes=h.bytes, scope=h.origin.scope if h.origin else "")
            for h in held.holdings
        ),
        variables=held.variables,
        limit=limit,
    )
