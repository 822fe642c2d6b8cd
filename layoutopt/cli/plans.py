"""Plan files on the command line: the plan, and the model it was made for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli.options import (
    THIS_MACHINE,
    FrameworkOption,
    SetHardwareOption,
    hardware_option,
    read_hardware,
    read_mesh,
)
from layoutopt.plan.units import clean

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan
    from layoutopt.plan.schema import Told
    from mesh_tf_core import Model

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file, made by `search --out`.")]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PLAN",
        help="Model (FILE.py, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION, or a Hugging Face CONFIG.json), or "
        "a plan file made by `search --out`.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model that the plan was made for: FILE.py, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION, or a "
        "Hugging Face CONFIG.json.",
        show_default="the file recorded in the plan, if it is unchanged",
    ),
]


@dataclass(frozen=True)
class Planned:
    """A plan with its model and hardware, all three found to belong together."""

    plan: Plan
    loaded: Loaded
    hardware: Hardware
    limit: int


def machine_of_plan(
    plan: Plan, settings: Sequence[str] | None = None, framework: str | None = None
) -> Hardware:
    """The hardware and software that the plan was made for; a framework that is named replaces the plan's."""
    return read_hardware(hardware_of(plan), settings, framework or plan.data.framework)


@dataclass(frozen=True)
class OnPlannedHardware:
    """The hardware and the software of a plan, unless others are named."""

    hardware: Annotated[
        str | None, hardware_option(show_default=f"the plan's; of a model {THIS_MACHINE}")
    ] = None
    set_hardware: SetHardwareOption = None
    framework: FrameworkOption = None

    def read(self, model: Model, plan: Plan | None) -> Hardware:
        """The hardware under a framework; the plan's, or the model's own, where none is named."""
        if plan is None:
            named = self.hardware or THIS_MACHINE
            return read_hardware(named, self.set_hardware, self.framework, model)
        if self.hardware is None:
            return machine_of_plan(plan, self.set_hardware, self.framework)
        return read_hardware(self.hardware, self.set_hardware, self.framework or plan.data.framework)


ON_PLANNED = OnPlannedHardware()


def hardware_of(plan: Plan) -> str:
    """The hardware file that the plan was made for, if it is there; else the hardware's name."""
    from costmodels.hardware import split_name

    given = plan.question.hardware
    return given if given is not None and os.path.isfile(split_name(given)[0]) else plan.data.hardware


def open_plan(
    path: Path, model: str | None, on_damage: Told | None = None, framework: str | None = None
) -> Planned:
    """A plan file with its model, built with the plan's hyperparameters.

    Args:
      model: value of `--model`; None: the file that the plan was made from, if it is unchanged.
      on_damage: as in `load_plan`.
      framework: as in `machine_of_plan`.

    Raises:
      UserError: the plan or the model does not exist, only the plan names the model, or the model has
        changed.
    """
    from layoutopt.plan.build import load_plan

    return with_model(load_plan(path, on_damage), path, model, framework)


def with_model(plan: Plan, path: Path, model: str | None, framework: str | None = None) -> Planned:
    """The same of a plan that is read already."""
    from layoutopt.models.source import leave

    if model is None:
        model = trusted_model(plan, path, "--model MODEL")
    else:
        leave()
    loaded = load_planned(model, None, str(path), plan)
    machine = machine_of_plan(plan, framework=framework)
    return Planned(plan, loaded, machine, plan.limit(machine))


def trusted_model(plan: Plan, path: Path, named: str) -> str:
    """The MODEL that a plan was made from; from then on only its texts that were checked run.

    Args:
      path: of the plan.
      named: how the user names a model where the plan's own word is not taken.

    Raises:
      UserError: the plan names no model, or one that has changed.
    """
    from layoutopt.models.recorded import trusted
    from layoutopt.models.source import only
    from mesh_tf_core.errors import UserError

    said = plan.data.details
    if not said.source:
        raise UserError(f"plan {str(path)!r} does not record its model file; name the model with {named}")
    try:
        texts = trusted(said.source, said.source_sha256)
    except UserError as error:
        raise UserError(f"plan {str(path)!r}: {error}; name the model yourself, with {named}") from None
    only(said.source, texts)
    return said.source


def is_plan(layout: str | None) -> bool:
    """True if `--layout` names a plan file."""
    return layout is not None and (layout.endswith(".json") or os.path.isfile(layout))


def say_damage(text: str) -> None:
    """Warns on stderr about a fault of a plan that can still be used."""
    typer.echo(f"warning: {clean(text)}", err=True)


def load_with_plan(
    source: str, settings: Sequence[str] | None, layout: str | None, mesh: str | None = None
) -> tuple[Loaded, Plan | None]:
    """The model of a file and the plan that `--layout` names, if it names one.

    The plan gives the hyperparameters that no `--set` changes.

    Raises:
      UserError: as `load_model` and `load_plan`, or the plan was made for another model.
    """
    plan = named_plan(layout)
    return load_planned(source, settings, str(layout), plan, mesh), plan


def named_plan(layout: str | None) -> Plan | None:
    """The plan that `--layout` names, if it names one."""
    from layoutopt.plan.build import load_plan

    return load_plan(layout, say_damage) if layout is not None and is_plan(layout) else None


def load_planned(
    source: str, settings: Sequence[str] | None, path: str, plan: Plan | None, mesh: str | None = None
) -> Loaded:
    """The model of a file, with the hyperparameters of a plan, if there is one; `path`: the plan's."""
    from layoutopt.models.hparams import parse_settings
    from layoutopt.models.loading import hyperparameters, load_model
    from mesh_tf_core import UserError

    if plan is None:
        return load_model(source, settings or (), None if mesh is None else read_mesh(mesh).devices)
    changed = parse_settings(settings or (), hyperparameters(source), source)
    try:
        loaded = load_model(source, {**plan.data.model.hparams, **changed})
        model = plan.of(loaded.model).model or loaded.model
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return replace(loaded, model=model)
