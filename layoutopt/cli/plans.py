"""Plan files on the command line: the plan, and the model it was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.analysis.explain import Asked
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.schema import Plan
    from mesh_tf_core import Options

T = TypeVar("T")
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


def details_of(plan: Plan) -> dict[str, Any]:
    """The part `details` of a plan file (see `layoutopt.cli.details`)."""
    found = (plan.data.model_extra or {}).get("details")
    return dict(found) if isinstance(found, dict) else {}


def with_source(plan: Plan, source: str, asked: Mapping[str, Any]) -> Plan:
    """The same plan, saying from which MODEL it was made, and what was asked besides."""
    from layoutopt.plan.schema import Plan

    details = {"source": source, "search": dict(asked)}
    return Plan(plan.data.model_copy(update={"details": details}))


def source_of(plan: Plan) -> str | None:
    """What the user typed as MODEL when the plan was made."""
    source = details_of(plan).get("source")
    return source if isinstance(source, str) else None


@dataclass(frozen=True)
class Where:
    """What a plan's search was asked besides its rules (`Asked`).

    Attributes:
      memory_bytes: of a device; None: what the hardware has.
      devices, max_axes: of a search for the mesh too; no devices: the plan's mesh was given.
    """

    hardware: str | None = None
    memory_bytes: int | None = None
    devices: int | None = None
    max_axes: int = 2
    objective: str = "time"


def where_of(plan: Plan) -> Where:
    """What the plan's search was asked; what the file does not say is the default."""
    return _searched(plan, Where)


def asked_of(plan: Plan) -> Asked:
    """The rules of the plan's search; what the file does not say is the default."""
    from layoutopt.analysis.explain import Asked

    return _searched(plan, Asked)


def _searched(plan: Plan, kind: type[T]) -> T:
    from pydantic import TypeAdapter, ValidationError

    from mesh_tf_core.errors import UserError

    try:
        return TypeAdapter(kind).validate_python(details_of(plan).get("search", {}))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, ("details", "search", *first["loc"])))
        raise UserError(f"the plan's {path}: {first['msg']}; make it again with search --out") from None


def limit_of(plan: Plan, hardware: Hardware) -> int:
    """The memory of a device that the plan was made for."""
    limit = where_of(plan).memory_bytes
    return int(hardware.usable_memory_bytes) if limit is None else limit


def hardware_of(plan: Plan) -> str:
    """The hardware file that the plan was made for, if it is there; else the hardware's name."""
    given = where_of(plan).hardware
    return given if given is not None and Path(given).is_file() else plan.data.hardware


def options_of(storage: Mapping[str, str], recompute: Sequence[str], microbatches: int) -> Options:
    """What a plan file says besides a layout, as lowering takes it."""
    from mesh_tf_core import Options
    from mesh_tf_core.lower.storage import stage_number

    stages = {name: stage_number(stage) for name, stage in storage.items()}
    return Options(stages, frozenset(recompute), microbatches)


def open_plan(path: Path, model: str | None, hardware: str | None = None) -> Planned:
    """A plan file with its model, built with the plan's hyperparameters.

    Args:
      model: what `--model` says; None: the model that the plan was made from.
      hardware: another name or file than the plan's.

    Raises:
      UserError: no such plan, no such model, or a model that has changed since.
    """
    from layoutopt.cli.options import read_hardware
    from layoutopt.models.loading import load_model
    from layoutopt.plan.schema import check_plan_model, load_plan
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
    machine = read_hardware(hardware or hardware_of(plan))
    return Planned(plan, loaded, machine, limit_of(plan, machine))
