"""Calibration: measures this machine's mesh with little programs, and fits the profile that its programs are
priced by; or fits that of a TPU to what its compiler estimates.

The only part of the cost models that opens an engine.
"""

from costmodels.calibration.clock import (
    ClockNoise,
    TimingSample,
    noise,
    repeats_spread,
    sample,
    steps_for,
    typical,
)
from costmodels.calibration.drift import Drift, open_drift
from costmodels.calibration.live import calibrate
from costmodels.calibration.team import Team, assemble
from costmodels.calibration.tpu import TpuCalibration, calibrate_tpu

__all__ = [
    "ClockNoise",
    "Drift",
    "Team",
    "TimingSample",
    "TpuCalibration",
    "assemble",
    "calibrate",
    "calibrate_tpu",
    "noise",
    "open_drift",
    "repeats_spread",
    "sample",
    "steps_for",
    "typical",
]
