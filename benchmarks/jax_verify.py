"""Training steps of other libraries' models, as `plan.jax` makes them, through the real TPU compiler.

    python benchmarks/jax_verify.py CORPUS.py [NUMBER...] [--out FILE.json]

CORPUS.py is what `benchmarks/jax_models.py` takes. Compiled is the user's own function in `train_step`
with the plan's shardings, not our program; `memory` and `compute` are our prediction over the compiler's, and
`moved` has bytes that a device puts into collectives, by kind and group size (`layoutopt verify`). Every step
is a process of its own: libraries patch each other. Nothing is fitted to these programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "benchmarks" / "results" / "jax_verify.json"
TOPOLOGY = "v5e:2x4"
WHOLE = "batch:data;heads:model;d_ff:model"


@dataclass(frozen=True)
class Step:
    """A model of the corpus, and what is decided about it."""

    model: str
    mesh: str
    layout: str
    stage: int = 0
    recompute: str = ""

    def __str__(self) -> str:
        more = f" zero{self.stage}" * bool(self.stage) + f" recompute {self.recompute}" * bool(self.recompute)
        return f"{self.model}, {self.layout}{more} on {self.mesh}"


STEPS = (
    Step("hf_gpt2", "data:8", "batch:data", 1),
    Step("eqx_transformer", "data:2;model:4", WHOLE),
    Step("hk_transformer", "data:8", "batch:data", 3, "layers"),
    Step("hk_transformer", "data:2;model:4", WHOLE),
    Step("linen_scan_lm", "data:4;model:2", WHOLE),
    Step("hf_bert", "data:8", "batch:data", 3),
    Step("hf_vit", "data:8", "batch:data"),
    Step("linen_scan_lm", "data:8", "batch:data", 2),
)


def compiled(corpus: str, step: Step) -> dict[str, Any]:
    """What the compiler makes of a step, beside what is predicted."""
    import layoutopt
    from benchmarks.jax_models import corpus_of, roles
    from costmodels.hardware import load_hardware
    from layoutopt.analysis.verify import generation, verify
    from layoutopt.optimize.evaluation.evaluator import evaluate
    from mesh_tf_core import Layout, Mesh, Options

    loss, args, _ = corpus_of(corpus).build(step.model)
    params, state, batch, rng = roles(args)
    given = {name: tree for name, tree in (("state", state), ("rng", rng)) if tree is not None}
    model = layoutopt.from_jax(loss, params, batch, name=step.model, **given)
    mesh, layout = Mesh(step.mesh), Layout(step.layout)
    trained = [v.name for v in model.graph.variables.values() if v.trainable and len(v.shape)]
    storage = dict.fromkeys(trained, step.stage) if step.stage else {}
    options = Options(storage, frozenset(filter(None, [step.recompute])))
    hardware = load_hardware(generation(TOPOLOGY).hardware)
    evaluation = evaluate(model, mesh, layout, hardware, options)
    found = verify(
        evaluation, TOPOLOGY, hardware, lambda devices: model.step_on(mesh, layout, options, devices)
    )
    row: dict[str, Any] = {"step": str(step), "parameters": model.parameters}
    made = found.compiled
    if made is None:
        return {**row, "refused": found.refusal and found.refusal.reason}
    return {
        **row,
        "compile_seconds": round(made.seconds),
        "peak_memory_bytes": {"predicted": evaluation.memory.peak, "compiler": made.peak_bytes},
        "compute_seconds": {"predicted": found.compute_seconds, "compiler": made.compute_seconds},
        "unknown_loops": made.read.unknown_loops,
        "libraries": made.read.libraries,
        "moved": [
            {
                "family": m.family,
                "group_size": m.group_size,
                "predicted": [m.count.predicted, m.bytes.predicted],
                "compiler": [m.count.compiler, m.bytes.compiler],
            }
            for m in found.moved
        ],
        "text": made.text,
    }


def ratio(row: dict[str, Any], what: str) -> float:
    found: float = row[what]["predicted"] / row[what]["compiler"]
    return found


def said(row: dict[str, Any]) -> str:
    """A row for people."""
    if "refused" in row:
        return f"{row['step']}: refused: {row['refused']}"
    moved = ", ".join(
        f"{m['family']}/{m['group_size']} {m['predicted'][0]}x {m['predicted'][1] / 2**20:.1f} MiB "
        f"({m['compiler'][0]}x {m['compiler'][1] / 2**20:.1f})"
        for m in row["moved"]
    )
    return (
        f"{row['step']}: memory {ratio(row, 'peak_memory_bytes'):.2f}, "
        f"compute {ratio(row, 'compute_seconds'):.2f}; {moved}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("corpus")
    parser.add_argument("numbers", nargs="*", type=int, help="of the steps, from 0")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--texts", type=Path, help="a folder for the compiled programs")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print("ROW " + json.dumps(compiled(args.corpus, STEPS[args.one])))
        return
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {row["step"]: row for row in known}
    for number in args.numbers or range(len(STEPS)):
        command = [sys.executable, __file__, args.corpus, "--one", str(number)]
        environment = {**os.environ, "TPU_STDERR_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        line = next((x for x in done.stdout.splitlines() if x.startswith("ROW ")), None)
        if line is None:
            print(f"{STEPS[number]}: {(done.stderr.strip().splitlines() or ['?'])[-1]}", flush=True)
            continue
        row = json.loads(line[4:])
        text = row.pop("text", "")
        if args.texts is not None:
            (args.texts / f"{number}.hlo").write_text(text)
        rows[row["step"]] = row
        print(said(row), flush=True)
        write(args.out, [rows[str(step)] for step in STEPS if str(step) in rows])


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    whole = [row for row in rows if "refused" not in row]
    summary = {
        f"{what}_median_error": statistics.median(abs(ratio(row, what) - 1) for row in whole)
        for what in ("peak_memory_bytes", "compute_seconds")
    }
    content = {"date": date.today().isoformat(), "topology": TOPOLOGY, "summary": summary, "rows": rows}
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
