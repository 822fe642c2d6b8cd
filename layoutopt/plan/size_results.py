"""The objects that `size` prints with `--json`, and that its report shows."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from layoutopt.plan.decided import Decided
from layoutopt.plan.fields import Data, Figure, Flag, Names
from layoutopt.plan.results import CommandResult
from layoutopt.plan.training import lasts, money_text
from layoutopt.plan.units import count, number, plural, rounded, share_text

PAYS = 1.25
"""Factor of the least cost of a token up to which a faster training is preferred."""
GOALS = {
    "budget": "{:.3g} FLOP",
    "loss": "a loss of {:g}",
    "money": "{:,.0f} to spend",
    "tokens": "{:.3g} tokens",
    "days": "{:g} days",
}
"""The goals that may be given, in words."""


class SizedCandidate(Decided):
    """A size on some devices in its best layout, with the training of the question.

    Attributes:
      hparams: those that are not the user's.
      parameters: all; `non_embedding`: without those of words and positions.
      flops: of training, by the model's own count.
      loss_interval: 95 % of one more run, where the law was fitted to the user's.
      money: None: no price is known.
      status, gap: proof of the layout.
      beyond: where the loss lies outside the runs of the law, in words.
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
    batch: dict[str, int] = Field(default_factory=dict)
    batch_tokens: int = 0
    peak_memory_bytes: int = 0
    status: str = ""
    gap: Figure = None
    beyond: Names = Field(default_factory=list)
    frontier: Flag = False

    def lasts(self) -> str:
        """The duration of training."""
        return lasts(86_400 * (self.days or 0.0))

    def costs(self) -> str:
        """Chip-hours, and money where prices are known."""
        hours = f"{number(self.chip_hours)} chip-hours"
        return hours if self.money is None else f"{hours}, {money_text(self.money)} in total"


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

    def in_words(self) -> str:
        return f"{count(self.parameters)} on {self.devices:,} {self.hardware}: {self.reason}"


class LawInfo(Data):
    """The law, its constants, and where they are from.

    Attributes:
      counts: the parameters that N counts: all (`total`), or all except those of words and positions
        (`non-embedding`).
      ranges: of the runs that it was fitted to.
      exponents: of the compute, of the N and D of least loss.
      errors, intervals: standard errors as published, or 95 % intervals of an own fit.
      told: further inputs; `sources`: their sources.
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

    def constant(self, name: str, significant: int) -> str:
        """A constant, with its uncertainty."""
        text = f"{self.constants[name]:.{significant}g}"
        if name in self.errors:
            text += f" ± {self.errors[name]:g}"
        if name in self.intervals:
            text += " ({:.4g} to {:.4g})".format(*self.intervals[name])
        return text


class Optimum(Data):
    """The least loss by the law alone for the FLOPs of the answer, at 6 a parameter and token."""

    flops: Figure
    parameters: Figure
    tokens: Figure
    loss: Figure


class Flat(Data):
    """The range of sizes near the best one: those that were searched on the same devices."""

    within: str
    low: int
    high: int

    def in_words(self) -> str:
        if self.low == self.high:
            return f"no other candidate is within {self.within}"
        low, high = rounded(count(self.low)), rounded(count(self.high))
        return f"{low} to {high} parameters are within {self.within}"


class Sweep(Data):
    """The answer's size on one machine.

    Attributes:
      fits_from: the fewest devices that were searched and hold it (and, if `in_time`, end by the deadline).
      pays_to: the most for which a token costs at most `PAYS` times the least; None: all that were searched.
      searched_to: the most that were searched.
      in_time: whether the question has a deadline.
    """

    hardware: str
    fits_from: int
    pays_to: int | None
    searched_to: int
    in_time: bool = False

    def in_words(self) -> str:
        least = f"near the least up to {self.searched_to:,} devices, the most that were searched"
        pays = f"cost per token stays {least}"
        if self.pays_to is not None:
            pays = f"above {self.pays_to:,} devices a token costs over {PAYS - 1:.0%} more than the least"
        able = "fits and meets the deadline," if self.in_time else "fits"
        return f"{able} from {plural(self.fits_from, 'device')} among the numbers searched; {pays}"


class Accuracy(Data):
    """The accuracy of the times of a piece of hardware.

    Attributes:
      words: their origin.
      steps: published steps that were compared with predictions.
      mean: their error, as a share of the published time, on average; None: no step was compared.
    """

    hardware: str
    words: str
    steps: int = 0
    mean: Figure = None

    def in_short(self) -> str:
        return "not compared" if self.mean is None else f"±{share_text(self.mean, 1)}"


class Course(Data):
    """The loss of one size during training: FLOPs and loss, in order."""

    parameters: Figure
    points: list[tuple[float, float]]


class SizeResult(CommandResult):
    """`size`.

    Attributes:
      accuracy: how sure the times of each hardware of the candidates are.
      unsearched: hardware, or numbers of it that were asked for, that there was no time for.
      scaled: hyperparameters in which sizes differ, with their powers of a common factor.
      courses: of some of the sizes that were searched; `least`: the least loss by the law at some FLOPs.
    """

    command = "size"
    model: str
    question: dict[str, Any]
    law: LawInfo
    best: SizedCandidate
    candidates: list[SizedCandidate]
    scaled: dict[str, float] = Field(default_factory=dict)
    beaten: list[Beaten] = Field(default_factory=list)
    unfit: list[Unfit] = Field(default_factory=list)
    unsearched: list[str] = Field(default_factory=list)
    optimum: Optimum | None = None
    flat: Flat | None = None
    sweeps: list[Sweep] = Field(default_factory=list)
    critical_batch_tokens: Figure = None
    least: list[tuple[float, float]] = Field(default_factory=list)
    courses: list[Course] = Field(default_factory=list)
    accuracy: list[Accuracy] = Field(default_factory=list)
    notes: Names = Field(default_factory=list)

    def accuracy_of(self, hardware: str) -> Accuracy:
        """The accuracy of the times of a piece of hardware."""
        unknown = Accuracy(hardware=hardware, words="not examined")
        return next((each for each in self.accuracy if each.hardware == hardware), unknown)

    def family(self) -> str:
        """The hyperparameters in which its sizes differ, in words; '' for one size."""
        known = {each.parameters for each in self.candidates} | {each.parameters for each in self.beaten}
        if len(known) < 2:
            return ""
        powers = ("" if power == 1 else f"^{power:g}" for power in self.scaled.values())
        return ", ".join(f"{name}{power}" for name, power in zip(self.scaled, powers, strict=True))

    def asked(self) -> str:
        """The question in words."""
        said = [text.format(self.question[name]) for name, text in GOALS.items() if name in self.question]
        if "devices" in self.question:
            said.append(f"{', '.join(f'{n:,}' for n in self.question['devices'])} devices")
        return ", ".join(said)
