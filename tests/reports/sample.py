"""Plans made by hand for the tests of the report: plausible numbers of a decoder, at odds with none other."""

from __future__ import annotations

import copy
import math
from typing import Any

from tests.reports.sample_details import DIMS, GIB, LAYERS, LAYOUT, by_kind, lines, memory_detail, variables


def predicted(
    compute: float, hidden: float, exposed: float, peak: float, sent: dict[str, float]
) -> dict[str, Any]:
    return {
        "step_seconds": compute + exposed,
        "compute_seconds": compute,
        "communication_seconds": hidden + exposed,
        "exposed_communication_seconds": exposed,
        "peak_memory_bytes": int(peak * GIB),
        "flops_per_device": compute * 31e12,
        "communication_bytes_per_device": sent,
    }


def alternative(
    name: str,
    mesh: dict[str, int],
    layout: dict[str, list[str]],
    price: dict[str, Any] | None,
    reason: str | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "mesh": mesh,
        "layout": layout,
        "predicted": price,
        "feasible": reason is None,
        "reason": reason,
    }


def plain_plan() -> dict[str, Any]:
    """Only what the format asks for."""
    mesh = {"data": 16, "model": 32}
    return {
        "format": "layoutopt-plan/1",
        "model": {
            "name": "transformer_lm",
            "fingerprint": "9f3a61c0e5",
            "hparams": {
                "layers": LAYERS,
                "d_model": 1024,
                "d_ff": 131072,
                "heads": 256,
                "batch": 512,
                "dtype": "bfloat16",
            },
            "parameters": 4899222528,
        },
        "mesh": mesh,
        "layout": copy.deepcopy(LAYOUT),
        "storage": {"adafactor state": "zero1"},
        "recompute": ["layer"],
        "microbatches": 2,
        "hardware": "tpu-v2",
        "predicted": predicted(0.338, 0.041, 0.074, 6.12, {"data": 0.31e9, "model": 4.27e9}),
        "solver": {
            "status": "OPTIMAL",
            "objective": 0.412,
            "bound": 0.412,
            "gap": 0.0,
            "wall_seconds": 2.31,
            "layouts_considered": "1.3e9 layouts on 10 meshes",
        },
        "alternatives": [
            alternative(
                "Mesh-TensorFlow paper",
                mesh,
                copy.deepcopy(LAYOUT),
                predicted(0.338, 0.041, 0.074, 6.12, {"data": 0.31e9, "model": 4.27e9}),
            ),
            alternative(
                "second best: d_model split too",
                mesh,
                LAYOUT | {"d_model": ["data"]},
                predicted(0.338, 0.05, 0.118, 4.4, {"data": 2.1e9, "model": 4.3e9}),
            ),
            alternative(
                "tensor parallel",
                {"data": 1, "model": 512},
                {"heads": ["model"], "d_ff": ["model"], "vocab": ["model"]},
                predicted(0.431, 0.12, 1.02, 6.9, {"model": 71e9}),
            ),
            alternative(
                "data parallel",
                {"data": 512, "model": 1},
                {"batch": ["data"]},
                predicted(0.341, 0.31, 1.9, 58.4, {"data": 58.7e9}),
                "needs 58.4 GiB of 6.96 GiB per device: Adafactor state and gradients of layer_*/ffn",
            ),
            alternative(
                "replicated",
                mesh,
                {},
                predicted(173.0, 0.0, 0.0, 70.3, {}),
                "needs 70.3 GiB of 6.96 GiB per device",
            ),
            alternative("pipeline", mesh, {}, None, "no dimension 'stage' in this model"),
        ],
    }


def frontier() -> list[dict[str, Any]]:
    mesh = {"data": 16, "model": 32}
    rows = [(2.4, 1.31), (2.9, 0.82), (3.3, 0.561), (4.4, 0.456), (5.2, 0.431), (6.12, 0.412)]
    return [
        alternative(
            f"point {i}",
            mesh,
            LAYOUT if time == 0.412 else LAYOUT | {"d_model": ["data"], f"extra{i}": []},
            predicted(time - 0.074, 0.041, 0.074, peak, {"model": 4e9}),
        )
        for i, (peak, time) in enumerate(rows)
    ]


