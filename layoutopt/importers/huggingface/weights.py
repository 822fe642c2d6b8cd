"""The locations of the weights of Hugging Face checkpoints, for `Trainer.load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from layoutopt.importers.huggingface.decoder import LanguageModel, LayerKind, runs
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.training.weights import Source

_TURNED, _AS_IS = (1, 0), (0,)
_LAYER = {
    "attention_norm/scale": ("input_layernorm.weight", _AS_IS),
    "attention/q": ("self_attn.q_proj.weight", _TURNED),
    "attention/k": ("self_attn.k_proj.weight", _TURNED),
    "attention/v": ("self_attn.v_proj.weight", _TURNED),
    "attention/o": ("self_attn.o_proj.weight", _TURNED),
    "attention/q_bias": ("self_attn.q_proj.bias", _AS_IS),
    "attention/k_bias": ("self_attn.k_proj.bias", _AS_IS),
    "attention/v_bias": ("self_attn.v_proj.bias", _AS_IS),
    "attention/o_bias": ("self_attn.o_proj.bias", _AS_IS),
    "attention/q_norm/scale": ("self_attn.q_norm.weight", _AS_IS),
    "attention/k_norm/scale": ("self_attn.k_norm.weight", _AS_IS),
    "feed_forward_norm/scale": ("post_attention_layernorm.weight", _AS_IS),
    "feed_forward/in/0/weight": ("mlp.gate_proj.weight", _TURNED),
    "feed_forward/in/1/weight": ("mlp.up_proj.weight", _TURNED),
    "feed_forward/out/weight": ("mlp.down_proj.weight", _TURNED),
    "feed_forward/in/0/bias": ("mlp.gate_proj.bias", _AS_IS),
    "feed_forward/in/1/bias": ("mlp.up_proj.bias", _AS_IS),
    "feed_forward/out/bias": ("mlp.down_proj.bias", _AS_IS),
    "experts/router": ("mlp.gate.weight", _TURNED),
    "experts/wi": ("mlp.experts.{}.gate_proj.weight", _TURNED),
    "experts/wg": ("mlp.experts.{}.up_proj.weight", _TURNED),
    "experts/wo": ("mlp.experts.{}.down_proj.weight", _TURNED),
}
_AFTER = {
    "attention_after_norm/scale": ("post_attention_layernorm.weight", _AS_IS),
    "feed_forward_norm/scale": ("pre_feedforward_layernorm.weight", _AS_IS),
    "feed_forward_after_norm/scale": ("post_feedforward_layernorm.weight", _AS_IS),
}
_PLACED = {"both": _AFTER, "after": {n: w for n, w in _AFTER.items() if "_after_" in n}}
"""Of families that normalise blocks on both sides, or after them."""
_MIXTRAL = {
    "experts/router": ("block_sparse_moe.gate.weight", _TURNED),
    "experts/wi": ("block_sparse_moe.experts.{}.w1.weight", _TURNED),
    "experts/wg": ("block_sparse_moe.experts.{}.w3.weight", _TURNED),
    "experts/wo": ("block_sparse_moe.experts.{}.w2.weight", _TURNED),
}
# fmt: off
_JOINED = frozenset((
    "afmoe", "apertus", "arcee", "bamba", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "flex_olmo", "glm", "glm4", "gpt_neox", "granitemoe", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "lfm2_moe", "nemotron", "phi3", "phimoe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    "youtu",
))
# fmt: on
"""Families whose layers have Llama's variables, but whose arrays join, name or order them otherwise."""
_OUTSIDE = {
    "embedding/tokens": Source("model.embed_tokens.weight"),
    "output/projection": Source("lm_head.weight", _TURNED),
    "final_norm/scale": Source("model.norm.weight"),
}


def decoder_names(
    decoder: LanguageModel, family: str, length: int, variables: Mapping[str, Variable]
) -> Iterator[tuple[str, Source]]:
    """The source of every trained variable of a language model, as far as arrays have one variable each."""
    if family in _JOINED:
        return
    inside = {**_LAYER, **_PLACED.get(decoder.place, {}), **(_MIXTRAL if family == "mixtral" else {})}
    for name, source in _OUTSIDE.items():
        if name in variables:
            yield name, source
    first = 0
    for number, (period, count) in enumerate(runs(decoder.seen(length))):
        yield from _stack(inside, period, count, number, first, variables)
        first += count * len(period)


