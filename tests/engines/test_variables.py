"""Variables of the engines of this process: what is written is read, what cannot be is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mesh_tf_core.engines import open_engine
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from tests.engines.programs import language_model, network, tokens

KINDS = ("lockstep", "local")


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Any:
    return open_engine(language_model("a:2;b:2", "vocab:b+a;d_ff:b;heads:a"), request.param)


def test_what_is_written_is_read(engine: Any) -> None:
    for name, stored in engine.program.variables.items():
        array = np.arange(stored.variable.shape.size).reshape(stored.variable.shape.sizes)
        engine.write(name, array)
        np.testing.assert_array_equal(engine.read(name), array)
        assert engine.read(name).dtype == np.dtype(stored.variable.dtype)


def test_others_begin_with_their_initial_values(engine: Any) -> None:
    """Writing one variable before the first step leaves the others as they begin."""
    program = engine.program
    other = open_engine(program, "lockstep")
    other.initialize()
    first, *rest = program.variables
    engine.write(first, other.read(first))
    for name in rest:
        np.testing.assert_array_equal(engine.read(name), other.read(name))
    assert engine.step(tokens(program))["loss"] == pytest.approx(
        other.step(tokens(program))["loss"], rel=1e-5
    )


def test_what_cannot_be_is_refused(engine: Any) -> None:
    name = next(iter(engine.program.variables))
    with pytest.raises(UserError, match="there is no variable 'nothing'"):
        engine.read("nothing")
    with pytest.raises(UserError, match="there is no variable 'nothing'"):
        engine.write("nothing", np.zeros(1))
    with pytest.raises(UserError, match="give an array of the variable's shape"):
        engine.write(name, np.zeros((1, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_stays_what_it_was(kind: str) -> None:
    program = network().lower(Mesh("a:2"), Layout("batch:a"))
    engine = open_engine(program, kind)
    kept = engine.snapshot()
    before = {name: engine.read(name) for name in program.variables}
    rng = np.random.default_rng(0)
    engine.step({name: rng.normal(size=(8, 4)).astype(np.float32) for name in program.feeds})
    for piece, array in kept.items():
        np.testing.assert_array_equal(before[piece.name], array)
    assert any(not np.array_equal(engine.read(name), array) for name, array in before.items())
