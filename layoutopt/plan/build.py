"""Plans as the library uses them: a plan file with its mesh, its layout and its options made ready to run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from costmodels.frameworks import DEFAULT
from layoutopt.frameworks import as_built, says
from layoutopt.front_ends import FRONT_ENDS
from layoutopt.plan.decided import SAID, Decided
from layoutopt.plan.details import Searched
from layoutopt.plan.schema import (
    Alternative,
    ModelInfo,
    PlanFile,
    Predicted,
    SolverInfo,
    Told,
    plan_file,
    read_plan_file,
)
from layoutopt.plan.training import TrainingForecast
from layoutopt.plan.units import bytes_text, seconds_text
from layoutopt.space.allow import allowed_by
from layoutopt.space.decisions import SearchSpace
from mesh_tf_core.arguments import PATH, check
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.files import write_file
from mesh_tf_core.ir.layout import ELSEWHERE, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import NO_STAGES, Model

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.plan.exported import ExportedTensor


@runtime_checkable
class AppliesPlans(Protocol):
    """A model of another library's program.

    Attributes:
      front_end: its name in `front_ends`.
    """

    front_end: str

    def applied(self, plan: Plan) -> Any:
        """The plan in that program."""

    def arrays(self, plan: Plan) -> Mapping[str, tuple[ExportedTensor, ...]]:
        """The arrays of that program as the plan stores them, by the name of a section."""


@runtime_checkable
class NamesModules(Protocol):
    """A model that stands for a PyTorch module."""

    def modules(self, plan: Plan) -> Mapping[str, tuple[ExportedTensor, ...]]:
        """The module's parameters as the plan splits them (`layoutopt.plan.exported.MODULES`)."""


