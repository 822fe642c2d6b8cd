"""The model in Mesh-TensorFlow itself: its slices placed on devices, its SGD, in a TensorFlow 1 session.

The last release is from 2022; `install` fetches it into build/, beside this project's own environment, and
`loaded` gives today's TensorFlow the names that it lacks.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine_peers.sizes import EPSILON, RATE, RULES, Sizes, batch, parameters, shapes

HOME = Path(__file__).resolve().parents[2] / "build" / "mesh_tensorflow"
PACKAGES = ("mesh-tensorflow==0.1.21", "gin-config==0.5.0")


def install() -> None:
    """Once, with pip; TensorFlow is the one of this environment."""
    if not (HOME / "mesh_tensorflow").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(HOME),
            *PACKAGES,
        ]
        subprocess.run(command, check=True)


def loaded() -> Any:
    """The package, with what TensorFlow has taken away since: `tf.estimator` (base classes of hooks, unused
    here) and the old place of a private function."""
    import tensorflow.compat.v1 as tf
    from tensorflow.python.framework import ops, tensor_conversion_registry

    hooks = types.ModuleType("estimator")
    hooks.CheckpointSaverListener = hooks.SessionRunHook = object  # type: ignore[attr-defined]
    tf.estimator = hooks
    ops.register_tensor_conversion_function = tensor_conversion_registry.register_tensor_conversion_function
    sys.path.insert(0, str(HOME))
    # This module has the same name inside of its package; absolute imports keep the two apart.
    import mesh_tensorflow

    return mesh_tensorflow


def loss(mtf: Any, mesh: Any, tokens: Any, targets: Any, s: Sizes) -> Any:
    import tensorflow.compat.v1 as tf

    values, names = parameters(s), shapes(s)
    dim = {
        name: mtf.Dimension(name, size)
        for dims, sizes, _ in names.values()
        for name, size in zip(dims, sizes, strict=True)
    }
    model, length, keys = dim["d_model"], dim["length"], mtf.Dimension("keys", s.length)
    rows = [mtf.Dimension("batch", s.batch), length]

    def variable(name: str, layer: int | None = None) -> Any:
        value = values[name] if layer is None else values[name][layer]
        dims = [dim[d] for d in names[name][0] if d != "layers"]
        full = name if layer is None else f"{name}{layer}"
        return mtf.get_variable(mesh, full, mtf.Shape(dims), initializer=tf.constant_initializer(value))

    def norm(x: Any, scale: Any) -> Any:
        x -= mtf.reduce_mean(x, reduced_dim=model)
        return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=model) + EPSILON) * scale

    def product(x: Any, y: Any, *reduced: str) -> Any:
        return mtf.einsum([x, y], reduced_dims=[dim[name] for name in reduced])

    tokens, targets = (mtf.import_tf_tensor(mesh, x, mtf.Shape(rows)) for x in (tokens, targets))
    later = mtf.less(mtf.range(mesh, length, tf.int32), mtf.range(mesh, keys, tf.int32))
    mask = mtf.cast(later, tf.float32) * -1e9
    x = mtf.gather(variable("tokens"), tokens, dim["vocab"]) + variable("positions")
    for i in range(s.layers):
        y = norm(x, variable("norm1", i))
        q, k, v = (product(y, variable(n, i), "d_model") for n in "qkv")
        k, v = (mtf.rename_dimension(z, "length", "keys") for z in (k, v))
        weights = mtf.softmax(product(q, k, "d_kv") * s.d_kv**-0.5 + mask, keys)
        mixed = mtf.einsum([weights, v], reduced_dims=[keys])
        x += product(mixed, variable("o", i), "heads", "d_kv")
        hidden = mtf.relu(product(norm(x, variable("norm2", i)), variable("wi", i), "d_model"))
        x += product(hidden, variable("wo", i), "d_ff")
    logits = product(norm(x, variable("final_norm")), variable("projection"), "d_model")
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, dim["vocab"]))


def make(s: Sizes, mesh: dict[str, int]) -> Callable[[], float]:
    """One training step per call."""
    mtf = loaded()
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    n = mesh["data"] * mesh["model"]
    graph = mtf.Graph()
    grid = mtf.Mesh(graph, "mesh")
    arrays = batch(s)
    fed = [tf.placeholder(tf.int32, x.shape) for x in arrays]
    value = loss(mtf, grid, *fed, s)
    trained = graph.trainable_variables
    gradients = mtf.gradients([value], [v.outputs[0] for v in trained])
    updates = mtf.optimize.SgdOptimizer(RATE).apply_grads(gradients, trained)
    rules = [f"{d}:{axis}" for d, axis in RULES.items() if mesh[axis] > 1]
    home = mtf.placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape(";".join(f"{axis}:{size}" for axis, size in mesh.items())),
        mtf.convert_to_layout_rules(";".join(rules)),
        [f"cpu:{i}" for i in range(n)],
    )
    lowering = mtf.Lowering(graph, {grid: home})
    found = lowering.export_to_tf_tensor(value)
    train = tf.group([lowering.lowered_operation(op) for op in updates])
    session = tf.Session(config=tf.ConfigProto(device_count={"CPU": n}))
    session.run(tf.global_variables_initializer())
    session.run(lowering.copy_masters_to_slices())
    feeds = dict(zip(fed, arrays, strict=True))
    return lambda: float(session.run([found, train], feeds)[0])
