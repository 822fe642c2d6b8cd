"""Unrolled layers are imported as the loop that they are: the same numbers, the same proven answer as of a
scan, and a plan's recompute in the function as it is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.jax.jax_plan import saved_values
from mesh_tf_core.lower.remat_policy import Recomputed
from tests.importers.jax_models import compared, numbers
from tests.importers.jax_plans import plan_of
from tests.marks import by_day

LAYERS, MODEL, HIDDEN, BATCH = 3, 8, 12, 4

Params = Any
Layer = Callable[..., Any]


def blocks(count: int = LAYERS) -> list[dict[str, Any]]:
    f = numbers()
    return [{"scale": 1 + f(MODEL), "up": f(MODEL, HIDDEN), "down": f(HIDDEN, MODEL)} for _ in range(count)]


def block(h: Any, p: Params, *more: Any) -> Any:
    x = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * p["scale"]
    return h + jnp.tanh(x @ p["up"]) @ p["down"]


def batch(*shape: int) -> dict[str, Any]:
    return {"x": numbers(1)(*(shape or (BATCH, MODEL)))}


def unrolled(params: Params, batch: Any, layer: Layer = block) -> Any:
    h = batch["x"]
    for p in params["blocks"]:
        h = layer(h, p)
    return (h**2).mean()


def scanned(params: Params, batch: Any, layer: Layer = block) -> Any:
    h, _ = jax.lax.scan(lambda h, p: (layer(h, p), None), batch["x"], params["blocks"])
    return (h**2).mean()


def stacked(layers: list[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def loops(model: Any) -> list[int]:
    return [node.op.dim.size for node in model.graph.nodes if node.body is not None]


# -- functions that are loops --------------------------------------------------------------------------------


def narrow(params: Params, batch: Any) -> Any:
    """Parameters in another element type from the beginning."""
    return unrolled(jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params), batch)


def indexed(params: Params, batch: Any) -> Any:
    """A loop over elements of stacked parameters."""
    h = batch["x"]
    for i in range(LAYERS):
        h = block(h, {k: w[i] for k, w in params["blocks"].items()})
    return (h**2).mean()


def penalized(params: Params, batch: Any) -> Any:
    """A penalty on all weights, and every layer's output beside the last."""
    h, outs = batch["x"], []
    for p in params["blocks"]:
        h = block(h, p)
        outs.append(h.mean())
    penalty = sum(jnp.sum(w * w) for w in jax.tree.leaves(params))
    return (h**2).mean() + 0.1 * penalty + sum(outs)


def first_differs(params: Params, batch: Any) -> Any:
    """Layers of which the first makes what all share."""
    h, shared = batch["x"], None
    for p in params["blocks"]:
        if shared is None:
            shared = jnp.sin(h).sum()
        h = block(h, p) * jnp.cos(shared)
    return (h**2).mean()


def two_stacks(params: Params, batch: Any) -> Any:
    h = batch["x"]
    for p in params["encoder"]:
        h = block(h, p)
    middle = h
    for p in params["decoder"]:
        h = block(h, p) + middle
    return (h**2).mean()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def clipped(limit: float, x: Any) -> Any:
    return x


clipped.defvjp(lambda limit, x: (x, None), lambda limit, _, g: (jnp.clip(g, -limit, limit),))


def with_clipped_gradients(params: Params, batch: Any) -> Any:
    """Layers whose gradients their author clips, so far that all of them are."""
    return unrolled(params, batch, lambda h, p: clipped(1e-3, block(clipped(2e-3, h), p)))


def scanned_with_clipped_gradients(params: Params, batch: Any) -> Any:
    return scanned(params, batch, lambda h, p: clipped(1e-3, block(clipped(2e-3, h), p)))


@pytest.mark.parametrize("new", [jax.random.key, jax.random.PRNGKey])
def test_layers_that_take_one_of_several_keys_are_imported(new: Callable[[int], Any]) -> None:
    def loss(params: Params, batch: Any, key: Any) -> Any:
        h, keys = batch["x"], jax.random.split(key, len(params["blocks"]))
        for p, own in zip(params["blocks"], keys, strict=True):
            one, two = jax.random.split(own)
            h = jnp.where(jax.random.bernoulli(one, 0.9, h.shape), block(h, p), h)
            h = jnp.where(jax.random.bernoulli(two, 0.9, h.shape), h, 0)
        return (h**2).mean()

    model = layoutopt.from_jax(loss, {"blocks": blocks()}, batch(), rng=new(0))
    assert loops(model)


