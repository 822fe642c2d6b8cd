"""Programs that are written and read again: equal, priced alike to the last digit, run alike; what cannot be
written or read is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.liveness import memory
from costmodels.pipeline_bubble import waiting
from costmodels.pricing.compilers import COMPILERS, compiler_of
from costmodels.pricing.pricer import price
from costmodels.repeated import repeated
from examples.transformer_lm import model as transformer
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.program import Program, text
from mesh_tf_core.ops.unary import Unary
from mesh_tf_core.written import FORMAT, program_from_json, program_to_json
from tests.core.golden import CASES
from tests.layoutopt.models import SMALL


def golden(name: str) -> Program:
    build, mesh, layout = CASES[name]
    graph, results = build()
    return mtf.lower(graph, mtf.Mesh(mesh), mtf.Layout(layout), results)


def staged() -> Program:
    """Stages, dropout, weights stored split."""
    model = transformer(**{**SMALL, "layers": 4, "dropout": 0.1, "dtype": "bfloat16"})
    storage = {v.name: "zero1" for v in model.graph.variables.values()}
    options = mtf.Options(microbatches=4, storage=storage)
    return model.lower(mtf.Mesh("pipe:2;data:2"), mtf.Layout("layers:pipe;batch:data"), options)


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{name: lambda name=name: golden(name) for name in CASES},  # type: ignore[misc]
    "staged": staged,
}


def again(program: Program) -> Program:
    """Written and read."""
    return program_from_json(json.loads(json.dumps(program_to_json(program))))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(3)
def test_what_was_written_is_priced_to_the_last_digit(name: str) -> None:
    program = PROGRAMS[name]()
    read = again(program)
    assert read == program and text(read) == text(program)
    assert program_to_json(read) == program_to_json(program)
    for compiler in COMPILERS:
        machine = replace(load_hardware("tpu-v5e"), compiler=compiler)  # type: ignore[arg-type]
        mine, its = price(program, machine), price(read, machine)
        assert its.lines == mine.lines
        made = compiler_of(machine)
        held = [memory(p, made.memory).points for p in (program, read)]
        assert held[0] == held[1]
        assert waiting(read, its) == waiting(program, mine)
    assert repeated(read) == repeated(program)


@pytest.mark.parametrize("name", ["training_step", "accumulated", "attention", "tabulated", "stopped"])
def test_what_was_written_runs_alike(name: str) -> None:
    program = golden(name)
    rng = np.random.default_rng(0)
    types = {feed: program.values[i] for feed, i in program.feeds.items()}
    batch = {feed: rng.normal(size=v.shape.sizes).astype(np.float32) for feed, v in types.items()}
    found: list[list[dict[str, Any]]] = []
    for each in (program, again(program)):
        engine = LockstepEngine(each)
        engine.initialize()
        found.append([engine.step(batch) for _ in range(2)])
    for mine, its in zip(*found, strict=True):
        assert mine.keys() == its.keys()
        for result in mine:
            np.testing.assert_array_equal(np.asarray(mine[result]), np.asarray(its[result]))


@dataclass(frozen=True)
class Ours(Unary):
    """An operation of a model's own."""


def test_an_operation_of_ones_own_is_known_where_it_was_imported() -> None:
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("d", 4)], "float32")
    program = mtf.lower(g, mtf.Mesh("a:2"), mtf.Layout("d:a"), {"y": g.apply(Ours("exp"), x)})
    content = program_to_json(program)
    assert program_from_json(content) == program
    with pytest.raises(mtf.UserError, match="the stored program uses an unknown class"):
        program_from_json(json.loads(json.dumps(content).replace("Ours", "Theirs")))


def test_what_a_function_initializes_is_refused() -> None:
    g = mtf.Graph()
    w = g.variable("w", [mtf.Dim("d", 4)], lambda rng, shape: rng.normal(size=shape))
    program = mtf.lower(g, mtf.Mesh("a:1"), mtf.Layout(), {"w": w})
    with pytest.raises(
        mtf.UserError, match=r"cannot be stored; use mtf.Normal or an array as an initializer"
    ):
        program_to_json(program)


def damaged() -> Iterator[Any]:
    """Written programs with a fault each."""
    whole = json.dumps(program_to_json(golden("residual")))
    yield from (None, [], {}, {"format": "mesh-tf-program/0"}, {"format": FORMAT})
    for old, new in (
        ('"Einsum"', '"Nothing"'),
        ('"#": 0', '"#": 99'),
        ('"shape"', '"shade"'),
        ('"mesh": "x:2;y:2"', '"mesh": 7'),
        ('"inputs"', '"input"'),
    ):
        assert old in whole
        yield json.loads(whole.replace(old, new))


@pytest.mark.parametrize("content", [*damaged()])
def test_damage_is_refused_in_one_line(content: Any) -> None:
    with pytest.raises(mtf.UserError) as refused:
        program_from_json(content)
    assert "\n" not in str(refused.value)
