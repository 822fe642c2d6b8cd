"""The models of published runs, and what their steps recompute."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import layoutopt
import mesh_tf_core as mtf
from benchmarks.published_models import language_model
from examples import bert, moe_lm, transformer_lm

PRAXIS = "praxis"
"""The family of Paxml's GPT, whose layers compute more than those of `examples/transformer_lm.py`: tokens are
embedded by a product (`EMBEDDING_LOOKUP_STYLE` matmul), products add biases, and softmax is float32 where it
is written out (google/paxml paxml/tasks/lm/params/c4.py, `TransformerLmSpmdAdam`;
paxml/contrib/gpu/scripts_gpu/configs.py @04516ac, `GPT126M`; google/praxis praxis/layers/attentions.py
@feeaff1, `_dot_atten`)."""
GPT_OSS = "gpt-oss-120b"
"""The model whose experts have biases and bounds, and whose attention has sinks and windows: as its file,
which transformers' GptOssConfig equals."""
BUILDERS: dict[str, Callable[..., mtf.Model]] = {
    "dense": transformer_lm.model,
    "encoder": bert.model,
    "moe": moe_lm.model,
    PRAXIS: language_model,
    GPT_OSS: partial(layoutopt.from_huggingface, {"model_type": "gpt_oss"}),
}
FLOAT8 = {"FP8": "tensor", "FP8-CS": "tensor", "MXFP8": "mxfp8"}
"""The precision of rows in float8, as printed -> the recipe (`mesh_tf_core.ops.float8`)."""


class CannotError(Exception):
    """Why a row is no question."""


def number(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = str(row.get(name) or "").strip()
    if not text:
        if default is None:
            raise CannotError(f"{name} is not stated")
        return default
    return int(float(text))


def recomputed(
    row: Mapping[str, str], layers: int
) -> tuple[tuple[tuple[float, tuple[str, ...]], ...], tuple[str, ...]]:
    """The parts of a step that recompute, each with what; and how that differs from the run."""
    said, plain = row["recompute"].strip(), row["attention"].startswith("plain")
    if said == "none":
        return ((1.0, ()),), ()
    if said == "full":
        return ((1.0, ("layers",)),), ()
    if said.startswith("layers:"):
        return ((1.0, (said,)),), ()
    if said.startswith("layersfrac:"):
        some, every = map(int, said.split(":")[1].split("/"))
        return ((1.0, (f"layers:count={some * layers // every}",)),), ()
    keeps = (
        ("SAVE_DOT", "products"),
        ("minimal_flash", "products+attention"),
        ("minimal", "products"),
        ("save_qkv_proj", "q+k+v"),
        ("custom: attention and mlpwo", "q+k+v+o"),
        ("selective (per op)", "q+v+wi+attention"),
        ("selective (default: per op)", "q+v+wi+attention"),
    )
    for word, keep in keeps:
        if said.startswith(word):
            return ((1.0, (f"layers:keep={keep}",)),), ()
    if said == "selective" and plain and "PyTorch" in row["framework"]:
        return ((1.0, ("layers:keep=products+others",)),), ()
    if said.startswith("selective (every other"):
        return ((1.0, (f"layers:count={layers // 2}",)),), ()
    if said.startswith("selective"):
        return ((0.5, ()), (0.5, ("layers",))), ("part of the layers, not stated: mean of none and all",)
    if not said:
        return ((1.0, ("layers",) if row["model"] == "gpt-175b" else ()),), ("recomputation not stated",)
    raise CannotError(f"recompute {said}")


def family_of(row: Mapping[str, str]) -> str:
    """Whose model a row has."""
    praxis = row["framework"].startswith("Paxml") and row["model"].startswith("gpt")
    return PRAXIS if praxis else GPT_OSS if row["model"] == GPT_OSS else row["family"]


def _written_out(row: Mapping[str, str]) -> bool:
    """Whether attention that is not stated is written out: by praxis, but with TransformerEngine and heads of
    128 (google/praxis praxis/layers/attentions.py @feeaff1)."""
    fused = "TransformerEngine" in row["framework"] and row["d_head"] == "128"
    return not row["attention"] and row["framework"].startswith("Paxml") and not fused


def sizes_of(row: Mapping[str, str], tp: int) -> dict[str, Any]:
    vocab = int(row.get("vocab_padded") or row["vocab"])
    found: dict[str, Any] = {
        "layers": int(row["layers"]),
        "d_model": int(row["d_model"]),
        "d_kv": int(row["d_head"]),
        "heads": int(row["heads"]),
        "d_ff": int(row["d_ff"]),
        "vocab": vocab if vocab % tp == 0 else -(-vocab // (128 * tp)) * 128 * tp,
        "batch": int(row["global_batch"]),
        "length": int(row["seq"]),
        "dtype": row["dtype"],
        "optimizer": "adam",
    }
    if row["dtype"] == "float8":
        found |= {"dtype": "bfloat16", "float8": FLOAT8[row["precision"]]}
    if row["attention"].startswith("plain") or _written_out(row):
        found["attention"] = "plain"
    if row["family"] == "encoder":
        return found
    if row["model"] == GPT_OSS:
        return {k: found[k] for k in ("batch", "length", "dtype", "optimizer", "float8") if k in found}
    if family_of(row) == PRAXIS:
        wide = found.get("attention") == "plain" and "Transformer" not in row["framework"]
        found |= {"one_hot": True, "biases": True, "activation": "gelu", "float32_softmax": wide}
        return found | {"tied": row["tied"] == "1", "attention": found.get("attention", "fused")}
    found["positions"] = row["positions"].split()[0].replace("yarn", "rotary")
    if row["kv_heads"] != row["heads"]:
        found["kv_heads"] = int(row["kv_heads"])
    if row["tied"] == "1":
        found["tied"] = True
    if row["gated"] == "1":
        found["gated"] = True
    if float(row.get("dropout_hid") or 0):
        found["dropout"] = float(row["dropout_hid"])
    if row.get("activation") == "gelu" and row["family"] == "dense":
        found["activation"] = "gelu"
    if row["family"] == "moe":
        noted = re.search(r"experts (\d+), chosen (\d+)", row["note"])
        experts, chosen = noted.groups() if noted else (row.get("experts"), row.get("topk"))
        if not experts or not chosen:
            raise CannotError("experts are not stated")
        found |= {"experts": int(experts), "chosen": int(chosen)}
        found["d_ff"] = number(row, "d_ff_expert", found["d_ff"])
    elif row["gated"] == "1":
        found["norm"] = "rms"
    return found


@cache
def built(family: str, sizes: tuple[tuple[str, Any], ...]) -> mtf.Model:
    """The model of a family in some sizes."""
    return BUILDERS[family](**dict(sizes))
