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
from dataclasses import asdict, dataclass, field, replace
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
from examples.deepseek_lm import v3
from examples.transformer_lm import llama3_405b
from layoutopt.optimize.evaluation.evaluator import evaluate

OUT = Path(__file__).parent / "results" / "large_models.json"
ANSWERED = "OPTIMAL"


@dataclass(frozen=True)
class Case:
    """A model on a machine.

    Attributes:
      searched: the mesh of the search.
      allowed: whether layers may run again in it, or keep some values then.
      framework, schedule, pins: of both; none by default.
      mesh, layout, stage, recompute (with ";" between loops), microbatches: of practice.
      tokens_per_second: of practice, as published; None: of this machine nobody did.
      source: of the practice.
      why: what practice does otherwise than the program that is priced.
      changes: of one decision of practice each, in words: what other fields of the case are then.
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
    pins: dict[str, str] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)


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
SMALL = "gate/quantize+gate/quantize_2"
KEPT_DENSE = f"keep=attention+o+q_down+kv_down+k_rotary+{SMALL}"
KEPT = f"{KEPT_DENSE}+experts/quantize"
"""What DeepSeek-V3's layers keep for backward (sections 3.2.3 and 3.3.3): not what norms, the up-projections
of attention and SwiGLU make."""
BFLOAT16 = ";".join(
    f"{loop}:keep=attention+o+q_down+kv_down+k_rotary+wi+wg" for loop in ("layers", "dense_layers")
)
FLOAT8: dict[str, Any] = {"batch": 16384, "length": 4096, "float8": "blocks", "moments": "bfloat16"}
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
        "maxtext",
    ),
    Case(
        "DeepSeek-V3's sizes, 2,048 H100",
        v3,
        FLOAT8,
        "h100",
        2048,
        "pipe:16;data:2;expert:64",
        "pipe:16;data:2;expert:64",
        "layers:pipe;batch:data+expert;expert_batch:data;experts:expert",
        1,
        f"layers:{KEPT};dense_layers:{KEPT_DENSE}",
        128,
        1e12 / (180e3 * 3600 / 2048),
        "DeepSeek-AI 2024, arXiv 2412.19437, sections 1 and 3: 180 thousand GPU hours for 10^12 tokens on "
        "2,048 H800, taken for this batch (theirs grows to 15,360 sequences)",
        "trains a second prediction head too; the division of its layers is not published; exchanges are "
        "hidden as DeepSeek-AI says; H800 have slower links within a node",
        (KEPT, "selective", True),
        "examples/frameworks/dualpipe.json",
        "dualpipe:first=1:last=1",
        {"layers": "pipe"},
        {
            "inputs of gated units are kept in bfloat16": {
                "recompute": f"layers:{KEPT};dense_layers:{KEPT_DENSE}".replace(SMALL, "wi+wg")
            },
            "up-projections of attention are kept too": {
                "recompute": f"layers:{KEPT}+q_up+k_up+v_up;dense_layers:{KEPT_DENSE}+q_up+k_up+v_up"
            },
            "rows at experts are sent again in backward": {
                "recompute": f"layers:{KEPT};dense_layers:{KEPT_DENSE}".replace("+experts/quantize", "")
            },
            "all layers are recomputed": {"recompute": "layers;dense_layers"},
            "nothing is recomputed": {"recompute": ""},
            "stages have equal numbers of layers with experts": {"schedule": "dualpipe"},
            "stages run in 1F1B, and exchanges are waited for": {"schedule": "1f1b:first=1:last=1"},
            "bfloat16 products": {"hparams": {**FLOAT8, "float8": ""}, "recompute": BFLOAT16},
            "float32 moments": {"hparams": {**FLOAT8, "moments": "float32"}},
            "a row is sent to each of a token's experts (Megatron's trainer, 1F1B)": {
                "framework": "megatron",
                "schedule": "1f1b:first=1:last=1",
            },
        },
    ),
)


def practice_of(case: Case) -> Priced:
    """The price of a case's practice."""
    hardware, model = load_hardware(case.hardware, case.framework), case.model(**case.hparams)
    again = frozenset(filter(None, case.recompute.split(";")))
    how: dict[str, Any] = {"schedule": case.schedule} if case.schedule else {}
    options = mtf.Options(stored(model, case.stage), again, case.microbatches, **how)
    found = evaluate(model, mtf.Mesh(case.mesh), mtf.Layout(case.layout), hardware, options)
    decided = "; ".join((f"zero{case.stage}", *(f"recompute {each}" for each in case.recompute.split(";"))))
    return Priced.of(found, decided, hardware.usable_memory_bytes)


def solved(case: Case, limit: float) -> dict[str, Any]:
    """Searches one case and prices its practice."""
    hardware, model = load_hardware(case.hardware, case.framework), case.model(**case.hparams)
    room = hardware.usable_memory_bytes
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "parameters": model.parameters,
        "tokens": model.tokens,
        **{k: v for k, v in asdict(case).items() if k not in ("model", "name", "changes")},
    }
    found["practice"] = asdict(practice_of(case))
    found["changes"] = {
        words: asdict(practice_of(replace(case, **other))) for words, other in case.changes.items()
    }
    how: dict[str, Any] = {"schedule": case.schedule, "pins": case.pins} if case.schedule else {}
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
        mfu = found["pick"]["mfu"] * found["pick"]["step_seconds"] / seconds  # of the same FLOPs, by dtype
        found["published"] = {"seconds": seconds, "mfu": mfu}
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
