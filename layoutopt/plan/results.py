"""The schemas of the output of commands with `--json`, one for each command.

Times are in seconds and sizes in bytes of one device; infinite and undefined numbers are null. `search`
prints a plan file (`layoutopt.plan.schema.PlanFile`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import AliasChoices, Field, model_validator

from layoutopt.plan.decided import Decided, Refined
from layoutopt.plan.evidence import Validation
from layoutopt.plan.fields import Data, Figure, Flag, PositiveInteger
from layoutopt.plan.schema import ModelInfo, Predicted
from layoutopt.plan.training import TrainingForecast

LayoutAxes = dict[str, list[str]]
"""Dimension to mesh axes."""
MeshAxes = dict[str, int]
SAME = 0.01
"""Bytes that differ by less than this part are the same: the compiler pads."""


class CommandResult(Data):
    """The output of a command.

    Attributes:
      command: its name; `format` is made of it.
    """

    command: ClassVar[str] = "command"
    format: str = ""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, found: Any) -> Any:
        """Gives its own format to an output that has none; a null, as in every field, is a missing value."""
        if not isinstance(found, Mapping) or found.get("format") is not None:
            return found
        return {**found, "format": f"layoutopt-{cls.command}/1"}


class LayoutResult(CommandResult):
    """The output of a command about one layout of one model."""

    model: ModelInfo
    mesh: MeshAxes
    layout: LayoutAxes


class CostLine(Data):
    """One priced line, in the order of the program; every number is of one of its runs."""

    operation: str
    fused: list[str]
    scope: str
    phase: str
    axes: list[str]
    purpose: str = Field(validation_alias=AliasChoices("class", "purpose"), serialization_alias="class")
    runs: Figure
    seconds: Figure
    exposed_seconds: Figure
    flops: Figure
    bytes: Figure
    sent_bytes: Figure
    formula: str


class Finding(Data):
    """A likely mistake of a layout.

    Attributes:
      kind: of the list in `layoutopt.analysis.lint`.
      message: the finding, with its size.
      fix: the change and its predicted effect; None if nothing better is known.
      layout: of the fix, if it is another layout.
    """

    kind: str
    message: str
    fix: str | None = None
    layout: str | None = None


class CostResult(Decided, LayoutResult):
    """`cost`: a layout that does not fit is predicted too, with the `reason` why it is not `feasible`."""

    command = "cost"
    hardware: str
    framework: str
    predicted: Predicted
    training: TrainingForecast | None = Field(default=None, exclude_if=lambda value: value is None)
    feasible: Flag
    reason: str | None
    findings: list[Finding]
    notes: list[str] = Field(default_factory=list)
    lines: list[CostLine] = Field(default_factory=list)


class Best(Data):
    """The best layout of the same mesh that a search found."""

    layout: LayoutAxes
    step_seconds: Figure
    status: str


class LintResult(Decided, LayoutResult):
    """`lint`: likely mistakes, and the best layout of the mesh that fits; null if none was found."""

    command = "lint"
    hardware: str
    framework: str
    predicted: Predicted
    feasible: Flag
    findings: list[Finding]
    best: Best | None


class MeasureResult(Refined, CommandResult):
    """`measure`: bytes are counted by the engine, not predicted; `step_seconds` is the median."""

    command = "measure"
    mesh: MeshAxes
    layout: LayoutAxes
    step_seconds: Figure
    step_seconds_all: Sequence[Figure]
    compile_seconds: Figure
    loss: Sequence[Figure]
    communication_bytes_per_device: Mapping[str, Figure]
    peak_memory_bytes: Figure
    notes: Sequence[str] = ()


class ValidateResult(Validation, CommandResult):
    """`validate`."""

    command = "validate"


class Collectives(Data):
    """The number of collectives of one kind over groups of one size in a step."""

    kind: str
    group_size: int
    count: int


class Compared(Data):
    """A number of the compiler and the predicted number."""

    compiler: Figure
    predicted: Figure

    @property
    def ratio(self) -> float:
        """The compiler's over the predicted one."""
        return (self.compiler or 0) / self.predicted if self.predicted else math.inf


class Moved(Data):
    """The traffic of the collectives of one family over groups of one size in a step: their number, and bytes
    that a device puts in."""

    family: str
    group_size: int
    count: Compared
    bytes: Compared

    @property
    def same(self) -> bool:
        """True if both move the same bytes."""
        return abs(self.bytes.ratio - 1) <= SAME


class VerifyResult(Decided, LayoutResult):
    """`verify`: without a compiled program, its `reason` and the compiler's message about memory; host memory
    and transfers are those of one device."""

    command = "verify"
    topology: str
    compiled: Flag
    out_of_memory: Flag
    reason: str | None
    collectives: list[Collectives]
    predicted_collectives: list[Collectives]
    moved: list[Moved]
    same_collectives: Flag | None
    peak_memory_bytes: Compared
    allocated_bytes: Figure
    host_memory_bytes: Compared
    host_load_bytes: Compared
    host_store_bytes: Compared
    compute_seconds: Compared
    unknown_loops: Figure
    compile_seconds: Figure


class ProblemSolver(Data):
    """The solver of a problem, and its proof."""

    name: str
    status: str
    objective: Figure
    bound: Figure
    gap: Figure
    wall_seconds: Figure


class SolveProblemResult(CommandResult):
    """`solve-problem`: the position of every variable's choice."""

    command = "solve-problem"
    name: str
    solver: ProblemSolver
    choices: list[int]


class LowerResult(Refined, LayoutResult):
    """`lower`: the program as text, and how often each instruction is in it."""

    command = "lower"
    emit: str
    instructions: dict[str, int]
    communication_bytes_per_device: Mapping[str, Figure]
    program: str


class Continuation(Data):
    """A text with its tokens; of a higher `score` if it is more likely."""

    text: str
    score: float = Field(allow_inf_nan=True)
    tokens: list[int]


class Continued(Data):
    """A prompt and the model's continuations, the best first."""

    prompt: str
    continuations: list[Continuation]


class GenerateResult(LayoutResult):
    """`generate`: texts from a checkpoint of a training step."""

    command = "generate"
    step: int
    seconds: Figure
    texts: list[Continued]


class TrainResult(LayoutResult):
    """`train`: one more field is the rate, named after its unit: 'tokens_per_second'.

    Attributes:
      evaluations: number of a step -> means over held-out data after it; `held_out` is at the end.
    """

    command = "train"
    hardware: str
    framework: str
    predicted: Predicted
    first_step: int
    steps: int
    loss: Sequence[Figure]
    step_seconds: Figure
    waited_for_input: Figure
    held_out: Mapping[str, Figure]
    evaluations: Mapping[str, Mapping[str, Figure]] = {}
    reference_losses: Mapping[str, Figure]
    notes: list[str] = Field(default_factory=list)


class ExportResult(CommandResult):
    """`export`: the layout in another library's form.

    Attributes:
      not_said: decisions besides the layout that the form cannot express; present only if there are any.
      slices: axes that span several slices, if the form does not express this.
    """

    command = "export"
    to: str
    mesh: MeshAxes
    text: str
    not_said: Decided | None = None
    slices: dict[str, PositiveInteger] | None = Field(default=None, exclude_if=lambda value: value is None)


class InitResult(CommandResult):
    """`init`: the file that was written."""

    command = "init"
    path: str


class ReportResult(CommandResult):
    """`report`: the files that were written."""

    command = "report"
    files: list[str]
