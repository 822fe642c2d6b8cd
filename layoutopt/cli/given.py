"""Reads one layout from the command line: the mesh, the layout, and the other decisions.

Options of the choices of a search, made from the arguments of all kinds of decisions: for `search`, and
for `size`, which searches each candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.options import LayoutOption, MeshOption, SetOption, read_mesh
from layoutopt.cli.panels import CHOICES
from layoutopt.cli.plans import load_with_plan, open_plan, say_damage
from layoutopt.space.option import Option, listed

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.evaluation.evaluation import Evaluation
    from layoutopt.plan.build import Plan
    from layoutopt.space.decisions import SearchSpace
    from mesh_tf_core import Layout, Mesh, Options

MaxAxesOption = Annotated[
    int,
    typer.Option(
        "--max-axes", metavar="K", help="Search only meshes of at most this many axes (with --devices)."
    ),
]
BETWEEN = ","
"""Separator of rules and words that were given one after the other."""


class Allowed:
    """Options by the names of their parameters."""

    def given(self, option: str) -> list[str]:
        """The values of an option that may be given again."""
        name = option.removeprefix("--").replace("-", "_")
        return [*(getattr(self, name) or ())]

    def _given(self, o: Option, typed: typer.Context | None) -> bool:
        """True if an option was typed, or is in a file; without the command line, if it is not the usual."""
        if typed is None:
            return getattr(self, o.parameter, None) not in (None, o.usual)
        source = typed.get_parameter_source(o.parameter)
        return source is not None and source.name != "DEFAULT"

    def space(self, typed: typer.Context | None = None, **more: Any) -> SearchSpace:
        """The search space that the options mean.

        Args:
          typed: tells which of them were given (None: those with other texts than the usual).
          more: fields of `SearchSpace` that have no option here.
        """
        from layoutopt.space.decisions import ALLOW, ARGUMENTS, SearchSpace

        found, chosen = {name: ARGUMENTS[name].parse(value) for name, value in more.items()}, {*more}
        for name, argument in {"allow": ALLOW, **ARGUMENTS}.items():
            given = {o.name: getattr(self, o.parameter, None) for o in argument.options}
            said = {n: BETWEEN.join(v) if isinstance(v, list | tuple) else v for n, v in given.items()}
            if name not in more and (text := argument.read(said)) is not None:
                found[name] = argument.parse(text)  # whose refusals name the option
                if any(self._given(o, typed) for o in argument.options):
                    chosen.add(name)
        return SearchSpace(**found, given=frozenset(chosen))


def options(name: str, made: Iterable[Option], base: type, usual: bool = False) -> Any:
    """A group of options (`grouped`).

    Args:
      base: has the group's methods.
      usual: `Option.usual` is the default; else help only shows it.
    """
    found = []
    for o in made:
        kind = list[str] | None if o.several else str | None
        default = o.usual or None if usual and not o.several else None
        shown = True if default else o.usual
        info = typer.Option(
            o.name, metavar=o.metavar, help=o.help, show_default=shown, rich_help_panel=CHOICES
        )
        found.append((o.parameter, Annotated[kind, info], field(default=default)))
    return make_dataclass(name, found, bases=(base,), frozen=True)


def _options(names_axes: bool) -> Any:
    """Those of arguments that name axes of a mesh, or of the others."""
    asked = (o for o in listed()["asked"] if names_axes or o.name not in listed()["axes"])
    return options("AllowedOptions", asked, Allowed, usual=True)


OnMesh, OnAnyMesh = _options(True), _options(False)


class ByHand:
    """Decisions besides the mesh and the layout, by the parameters of the kinds' options; none by default."""

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def texts(self) -> dict[str, list[str]]:
        """Option -> its value, for options that were given."""
        given = {o.name: getattr(self, o.parameter) for o in listed()["by_hand"]}
        return {
            name: said if isinstance(said, list) else [said]
            for name, said in given.items()
            if said is not None
        }

    def options(self, loaded: Loaded) -> Options:
        """The decisions as options of the model's program."""
        from layoutopt.space.decisions import typed

        return typed(loaded.model, self.texts)


UNDECIDED: ByHand = options("Undecided", listed()["by_hand"], ByHand)()


@dataclass(frozen=True)
class LayoutByHand:
    """One layout of a model with all that is decided beside it, as options give it."""

    mesh: MeshOption = None
    layout: LayoutOption = None
    decided: ByHand = UNDECIDED
    settings: SetOption = None

    def load(self, model: str) -> tuple[Loaded, GivenOptions]:
        """The model of a file, and its decisions.

        Raises:
          UserError: as `load_with_plan` and `read`.
        """
        loaded, plan = load_with_plan(model, self.settings, self.layout, self.mesh)
        return loaded, self.read(loaded, plan)

    def read(self, loaded: Loaded, plan: Plan | None = None) -> GivenOptions:
        """Reads the mesh, the layout and the decisions; a plan gives all of them.

        Args:
          plan: content of the file that the layout names, made for this model.

        Raises:
          UserError: no mesh, a malformed mesh or layout, a plan of another mesh.
        """
        from mesh_tf_core import Layout, UserError

        options, own = self.decided.options(loaded), self.decided
        if plan is None:
            return GivenOptions(read_mesh(self.mesh), Layout(self.layout or ""), options)
        if own:
            said = ", ".join(sorted(own.texts))
            raise UserError(f"the plan {self.layout} sets every decision; remove {said}")
        if self.mesh is not None and read_mesh(self.mesh) != plan.mesh:
            raise UserError(
                f"--mesh {self.mesh!r} differs from the mesh of {self.layout}, {plan.mesh}; remove --mesh"
            )
        return GivenOptions(plan.mesh, plan.layout, plan.options, plan)


PLAIN = LayoutByHand()


@dataclass(frozen=True)
class GivenOptions:
    """The values of `--mesh`, `--layout` and the other decisions; `plan` if the layout is a plan file's."""

    mesh: Mesh
    layout: Layout
    options: Options
    plan: Plan | None = None

    def priced(self, loaded: Loaded, machine: Hardware) -> Evaluation:
        """Lowers the model with these options and predicts its cost."""
        from layoutopt.optimize.evaluation.evaluator import evaluate

        return evaluate(loaded.model, self.mesh, self.layout, machine, self.options)


def read_source(source: str, model: str | None, asked: LayoutByHand) -> tuple[Loaded, GivenOptions]:
    """The model of MODEL_OR_PLAN, and what is decided about it: a plan decides everything, a model nothing.

    Args:
      model: value of `--model`, for a plan.

    Raises:
      UserError: as `open_plan` and `LayoutByHand.load`; `--model` beside a model, or decisions beside a plan.
    """
    from layoutopt.importers.huggingface import is_configuration
    from mesh_tf_core import UserError

    if not source.endswith(".json") or is_configuration(source):
        if model is not None:
            raise UserError(
                f"--model names the model of a plan, but {source!r} is not a PLAN.json; remove --model"
            )
        return asked.load(source)
    if asked.settings or asked.mesh or asked.layout or asked.decided:
        raise UserError(
            f"the plan {source} sets the hyperparameters, the mesh, the layout and every decision; "
            "remove the options for them, or name a MODEL instead of the plan"
        )
    planned = open_plan(Path(source), model, on_damage=say_damage)
    plan = planned.plan
    return planned.loaded, GivenOptions(plan.mesh, plan.layout, plan.options, plan)
