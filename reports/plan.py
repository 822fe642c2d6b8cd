"""The facts of a plan in reports beyond its fields: the answer in the form of its alternatives, and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layoutopt.plan.decided import Decided
from layoutopt.plan.schema import Alternative, PlanFile
from layoutopt.plan.units import quantity


def answer_of(plan: PlanFile) -> Alternative:
    """The chosen layout in the form of the alternatives."""
    return Alternative(
        name="answer",
        mesh=plan.mesh,
        layout=plan.layout,
        predicted=plan.predicted,
        feasible=plan.fits is not False,
        **{name: getattr(plan, name) for name in Decided.model_fields},
    )


def same_layout(plan: PlanFile, choice: Alternative) -> bool:
    """True if a choice has the answer's layout, mesh and options.

    An option that an alternative does not mention is no difference.
    """
    said = choice.model_fields_set & set(Decided.model_fields)
    if any(getattr(choice, name) != getattr(plan, name) for name in said):
        return False
    return choice.mesh == plan.mesh and _split(choice.layout) == _split(plan.layout)


def _split(layout: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    return {dim: axes for dim, axes in layout.items() if axes}


def lies_on(plan: PlanFile, axis: str) -> str:
    """The position of a mesh axis on the hardware, in words; '' if the plan does not have it."""
    return plan.details.hardware.lies.get(axis, "") if plan.details.hardware else ""


def dims_on(plan: PlanFile, axis: str) -> tuple[str, ...]:
    """The dimensions that are split over a mesh axis."""
    return tuple(dim for dim, axes in plan.layout.items() if axis in axes)


def one_model(plans: Sequence[PlanFile]) -> bool:
    """True if the plans are for the same model with the same sizes, so that their times compare."""
    return len({(p.model.name, p.model.fingerprint) for p in plans}) == 1


def rules(plan: PlanFile) -> str:
    """The pins and exclusions of the search, in words."""
    asked = plan.details.search
    said = (("pinned", asked.pins), ("forbidden", asked.forbid)) if asked else ()
    return "; ".join(f"{verb} {which}" for verb, which in said if which)


def number(value: Any) -> float | str:
    """A number of a file stays one; anything else in words."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
    return float(value) if known else words(value)


def number_text(value: Any, unit: str) -> str:
    """A number with its unit, as short as possible; a text unchanged."""
    found = number(value)
    return f"{found} {unit}".strip() if isinstance(found, str) else quantity(found, unit)


def words(value: Any) -> str:
    """Any plain value in words: lists joined, mappings as 'key: value'."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "+".join(words(v) for v in value)
    return str(value)
