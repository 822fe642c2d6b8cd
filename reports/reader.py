"""Plain objects of a plan file to `reports.plan` values; what is missing or wrong is one line for the user.

The format is `layoutopt-plan/1`, plus an optional object `details` whose parts, all optional, are `hardware`,
`dims`, `variables`, `lines`, `by_kind`, `memory`, `sensitivity`, `robustness`, `proof`, `validation` and
`calibration`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_tf_core.errors import UserError
from reports import plan as p
from reports.fields import Fields, words
from reports.reader_details import details, validation
from reports.units import clean

FORMAT = "layoutopt-plan/1"
AGAIN = "write the plan again with `layoutopt search MODEL --out PLAN.json`"

__all__ = ["FORMAT", "plan_of", "read_plan", "validation"]


def read_plan(path: str | Path) -> dict[str, Any]:
    """The plan dict in a file, checked.

    Raises:
      UserError: no such file, not JSON (a truncated file is not), or not a plan of a known version.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not a text file"
        raise UserError(
            f"cannot read the plan {str(path)!r}: {reason}; give a file of `layoutopt search --out`"
        ) from e
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        where = (
            f" (line {e.lineno} of {text.count(chr(10)) + 1})" if isinstance(e, json.JSONDecodeError) else ""
        )
        raise UserError(
            f"the plan {str(path)!r} is truncated or not JSON{where}: found {len(text):,} characters; {AGAIN}"
        ) from e
    plan_of(found, str(path))
    return dict(found)


def plan_of(found: Any, name: str = "the plan") -> p.Plan:
    """The plan in a dict; a Plan is returned as it is.

    Raises:
      UserError: naming the plan and the field.
    """
    if isinstance(found, p.Plan):
        return found
    name = clean(name)
    if not isinstance(found, Mapping):
        raise UserError(
            f"{name} is not a plan: expected a JSON object, found {type(found).__name__}; {AGAIN}"
        )
    version = found.get("format")
    if version != FORMAT:
        said = "no 'format'" if version is None else f"format {clean(str(version))[:60]!r}"
        raise UserError(f"{name} has {said}; this version reads {FORMAT!r}: {AGAIN}")
    return _plan(Fields(found, name, AGAIN))


def _plan(top: Fields) -> p.Plan:
    model = top.object("model")
    mesh = _mesh(top)
    return p.Plan(
        model=model.text("name"),
        fingerprint=model.text("fingerprint", ""),
        parameters=model.whole("parameters", None),
        hparams={clean(str(k)): words(v) for k, v in model.object("hparams", {}).items()},
        mesh=mesh,
        layout=_layout(top, mesh),
        predicted=_predicted(top.object("predicted")),
        hardware=top.text("hardware", ""),
        storage=_storage(top),
        recompute=_recompute(top),
        microbatches=top.whole("microbatches", 1) or 1,
        solver=_solver(top.object("solver")) if top.has("solver") else None,
        alternatives=tuple(_choice(f, mesh) for f in top.objects("alternatives")),
        frontier=tuple(_choice(f, mesh) for f in top.objects("frontier")),
        notes=top.names("notes"),
        details=details(top.object("details", {})),
    )


def _mesh(at: Fields) -> dict[str, int]:
    sizes = at.object("mesh")
    return {clean(axis): sizes.whole(axis, minimum=1) or 1 for axis in sizes}


def _layout(at: Fields, mesh: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    splits = at.object("layout")
    for dim in splits:
        axes = splits.names(dim)
        unknown = [a for a in axes if a not in mesh]
        if unknown:
            known = ", ".join(mesh) or "none"
            at.fail(f"layout.{dim}", f"splits over axis {unknown[0]!r}, which the mesh lacks (axes: {known})")
        found[clean(dim)] = axes
    return found


def _storage(at: Fields) -> dict[str, str]:
    return {clean(str(k)): words(v) for k, v in at.object("storage", {}).items()}


def _recompute(at: Fields) -> tuple[str, ...]:
    return tuple(words(v) for v in at.array("recompute", []))


def _predicted(at: Fields) -> p.Predicted:
    step = at.number("step_seconds")
    exposed = at.number("exposed_communication_seconds", 0.0)
    return p.Predicted(
        step=step,
        compute=at.number("compute_seconds", max(step - exposed, 0.0)),
        communication=at.number("communication_seconds", exposed),
        exposed=exposed,
        peak=at.number("peak_memory_bytes"),
        flops=at.number("flops_per_device", 0.0),
        sent=at.numbers("communication_bytes_per_device"),
    )


def _choice(at: Fields, mesh: Mapping[str, int]) -> p.Choice:
    """An alternative; without a price `predicted` is empty; without a mesh it is on the answer's."""
    own = _mesh(at) if at.has("mesh") else {}
    predicted = at.object("predicted", {})
    return p.Choice(
        name=at.text("name", "unnamed"),
        mesh=own or mesh,
        layout=_layout(at, own or mesh) if at.has("layout") else {},
        predicted=_predicted(predicted) if predicted.has("step_seconds") else None,
        feasible=at.flag("feasible", True),
        reason=at.text("reason", ""),
        storage=_storage(at) if at.has("storage") else None,
        recompute=_recompute(at) if at.has("recompute") else None,
        microbatches=at.whole("microbatches", None),
    )


def _solver(at: Fields) -> p.Solver:
    considered = at.raw("layouts_considered", "")
    return p.Solver(
        status=at.text("status"),
        objective=at.number("objective", None),
        bound=at.number("bound", None),
        gap=at.number("gap", None),
        wall_seconds=at.number("wall_seconds", None),
        considered=words(considered) if considered is not None else "",
    )
