"""JAX programs on eight virtual CPU devices: under the plan that a search proves best, under shardings as an
expert writes them by hand, and with everything on every device.

    python benchmarks/jax_plans.py [--rounds 12] [--only NAME ...]

Each program is a whole training step with optax.adam. The three compiled steps of a program run in turn, so
that the machine's other work meets all of them alike; the ratio of a round is ours over the better of the
other two. `upper` is the one-sided 95 % upper bound of the median ratio (bootstrap). The plan is searched
for `cpu-jax` as it ships, on all mesh shapes of eight devices up to two axes.

glibc gives the temporary arrays of some steps back to the system after every step, by the sizes that happen
to lie side by side: up to 12,000 page faults (30 ms) in the next, under the same shardings none in another
process. So the process asks for huge pages, for all three programs alike; `page_faults` are counted.

The Transformer is there twice. With widths that are powers of two one kernel of its backward pass, which
transposes, takes 0.3 ms or 1.1, by the addresses that XLA gives its arrays (rows lie 2 KiB apart, so in the
same sets of the cache); `transformer` has other widths, `transformer_512` is what measures that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

HUGE_PAGES = "glibc.malloc.hugetlb=1"
if __name__ == "__main__" and "GLIBC_TUNABLES" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": HUGE_PAGES})
DEVICES = 8
HARDWARE = "cpu-jax"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import layoutopt  # noqa: E402
from examples.jax_transformer import loss as transformer  # noqa: E402
from examples.jax_transformer import shapes  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "jax_plans.json"
RANDOM = np.random.default_rng(0)


def drawn(tree: Any) -> Any:
    """Small normal numbers for a pytree of types; whole numbers are as they are."""
    return jax.tree.map(lambda t: jnp.asarray(RANDOM.normal(0, 0.05, t.shape), t.dtype), tree)


def of(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole(high: int, *shape: int) -> Any:
    return jnp.asarray(RANDOM.integers(0, high, shape), jnp.int32)


def perceptron(params: Any, batch: Any) -> Any:
    """Wide layers, few rows."""
    h = batch["x"]
    for w in params["layers"]:
        h = jax.nn.relu(h @ w)
    log = jax.nn.log_softmax(h @ params["head"])
    return -jnp.take_along_axis(log, batch["y"][:, None], -1).mean()


def convolutions(params: Any, batch: Any) -> Any:
    """A small residual network."""
    names = ("NHWC", "HWIO", "NHWC")
    conv = jax.lax.conv_general_dilated
    x = conv(batch["image"], params["stem"], (2, 2), "SAME", dimension_numbers=names)
    for p in params["blocks"]:
        h = jax.nn.relu(conv(x, p["first"], (1, 1), "SAME", dimension_numbers=names))
        x = jax.nn.relu(x + conv(h, p["second"], (1, 1), "SAME", dimension_numbers=names))
    log = jax.nn.log_softmax(x.mean((1, 2)) @ params["head"])
    return -jnp.take_along_axis(log, batch["label"][:, None], -1).mean()


def mixture(params: Any, batch: Any) -> Any:
    """Two experts of eight for every row, computed densely."""
    x = batch["x"]
    value, index = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    weight = (jax.nn.one_hot(index, 8) * (value / value.sum(-1, keepdims=True))[..., None]).sum(-2)
    h = jax.nn.silu(jnp.einsum("bd,edf->bef", x, params["up"]))
    return jnp.square(x + jnp.einsum("bef,efd,be->bd", h, params["down"], weight) - batch["y"]).mean()


def recurrence(params: Any, batch: Any) -> Any:
    """A gated recurrent network over time."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        gate = jax.nn.sigmoid(x @ params["wg"] + h @ params["ug"])
        h = gate * h + (1 - gate) * jnp.tanh(x @ params["w"] + h @ params["u"])
        return h, h

    start = jnp.zeros((batch["x"].shape[0], params["u"].shape[0]))
    _, ys = jax.lax.scan(step, start, jnp.moveaxis(batch["x"], 1, 0))
    return jnp.square(jnp.moveaxis(ys, 0, 1) @ params["out"] - batch["y"]).mean()


