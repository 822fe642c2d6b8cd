"""The plan file, `layoutopt-plan/1`: the result of a search as plain data.

The only description of the format: the search fills it in, the command line writes and reads it, reports show
it. It does not depend on meshes, layouts or programs; `layoutopt.plan.build.Plan` makes these from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from layoutopt.plan.covered import CoveredSpace
from layoutopt.plan.decided import Decided
from layoutopt.plan.details import Details
from layoutopt.plan.fields import (
    LARGEST,
    Amount,
    Data,
    Flag,
    Names,
    PositiveInteger,
    WholeNumber,
    refusal,
    wrong,
)
from layoutopt.plan.known import Known
from layoutopt.plan.training import TrainingForecast
from layoutopt.plan.units import bytes_text, clean, rate_text, share_text, throughput_text
from mesh_tf_core.errors import UserError
from mesh_tf_core.reading import check_depth, read_json, reading

FORMAT = "layoutopt-plan/1"
AGAIN = "make it again with `layoutopt search MODEL --out PLAN.json`"


class ModelInfo(Data):
    """The model of a plan.

    Attributes:
      parameters: number of trained parameters; 0: not known.
      frozen: number of elements of arrays that stay and are not trained.
      batch: sizes of the dimensions of a step's batch.
    """

    name: str
    fingerprint: str = ""
    hparams: dict[str, Any] = Field(default_factory=dict)
    parameters: WholeNumber = 0
    frozen: WholeNumber = 0
    batch: dict[str, PositiveInteger] = Field(default_factory=dict)


class Predicted(Data):
    """The predicted time and memory of one step, per device. Bytes sent are by mesh axis ('+' joins several).

    Attributes:
      mfu: model FLOP utilisation, a fraction of the peak (`costmodels.utilisation`).
      model_flops: model FLOPs of a step on all devices.
      hfu: hardware FLOP utilisation, if the plan recomputes something.
      examples_per_second, tokens_per_second: throughput of all devices. Tokens are known if the model names
        their dimensions. Unknown values are left out.
      step_seconds: of what the device does, or of the host that launches it, if it needs longer; then
        host_seconds are the same.
      usable_memory_bytes: of a device of this hardware.
      host_memory_bytes: bytes in the host's memory for a device, if any; host_bytes_per_device: bytes over
        its host link, by direction (`host_load`, `host_store`).
      tokens_per_second_per_chip, model_flops_per_second_per_chip: a chip may be several devices.
    """

    step_seconds: Amount
    compute_seconds: Amount
    communication_seconds: Amount
    exposed_communication_seconds: Amount
    peak_memory_bytes: WholeNumber
    usable_memory_bytes: WholeNumber | None = None
    flops_per_device: Amount = 0.0
    communication_bytes_per_device: dict[str, Amount] = Field(default_factory=dict)
    mfu: Amount | None = None
    hfu: Amount | None = None
    model_flops: Amount | None = None
    model_flops_per_second_per_chip: Amount | None = None
    examples_per_second: Amount | None = None
    tokens_per_second: Amount | None = None
    tokens_per_second_per_chip: Amount | None = None
    host_seconds: Amount | None = None
    host_memory_bytes: WholeNumber | None = None
    host_bytes_per_device: dict[str, Amount] | None = None

    @model_serializer(mode="wrap")
    def _known(self, made: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in made(self).items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _sum(cls, found: Any) -> Any:
        """Where only some of the parts are said, the others follow: compute + exposed = step."""
        if not isinstance(found, Mapping):
            return found
        exposed = found.get("exposed_communication_seconds") or 0.0
        step = found.get("step_seconds")
        follow = {"communication_seconds": exposed, "exposed_communication_seconds": exposed}
        if isinstance(step, int | float) and isinstance(exposed, int | float) and abs(step) <= LARGEST:
            follow["compute_seconds"] = step - min(exposed, step)
        longer = {"step_seconds": found["host_seconds"]} if found.get("host_seconds") else {}
        return {**found, **{name: v for name, v in follow.items() if found.get(name) is None}, **longer}

    @property
    def device_seconds(self) -> float:
        """Seconds of a step's kernels, and of what they wait for."""
        return self.compute_seconds + self.exposed_communication_seconds

    @property
    def speed(self) -> str:
        """The speed of a step: '41.2% MFU (54.0% HFU), 12,300 tokens/s'; examples where no tokens are
        known."""
        tokens, examples = self.tokens_per_second, self.examples_per_second
        rate = [throughput_text(tokens, "tokens")] if tokens is not None else []
        rate = rate or ([throughput_text(examples, "examples")] if examples is not None else [])
        hfu = "" if self.hfu is None else f" ({share_text(self.hfu, 1)} HFU)"
        return ", ".join([*([] if self.mfu is None else [f"{share_text(self.mfu, 1)} MFU{hfu}"]), *rate])

    @property
    def chip_speed(self) -> str:
        """The speed of a chip: '69,428 tokens/s, 241 TFLOP/s (model FLOPs)'."""
        tokens, flops = self.tokens_per_second_per_chip, self.model_flops_per_second_per_chip
        found = [throughput_text(tokens, "tokens")] if tokens is not None else []
        return ", ".join([*found, *([f"{rate_text(flops, 'FLOP/s')} (model FLOPs)"] if flops else [])])

    @property
    def host(self) -> str:
        """The values on a device's host: '1.2 GiB per device, 1.2 GiB loaded and 1.2 GiB stored in a
        step'."""
        if not self.host_memory_bytes:
            return ""
        moved = self.host_bytes_per_device or {}
        ways = (("host_load", "loaded"), ("host_store", "stored"))
        said = " and ".join(f"{bytes_text(moved.get(name, 0))} {way}" for name, way in ways)
        return f"{bytes_text(self.host_memory_bytes)} per device, {said} in a step"

    @property
    def hidden_seconds(self) -> float:
        """Seconds of communication that run behind computation: at most all of the computation."""
        hidden = self.communication_seconds - self.exposed_communication_seconds
        return min(max(hidden, 0.0), self.compute_seconds)


