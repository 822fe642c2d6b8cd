"""What a handmade plan says of its variables, time and memory."""

from __future__ import annotations

import math
from typing import Any

GIB = 2**30
DIMS = {
    "batch": 512,
    "length": 256,
    "vocab": 32768,
    "d_model": 1024,
    "heads": 256,
    "d_kv": 128,
    "d_ff": 131072,
    "memory_length": 256,
}
LAYOUT = {"batch": ["data"], "vocab": ["model"], "heads": ["model"], "d_ff": ["model"]}
LAYERS = 8


def variables() -> list[dict[str, Any]]:
    def one(name: str, dims: list[str], kind: str = "parameter", dtype: str = "bfloat16") -> dict[str, Any]:
        splits = [LAYOUT.get(d, []) if d != "batch" else [] for d in dims]
        whole = math.prod(DIMS[d] for d in dims) * (2 if dtype == "bfloat16" else 4)
        parts = math.prod(32 for s in splits for _ in s)
        return {
            "name": name,
            "shape": [[d, DIMS[d]] for d in dims],
            "dtype": dtype,
            "splits": splits,
            "bytes": whole,
            "local_bytes": whole // parts,
            "kind": kind,
        }

    found = [
        one("embedding", ["vocab", "d_model"]),
        one("positions", ["length", "d_model"]),
        one("final_norm/scale", ["d_model"], dtype="float32"),
    ]
    for i in range(LAYERS):
        found += [one(f"layer_{i}/attention/{w}", ["d_model", "heads", "d_kv"]) for w in ("q", "k", "v", "o")]
        found += [
            one(f"layer_{i}/ffn/wi", ["d_model", "d_ff"]),
            one(f"layer_{i}/ffn/wo", ["d_ff", "d_model"]),
        ]
        found += [one(f"layer_{i}/norm/scale", ["d_model"], dtype="float32")]
        found += [
            one(f"layer_{i}/ffn/wi/slot_vr", ["d_ff"], "state", "float32"),
            one(f"layer_{i}/ffn/wi/slot_vc", ["d_model"], "state", "float32"),
        ]
    return found


def lines() -> list[dict[str, Any]]:
    found = []

    def compute(
        op: str, scope: str, phase: str, kind: str, times: int, total: float, flops: float = 0.0
    ) -> None:
        found.append(
            {
                "op": op,
                "scope": scope,
                "phase": phase,
                "kind": kind,
                "times": times,
                "seconds": total / times,
                "exposed_seconds": total / times,
                "flops": flops / times,
                "bytes": total * 5e11 / times,
                "axes": [],
                "sent_bytes": 0,
                "communication": False,
            }
        )

    def sent(
        op: str,
        scope: str,
        phase: str,
        kind: str,
        axis: str,
        times: int,
        total: float,
        exposed: float,
        size: float,
    ) -> None:
        found.append(
            {
                "op": op,
                "scope": scope,
                "phase": phase,
                "kind": kind,
                "times": times,
                "seconds": total / times,
                "exposed_seconds": exposed / times,
                "flops": 0,
                "bytes": 0,
                "axes": [axis],
                "sent_bytes": size / times,
                "communication": True,
            }
        )

    for phase, factor in (("forward", 1.0), ("backward", 2.0)):
        compute("einsum wi", "layer/ffn", phase, "matmul", LAYERS, 0.031 * factor, 1e12 * factor)
        compute("einsum wo", "layer/ffn", phase, "matmul", LAYERS, 0.030 * factor, 1e12 * factor)
        compute("einsum qkv", "layer/attention", phase, "matmul", LAYERS * 3, 0.012 * factor, 4e11 * factor)
        compute("softmax", "layer/attention", phase, "softmax", LAYERS, 0.004 * factor)
        compute("relu", "layer/ffn", phase, "elementwise", LAYERS, 0.003 * factor)
        compute("logits", "head", phase, "matmul", 1, 0.021 * factor, 6e11 * factor)
        sent(
            "einsum wo",
            "layer/ffn",
            phase,
            "all_reduce",
            "model",
            LAYERS,
            0.024 * factor,
            0.016 * factor,
            1.1e9 * factor,
        )
        sent(
            "einsum o",
            "layer/attention",
            phase,
            "all_reduce",
            "model",
            LAYERS,
            0.009 * factor,
            0.006 * factor,
            0.32e9 * factor,
        )
    sent("einsum wi", "layer/ffn", "update", "all_reduce", "data", LAYERS, 0.016, 0.008, 0.31e9)
    compute("adafactor", "layer/ffn", "update", "elementwise", LAYERS, 0.035)
    return found


def memory_detail() -> dict[str, Any]:
    points, held = [], 2.35
    for i in range(120):
        held += 0.022
        points.append(
            {
                "name": f"einsum_{i}",
                "scope": f"layer_{i // 15}",
                "phase": "forward",
                "bytes": (held + (0.4 if i % 15 == 7 else 0.0)) * GIB,
            }
        )
    points.append({"name": "cross_entropy", "scope": "head", "phase": "backward", "bytes": 6.12 * GIB})
    for i in range(180):
        held -= 0.0125
        points.append(
            {
                "name": f"grad_{i}",
                "scope": f"layer_{7 - i // 23}",
                "phase": "backward",
                "bytes": (held + (0.55 if i % 23 == 11 else 0.1)) * GIB,
            }
        )
    for i in range(40):
        points.append(
            {
                "name": f"update_{i}",
                "scope": f"layer_{i // 5}",
                "phase": "update",
                "bytes": (2.45 + 0.01 * (i % 5)) * GIB,
            }
        )
    return {
        "limit": int(6.96 * GIB),
        "points": points,
        "at": 120,
        "holdings": [
            {"what": "logits [batch length vocab] float32", "bytes": 1.0 * GIB, "scope": "head"},
            {"what": "gradient of logits [batch length vocab] float32", "bytes": 0.98 * GIB, "scope": "head"},
            {"what": "variable layer_*/ffn/wi", "bytes": 0.6 * GIB, "scope": ""},
            {"what": "variable layer_*/ffn/wo", "bytes": 0.6 * GIB, "scope": ""},
            {"what": "ffn hidden [batch length d_ff] bfloat16", "bytes": 0.5 * GIB, "scope": "layer_7/ffn"},
            {"what": "attention scores", "bytes": 0.25 * GIB, "scope": "layer_7/attention"},
        ],
        "variables": 2.3 * GIB,
    }


def by_kind() -> dict[str, Any]:
    return {
        "answer": {
            "compute": 0.338,
            "hidden": 0.041,
            "exposed": 0.074,
            "kinds": {"matmul": 0.282, "elementwise": 0.044, "softmax": 0.012, "all_reduce": 0.115},
        },
        "second best: d_model split too": {
            "compute": 0.338,
            "hidden": 0.05,
            "exposed": 0.118,
            "kinds": {
                "matmul": 0.282,
                "elementwise": 0.044,
                "softmax": 0.012,
                "all_reduce": 0.081,
                "all_gather": 0.052,
                "reduce_scatter": 0.035,
            },
        },
        "tensor parallel": {
            "compute": 0.431,
            "hidden": 0.12,
            "exposed": 1.02,
            "kinds": {"matmul": 0.361, "elementwise": 0.058, "softmax": 0.012, "all_reduce": 1.14},
        },
        "data parallel": {
            "compute": 0.341,
            "hidden": 0.31,
            "exposed": 1.9,
            "kinds": {"matmul": 0.285, "elementwise": 0.044, "softmax": 0.012, "all_reduce": 2.21},
        },
    }
