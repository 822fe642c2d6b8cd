"""What stands behind a plan's numbers: measurements, a calibration, uncertain hardware, a second proof."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Measured:
    """One layout, predicted and measured."""

    layout: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Validation:
    """Predictions beside measurements; the summary numbers are absent when too few layouts were measured.

    Attributes:
      noise: what disturbed the measurements, in words.
    """

    rows: tuple[Measured, ...]
    mape: float | None = None
    kendall: float | None = None
    spearman: float | None = None
    regret: float | None = None
    noise: str = ""


@dataclass(frozen=True)
class Sample:
    """One measurement of a calibration: what was run, how big it was, the seconds measured and fitted.

    Attributes:
      held_out: the fit had not seen it.
    """

    what: str
    size: float
    measured: float
    fitted: float
    held_out: bool = False

    @property
    def residual(self) -> float:
        """Fitted over measured, minus one: positive when the fit is too slow."""
        return self.fitted / self.measured - 1.0


@dataclass(frozen=True)
class Calibration:
    """What a hardware profile was fitted to, and the fitted numbers as (name, value in words).

    Attributes:
      notes: on what machine, when, how quiet it was.
      noun: what a sample is, in the singular.
    """

    samples: tuple[Sample, ...]
    fit: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    noun: str = "measurement"

    def typical(self, held_out: bool) -> float | None:
        """Median of the absolute residuals of what the fit saw, or of what it did not; None without any."""
        errors = [abs(s.residual) for s in self.samples if s.held_out == held_out]
        return median(errors) if errors else None


@dataclass(frozen=True)
class Robustness:
    """The answer against its rivals on machines drawn within the uncertainties of the hardware's numbers.

    Attributes:
      wins: how many of the `draws` machines the answer is the fastest on.
      worst: most time that it takes there, over the fastest, less one.
      rival: the layout that wins most of the others.
      uncertain: numbers that have an uncertainty; without any nothing was drawn.
    """

    draws: int
    wins: int
    worst: float
    rival: str
    uncertain: int

    @property
    def close(self) -> bool:
        """Another layout may well be the faster one."""
        return self.draws > 0 and self.wins < 0.8 * self.draws


@dataclass(frozen=True)
class Proof:
    """A second look at the proof, without a solver: what was found, in words."""

    verified: bool
    refuted: bool
    words: str
