"""Reads one layout from the command line: the mesh, the layout, and the other decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.cli.allowed import options
from layoutopt.cli.options import read_mesh
from layoutopt.cli.plans import is_plan, read_plan
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

    def read(
        self, loaded: Loaded, mesh: str | None, layout: str | None, plan: Plan | None = None
    ) -> GivenOptions:
        """Reads them with the mesh and the layout; a plan file gives all of them.

        Args:
          plan: content of the plan file, if it was read already.

        Raises:
          UserError: no mesh, a malformed mesh or layout, a plan of another model or mesh.
        """
        from mesh_tf_core import Layout, UserError

        options = self.options(loaded)
        if layout is None or not is_plan(layout):
            return GivenOptions(read_mesh(mesh), Layout(layout or ""), options)
        plan = read_plan(loaded, layout, plan)
        if self:
            raise UserError(f"{layout} sets every decision itself; remove {', '.join(sorted(self.texts))}")
        if mesh is not None and read_mesh(mesh) != plan.mesh:
            raise UserError(
                f"--mesh {mesh!r} is not the mesh of {layout}, which is {plan.mesh}; remove --mesh"
            )
        return GivenOptions(plan.mesh, plan.layout, plan.options, plan)

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