@pytest.mark.parametrize("new", [jax.random.key, jax.random.PRNGKey])
def test_layers_that_split_the_key_they_are_handed_are_imported(new: Callable[[int], Any]) -> None:
    def loss(params: Params, batch: Any, key: Any) -> Any:
        h = batch["x"]
        for p in params["blocks"]:
            key, one, two = jax.random.split(key, 3)
            h = jnp.where(jax.random.bernoulli(one, 0.9, h.shape), block(h, p), h)
            h = jnp.where(jax.random.bernoulli(two, 0.9, h.shape), h, 0)
        return (h**2).mean()

    model = layoutopt.from_jax(loss, {"blocks": blocks()}, batch(), rng=new(0))
    assert loops(model)[:1] == [LAYERS]


F = numbers()
FUNCTIONS: dict[str, tuple[Callable[..., Any], Params, list[int]]] = {
    "plain": (unrolled, {"blocks": blocks()}, [3]),
    "narrow": (narrow, {"blocks": blocks()}, [3]),
    "indexed": (indexed, {"blocks": stacked(blocks())}, [3]),
    "penalized": (penalized, {"blocks": blocks()}, [3, 3]),
    "first differs": (first_differs, {"blocks": blocks(4)}, [4]),
    "clipped": (with_clipped_gradients, {"blocks": blocks()}, [3]),
    "clipped in a scan": (scanned_with_clipped_gradients, {"blocks": stacked(blocks())}, [3]),
    "two stacks": (two_stacks, {"encoder": blocks(2), "decoder": blocks(3)}, [2, 3]),
}


@pytest.mark.parametrize("name", by_day(FUNCTIONS))
@pytest.mark.one_in(2)
def test_layers_are_a_loop_that_computes_what_the_function_does(name: str) -> None:
    loss, params, found = FUNCTIONS[name]
    model = layoutopt.from_jax(loss, params, batch())
    assert loops(model)[: len(found)] == found
    off = compared(model, loss, (params, batch()), [("data:2", "batch:data")])
    assert {path: by for path, by in off.items() if not by <= 1e-5} == {}


def test_parameters_of_layers_are_one_variable_and_stay_arrays_of_their_own() -> None:
    model = layoutopt.from_jax(unrolled, {"blocks": blocks()}, batch())
    assert model.graph.variables["blocks/0-2/up"].shape.names[0] == "layers"
    array = model.origin.parameters["blocks/1/up"]
    assert (array.variable, array.layer, array.shape) == ("blocks/0-2/up", 1, (MODEL, HIDDEN))
    named = layoutopt.from_jax(
        unrolled, {"blocks": blocks()}, batch(), names={"blocks/1/up": ("embed", "mlp")}
    )
    assert str(named.origin.parameters["blocks/2/down"]) == "blocks/2/down [mlp embed]"


def test_state_of_layers_is_stored_as_one() -> None:
    def loss(params: Params, state: Any, batch: Any) -> Any:
        h, new = batch["x"], []
        for p, s in zip(params["blocks"], state, strict=True):
            h = block(h, p)
            new.append({"mean": 0.9 * s["mean"] + 0.1 * h.mean(0)})
            h = h - jax.lax.stop_gradient(s["mean"])
        return (h**2).mean(), new

    state = [{"mean": F(MODEL)} for _ in range(LAYERS)]
    params = {"blocks": blocks()}
    model = layoutopt.from_jax(loss, params, batch(), state=state)
    assert loops(model)[0] == LAYERS
    assert [n.op.variable.name for n in model.graph.nodes if n.op.name == "assign"] == ["state/0-2/mean"]
    assert max(compared(model, loss, (params, state, batch()), []).values()) <= 1e-5
    trainer = mtf.Trainer(model, mtf.Mesh("data:1"), mtf.Layout(""), engine="lockstep")
    trainer.step({k: np.asarray(v) for k, v in batch().items()})
    wanted = loss(params, state, batch())[1]
    found = trainer.engine.read("state/0-2/mean")
    assert np.allclose(found, [np.asarray(s["mean"]) for s in wanted], rtol=1e-5)


def dropped(h: Any, p: Params, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), block(h, p) / 0.5, 0.0)


def a_key_for_each_layer(params: Params, batch: Any, key: Any) -> Any:
    h = batch["x"]
    for i, p in enumerate(params["blocks"]):
        h = dropped(h, p, jax.random.fold_in(key, i))
    return (h**2).mean()


def keys_for_each_example(params: Params, batch: Any, key: Any) -> Any:
    def one(h: Any, key: Any) -> Any:
        for p, own in zip(params["blocks"], jax.random.split(key, LAYERS), strict=True):
            h = dropped(h, p, own)
        return h

    return (jax.vmap(one)(batch["x"], jax.random.split(key, BATCH)) ** 2).mean()


