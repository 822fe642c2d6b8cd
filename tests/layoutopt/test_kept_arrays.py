"""Storage of arrays that stay between steps, trained or not, is searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryRules, memory
from layoutopt.space.decisions import typed
from tests.kept_arrays import KINDS, model
from tests.layoutopt.test_tables import compare
from tests.marks import by_day


@pytest.mark.parametrize(
    ("kind", "parts"), by_day([(k, 1 + (n + more) % 2) for n, k in enumerate(KINDS) for more in (0, 1)])
)
@pytest.mark.one_in(6)
def test_tables_and_rows(kind: str, parts: int) -> None:
    stages = ("layout", "zero1", "zero3", "zero3@data")
    asked = {"storage": stages, "recompute": (False, True), "offload": ("weights",)}
    compare(
        model(kind, "float32"), mtf.Mesh("data:2;model:2"), parts, load_hardware("tpu-v4"), 1, 12, **asked
    )


def _as_it_is(w: Any) -> Any:
    return w


FROZEN: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "state": ("state", _as_it_is, _as_it_is),
    "stopped in each layer": ("params", _as_it_is, jax.lax.stop_gradient),
    "stopped before the loop": ("params", jax.lax.stop_gradient, _as_it_is),
    "stopped twice": ("params", jax.lax.stop_gradient, jax.lax.stop_gradient),
}
"""Where frozen weights are given, what is done to all layers of them, and to each."""


def frozen_weights(layers: int, width: int, inner: int, how: str = "state") -> mtf.Model:
    """A low-rank adapter beside frozen weights, in bfloat16."""
    given, before, inside = FROZEN[how]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        def block(x: Any, w: Any) -> Any:
            frozen, small = inside(w[0]), w[1]
            return x + jax.nn.gelu(x @ frozen) @ frozen.T + (x @ small[0]) @ small[1], None

        frozen = before({"state": state, "params": params}[given]["w"])
        x, _ = jax.lax.scan(jax.checkpoint(block), batch["x"], (frozen, (params["a"], params["b"])))
        return jnp.mean((x - batch["y"]) ** 2)

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    arrays = {
        "params": {"a": of(layers, width, 16), "b": of(layers, 16, width)},
        "state": {"other": of(8)},
    }
    arrays[given]["w"] = of(layers, width, inner)
    batch = {"x": of(64, width), "y": of(64, width)}
    return layoutopt.from_jax(loss, arrays["params"], batch, state=arrays["state"])


@pytest.mark.parametrize("how", FROZEN)
def test_devices_hold_their_shards_and_one_layer_of_frozen_weights(how: str) -> None:
    found = frozen_weights(64, 8192, 32768, how)
    assert (found.parameters, found.frozen - 64 * 8192 * 32768) in ((2 * 64 * 8192 * 16, n) for n in (0, 8))
    options = typed(found, {"--storage": ["zero3"]})
    program = found.lower(mtf.Mesh("data:8"), mtf.Layout("batch:data"), options)
    shard, layer = 2 * 64 * 8192 * 32768 // 8, 2 * 8192 * 32768
    assert shard + layer < memory(program, MemoryRules(fuses=Fuses.ALL)).peak < shard + 1.1 * layer


def test_fully_sharded_plans_of_frozen_weights_fit() -> None:
    found = frozen_weights(16, 512, 2048)
    whole = sum(v.bytes for v in found.graph.variables.values())
    plan = layoutopt.search(found, "data:4", hardware="tpu-v4", memory=whole / 2)
    (named,) = [a for a in plan.alternatives if "fully sharded" in a.name]
    assert named.feasible and named.storage["state/w"] == "zero3"


def test_stages_that_split_nothing_of_an_array_are_refused_for_it() -> None:
    found = model("frozen", "float32")
    assert typed(found, {"--storage": ["zero2"]}).storage.keys() == {"w"}
    assert typed(found, {"--storage": ["zero3"]}).storage.keys() == {"w", "other"}
    with pytest.raises(mtf.UserError, match="'other' is not trained, so it has no gradient"):
        typed(found, {"--storage": ["other=zero1"]})
    with pytest.raises(mtf.UserError, match="the model has no variable 'others'"):
        typed(found, {"--storage": ["others=zero3"]})
