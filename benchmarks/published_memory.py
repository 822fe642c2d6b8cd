"""Peak memory against Korthikanti et al. 2022 (arXiv 2205.05198), figures 1 and 7."""

from __future__ import annotations

from typing import Any

from benchmarks.published_gpu import MEGATRON, SIZES, VOCAB_GPT, mesh_and_layout
from benchmarks.published_megatron import gpt
from benchmarks.published_rows import lowered, read
from costmodels.liveness import MemoryProfile, memory
from costmodels.pricing.compilers.launched import Launched
from mesh_tf_core.ir.phase import Phase


def memory_rows() -> list[dict[str, Any]]:
    """Parameters with optimizer state, and activations of tensor parallelism with and without recomputation.

    Parameters and optimizer: variables of ours, their gradients, and their half-precision copies, as theirs
    are. Activations: what ours holds at its peak beside the variables, when the backward pass begins.
    """
    row = read("megatron_recompute_a100.csv")[0]
    numbers = (row["layers"], row["hidden"], row["heads"], VOCAB_GPT, row["seq"], row["batch"])
    sizes = dict(zip(SIZES, map(int, numbers), strict=True))
    mesh, layout = mesh_and_layout({"model": int(row["tp"])}, MEGATRON)
    found = {}
    for again in (False, True):
        program = lowered(gpt, sizes, mesh, layout, recompute=again)
        found[again] = memory(program, Launched.memory)
    state = float(row["par_opt_GiB"])
    none = float(row["act_none_GiB"])
    full = none * float(row["act_pct_fullrecompute"]) / 100
    # Float16 weights, a master copy and two moments in float32 lie here; float32 gradients come on top.
    ours = found[False].variables * 18 / 14
    return [
        _compared("parameters and optimizer", state, ours),
        _compared("activations, none recomputed", none, _activations(found[False])),
        _compared("activations, all recomputed", full, _activations(found[True])),
    ]


def _activations(held: MemoryProfile) -> float:
    """Bytes that the loop over layers saved in forward for backward (weights in half precision lie among the
    parameters)."""
    saved = (h for h in held.holdings if h.origin is not None and "[layers:" in h.what)
    return float(sum(h.bytes for h in saved if h.origin.phase == Phase.FORWARD))  # type: ignore[union-attr]


def _compared(name: str, published: float, predicted: float) -> dict[str, Any]:
    gib = predicted / 2**30
    return {"run": name, "published_gib": published, "predicted_gib": gib, "error": gib / published - 1}
