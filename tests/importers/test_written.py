"""A user's own shardings, read as JAX reads them: local shapes and refusals on random PartitionSpecs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.jax.model import JaxModel
from layoutopt.importers.jax.written import WrittenLayout, written
from mesh_tf_core.ir.instructions import Input
from mesh_tf_core.lower import Options

Specs = dict[str, Any]
Shape = tuple[int, ...]
f32 = jnp.float32


def attention_loss(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["tokens"]]
    for w in params["layers"]:
        heads = (x @ w["q"]).reshape(*x.shape[:2], 4, 6)
        scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", heads, heads))
        x = x + jnp.einsum("bhlm,bmhd->blhd", scores, heads).reshape(*x.shape[:2], 24) @ w["o"]
        x = x + jax.nn.relu(x @ w["up"] + w["bias"]) @ w["down"]
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


PARAMETERS: Mapping[str, Shape] = {"embed": (48, 16), "head": (16, 12)}
LAYER: Mapping[str, Shape] = {"q": (16, 24), "o": (24, 16), "up": (16, 32), "bias": (32,), "down": (32, 16)}
BATCH: Mapping[str, Shape] = {"tokens": (8, 6), "y": (8, 6, 12)}
REFUSALS = ("DuplicateSpecError", "IndivisibleError", "ValueError", "IndexError")
MESHES = ("data:2;model:4", "dp:2;fsdp:2;mp:2", "data:4;one:1;model:2", "all:3")


@cache
def attention() -> JaxModel:
    def of(shapes: Mapping[str, Shape]) -> dict[str, Any]:
        return {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in shapes.items()}

    params = {**of(PARAMETERS), "layers": [of(LAYER) for _ in range(3)]}
    batch = {**of(BATCH), "tokens": jax.ShapeDtypeStruct(BATCH["tokens"], jnp.int32)}
    return layoutopt.from_jax(attention_loss, params, batch, optimizer="sgd")


def spec(rng: random.Random, shape: Shape, axes: tuple[str, ...]) -> P:
    """Mostly what a user would write, and now and then what JAX refuses."""
    free, entries = list(axes), []
    rng.shuffle(free)
    for _ in range(len(shape) + (rng.random() < 0.03)):
        count = rng.choice((0, 0, 1, 1, 2))
        taken = tuple(free.pop() for _ in range(min(count, len(free))))
        entries.append(taken if len(taken) > 1 else taken[0] if taken else None)
    if entries and rng.random() < 0.04:
        entries[rng.randrange(len(entries))] = P.UNCONSTRAINED
    if entries and rng.random() < 0.04:
        entries[rng.randrange(len(entries))] = rng.choice((*axes, "nowhere"))
    return P(*entries[: rng.randint(1, len(entries))] if entries else ())


def drawn(rng: random.Random, mesh: mtf.Mesh) -> tuple[Specs, Specs]:
    def of(shapes: Mapping[str, Shape]) -> Specs:
        return {name: spec(rng, shape, mesh.names) for name, shape in shapes.items()}

    return {**of(PARAMETERS), "layers": [of(LAYER)] * 3}, of(BATCH)


def by_jax(mesh: mtf.Mesh, parameters: Specs, batch: Specs) -> dict[str, Shape] | None:
    """The local shape of every array; None where JAX refuses one."""
    theirs = AbstractMesh(tuple(size for _, size in mesh.axes), mesh.names)
    every = {**{name: (parameters[name], shape) for name, shape in PARAMETERS.items()}}
    every |= {f"layers/0/{name}": (parameters["layers"][0][name], shape) for name, shape in LAYER.items()}
    every |= {name: (batch[name], shape) for name, shape in BATCH.items()}
    try:
        found = {path: (NamedSharding(theirs, spec), shape) for path, (spec, shape) in every.items()}
        for sharding, shape in found.values():
            sharding.check_compatible_aval(shape)  # as jit does
        return {path: sharding.shard_shape(shape) for path, (sharding, shape) in found.items()}
    except Exception as error:
        assert type(error).__name__ in REFUSALS, error
        return None


def hold(mesh: mtf.Mesh, found: WrittenLayout, local: Mapping[str, Shape]) -> None:
    """Every array as long on a device as JAX says: as it is read, and in the lowered program."""
    model = attention()
    program = model.lower(mesh, found.layout, found.options)
    fed = {i.feed: i.outputs[0] for i, _ in program.walk() if isinstance(i, Input)}
    for path, shape in local.items():
        array = found.arrays[path]
        ways = [mesh.group_size(axes) for axes in array.spec]
        assert tuple(n // w for n, w in zip(array.array.shape, ways, strict=True)) == shape, path
        if array.fed:
            here = program.local(fed[array.array.variable]).shape.size
        else:
            layers = 1 if array.array.layer is None else 3
            here = program.variables[array.array.variable].value.local_bytes(mesh) // 4 // layers
        assert here == np.prod(shape), (path, str(found.layout), found.options.storage)


def compared(count: int, seed: int) -> dict[str, int]:
    """Random shardings of the model: how many were read, refused by both, and by us alone."""
    rng, seen = random.Random(seed), {"read": 0, "refused": 0, "no rule": 0}
    for _ in range(count):
        mesh = mtf.Mesh(rng.choice(MESHES))
        parameters, batch = drawn(rng, mesh)
        local = by_jax(mesh, parameters, batch)
        try:
            found = written(attention(), mesh, parameters, batch, Options())
        except mtf.UserError as error:
            ours = "no rule of a layout places them so" in str(error)
            assert ours or local is None, error
            assert any(repr(name) in str(error) or name in str(error) for name in (*local_names(),)), error
            seen["no rule" if ours else "refused"] += 1
            continue
        assert local is not None, (parameters, batch)
        hold(mesh, found, local)
        seen["read"] += 1
    return seen


def local_names() -> list[str]:
    return [*attention().origin.parameters, *attention().origin.batch]  # type: ignore[union-attr]


def test_fully_sharded_arrays_are_stored_so_trained_or_not() -> None:
    def loss(params: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ jax.lax.stop_gradient(params["frozen"]))
        return jnp.mean((hidden @ params["trained"]) ** 2)

    shapes = {"frozen": (16, 32), "trained": (32, 16)}
    params = {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in shapes.items()}
    model = layoutopt.from_jax(loss, params, {"x": jax.ShapeDtypeStruct((8, 16), f32)})
    assert {v.name: v.trainable for v in model.graph.variables.values() if v.shape} == {
        "frozen": False,
        "trained": True,
    }
    found = written(model, mtf.Mesh("data:4"), dict.fromkeys(shapes, P("data")), {"x": P("data")}, Options())
    assert found.options.storage == dict.fromkeys(shapes, 3)
    assert not found.unlike


def test_random_shardings_are_read_as_jax_reads_them() -> None:
    seen = compared(12, seed=1)
    assert seen["read"] > 3


@pytest.mark.nightly
def test_many_random_shardings_are_read_as_jax_reads_them() -> None:
    seen = compared(300, seed=2)
    assert seen["read"] > 100 and seen["refused"] > 30
    assert seen["no rule"] < 0.05 * seen["read"], seen