@pytest.mark.parametrize("loss", [a_key_for_each_layer, keys_for_each_example])
def test_draws_of_layers_are_one_draw_of_the_loop(loss: Callable[..., Any]) -> None:
    model = layoutopt.from_jax(loss, {"blocks": blocks()}, batch(), rng=jax.random.PRNGKey(0))
    assert loops(model)[0] == LAYERS
    assert sum(node.op.name == "dropout" for node, _ in model.graph.walk()) == 1


def test_layers_that_index_their_own_parameters_are_a_loop() -> None:
    """A causal convolution by shifts reads row i of each layer's own kernel."""

    def loss(params, batch):
        h = batch["x"]
        for p in params["layers"]:
            taps = [jnp.pad(h, ((0, 0), (i, 0), (0, 0)))[:, :6] * p["kernel"][i] for i in range(3)]
            h = h + jnp.tanh(sum(taps) @ p["up"]) @ p["down"]
        return (h**2).mean()

    f = numbers()
    layers = [{"kernel": f(3, 4), "up": f(4, 8), "down": f(8, 4)} for _ in range(4)]
    given = {"layers": layers}, {"x": f(2, 6, 4)}
    model = layoutopt.from_jax(loss, *given)
    assert [n.op.dim.size for n in model.graph.nodes if n.body is not None] == [4]
    assert max(compared(model, loss, given, [("m:2", "batch:m")]).values()) <= 1e-5


def test_layers_that_hand_on_other_dimensions_stay_apart() -> None:
    """As a loop, all of a perceptron's layers would be laid out alike, and none could follow another."""

    def loss(params: Params, batch: Any) -> Any:
        h = batch["x"]
        for w in params:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    params = [F(MODEL, MODEL) for _ in range(4)]
    model = layoutopt.from_jax(loss, params, batch())
    assert loops(model) == []
    assert max(compared(model, loss, (params, batch()), [("data:2", "batch:data")]).values()) <= 1e-5


# -- what a loop gives ---------------------------------------------------------------------------------------


def notes_of(layer: Callable[..., Any], count: int = 4) -> list[str]:
    """What is said of layers that are given their number and those before them."""

    def loss(params: Params, batch: Any) -> Any:
        h = batch["x"]
        for i in range(count):
            h = layer(h, params["blocks"], i)
        return (h**2).mean()

    notes = layoutopt.from_jax(loss, {"blocks": blocks(count)}, batch()).origin.notes
    return [n for n in notes if "layers" in n]


