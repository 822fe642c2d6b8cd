"""Reads one layout from the command line: the mesh, the layout, and the other decisions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layoutopt.cli.allowed import options
from layoutopt.cli.options import LayoutOption, MeshOption, SetOption, read_mesh
from layoutopt.cli.plans import load_with_plan, open_plan, say_damage
from layoutopt.space.option import listed

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.evaluation import Evaluation
    from layoutopt.plan.build import Plan
    from mesh_tf_core import Layout, Mesh, Options


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
        from layoutopt.optimize.evaluator import evaluate

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
