"""Imports modules that people write and the importer has not met, compares them with PyTorch, and searches.

    python -m benchmarks.torch_fresh [NAME...] [--out FILE] [--as first|mended]

A row says how far a module of `tests.importers.torch_fresh_texts` comes: "refused" (with the error's text),
"crash" (not a UserError), "parameters" (another number of them), "different" (loss or a gradient is off by
more than 1e-5 on one device, or under one of two random layouts of 2 x 2), "not searched" (no plan for 64
H100) or "good". `--as first` stores the rows of the first run, before anything was mended.
"""

from __future__ import annotations

import argparse
import json
import random
import traceback
import zlib
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.torch_unseen import in_process, numbers, rounding

OUT = Path(__file__).resolve().parent / "results" / "torch_fresh.json"
BOUND, ROWS, SEARCHED_ROWS, LIMIT, SEARCHED = 1e-5, 8, 512, 240, 60


def layouts(model: Any, seed: int, count: int) -> list[str]:
    """Random legal layouts of a mesh of 2 x 2, each of which splits by both axes."""
    import mesh_tf_core as mtf

    rng, found = random.Random(seed), list[str]()
    dims = [name for name, sizes in model.step_graph.dims().items() if all(n % 2 == 0 for n in sizes)]
    for _ in range(400):
        text = ";".join(f"{rng.choice(dims)}:{axis}" for axis in ("x", "y"))
        try:
            model.lower(mtf.Mesh("x:2;y:2"), mtf.Layout(text))
        except mtf.UserError:
            continue
        found = list(dict.fromkeys([*found, text]))
        if len(found) == count:
            break
    return found


def one(name: str) -> dict[str, Any]:
    """What is measured of a module."""
    import torch

    import layoutopt
    from mesh_tf_core import Options, UserError
    from tests.importers.torch_fresh_texts import FRESH

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, batch = FRESH[name](ROWS)
    row: dict[str, Any] = {"type": name, "parameters": sum(p.numel() for p in module.parameters())}
    step = "refused"
    try:
        model = layoutopt.from_torch(module, dict(batch))
        row["imported"] = sum(p.numel() for p in _once(model, module))
        row["notes"] = list(model.notes(Options()))
        row["loops"] = [len(run.layers) for run in model.origin.rerolled.runs]
        if row["imported"] != row["parameters"]:
            return row | {"end": "parameters"}
        step = "different"
        row |= numbers(module, batch, None, model)
        row["rounding"] = rounding(module, batch, None)
        bound = max(BOUND, min(4 * row["rounding"], 1e-3))
        row["layouts"] = {}
        good = max(row["loss"], row["gradient"]) < bound
        for text in layouts(model, zlib.crc32(name.encode()), 2):
            model = layoutopt.from_torch(module, dict(batch))
            row["layouts"][text] = found = numbers(module, batch, None, model, "x:2;y:2", text)
            good = good and max(found["loss"], found["gradient"]) < bound
        if not good or len(row["layouts"]) < 2:
            return row | {"end": "different"}
        step = "not searched"
        module, batch = FRESH[name](SEARCHED_ROWS)
        model = layoutopt.from_torch(module, dict(batch))
        plan = layoutopt.search(
            model, devices=64, hardware="h100", framework="torch", time_limit=SEARCHED, alternatives=False
        )
        row |= {"status": plan.solver.status, "plan": f"{plan.mesh} {plan.layout}"}
        row["placements"] = len(plan.torch.placements())
    except UserError as error:
        return row | {"end": step, "said": str(error)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        return row | {"end": "crash", "said": f"{type(error).__name__}: {error} ({where}) in {step}"}
    return row | {"end": "good"}


def _once(model: Any, module: Any) -> list[Any]:
    """The module's parameters that the model has, each once."""
    known = model.styles.parameters
    return list({id(p): p for n, p in module.named_parameters() if n in known}.values())


def main() -> None:
    from tests.importers.torch_fresh_texts import FRESH

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", default=str(OUT))
    parser.add_argument("--as", dest="of", choices=("first", "mended"), default="mended")
    asked = parser.parse_args()
    out = Path(asked.out)
    stored = json.loads(out.read_text()) if out.exists() else {}
    rows = {r["type"]: r for r in stored.get(asked.of, [])}
    for name in asked.names or FRESH:
        rows[name] = in_process(one, name, LIMIT)
        print(json.dumps({k: v for k, v in rows[name].items() if k != "notes"}), flush=True)
        stored |= {"date": date.today().isoformat(), asked.of: [rows[n] for n in FRESH if n in rows]}
        out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(Counter(r["end"] for r in rows.values()))


if __name__ == "__main__":
    main()
