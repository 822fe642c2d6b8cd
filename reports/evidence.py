"""The distance of a calibration's fit from its measurements."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from layoutopt.plan.evidence import CalibrationEvidence, Sample


def typical(samples: Iterable[Sample]) -> float | None:
    """Median of the absolute residuals; None without any."""
    errors = [abs(s.residual) for s in samples]
    return median(errors) if errors else None


def typical_of(found: CalibrationEvidence, held_out: bool) -> float | None:
    """Typical errors, separately for measurements inside and outside the fit."""
    return typical(s for s in found.samples if s.held_out == held_out)
