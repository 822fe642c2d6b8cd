"""The weights of decoders of 2019 to 2023 in memory of transformers under the names of our variables: what
their modules join is taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from layoutopt.importers.huggingface.configuration import chosen
from layoutopt.importers.huggingface.decoder import LanguageModel
from layoutopt.importers.huggingface.fields import ConfiguredTraining
from tests.importers.huggingface_weights import apart, stacked

Arrays = dict[str, Any]
FAMILIES = (
    "gpt2",
    "openai-gpt",
    "gpt_bigcode",
    "gptj",
    "codegen",
    "gpt_neo",
    "bloom",
    "falcon",
    "dbrx",
    "mpt",
)
CONV = ("gpt2", "openai-gpt")
"""Families whose matrices are [in, out]."""
OUTSIDE = {
    "wte": "embedding/tokens",
    "word_embeddings": "embedding/tokens",
    "wpe": "embedding/positions",
    "tokens_embed": "embedding/tokens",
    "positions_embed": "embedding/positions",
    "word_embeddings_layernorm": "embedding_norm",
    "ln_f": "final_norm",
    "norm_f": "final_norm",
    "lm_head": "output/projection",
}
NORMS = {"ln_1": "attention", "input_layernorm": "attention", "ln_attn": "attention"}
NORMS |= dict.fromkeys(("ln_2", "post_attention_layernorm", "ln_mlp"), "feed_forward")
NORMS |= {"norm_attn_norm.norm_1": "attention", "norm_attn_norm.norm_2": "feed_forward"}
NORMS |= {"norm_1": "attention", "norm_2": "feed_forward"}
EXPERTS = {"w1": "wi", "v1": "wg", "w2": "wo"}
MATRICES = {"mlp.c_fc": "in/0", "mlp.fc_in": "in/0", "mlp.dense_h_to_4h": "in/0"}
MATRICES |= {"ffn.up_proj": "in/0", "ffn.down_proj": "out"}
MATRICES |= dict.fromkeys(("mlp.c_proj", "mlp.fc_out", "mlp.dense_4h_to_h"), "out")


def parts(x: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Queries, keys and values of an array whose rows join them."""
    family, heads = config["model_type"], config.get("n_head") or config.get("num_attention_heads", 1)
    d_kv = (config.get("n_embd") or config.get("hidden_size", 1)) // heads
    rows = x.reshape(-1, d_kv, *x.shape[1:])
    if family == "codegen":
        for n, part in zip("qvk", np.moveaxis(x.reshape(4, 3, -1, *x.shape[1:]), 1, 0), strict=True):
            yield n, part.reshape(-1, *x.shape[1:])
        return
    if family in (*CONV, "mpt"):
        yield from zip("qkv", np.split(x, 3), strict=True)
        return
    if family == "dbrx":
        kv = config["attn_config"]["kv_n_heads"] * config["d_model"] // config["n_heads"]
        yield from zip("qkv", np.split(x, [len(x) - 2 * kv, len(x) - kv]), strict=True)
        return
    one = config.get("multi_query", True) and not config.get("new_decoder_architecture")
    kv = 1 if family in ("gpt_bigcode", "falcon") and one else config.get("num_kv_heads", heads)
    grouped = rows.reshape(kv, -1, *rows.shape[1:])
    for n, part in zip("qkv", (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]), strict=True):
        yield n, part.reshape(-1, *x.shape[1:])


def layer(w: Mapping[str, Any], config: Mapping[str, Any]) -> Arrays:
    """Our name inside a layer -> array."""
    made: Arrays = {}
    family = config["model_type"]
    for name, x in w.items():
        theirs, _, kind = name.rpartition(".")
        matrix = x.T if family not in CONV and x.ndim == 2 else x
        end = "_bias" if kind == "bias" else ""
        if theirs in NORMS:
            made[f"{NORMS[theirs]}_norm/{'bias' if end else 'scale'}"] = x
        elif theirs in MATRICES:
            made[f"feed_forward/{MATRICES[theirs]}/{kind}"] = matrix
        elif kind in EXPERTS:
            rows = x.reshape(config["ffn_config"]["moe_num_experts"], -1, x.shape[-1])
            made[f"experts/{EXPERTS[kind]}"] = rows if kind == "w2" else rows.swapaxes(1, 2)
        elif theirs == "ffn.router.layer":
            made["experts/router"] = matrix
        elif theirs.endswith(("c_attn", "query_key_value", "qkv_proj", "Wqkv")):
            for n, part in parts(x.T if family in CONV else x, config):
                made[f"attention/{n}{end}"] = part.T
        elif found := re.search(r"\.(q|k|v)_proj$", theirs):
            made[f"attention/{found[1]}{end}"] = matrix
        else:
            made[f"attention/o{end}"] = matrix
    if family in ("gptj", "codegen"):
        heads, turned = config["n_head"], config["rotary_dim"]
        for n in "qk":
            x = made[f"attention/{n}"]
            x = x.reshape(len(x), heads, -1)
            made[f"attention/{n}"] = x[..., apart(x.shape[-1], turned)]
    return made


def classic(state: Mapping[str, Any], config: Mapping[str, Any], length: int) -> Arrays:
    """Our names -> arrays, of as many elements as the variables."""
    found = chosen(config, "the configuration")
    decoder = found.reads(found.fields(), ConfiguredTraining(batch=1, length=length))
    assert isinstance(decoder, LanguageModel)
    state = {n.removeprefix("transformer."): x for n, x in state.items()}
    made: Arrays = {}
    for name, x in state.items():
        theirs, _, kind = name.rpartition(".")
        if (own := OUTSIDE.get(theirs)) is None:
            continue
        if own.endswith("norm"):
            own += "/bias" if kind == "bias" else "/scale"
        made["output/bias" if own == "output/projection" and kind == "bias" else own] = (
            x.T if own == "output/projection" else x
        )

    def read(i: int) -> Arrays:
        start = f"{'blocks' if config['model_type'] in ('dbrx', 'mpt') else 'h'}.{i}."
        return layer({n.removeprefix(start): x for n, x in state.items() if n.startswith(start)}, config)

    return made | stacked(decoder, length, read)
