"""Random layouts with stages, under every schedule: the numbers of one device in
float64, and the bytes that the program says, sent and held."""

from __future__ import annotations

import random
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import KINDS, NAMES, kind_name
from mesh_tf_core.lower.options import WEIGHTS
from tests.core.test_one_forward_one_backward import POLICIES
from tests.core.test_pipelines import model, options, same, steps

LAYERS = mtf.Dim("layers", 8)
VARIABLES = ("wi", "wo", "table", "shared")
FEW, MANY = 2, 200
"""Layouts of each schedule by day and by night."""
SEEDS = [*range(FEW), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(FEW, MANY))]


@pytest.fixture(scope="module", params=NAMES)
def asked(request: pytest.FixtureRequest) -> tuple[str, mtf.Model, Any]:
    """A schedule, a model and the numbers of one device."""
    built = model(layers=LAYERS)
    return request.param, built, steps(built.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(18)
def test_numbers_and_bytes(seed: int, asked: tuple[str, mtf.Model, Any]) -> None:
    schedule, built, dense = asked
    rng, program = random.Random(f"{schedule} {seed}"), None
    while program is None:
        program = drawn(rng, built, schedule, small=seed < FEW)
    *found, engine = steps(program)
    same(found, dense)
    assert engine.communication_bytes == program.communication_bytes()
    own = (s.value.local_bytes(program.mesh) for s in program.variables.values() if not s.host)
    assert engine.variable_bytes == sum(own)
    assert engine.peak_memory_bytes == memory(program).peak


def drawn(rng: random.Random, built: mtf.Model, schedule: str, small: bool) -> Program | None:
    """A layout with stages, if it is legal; `small`: on four devices."""
    stages = 2 if small else rng.choice([2, 4])
    if KINDS[kind_name(schedule)].rounds:
        schedule = f"{kind_name(schedule)}:{rng.choice([2, 4] if stages == 2 else [2])}"
    axes = [("pipe", stages), ("a", 2), *([("b", 2)] if not small and rng.random() < 0.5 else [])]
    rng.shuffle(axes)
    rules = {"layers": "pipe"}
    for dim in ("batch", "e", "d", "vocabulary", "length"):
        free = [name for name, _ in axes if name != "pipe" or dim == "vocabulary"]
        chosen = [name for name in free if rng.random() < 0.4]
        rules.update({dim: "+".join(chosen)} if chosen else {})
    layout, mesh = (";".join(f"{a}:{b}" for a, b in each) for each in (rules.items(), axes))
    given = {
        "microbatches": rng.choice([1, 2, 4, 8][: 3 if small else 4]),
        "schedule": schedule,
        "recompute": rng.choice(POLICIES),
        "storage": {name: rng.randrange(4) for name in VARIABLES},
        "offload": frozenset((WEIGHTS, name) for name in VARIABLES if rng.random() < 0.2),
    }
    try:
        return built.lower(mtf.Mesh(mesh), mtf.Layout(layout), options(given))
    except mtf.UserError:
        return None
