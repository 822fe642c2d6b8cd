"""Imports every model type of the installed transformers at a reduced size and compares it with PyTorch.

    python -m benchmarks.torch_unseen [TYPE...] [--out FILE] [--limit S] [--search N] [--part I/N]

The configuration of each type is reduced by the names of its fields (`benchmarks.torch_unseen_made`), and the
module runs on CPU in float32. Each row says how the import ended: "equal" (parameters exact, loss and
gradients within 1e-5), "drawn" (the module draws random numbers, so only parameters are compared), "refused"
(with the error's text), "different", "crash" (not a UserError), "late" (given up) or "unbuilt" (PyTorch
itself does not run what the reduction made).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import resource
import site
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "torch_unseen.json"
BOUND, SEARCHED = 1e-5, 20
ROOTS = (*site.getsitepackages(), str(HERE.parent))


def numbers(
    module: Any, batch: Mapping[str, Any], loss: Any, model: Any, mesh: str = "data:1", layout: str = ""
) -> dict[str, Any]:
    """Largest relative differences of loss and gradients from PyTorch's."""
    import numpy as np

    import mesh_tf_core as mtf
    from mesh_tf_core.engines.lockstep import LockstepEngine

    graph = model.graph
    trained = [v.name for v in graph.variables.values() if v.trainable]
    slopes = mtf.gradients(model.loss, [graph.read(graph.variables[name]) for name in trained])
    outs = {name: d for name, d in zip(trained, slopes, strict=True) if d is not None}
    program = mtf.lower(graph, mtf.Mesh(mesh), mtf.Layout(layout), {"loss": model.loss, **outs})
    engine = LockstepEngine(program)
    engine.initialize()
    fed = dict(torch_paths(batch))
    with np.errstate(all="ignore"):
        found = engine.step({p: array_of(fed[p]) for p in program.feeds})
    module.zero_grad()
    expected = lost(module, batch, loss)
    expected.backward()
    value = float(expected.detach())
    row: dict[str, Any] = {"loss": abs(float(found["loss"]) - value) / max(abs(value), 1e-6)}
    own = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    largest, worst = max(float(g.abs().max()) for g in own.values()), (0.0, "")
    for path, array in model.origin.parameters.items():
        wanted = own.get(path.replace("/", "."))
        if array.variable not in outs:
            if wanted is not None and float(wanted.abs().max()) > 0:
                worst = max(worst, (1.0, f"{path}: no gradient"))
            continue
        got = np.asarray(found[array.variable])
        got = (got if array.layer is None else got[array.layer]).reshape(array.shape)
        wanted = np.zeros(array.shape) if wanted is None else wanted.numpy()
        # The slope of a key's bias is 0 but for rounding.
        scale = max(float(np.abs(wanted).max()), largest / 100)
        worst = max(worst, (float(np.abs(got - wanted).max()) / scale, path))
    return row | {"gradient": worst[0], "worst": worst[1]}


def rounding(module: Any, batch: Any, loss: Any) -> float:
    """How far PyTorch's own gradients move, relatively, when the last bits of its parameters do: modules may
    normalise in float32 whatever their type."""
    import torch

    found = []
    for moved in (0.0, 2.0**-24):
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1 + moved * torch.randn_like(p).sign())
        module.zero_grad()
        lost(module, batch, loss).backward()
        found.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
    largest = max(float(g.abs().max()) for g in found[0].values())
    each = ((g, found[1][n]) for n, g in found[0].items())
    return max(float((a - b).abs().max()) / max(float(a.abs().max()), largest / 100) for a, b in each)


def torch_paths(batch: Any) -> list[tuple[str, Any]]:
    import torch

    from layoutopt.importers.torch.calls import batch_path

    return [(batch_path(k), x) for k, x in torch.utils._pytree.tree_flatten_with_path(batch)[0]]


def array_of(x: Any) -> Any:
    return x.numpy() if x.is_floating_point() or str(x.dtype) == "torch.bool" else x.numpy().astype("int32")


def lost(module: Any, batch: Any, loss: Any) -> Any:
    """The loss that PyTorch gives."""
    from layoutopt.importers.torch.capture import loss_of

    found = module(**batch)
    return loss_of(found) if loss is None else loss(found, batch)


def one(kind: str) -> dict[str, Any]:
    """What is measured of a model type."""
    import torch

    import layoutopt
    from benchmarks.torch_unseen_made import Unbuilt, made
    from mesh_tf_core.errors import UserError

    torch.set_num_threads(1)
    row: dict[str, Any] = {"type": kind}
    try:
        given = made(kind)
    except Unbuilt as error:
        return row | {"end": "unbuilt", "said": str(error)[:600]}
    module, batch, loss = given.module, given.batch, given.loss
    trained = sum(p.numel() for p in module.parameters())
    row |= {"class": type(module).__name__, "task": given.task, "parameters": trained}
    start = time.process_time()
    try:
        model = layoutopt.from_torch(module, dict(batch), loss=loss)
        row["import_cpu_seconds"] = round(time.process_time() - start, 2)
        row["loops"] = [len(run.layers) for run in model.origin.rerolled.runs]
        row["notes"] = list(model.origin.notes)
        row["imported"] = sum(math.prod(a.shape) for a in model.origin.parameters.values())
        if not given.drawn:
            row |= numbers(module, batch, loss, model)
    except UserError as error:
        return row | {"end": "refused", "said": str(error)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return row | {
            "end": "crash",
            "said": f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})",
        }
    good = row["imported"] == trained and max(row.get("loss", 0), row.get("gradient", 0)) < BOUND
    if not good and row["imported"] == trained:
        # Rounding decides between experts of equal scores, and normalisations of two rows enlarge it.
        torch.manual_seed(1)
        for p in module.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.1)
        for double in (True, False):  # PyTorch has no float64 products in groups
            with contextlib.suppress(Exception):
                module = module.double() if double else module.float()
                batch = {
                    n: (x.double() if double else x.float())
                    if torch.is_tensor(x) and x.is_floating_point()
                    else x
                    for n, x in batch.items()
                }
                model = layoutopt.from_torch(module, dict(batch), loss=loss)
                again = numbers(module, batch, loss, model) | {"float64": double}
                again["rounding"] = rounding(module, batch, loss)
                row |= again
                good = max(again["loss"], again["gradient"]) < max(BOUND, min(4 * again["rounding"], 1e-3))
                break
    own = any("has a backward of its own" in note for note in row["notes"])
    lost = "differs: it has a backward of its own" if own else "different"
    return row | {"end": ("drawn" if given.drawn else "equal") if good else lost}


