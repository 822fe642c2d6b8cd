"""Plans in the user's own JAX program, on eight devices: `python -m tests.importers.jax_plans` prints, as
JSON, how far losses, gradients and parameters are from those of the program without a plan, and where arrays
lie."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

if __name__ == "__main__":
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"

import jax
import jax.numpy as jnp
import numpy as np

import layoutopt
import mesh_tf_core as mtf
from layoutopt.plan.build import Plan, axes_of, model_info, parse_plan
from mesh_tf_core.engines.jax.hlo import read
from tests.importers.jax_models import MODELS, imported, numbers

STEPS = 2
ZERO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensor parallel": ("data:2;model:4", "batch:data;d_model:model", {}),
    "stage 1": ("data:4", "batch:data", {"stage": "zero1"}),
    "stage 2 in parts": (
        "data:2",
        "batch:data",
        {"stage": "zero2", "microbatches": 2, "recompute": ["layers:keep=products"]},
    ),
    "stage 3": ("data:4;model:2", "batch:data;vocab:model", {"stage": "zero3"}),
}
"""Mesh, layout and what else is decided, of training steps of the scanned transformer."""

WHOLE_AXES = {"transformer": [("data:2;model:2", "batch:data;vocab:model")]}
"""Layouts of models whose fused axes (query, key and value; gate and up) our engines split and JAX's
shardings cannot."""


class Momentum:
    """An optimizer as optax has them."""

    def init(self, params: Any) -> Any:
        return {"count": jnp.zeros((), jnp.int32), "trace": jax.tree.map(jnp.zeros_like, params)}

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        trace = jax.tree.map(lambda m, g: 0.9 * m + g, state["trace"], grads)
        return jax.tree.map(lambda m: -0.1 * m, trace), {"count": state["count"] + 1, "trace": trace}


def plan_of(model: mtf.Model, mesh: str, layout: str, stage: str = "", **decided: Any) -> Plan:
    seconds = dict.fromkeys(("step_seconds", "compute_seconds"), 1.0)
    sent = dict.fromkeys(("communication_seconds", "exposed_communication_seconds"), 0.0)
    storage = {n: stage for n, v in model.graph.variables.items() if v.own_storage} if stage else {}
    return parse_plan(
        {
            "format": "layoutopt-plan/1",
            "model": model_info(model).model_dump(),
            "mesh": dict(mtf.Mesh(mesh).axes),
            "layout": axes_of(mtf.Layout(layout)),
            "storage": storage,
            "predicted": {**seconds, **sent, "peak_memory_bytes": 0},
            **decided,
        }
    ).of(model)


def off(found: Any, wanted: Any) -> float:
    """The largest relative distance of two pytrees' arrays."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    arrays = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-30)) for a, b in arrays)


def applied(name: str) -> float:
    """Loss and gradients of a model with its values placed, against the same without."""
    loss, _, layouts = MODELS[name]
    model, given = imported(name)
    has_aux = isinstance(jax.eval_shape(loss, *given), tuple)
    wanted = jax.jit(jax.value_and_grad(loss, has_aux=has_aux))(*given)
    plans = [plan_of(model, mesh, layout) for mesh, layout in WHOLE_AXES.get(name, layouts)]
    made = [jax.jit(jax.value_and_grad(p.jax.apply(loss), has_aux=has_aux))(*given) for p in plans]
    return max(off(found, wanted) for found in made)


def trained(mesh: str, layout: str, decided: dict[str, Any]) -> dict[str, Any]:
    """Some steps under a plan, against the same steps without one."""
    loss = MODELS["scanned transformer"][0]
    model, (params, batch) = imported("scanned transformer")
    plan, optimizer = plan_of(model, mesh, layout, **decided), Momentum()
    wanted = jax.tree.map(jnp.copy, params)
    remembered = optimizer.init(wanted)
    step = plan.jax.train_step(loss, optimizer)
    own, state = step.init(jax.tree.map(jnp.copy, params))
    of = jax.jit(jax.value_and_grad(loss))
    for _ in range(STEPS):
        value, grads = of(wanted, batch)
        updates, remembered = optimizer.update(grads, remembered, wanted)
        wanted = jax.tree.map(jnp.add, wanted, updates)
        own, state, reached = step(own, state, batch)
    text = str(jax.make_jaxpr(step.function)(own, state, batch))
    return {
        "parameters": off(own, wanted),
        "moved": off(wanted, params),
        "state": off(state, remembered),
        "loss": abs(float(reached) - float(value)) / float(value),
        "placed": {
            "embedding": tuple(own["embedding"].sharding.spec),
            "down": tuple(own["blocks"]["down"].sharding.spec),
            "trace": tuple(state["trace"]["blocks"]["down"].sharding.spec),
        },
        "checkpoints": "remat" in text,
    }


