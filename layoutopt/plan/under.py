"""A plan's layout under another framework."""

from __future__ import annotations

from layoutopt.frameworks import restriction_of
from layoutopt.plan.build import Plan
from layoutopt.plan.covered import CoveredSpace
from layoutopt.plan.decided import Decided
from layoutopt.plan.details import Details
from layoutopt.plan.schema import PlanFile, Predicted, SolverInfo
from layoutopt.space.objective import Objective

SAME = ("format", "model", "mesh", "layout", "hardware", "slices")
SAME_DETAILS = ("source", "source_sha256", "search", "parallelism")
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
        **{name: getattr(plan.data, name) for name in (*Decided.model_fields, *SAME)},
        framework=framework,
        predicted=predicted,
        solver=SolverInfo(status="UNKNOWN", objective=float(value)),
        space=CoveredSpace(layouts=0, expressed_by=restriction_of(framework).name),
        details=Details(**{name: getattr(plan.data.details, name) for name in SAME_DETAILS}),
    )
    return Plan(data, model=plan.model)