class ProofStatus(StrEnum):
    """The status of a plan."""

    OPTIMAL = "OPTIMAL"
    """No layout of the search space is better."""
    FEASIBLE = "FEASIBLE"
    """It fits; something better may exist above the bound."""
    INFEASIBLE = "INFEASIBLE"
    """It does not fit, and its search proved that none does."""
    UNDECIDED = "UNDECIDED"
    """No usual layout that fits was found, and that none fits is not proven."""


class SolverInfo(Data):
    """The solver's proof. `objective` and `bound` are in the objective's own unit.

    Attributes:
      likely_bound, likely_gap: their values if the tables' error is no larger than on the compared layouts (a
        note has that error); left out if the proof needs no such condition.
    """

    status: str
    objective: Amount | None = None
    bound: Amount | None = None
    gap: Amount | None = None
    wall_seconds: Amount | None = None
    layouts_considered: str = ""
    likely_bound: Amount | None = Field(default=None, exclude_if=lambda value: value is None)
    likely_gap: Amount | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def proven(self) -> bool:
        """True if the status is OPTIMAL and the gap agrees."""
        return self.status.upper() == ProofStatus.OPTIMAL and (self.gap is None or self.gap <= 1e-6)


def _priced(found: Any) -> Any:
    return None if isinstance(found, Mapping) and found.get("step_seconds") is None else found


ANSWER = "the answer"
"""The name of a plan's own layout beside its alternatives."""


class PricedAlternative(Data):
    """A named layout with its predicted cost; without a mesh of its own it is on the answer's.

    Attributes:
      feasible: whether it fits; None if it does not, and not every layout of its name was searched.
      cut: the search of its name reached its time limit: others of this name may be faster.
    """

    name: str = "unnamed"
    mesh: dict[str, PositiveInteger] = Field(default_factory=dict)
    layout: dict[str, Names] = Field(default_factory=dict)
    predicted: Annotated[Predicted | None, BeforeValidator(_priced)] = None
    feasible: Flag | None = None
    reason: str | None = None
    cut: Flag = Field(default=False, exclude_if=lambda value: not value)

    def fit(self, known: Known, limit: float | None) -> str:
        """'yes', 'barely', 'no', or 'undecided'."""
        if limit is None or self.predicted is None or not self.feasible:
            return {True: "yes", False: "no", None: "undecided"}[self.feasible]
        return known.fits(self.predicted.peak_memory_bytes, limit, self.predicted.usable_memory_bytes)

    @property
    def undecided(self) -> Self:
        """The same where others of its name may fit."""
        why = f"not every layout of this name was searched; of this one, {self.reason}"
        return self.model_copy(update={"feasible": None, "reason": why})


class Alternative(Decided, PricedAlternative):
    """Another layout with its other decisions, predicted in the same way."""


HEAD = ("format", "model", "mesh", "layout")
"""The fields that a plan file begins with."""


