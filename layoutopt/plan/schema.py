"""Plans: the result of a search as plain data, in the file format `layoutopt-plan/1`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import stage_number

FORMAT = "layoutopt-plan/1"


class _Data(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class ModelInfo(_Data):
    """Which model a plan is for."""

    name: str
    fingerprint: str
    hparams: dict[str, Any] = Field(default_factory=dict)
    parameters: int


class Predicted(_Data):
    """The price of one step, per device."""

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    peak_memory_bytes: int
    flops_per_device: float
    communication_bytes_per_device: dict[str, float]


class SolverInfo(_Data):
    """What the solver proved."""

    status: str
    objective: float
    bound: float
    gap: float
    wall_seconds: float
    layouts_considered: str


class Alternative(_Data):
    """Another layout, priced in the same way."""

    name: str
    mesh: dict[str, int]
    layout: dict[str, list[str]]
    predicted: Predicted | None
    feasible: bool
    reason: str | None = None
    storage: dict[str, str] = Field(default_factory=dict)
    recompute: list[str] = Field(default_factory=list)
    microbatches: int = 1


class PlanFile(_Data):
    """The plan file; its fields are the contract's."""

    format: Literal["layoutopt-plan/1"]
    model: ModelInfo
    mesh: dict[str, int]
    layout: dict[str, list[str]]
    storage: dict[str, str] = Field(default_factory=dict)
    recompute: list[str] = Field(default_factory=list)
    microbatches: int = 1
    hardware: str
    predicted: Predicted
    solver: SolverInfo
    alternatives: list[Alternative] = Field(default_factory=list)
    frontier: list[Alternative] | None = None
    notes: list[str] = Field(default_factory=list)


class Plan:
    """A layout with its proof, price and alternatives.

    Attributes:
      data: the contents of the plan file.
      mesh, layout, options: what `mtf.Trainer` and `Model.lower` take.
    """

    def __init__(self, data: PlanFile) -> None:
        self.data = data
        self.mesh = Mesh(data.mesh)
        self.layout = Layout(data.layout)
        stages = {name: stage_number(stage) for name, stage in data.storage.items()}
        self.options = Options(stages, frozenset(data.recompute), data.microbatches)

    @property
    def predicted(self) -> Predicted:
        return self.data.predicted

    @property
    def solver(self) -> SolverInfo:
        return self.data.solver

    @property
    def alternatives(self) -> list[Alternative]:
        return self.data.alternatives

    def to_json(self) -> dict[str, Any]:
        """The plan file's object."""
        found = self.data.model_dump(mode="json")
        for absent in ("frontier", "notes"):
            if not found.get(absent):
                found.pop(absent, None)
        return found

    def save(self, path: str | Path) -> None:
        """Writes the plan file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def __repr__(self) -> str:
        p = self.predicted
        return (
            f"Plan({self.layout} on {self.mesh}: {p.step_seconds:.4g} s a step, "
            f"{p.peak_memory_bytes / 2**30:.3g} GiB, {self.solver.status})"
        )


def load_plan(path: str | Path) -> Plan:
    """Reads a plan file; UserError in one line if it is not one."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"plan {str(path)!r} cannot be read: {error.strerror}; give a file made by search --out"
        ) from None
    except RecursionError:
        raise UserError(f"plan {str(path)!r} is nested too deeply; make it again with search --out") from None
    except ValueError as error:
        raise UserError(
            f"plan {str(path)!r} is not whole JSON ({error}); make it again with search --out"
        ) from None
    return parse_plan(content, str(path))


def parse_plan(content: Any, where: str = "plan") -> Plan:
    """A plan from its JSON object."""
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UserError(
            f"plan {where!r} has format {found!r}; this version reads {FORMAT!r}: make it again with search"
        )
    try:
        return Plan(PlanFile.model_validate(content))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise UserError(
            f"plan {where!r}: {path}: {first['msg']}{more}; make it again with search --out"
        ) from None


def check_plan_model(plan: Plan, model: Any) -> None:
    """Raises UserError, naming the difference, unless the plan was made for this model."""
    info = plan.data.model
    if info.fingerprint == model.fingerprint:
        return
    ours = dict(model.hparams)
    different = [
        f"{k}={info.hparams[k]!r} there, {ours[k]!r} here"
        for k in ours
        if k in info.hparams and info.hparams[k] != ours[k]
    ]
    if info.name != model.name:
        different.insert(0, f"its model is {info.name!r}, this one {model.name!r}")
    if info.parameters != model.parameters:
        different.append(f"{info.parameters:,} parameters there, {model.parameters:,} here")
    why = "; ".join(different) or "its operations differ"
    raise UserError(
        f"the plan was made for another model: {why}; search again, or set the same hyperparameters"
    )
