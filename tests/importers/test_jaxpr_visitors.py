"""Both visitors of a jaxpr meet the same equations; what differs is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from layoutopt.importers.arrays.contract import EquationBlock, Operand
from layoutopt.importers.jax.reader import traced
from layoutopt.importers.jax.replay import Ref, ReplayVisitor, interpret, retraced
from mesh_tf_core.errors import UserError
from tests.importers.jax_models import MODELS


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1.0, 1.0)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, dy: (dy,))


def calls(x: Any, key: Any) -> Any:
    """Every kind of call, one inside of another."""
    again = jax.checkpoint(lambda y: jax.nn.relu(jax.jit(jnp.tanh)(y)) * 2)
    noise = jax.random.uniform(key, x.shape)
    h, _ = jax.lax.scan(lambda c, _: (again(c), None), x + noise, None, length=3)
    return jnp.sum(jnp.logaddexp(jax.nn.softmax(clipped(h)), h))


def visited(block: EquationBlock, closed: Any, whole: Any = None) -> ReplayVisitor:
    values: dict[Ref, Operand] = {}
    visitor = ReplayVisitor(iter(block.ran), itertools.count(), values)
    interpret(visitor, closed, [next(visitor.refs) for _ in block.ins], whole)
    return visitor


def arguments() -> tuple[Any, ...]:
    return jnp.ones((4, 8)), jax.random.key(0)


def test_every_equation_is_met_in_order() -> None:
    block = traced(calls, arguments()).block
    visitor = visited(block, retraced(calls, arguments())[0])
    met = [e for step in visitor.steps for e in step.equations]
    assert len(met) == len(block.equations) and all(map(lambda a, b: a is b, met, block.equations))
    names = [step.site.name for step in visitor.steps]
    assert {"scan", "custom", "random_uniform"} <= set(names) and "jit" not in names
    assert any(step.site.own and len(step.equations) > 1 for step in visitor.steps)
    inside = {e.prim for e in block.walk()}
    assert {"tanh", "mul"} <= inside and not inside & {"jit", "checkpoint", "remat2", "custom_jvp_call"}


def test_what_a_checkpoint_computes_is_marked() -> None:
    block = traced(calls, arguments()).block
    (loop,) = (e for e in block.equations if e.prim == "scan")
    assert loop.body is not None and all(e.recomputed for e in loop.body.equations)
    assert not any(e.recomputed for e in block.equations)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_met_as_they_were_imported(name: str) -> None:
    loss, given = MODELS[name][:2]
    args = given()
    block = traced(loss, args).block
    assert next(visited(block, retraced(loss, args)[0]).rest, None) is None


def test_another_function_is_refused() -> None:
    block = traced(calls, arguments()).block
    with pytest.raises(UserError, match=r"not the one that from_jax imported: .* has sin"):
        visited(block, retraced(lambda x, key: calls(jnp.sin(x), key), arguments())[0])
    closed = retraced(calls, arguments())[0]
    with pytest.raises(UserError, match="part of a batch differ from those for the whole batch"):
        visited(block, closed, retraced(lambda x, key: calls(jnp.sin(x), key), arguments())[0])


def test_numbers_are_those_of_the_whole_batch() -> None:
    def mean(x: Any) -> Any:
        return jnp.mean(x)

    part, whole = jnp.ones((2, 8)), jnp.ones((4, 8))
    visitor = visited(traced(mean, (whole,)).block, retraced(mean, (part,))[0], retraced(mean, (whole,))[0])
    assert [x.value for s in visitor.steps for x in s.ins if hasattr(x, "value")] == [32.0]
