"""The schemas of the output of `candidates` and `check`, which compare predictions of layouts."""

from __future__ import annotations

from pydantic import Field

from layoutopt.plan.decided import Decided
from layoutopt.plan.fields import Data, Figure, Flag, PositiveInteger
from layoutopt.plan.results import CommandResult, LayoutResult
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
