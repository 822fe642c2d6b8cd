"""Mixtures of experts as JAX's users write them: sorted rows that are products at the experts, and their
numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels import load_hardware
from costmodels.pricing.pricer import price
from mesh_tf_core import layers as nn
from mesh_tf_core.engines.lockstep import LockstepEngine

EXPERTS, CHOICES, D, INNER = 4, 2, 8, 12
Arrays = dict[str, Any]


def shapes(d: int, inner: int) -> dict[str, tuple[int, ...]]:
    into = (EXPERTS, d, inner)
    return {"router": (d, EXPERTS), "wi": into, "wg": into, "wo": (EXPERTS, inner, d)}


def parameters() -> Arrays:
    rng = np.random.default_rng(0)
    return {n: rng.normal(scale=0.5, size=s).astype(np.float32) for n, s in shapes(D, INNER).items()}


def routed(p: Arrays, x: Any) -> tuple[Any, Any]:
    gates, ids = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)
    return gates / gates.sum(-1, keepdims=True), ids


def products(p: Arrays, rows: Any, sizes: Any) -> Any:
    h = jax.nn.silu(jax.lax.ragged_dot(rows, p["wi"], sizes)) * jax.lax.ragged_dot(rows, p["wg"], sizes)
    return jax.lax.ragged_dot(h, p["wo"], sizes)


def unsorted(p: Arrays, x: Any, changed: str = "") -> Any:
    """Rows are gathered by the order, and put back by the order of the order."""
    gates, ids = routed(p, x)
    flat = ids.reshape(-1)
    order = jnp.argsort(-flat if changed == "backwards" else flat)
    sizes = jnp.bincount(flat + (changed == "others"), length=EXPERTS)
    sizes = jnp.minimum(sizes, 20) if changed == "few" else sizes
    back = order if changed == "not back" else jnp.argsort(order)
    y = products(p, x[order // CHOICES], sizes)[back].reshape(-1, CHOICES, x.shape[1])
    return (y * gates[..., None]).sum(1)


def added(p: Arrays, x: Any) -> Any:
    """Rows are multiplied by their gates in their order, and added to their tokens."""
    gates, ids = routed(p, x)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    rows = jnp.take(x, order // CHOICES, axis=0)
    y = products(p, rows, jnp.bincount(flat, length=EXPERTS)) * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // CHOICES].add(y)


def repeated(p: Arrays, x: Any) -> Any:
    """MaxText's permutation of repeated tokens, and its inverse."""
    gates, ids = routed(p, x)
    flat = jnp.ravel(ids)
    order = jnp.argsort(flat)
    rows = jnp.take(jnp.repeat(x, CHOICES, axis=0), order, axis=0)
    y = jnp.take(products(p, rows, jnp.bincount(flat, length=EXPERTS)), jnp.argsort(order), axis=0)
    return jnp.einsum("bkd,bk->bd", y.reshape(-1, CHOICES, x.shape[1]), gates)


def masked(p: Arrays, x: Any) -> Any:
    """Every expert multiplies all tokens, those of others as zeros."""
    gates, ids = routed(p, x)
    mask = jax.nn.one_hot(ids, EXPERTS)
    sent = jnp.einsum("te,td->etd", mask.sum(-2), x)
    h = jax.nn.silu(jnp.einsum("etd,edf->etf", sent, p["wi"])) * jnp.einsum("etd,edf->etf", sent, p["wg"])
    y = jnp.einsum("etf,efd->etd", h, p["wo"])
    return jnp.einsum("etd,te->td", y, (mask * gates[..., None]).sum(-2))


def looped(p: Arrays, x: Any) -> Any:
    """Two layers in a loop."""
    stack = jax.tree.map(lambda a: jnp.stack([a, a * 0.9]), p)
    return jax.lax.scan(lambda x, q: (x + unsorted(q, x) * 0.1, None), x, stack)[0]


def loss_of(form: Callable[..., Any], **more: Any) -> Callable[[Arrays, Arrays], Any]:
    return lambda p, batch: jnp.mean(
        jnp.square(form(p, batch["x"].reshape(-1, batch["x"].shape[-1]), **more))
    )


@pytest.mark.parametrize("form", [unsorted, added, repeated, masked, looped])
@pytest.mark.one_in(6)
def test_losses_and_gradients_are_those_of_jax(form: Callable[..., Any]) -> None:
    batch = {"x": np.random.default_rng(1).normal(size=(4, 6, D)).astype(np.float32)}
    loss, slopes = jax.value_and_grad(loss_of(form))(parameters(), batch)
    model = layoutopt.from_jax(loss_of(form), parameters(), batch)
    assert not [n for n in model.origin.notes if "sorted by expert" in n]
    g = model.graph
    made = mtf.gradients(model.loss, [g.read(v) for v in g.variables.values()])
    wanted = {"loss": model.loss, **dict(zip(g.variables, made, strict=True))}
    for mesh, layout in (("one:1", ""), ("x:2", "experts:x"), ("x:2", "batch:x")):
        layout = layout if form is not looped or "experts" not in layout else ""
        engine = LockstepEngine(mtf.lower(g, mtf.Mesh(mesh), mtf.Layout(layout), wanted))
        engine.initialize()
        found = engine.step(batch)
        assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-5)
        for name in g.variables:
            scale = float(jnp.abs(slopes[name]).max())
            assert np.abs(found[name].reshape(slopes[name].shape) - slopes[name]).max() < 1e-5 * scale


@pytest.mark.parametrize("changed", ["backwards", "others", "few", "not back"])
def test_rows_of_other_experts_stay_sorted_and_the_answer_says_so(changed: str) -> None:
    model = layoutopt.from_jax(
        loss_of(unsorted, changed=changed), parameters(), {"x": np.ones((4, 6, D), np.float32)}
    )
    assert any("sorted by expert" in n for n in model.origin.notes)


def test_a_mixture_is_priced_as_the_layer() -> None:
    d, inner, batch, length = 4096, 14336, 8, 4096
    types = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes(d, inner).items()}
    x = {"x": jax.ShapeDtypeStruct((batch, length, d), jnp.float32)}
    model = layoutopt.from_jax(loss_of(unsorted), types, x)
    g = mtf.Graph("layer")
    dims = [mtf.Dim("batch", batch), mtf.Dim("length", length), mtf.Dim("d_model", d)]
    router = nn.TopExperts(chosen=CHOICES, normalized=True)
    layer = nn.MixtureOfExperts(
        mtf.Dim("experts", EXPERTS), mtf.Dim("d_expert", inner), router, "silu", gated=True
    )
    loss = mtf.reduce_mean(mtf.square(layer(g.input("x", dims, "float32"))[0]))
    seconds = []
    for graph, of in ((model.graph, model.loss), (g, loss)):
        slopes = mtf.gradients(of, [graph.read(v) for v in graph.variables.values()])
        wanted = {"loss": of, **dict(zip(graph.variables, slopes, strict=True))}
        program = mtf.lower(graph, mtf.Mesh("x:4"), mtf.Layout("batch:x;experts:x"), wanted)
        seconds.append(price(program, load_hardware("h100", "megatron")).step_seconds)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
