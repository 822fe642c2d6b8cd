"""Large models on the machines that they are known from: what a search picks, and what practice runs.

    .venv/bin/python -m benchmarks.large_models [--only NAME ...] [--time-limit SECONDS]

Published seconds, where there are any, are of practice's layout; where practice does what the priced program
does not, `why` says so. Presets are priced as they ship; no run here had a part in any of their numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import layoutopt
import mesh_tf_core as mtf
from benchmarks.llama_picks import Priced
from benchmarks.published_models import language_model
from benchmarks.published_rows import stored
from benchmarks.published_tpu import SPLIT
from costmodels import load_hardware
from costmodels.utilisation import utilisation
from examples.deepseek_lm import v3
from examples.transformer_lm import llama3_405b
from layoutopt.optimize.evaluator import evaluate

OUT = Path(__file__).parent / "results" / "large_models.json"
ANSWERED = "OPTIMAL"


@dataclass(frozen=True)
class Case:
    """A model on a machine.

    Attributes:
      searched: the mesh of the search.
      allowed: whether layers may run again in it, or keep some values then.
      framework, schedule: of both; "": none; `trainer`: those of practice, where they are others.
      mesh, layout, stage, recompute, microbatches: of practice.
      tokens_per_second: of practice, as published; None: of this machine nobody did.
      source: of the practice.
      why: what practice does otherwise than the program that is priced.
    """

    name: str
    model: Callable[..., mtf.Model]
    hparams: dict[str, Any]
    hardware: str
    devices: int
    searched: str
    mesh: str
    layout: str
    stage: int | str
    recompute: str
    microbatches: int
    tokens_per_second: float | None
    source: str
    why: str
    allowed: tuple[bool | str, ...] = (False, "selective", True)
    framework: str | None = None
    schedule: str = ""
    trainer: tuple[str, str] | None = None


MAXTEXT = "MaxText, AI-Hypercomputer/tpu-recipes training/v5p"
GSPMD_1T: dict[str, Any] = {
    "layers": 128,
    "d_model": 16384,
    "d_kv": 128,
    "heads": 256,
    "d_ff": 131072,
    "gated": True,
    "vocab": 32000,
    "length": 512,
    "batch": 64,
    "tied": True,
    "dtype": "bfloat16",
    "optimizer": "adafactor",
    "float32_softmax": True,
    "width": "width",
}
"""`DenseLm1T16x16` of benchmarks/data/gspmd_tpuv3.csv, with four times its batch."""
CASES = (
    Case(
        "Llama 3.1 405B, 512 v5p",
        llama3_405b,
        {},
        "tpu-v5p",
        512,
        "x:8;y:8;z:8",
        "data:512",
        "batch:data",
        3,
        "layers:keep=attention",
        1,
        1024 * 8192 / 131.474,
        f"{MAXTEXT}/Llama3.1-405B-MaxText @1dee47d: 131.474 s",
        "keeps attention's results in the host's memory, here on the chip: 63 GiB",
    ),
    Case(
        "GPT of 1T parameters, 2,048 cores of TPU v3",
        language_model,
        GSPMD_1T,
        "tpu-v3",
        2048,
        "data:32;model:64",
        "data:32;model:64",
        SPLIT,
        3,
        "layers",
        1,
        None,
        "GSPMD's layout, lingvo DenseLm1T16x16 @095bbe1, on four times the cores with four times the batch; "
        "on 512 cores 1,400 tokens/s were published and 1,420 are predicted",
        "",
    ),
    Case(
        "DeepSeek-V3's sizes, 512 v5p",
        v3,
        {"batch": 3072, "length": 8192},
        "tpu-v5p",
        512,
        "data:64;model:8",
        "data:512",
        "batch:data;expert_batch:data",
        3,
        "layers",
        1,
        3072 * 8192 / 90.668,
        f"{MAXTEXT}/DeepSeek3-671B-MaxText @6c62789: 90.668 s",
        "keeps each layer's input and attention's output in the host's memory, here inputs on the chip",
        (True,),
    ),
    Case(
        "DeepSeek-V3's sizes, 2,048 H100",
        v3,
        {"batch": 16384, "length": 4096, "float8": "blocks", "moments": "bfloat16"},
        "h100",
        2048,
        "pipe:16;data:2;expert:64",
        "pipe:16;data:2;expert:64",
        "layers:pipe;batch:data+expert;expert_batch:data;experts:expert",
        1,
        "layers:keep=products+attention",
        128,
        1e12 / (180e3 * 3600 / 2048),
        "DeepSeek-AI 2024, arXiv 2412.19437, sections 1 and 3: 180 thousand GPU hours for 10^12 tokens on "
        "2,048 H800, taken for this batch (theirs grows to 15,360 sequences)",
        "has layers of its stages in another division; exchanges are hidden as DeepSeek-AI says; H800 have "
        "slower links within a node",
        ("selective", True),
        "megatron:dispatcher=flex",
        "1f1b",
        ("examples/frameworks/dualpipe.json", "dualpipe"),
    ),
)


def solved(case: Case, limit: float) -> dict[str, Any]:
    """Searches one case and prices its practice."""
    hardware, model = load_hardware(case.hardware, case.framework), case.model(**case.hparams)
    room = hardware.usable_memory_bytes
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "parameters": model.parameters,
        "tokens": model.tokens,
        **{k: v for k, v in asdict(case).items() if k not in ("model", "name")},
    }
    how: dict[str, Any] = {"schedule": case.schedule} if case.schedule else {}
    software, schedule = case.trainer or (case.framework, case.schedule)
    options = mtf.Options(
        stored(model, case.stage),
        frozenset({case.recompute}),
        case.microbatches,
        **({"schedule": schedule} if schedule else {}),
    )
    trainer = load_hardware(case.hardware, software)
    practice = evaluate(model, mtf.Mesh(case.mesh), mtf.Layout(case.layout), trainer, options)
    found["practice"] = asdict(Priced.of(practice, f"zero{case.stage}; recompute {case.recompute}", room))
    began = time.process_time()
    plan = layoutopt.search(
        model,
        mesh=case.searched,
        hardware=case.hardware,
        framework=case.framework,
        recompute=case.allowed,
        **({"pipeline": "layers", "microbatches": (case.microbatches,)} | how if how else {}),
        allow="usual",
        time_limit=limit,
        alternatives=False,
    )
    took = time.process_time() - began
    picked = evaluate(model, plan.mesh, plan.layout, hardware, plan.options)
    found["pick"] = asdict(Priced.of(picked, plan.data.in_short(), room))
    found["solver"] = {
        "status": plan.solver.status,
        "gap": plan.solver.gap,
        "wall_seconds": plan.solver.wall_seconds,
        "cpu_seconds": took,
    }
    if case.tokens_per_second:
        seconds = (model.tokens or 0) / case.tokens_per_second
        flops = {"bfloat16": picked.predicted.model_flops or 0.0}
        found["published"] = {"seconds": seconds, "mfu": utilisation(flops, hardware, case.devices, seconds)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", default=[], help="only this case (repeatable)")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of each search")
    args = parser.parse_args()
    known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for case in CASES:
        if not args.only or any(name in case.name for name in args.only):
            known[case.name] = solved(case, args.time_limit)
            OUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(known[case.name], indent=1), flush=True)


if __name__ == "__main__":
    main()
