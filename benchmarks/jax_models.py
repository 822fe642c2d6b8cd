"""Imports models of other libraries, compares their dimensions with what was written down before, and
searches them.

    python benchmarks/jax_models.py CORPUS.py [NAME...] [--out FILE] [--mesh "data:8;model:8"] [--no-search]
    python benchmarks/jax_models.py CORPUS.py NAME... --check ROWS

CORPUS.py has `ENTRIES` and `build(name)`, which returns a loss, its abstract arguments (parameters, perhaps
state, the batch, perhaps a random key) and a note. Every model is a process of its own: libraries patch each
other.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPECTED = json.loads((HERE / "jax_models_expected.json").read_text(encoding="utf-8"))
HARDWARE = "tpu-v5p"


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


def arrays_like(tree, random, batch: int | None = None):
    """Arrays of a pytree's types: small random numbers, whole numbers below 8, of at most so many rows."""
    import jax
    import numpy as np

    def array(x):
        shape = tuple(x.shape)
        if batch is not None and shape:
            shape = (min(batch, shape[0]), *shape[1:])
        if x.dtype.kind in "iu":
            return random.integers(1, 8, shape).astype(x.dtype)
        return (random.normal(size=shape) * 0.05 + (len(shape) == 1) * 0.5).astype(np.float32).astype(x.dtype)

    return jax.tree.map(array, tree)


def checked(loss, args, batch: int) -> dict:
    """Loss and gradients against JAX's own, on one device, of float32 arrays and a batch of few rows."""
    import jax
    import numpy as np

    import layoutopt
    import mesh_tf_core as mtf
    from layoutopt.importers.jax.leaves import leaves_of
    from mesh_tf_core.engines.jax.engine import JaxEngine

    params, state, rows, rng = roles(args)
    if rng is not None:
        raise SystemExit("draws random numbers: ours are not those that JAX makes")
    random = np.random.default_rng(0)
    given = [arrays_like(params, random), arrays_like(state, random), arrays_like(rows, random, batch)]
    model = layoutopt.from_jax(loss, given[0], given[2], state=given[1])
    call = [x for x in given if x is not None]
    value, grads = jax.jit(jax.value_and_grad(loss))(*call)
    variables = [v for v in model.graph.variables.values() if v.trainable]
    made = mtf.gradients(model.loss, [model.graph.read(v) for v in variables])
    results = {"loss": model.loss, **{v.name: g for v, g in zip(variables, made, strict=True)}}
    engine = JaxEngine(mtf.lower(model.graph, mtf.Mesh("data:1"), mtf.Layout(""), results))
    engine.initialize()
    found = engine.step({leaf.path: np.asarray(leaf.value) for leaf in leaves_of(given[2])[0]})
    off = {}
    for leaf in leaves_of(grads)[0]:
        own = model.origin.parameters[leaf.path]
        if own.variable in found:
            want = np.asarray(leaf.value, np.float64)
            whole = np.asarray(found[own.variable])
            got = (whole if own.layer is None else whole[own.layer]).reshape(want.shape)
            off[leaf.path] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    by_loss = abs(float(found["loss"]) - float(value)) / abs(float(value))
    worst = max(off, key=off.get)
    return {"loss": by_loss, "gradients": off[worst], "of": worst, "parameters": len(off), "rows": batch}


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
    row["dims"] = {n: sorted(s) for n, s in sorted(model.graph.dims().items()) if not n.startswith("_")}
    arrays = {**model.origin.parameters, **model.origin.batch}
    row["arrays"] = {path: str(a).partition(" ")[2] for path, a in arrays.items()}
    row["notes"] = list(model.origin.notes)
    axes = {path: [list(x) for x in a.axes] for path, a in arrays.items()}
    good, total, wrong = together(axes, EXPECTED.get(name, {}))
    row["axes"] = {"as_expected": good, "pairs": total, "different": wrong[:20]}
    if search:
        start = time.process_time()
        plan = layoutopt.search(model, mesh=mesh, hardware=HARDWARE, time_limit=300).to_json()
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
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument(
        "--check", type=int, metavar="ROWS", help="compare numbers with JAX's, of so many rows"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        for name in args.names:
            loss, given, _ = corpus_of(args.corpus).build(name)
            print(json.dumps({"name": name, "check": checked(loss, given, args.check)}), flush=True)
        return
    if args.one:
        print("ROW " + json.dumps(one(args.corpus, args.one, args.mesh, not args.no_search)))
        return
    names = args.names or list(corpus_of(args.corpus).ENTRIES)
    rows = {}
    if args.out and os.path.exists(args.out):
        rows = {r["name"]: r for r in json.loads(Path(args.out).read_text(encoding="utf-8"))["rows"]}
    for name in names:
        command = [sys.executable, __file__, args.corpus, "--one", name, "--mesh", args.mesh]
        command += ["--no-search"] if args.no_search else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next((x for x in done.stdout.splitlines() if x.startswith("ROW ")), None)
        error = (done.stderr.strip().splitlines() or ["?"])[-1]
        row = json.loads(line[4:]) if line else {"name": name, "error": error}
        rows[name] = row
        print(json.dumps({k: v for k, v in row.items() if k not in ("arrays", "dims")}), flush=True)
        if args.out:
            text = json.dumps(
                {"hardware": HARDWARE, "mesh": args.mesh, "rows": list(rows.values())}, indent=1
            )
            Path(args.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
