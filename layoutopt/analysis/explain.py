"""Explains a plan's layout: differences between two layouts, the value of every split, the binding limit.

    worth of a split    best time of a search in which this dimension stays whole - the plan's time
    price of a limit    the plan's time - best time of a search without the memory limit
    price of a rule     best time of a search that must obey the rule - the plan's time
    worth of a feature  best time of a search that may not choose it (`space.decisions.FEATURES`) - the plan's
All of them are proven where the searches are. Of a plan for the least memory they are bytes, not seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from costmodels.hardware import Hardware
from costmodels.pricing.hidden import rule_of
from costmodels.pricing.pricer import Cost
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import Evaluator, evaluate
from layoutopt.plan.build import Plan, layout_of, options_of
from layoutopt.plan.covered import CoveredSpace
from layoutopt.plan.decided import Decided
from layoutopt.plan.details import Details
from layoutopt.plan.layout_results import OperationDifference, PartDifference, Worth
from layoutopt.plan.schema import Alternative, PlanFile, Predicted, ProofStatus, SolverInfo
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.solver import TOLERANCE
from layoutopt.space.decisions import FEATURES, SearchSpace
from layoutopt.space.objective import Objective
from layoutopt.space.restriction import RestrictionError
from layoutopt.space.sequence_parallel import written
from layoutopt.space.splits import parse_rules
from layoutopt.space.stages import on_mesh
from mesh_tf_core.errors import InfeasibleError, LayoutError, LimitError, UserError, known_names
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import GPIPE
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.options import ACTIVATIONS
from mesh_tf_core.model import Model

COMPUTE, MESSAGES = "compute: {}", "exposed messages: {}"
MeshLayout = tuple[Mesh, Layout, Options]
AGREE = 1e-9
"""Relative difference up to which two predictions are the same."""


def compared(
    model: Model, plan: Plan, machine: Hardware, other: Layout | Alternative | MeshLayout
) -> tuple[Evaluation, Evaluation | None]:
    """Evaluates an alternative of a plan, or what has a mesh of as many devices and every decision; or a
    layout on its mesh, without and with the plan's other decisions (None: the plan has none, or they are
    illegal there)."""
    if isinstance(other, Alternative):
        other = Mesh(other.mesh) if other.mesh else plan.mesh, layout_of(other), options_of(other)
    if isinstance(other, tuple):
        mesh, layout, options = other
        if mesh.devices != plan.mesh.devices:
            raise UserError(
                f"--against: {mesh} has {mesh.devices} devices, but the plan has {plan.mesh.devices}; "
                "compare layouts of as many devices"
            )
        return evaluate(model, mesh, layout, machine, options), None
    found = evaluate(model, plan.mesh, other, machine)
    if plan.options == Options():
        return found, None
    try:
        return found, evaluate(model, plan.mesh, other, machine, plan.options)
    except LayoutError:
        return found, None


def time_parts(of: Evaluation) -> dict[str, float]:
    """The parts of a step in seconds, which add up to it: compute by phase, exposed communication by purpose,
    and the bubble of a pipeline, which is part of neither."""
    cost, bubble = of.cost, of.bubble
    lost: Mapping[int, float] = {} if bubble is None else bubble.lost
    parts = {COMPUTE.format(phase): 0.0 for phase in Phase}
    for at, x in enumerate(cost.lines):
        part = MESSAGES.format(rule_of(x)) if x.is_communication else COMPUTE.format(x.origin.phase)
        parts[part] = parts.get(part, 0.0) + x.exposed * x.times - lost.get(at, 0.0)
    parts["pipeline bubble"] = sum(lost.values())
    parts["waiting for the host's launches"] = cost.step_seconds - cost.device_seconds
    return {part: seconds for part, seconds in parts.items() if seconds}


def beside(ours: Evaluation, theirs: Evaluation) -> list[PartDifference]:
    """The parts of two steps."""
    here, there = time_parts(ours), time_parts(theirs)
    every = dict.fromkeys((*here, *there))
    return [
        PartDifference(part=p, plan_seconds=here.get(p, 0.0), other_seconds=there.get(p, 0.0)) for p in every
    ]


def differences(ours: Cost, theirs: Cost) -> list[OperationDifference]:
    """The operations whose exposed time differs, the largest difference first."""
    keys: dict[tuple[str, str, str, str], list[float]] = {}
    for side, cost in enumerate((ours, theirs)):
        for x in cost.lines:
            key = (x.origin.scope, x.name, x.origin.phase, "+".join(x.axes))
            keys.setdefault(key, [0.0, 0.0])[side] += x.exposed * x.times
    found = [
        OperationDifference(scope=s, operation=o, phase=p, axes=a, plan_seconds=here, other_seconds=there)
        for (s, o, p, a), (here, there) in keys.items()
        if here != there
    ]
    return sorted(found, key=lambda d: -abs((d.other_seconds or 0.0) - (d.plan_seconds or 0.0)))


def disagreements(plan: Plan, evaluation: Evaluation) -> list[str]:
    """The differences between the plan's prediction and the price of its layout now."""
    said, found = plan.predicted.model_dump(), evaluation.predicted.model_dump()
    wrong = []
    for name, old in said.items():
        new = found[name]
        pairs = (
            [(old, new)]
            if not isinstance(old, dict)
            else [(old.get(a, 0), new.get(a, 0)) for a in {**old, **new}]
        )
        if any(abs(a - b) > AGREE * max(abs(a), abs(b)) for a, b in pairs):
            wrong.append(f"{name} is {new}, but {old} in the plan")
    claim, least = plan.solver, (found["step_seconds"], found["peak_memory_bytes"])
    objective, bound = claim.objective or 0.0, claim.bound or 0.0
    if all(abs(objective - value) > AGREE * value for value in least):
        wrong.append(f"the plan's objective {claim.objective} is neither its step time nor its peak memory")
    if claim.status == ProofStatus.OPTIMAL and abs(objective - bound) > TOLERANCE * abs(objective):
        wrong.append(f"the plan claims a proof, but its bound {claim.bound} differs from its objective")
    return wrong


