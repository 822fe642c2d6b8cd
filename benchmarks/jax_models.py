"""Imports models of other libraries, compares their dimensions with what was written down before, and
searches them.

    python benchmarks/jax_models.py CORPUS.py [NAME...] [--out FILE] [--mesh "data:8;model:8"] [--limit S]
    python benchmarks/jax_models.py benchmarks/jax_models_small.py [NAME...] --check [--out FILE]

CORPUS.py has `ENTRIES` and `build(name)`, which returns a loss, its abstract arguments (parameters, perhaps
state, the batch, perhaps a random key) and a note. Every model is a process of its own: libraries patch each
other; one that takes longer than `--limit` is given up. `--check` compares the loss and the gradient
of every parameter with those of JAX, `--no-search` ends with the import.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPECTED = json.loads((HERE / "jax_models_expected.json").read_text(encoding="utf-8"))
HARDWARE = "tpu-v5p"
CHECKED = "data:2;model:2"
"""The mesh under which numbers are compared, of virtual CPU devices."""
SMALLEST = 1e-6
"""Norm of a gradient, relative to that of all, below which it is 0 but for rounding."""
BOUND = 1e-5
"""What a gradient may differ from JAX's in float32, relative to its norm."""


def corpus_of(path: str):
    spec = importlib.util.spec_from_file_location("corpus", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["corpus"] = module
    spec.loader.exec_module(module)
    return module


def roles(args):
    """(params, state, batch, rng) of a corpus's arguments."""
    rng = args[-1] if hasattr(args[-1], "shape") else None
    rest = args[:-1] if rng is not None else args
    return (rest[0], rest[1] if len(rest) == 3 else None, rest[-1], rng)


def together(found: dict[str, list[list[str]]], expected: dict[str, str]) -> tuple[int, int, list[str]]:
    """How many pairs of axes are one dimension or two as expected, of how many, and the arrays that
    differ."""
    mine: list[tuple[str, str]] = []
    wrong = []
    for path, axes in found.items():
        text = expected.get(path) or expected.get(re.sub(r"\d+", "#", path))
        if text is None:
            continue
        want = re.findall(r"\([^)]*\)|\S+", text)
        if len(want) != len(axes):
            wrong.append(f"{path}: {axes}, expected {text}")
            continue
        for a, (text, names) in enumerate(zip(want, axes, strict=True)):
            parts = text.strip("()").split() if text != "1" else []
            if len(parts) != len(names):
                wrong.append(f"{path} axis {a}: {' '.join(names)}, expected {text}")
                continue
            mine += list(zip(parts, names, strict=True))
    good = total = 0
    for i, (a, x) in enumerate(mine):
        for b, y in mine[i + 1 :]:
            total += 1
            good += (a == b) == (x == y)
            if (a == b) != (x == y):
                wrong.append(f"{a}={x} and {b}={y}")
    return good, total, list(dict.fromkeys(wrong))


def arrays_like(tree, random):
    """Arrays of a pytree's types: small random numbers, whole numbers below 8, random keys."""
    import jax

    def array(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
        if x.dtype.kind in "iub":
            return random.integers(1, 8, x.shape).astype(x.dtype)
        return (random.normal(size=x.shape) * 0.15 + (len(x.shape) == 1) * 0.5).astype(x.dtype)

    return jax.tree.map(array, tree)


def splits(model, mesh, results):
    """A layout that splits the batch over `data`, and as many dimensions of parameters over `model`, from the
    largest on, as can be split together."""
    import mesh_tf_core as mtf

    found = "batch:data"
    axes = [
        zip(n, s, strict=True)
        for a in model.origin.parameters.values()
        for n, s in zip(a.axes, a.sizes, strict=True)
    ]
    dims = sorted({pair for listed in axes for pair in listed}, key=lambda x: (-x[1], x[0]))
    for name, _ in dims:
        try:
            mtf.lower(model.graph, mesh, mtf.Layout(f"{found};{name}:model"), results)
        except mtf.UserError:
            continue
        found += f";{name}:model"
    return found


def checked(loss, args) -> dict:
    """Loss and gradients against JAX's own, in float32, on one device and under a layout of four. Where a
    gradient differs by more than BOUND, ours and JAX's against JAX's in float64 too."""
    import jax
    import jax_float64
    import numpy as np

    import layoutopt
    import mesh_tf_core as mtf
    from layoutopt.importers.jax.shardings import leaves_of
    from mesh_tf_core.engines.jax.engine import JaxEngine

    params, state, batch, rng = roles(args)
    if rng is not None:
        raise SystemExit("draws random numbers: ours are not those that JAX makes")
    random = np.random.default_rng(0)
    given = [arrays_like(tree, random) for tree in (params, state, batch)]
    model = layoutopt.from_jax(loss, given[0], given[2], state=given[1])
    value, grads = jax.jit(jax.value_and_grad(loss))(*(x for x in given if x is not None))
    wanted = {leaf.path: np.asarray(leaf.value, np.float64) for leaf in leaves_of(grads)[0]}
    whole = np.sqrt(sum((g**2).sum() for g in wanted.values()))
    variables = [v for v in model.graph.variables.values() if v.trainable]
    made = mtf.gradients(model.loss, [model.graph.read(v) for v in variables])
    results = {"loss": model.loss, **{v.name: g for v, g in zip(variables, made, strict=True)}}
    feeds = {leaf.path: np.asarray(leaf.value) for leaf in leaves_of(given[2])[0]}
    row: dict = {"parameters": len(wanted), "compared": 0}
    four = mtf.Mesh(CHECKED)
    row["split"] = splits(model, four, results)
    exact: dict = {}
    for place, mesh, layout in (("one device", mtf.Mesh("data:1"), ""), ("layout", four, row["split"])):
        engine = JaxEngine(mtf.lower(model.graph, mesh, mtf.Layout(layout), results))
        engine.initialize()
        found = engine.step(feeds)
        off, noise, ours = {}, 0.0, {}
        for path, want in wanted.items():
            own = model.origin.parameters[path]
            got = np.asarray(found.get(own.variable, 0.0), np.float64)
            got = got if own.layer is None or own.variable not in found else got[own.layer]
            ours[path] = got = got.reshape(want.shape) if own.variable in found else 0 * want
            norm, by = np.linalg.norm(want), float(np.linalg.norm(got - want))
            # What is 0 but for rounding, as of a bias that a normalization takes off again.
            if norm > SMALLEST * whole:
                off[path] = by / norm
            else:
                noise = max(noise, by / whole)
        worst = max(off, key=off.get)
        by_loss = abs(float(found["loss"]) - float(value)) / abs(float(value))
        row["compared"] = len(off)
        row[place] = {"loss": by_loss, "gradients": off[worst], "of": worst, "of_zeros": noise}
        if off[worst] > BOUND:
            if not exact:
                _, grads = jax_float64.gradients(loss, [x for x in given if x is not None])
                exact = dict(zip(wanted, grads, strict=True))
            row[place]["to_float64"] = {
                who: max(float(np.linalg.norm(g[p] - exact[p]) / np.linalg.norm(exact[p])) for p in off)
                for who, g in (("ours", ours), ("jax", wanted))
            }
    return row


def one(corpus: str, name: str, mesh: str, search: bool) -> dict:
    """What is measured of one model."""
    import layoutopt

    row: dict = {"name": name}
    loss, args, row["note"] = corpus_of(corpus).build(name)
    params, state, batch, rng = roles(args)
    start = time.process_time()
    given = {k: v for k, v in (("state", state), ("rng", rng)) if v is not None}
    model = layoutopt.from_jax(loss, params, batch, name=name, **given)
    row["import_cpu_seconds"] = round(time.process_time() - start, 2)
    row["equations"] = sum(1 for _ in model.origin.block.walk())
    row["layers"] = [len(run.layers) for run in model.origin.rerolled.runs]
    row["nodes"] = len(list(model.graph.walk()))
    row["parameters"] = model.parameters
    row["dims"] = {n: sorted(s) for n, s in sorted(model.graph.dims().items())}
    arrays = {**model.origin.parameters, **model.origin.batch}
    row["arrays"] = {path: str(a).partition(" ")[2] for path, a in arrays.items()}
    row["notes"] = list(model.origin.notes)
    axes = {path: [list(x) for x in a.axes] for path, a in arrays.items()}
    good, total, wrong = together(axes, EXPECTED.get(name, {}))
    row["axes"] = {"as_expected": good, "pairs": total, "different": wrong[:20]}
    if search:
        start = time.process_time()
        plan = layoutopt.search(model, mesh=mesh, hardware=HARDWARE, allow="usual").to_json()
        row["search_cpu_seconds"] = round(time.process_time() - start, 1)
        row["search"] = {k: plan["solver"][k] for k in ("status", "gap")}
        row["layout"] = plan["layout"]
        row["step_seconds"] = plan["predicted"]["step_seconds"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out")
    parser.add_argument("--mesh", default="data:8;model:8")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each model")
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare numbers with those of JAX")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if args.check:
            loss, given, _ = corpus_of(args.corpus).build(args.one)
            row = {"name": args.one, **checked(loss, given)}
        else:
            row = one(args.corpus, args.one, args.mesh, not args.no_search)
        print("ROW " + json.dumps(row))
        return
    if args.check:
        args.mesh = CHECKED
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    names = args.names or list(corpus_of(args.corpus).ENTRIES)
    rows = {}
    if args.out and os.path.exists(args.out):
        rows = {r["name"]: r for r in json.loads(Path(args.out).read_text(encoding="utf-8"))["rows"]}
    for name in names:
        command = [sys.executable, __file__, args.corpus, "--one", name, "--mesh", args.mesh]
        command += ["--no-search"] * args.no_search + ["--check"] * args.check
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.limit)
            line = next((x for x in done.stdout.splitlines() if x.startswith("ROW ")), None)
            error = (done.stderr.strip().splitlines() or ["?"])[-1]
        except subprocess.TimeoutExpired:
            line, error = None, f"given up after {args.limit:g} s"
        row = json.loads(line[4:]) if line else {"name": name, "error": error}
        rows[name] = row
        print(json.dumps({k: v for k, v in row.items() if k not in ("arrays", "dims")}), flush=True)
        if args.out:
            head = {"mesh": args.mesh} if args.check else {"hardware": HARDWARE, "mesh": args.mesh}
            head = {"date": date.today().isoformat(), **head}
            text = json.dumps({**head, "rows": list(rows.values())}, indent=1)
            Path(args.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