def averaging(params: Any, state: Any, batch: Any) -> Any:
    """A loss that keeps a running mean."""
    h = jnp.tanh(batch["x"] @ params["up"])
    new = {"mean": 0.9 * state["mean"] + 0.1 * h.mean(0)}
    return jnp.square((h - state["mean"]) @ params["down"]).mean(), (new, {"largest": h.max()})


def stateful() -> dict[str, Any]:
    """Steps of a loss with a state of its own: how often its program is compiled, and how far parameters and
    state are from those without a plan."""
    f, loss, optimizer = numbers(), averaging, Momentum()
    params, state, batch = {"up": f(4, 8), "down": f(8, 4)}, {"mean": jnp.zeros(8)}, {"x": f(8, 4)}
    names = {"up": ("features", "units")}
    model = layoutopt.from_jax(loss, params, batch, state=state, names=names)
    step = plan_of(model, "data:2;model:2", "batch:data;units:model").jax.train_step(loss, optimizer)
    own, remembered = step.init(jax.tree.map(jnp.copy, params))
    wanted, kept, whole = params, state, optimizer.init(params)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **said: compiled.append(f"{event} {said.get('fun_name')}")
    )
    of = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for _ in range(3):
        own, remembered, (_, (state, _)) = step(own, remembered, state, batch)
        (_, (kept, _)), grads = of(wanted, kept, batch)
        updates, whole = optimizer.update(grads, whole, wanted)
        wanted = jax.tree.map(jnp.add, wanted, updates)
    placed = step.init(params, state)[2]
    return {
        "compiled": sum("backend_compile" in x and "jit(function)" in x for x in compiled),
        "parameters": off(own, wanted),
        "state": off(state, kept),
        "placed": [str(x["mean"].sharding.spec) for x in (state, placed)],
    }


def keeping(params: Any, state: Any, batch: Any) -> Any:
    """Layers with frozen parameters, and state that is frozen, a running mean or a moving average."""

    def block(h: Any, layer: Any) -> tuple[Any, Any]:
        own, kept = layer
        y = jnp.tanh(h @ own["trained"] + h @ jax.lax.stop_gradient(own["frozen"]))
        moved = {"mean": y.mean(0), "average": jax.lax.stop_gradient(own["trained"])}
        new = {name: 0.9 * kept[name] + 0.1 * x for name, x in moved.items()}
        return h + (y - kept["mean"] + h @ kept["average"]) @ kept["fixed"], new

    h, new = jax.lax.scan(block, batch["x"], (params, state))
    return jnp.square(h).mean(), {**state, **new}