def without(asked: SearchSpace, name: str) -> SearchSpace:
    """The same without one of `FEATURES`; UserError if the search could not choose it, or only it."""
    feature = FEATURES[name]
    allowed = getattr(asked, feature.field)
    rest = tuple(x for x in allowed if not feature.means(x))
    if rest == allowed:
        raise UserError(
            f"--without {name}: the plan's search was not allowed to make this decision; search with "
            f"--allow +{name} first"
        )
    if not rest and getattr(SearchSpace(), feature.field):
        said = ", ".join(map(str, allowed))
        raise UserError(
            f"--without {name}: the plan's search allowed only this decision ({said}); search with others "
            "allowed first"
        )
    rules = {"elsewhere": map(written, asked.elsewhere), "pipeline": asked.pipeline}.get(feature.field, ())
    for rule in rules:
        if asked.pins.get(rule):
            pin = f"--pin {rule}:{'+'.join(asked.pins[rule])}"
            raise UserError(
                f"--without {name}: the plan's search required this decision ({pin}); search without this "
                "pin first"
            )
    changed: dict[str, Any] = {feature.field: rest}
    if not any(changed.get("recompute", asked.recompute)):  # what second runs need is not saved either
        changed["offload"] = tuple(kind for kind in asked.offload if kind != ACTIVATIONS)
    if not changed.get("pipeline", asked.pipeline):  # without stages there is no schedule of them
        changed["schedule"] = (GPIPE,)
    return replace(asked, **changed)


def forbidden(plan: Plan, asked: SearchSpace, names: Sequence[str]) -> list[str]:
    """The features that are named, or with "all" those that the plan has and its search need not have had.

    Raises:
      UserError: an unknown decision, or one that this search does not choose.
    """
    used = [name for name, feature in FEATURES.items() if feature.used(plan.layout, plan.options)]
    if not any(dim in plan.layout for dim in asked.pipeline):  # a layout does not say what counts layers
        used.remove("pipeline")
    found: list[str] = []
    for name in (n.strip() for text in names for n in text.split(",") if n.strip()):
        if name != ALL and name not in FEATURES:
            raise UserError(f"--without {name}: {known_names(name, [*FEATURES, ALL])}")
        if name != ALL:
            without(asked, name)
            found.append(name)
            continue
        for each in used:
            with contextlib.suppress(UserError):
                without(asked, each)
                found.append(each)
    return list(dict.fromkeys(found))