UNEQUAL: dict[str, tuple[Callable[..., Any], str]] = {
    "another number": (
        lambda h, p, i: block(h, p[i]) * (1 + i),
        r"\(mul\), where blocks/1 has other constants or shapes",
    ),
    "another operation": (
        lambda h, p, i: block(h, p[i]) + (jnp.cos, jnp.sin, jnp.tanh, jnp.exp)[i](h),
        r"\(cos\), where blocks/1 has .*test_reroll.py:\d+ \(sin\)",
    ),
    "a parameter of another layer": (
        lambda h, p, i: block(h, {**p[i], "scale": p[i * i % 3]["scale"]}),
        r"\(broadcast_in_dim\) reads values that are not available in every layer",
    ),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_the_line_that_keeps_layers_apart_is_said(case: str) -> None:
    layer, why = UNEQUAL[case]
    (said,) = notes_of(layer)
    line = (
        r"4 similar layers \(blocks/0 to blocks/3\) did not become one loop, .* differ: .*test_reroll.py:\d+ "
    )
    assert re.match(line + why, said), said


@pytest.mark.parametrize(
    "layer",
    [
        lambda h, p, i: block(h, p[i]),
        lambda h, p, i: h + sum(jnp.tanh(h @ x["up"]) @ x["down"] for x in p[i : i + 1]) * (i < 2),
    ],
)
def test_nothing_is_said_of_layers_that_are_a_loop(layer: Callable[..., Any]) -> None:
    assert notes_of(layer, 2) == []
    assert notes_of(lambda h, p, i: block(h, p[i]) if i else h) == []


def test_the_proven_answer_is_that_of_the_scan() -> None:
    asked = {"mesh": "data:2", "hardware": "tpu-v5e", "microbatches": [1]}
    layers = blocks()
    plans = [
        layoutopt.search(layoutopt.from_jax(loss, {"blocks": own}, batch(64, MODEL), name="m"), **asked)
        for loss, own in ((unrolled, layers), (scanned, stacked(layers)))
    ]
    assert [p.solver.status for p in plans] == ["OPTIMAL"] * 2
    assert plans[0].solver.objective == pytest.approx(plans[1].solver.objective, rel=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("again", [False, True])
def test_a_plan_recomputes_layers_as_they_are_written(again: bool) -> None:
    params = jax.tree.map(lambda w: w, {"blocks": blocks()})
    model = layoutopt.from_jax(unrolled, params, batch())
    plan = plan_of(model, "data:1", "", recompute=["layers"] if again else [])
    applied = jax.value_and_grad(plan.jax.apply(unrolled))
    checkpoints = str(jax.make_jaxpr(applied)(params, batch())).count("prevent_cse")
    assert checkpoints == (LAYERS if again else 0)
    if not again:
        return
    wanted = jax.value_and_grad(unrolled)(params, batch())
    for x, y in zip(jax.tree.leaves(jax.jit(applied)(params, batch())), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(x, y, rtol=1e-5, atol=1e-7)


def products_of(text: Any) -> int:
    """How many products a traced function has, in loops and checkpoints too."""
    return str(text).count("dot_general[")


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_what_a_plan_keeps_is_saved(loss: Callable[..., Any]) -> None:
    def layer(h: Any, p: Params, *more: Any) -> Any:
        return h + jnp.tanh(checkpoint_name(h * p["scale"] @ p["up"], "wide")) @ p["down"]

    def named(params: Params, batch: Any) -> Any:
        return loss(params, batch, layer)

    params = {"blocks": blocks() if loss is unrolled else stacked(blocks())}
    model = layoutopt.from_jax(named, params, batch())
    wanted = jax.value_and_grad(named)(params, batch())
    made = {}
    for text in ("layers", "layers:keep=products", "layers:keep=wide"):
        applied = jax.value_and_grad(plan_of(model, "data:1", "", recompute=[text]).jax.apply(named))
        made[text] = products_of(jax.make_jaxpr(applied)(params, batch()))
        found = jax.tree.leaves(jax.jit(applied)(params, batch()))
        for x, y in zip(found, jax.tree.leaves(wanted), strict=True):
            assert np.allclose(x, y, rtol=1e-5, atol=1e-7)
    # Of each layer the widening product alone is read again.
    each = LAYERS if loss is unrolled else 1
    assert made["layers"] - made["layers:keep=products"] == each
    assert made["layers:keep=wide"] == made["layers:keep=products"]


def test_a_compiled_step_holds_what_is_kept_and_no_more() -> None:
    f = numbers()
    layers = [{"scale": 1 + f(16), "up": f(16, 128), "down": f(128, 16)} for _ in range(4)]
    given = {"blocks": stacked(layers)}, batch(64, 16)
    model, held = layoutopt.from_jax(scanned, *given), {}
    for text in ("layers", "layers:keep=products", ""):
        plan = plan_of(model, "data:1", "", recompute=[text] if text else [])
        step = jax.jit(jax.value_and_grad(plan.jax.apply(scanned))).lower(*given).compile()
        held[text] = step.memory_analysis().temp_size_in_bytes
    # The widening product alone is read again: four layers of 64 x 128 float32 numbers.
    more = held["layers:keep=products"] - held["layers"]
    assert more == pytest.approx(4 * 64 * 128 * 4, rel=0.05)
    assert held["layers:keep=products"] < held[""]


def test_what_has_no_value_in_the_function_is_refused() -> None:
    model = layoutopt.from_jax(scanned, {"blocks": stacked(blocks())}, batch())
    assert model.origin is not None
    nameless = replace(model.origin, tensors={})
    kept = frozenset({Recomputed("layers", ("products",))})
    assert saved_values(model.step_graph, model.origin, kept)
    with pytest.raises(
        mtf.UserError, match=r"keeps products of the loop over layers, but .*einsum computes a value that"
    ):
        saved_values(model.step_graph, nameless, kept)


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_a_functions_own_checkpoints_are_known(loss: Callable[..., Any]) -> None:
    params = {"blocks": blocks() if loss is unrolled else stacked(blocks())}
    for layer, found in ((block, set()), (jax.checkpoint(block), {"layers"})):

        def own(params: Params, batch: Any, layer: Layer = layer) -> Any:
            return loss(params, batch, layer)

        assert layoutopt.from_jax(own, params, batch()).origin.recomputed == found


def test_a_checkpoint_that_saves_a_part_is_named() -> None:
    policy = jax.checkpoint_policies.dots_saveable

    def loss(params: Params, batch: Any) -> Any:
        return unrolled(params, batch, jax.checkpoint(block, policy=policy))

    origin = layoutopt.from_jax(loss, {"blocks": blocks()}, batch()).origin
    assert not origin.recomputed
    assert any(re.search(r"checkpoint with the policy dots_?saveable", n.lower()) for n in origin.notes)
