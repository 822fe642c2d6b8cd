"""What `size` prints with `--json`, and what its report shows."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from layoutopt.plan.decided import Decided
from layoutopt.plan.fields import Data, Figure, Flag, Names
from layoutopt.plan.results import Result

PAYS = 1.25
"""Times the least cost of a token that are still worth the time."""


class SizedCandidate(Decided):
    """A size on some devices, in its best layout, trained as the question says.

    Attributes:
      hparams: those that are not the user's.
      parameters: all; `non_embedding`: without those of words and positions.
      flops: of training, by the model's own count.
      loss_interval: 95 % of one more run, where the law was fitted to the user's.
      money: None: no price is known.
      status, gap: what is proven of the layout.
      beyond: in words, where the loss lies beyond the runs of the law.
      frontier: no other candidate is better in loss, days and cost.
    """

    hparams: dict[str, Any]
    parameters: int
    tokens: Figure
    loss: Figure
    flops: Figure
    hardware: str
    devices: int
    mesh: dict[str, int]
    layout: dict[str, Names]
    step_seconds: Figure
    mfu: Figure
    days: Figure
    chip_hours: Figure
    money: Figure = None
    non_embedding: int = 0
    loss_interval: tuple[Figure, Figure] | None = None
    tokens_per_second: Figure = None
    batch_tokens: int = 0
    peak_memory_bytes: int = 0
    status: str = ""
    gap: Figure = None
    beyond: Names = Field(default_factory=list)
    frontier: Flag = False


class Beaten(Data):
    """A size on some devices that was not searched: another candidate is better than the best that it could
    be, if its devices computed their shares and waited for nothing.

    Attributes:
      step_seconds, days, chip_hours, money: at least; loss: at least, where time or money is given.
    """

    parameters: int
    hardware: str
    devices: int
    loss: Figure
    step_seconds: Figure
    days: Figure
    chip_hours: Figure
    money: Figure = None


class Unfit(Data):
    """A size that cannot answer on some devices, and why."""

    parameters: int
    hardware: str
    devices: int
    reason: str


class LawInfo(Data):
    """The law, its constants, and where they are from.

    Attributes:
      counts: `total` or `non-embedding` parameters.
      ranges: of the runs that it was fitted to.
      exponents: of the compute, of the N and D of least loss.
      errors, intervals: standard errors as published, or 95 % intervals of an own fit.
      told: what it was told besides; `sources`: where that is from.
    """

    name: str
    counts: str
    constants: dict[str, float]
    source: str
    note: str = ""
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)
    errors: dict[str, float] = Field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    runs: list[tuple[float, float, float]] = Field(default_factory=list)
    exponents: tuple[float, float] | None = None
    told: dict[str, Any] = Field(default_factory=dict)
    sources: Names = Field(default_factory=list)


class Optimum(Data):
    """The least loss by the law alone for the FLOPs of the answer, at 6 a parameter and token."""

    flops: Figure
    parameters: Figure
    tokens: Figure
    loss: Figure


class Flat(Data):
    """How far sizes may lie from the best one: those that were searched on the same devices."""

    within: str
    low: int
    high: int


class Sweep(Data):
    """The answer's size on one machine.

    Attributes:
      fits_from: the fewest devices that were searched and hold it.
      pays_to: the most for which a token costs at most `PAYS` times the least; None: all that were searched.
      searched_to: the most that were searched.
    """

    hardware: str
    fits_from: int
    pays_to: int | None
    searched_to: int


class Course(Data):
    """The loss of one size as it is trained: FLOPs and loss, in order."""

    parameters: Figure
    points: list[tuple[float, float]]


class SizeResult(Result):
    """`size`.

    Attributes:
      courses: of some of the sizes that were searched; `least`: the least loss by the law at some FLOPs.
    """

    command = "size"
    model: str
    question: dict[str, Any]
    law: LawInfo
    best: SizedCandidate
    candidates: list[SizedCandidate]
    beaten: list[Beaten] = Field(default_factory=list)
    unfit: list[Unfit] = Field(default_factory=list)
    optimum: Optimum | None = None
    flat: Flat | None = None
    sweeps: list[Sweep] = Field(default_factory=list)
    critical_batch_tokens: Figure = None
    least: list[tuple[float, float]] = Field(default_factory=list)
    courses: list[Course] = Field(default_factory=list)
    notes: Names = Field(default_factory=list)