def sensitivity() -> list[dict[str, Any]]:
    base = "batch:data;vocab:model;heads:model;d_ff:model"
    wide = "batch:data;vocab:model;d_ff:model"
    return [
        {
            "factor": "bandwidth",
            "points": [
                {"value": v, "step_seconds": 0.338 + 0.074 / v, "layout": wide if v < 0.5 else base}
                for v in (0.25, 0.5, 1, 2, 4)
            ],
        },
        {
            "factor": "memory",
            "points": [
                {"value": v * GIB, "step_seconds": s, "layout": base if v > 6 else wide}
                for v, s in ((2, None), (4, 0.52), (8, 0.412), (16, 0.409), (32, 0.409))
            ],
        },
        {
            "factor": "devices",
            "points": [
                {"value": v, "step_seconds": s, "layout": base}
                for v, s in ((64, 2.9), (128, 1.49), (256, 0.78), (512, 0.412), (1024, 0.24))
            ],
        },
    ]


def validation() -> dict[str, Any]:
    rows = []
    for i in range(24):
        measured = 0.05 * 1.17**i
        rows.append(
            {
                "layout": f"layout {i}",
                "predicted_seconds": measured * (1 + 0.16 * math.sin(1.7 * i)),
                "measured_seconds": measured,
            }
        )
    rows[3]["layout"] = "batch:data;vocab:model;heads:model;d_ff:model"
    return {"rows": rows, "mape": 0.102, "kendall_tau": 0.935, "spearman": 0.985, "regret": 0.012}


def calibration() -> dict[str, Any]:
    samples = []
    for what, sizes, scale in (
        ("matmul", range(20, 34), 2.2e-11),
        ("all_reduce over model", range(12, 27), 3e-10),
        ("elementwise", range(14, 26), 9e-11),
    ):
        for i in sizes:
            measured = 2e-6 + scale * 2**i
            samples.append(
                {
                    "what": what,
                    "size": 2**i,
                    "measured_seconds": measured,
                    "predicted_seconds": measured * (1 + 0.12 * math.cos(2.1 * i)),
                }
            )
    return {
        "measurements": samples,
        "fit": {
            "chip.peak_flops.float32": 45.2e9,
            "links.model.bandwidth": 3.1e9,
            "links.model.latency": 2.1e-6,
        },
    }


def hardware() -> dict[str, Any]:
    paper = "Mesh-TensorFlow paper, arXiv 1811.02084"
    numbers = [
        ("chip.peak_flops.bfloat16", 45e12, "FLOP/s", f"{paper} (11.5 PFLOP/s over 512 cores)", "2018-11"),
        (
            "chip.memory",
            16 * GIB,
            "bytes",
            "Norrie et al., The Design Process for Google's Training Chips, IEEE Micro 41(2)",
            "2021",
        ),
        (
            "chip.memory_efficiency",
            0.9,
            "1",
            "assumption by analogy: cli99/llm-analysis (hbm efficiency 0.9)",
            "2023",
        ),
        ("links.bandwidth", 62e9, "bytes/s", "Norrie et al., IEEE Micro 41(2)", "2021"),
        ("links.latency", 1e-6, "s", "assumption: one microsecond per hop", "2026-11-20"),
    ]
    return {
        "name": "tpu-v2",
        "summary": "Google TPU v2: 2-D torus of up to 16 x 16 chips, two cores each",
        "device": "one TensorCore: half a chip with half its memory",
        "memory_bytes": int(6.96 * GIB),
        "assumptions": [
            "Collectives over one axis hide behind computation at the fraction given per kind.",
            "Rings in both directions of a torus axis.",
        ],
        "placement": "model: 16 chips of a ring × 2 cores; data: the other ring of 16",
        "numbers": [dict(zip(("path", "value", "unit", "source", "date"), n, strict=True)) for n in numbers],
    }


def full_plan() -> dict[str, Any]:
    """A plan with every detail."""
    plan = plain_plan()
    plan["frontier"] = frontier()
    plan["details"] = {
        "hardware": hardware(),
        "dims": dict(DIMS),
        "variables": variables(),
        "lines": lines(),
        "by_kind": by_kind(),
        "memory": memory_detail(),
        "sensitivity": sensitivity(),
        "validation": validation(),
        "calibration": calibration(),
        "slots": ["FFBB.", ".FFBB"],
    }
    return plan


