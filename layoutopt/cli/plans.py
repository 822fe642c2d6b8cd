"""Plan files on the command line: the plan, and the model it was made for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.loading import Loaded
    from layoutopt.plan import Plan

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A file made by `search --out`.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The model that the plan is for.",
        show_default="the one it was made from",
    ),
]


@dataclass(frozen=True)
class Planned:
    """A plan with its model and hardware, all three found to belong together."""

    plan: Plan
    loaded: Loaded
    hardware: Hardware
    limit: int


def source_of(plan: Plan) -> str | None:
    """What the user typed as MODEL when the plan was made."""
    found = (plan.data.model_extra or {}).get("details")
    source = found.get("source") if isinstance(found, dict) else None
    return source if isinstance(source, str) else None


def limit_of(plan: Plan, hardware: Hardware) -> int:
    """The memory of a device that the plan was made for."""
    found: Any = (plan.data.model_extra or {}).get("details")
    for key in ("memory", "limit"):
        found = found.get(key) if isinstance(found, dict) else None
    return int(found) if isinstance(found, int | float) else int(hardware.usable_memory_bytes)


def open_plan(path: Path, model: str | None, hardware: str | None = None) -> Planned:
    """A plan file with its model, built with the plan's hyperparameters.

    Args:
      model: what `--model` says; None: the model that the plan was made from.
      hardware: another name or file than the plan's.

    Raises:
      UserError: no such plan, no such model, or a model that has changed since.
    """
    from layoutopt.cli.options import read_hardware
    from layoutopt.loading import load_model
    from layoutopt.plan import check_plan_model, load_plan
    from mesh_tf_core.errors import UserError

    plan = load_plan(path)
    source = model or source_of(plan)
    if source is None:
        raise UserError(
            f"plan {str(path)!r} does not say from which file it was made; name it with --model MODEL"
        )
    try:
        loaded = load_model(source, dict(plan.data.model.hparams))
        check_plan_model(plan, loaded.model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    machine = read_hardware(hardware or plan.data.hardware)
    return Planned(plan, loaded, machine, limit_of(plan, machine))
