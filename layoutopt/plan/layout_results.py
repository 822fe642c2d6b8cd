"""The schemas of the output of `explain`, `candidates` and `check`, which compare predictions of layouts."""

from __future__ import annotations

from pydantic import Field

from layoutopt.plan.decided import Decided
from layoutopt.plan.details import FactorCurve, Proof, Robustness
from layoutopt.plan.fields import Data, Figure, Flag, PositiveInteger
from layoutopt.plan.results import CommandResult, LayoutAxes, LayoutResult, MeshAxes
from layoutopt.plan.schema import Alternative, ModelInfo


class Candidate(Alternative):
    """A layout that is worth measuring.

    Attributes:
      error: mean error of predicted steps of its kind, as a share; None: no run of this kind is known.
      group: number of the candidates whose predictions this error cannot tell apart.
    """

    error: Figure
    group: PositiveInteger


class CandidatesResult(CommandResult):
    """`candidates`: the layouts worth measuring, the fastest first."""

    command = "candidates"
    model: ModelInfo
    hardware: str
    framework: str
    candidates: list[Candidate]
    notes: list[str] = Field(default_factory=list)


class CheckedBound(Data):
    """A bound on a prediction: bytes of a device or seconds of a step."""

    name: str
    bound: float
    found: float
    ok: Flag


class CheckResult(Decided, LayoutResult):
    """`check`: whether every bound holds."""

    command = "check"
    hardware: str
    framework: str
    ok: Flag
    bounds: list[CheckedBound]


class LearnedConstant(Data):
    """A constant of a framework, by its path in a hardware file: shipped, and fitted with a 90 % interval."""

    name: str
    before: float
    after: float
    interval: tuple[float, float]


class LearnResult(CommandResult):
    """`learn`: constants fitted to measured runs.

    Attributes:
      rows: number of different layouts that were measured.
      error_before, error_after: mean absolute error of each, predicted without its runs, as a share.
    """

    command = "learn"
    framework: str
    hardware: str
    rows: int
    constants: list[LearnedConstant]
    error_before: float
    error_after: float


class Binding(Data):
    """The tensors at the peak, and whether the limit excludes a faster layout."""

    peak_bytes: int
    peak: str
    limit_bytes: int
    binds: Flag
    step_seconds_without_limit: Figure


class Worth(Data):
    """The cost of a rule: the best under it, and how much more that takes than the plan; if none was found,
    `reason` says why."""

    rule: str
    step_seconds: Figure
    peak_bytes: Figure
    costs_seconds: Figure
    costs_bytes: Figure
    layout: str
    proven: Flag
    reason: str | None

    @classmethod
    def none(cls, rule: str, reason: str | None, proven: bool = False) -> Worth:
        """No layout was found under a rule."""
        absent = dict.fromkeys(("step_seconds", "peak_bytes", "costs_seconds", "costs_bytes"))
        return cls(rule=rule, **absent, layout="", proven=proven, reason=reason)


class PartDifference(Data):
    """Seconds of a part of the step under the plan and under another layout."""

    part: str
    plan_seconds: Figure
    other_seconds: Figure


class OperationDifference(Data):
    """Seconds of one kind of operation under the plan and under another layout; `axes` are those of a
    collective."""

    scope: str
    operation: str
    phase: str
    axes: str
    plan_seconds: Figure
    other_seconds: Figure


class Against(Data):
    """Another layout, compared with the plan's.

    Attributes:
      parts: they add up to the steps.
    """

    mesh: MeshAxes
    layout: str
    step_seconds: Figure
    step_seconds_with_the_plans_options: Figure
    peak_bytes: int
    parts: list[PartDifference]
    differences: list[OperationDifference]


class KeptStep(Data):
    """The step with other kept values of the loops over one dimension; `recompute` is the text of the option,
    "" without recomputation."""

    loop: str
    change: str
    recompute: str
    step_seconds: float
    peak_bytes: int
    fits: Flag


class Placed(Data):
    """Values of one class that have the same placement in one phase.

    Attributes:
      values: the class: variable, state, gradient or saved.
      names: of the variables, or of the dimensions of the loops.
      further: the axes over which storage splits them in addition to the layout's.
      host: they lie in the memory of the devices' hosts.
      dtype: None: their own.
      again: how they are had when they are read once more.
      keep: the kept values among those that are recomputed.
      bytes: that a device, or its host, holds of them between steps.
    """

    values: str
    phase: str
    names: tuple[str, ...]
    further: tuple[str, ...]
    host: Flag
    dtype: str | None
    again: str
    keep: tuple[str, ...]
    bytes: int | None


class ExplainResult(CommandResult):
    """`explain`: the last five fields are present on request, `kept` if loops are recomputed."""

    command = "explain"
    model: ModelInfo
    layout: LayoutAxes
    step_seconds: Figure
    agrees: Flag
    disagreements: list[str]
    memory: Binding
    splits: list[Worth]
    pins: list[Worth]
    against: Against | None
    placement: tuple[Placed, ...] = ()
    kept: tuple[KeptStep, ...] = ()
    decisions: tuple[Worth, ...] = ()
    sensitivity: tuple[FactorCurve, ...] = ()
    robustness: Robustness | None = None
    proof: Proof | None = None