def cases() -> dict[str, tuple[Callable[..., Any], Any, Any, str, Any, Any]]:
    """Name -> loss, parameters, batch, and by hand: mesh, shardings of parameters and batch."""
    rows = P("data")

    def everywhere(tree: Any, spec: Any = None) -> Any:
        return jax.tree.map(lambda _: P() if spec is None else spec, tree)

    text = {"tokens": whole(496, 16, 64), "targets": whole(496, 16, 64)}
    lm, powers = drawn(shapes(3, 128, 8, 480, 496)), drawn(shapes(3, 128, 8, 512, 512))
    mlp = drawn({"layers": [of(256, 2048), of(2048, 1024), of(1024, 256)], "head": of(256, 16)})
    mlp_by_hand = {
        "layers": [P(None, "model"), P("model", None), P(None, "model")],
        "head": P("model", None),
    }
    blocks = [{"first": of(3, 3, 64, 64), "second": of(3, 3, 64, 64)} for _ in range(2)]
    cnn = drawn({"stem": of(3, 3, 3, 64), "blocks": blocks, "head": of(64, 10)})
    moe = drawn({"router": of(128, 8), "up": of(8, 128, 512), "down": of(8, 512, 128)})
    moe_by_hand = {"router": P(), "up": P("model"), "down": P("model")}
    gates = {"w": of(64, 256), "u": of(256, 256), "wg": of(64, 256), "ug": of(256, 256), "out": of(256, 64)}
    rnn = drawn(gates)
    x = jnp.asarray(RANDOM.normal(size=(256, 128)), jnp.float32)
    images = jnp.asarray(RANDOM.normal(size=(16, 16, 16, 3)), jnp.float32)
    series = jnp.asarray(RANDOM.normal(size=(32, 16, 64)), jnp.float32)
    features = jnp.asarray(RANDOM.normal(size=(64, 256)), jnp.float32)
    found = {
        "transformer": (transformer, lm, text, "data:8", everywhere(lm), rows),
        "transformer_512": (transformer, powers, text, "data:8", everywhere(powers), rows),
        "perceptron": (perceptron, mlp, {"x": features, "y": whole(16, 64)}, "model:8", mlp_by_hand, None),
        "convolutions": (
            convolutions, cnn, {"image": images, "label": whole(10, 16)}, "data:8", everywhere(cnn), rows,
        ),
        "mixture": (mixture, moe, {"x": x, "y": x[::-1]}, "data:2;model:4", moe_by_hand, rows),
        "recurrence": (recurrence, rnn, {"x": series, "y": series[:, ::-1]}, "data:8", everywhere(rnn), rows),
    }  # fmt: skip
    return {
        name: (loss, params, batch, mesh, by_hand, everywhere(batch, given if isinstance(given, P) else None))
        for name, (loss, params, batch, mesh, by_hand, given) in found.items()
    }


def by_hand(loss: Any, optimizer: Any, params: Any, batch: Any, mesh: str, specs: Any, inputs: Any) -> Any:
    """What runs a step with these shardings, and leaves all else to XLA."""
    sizes = dict(part.split(":") for part in mesh.split(";"))
    devices = np.array(jax.devices()).reshape([int(n) for n in sizes.values()])
    made = Mesh(devices, tuple(sizes))
    placed = jax.tree.map(lambda s: NamedSharding(made, s), specs, is_leaf=lambda s: isinstance(s, P))
    fed = jax.tree.map(lambda s: NamedSharding(made, s), inputs, is_leaf=lambda s: isinstance(s, P))
    params, batch = jax.device_put(jax.tree.map(jnp.copy, params), placed), jax.device_put(batch, fed)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return running(step, params, state, batch)


def running(step: Any, params: Any, state: Any, batch: Any) -> Callable[[], float]:
    """What runs a step and gives its loss."""
    held = [params, state]

    def run() -> float:
        held[0], held[1], value = step(*held, batch)
        jax.block_until_ready(held)
        return float(value)

    return run


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One program under all three."""
    loss, params, batch, mesh, specs, inputs = cases()[name]
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    start = time.process_time()
    model = layoutopt.from_jax(loss, *types, optimizer="adam", name=name)
    imported = time.process_time() - start
    start = time.process_time()
    plan = layoutopt.search(model, devices=DEVICES, hardware=HARDWARE, allow="usual")
    searched = time.process_time() - start
    optimizer = optax.adam(1e-3)
    step = plan.jax.train_step(loss, optimizer)
    own, state = step.init(jax.tree.map(jnp.copy, params))
    fed = jax.device_put(batch, plan.jax.batch_shardings(batch))
    nothing = jax.tree.map(lambda _: P(), params), jax.tree.map(lambda _: P(), batch)
    runs = {
        "plan": running(step, own, state, fed),
        "expert": by_hand(loss, optimizer, params, batch, mesh, specs, inputs),
        "replicated": by_hand(loss, optimizer, params, batch, "data:8", *nothing),
    }
    losses = {who: run() for who, run in runs.items()}
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    faults: dict[str, list[int]] = {who: [] for who in runs}
    for _ in range(rounds):
        for who, run in runs.items():
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            run()
            seconds[who].append(time.perf_counter() - start)
            faults[who].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    rest = zip(seconds["expert"], seconds["replicated"], strict=True)
    best = "expert" if sum(e < r for e, r in rest) * 2 >= rounds else "replicated"
    ratios = [a / b for a, b in zip(seconds["plan"], seconds[best], strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=rounds)) for _ in range(2000))
    return {
        "name": name,
        "mesh": str(plan.mesh),
        "layout": str(plan.layout),
        "storage": {name: str(stage) for name, stage in sorted(plan.options.storage.items())},
        "status": plan.solver.status,
        "expert": f"{mesh}",
        "seconds": {who: statistics.median(found) for who, found in seconds.items()},
        "page_faults": {who: statistics.median(found) for who, found in faults.items()},
        "best_of_others": best,
        "ratio": statistics.median(ratios),
        "upper": medians[int(0.95 * len(medians))],
        "losses": losses,
        "import_cpu_seconds": imported,
        "search_cpu_seconds": searched,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="*", help="names of programs")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {row["name"]: row for row in known}
    for name in args.only or cases():
        r = rows[name] = measured(name, args.rounds) | {"date": date.today().isoformat()}
        times = "  ".join(f"{who} {1000 * s:.0f} ms" for who, s in r["seconds"].items())
        said = f"{r['ratio']:.3f} (up to {r['upper']:.3f})  {times}  {r['layout']} on {r['mesh']}"
        print(f"{name:<14} {said}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/jax_plans.py --rounds {args.rounds}"
    found = {"command": command, "rows": [rows[name] for name in cases() if name in rows]}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
