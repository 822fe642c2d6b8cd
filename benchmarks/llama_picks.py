"""Llama 3 8B as public recipes train it: what a search picks, what practice runs, and the prices of both.

    .venv/bin/python -m benchmarks.llama_picks [--only NAME ...] [--time-limit SECONDS]

Batch, length and layout of practice are those of the runs named in `CASES`; where no run of this model on a
machine is known, practice is what others of its size do there. Presets are priced as they ship. The last
table is the most that any published run of each chip reached; presets carry these numbers (`published_mfu`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import layoutopt
import mesh_tf_core as mtf
from benchmarks.framework_rows import rows, tables
from benchmarks.published import runs
from benchmarks.published_rows import Run, stored
from costmodels import Hardware, load_hardware
from costmodels.utilisation import model_flops, utilisation
from examples.transformer_lm import model as transformer
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.units import bytes_text, share_text

PARTS = (1, 2, 3, 4, 8, 16, 32)
"""Numbers of microbatches that are searched: recipes accumulate more than a search's default of up to 8."""
OUT = Path(__file__).parent / "results" / "llama_picks.json"
LLAMA: dict[str, Any] = {
    "layers": 32,
    "d_model": 4096,
    "d_kv": 128,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14336,
    "gated": True,
    "vocab": 128256,
    "length": 8192,
    "positions": "rotary",
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Case:
    """One machine, and how practice uses it.

    Attributes:
      batch: sequences of a step.
      mesh, layout, stage, recompute, microbatches: of practice.
      seconds: of practice's step, as published; None: nobody published this model there.
      source: of the practice.
      why: what practice does otherwise than the program that is priced.
    """

    name: str
    hardware: str
    devices: int
    batch: int
    mesh: str
    layout: str
    stage: int
    recompute: bool
    microbatches: int
    seconds: float | None
    source: str
    why: str


NEMO = "batch:data;length:context;memory_length:context"
CASES = (
    Case(
        "8 v6e",
        "tpu-v6e",
        8,
        24,
        "data:8",
        "batch:data",
        3,
        True,
        1,
        3.443,
        "MaxText, AI-Hypercomputer/tpu-recipes training/trillium/Llama3.1-8B-MaxText/v6e-8 @10ca5b9",
        "keeps what enters a layer, queries, keys, values and attention's result in the host's memory",
    ),
    Case(
        "256 v5p",
        "tpu-v5p",
        256,
        1024,
        "data:256",
        "batch:data",
        3,
        False,
        1,
        None,
        "MaxText splits variables over all chips; 32B to 128B on v5p-128 to v5p-512 "
        "(src/maxtext/configs/tpu/v5p/README.md) reach 67 to 71% MFU, with tensor parallelism of 4 or 8",
        "no run of this model on this slice is known",
    ),
    Case(
        "8 H100",
        "h100",
        8,
        128,
        "data:4;context:2",
        NEMO,
        1,
        False,
        32,
        12.27,
        "NeMo 25.04, NVIDIA/dgxc-benchmarking llama3.1/README.md @741c886",
        "one sequence at a time on every pair of GPUs, keys and values passed round the pair",
    ),
    Case(
        "64 H100",
        "h100",
        64,
        1024,
        "data:32;context:2",
        NEMO,
        1,
        False,
        32,
        12.33,
        "NeMo 25.04, NVIDIA/dgxc-benchmarking llama3.1/README.md @741c886",
        "one sequence at a time on every pair of GPUs, keys and values passed round the pair",
    ),
)


@dataclass(frozen=True)
class Priced:
    """A layout and its price, of which `recompute_seconds` make a layer's values again."""

    mesh: str
    layout: str
    decided: str
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    recompute_seconds: float
    mfu: float
    tokens_per_second: float
    peak_memory_bytes: int
    fits: bool

    @classmethod
    def of(cls, found: Evaluation, decided: str, limit: float) -> Priced:
        p, program = found.predicted, found.program
        assert p.mfu is not None and p.tokens_per_second is not None
        return cls(
            str(program.mesh),
            str(program.layout),
            decided,
            p.step_seconds,
            p.compute_seconds,
            p.exposed_communication_seconds,
            found.cost.by(lambda x: x.origin.phase).get("recompute", 0.0),
            p.mfu,
            p.tokens_per_second,
            p.peak_memory_bytes,
            p.peak_memory_bytes <= limit,
        )

    def text(self) -> str:
        share = share_text(self.recompute_seconds, self.step_seconds)
        return (
            f"{self.mesh}  {self.layout}  {self.decided or 'as it is'}\n"
            f"        {self.step_seconds:.3f} s ({self.exposed_communication_seconds:.3f} exposed, {share} "
            f"recomputation), {share_text(self.mfu, 1)} MFU, {self.tokens_per_second:,.0f} tokens/s, "
            f"{bytes_text(self.peak_memory_bytes)}{'' if self.fits else ': does not fit'}"
        )


@dataclass(frozen=True)
class Found:
    """What came of a case; `published_mfu` is of the same model FLOPs and the published seconds."""

    case: Case
    status: str
    gap: float | None
    search_seconds: float | None
    pick: Priced
    practice: Priced
    published_mfu: float | None
    notes: list[str] = field(default_factory=list)


def solved(case: Case, limit: float) -> Found:
    """Searches one case and prices its practice."""
    hardware = load_hardware(case.hardware)
    model = transformer(**LLAMA, batch=case.batch)
    asked = {"devices": case.devices, "hardware": hardware, "microbatches": PARTS, "time_limit": limit}
    asked["allow"] = "usual"
    plan = layoutopt.search(model, **asked)
    room = hardware.usable_memory_bytes
    picked = evaluate(model, plan.mesh, plan.layout, hardware, plan.options)
    loops = frozenset({"layers"} if case.recompute else ())
    options = mtf.Options(stored(model, case.stage), loops, case.microbatches)
    practice = evaluate(model, mtf.Mesh(case.mesh), mtf.Layout(case.layout), hardware, options)
    again = "; recompute layers" if case.recompute else ""
    said = f"zero{case.stage}{again}; {case.microbatches} microbatches"
    flops = picked.predicted.model_flops or 0.0
    reached = utilisation({"bfloat16": flops}, hardware, case.devices, case.seconds) if case.seconds else None
    return Found(
        case,
        plan.solver.status,
        plan.solver.gap,
        plan.solver.wall_seconds,
        Priced.of(picked, plan.data.in_short(), room),
        Priced.of(practice, said, room),
        reached,
        plan.data.notes,
    )


def published_mfu(run: Run) -> float:
    """MFU of a published run, from its seconds."""
    program, hardware = run.program(), load_hardware(run.hardware)
    unsplit = tuple(replace(v, splits=((),) * len(v.splits)) for v in program.values)
    return utilisation(
        model_flops(replace(program, values=unsplit)), hardware, program.mesh.devices, run.seconds
    )


def framework_runs() -> Iterator[Run]:
    """The published runs of dense models in bfloat16 under their frameworks, without stages."""
    for row in (row for name in tables() for row in rows(name)):
        plain = row.family != "moe" and not row.stages and "float8" not in row.sizes
        if plain and row.seconds and row.ran:
            mesh, layout = mtf.Mesh(row.mesh), mtf.Layout(row.layout)
            program = partial(row.model_built().lower, mesh, layout)
            yield Run(row.table, row.name, row.model, "", row.seconds, program, row.hardware, row.framework)


def best_published() -> dict[str, tuple[float, str]]:
    """Preset -> the most that a published run of its chip reached, and which; without vTrain's many small
    ones."""
    found: dict[str, tuple[float, str]] = {}
    for run in (*runs(), *framework_runs()):
        if "vtrain" not in run.table:
            preset = load_hardware(run.hardware).name.partition(",")[0]
            own = published_mfu(run), f"{run.table}: {run.name}"
            found[preset] = max(found.get(preset, own), own)
    return found


def shown(found: Found) -> Iterator[str]:
    """A case in lines of text."""
    case, published = found.case, found.published_mfu
    gap = "" if found.gap is None else f", gap {found.gap:.2g}"
    yield f"\nLlama 3 8B on {case.name}: batch {case.batch}, length 8192 ({found.status}{gap})"
    yield f"    pick      {found.pick.text()}"
    yield f"    practice  {found.practice.text()}"
    if case.seconds and published:
        yield f"    published {case.seconds:.3f} s, {share_text(published, 1)} MFU: {case.source}"
    else:
        yield f"    published {case.source}"
    yield f"              {case.why}"
    for note in found.notes:
        yield f"    note: {note}"


def checked(best: dict[str, tuple[float, str]]) -> Iterator[str]:
    """The best published run of every chip beside what its preset says."""
    yield "\nThe most that a published run reached, and what the preset says"
    for preset, (mfu, run) in sorted(best.items()):
        hardware: Hardware = load_hardware(preset)
        said = hardware.chip.published_mfu
        known = share_text(said.value, 1) if said else "none"
        yield f"    {preset:12} {share_text(mfu, 1):>6}  {known:>6}  {run}"


def keep(part: str, found: dict[str, Any]) -> None:
    """Adds to the results; what was found before of others stays."""
    known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    known.setdefault(part, {}).update(found)
    OUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", default=[], help="only this case (repeatable)")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of each search")
    args = parser.parse_args()
    for case in CASES:
        if not args.only or case.name in args.only:
            found = solved(case, args.time_limit)
            print("\n".join(shown(found)), flush=True)
            said = {"date": datetime.now(UTC).date().isoformat(), **asdict(found)}
            keep("cases", {case.name: said})
    if not args.only:
        best = best_published()
        print("\n".join(checked(best)))
        keep("best_published_mfu", {name: {"mfu": mfu, "run": run} for name, (mfu, run) in best.items()})


if __name__ == "__main__":
    main()