class Plan:
    """A layout with its proof, predicted cost and alternatives.

    Attributes:
      data: the contents of the plan file.
      mesh, layout, options: arguments of `mtf.Trainer` and `Model.lower`. Reading them raises UserError if
        `data` was changed, because the proof and the prediction then belong to another layout.
      stopped: True if Ctrl-C ended the search. Plan files do not store this attribute.
      model: the model of the plan, if it is loaded. Plan files do not store the model.
      complete: computes the `details` that reports show, if model and hardware are loaded.

    Example:
      >>> import layoutopt
      >>> from examples import mlp
      >>> plan = layoutopt.search(mlp.model(), mesh="data:4", hardware="tpu-v5e")
      >>> plan.solver.status, str(plan.mesh)
      ('OPTIMAL', 'data:4')
    """

    def __init__(
        self,
        data: PlanFile,
        stopped: bool = False,
        model: Model | None = None,
        complete: Callable[[Plan], Plan] | None = None,
    ) -> None:
        self.data, self.stopped, self.model, self.complete = data, stopped, model, complete
        self._made = self._said()
        self._own: Any = None
        self._full: Plan | None = None

    def _said(self) -> tuple[Mesh, Layout, Options]:
        """What the data says is decided; its dicts and lists could be changed in place."""
        return Mesh(self.data.mesh), layout_of(self.data), options_of(self.data)

    def _decided(self) -> tuple[Mesh, Layout, Options]:
        if self._said() != self._made:
            mesh, layout, _ = self._made
            raise UserError(
                f"the data of this plan for {layout} on {mesh} was changed, so the prediction and the proof "
                "are of another layout; search with pins, or predict your own layout with `cost`"
            )
        return self._made

    @property
    def mesh(self) -> Mesh:
        return self._decided()[0]

    @property
    def layout(self) -> Layout:
        return self._decided()[1]

    @property
    def options(self) -> Options:
        return self._decided()[2]

    @property
    def slices(self) -> dict[str, int]:
        """Mesh axis -> number of slices that the axis spans, for axes that span more than one."""
        return self.data.slices

    @property
    def predicted(self) -> Predicted:
        return self.data.predicted

    @property
    def solver(self) -> SolverInfo:
        return self.data.solver or SolverInfo(status="UNKNOWN")

    @property
    def alternatives(self) -> list[Alternative]:
        return self.data.alternatives

    def alternative(self, name: str) -> Alternative:
        """The alternative of this name or short name (FSDP, DP + TP), else the one with it in its name.

        Raises:
          UserError: no alternative, or more than one, but the plan's own layout has the name.
        """
        at, own, asked = self.data.mesh, (self.layout, self.options.key), name.casefold()
        others = {
            of.name: of
            for of in self.alternatives
            if (of.mesh or at, (layout_of(of), options_of(of).key)) != (at, own)
        }
        known = {n: _short_names(n) for n in others}
        exact = [n for n, short in known.items() if asked in (n.casefold(), *short[:1])]
        parts = [n for n, short in known.items() if asked in short]
        found = exact or parts or [n for n in others if re.search(rf"\b{re.escape(asked)}", n.casefold())]
        if len(found) == 1:
            return others[found[0]]
        what = "means several alternatives" if found else "is neither a layout nor an alternative"
        raise UserError(f"{name!r} {what} of the plan; {known_names(name, found or others)}")

    @property
    def question(self) -> Searched:
        """The arguments of the plan's search, with defaults for fields that are not in the file."""
        return self.data.details.search or Searched()

    @property
    def allowed(self) -> SearchSpace:
        """The search space of the plan's search, under its framework if the model is there."""
        found, space = allowed_by(self.question), self.data.space
        if space is None or not space.expressed_by:
            return found
        found = (restriction := says(space.expressed_by)).narrowed(found)
        return found if self.model is None else found.but(restriction=restriction.of(self.model))

    def limit(self, hardware: Hardware) -> int:
        """The memory limit of the plan's search, in bytes per device."""
        said = self.question.memory_bytes
        return int(hardware.usable_memory_bytes) if said is None else said

    def to_json(self) -> dict[str, Any]:
        """The content of the plan file as a JSON object."""
        self._decided()
        return self.data.to_json()

    def save(self, path: str | Path) -> None:
        """Writes the plan file in one step. Raises UserError if the file cannot be written."""
        write_file(path, json.dumps(self.to_json(), indent=1) + "\n", "the plan")

    def with_training(self, found: TrainingForecast | None) -> Plan:
        """A copy of the plan with the time and cost of training."""
        return Plan(self.data.model_copy(update={"training": found}), self.stopped, self.model, self.complete)

    def with_details(self, **found: Any) -> Plan:
        """A copy of the plan with some parts of its `details` replaced."""
        return Plan(self.data.with_details(**found), self.stopped, self.model, self.complete)

    def full(self) -> Plan:
        """A copy of the plan with all `details`, from which reports, figures and tables are made."""
        if self.complete is None or self.data.details.lines:
            return self
        if self._full is None:
            self._full = self.complete(self)
        return self._full

    def to_frame(self) -> Any:
        """The best layout and the alternatives as a pandas DataFrame, one row per layout."""
        from layoutopt.plan.notebook import frame

        return frame(self.data)

    def report(self, path: str | Path | None = None, validation: Mapping[str, Any] | None = None) -> str:
        """The report as one self-contained HTML page.

        Args:
          path: a file to which the report is written too.
          validation: the result of `layoutopt.validate` as `to_json()`, which the report then shows.
        """
        from layoutopt.plan.notebook import report

        return report([self.full().to_json()], path, validation)

    def _repr_html_(self) -> str:
        from layoutopt.plan.notebook import card

        return card(self.full().data)

    def check(self, model: Model) -> None:
        """Raises UserError, which names the difference, unless the plan was made for this model."""
        check_plan_model(self, model)

    def of(self, model: Model) -> Plan:
        """A copy of the plan with its model.

        Raises:
          UserError: the plan was made for another model.
        """
        self.check(model)
        return Plan(self.data, self.stopped, as_built(self.data.framework or DEFAULT, model), self.complete)

    @property
    def jax(self) -> Any:
        """The plan as shardings of the model's JAX function (`layoutopt.importers.jax.jax_plan.JaxPlan`).

        Raises:
          UserError: the model was not imported with `from_jax`, or the plan has no model.
        """
        return self._in("jax")

    @property
    def torch(self) -> Any:
        """The plan as placements of the model's PyTorch module.

        Raises:
          UserError: the model was not imported with `from_torch`, or the plan has no model.
        """
        return self._in("torch")

    def _in(self, library: str) -> Any:
        """The plan in the user's own program."""
        front = FRONT_ENDS[library]
        if self.model is None:
            raise UserError(
                f"plan.{library}: a plan from a file has no model; write load_plan(path).of(model).{library}"
            )
        if not isinstance(self.model, AppliesPlans) or self.model.front_end != library:
            raise UserError(
                f"plan.{library}: {self.model.name!r} is not built from {front.title}; build the model with "
                f"{front.made}"
            )
        if self._own is None:
            self._own = self.model.applied(self)
        return self._own

    def __repr__(self) -> str:
        p = self.predicted
        return (
            f"Plan({self.layout} on {self.mesh}: {seconds_text(p.step_seconds)} a step, "
            f"{bytes_text(p.peak_memory_bytes)}, {self.solver.status})"
        )


