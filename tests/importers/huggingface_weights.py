"""The weights of a model in memory of transformers under the names of our variables: what its modules join is
taken apart, and rotations of neighbours become rotations of elements half a head apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layoutopt.importers.huggingface.configuration import chosen
from layoutopt.importers.huggingface.decoder import LanguageModel, runs
from layoutopt.importers.huggingface.fields import ConfiguredTraining

Arrays = dict[str, Any]
WHOLE = ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "helium", "llama4_text")
NEIGHBOURS = ("glm", "glm4", "glm4v_text", *WHOLE)
"""Families that rotate neighbours (besides those of latent attention): of a whole head, or of its half."""
USUAL = {
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "pre_ff_layernorm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "attention_layernorm": "input_layernorm",
    "feedforward_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "router.gate": "gate",
    "router.weight": "gate.weight",
    "gate.wg": "gate",
    "shared_mlp": "shared_experts",
    "w1.": "gate_proj.",
    "w2.": "down_proj.",
    "w3.": "up_proj.",
    "c_fc": "up_proj",
    "c_proj": "down_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
    "attention.dense": "self_attn.o_proj",
    "attention.query_key_value": "self_attn.query_key_value",
    "embed_in": "embed_tokens",
    "embed_out": "lm_head",
    "final_layer_norm": "norm",
}
RENAMED = (
    "afmoe",
    "apertus",
    "apertus1p5_text",
    "gpt_neox",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "persimmon",
    "starcoder2",
)
"""Families whose modules have other names than most, and these."""


def apart(size: int, turned: int) -> Any:
    """The order of a head's elements in which neighbours of the first `turned` lie half of these apart."""
    return np.r_[np.arange(0, turned, 2), np.arange(1, turned, 2), np.arange(turned, size)]


