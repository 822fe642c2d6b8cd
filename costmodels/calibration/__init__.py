"""Calibration: measures this machine's mesh with small programs and fits the profile for predictions, or fits
a TPU's profile to its compiler's estimates.

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
from costmodels.calibration.profile import calibrate
from costmodels.calibration.residuals import Drift, open_drift
from costmodels.calibration.runner import Team, assemble
from costmodels.calibration.tpu import TpuCalibration, calibrate_tpu
