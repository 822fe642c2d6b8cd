"""Programs through the real TPU compiler, beside what is predicted: collectives, peak memory, compute time.

    python benchmarks/verify.py [--large] [--only N ...] [--kinds [NAME ...]] [--rescore] [--out FILE.json]

Every row is a whole training step (forward, backward, optimizer) compiled ahead of time; no TPU is needed.
`collectives` compares bytes that a device puts in, by kind and group size; `memory` and `compute` are our
prediction over the compiler's, with the preset as it comes and without attention, which is a library's
kernel that the compiler estimates nothing of; `calibrated` is `compute` with the profile of
`layoutopt calibrate --target`, from the estimates that ship. Nothing is fitted to these programs. With
`--kinds`, one small program of each kind of decision (ring attention, hybrid sharding, ...) instead; they are
no part of the summary.

What the compiler said is kept in FILE with a digest of what it was given, so that a pair is compiled again
only if that (its StableHLO) or the compiler has changed; prices are always today's. `--rescore` compiles
nothing: rows that would have to be are marked `stale` and are no part of the summary, which counts them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import known as errors_known  # noqa: E402
from benchmarks.verify_pairs import KINDS, PAIRS, Pair  # noqa: E402
from costmodels.calibration.tpu import calibrate_tpu, with_numbers  # noqa: E402
from costmodels.calibration.tpu_compiled import COMPILER, shipped_probes  # noqa: E402
from costmodels.hardware import Hardware, load_hardware  # noqa: E402
from costmodels.pricing.pricer import price  # noqa: E402
from layoutopt.analysis.verify import collectives, estimated, generation, moved, verify  # noqa: E402
from layoutopt.models.loading import load_model  # noqa: E402
from layoutopt.optimize.evaluation.evaluation import Evaluation  # noqa: E402
from layoutopt.optimize.evaluation.evaluator import evaluate  # noqa: E402
from mesh_tf_core import Layout, Mesh, Options  # noqa: E402
from mesh_tf_core.engines.jax.compile import stablehlo  # noqa: E402
from mesh_tf_core.engines.jax.hlo import HloCollective  # noqa: E402
from mesh_tf_core.ir.program import Program  # noqa: E402
from mesh_tf_core.lower.storage import read_stage  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "verify.json"
_SETS = dict.fromkeys(("recompute", "collective_matmul"), frozenset)
_OPTIONS = {"context": lambda pairs: frozenset(map(tuple, pairs)), **_SETS}
"""How fields of `Options` are read from JSON, if it does not have them as they are."""
SIDES = (
    ("peak_memory_bytes", "predicted"),
    ("compute_seconds", "predicted"),
    ("compute_seconds", "calibrated"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--large", action="store_true", help="also the models of a billion parameters")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the pairs")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="one program of each kind of decision")
    parser.add_argument("--rescore", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    file = json.loads(args.out.read_text()) if args.out.exists() else {}
    known = {key(row): row for row in (*file.get("rows", ()), *file.get("kinds", ()))}
    numbers = [i for i, p in enumerate(PAIRS) if args.large or args.rescore or not p.large]
    wanted: dict[int | str, Pair] = {i: PAIRS[i] for i in (numbers if args.only is None else args.only)}
    if args.kinds is not None:
        wanted = {name: KINDS[name] for name in args.kinds or KINDS}
    head = f"{'':>2} {'topology':<10} {'model':<20} {'mesh':<16} {'layout':<58} {'params':>8}"
    print(f"{head}  compile  memory  compute  calibrated  collectives")
    for number, pair in wanted.items():
        before = known.get(key(described(pair)))
        found = row(pair, before and before["compiler"], args.rescore)
        if found is None:
            print(f"{number:>2} not compiled, or the compiler would be given something else now", flush=True)
            if before:
                known[key(before)] = {**before, "stale": True}
        else:
            known[key(found)] = found
            print(f"{number:>2} {line(found)}", flush=True)
        write(args.out, kept(known, PAIRS), kept(known, KINDS.values()))
    if args.out == OUT:
        errors_known.write()
    print(summary(kept(known, PAIRS if args.kinds is None else KINDS.values())))


def kept(known: dict[str, dict[str, Any]], pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """The rows that there are of some pairs."""
    return [known[k] for p in pairs if (k := key(described(p))) in known]


def write(out: Path, rows: list[dict[str, Any]], kinds: list[dict[str, Any]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"date": date.today().isoformat(), "command": "python benchmarks/verify.py --large"}
    content["summary"] = summary(rows)
    out.write_text(json.dumps({**content, "rows": rows, "kinds": kinds}, indent=1) + "\n")


def described(pair: Pair) -> dict[str, Any]:
    """What a row says of its pair."""
    return {
        "topology": pair.topology,
        "model": pair.model,
        "mesh": pair.mesh,
        "layout": pair.layout,
        "stage": pair.stage,
        "hparams": pair.hparams,
        **({"options": pair.options} if pair.options else {}),
    }


def key(row: dict[str, Any]) -> str:
    parts = [row[part] for part in described(PAIRS[0])]
    return json.dumps([*parts, *([row["options"]] if "options" in row else [])], sort_keys=True)


def row(pair: Pair, said: dict[str, Any] | None, rescore: bool) -> dict[str, Any] | None:
    """One pair: what the compiler says, or `said` of the same program before, and what we predict."""
    model = load_model(pair.model, pair.hparams).model
    hardware = load_hardware(generation(pair.topology).hardware)
    trained = [v.name for v in model.graph.variables.values() if v.trainable and len(v.shape)]
    others = {name: _OPTIONS.get(name, lambda x: x)(of) for name, of in pair.options.items()}
    options = Options(dict.fromkeys(trained, pair.stage) if pair.stage else {}, **others)
    evaluation = evaluate(model, Mesh(pair.mesh), Layout(pair.layout), hardware, options)
    given = digest(evaluation.program)
    if said is None or said["given"] != given or not (rescore or said["versions"] == versions()):
        if rescore:
            return None
        said = compared(pair, evaluation, hardware, given)
    found = tuple(HloCollective(*c) for c in said.get("collectives", ()))
    rows = moved(collectives(evaluation.program), found)
    libraries = said.get("libraries", 0)
    seconds = said["cycles"] / generation(pair.topology).clock(hardware) if "cycles" in said else None
    return {
        **described(pair),
        "parameters": model.parameters,
        "compiler": said,
        "same_collectives": seconds is not None and all(m.same for m in rows),
        "moved": [
            {
                "family": m.family,
                "group_size": m.group_size,
                "predicted": [m.count.predicted, m.bytes.predicted],
                "compiler": [m.count.compiler, m.bytes.compiler],
            }
            for m in rows
        ],
        "peak_memory_bytes": {"compiler": said.get("peak_bytes"), "predicted": evaluation.memory.peak},
        "compute_seconds": {
            "compiler": seconds,
            "predicted": estimated(evaluation.cost, hardware, libraries),
            "calibrated": calibrated_seconds(evaluation.program, hardware, libraries),
        },
    }


def digest(program: Program) -> str:
    """Of what the compiler is given."""
    return hashlib.sha256(stablehlo(program).encode()).hexdigest()[:16]


def compared(pair: Pair, evaluation: Evaluation, hardware: Hardware, given: str) -> dict[str, Any]:
    """What the compiler says of a program (whose digest is `given`), as JSON."""
    found = verify(evaluation, pair.topology, hardware)
    said = {"date": date.today().isoformat(), "versions": versions(), "given": given}
    if found.compiled is None:
        return {**said, "refused": found.refusal and found.refusal.reason}
    made, clock = found.compiled, generation(pair.topology).clock(hardware)
    return {
        **said,
        "compile_seconds": round(made.seconds, 1),
        "cycles": round(made.compute_seconds * clock),
        "clock": clock,
        "peak_bytes": made.peak_bytes,
        "allocated_bytes": made.allocated_bytes,
        "unknown_loops": made.read.unknown_loops,
        "libraries": made.read.libraries,
        "collectives": [[c.kind, c.group_size, c.tensors, c.bytes, c.times] for c in made.read.collectives],
    }


def versions() -> dict[str, str]:
    return {package: version(package) for package in COMPILER}


def calibrated_seconds(program: Program, hardware: Hardware, libraries: int) -> float | None:
    """Predicted compute by the profile fitted to the compiler's estimates of probes; None if none ship."""
    if shipped_probes(hardware.name) is None:
        return None
    machine = with_numbers(hardware, calibrate_tpu(hardware.name).fit.numbers)
    return estimated(price(program, machine), machine, libraries)


