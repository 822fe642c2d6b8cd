"""Measurements in a plan: the calibration of its machine, and times of layouts on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Annotated, Any

from pydantic import BeforeValidator

from layoutopt.plan.fields import AsGiven, Data, Flag, LayoutText, Score, TextTuple


class Sample(Data):
    """One measurement of a calibration: operation, size, seconds measured and fitted.

    Attributes:
      held_out: the fit had not seen it.
    """

    what: str
    size: AsGiven = 0.0
    measured_seconds: AsGiven
    predicted_seconds: AsGiven
    held_out: Flag = False

    @property
    def residual(self) -> float:
        """Fitted over measured, minus one: positive when the fit is too slow."""
        return self.predicted_seconds / self.measured_seconds - 1.0


class Fitted(Data):
    """A fitted number: a number with its unit, or text."""

    name: str
    value: Any
    unit: str = ""


def _listed(found: Any) -> Any:
    if not isinstance(found, Mapping):
        return found
    return [{"name": name, "value": value} for name, value in found.items()]


class CalibrationEvidence(Data):
    """The measurements that a hardware profile was fitted to.

    Attributes:
      fit: the fitted numbers; an object 'name: value' will do.
      notes: machine, date and load of the measurements.
      of: name of a sample, in the singular.
    """

    of: str = "measurement"
    measurements: tuple[Sample, ...] = ()
    fit: Annotated[tuple[Fitted, ...], BeforeValidator(_listed)] = ()
    notes: TextTuple = ()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Measurements that took any time."""
        return tuple(s for s in self.measurements if s.measured_seconds > 0)


def typical(samples: Iterable[Sample]) -> float | None:
    """Median of the absolute residuals; None without any."""
    errors = [abs(s.residual) for s in samples]
    return median(errors) if errors else None


def typical_of(found: CalibrationEvidence, held_out: bool) -> float | None:
    """Typical errors, separately for measurements inside and outside the fit."""
    return typical(s for s in found.samples if s.held_out == held_out)


class MeasuredLayout(Data):
    """One layout, predicted and measured."""

    layout: LayoutText = ""
    predicted_seconds: AsGiven
    measured_seconds: AsGiven
    name: str = ""
    spread: Score = None


class Noise(Data):
    """The disturbances of the measurements.

    Attributes:
      drift: seconds that the calibration's reference takes now, relative to then; None: it has none.
    """

    noisy: Flag = False
    foreign: Score = None
    spread: Score = None
    words: str = ""
    drift: Score = None


class Validation(Data):
    """Predicted and measured times (`validate --json`); with too few layouts there are no summary numbers.

    Attributes:
      mape: the mean error of a predicted time, as a share of the measured one.
      regret: measured time of the layout that is predicted fastest, over the best one, less one.
    """

    rows: tuple[MeasuredLayout, ...] = ()
    mape: Score = None
    kendall_tau: Score = None
    spearman: Score = None
    regret: Score = None
    noise: Noise = Noise()
    notes: TextTuple = ()

    @property
    def timed(self) -> tuple[MeasuredLayout, ...]:
        """Rows that took any time."""
        return tuple(r for r in self.rows if r.measured_seconds > 0 and r.predicted_seconds > 0)
