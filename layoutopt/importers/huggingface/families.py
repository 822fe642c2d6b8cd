"""Families of language models: from the fields of a configuration to their meaning.

Defaults are those of the classes of transformers, because configurations omit default values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layoutopt.importers.huggingface.decoder import LanguageModel, Latent, LayerKind, Mixture, Norm
from layoutopt.importers.huggingface.fields import Fields
from layoutopt.importers.huggingface.rotary import magnitude, rotary, stretched
from layoutopt.importers.huggingface.training import ConfiguredTraining
from mesh_tf_core import layers as nn

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""Names of activations there -> here."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def llama(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Llama 1 to 3, and whatever calls itself so."""
    return _decoder(fields, biases="all" if fields.flag("attention_bias") else "none")


def mistral(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Mistral: Llama with a sliding window."""
    window = (
        fields.count("sliding_window", 4096) if "sliding_window" not in fields.values else _window(fields)
    )
    return _decoder(fields, windows=window, kv_heads=8)


def mixtral(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Mixtral: Mistral with a mixture of experts in every layer."""
    fields.only("router_jitter_noise", 0, 0.0)
    count, chosen = fields.count("num_local_experts", 8), fields.count("num_experts_per_tok", 2)
    _own_balance(fields)
    router = nn.TopExperts(chosen=chosen)
    mixture = Mixture(count, fields.count("intermediate_size"), router)
    made = _decoder(fields, windows=_window(fields), kv_heads=8, base=1e6, epsilon=1e-5)
    layers = tuple(replace(layer, experts=True) for layer in made.layers)
    return replace(made, layers=layers, mixture=mixture)


def qwen2(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Qwen 2 and 2.5: Llama with biases of queries, keys and values."""
    return _decoder(fields, biases="qkv", windows=_qwen_windows(fields), kv_heads=32)


def qwen3(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Qwen 3: Llama with normalised queries and keys."""
    fields.only("use_qk_norm", True)
    biases = "all" if fields.flag("attention_bias") else "none"
    windows = _qwen_windows(fields)
    return _decoder(fields, biases=biases, head_norm=True, windows=windows, d_kv=128, kv_heads=32)


def qwen3_moe(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Qwen 3 with mixtures of experts."""
    made = qwen3(fields, training)
    _own_balance(fields)
    count = fields.count("num_experts", fields.count("num_local_experts", 128))
    chosen = fields.count("num_experts_per_tok", 8)
    normalized = fields.flag("norm_topk_prob")
    router = nn.TopExperts(chosen=chosen, normalized=normalized)
    step, plain = fields.count("decoder_sparse_step", 1), fields.listed("mlp_only_layers")
    layers = tuple(
        replace(layer, experts=i not in plain and (i + 1) % step == 0) for i, layer in enumerate(made.layers)
    )
    return replace(
        made, layers=layers, mixture=Mixture(count, fields.count("moe_intermediate_size", 768), router)
    )


def gemma(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Gemma 1."""
    return _gemma(fields, name="hidden_activation" if fields.has("hidden_activation") else "")


def gemma2(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Gemma 2: every other layer sees a window, blocks are normalised on both sides, logits are bounded."""
    count = fields.layers()
    kinds = fields.listed("layer_types") or [_FULL if i % 2 else _SLIDING for i in range(count)]
    made = _gemma(fields, kinds=kinds, window=4096, after=True)
    cap = 50.0 if "attn_logit_softcapping" not in fields.values else fields.number("attn_logit_softcapping")
    final = (
        30.0 if "final_logit_softcapping" not in fields.values else fields.number("final_logit_softcapping")
    )
    return replace(
        made, cap=cap, final_cap=final, scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5
    )


def gemma3(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """Gemma 3, its text: five layers with a window and a faster rotation, then one without."""
    count = fields.layers()
    period = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6))
    kinds = fields.listed("layer_types") or [_SLIDING if (i + 1) % period else _FULL for i in range(count)]
    local = nn.Rotary(fields.number("rope_local_base_freq", 10000.0))
    if isinstance(kinds_of := fields.raw("rope_parameters"), dict) and _SLIDING in kinds_of:
        local = rotary(fields, 10000.0, _SLIDING)
    fields.only("use_bidirectional_attention", False)
    made = _gemma(fields, kinds=kinds, window=4096, after=True, local=local, base=1e6)
    return replace(
        made,
        head_norm=True,
        cap=fields.number("attn_logit_softcapping"),
        final_cap=fields.number("final_logit_softcapping"),
        scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
    )


def deepseek_v2(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """DeepSeek-V2 and V2-Lite: latent attention, many small experts and shared experts."""
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    fields.only("topk_method", "greedy", "group_limited_greedy")
    grouped = fields.raw("topk_method") == "group_limited_greedy"
    groups, asked = fields.count("n_group", 1), fields.count("topk_group", 1)
    router = nn.TopExperts(
        chosen=fields.count("num_experts_per_tok"),
        normalized=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups if grouped else 1,
        groups_chosen=asked if grouped else 1,
    )
    return _deepseek(fields, router, first=0)


def deepseek_v3(fields: Fields, training: ConfiguredTraining) -> LanguageModel:
    """DeepSeek-V3 and R1: V2 with sigmoid gates. Its predictions of later tokens are left out, and the bias
    that balances its experts stays 0, as in transformers."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("rope_interleave", True)
    fields.raw("num_nextn_predict_layers")
    router = nn.TopExperts(
        chosen=fields.count("num_experts_per_tok", 8),
        scores="sigmoid",
        normalized=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        groups=fields.count("n_group", 8),
        groups_chosen=fields.count("topk_group", 4),
    )
    return _deepseek(fields, router, first=3)


def _deepseek(fields: Fields, router: nn.TopExperts, first: int) -> LanguageModel:
    """What DeepSeeks have in common; `first`: layers without experts, where the configuration names none."""
    fields.only("moe_layer_freq", 1)
    fields.only("attention_bias", False)
    for name in ("aux_loss_alpha", "seq_aux", "ep_size", "head_dim", "num_key_value_heads"):
        fields.raw(name)
    _own_balance(fields)
    width, plain = fields.count("moe_intermediate_size"), fields.count("qk_nope_head_dim", 128)
    shared = fields.count("n_shared_experts", 1, least=0) * width
    mixture = Mixture(fields.count("n_routed_experts"), width, router, shared)
    latent = Latent(
        fields.count("kv_lora_rank", 512),
        fields.count("q_lora_rank") if fields.has("q_lora_rank") else 0,
        fields.count("qk_rope_head_dim", 64),
        fields.count("v_head_dim", 128),
    )
    made = _decoder(fields, latent=latent, mixture=mixture, scale=_sharper(fields))
    dense = fields.count("first_k_dense_replace", first, least=0)
    layers = tuple(replace(layer, experts=i >= dense) for i, layer in enumerate(made.layers))
    return replace(made, layers=layers, d_kv=plain, kv_heads=0)


def _sharper(fields: Fields) -> float:
    """By how much positions that are stretched make attention's logits larger."""
    inner = stretched(fields)
    all_dims = inner.number("mscale_all_dim")
    return magnitude(inner.number("factor", 1.0), all_dims) ** 2 if all_dims else 1.0


def _decoder(
    fields: Fields,
    windows: int | Sequence[int] = 0,
    base: float = 10000.0,
    epsilon: float = 1e-6,
    d_kv: int = 0,
    kv_heads: int = 0,
    **more: Any,
) -> LanguageModel:
    """What Llama and its nearest relatives have in common.

    Args:
      windows: of every layer, or of each.
      d_kv, kv_heads: where the configuration has none; 0: d_model / heads, and as many as heads.
    """
    count, heads = fields.layers(), fields.count("num_attention_heads")
    d_model = fields.count("hidden_size")
    if not fields.has("head_dim") and not d_kv and d_model % heads:
        raise fields.wrong("hidden_size", f"give a multiple of num_attention_heads ({heads})")
    if heads % (of_keys := fields.count("num_key_value_heads", kv_heads or heads)):
        raise fields.wrong("num_key_value_heads", f"give a divisor of num_attention_heads ({heads})")
    turned = rotary(fields, base, _FULL)
    each = [windows] * count if isinstance(windows, int) else windows
    stated = {
        "activation": ACTIVATIONS[fields.text("hidden_act", "silu", ACTIVATIONS)],
        "tied": fields.flag("tie_word_embeddings"),
        "norm": Norm(fields.number("rms_norm_eps", epsilon)),
        "mlp_bias": fields.flag("mlp_bias"),
    }
    return LanguageModel(
        layers=tuple(LayerKind(turned, window) for window in each),
        vocab=fields.count("vocab_size"),
        d_model=d_model,
        d_ff=fields.count("intermediate_size"),
        heads=heads,
        kv_heads=of_keys,
        d_kv=fields.count("head_dim", d_kv or d_model // heads),
        stddev=fields.number("initializer_range", 0.02),
        dropout=fields.number("attention_dropout"),
        **{**stated, **more},
    )


def _gemma(
    fields: Fields,
    kinds: Sequence[str] = (),
    window: int = 0,
    after: bool = False,
    local: nn.Rotary | None = None,
    base: float = 10000.0,
    name: str = "hidden_activation",
) -> LanguageModel:
    """What Gemmas have in common. Gemma 1 was published with a `hidden_act` that is not what it has."""
    act = fields.text(name, "gelu_pytorch_tanh", ACTIVATIONS) if name else "gelu_pytorch_tanh"
    fields.raw("hidden_act")
    biases = "all" if fields.flag("attention_bias") else "none"
    made = _decoder(
        fields,
        base=base,
        d_kv=256,
        tied=fields.flag("tie_word_embeddings", True),
        norm=Norm(fields.number("rms_norm_eps", 1e-6), around_one=True),
        activation=ACTIVATIONS[act],
        biases=biases,
        after=after,
        times=fields.count("hidden_size") ** 0.5,
    )
    if not kinds:
        return made
    seen = fields.count("sliding_window", window)
    layers = [
        LayerKind(local or layer.rotary, seen) if kind == _SLIDING else layer
        for layer, kind in zip(made.layers, _kinds(fields, kinds), strict=True)
    ]
    return replace(made, layers=tuple(layers))


def _kinds(fields: Fields, kinds: Sequence[str]) -> Sequence[str]:
    count = fields.layers()
    if any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise fields.wrong(
            "layer_types", f"give a list whose entries are {_FULL!r} or {_SLIDING!r}, one per layer"
        )
    if len(kinds) < count:
        raise fields.wrong(
            "layer_types", f"it has {len(kinds)} entries for {count} layers; give one entry per layer"
        )
    return kinds[:count]


def _window(fields: Fields) -> int:
    """The window of all layers; null: none."""
    return fields.count("sliding_window") if fields.has("sliding_window") else 0


def _qwen_windows(fields: Fields) -> Sequence[int]:
    """Windows of layers, from `max_window_layers` on, if they are used at all."""
    count = fields.layers()
    used, full = fields.flag("use_sliding_window"), fields.count("max_window_layers", 28, least=0)
    window = fields.count("sliding_window", 4096) if used else 0
    fields.raw("sliding_window")
    kinds = fields.listed("layer_types") or [_FULL if i < full else _SLIDING for i in range(count)]
    return [window if kind == _SLIDING else 0 for kind in _kinds(fields, kinds)]


def _own_balance(fields: Fields) -> None:
    """Hugging Face's load-balance loss is over all layers together, and by default not used; ours is
    `balance`."""
    fields.raw("router_aux_loss_coef")
    fields.only("output_router_logits", False)
