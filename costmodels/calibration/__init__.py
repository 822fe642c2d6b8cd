"""Calibration: measures this machine's mesh with little programs, and fits the profile that its programs are
priced by.

The only part of the cost models that opens an engine.
"""

from costmodels.calibration.clock import Noise, Sample, noise, repeats_spread, sample, steps_for, typical
from costmodels.calibration.drift import Drift, open_drift
from costmodels.calibration.live import calibrate

__all__ = [
    "Drift",
    "Noise",
    "Sample",
    "calibrate",
    "noise",
    "open_drift",
    "repeats_spread",
    "sample",
    "steps_for",
    "typical",
]
