"""Peak memory against Korthikanti et al. 2022 (arXiv 2205.05198), figures 1 and 7."""

from __future__ import annotations

from typing import Any

from benchmarks.published_gpu import MEGATRON, gpt
from benchmarks.published_rows import lowered, read
from costmodels.liveness import Memory, memory
from examples.transformer_lm import model as language_model


def memory_rows() -> list[dict[str, Any]]:
    """Parameters with optimizer state, and activations of tensor parallelism with and without recomputation.

    Parameters and optimizer: variables of ours, their gradients, and their half-precision copies, as theirs
    are. Activations: what ours holds at its peak beside the variables, when the backward pass begins.
    """
    row = read("megatron_recompute_a100.csv")[0]
    sizes = gpt(int(row["hidden"]), int(row["heads"]), int(row["layers"]), int(row["seq"]), int(row["batch"]))
    sizes["dropout"] = 0.1
    mesh, layout = f"model:{row['tp']}", MEGATRON.partition(";")[2]
    found = {}
    for again in (False, True):
        program = lowered(language_model, sizes, mesh, layout, recompute=again)
        found[again] = memory(program, fuses=True)
    state = float(row["par_opt_GiB"])
    none = float(row["act_none_GiB"])
    full = none * float(row["act_pct_fullrecompute"]) / 100
    # A master copy and two moments in float32 lie here; float16 weights and float32 gradients come on top.
    ours = found[False].variables * 18 / 12
    return [
        _compared("parameters and optimizer", state, ours),
        _compared("activations, none recomputed", none, _activations(found[False])),
        _compared("activations, all recomputed", full, _activations(found[True])),
    ]


def _activations(held: Memory) -> float:
    """Bytes that the loop over layers saved in forward for backward (weights in half precision lie among the
    parameters)."""
    saved = (h for h in held.holdings if h.origin is not None and "[layers:" in h.what)
    return float(sum(h.bytes for h in saved if h.origin.phase == "forward"))  # type: ignore[union-attr]


def _compared(name: str, published: float, predicted: float) -> dict[str, Any]:
    gib = predicted / 2**30
    return {"run": name, "published_gib": published, "predicted_gib": gib, "error": gib / published - 1}