def searched(kind: str) -> dict[str, Any]:
    """A search of an imported type for 8 H100, and whether `plan.torch` says where everything lies."""
    import torch

    import layoutopt
    from benchmarks.torch_unseen_made import made
    from mesh_tf_core.errors import UserError

    given = made(kind)
    # Eight times the rows, so that eight devices have some each.
    batch = {n: torch.cat([x] * 8) if torch.is_tensor(x) else x for n, x in given.batch.items()}
    model = layoutopt.from_torch(given.module, batch, loss=given.loss)
    row: dict[str, Any] = {"type": kind}
    try:
        plan = layoutopt.search(model, devices=8, hardware="h100", framework="torch", time_limit=SEARCHED)
        row |= {"status": plan.solver.status, "mesh": str(plan.mesh), "layout": str(plan.layout)}
        row["placements"] = len(plan.torch.placements())
    except UserError as error:
        row["said"] = str(error)
    except Exception as error:
        row["crash"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-800:]}"
    return row


def _child(work: Callable[[str], dict[str, Any]], kind: str, pipe: Any, limit: float) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    try:
        pipe.send(work(kind))
    except BaseException as error:
        pipe.send({"type": kind, "end": "crash", "said": f"{type(error).__name__}: {error}"})


def in_process(work: Callable[[str], dict[str, Any]], kind: str, limit: float) -> dict[str, Any]:
    """The row of a type, made in a process of its own, so that nothing is left of it."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(work, kind, theirs, limit))
    child.start()
    theirs.close()
    try:
        row = ours.recv() if ours.poll(limit * 6) else None
    except EOFError:
        row = None
    child.kill()
    child.join()
    row = row or {"type": kind, "end": "late", "said": f"given up after {limit:g} CPU seconds"}
    text = json.dumps(row)
    for root in ROOTS:
        text = text.replace(f"{root}/", "")
    return dict(json.loads(text))


def _warm() -> None:
    """Loads what every child needs, once."""
    import torch

    import layoutopt

    torch.set_num_threads(1)
    module, batch = torch.nn.Linear(2, 2), {"input": torch.ones(4, 2)}

    def loss(found: Any, _: Any) -> Any:
        return found.square().mean()

    numbers(module, batch, loss, layoutopt.from_torch(module, batch, loss=loss))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", default=str(OUT))
    parser.add_argument("--limit", type=float, default=60, help="CPU seconds of a type")
    parser.add_argument("--ends", help="only types whose row ended so, e.g. refused,crash")
    parser.add_argument("--part", default="0/1", help="every Nth type, beginning with the Ith")
    parser.add_argument("--search", type=int, default=0, help="search this many of those imported instead")
    asked = parser.parse_args()
    from benchmarks.torch_unseen_made import known

    out = Path(asked.out)
    old = json.loads(out.read_text()) if out.exists() else {"rows": []}
    rows = {r["type"]: r for r in old.pop("rows")}
    which, count = map(int, asked.part.split("/"))
    kinds = (asked.types or [*known()])[which::count]
    if asked.ends:
        kinds = [k for k in kinds if rows.get(k, {}).get("end", "none") in asked.ends.split(",")]
    _warm()
    random.Random(0).shuffle(kinds)  # so that a run that is ended early has met some of each kind
    if asked.search:
        imported = [k for k in kinds if rows.get(k, {}).get("end") in ("equal", "drawn")]
        for kind in imported[: asked.search]:
            rows[kind]["search"] = in_process(searched, kind, asked.limit)
            print(json.dumps(rows[kind]["search"]), flush=True)
        kinds = []
        ordered = [rows[k] for k in sorted(rows)]
        out.write_text(json.dumps({**old, "rows": ordered}, indent=1) + "\n", encoding="utf-8")
    for kind in kinds:
        rows[kind] = in_process(one, kind, asked.limit)
        shown = {k: rows[kind].get(k) for k in ("type", "end", "class", "said", "loss", "gradient", "worst")}
        print(json.dumps({k: v for k, v in shown.items() if v is not None}), flush=True)
        import transformers

        head = {**old, "date": date.today().isoformat(), "transformers": transformers.__version__}
        ordered = [rows[k] for k in sorted(rows)]
        out.write_text(json.dumps({**head, "rows": ordered}, indent=1) + "\n", encoding="utf-8")
    print(Counter(r["end"] for r in rows.values()))


if __name__ == "__main__":
    main()
