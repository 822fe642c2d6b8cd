"""The price that constants are fitted with is the product's, whatever the constants are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import layoutopt
from costmodels import load_hardware
from costmodels.step_fit import (
    EFFICIENCY,
    HIDDEN,
    INTERVAL,
    SUSTAINED,
    TENSOR,
    FittedConstant,
    StepFit,
    StepSums,
    constants_of,
)
from examples import deepseek_lm, transformer_lm
from layoutopt.api.learning import WIDTHS, Learned
from layoutopt.plan.layout_results import LearnedConstant

MOVED = {SUSTAINED: 0.5, EFFICIENCY: 0.4, INTERVAL: 6e-5, HIDDEN: 0.85, TENSOR: 0.9}
DENSE, MIXTURE = "dense", "mixture"
PLAIN: dict[str, Any] = {}
STAGED = {"schedule": "1f1b", "microbatches": 4}
KINDS = [
    (DENSE, "data:2;model:2", "batch:data;heads:model;d_ff:model;vocab:model", PLAIN),
    (DENSE, "data:2;pipe:2", "batch:data;layers:pipe", STAGED),
    (DENSE, "data:4", "batch:data", {"storage": "zero3", "recompute": "layers"}),
    (MIXTURE, "data:4", "batch:data;experts:data", PLAIN),
    (MIXTURE, "data:2;pipe:2", "batch:data;experts:data;layers:pipe", STAGED),
]
MACHINES = [
    ("h100", "torch"),
    ("h100", "megatron"),
    ("mi300x", "torchtitan"),
    ("tpu-v5p", "maxtext"),
]


def built(kind: str) -> Any:
    if kind == DENSE:
        return transformer_lm.model(batch=16, layers=4, length=256, d_model=512, d_ff=2048)
    return deepseek_lm.model(layers=3, batch=16, length=256, experts=8)


@pytest.mark.parametrize(("hardware", "framework"), MACHINES)
@pytest.mark.parametrize(("kind", "mesh", "layout", "said"), KINDS)
@pytest.mark.one_in(3)
def test_a_fit_prices_as_the_product_does(
    kind: str, mesh: str, layout: str, said: dict[str, Any], hardware: str, framework: str, tmp_path: Path
) -> None:
    machine = load_hardware(hardware, framework)
    ships, file = constants_of(machine), tmp_path / "moved.json"
    names = [n for n in WIDTHS if n != INTERVAL or machine.chip.launch_interval is not None]
    moved = tuple(LearnedConstant(name=n, before=ships[n], after=MOVED[n], interval=(0, 1)) for n in names)
    Learned(machine, moved, (0.3,), (0.1,), (kind,)).save(file)
    asked = built(kind), mesh, layout, hardware
    found = layoutopt.cost(*asked, framework=framework, **said)
    after = layoutopt.cost(*asked, framework=str(file), **said).predicted.step_seconds
    of = found.evaluation
    sums = StepSums(of.prices, ((x.times, x.item) for x in of.cost.lines), 1.0, "chip")
    fit = StepFit([FittedConstant(("chip",), n, ships[n], 1.0) for n in names], [sums])
    assert fit.predicted([MOVED[n] for n in names]) == pytest.approx([after], rel=1e-6)
    fit.used = []
    assert fit.predicted([]) == pytest.approx([found.predicted.step_seconds], rel=1e-9)