def ratio(row: dict[str, Any], name: str, side: str = "predicted") -> float | None:
    """Predicted over the compiler's; None without one of them."""
    found, compiler = row[name][side], row[name]["compiler"]
    return found / compiler if found is not None and compiler else None


def line(found: dict[str, Any]) -> str:
    layout = found["layout"] + (f" {read_stage(found['stage']).short}" if found["stage"] else "")
    start = f"{found['topology']:<10} {Path(found['model']).stem:<20} {found['mesh']:<16} {layout:<58}"
    start += f" {found['parameters'] / 1e6:>7.0f}M"
    if "refused" in found["compiler"]:
        return f"{start}  refused: {found['compiler']['refused']}"
    memory, compute = ratio(found, "peak_memory_bytes"), ratio(found, "compute_seconds")
    fitted = ratio(found, "compute_seconds", "calibrated")
    last = f"{'-':>11}" if fitted is None else f"{fitted:10.2f}x"
    different = [
        f"{m['family']}/{m['group_size']} {m['compiler'][1] / m['predicted'][1]:.3f}x"
        if m["predicted"][1]
        else f"{m['family']}/{m['group_size']} only compiled"
        for m in found["moved"]
        if not m["predicted"][1] or abs(m["compiler"][1] / m["predicted"][1] - 1) > 0.01
    ]
    same = "same" if not different else ", ".join(different)
    took = found["compiler"]["compile_seconds"]
    return f"{start}  {took:6.0f}s  {memory:5.2f}x  {compute:6.2f}x {last}  {same}"


def ninety(errors: list[float]) -> float:
    """The least error that nine of ten are not above."""
    return sorted(errors)[math.ceil(0.9 * len(errors)) - 1]


def summary(rows: list[dict[str, Any]]) -> str:
    compiled = [r for r in rows if "refused" not in r["compiler"] and "stale" not in r]
    same = sum(r["same_collectives"] for r in compiled)
    parts = [f"{len(compiled)} of {len(rows)} compiled, {same} with the predicted collectives"]
    if stale := sum("stale" in r for r in rows):
        parts[0] += f", {stale} left out that the compiler would be given otherwise now"
    for name, side in SIDES:
        errors = [abs(math.log(found)) for r in compiled if (found := ratio(r, name, side))]
        if errors:
            typical, usual, most = (100 * (math.exp(f(errors)) - 1) for f in (statistics.median, ninety, max))
            said = f"median {typical:.1f} %, 90 % within {usual:.0f} %, at most {most:.0f} %"
            parts.append(f"error of {name} {side}: {said}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
