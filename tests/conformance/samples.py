"""The one table of sample inputs, which every conformance test reads."""

from __future__ import annotations

from tests.conformance import (
    samples_attention,
    samples_contract,
    samples_dynamic,
    samples_elementwise,
    samples_move,
    samples_order,
    samples_spatial,
)
from tests.conformance.helper import Sample

SAMPLES: tuple[Sample, ...] = (
    *samples_elementwise.SAMPLES,
    *samples_contract.SAMPLES,
    *samples_move.SAMPLES,
    *samples_order.SAMPLES,
    *samples_spatial.SAMPLES,
    *samples_dynamic.SAMPLES,
    *samples_attention.SAMPLES,
)