def _stack(
    inside: Mapping[str, tuple[str, tuple[int, ...]]],
    period: tuple[LayerKind, ...],
    count: int,
    number: int,
    first: int,
    variables: Mapping[str, Variable],
) -> Iterator[tuple[str, Source]]:
    top = f"layers_{number}" if number else "layers"
    for place in range(len(period)):
        scope = f"{top}/layer_{place}" if len(period) > 1 else top
        at = range(first + place, first + place + count * len(period), len(period))
        for own, (theirs, order) in inside.items():
            variable = variables.get(f"{scope}/{own}")
            if variable is None:
                continue
            experts = range(variable.shape.sizes[1] if "{}" in theirs else 1)
            every = tuple(f"model.layers.{i}.{theirs.format(e)}" for i in at for e in experts)
            yield variable.name, Source(every, order)


_ENCODER = {
    "attention/q": ("{a}.query.weight", _TURNED),
    "attention/k": ("{a}.key.weight", _TURNED),
    "attention/v": ("{a}.value.weight", _TURNED),
    "attention/o": ("attention.output.dense.weight", _TURNED),
    "attention/q_bias": ("{a}.query.bias", _AS_IS),
    "attention/k_bias": ("{a}.key.bias", _AS_IS),
    "attention/v_bias": ("{a}.value.bias", _AS_IS),
    "attention/o_bias": ("attention.output.dense.bias", _AS_IS),
    "attention_norm/scale": ("{n}.weight", _AS_IS),
    "attention_norm/bias": ("{n}.bias", _AS_IS),
    "feed_forward/wi": ("intermediate.dense.weight", _TURNED),
    "feed_forward/bi": ("intermediate.dense.bias", _AS_IS),
    "feed_forward/wo": ("output.dense.weight", _TURNED),
    "feed_forward/bo": ("output.dense.bias", _AS_IS),
    "feed_forward_norm/scale": ("{m}.weight", _AS_IS),
    "feed_forward_norm/bias": ("{m}.bias", _AS_IS),
}
_BERT = {
    "embedding/tokens": Source("bert.embeddings.word_embeddings.weight"),
    "embedding/positions": Source("bert.embeddings.position_embeddings.weight"),
    "embedding/segments": Source("bert.embeddings.token_type_embeddings.weight"),
    "embedding_norm/scale": Source("bert.embeddings.LayerNorm.weight"),
    "embedding_norm/bias": Source("bert.embeddings.LayerNorm.bias"),
    "transform/weight": Source("cls.predictions.transform.dense.weight", _TURNED),
    "transform/bias": Source("cls.predictions.transform.dense.bias"),
    "transform_norm/scale": Source("cls.predictions.transform.LayerNorm.weight"),
    "transform_norm/bias": Source("cls.predictions.transform.LayerNorm.bias"),
    "output/bias": Source("cls.predictions.bias"),
    "output/projection": Source("cls.predictions.decoder.weight", _TURNED),
}
_VIT = {
    "embedding/weight": Source("vit.embeddings.patch_embeddings.projection.weight", (2, 3, 1, 0)),
    "embedding/bias": Source("vit.embeddings.patch_embeddings.projection.bias"),
    "embedding/class": Source("vit.embeddings.cls_token", (0, 1, 2)),
    "embedding/positions": Source("vit.embeddings.position_embeddings", (0, 1, 2)),
    "final_norm/scale": Source("vit.layernorm.weight"),
    "final_norm/bias": Source("vit.layernorm.bias"),
    "output/weight": Source("classifier.weight", _TURNED),
    "output/bias": Source("classifier.bias"),
}
_ENCODERS = {
    "bert": (_BERT, "bert", ("attention.self", "attention.output.LayerNorm", "output.LayerNorm")),
    "vit": (_VIT, "vit", ("attention.attention", "layernorm_before", "layernorm_after")),
}


def encoder_names(family: str, variables: Mapping[str, Variable]) -> Iterator[tuple[str, Source]]:
    """The source of every trained variable of an encoder."""
    if family not in _ENCODERS:
        return
    outside, top, (attention, first, second) = _ENCODERS[family]
    yield from ((name, source) for name, source in outside.items() if name in variables)
    for own, (theirs, order) in _ENCODER.items():
        name = theirs.format(a=attention, n=first, m=second)
        yield f"layers/{own}", Source(f"{top}.encoder.layer.{{}}.{name}", order)
