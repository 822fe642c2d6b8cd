"""What a mixture's price depends on: the load of the fullest device, not the length of the texts."""

from __future__ import annotations

from functools import cache

import pytest

import layoutopt
from examples import moe_lm

SIZES = {"layers": 2, "d_model": 1024, "d_kv": 64, "heads": 16, "d_ff": 2048, "vocab": 256, "experts": 16}


@cache
def cost(
    layout: str, batch: int = 64, length: int = 2048, imbalance: float = 1.0
) -> tuple[float, float, float]:
    """Seconds of the experts and of the whole step, and bytes at the peak."""
    model = moe_lm.model(**SIZES, batch=batch, length=length, imbalance=imbalance, dtype="bfloat16")
    found = layoutopt.cost(model, "data:8", layout, "h100")
    lines = [line for line in found.evaluation.cost.lines if "experts" in line.origin.scope]
    own = sum(line.seconds * line.times for line in lines)
    return own, found.predicted.step_seconds, found.predicted.peak_memory_bytes


@pytest.mark.parametrize("layout", ["batch:data;expert_batch:data", "batch:data;experts:data"])
def test_the_same_tokens_cost_the_experts_the_same_at_every_length(layout: str) -> None:
    short, long = cost(layout), cost(layout, batch=16, length=8192)
    assert long[0] == pytest.approx(short[0], rel=0.02)
    assert long[2] == pytest.approx(short[2], rel=0.1)


def test_the_fullest_device_decides_where_devices_share_the_experts() -> None:
    shared, alone = "batch:data;experts:data", "batch:data;expert_batch:data"
    even, full = cost(shared), cost(shared, imbalance=1.5)
    assert 1.15 * even[0] < full[0] < 1.5 * even[0] and full[2] > even[2]
    assert cost(alone) == cost(alone, imbalance=1.5)