ALL = "all"
FindBest = Callable[[str, float | None, str | None, Clock, str | None], Worth]
"""find(condition in words, bytes of memory, further pins, time limit, forbidden decisions)"""
NO_TIME = "the time limit was reached first"


def finder(plan: Plan, of: Evaluation, asked: SearchSpace, objective: Objective) -> FindBest:
    """Searches on the plan's mesh under other conditions, each from the best known answer that it allows.

    Args:
      of: the plan's layout, which the answers are held against.
    """
    from layoutopt.optimize.entry import search
    from layoutopt.optimize.heuristics.incumbents import covers

    model, hardware, least = of.model, of.prices.hardware, objective == Objective.MEMORY
    known, near = [plan], Evaluator(model, hardware).near

    def find(
        condition: str,
        memory: float | None,
        pins: str | None,
        clock: Clock = UNLIMITED,
        forbid: str | None = None,
    ) -> Worth:
        if clock.over:
            return Worth.none(condition, NO_TIME)
        rules = without(asked, forbid) if forbid else asked
        more: dict[str, Any] = {"objective": objective, "time_limit": clock.rest, "alternatives": False}
        try:
            space = on_mesh(model, plan.mesh, rules.but(pins={**rules.pins, **parse_rules(pins)}))
            known.sort(key=lambda p: p.predicted.step_seconds)
            start = next((p for p in known if covers(space, model, p, near)), None)
            found = search(model, plan.mesh, None, hardware, space, memory=memory, start=start, **more)
            known.append(found)
        except (InfeasibleError, LimitError) as error:
            why = str(error)
            if pins and isinstance(error, RestrictionError):  # nobody has set these pins
                why = f"{hardware.framework} can express no layout with {pins} on {plan.mesh}"
            return Worth.none(condition, why or None, isinstance(error, InfeasibleError))
        p = found.predicted
        return Worth(
            rule=condition,
            step_seconds=p.step_seconds,
            peak_bytes=p.peak_memory_bytes,
            costs_seconds=None if least else max(p.step_seconds - of.cost.step_seconds, 0.0),
            costs_bytes=max(p.peak_memory_bytes - of.memory.peak, 0) if least else None,
            layout=str(found.layout),
            proven=found.solver.status == ProofStatus.OPTIMAL,
            reason=None,
        )

    return find


def split_rules(plan: Plan) -> list[tuple[str, str]]:
    """For every split of the plan, the rule as it is and the rule that undoes it."""
    return [(f"{name}:{'+'.join(axes)}", f"{name}:none") for name, axes in plan.layout.items()]


UNCHANGED = ("format", "model", "mesh", "layout", "hardware", "slices")
UNCHANGED_DETAILS = ("source", "source_sha256", "search", "parallelism")
"""Fields of a plan, and of its details, that are the same under every framework."""


def under(plan: Plan, framework: str, predicted: Predicted) -> Plan:
    """The layout as another framework runs it, without what was proven and compared under the plan's own.

    Args:
      predicted: under the other framework.
    """
    value = predicted.step_seconds
    if plan.question.objective == Objective.MEMORY:
        value = predicted.peak_memory_bytes
    data = PlanFile(
        **{name: getattr(plan.data, name) for name in (*Decided.model_fields, *UNCHANGED)},
        framework=framework,
        predicted=predicted,
        solver=SolverInfo(status="UNKNOWN", objective=float(value)),
        space=CoveredSpace(layouts=0, expressed_by=restriction_of(framework).name),
        details=Details(**{name: getattr(plan.data.details, name) for name in UNCHANGED_DETAILS}),
    )
    return Plan(data, model=plan.model)
