"""What XLA reaches on virtual CPU devices: the measurements that the hardware preset `cpu-jax` is made of.

    python benchmarks/cpu_jax.py [--out measured.json]

Every number is of eight virtual devices that all work at once, as in a step of a sharded program. Collectives
are those that XLA's partitioner makes on CPUs: it never writes a reduce-scatter, but an all-reduce of the
whole array and a slice. Seconds are the median of seven samples.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEVICES = 8
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

SAMPLE = 0.06
"""Seconds of a sample."""
BYTES = (8 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20)
"""Of the full array of a group, as `costmodels.network.collectives` means it."""


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """Of one call."""
    made = jax.jit(run)
    jax.block_until_ready(made(*args))
    start = time.perf_counter()
    jax.block_until_ready(made(*args))
    count = max(1, round(SAMPLE / (time.perf_counter() - start)))
    found = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(made(*args))  # several at once can starve each other of threads
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)


def mesh(group: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(DEVICES // group, group), ("others", "group"))


def on_all(body: Callable[..., Any], group: int, *shapes: tuple[int, ...]) -> float:
    """Seconds of a body that every device runs on pieces of its own."""
    where = mesh(group)
    spec = P(("others", "group"))
    own = jax.shard_map(
        lambda *xs: body(*(x[0] for x in xs))[None],
        mesh=where,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    random = np.random.default_rng(0)
    args = [
        jax.device_put(random.normal(size=(DEVICES, *s)).astype("float32"), NamedSharding(where, spec))
        for s in shapes
    ]
    return seconds(own, *args)


def collectives() -> Iterator[dict[str, Any]]:
    """Chains of four, so that what starts a program counts little."""
    empty = on_all(lambda x: x + 1.0, DEVICES, (256,))
    for group in (2, 4, 8):
        shift = [(i, (i + 1) % group) for i in range(group)]
        for size in BYTES:
            full, piece = size // 4, size // 4 // group
            bodies = {
                "all_reduce": (lambda x: jax.lax.psum(x, "group") * 0.5, full),
                "all_gather": (
                    lambda x, piece=piece: jax.lax.all_gather(x, "group", tiled=True)[:piece] * 0.5, piece,
                ),
                "all_to_all": (
                    lambda x: jax.lax.all_to_all(x, "group", 0, 0, tiled=True) * 0.5, piece // group * group,
                ),
                "permute": (lambda x, shift=shift: jax.lax.ppermute(x, "group", shift) * 0.5, full),
            }  # fmt: skip
            for kind, (once, length) in bodies.items():

                def chain(x: Any, once: Any = once) -> Any:
                    for _ in range(4):
                        x = once(x)
                    return x

                took = (on_all(chain, group, (length,)) - empty) / 4
                yield {"kind": kind, "group": group, "bytes": size, "seconds": took}


def gathers() -> Iterator[dict[str, Any]]:
    """Four arrays that are gathered along their first, second of three, or last dimension, and kept."""
    for size in BYTES[1:]:
        columns = 512 if size > 1 << 18 else 128
        rows = size // 4 // columns
        for along, axis, piece in (
            ("first", 0, (rows // 8, columns)),
            ("second", 1, (4, rows // 4 // 8, columns)),
            ("last", 1, (rows, columns // 8)),
        ):

            def joined(*xs: Any, axis: int = axis) -> Any:
                return tuple(jax.lax.all_gather(x * 1.01, "group", axis=axis, tiled=True)[None] for x in xs)

            spec = P(("others", "group"))
            own = jax.shard_map(
                lambda *xs, of=joined: of(*(x[0] for x in xs)),
                mesh=mesh(DEVICES), in_specs=spec, out_specs=spec, check_vma=False,
            )  # fmt: skip
            given = jax.device_put(np.ones((DEVICES, *piece), "float32"), NamedSharding(mesh(DEVICES), spec))
            yield {"along": along, "bytes": size, "seconds": seconds(own, *[given] * 4) / 4}


def products() -> Iterator[dict[str, Any]]:
    """m x k x n, twice in a chain that comes back to m x k."""
    for m, k, n in (
        (16, 16, 16), (32, 64, 64), (64, 128, 128), (128, 128, 512), (256, 256, 256), (256, 512, 512),
        (1024, 128, 128), (1024, 128, 512), (2048, 64, 256), (512, 512, 512), (512, 1024, 1024),
        (32, 1024, 1024), (8, 2048, 256), (1024, 512, 16), (1024, 16, 512), (64, 64, 4096),
    ):  # fmt: skip

        def twice(x: Any, w: Any, v: Any) -> Any:
            return (x @ w) @ v

        took = on_all(twice, 8, (m, k), (k, n), (n, k))
        yield {"dims": [m, n, k], "flops": 4 * m * k * n, "seconds": took}


def convolutions() -> Iterator[dict[str, Any]]:
    """A 3 x 3 convolution and its gradients, by batch, image, channels in and out."""
    for b, h, i, o in (
        (2, 8, 64, 64), (8, 8, 64, 16), (8, 8, 16, 64), (16, 8, 64, 8), (2, 16, 64, 64), (2, 16, 3, 64),
        (4, 16, 32, 32), (8, 8, 32, 32),
    ):  # fmt: skip
        names = ("NHWC", "HWIO", "NHWC")

        def conv(x: Any, w: Any, names: Any = names) -> Any:
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names)

        def back_x(x: Any, w: Any, g: Any) -> Any:
            return jax.vjp(lambda x: conv(x, w), x)[1](g)[0]

        def back_w(x: Any, w: Any, g: Any) -> Any:
            return jax.vjp(lambda w: conv(x, w), w)[1](g)[0]

        x, w, g = (b, h, h, i), (3, 3, i, o), (b, h, h, o)
        flops = 2 * b * h * h * 9 * i * o
        for what, took in (
            ("forward", on_all(conv, 8, x, w)),
            ("input", on_all(back_x, 8, x, w, g)),
            ("filter", on_all(back_w, 8, x, w, g)),
        ):
            yield {"what": what, "sizes": [b, h, i, o], "flops": flops, "seconds": took}


def elements() -> Iterator[dict[str, Any]]:
    """What is one kernel: bytes, and functions of elements."""
    works: dict[str, tuple[Callable[..., Any], int]] = {
        "add": (lambda x, y: x + y, 2),
        "adam": (lambda x, y, z: x - 0.001 * (y * 0.9 + x) / (jnp.sqrt(z * 0.99 + x * x) + 1e-8), 3),
        "gelu": (jax.nn.gelu, 1),
        "exp": (jnp.exp, 1),
        "tanh": (jnp.tanh, 1),
        "softmax": (jax.nn.softmax, 1),
        "sum": (lambda x: x.sum(-1, keepdims=True), 1),
        "columns": (lambda x: x.sum(0, keepdims=True), 1),
        "transpose": (lambda x: x.T + 0.0, 1),
    }
    for rows, columns in ((8, 64), (128, 128), (512, 256), (1024, 1024)):
        for name, (work, count) in works.items():
            took = on_all(work, 8, *[(rows, columns)] * count)
            yield {"what": name, "elements": rows * columns, "operands": count, "seconds": took}


def kernels() -> Iterator[dict[str, Any]]:
    """Chains of small kernels that cannot become one: each sums what the one before it made."""
    for count in (0, 16, 64):

        def chain(x: Any, count: int = count) -> Any:
            for _ in range(count):
                x = jax.lax.optimization_barrier(x * 0.5 + x.sum())
            return x

        yield {"kernels": 2 * count, "seconds": on_all(chain, 8, (64,))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", help="parts")
    args = parser.parse_args()
    found = {}
    for part in (kernels, elements, products, convolutions, collectives, gathers):
        if args.only and part.__name__ not in args.only:
            continue
        found[part.__name__] = [*part()]
        for row in found[part.__name__]:
            print(
                part.__name__, *(f"{v:.6f}" if isinstance(v, float) else v for v in row.values()), flush=True
            )
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