def model_info(model: Model) -> ModelInfo:
    """The model's identity: name, fingerprint of its step, hyperparameters, size, batch."""
    return ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        hparams=dict(model.hparams),
        parameters=model.parameters,
        frozen=model.frozen,
        batch=model.batch,
    )


def axes_of(layout: Layout) -> dict[str, list[str]]:
    """The plain rules of a layout in the form of files: dimension to mesh axes."""
    return {name: list(axes) for name, axes in layout.items()}


def decided(options: Options, layout: Layout, pipeline: Mapping[str, int] = NO_STAGES) -> Decided:
    """The decisions besides the plain rules of a layout, in a plan file's form; `options_of` and `layout_of`
    read it.

    Args:
      pipeline: the meaning of a rule about layers (`Model.stages`).
    """
    found = {said.name: said.written(getattr(options, said.name)) for said in SAID if said.written}
    found["pipeline"] = dict(pipeline)
    found["refined"] = refined_of(layout)
    return Decided.model_validate(found)


def _short_names(name: str) -> list[str]:
    """The initials of a named strategy, as 'dp + tp' of 'data + tensor parallel', and of its parts."""
    kinds = name.removesuffix(" parallel").split(" + ") if name.endswith(" parallel") else []
    kinds = [kind if kind.isupper() else f"{kind[0]}p" for kind in kinds] or re.findall(r"\((\w+)\)", name)
    return [" + ".join(kinds).casefold(), *map(str.casefold, kinds)]


def given_fields(model: Model, mesh: Mesh, layout: Layout, options: Options) -> dict[str, Any]:
    """The fields of a result that repeat the request: model, mesh, layout, and non-default options."""
    return {
        "model": model_info(model),
        "mesh": mesh.as_dict(),
        "layout": axes_of(layout),
        **decided(options, layout, model.stages(mesh, layout)).model_dump(exclude_defaults=True),
    }


def options_of(data: Decided) -> Options:
    """The options of lowering that a plan file states besides a layout."""
    return Options(**{said.name: said.parsed(getattr(data, said.name)) for said in SAID if said.written})


def refined_of(layout: Layout) -> dict[str, dict[str, list[str]]]:
    """The rules of paths of a layout, in the form of files."""
    parts = (*((ELSEWHERE, layout.elsewhere),) * bool(layout.elsewhere), *layout.refined)
    return {path: {n: list(axes) for n, axes in rules} for path, rules in parts}


def layout_of(data: PlanFile | Alternative) -> Layout:
    """The layout of a plan file, or of one of its alternatives."""
    return Layout(data.layout, data.refined)


def load_plan(path: str | Path, on_damage: Told | None = None) -> Plan:
    """Reads a plan file.

    Args:
      path: the file.
      on_damage: called with a message if the plan's `details` are damaged. The plan is then read without the
        details, which only explanations and reports need. None: damaged details raise UserError.

    Raises:
      UserError: the file cannot be read or is not a plan.

    Example:
      >>> import layoutopt
      >>> from examples import mlp
      >>> layoutopt.search(mlp.model(), mesh="data:4", hardware="tpu-v5e").save("plan.json")
      >>> str(layoutopt.load_plan("plan.json").mesh)
      'data:4'
    """
    check("load_plan", path=(path, PATH))
    return Plan(read_plan_file(path, on_damage))


def parse_plan(content: Any, where: str = "plan") -> Plan:
    """A plan from its JSON object."""
    return Plan(plan_file(content, f"plan {where!r}"))


def check_plan_model(plan: Plan, model: Any) -> None:
    """Raises UserError, naming the difference, unless the plan was made for this model."""
    info = plan.data.model
    if info.fingerprint == model.fingerprint:
        return
    ours = dict(model.hparams)
    different = [
        f"{k}={info.hparams[k]!r} in the plan, {ours[k]!r} in this model"
        for k in ours
        if k in info.hparams and info.hparams[k] != ours[k]
    ]
    if info.name != model.name:
        different.insert(0, f"the plan's model is {info.name!r}, this model is {model.name!r}")
    if info.parameters != model.parameters:
        different.append(f"{info.parameters:,} parameters in the plan, {model.parameters:,} in this model")
    why = "; ".join(different)
    if not why:
        raise UserError(
            "the plan was made for another model or by another version of layoutopt (the operations "
            "differ); search again"
        )
    raise UserError(
        f"the plan was made for another model: {why}; search again, or use the values of the plan (--set)"
    )