class Layer:
    """The weights of one layer.

    Attributes:
      w: name inside the layer -> array; made: our name inside the layer -> array.
    """

    def __init__(self, w: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.w, self.c, self.family = w, config, config["model_type"]
        self.made: Arrays = {}

    def put(self, own: str, *theirs: str, turn: bool = True) -> None:
        """The first of `theirs` that there is."""
        for name in theirs:
            if name in self.w:
                self.made[own] = self.w[name].T if turn else self.w[name]
                return

    def read(self) -> Arrays:
        """Our names inside the layer -> arrays."""
        if "attn.Wo.weight" in self.w:
            return self.encoder()
        self.norms()
        self.own()
        for prefix in ("self_attn.", "mixer.", "mamba.", "linear_attn.", "conv."):
            inner = {n.removeprefix(prefix): x for n, x in self.w.items() if n.startswith(prefix)}
            if "kv_a_proj_with_mqa.weight" in inner:
                self.latent(inner)
            elif "output_gate.weight" in inner:
                self.lightning(inner)
            elif prefix == "conv." and inner:
                for n, x in zip(("before", "after", "x"), np.split(inner["in_proj.weight"], 3), strict=True):
                    self.made[f"attention/{n}"] = x.T
                self.made["attention/conv/weight"] = inner["conv.weight"][:, 0].T
                self.made["attention/o"] = inner["out_proj.weight"].T
            elif "forget_gate.A_log" in inner:
                self.kimi(inner)
            elif "A_log" in inner and "linear_num_key_heads" in self.c:
                self.delta(inner)
            elif "x_proj.weight" in inner:
                self.selective(inner)
            elif "A_log" in inner:
                self.state_space(inner)
            elif "o_proj.weight" in inner or "dense.weight" in inner:
                self.attention(inner)
        for prefix in ("mlp.", "feed_forward.", "block_sparse_moe.", "mixer."):
            inner = {n.removeprefix(prefix): x for n, x in self.w.items() if n.startswith(prefix)}
            self.feed_forward(inner)
        if "router.per_expert_scale" in self.w:
            self.feed_forward({**self.w, "gate.weight": self.w["router.proj.weight"]})
            self.made["feed_forward/router_scale"] = self.w["router.scale"]
            self.made["experts/expert_scale"] = self.w["router.per_expert_scale"]
            for n, own in (("post", "dense_after"), ("pre", "experts"), ("post", "experts_after")):
                number = 1 if own == "dense_after" else 2
                theirs = f"{n}_feedforward_layernorm_{number}.weight"
                self.made[f"feed_forward/{own}_norm/scale"] = self.w[theirs]
        shared = {n.removeprefix("shared_mlp."): x for n, x in self.w.items() if n.startswith("shared_mlp.")}
        if shared:
            gate, up = np.split(shared["input_linear.weight"], 2)
            self.made |= {"experts/shared/wi": gate.T, "experts/shared/wg": up.T}
            self.made["experts/shared/wo"] = shared["output_linear.weight"].T
        return self.made

    def encoder(self) -> Arrays:
        """ModernBERT's."""
        self.put("attention_norm/scale", "attn_norm.weight")
        self.put("feed_forward_norm/scale", "mlp_norm.weight")
        self.put("attention/o", "attn.Wo.weight")
        for n in "qkv":
            self.put(f"attention/{n}", f"attn.{n}_proj.weight")  # of the decoder
        self.put("feed_forward/out/weight", "mlp.Wo.weight")
        for whole, parts in (
            ("attn.Wqkv.weight", [f"attention/{n}" for n in "qkv"]),
            ("mlp.Wi.weight", ["feed_forward/in/0/weight", "feed_forward/in/1/weight"]),
        ):
            cut = np.split(self.w[whole], len(parts)) if whole in self.w else []
            self.made |= {own: x.T for own, x in zip(parts, cut, strict=False)}
        return self.made

    def norms(self) -> None:
        """The norms of blocks; of how many there are depends what one is called."""
        both = any(n.startswith(("pre_feedforward", "post_self_attn")) for n in self.w)
        mixes = any(n.startswith(("mixer.in_proj", "mixer.q_proj")) for n in self.w)
        self.put("attention_norm/scale" if mixes else "feed_forward_norm/scale", "norm.weight")
        self.put("attention_norm/scale", "input_layernorm.weight")
        self.put("attention_norm/bias", "input_layernorm.bias")
        self.put("feed_forward_norm/bias", "post_attention_layernorm.bias")
        self.put(
            "feed_forward_after_norm/scale", "post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"
        )
        self.put("attention_after_norm/scale", "post_operator_norm.weight")
        self.put("feed_forward_after_norm/scale", "post_ffn_norm.weight")
        middle = "post_attention_layernorm.weight"
        if "post_norm1.weight" in self.w:  # HyperCLOVA X
            self.put("attention_after_norm/scale", "post_norm1.weight")
            self.put("feed_forward_after_norm/scale", "post_norm2.weight")
        if "post_self_attn_layernorm.weight" in self.w or ("input_layernorm.weight" in self.w and not both):
            self.put("feed_forward_norm/scale", middle, "pre_ff_layernorm.weight")
            self.put("attention_after_norm/scale", "post_self_attn_layernorm.weight")
        else:
            self.put("attention_after_norm/scale", middle)
            self.put("feed_forward_norm/scale", "pre_feedforward_layernorm.weight", "norm.weight")
            if mixes:
                self.made.pop("feed_forward_norm/scale", None)

    def own(self) -> None:
        """The embedding of this layer alone (Gemma 4)."""
        if "per_layer_input_gate.weight" in self.w:
            for n, theirs in (("gate", "input_gate"), ("out", "projection")):
                self.made[f"own/{n}"] = self.w[f"per_layer_{theirs}.weight"].T
            self.made["own/after_norm/scale"] = self.w["post_per_layer_input_norm.weight"]

    def attention(self, w: Mapping[str, Any]) -> None:
        made, heads = self.made, self.c["num_attention_heads"]
        if "qkv_proj.weight" in w:
            rows = w["qkv_proj.weight"]
            size = self.c["hidden_size"] // heads
            cut = np.cumsum([heads * size, self.c["num_key_value_heads"] * size])
            w = {**w, **{f"{n}_proj.weight": x for n, x in zip("qkv", np.split(rows, cut), strict=True)}}
        if "query_key_value.weight" in w:
            for kind in ("weight", "bias"):
                x = w[f"query_key_value.{kind}"]
                x = x.reshape(heads, 3, -1, *x.shape[1:])
                w = {
                    **w,
                    **{f"{n}_proj.{kind}": x[:, i].reshape(-1, *x.shape[3:]) for i, n in enumerate("qkv")},
                }
        for name in ("gate_proj.weight", "g_proj.weight"):
            if name in w:
                made["attention/gate"] = w[name].T
        q = w["q_proj.weight"]
        if any("linear_attn" in n for n in self.w) or self.family.startswith(("qwen3_next", "qwen3_5")):
            q = q.reshape(heads, 2, -1, q.shape[-1])
            q, made["attention/gate"] = q[:, 0].reshape(-1, q.shape[-1]), q[:, 1].reshape(-1, q.shape[-1]).T
        every = {**w, "q_proj.weight": q}
        d_kv = q.shape[0] // heads
        for n in "qkv":
            for kind, own in (("weight", ""), ("bias", "_bias")):
                x = every.get(f"{n}_proj.{kind}")
                if x is None:
                    continue
                if n != "v" and self.family in NEIGHBOURS:
                    turned = d_kv if self.family in WHOLE else d_kv // 2
                    x = x.reshape(-1, d_kv, *x.shape[1:])[:, apart(d_kv, turned)].reshape(x.shape)
                if n != "v" and self.family == "nanochat":  # it turns the other way round
                    x = np.roll(x.reshape(-1, d_kv, *x.shape[1:]), d_kv // 2, 1).reshape(x.shape)
                made[f"attention/{n}{own}"] = x.T
        for name in ("o_proj", "dense"):
            if f"{name}.weight" in w:
                made["attention/o"] = w[f"{name}.weight"].T
            if f"{name}.bias" in w:
                made["attention/o_bias"] = w[f"{name}.bias"]
        for n in "qk":
            for name in (f"{n}_norm", f"{n}_layernorm"):
                for kind, own in (("weight", "scale"), ("bias", "bias")):
                    if f"{name}.{kind}" in w:
                        made[f"attention/{n}_norm/{own}"] = w[f"{name}.{kind}"]
        if "sinks" in w:
            made["attention/sink"] = w["sinks"]

    def latent(self, w: Mapping[str, Any]) -> None:
        c, made = self.c, self.made
        heads, plain, turned = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        order = np.r_[np.arange(plain), plain + apart(turned, turned)]
        up = w["q_proj.weight" if "q_proj.weight" in w else "q_b_proj.weight"].T
        up = up.reshape(len(up), heads, -1)[..., order]
        made["attention/q" if "q_proj.weight" in w else "attention/q_up"] = up
        if "q_a_proj.weight" in w:
            made["attention/q_down"] = w["q_a_proj.weight"].T
            made["attention/q_norm/scale"] = w["q_a_layernorm.weight"]
        down = w["kv_a_proj_with_mqa.weight"].T
        rank = c["kv_lora_rank"]
        made["attention/kv_down"], made["attention/k_rotary"] = (
            down[:, :rank],
            down[:, rank:][:, apart(turned, turned)],
        )
        made["attention/kv_norm/scale"] = w["kv_a_layernorm.weight"]
        both = w["kv_b_proj.weight"].T.reshape(rank, heads, -1)
        made["attention/k_up"], made["attention/v_up"] = both[..., :plain], both[..., plain:]
        made["attention/o"] = w["o_proj.weight"].T
        if "g_proj.weight" in w:
            made["attention/gate"] = w["g_proj.weight"].T
        if "indexer.wk.weight" in w:
            size = c["index_head_dim"]
            order = apart(size, turned) if self.family == "glm_moe_dsa" else np.arange(size)
            q = w["indexer.wq_b.weight"].T
            made["attention/indexer/q"] = q.reshape(len(q), -1, size)[..., order]
            made["attention/indexer/k"] = w["indexer.wk.weight"].T[:, order]
            for n, own in (("weight", "scale"), ("bias", "bias")):
                made[f"attention/indexer/k_norm/{own}"] = w[f"indexer.k_norm.{n}"][order]
            made["attention/indexer/weights"] = w["indexer.weights_proj.weight"].T

    def lightning(self, w: Mapping[str, Any]) -> None:
        heads = self.c["num_attention_heads"]
        rows = w["qkv_proj.weight"].reshape(heads, 3, -1, w["qkv_proj.weight"].shape[-1])
        for i, n in enumerate("qkv"):
            self.made[f"attention/{n}"] = rows[:, i].reshape(-1, rows.shape[-1]).T
        self.made["attention/gate"] = w["output_gate.weight"].T
        self.made["attention/o"] = w["out_proj.weight"].T
        self.made["attention/out_norm"] = w["norm.weight"]

    def delta(self, w: Mapping[str, Any]) -> None:
        c, made = self.c, self.made
        keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
        d_k, d_v = c["linear_key_head_dim"], c["linear_value_head_dim"]
        group = values // keys
        sizes = np.cumsum([keys * d_k, keys * d_k])
        if "in_proj_qkv.weight" in w:
            parts = [x.T for x in np.split(w["in_proj_qkv.weight"], sizes)]
            gate, beta, dt = (w[f"in_proj_{n}.weight"].T for n in "zba")
        else:
            rows = w["in_proj_qkvz.weight"]
            rows = rows.reshape(keys, -1, rows.shape[-1])
            cut = np.cumsum([d_k, d_k, group * d_v])
            *parts, gate = (x.reshape(-1, rows.shape[-1]).T for x in np.split(rows, cut, 1))
            rows = w["in_proj_ba.weight"]
            rows = rows.reshape(keys, 2, group, rows.shape[-1])
            beta, dt = (rows[:, i].reshape(-1, rows.shape[-1]).T for i in range(2))
        convs = np.split(w["conv1d.weight"][:, 0], sizes)
        for n, x, conv in zip("qkv", parts, convs, strict=True):
            made[f"delta/{n}"], made[f"delta/{n}_conv/weight"] = x, conv.T
        made |= {"delta/gate": gate, "delta/beta": beta, "delta/dt": dt, "delta/dt_bias": w["dt_bias"]}
        made |= {
            "delta/log_a": w["A_log"],
            "delta/out_norm": w["norm.weight"],
            "delta/out": w["out_proj.weight"].T,
        }

    def kimi(self, w: Mapping[str, Any]) -> None:
        made, gate = self.made, "forget_gate."
        for n, conv in zip("qkv", np.split(w["conv1d.weight"][:, 0], 3), strict=True):
            made[f"delta/{n}"], made[f"delta/{n}_conv/weight"] = w[f"{n}_proj.weight"].T, conv.T
        for theirs, own in (
            (f"{gate}f_proj", "dt"),
            (f"{gate}f_a_proj", "dt_down"),
            (f"{gate}f_b_proj", "dt"),
            ("g_proj", "gate"),
            ("g_a_proj", "gate_down"),
            ("g_b_proj", "gate"),
            ("b_proj", "beta"),
            ("o_proj", "out"),
        ):
            if f"{theirs}.weight" in w:
                made[f"delta/{own}"] = w[f"{theirs}.weight"].T
        made |= {"delta/dt_bias": w[f"{gate}dt_bias"], "delta/log_a": w[f"{gate}A_log"].ravel()}
        made["delta/out_norm"] = w["o_norm.weight"]

    def selective(self, w: Mapping[str, Any]) -> None:
        rank, state = w["dt_proj.weight"].shape[1], w["A_log"].shape[1]
        made = {"step_bias": w["dt_proj.bias"], "log_a": w["A_log"], "skip": w["D"]}
        low = np.split(w["x_proj.weight"], [rank, rank + state])
        for n, x in zip(("dt_down", "b", "c"), low, strict=True):
            made[n] = x.T
            if (norm := f"{n.removesuffix('_down')}_layernorm.weight") in w:
                made[f"{n}_norm/scale"] = w[norm]
        made |= {"dt": w["dt_proj.weight"].T, "x_conv/weight": w["conv1d.weight"][:, 0].T}
        made |= {"x_conv/bias": w["conv1d.bias"]} if "conv1d.bias" in w else {}
        for kind, own in (("weight", ""), ("bias", "_bias")):
            if f"in_proj.{kind}" in w:
                x, gate = np.split(w[f"in_proj.{kind}"], 2)
                made |= {f"x{own}": x.T, f"gate{own}": gate.T, f"out{own}": w[f"out_proj.{kind}"].T}
        self.made |= {f"mamba/{n}": x for n, x in made.items()}

    def state_space(self, w: Mapping[str, Any]) -> None:
        made = self.made
        inner = w["out_proj.weight"].shape[1]
        state = (len(w["conv1d.weight"]) - inner) // 2
        cut = np.cumsum([inner, inner, state, state])
        for kind, own in (("weight", ""), ("bias", "_bias")):
            if f"in_proj.{kind}" in w:
                for n, x in zip(
                    ("gate", "x", "b", "c", "dt"), np.split(w[f"in_proj.{kind}"], cut), strict=True
                ):
                    made[f"mamba/{n}{own}"] = x.T
            if f"out_proj.{kind}" in w:
                made[f"mamba/out{own}"] = w[f"out_proj.{kind}"].T
            if f"conv1d.{kind}" in w:
                conv = w[f"conv1d.{kind}"]
                conv = conv[:, 0] if kind == "weight" else conv
                for n, x in zip("xbc", np.split(conv, cut[1:3] - inner), strict=True):
                    made[f"mamba/{n}_conv/{kind}"] = x.T
        made |= {"mamba/step_bias": w["dt_bias"], "mamba/log_a": w["A_log"], "mamba/skip": w["D"]}
        if "norm.weight" in w:
            made["mamba/out_norm"] = w["norm.weight"]

    def feed_forward(self, w: Mapping[str, Any]) -> None:
        made = self.made
        if "gate_up_proj.weight" in w:
            gate, up = np.split(w["gate_up_proj.weight"], 2)
            w = {**w, "gate_proj.weight": gate, "up_proj.weight": up}
        names = {
            "gate_proj": "in/0",
            "up_proj": "in/1" if "gate_proj.weight" in w else "in/0",
            "down_proj": "out",
        }
        for n, own in {**names, "fc1": "in/0", "fc2": "out"}.items():
            for kind in ("weight", "bias"):
                if f"{n}.{kind}" in w:
                    made[f"feed_forward/{own}/{kind}"] = w[f"{n}.{kind}"].T
        for n, own in (("alpha_p", "above"), ("alpha_n", "below")):
            if f"act_fn.{n}" in w:
                made[f"feed_forward/in/{own}"] = w[f"act_fn.{n}"]
        if "experts.down_proj" not in w:
            return
        for n, own in (("fc1_latent_proj", "in"), ("fc2_latent_proj", "out")):
            if f"{n}.weight" in w:
                made[f"latent/{own}"] = w[f"{n}.weight"].T
        flat = self.family in ("gpt_oss", "llama4_text")
        if "experts.gate_up_proj" in w:
            both = w["experts.gate_up_proj"] if flat else w["experts.gate_up_proj"].swapaxes(1, 2)
            half = both.shape[-1] // 2
            cut = (
                (np.s_[..., ::2], np.s_[..., 1::2])
                if self.family == "gpt_oss"
                else (np.s_[..., :half], np.s_[..., half:])
            )
            made["experts/wi"], made["experts/wg"] = both[cut[0]], both[cut[1]]
            if "experts.gate_up_proj_bias" in w:
                made["experts/bi"], made["experts/bg"] = (w["experts.gate_up_proj_bias"][s] for s in cut)
                made["experts/bo"], made["experts/router_logits"] = (
                    w["experts.down_proj_bias"],
                    w["router.bias"],
                )
        else:
            made["experts/wi"] = w["experts.up_proj"].swapaxes(1, 2)
        made["experts/wo"] = w["experts.down_proj"] if flat else w["experts.down_proj"].swapaxes(1, 2)
        made["experts/router"] = w["gate.weight" if "gate.weight" in w else "router.weight"].T
        for top in ("shared_experts", "shared_expert"):
            gated = f"{top}.gate_proj.weight" in w
            for n, own in {"gate_proj": "wi", "up_proj": "wg" if gated else "wi", "down_proj": "wo"}.items():
                if f"{top}.{n}.weight" in w and "fc1_latent_proj.weight" in w:
                    place = "out" if own == "wo" else "in/0" if own == "wi" else "in/1"
                    made[f"shared/{place}/weight"] = w[f"{top}.{n}.weight"].T
                elif f"{top}.{n}.weight" in w:
                    made[f"experts/shared/{own}"] = w[f"{top}.{n}.weight"].T
        if "shared_expert_gate.weight" in w:
            made["experts/shared_gate"] = w["shared_expert_gate.weight"].T


def own_embedding(state: Mapping[str, Any], layer: int, layers: int) -> Arrays:
    """The part of a layer in what the embeddings of all layers are joined to (Gemma 4)."""
    if "embed_tokens_per_layer.weight" not in state:
        return {}
    table, mapped = (
        np.split(state[f"{n}.weight"], layers, axis)[layer]
        for n, axis in (("embed_tokens_per_layer", 1), ("per_layer_model_projection", 0))
    )
    return {"own/embedding/tokens": table, "own/map": mapped.T}


def stacked(decoder: LanguageModel, length: int, read: Callable[[int], Arrays]) -> Arrays:
    """The arrays of all layers by the names of our loops over them; `read`: those of one layer."""
    made: Arrays = {}
    first = 0
    for number, (period, count) in enumerate(runs(decoder.seen(length))):
        top = f"layers_{number}" if number else "layers"
        for place in range(len(period)):
            scope = f"{top}/layer_{place}" if len(period) > 1 else top
            each = [read(i) for i in range(first + place, first + count * len(period), len(period))]
            made |= {f"{scope}/{n}": np.stack([one[n] for one in each]) for n in each[0]}
        first += count * len(period)
    return made


def ours(state: Mapping[str, Any], config: Mapping[str, Any], length: int) -> Arrays:
    """Our names -> arrays, of as many elements as the variables."""
    found = chosen(config, "the configuration")
    decoder = found.reads(found.fields(), ConfiguredTraining(batch=1, length=length))
    assert isinstance(decoder, LanguageModel)
    state = {re.sub(r"^(model|gpt_neox|backbone)\.", "", n): x for n, x in state.items()}
    if config["model_type"] in RENAMED:
        for theirs, usual in USUAL.items():
            state = {re.sub(rf"(?<![a-z_]){re.escape(theirs)}", usual, n): x for n, x in state.items()}
    made: Arrays = {}
    for own, theirs in (
        (
            "embedding/tokens",
            ("embed_tokens.weight", "embeddings.weight", "embeddings.tok_embeddings.weight"),
        ),
        ("embedding_norm/scale", ("embeddings.norm.weight",)),
        ("own_norm/scale", ("per_layer_projection_norm.weight",)),
        ("transform/weight", ("head.dense.weight", "lm_head.dense.weight")),
        ("transform_norm/scale", ("head.norm.weight", "lm_head.norm.weight")),
        ("final_norm/scale", ("norm.weight", "norm_f.weight", "final_layernorm.weight", "final_norm.weight")),
        ("final_norm/bias", ("norm.bias", "final_layernorm.bias")),
        ("output/bias", ("lm_head.bias", "decoder.bias")),
        ("output/projection", ("lm_head.weight",)),
    ):
        for name in theirs:
            if name in state:
                made[own] = state[name].T if own in ("output/projection", "transform/weight") else state[name]

    def read(i: int) -> Arrays:
        start = f"layers.{i}."
        inner = {n.removeprefix(start): x for n, x in state.items() if n.startswith(start)}
        return Layer(inner, config).read() | own_embedding(state, i, len(decoder.layers))

    return made | stacked(decoder, length, read)
