"""Random layouts with stages, under every schedule that one program does: the numbers of one device in
float64, and the bytes that the program says, sent and held."""

from __future__ import annotations

import random
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import KINDS, SCHEDULES, alternates, kind_name
from tests.core.test_one_forward_one_backward import POLICIES
from tests.core.test_pipelines import model, options, same, steps

LAYERS = mtf.Dim("layers", 8)
FEW, MANY = 2, 200
"""Layouts of each schedule by day and by night."""
SEEDS = [*range(FEW), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(FEW, MANY))]


@pytest.fixture(scope="module", params=SCHEDULES)
def asked(request: pytest.FixtureRequest) -> tuple[str, mtf.Model, Any]:
    """A schedule, a model and the numbers of one device."""
    # The schedules that go backward at once cannot square a sum over the whole batch.
    built = model(linear=alternates(request.param), layers=LAYERS)
    return request.param, built, steps(built.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_and_bytes(seed: int, asked: tuple[str, mtf.Model, Any]) -> None:
    schedule, built, dense = asked
    rng, program = random.Random(f"{schedule} {seed}"), None
    while program is None:
        program = drawn(rng, built, schedule)
    *found, engine = steps(program)
    same(found, dense)
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.variable_bytes == sum(s.value.local_bytes(program.mesh) for s in program.variables.values())
    assert engine.peak_memory_bytes == memory(program).peak


def drawn(rng: random.Random, built: mtf.Model, schedule: str) -> Program | None:
    """A layout with stages, if it is legal."""
    stages = rng.choice([2, 4])
    if KINDS[kind_name(schedule)].rounds:
        schedule = f"{kind_name(schedule)}:{rng.choice([2, 4] if stages == 2 else [2])}"
    axes = [("pipe", stages), ("a", 2), *([("b", 2)] if rng.random() < 0.5 else [])]
    rng.shuffle(axes)
    rules = {"layers": "pipe"}
    for dim in ("batch", "e", "d", "vocabulary", "length"):
        free = [name for name, _ in axes if name != "pipe" or dim == "vocabulary"]
        chosen = [name for name in free if rng.random() < 0.4]
        rules.update({dim: "+".join(chosen)} if chosen else {})
    layout, mesh = (";".join(f"{a}:{b}" for a, b in each) for each in (rules.items(), axes))
    given = {
        "microbatches": rng.choice([1, 2, 4, 8]),
        "schedule": schedule,
        "recompute": rng.choice(POLICIES),
        "storage": {name: rng.randrange(4) for name in ("wi", "wo", "table", "shared")},
    }
    try:
        return built.lower(mtf.Mesh(mesh), mtf.Layout(layout), options(given))
    except mtf.UserError:
        return None
