"""The part `details` of a plan file, beside the fixed fields, so that a report needs no model.

Every part is optional. `search --out` writes those from `source` to `calibration`, `explain --out` adds
`sensitivity`, `robustness` and `proof`, `report --validation` shows a `validation`. Times are in seconds and
sizes in bytes, both of one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from layoutopt.plan.evidence import CalibrationEvidence, Validation
from layoutopt.plan.fields import (
    AsGiven,
    AxisNames,
    Data,
    Flag,
    LayoutText,
    PositiveInteger,
    TextTuple,
    WholeNumber,
    with_fields,
    wrong,
)
from layoutopt.plan.known import Known
from layoutopt.plan.ways import ReplicaStrategies
from layoutopt.space.decisions import ARGUMENTS


@with_fields({name: (argument.plan | None, None) for name, argument in ARGUMENTS.items()})
class Searched(Data):
    """The request of the search, besides the model and the mesh: choices as the arguments of every kind of
    decision (`space.recorded`), None if a plan does not state one.

    Attributes:
      hardware: a name or a file.
      memory_bytes: of a device; None: the hardware's memory.
      devices, max_axes: of a search for the mesh; no devices: the plan's mesh was given.
      command: the command line that was typed, if one was.
      first: other values of the choices in the usual space, from which the search went on to these.
      by_ranks: nobody gave the numbers of microbatches: they suit this number of devices.
    """

    hardware: str | None = None
    memory_bytes: WholeNumber | None = None
    devices: PositiveInteger | None = None
    max_axes: PositiveInteger = 2
    objective: str = "time"
    command: str = ""
    first: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda value: not value)
    by_ranks: Flag = Field(default=False, exclude_if=lambda value: not value)

    @field_validator("first")
    @classmethod
    def _choices(cls, first: dict[str, Any]) -> dict[str, Any]:
        """As the fields that they are other values of."""
        if unknown := [name for name in first if name not in ARGUMENTS]:
            raise ValueError(f"no such choice: {', '.join(unknown)}")
        read = cls.model_validate(first)
        return {name: getattr(read, name) for name in first if getattr(read, name) is not None}

    if TYPE_CHECKING:

        def __init__(self, **said: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


class HardwareNumber(Data):
    """One number of a hardware description with its source; `value` is a number, or text with its unit."""

    path: str
    value: Any
    unit: str = ""
    source: str = ""
    date: str = ""

    @property
    def assumed(self) -> bool:
        """Neither a measurement of this hardware nor a document supports it."""
        said = self.source.strip().lower()
        return said.startswith("assum") or "uncalibrated" in said


def sources_text(numbers: Sequence[HardwareNumber]) -> str:
    """The number of numbers, and of assumptions among them."""
    said = f"{len(numbers):,} number{'s' * (len(numbers) != 1)} with sources"
    return f"{said}, {sum(number.assumed for number in numbers)} of them assumptions"


class HardwareInfo(Data):
    """The hardware that a plan is priced on.

    Attributes:
      placement: placement of the mesh on the hardware; `lies` has that of each mesh axis.
      known: how far predictions for it are off.
    """

    name: str
    summary: str = ""
    device: str = ""
    memory_bytes: AsGiven | None = None
    assumptions: TextTuple = ()
    placement: str = ""
    lies: dict[str, str] = Field(default_factory=dict)
    numbers: tuple[HardwareNumber, ...] = ()
    known: Known = Known()


class VariableDetail(Data):
    """A trained variable, a piece of optimizer state, or an input; `splits` has the mesh axes of every
    dimension, of which the first one of a `stacked` variable counts the layers of a loop."""

    name: str
    shape: tuple[tuple[str, PositiveInteger], ...]
    dtype: str = ""
    splits: tuple[AxisNames, ...] = ()
    bytes: AsGiven
    local_bytes: AsGiven
    kind: str = "parameter"
    stacked: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _whole_by_default(cls, found: Any) -> Any:
        if not isinstance(found, Mapping) or found.get("splits") or not isinstance(found.get("shape"), list):
            return found
        return {**found, "splits": [()] * len(found["shape"])}

    @model_validator(mode="after")
    def _every_dimension(self) -> VariableDetail:
        if len(self.splits) != len(self.shape):
            raise wrong(f"must list the mesh axes of each of the {len(self.shape)} dimensions", "splits")
        return self

    def local_shape(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the piece that one device holds."""
        parts = (math.prod(mesh.get(a, 1) for a in axes) for axes in self.splits)
        return tuple(-(-size // part) for (_, size), part in zip(self.shape, parts, strict=True))


class PricedLine(Data):
    """One instruction's share of the price; every number is of one of its `times` runs.

    Attributes:
      node: the operation of the graph; a collective belongs to its node's computation.
      place: where the model writes it, as 'model.py:87'.
    """

    op: str
    node: Annotated[int | None, BeforeValidator(lambda n: None if isinstance(n, int) and n < 0 else n)] = None
    scope: str = ""
    phase: str = ""
    kind: str = ""
    times: AsGiven = 1
    seconds: AsGiven
    exposed_seconds: AsGiven = 0.0
    flops: AsGiven = 0.0
    bytes: AsGiven = 0.0
    axes: AxisNames = ()
    sent_bytes: AsGiven = 0.0
    communication: Flag = False
    place: str = ""


class TimeShares(Data):
    """Seconds of one layout's step by kind of work; communication counts hidden and exposed together."""

    compute: AsGiven
    hidden: AsGiven = 0.0
    exposed: AsGiven = 0.0
    kinds: dict[str, AsGiven] = Field(default_factory=dict)


class Point(Data):
    """Memory held while one instruction runs.

    Attributes:
      seconds: of the step that pass there; of a loop's, all iterations together.
    """

    name: str = ""
    scope: str = ""
    phase: str = ""
    bytes: AsGiven
    seconds: AsGiven = 0.0


class LiveTensor(Data):
    """A tensor alive at the peak."""

    what: str
    bytes: AsGiven
    scope: str = ""


class MemoryTimeline(Data):
    """The program's memory, instruction by instruction.

    Attributes:
      at: index of the peak, where it is not the highest point.
      variables: bytes that stay from step to step.
      limit: bytes that a device may hold.
    """

    points: tuple[Point, ...] = ()
    at: WholeNumber | None = None
    holdings: tuple[LiveTensor, ...] = ()
    variables: AsGiven = 0.0
    limit: AsGiven | None = None

    @cached_property
    def peak(self) -> int:
        """Index of the peak; 0 where there are no points."""
        if self.at is not None and self.at < len(self.points):
            return self.at
        return max(range(len(self.points)), key=lambda i: self.points[i].bytes, default=0)


class Trial(Data):
    """The best when one factor has this value; no time: proven that nothing fits, else unknown.

    Attributes:
      bound: seconds that no step is faster than, as far as that is known; `found_seconds`: of the best that
        was found, however far from it; `answer`: all that is decided there. Plan files do not have these.
    """

    value: AsGiven
    step_seconds: AsGiven | None = None
    layout: LayoutText = ""
    mesh: str = ""
    proven: Flag = False
    bound: AsGiven = Field(default=0.0, exclude=True)
    found_seconds: AsGiven | None = Field(default=None, exclude=True)
    answer: str = Field(default="", exclude=True)


class FactorCurve(Data):
    """The best step time as one factor changes: 'bandwidth' (a multiple), 'memory' (bytes) or 'devices'."""

    factor: str
    points: tuple[Trial, ...] = ()

    @property
    def trials(self) -> list[Trial]:
        """The points by value."""
        return sorted(self.points, key=lambda t: t.value)


class Robustness(Data):
    """The answer and its alternatives on machines drawn within the uncertainties of the hardware.

    Attributes:
      wins: number of the `draws` machines on which the answer is the fastest.
      worst: most time that it takes there, over the fastest, less one.
      runner_up: the layout that wins most of the other machines, if any.
      uncertain: numbers that have an uncertainty; without any nothing was drawn.
    """

    draws: WholeNumber = 0
    wins: WholeNumber = 0
    worst: AsGiven = 0.0
    runner_up: str = ""
    uncertain: WholeNumber = 0

    @model_validator(mode="after")
    def _at_most_all(self) -> Robustness:
        if self.wins > self.draws:
            raise wrong(f"has {self.wins} of {self.draws} draws", "wins")
        return self

    @property
    def close(self) -> bool:
        """Another layout may well be the faster one."""
        return self.draws > 0 and self.wins < 0.8 * self.draws


class RuledOut(Data):
    """One problem of a search, and the proof about it.

    Attributes:
      layouts: number of combinations of decisions, legal or not.
      how: the source of the proof, 'open', or 'faster': the plan's proof is wrong.
      bound: seconds that no layout of it is faster than, whatever memory it takes.
      listed: faster layouts that do not fit.
      faster: the layout that refutes the proof.
    """

    mesh: str = ""
    microbatches: WholeNumber = 1
    layouts: WholeNumber = 0
    how: str = ""
    bound: float = Field(default=0.0, allow_inf_nan=True)
    listed: WholeNumber = 0
    faster: str = ""


class Proof(Data):
    """A check of the proof without a solver, with its findings in words.

    Attributes:
      layouts: of all problems together, legal or not.
      allowed: its choices, as far as they differ from the defaults.
    """

    verified: Flag = False
    words: str = ""
    layouts: WholeNumber = 0
    allowed: str = ""
    problems: tuple[RuledOut, ...] = ()

    @property
    def refuted(self) -> bool:
        """Something faster was found."""
        return any(p.how == "faster" for p in self.problems)


class Repair(Data):
    """A change of the request under which something fits, and the best plan under it.

    Attributes:
      change: in words, as options of `search`.
      command: the whole command line.
      note: a remark about a smaller change.
      memory_bytes: that a device has there.
      proven: nothing is faster under the change.
    """

    change: str
    command: str = ""
    note: str = ""
    hardware: str = ""
    mesh: dict[str, PositiveInteger] = Field(default_factory=dict)
    layout: LayoutText = ""
    decided: str = ""
    step_seconds: AsGiven
    peak_memory_bytes: AsGiven
    memory_bytes: AsGiven
    mfu: AsGiven | None = None
    proven: Flag = False


class Details(Data):
    """All parts.

    Attributes:
      source: MODEL as the user typed it. It is only a name: no code runs because a plan names it.
      source_sha256: of the model file and of every local file that it imports, by its path from the model
        file's folder (`layoutopt.models.recorded`).
      search: the request besides the model and the mesh.
      hardware: description, placement of the mesh, numbers with their sources.
      parallelism: mesh axis to the usual name of its parallelism, such as 'data (FSDP)' or 'tensor + expert'.
      dims: dimension to size.
      variables: storage of every variable; inputs: placement of every input on devices.
      dtype: of the products that most FLOPs of the model are in.
      applies: the model is another library's program, and only the model knows its arrays.
      lines: the priced instructions of the answer; sources: the lines of code at their places.
      by_kind: seconds by kind of work, of the answer (named so) and every alternative.
      memory: the timeline of the answer, and the values at its peak.
      slots: of each pipeline stage over time, a line each: F forward, B backward, W gradients of weights.
      calibration: every measurement of a calibrated profile beside its fit.
      conflict, repairs: for a request under which nothing fits: the conditions that contradict each other,
        and changes that help.
      ways: compared ways to synchronise; the plan is the fastest.
    """

    source: str = ""
    source_sha256: dict[str, str] = Field(default_factory=dict)
    search: Searched | None = None
    hardware: HardwareInfo | None = None
    parallelism: dict[str, str] = Field(default_factory=dict)
    dims: dict[str, PositiveInteger] = Field(default_factory=dict)
    variables: tuple[VariableDetail, ...] = ()
    inputs: tuple[VariableDetail, ...] = ()
    dtype: str = ""
    applies: Flag = False
    lines: tuple[PricedLine, ...] = ()
    sources: dict[str, str] = Field(default_factory=dict)
    by_kind: dict[str, TimeShares] = Field(default_factory=dict)
    memory: MemoryTimeline | None = None
    slots: TextTuple = ()
    calibration: CalibrationEvidence | None = None
    sensitivity: tuple[FactorCurve, ...] = ()
    robustness: Robustness | None = None
    proof: Proof | None = None
    validation: Validation | None = None
    conflict: TextTuple = ()
    repairs: tuple[Repair, ...] = ()
    ways: ReplicaStrategies | None = None