def kept() -> dict[str, Any]:
    """Compiled steps with all arrays that stay split over the devices: how far parameters and state are from
    those without a plan, where they lie, what a device holds of them, and the sizes of all gathers."""
    f = numbers()
    params = {"trained": f(2, 8, 16), "frozen": f(2, 8, 16)}
    state = {"fixed": f(2, 16, 8), "mean": f(2, 16), "average": f(2, 8, 16)}
    batch = {"x": f(8, 8)}
    model = layoutopt.from_jax(keeping, params, batch, state=state)
    step = plan_of(model, "data:4", "batch:data", "zero3").jax.train_step(keeping, Momentum())
    own, trace, placed = step.init(jax.tree.map(jnp.copy, params), state)
    wanted, whole, remembered, kept = params, Momentum().init(params), own, state
    of = jax.jit(jax.value_and_grad(keeping, has_aux=True))
    text = step.jitted(own, trace, placed, batch).lower(own, trace, placed, batch).compile().as_text()
    for _ in range(STEPS):
        own, trace, (_, placed) = step(own, trace, placed, batch)
        (_, kept), grads = of(wanted, kept, batch)
        updates, whole = Momentum().update(grads, whole, wanted)
        wanted = jax.tree.map(jnp.add, wanted, updates)
    arrays = {**own, **placed}
    return {
        "numbers": off((own, placed), (wanted, kept)),
        "moved": off((remembered, state), (wanted, kept)),
        "held": {name: x.size // x.addressable_shards[0].data.size for name, x in arrays.items()},
        "gathers": [c.kind for c in read(text).collectives].count("all_gather"),
        # Of the moving average alone the loop makes a whole one, the new.
        "gathered stacks": len(re.findall(r"f32\[2,(?:8,16|16,8)\]\S* all-gather", text)),
    }


def pairs() -> dict[str, float]:
    """Steps of losses that return their auxiliary without arrays: what they give, against the loss."""
    f = numbers()
    params, batch, found = {"up": f(4, 8)}, {"x": f(8, 4)}, {}
    for auxiliary, parts in (({}, 1), (None, 1), ({}, 2)):

        def loss(params: Any, batch: Any, auxiliary: Any = auxiliary) -> Any:
            return jnp.square(batch["x"] @ params["up"]).mean(), auxiliary

        model = layoutopt.from_jax(loss, params, batch)
        step = plan_of(model, "data:2", "batch:data", microbatches=parts).jax.train_step(loss, Momentum())
        _, _, (value, given) = step(*step.init(jax.tree.map(jnp.copy, params)), batch)
        assert given == auxiliary
        found[f"{auxiliary} in {parts}"] = off(value, loss(params, batch)[0])
    return found


def residual(params: Any, batch: Any) -> Any:
    """Layers with a residual stream."""

    def block(h: Any, p: Any) -> tuple[Any, None]:
        x = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * p["scale"]
        return h + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    h, _ = jax.lax.scan(block, batch["x"] @ params["first"], params["blocks"])
    return jnp.square(h - batch["x"]).mean()


def further() -> dict[str, Any]:
    """Compiled steps without and with a rule for elsewhere, and stored over all and over some axes: how far
    their parameters are from the first one's, how many collectives of each kind and group size there are, and
    whether any device has a whole residual stream of a layer."""
    f, mesh = numbers(), "data:2;model:4"
    blocks = {"scale": 1 + f(2, 24), "up": f(2, 24, 64), "down": f(2, 64, 24)}
    params, batch = {"first": f(24, 24), "blocks": blocks}, {"x": f(8, 16, 24)}
    model = layoutopt.from_jax(residual, params, batch, names={"blocks/up": ("layers", "width", "hidden")})
    (length,) = [n for n, sizes in model.graph.dims().items() if sizes == {16}]
    split = {"refined": {"elsewhere": {length: ["model"]}}}
    plans: dict[str, tuple[str, str, dict[str, Any]]] = {
        "tensor": (mesh, "batch:data;hidden:model", {}),
        "sequence": (mesh, "batch:data;hidden:model", split),
        "zero3": ("pod:2;data:4", "batch:pod+data", {"stage": "zero3"}),
        "hybrid": ("pod:2;data:4", "batch:pod+data", {"stage": "zero3@data"}),
    }
    found: dict[str, Any] = {}
    for name, (on, layout, decided) in plans.items():
        step = plan_of(model, on, layout, **decided).jax.train_step(residual, Momentum())
        own, state = step.init(jax.tree.map(jnp.copy, params))
        text = step.jitted(own, state, batch).lower(own, state, batch).compile().as_text()
        moved = {f"{c.kind} {c.group_size}" for c in read(text).collectives}
        new, _, _ = step(own, state, batch)
        found.setdefault("tensor parameters", new)
        apart = off(new, found["tensor parameters"])
        whole = "f32[2,4,16,24]" in text
        found[name] = {"parameters": apart, "moved": sorted(moved), "saves the whole length": whole}
    del found["tensor parameters"]
    return found


BY_DAY = ("recurrence", "own derivatives"), ("tensor parallel", "stage 2 in parts")
"""Models whose values are placed, and training steps, that take little time together."""


if __name__ == "__main__":
    models, steps = (MODELS, ZERO) if sys.argv[1:] == ["all"] else BY_DAY
    found = {name: trained(*ZERO[name]) for name in steps}
    print(
        json.dumps(
            {
                "applied": {name: applied(name) for name in models},
                "trained": found,
                "stateful": stateful(),
                "pairs": pairs(),
                "kept": kept(),
                **({"further": further()} if sys.argv[1:] == ["all"] else {}),
            }
        )
    )