def five_plans() -> list[dict[str, Any]]:
    """Five plans of one model that differ in mesh, layout, time and memory."""
    plans = []
    for i, (data, model) in enumerate(((16, 32), (32, 16), (8, 64), (64, 8), (16, 32))):
        plan = full_plan()
        plan["mesh"] = {"data": data, "model": model}
        factor = (1.0, 1.12, 1.31, 1.22, 1.05)[i]
        for key, value in plan["predicted"].items():
            if isinstance(value, float):
                plan["predicted"][key] = value * factor
        plan["predicted"]["peak_memory_bytes"] = int(6.12 * GIB * (1.0, 0.91, 1.02, 1.3, 0.8)[i])
        if i == 4:
            plan["layout"]["d_model"] = ["data"]
            plan["solver"] |= {"status": "FEASIBLE", "gap": 0.031, "bound": 0.419}
        plans.append(plan)
    return plans


HOSTILE = '<script>alert("x")</script>&amp;$\\frac{1}{2}$ \u202e\x00\n漢字 {{ 7*7 }} url(#a) fill: #1b1d20'


def hostile_plan() -> dict[str, Any]:
    """200 dimensions, names of 300 characters, HTML, formulas, template syntax, control and bidi marks."""
    plan = full_plan()
    long = "n" * 300
    plan["model"]["name"] = HOSTILE + long
    plan["mesh"] = {HOSTILE: 16, long: 32}
    plan["layout"] = {f"{HOSTILE} {i} {long}": [HOSTILE] if i % 3 else [long, HOSTILE] for i in range(200)}
    plan["predicted"]["communication_bytes_per_device"] = {HOSTILE: 1e9, f"{HOSTILE}+{long}": 1e9}
    plan["details"]["dims"] = {f"{HOSTILE} {i} {long}": 64 * i + 64 for i in range(200)}
    plan["details"]["variables"] = [
        {
            "name": f"{HOSTILE} {long}",
            "shape": [[f"{HOSTILE} {j}", 64] for j in range(30)],
            "dtype": HOSTILE,
            "splits": [[HOSTILE] if j == 3 else [] for j in range(30)],
            "bytes": 64,
            "local_bytes": 4,
            "kind": HOSTILE,
        }
    ]
    plan["alternatives"][0]["name"] = HOSTILE
    plan["alternatives"][0]["mesh"], plan["alternatives"][0]["layout"] = {}, {}
    plan["alternatives"][1] |= {"name": long, "reason": HOSTILE * 3, "feasible": False}
    plan["alternatives"] = [a | {"mesh": {}, "layout": {}} for a in plan["alternatives"]]
    for point in plan["frontier"]:
        point |= {"mesh": {}, "layout": {}, "name": long}
    for point in plan["details"]["memory"]["points"]:
        point |= {"name": HOSTILE, "scope": long, "phase": HOSTILE if point["phase"] == "forward" else long}
    plan["details"]["memory"]["holdings"][0]["what"] = HOSTILE
    plan["details"]["lines"][0] |= {"op": HOSTILE, "scope": long, "phase": long, "kind": HOSTILE}
    plan["details"]["by_kind"]["answer"]["kinds"] = {HOSTILE: 0.2, long: 0.1}
    plan["details"]["sensitivity"][0] |= {"factor": HOSTILE}
    plan["details"]["sensitivity"][1]["points"][2]["layout"] = long
    plan["details"]["hardware"] |= {
        "name": HOSTILE,
        "summary": long,
        "placement": HOSTILE,
        "assumptions": [HOSTILE, long],
    }
    plan["details"]["hardware"]["numbers"][0] |= {"path": long, "source": HOSTILE}
    plan["details"]["calibration"]["measurements"][0]["what"] = HOSTILE
    plan["details"]["validation"]["rows"][0]["layout"] = long
    plan["storage"], plan["recompute"], plan["hardware"] = {HOSTILE: long}, [HOSTILE, long], HOSTILE
    return plan
