"""Plan files for reports: read by the plan's schema, their texts made fit to be shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from layoutopt.plan.evidence import Validation
from layoutopt.plan.fields import refusal
from layoutopt.plan.schema import AGAIN, FORMAT, PlanFile, plan_file
from layoutopt.plan.units import clean
from mesh_tf_core.reading import check_depth, read_json, reading


class HasPlan(Protocol):
    """A `layoutopt.Plan`."""

    @property
    def data(self) -> PlanFile: ...

    def full(self) -> HasPlan: ...


PlanLike = PlanFile | Mapping[str, Any] | HasPlan
"""The accepted plans of figures, tables and pages: a dict of a plan file, a read one, or a search's
result."""

__all__ = ["FORMAT", "PlanLike", "plan_of", "read_plan", "validation_of"]


def read_plan(path: str | Path) -> dict[str, Any]:
    """Reads and checks the plan dict in a file.

    Raises:
      UserError: the file does not exist, is not JSON (such as a truncated file), or is not a plan of a known
        version.
    """
    what = f"plan {str(path)!r}"
    with reading(what, AGAIN):
        found = read_json(path)
    plan_file(found, what)
    return dict(found)


def plan_of(found: Any, name: str = "the plan") -> PlanFile:
    """Reads the plan in a dict, in a `layoutopt.Plan` (with the details of its model) or in a PlanFile.

    Raises:
      UserError: a field is wrong; the message names the plan and the field.
    """
    if isinstance(found, PlanFile):
        return found
    if isinstance(getattr(found, "data", None), PlanFile):
        full: PlanFile = found.full().data
        return full
    with reading(name, AGAIN):
        check_depth(found)
    return plan_file(_shown(found), name)


def validation_of(found: Any) -> Validation:
    """The object that `layoutopt validate --json` prints."""
    what, again = "the validation", "write the file again with `layoutopt validate MODEL --json`"
    with reading(what, again):
        check_depth(found)
    try:
        return Validation.model_validate(_shown(found))
    except ValidationError as error:
        raise refusal(error, what, again) from None


def _shown(value: Any) -> Any:
    """A JSON value with every text clean."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(k)): _shown(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(v) for v in value]
    return value