class PlanFile(Decided):
    """The plan file; its fields are the contract's.

    Attributes:
      layout: dimension to the mesh axes it is split over, the outermost first.
      framework: the software that it is predicted for; None in plans of releases before frameworks.
      slices: mesh axis to number of TPU slices, or nodes of GPUs, that it spans; left out for one.
      training: time and cost of training, on request.
      space: the space that `solver` is about.
      usual: the proof of the best of the usual layouts, where the search went on from these to everything.
      unrestricted: the best layout if the framework could express every layout; None if it is no faster.
      left: the share of the step that it saves; None if nobody searched for it.
    """

    format: Literal["layoutopt-plan/1"]
    model: ModelInfo
    mesh: dict[str, PositiveInteger]
    layout: dict[str, Names]
    hardware: str = ""
    framework: str | None = None
    slices: dict[str, PositiveInteger] = Field(default_factory=dict)
    predicted: Predicted
    training: TrainingForecast | None = None
    solver: SolverInfo | None = None
    space: CoveredSpace | None = None
    usual: SolverInfo | None = Field(default=None, exclude_if=lambda value: value is None)
    alternatives: list[Alternative] = Field(default_factory=list)
    frontier: list[Alternative] | None = None
    unrestricted: Alternative | None = Field(default=None, exclude_if=lambda value: value is None)
    left: Amount | None = Field(default=None, exclude_if=lambda value: value is None)
    notes: Names = Field(default_factory=list)
    details: Details = Details()

    @model_validator(mode="after")
    def _axes_of_the_mesh(self) -> PlanFile:
        _known_axes(self, self.mesh)
        for name, choices in (
            ("alternatives", self.alternatives),
            ("frontier", self.frontier or ()),
            ("unrestricted", [self.unrestricted] if self.unrestricted else ()),
        ):
            for i, choice in enumerate(choices):
                _known_axes(choice, choice.mesh or self.mesh, name, i)
        return self

    def to_json(self) -> dict[str, Any]:
        """The plan file's object; `details` are unchanged."""
        found = self.model_dump(mode="json", exclude={"details"})
        for absent in ("frontier", "notes", "slices", "space", "training"):
            if not found.get(absent):
                found.pop(absent, None)
        if self.details.model_fields_set:
            found["details"] = self.details.to_json()
        return {**{name: found[name] for name in HEAD}, **found}

    def with_details(self, **found: Any) -> PlanFile:
        """The same plan with some parts of its `details` replaced."""
        return self.model_copy(update={"details": self.details.model_copy(update=found)})

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a device may hold, from the details."""
        if self.details.memory and self.details.memory.limit:
            return self.details.memory.limit
        return self.details.hardware.memory_bytes if self.details.hardware else None

    @property
    def known(self) -> Known:
        """The errors of predictions for its hardware, as far as the plan has them."""
        return self.details.hardware.known if self.details.hardware else Known()

    def fit_of(self, choice: PricedAlternative) -> str:
        """The fit of a layout beside it."""
        return choice.fit(self.known, self.memory_limit)

    @property
    def fits(self) -> bool | None:
        """None if the plan does not state the limit."""
        limit = self.memory_limit
        return None if limit is None else self.predicted.peak_memory_bytes <= limit


def _known_axes(choice: Alternative | PlanFile, mesh: Mapping[str, int], *at: str | int) -> None:
    parts = ((("refined", path), rules) for path, rules in choice.refined.items())
    for where, rules in ((("layout",), choice.layout), *parts):
        for dim, axes in rules.items():
            for axis in axes:
                if axis not in mesh:
                    known = ", ".join(mesh) or "none"
                    said = f"splits over {axis!r}, which is not an axis of the mesh (axes: {known})"
                    raise wrong(said, *at, *where, dim)


Told = Callable[[str], object]
"""Receives one line of text."""


def read_plan_file(path: str | Path, on_damage: Told | None = None) -> PlanFile:
    """The plan in a file; UserError in one line if it is none. `on_damage` as in `plan_file`."""
    what = f"plan {str(path)!r}"
    with reading(what, AGAIN):
        found = read_json(path)
    return plan_file(found, what, on_damage)


def plan_file(found: Any, what: str = "the plan", on_damage: Told | None = None) -> PlanFile:
    """Reads the plan in a JSON object; a PlanFile is returned unchanged.

    Args:
      what: name of the plan in errors.
      on_damage: called with the faults in the `details` of a plan that is otherwise whole; the plan is then
        read without these parts.
    Raises:
      UserError: naming the plan and the first wrong field.
    """
    if isinstance(found, PlanFile):
        return found
    if not isinstance(found, Mapping):
        raise UserError(
            f"{clean(what)} is not a plan: it must be a JSON object, but is {type(found).__name__}; {AGAIN}"
        )
    with reading(what, AGAIN):
        check_depth(found)
    version = found.get("format")
    if version != FORMAT:
        said = f"format {clean(str(version))[:60]!r}" if version is not None else "no 'format'"
        raise UserError(f"{clean(what)} has {said}, but this version of layoutopt reads {FORMAT!r}; {AGAIN}")
    try:
        return PlanFile.model_validate(found)
    except ValidationError as error:
        places = [e["loc"] for e in error.errors(include_url=False)]
        if on_damage is None or any(place[:1] != ("details",) for place in places):
            raise refusal(error, what, AGAIN) from None
        on_damage(str(refusal(error, what, "the plan is used without this part")))
    damaged = {str(place[1]) for place in places if len(place) > 1}
    kept = {k: v for k, v in found["details"].items() if k not in damaged} if damaged else {}
    try:
        return PlanFile.model_validate({**found, "details": kept})
    except ValidationError as error:  # what is checked last, once all else is right
        raise refusal(error, what, AGAIN) from None
