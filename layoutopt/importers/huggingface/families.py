"""Families of language models: what distinguishes each from Llama, besides the sizes in its files.

Defaults of fields are those of the classes of transformers (`defaults.json`), because files omit them.
"""

from __future__ import annotations

from dataclasses import replace

from layoutopt.importers.huggingface import patterns
from layoutopt.importers.huggingface.form import Form
from layoutopt.importers.huggingface.mixers import LINEAR, Heads
from layoutopt.importers.huggingface.mixtures import DEEPSEEK, DEEPSEEK_3, GLM, MIXTRAL, Experts
from layoutopt.importers.huggingface.patterns import alternating

QWEN_3 = Form(
    heads=Heads(norm="head"), pattern=patterns.qwen, only=(("use_qk_norm", (True,)),), unread=("qkv_bias",)
)
QWEN_NEXT = Form(
    norm={"around_one": True},
    heads=Heads(norm="head", gated=True, partial=0.25),
    pattern=alternating(4, "full_attention_interval", usual=LINEAR),
    linear="delta",
    only=(("attn_output_gate", (True,)),),
    unread=(
        "use_sliding_window",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "full_attention_interval",
        "mamba_ssm_dtype",
    ),
)
SHARED = Experts(shared="shared_expert_intermediate_size", shared_gate=True, normalized=True)
GEMMA = Form(norm={"around_one": True}, times="root", activation="gelu_pytorch_tanh")
GEMMA_2 = replace(
    GEMMA,
    place="both",
    heads=Heads(scale="query_pre_attn_scalar", cap="attn_logit_softcapping"),
    pattern=alternating(2),
)
LATENT = Form(
    heads=Heads(latent=True), only=(("attention_bias", (False,)),), unread=("num_nextn_predict_layers",)
)
GLM_4 = Form(
    heads=Heads("qkv", norm="head", norm_when="use_qk_norm", partial=0.5),
    mixture=GLM,
    unread=("num_nextn_predict_layers",),
)
OLMO_2 = Form(place="after", heads=Heads(norm="all"))
GRANITE = Form(
    heads=Heads(scale="attention_multiplier"),
    times="embedding_multiplier",
    logits="/logits_scaling",
    added="residual_multiplier",
    only=(("normalization_function", ("rmsnorm",)),),
    unread=("init_method",),
)
GRANITE_MOE = replace(
    GRANITE,
    mixture=Experts(
        "num_local_experts", d_ff="intermediate_size", normalized=True, shared="shared_intermediate_size"
    ),
)
PHI = Form(
    {"center": True, "bias": True},
    heads=Heads(when="", norm="head", norm_when="qk_layernorm", partial=0.5),
    place="parallel",
    gated=False,
    mlp_bias=True,
    head_bias=True,
    unread=("resid_pdrop", "embd_pdrop"),
)
FORMS: dict[str, tuple[str, Form]] = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", replace(LATENT, mixture=DEEPSEEK)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", replace(LATENT, mixture=DEEPSEEK_3)),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        replace(LATENT, heads=Heads(latent=True, indexed=True), mixture=DEEPSEEK_3),
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        Form(
            heads=Heads(times=("key_multiplier", "")),
            pattern=patterns.hybrid,
            times="embedding_multiplier",
            logits="lm_head_multiplier",
            only=(("projectors_bias", (False,)),),
            unread=(
                "attn_layer_indices",
                "mlp_expansion_factor",
                "num_logits_to_keep",
                "time_step_min",
                "time_step_rank",
            ),
        ),
    ),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", GEMMA_2),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        replace(
            GEMMA_2,
            heads=replace(GEMMA_2.heads, norm="head", local=("rope_local_base_freq", 10000.0)),
            pattern=alternating(6, "sliding_window_pattern", "_sliding_window_pattern"),
            only=(("use_bidirectional_attention", (False,)),),
        ),
    ),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        Form(
            place="both",
            heads=Heads(
                norm="head",
                values_normed=True,
                scale=1.0,
                window=512,
                full=(("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")),
                local=("rope_local_base_freq", 10000.0),
            ),
            pattern=alternating(6),
            times="root",
            beside="enable_moe_block",
            mixture=Experts(chosen="top_k_experts", normalized=True, expert_scale=True),
            only=(
                ("hidden_size_per_layer_input", (0,)),
                ("num_kv_shared_layers", (0,)),
                ("use_bidirectional_attention", (None, False, "vision")),
            ),
            unread=("vocab_size_per_layer_input", "use_double_wide_mlp"),
        ),
    ),
    "glm": ("GlmForCausalLM", Form(heads=Heads("qkv", partial=0.5))),
    "glm4": ("Glm4ForCausalLM", Form(heads=Heads("qkv", partial=0.5), place="both")),
    "glm4_moe": ("Glm4MoeForCausalLM", GLM_4),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", replace(LATENT, mixture=GLM)),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        replace(LATENT, heads=Heads(latent=True, indexed=True), mixture=DEEPSEEK_3),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        Form(
            heads=Heads(sinks="all", window=128),
            pattern=alternating(2),
            mixture=Experts(
                "num_local_experts",
                d_ff="intermediate_size",
                normalized=True,
                bias=True,
                activation="clamped_swish",
                up="clamped_one",
                only=(("swiglu_limit", (7.0,)), ("swiglu_alpha", (1.702,))),
            ),
            unread=("initial_context_length", "experts_per_token"),
        ),
    ),
    "granite": ("GraniteForCausalLM", GRANITE),
    "granitemoe": ("GraniteMoeForCausalLM", GRANITE_MOE),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        replace(
            GRANITE_MOE,
            heads=replace(GRANITE.heads, turned="position_embedding_type"),
            pattern=patterns.linear,
            linear="granite",
            unread=(
                "init_method",
                "intermediate_size",
                "num_experts_per_tok",
                *(f"mamba_{n}" for n in ("n_heads", "d_head", "d_state", "n_groups", "d_conv", "chunk_size")),
                *(f"mamba_{n}" for n in ("expand", "conv_bias", "proj_bias")),
            ),
            dense="shared_intermediate_size",
        ),
    ),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", GRANITE_MOE),
    "llama": ("LlamaForCausalLM", Form()),
    "llama4_text": (
        "Llama4ForCausalLM",
        Form(
            heads=Heads(norm="unit", norm_when="use_qk_norm"),
            pattern=patterns.chunked,
            dense="intermediate_size_mlp",
            mixture=Experts(
                "num_local_experts",
                d_ff="intermediate_size",
                scores="sigmoid",
                normalized=False,
                shared="intermediate_size",
                gates_first=True,
            ),
            unread=("for_llm_compressor",),
        ),
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM",
        Form(
            heads=Heads(
                sinks="sliding",
                partial=0.334,
                local=("swa_rope_theta", 10000.0),
                windowed=tuple(
                    (n, f"swa_{n}")
                    for n in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
                ),
                times=("", "attention_value_scale"),
            ),
            pattern=patterns.mimo,
            mixture=replace(DEEPSEEK_3, first=1),
            only=(("add_swa_attention_sink_bias", (True,)), ("add_full_attention_sink_bias", (False,))),
            unread=("attention_chunk_size", "sliding_window_size"),
        ),
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        Form(
            place="carried",
            heads=Heads(when="attention_bias"),
            pattern=patterns.minimax,
            linear="lightning",
            factors=True,
            mixture=MIXTRAL,
            only=(("postnorm", (True,)), ("shared_intermediate_size", (0,))),
            unread=("shared_moe_mode", "layernorm_epsilon"),
        ),
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        Form(
            heads=Heads(norm="all", partial=0.5),
            mixture=Experts(
                "num_local_experts",
                d_ff="intermediate_size",
                scores="sigmoid",
                normalized=True,
                only=(("scoring_func", ("sigmoid",)), ("shared_intermediate_size", (0,))),
            ),
            only=(("use_qk_norm", (True,)), ("qk_norm_type", ("per_layer",))),
            unread=(
                "use_mtp",
                "mtp_transformer_layers",
                "num_mtp_modules",
                "use_routing_bias",
                "attn_type_list",
            ),
        ),
    ),
    "mistral": ("MistralForCausalLM", Form(pattern=patterns.windowed)),
    "mixtral": ("MixtralForCausalLM", Form(pattern=patterns.windowed, mixture=MIXTRAL)),
    "nemotron_h": (
        "NemotronHForCausalLM",
        Form(
            heads=Heads(turned=False),
            pattern=patterns.lettered,
            linear="nemotron",
            single=True,
            gated=False,
            mixture=replace(
                DEEPSEEK_3,
                first=None,
                shared="moe_shared_expert_intermediate_size",
                shared_count="",
                gated=False,
                latent="moe_latent_size",
            ),
            unread=(
                "residual_in_fp32",
                "rescale_prenorm_residual",
                "hidden_dropout",
                "n_shared_experts",
                "use_mamba_kernels",
                "partial_rotary_factor",
                "num_logits_to_keep",
                "norm_eps",
                "mamba_ssm_cache_dtype",
                "moe_shared_expert_overlap",
                "num_nextn_predict_layers",
            ),
        ),
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        Form(
            norm={"center": True, "bias": "norm_bias"},
            heads=Heads(causal=False, base="global_rope_theta", local=("local_rope_theta", 10000.0)),
            pattern=patterns.modernbert,
            head_bias="decoder_bias",
            masked=True,
            unread=(
                "position_embedding_type",
                "layer_norm_eps",
                "norm_eps",
                "initializer_cutoff_factor",
                "sparse_prediction",
                "sparse_pred_ignore_index",
                "classifier_pooling",
                "classifier_dropout",
                "reference_compile",
                "deterministic_flash_attn",
                "repad_logits_with_grad",
                "embedding_dropout",
                "mlp_dropout",
            ),
        ),
    ),
    "nemotron-nas": ("DeciLMForCausalLM", Form(varied=True)),
    "olmo": ("OlmoForCausalLM", Form({"center": True, "scale": False}, heads=Heads(clipped="clip_qkv"))),
    "olmo2": ("Olmo2ForCausalLM", OLMO_2),
    "olmo3": (
        "Olmo3ForCausalLM",
        replace(OLMO_2, heads=replace(OLMO_2.heads, local=("rope_theta", 500000.0)), pattern=alternating(4)),
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        Form(heads=Heads(norm="all", clipped="clip_qkv"), mixture=Experts(d_ff="intermediate_size")),
    ),
    "phi": ("PhiForCausalLM", PHI),
    "phi3": (
        "Phi3ForCausalLM",
        Form(
            pattern=patterns.windowed,
            only=(("full_attn_mod", (1,)), ("interpolate_factor", (1,))),
            unread=("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"),
        ),
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        Form(
            {"center": True, "bias": True},
            pattern=patterns.windowed,
            head_bias="lm_head_bias",
            mixture=MIXTRAL,
            remarks=("experts are chosen by the two largest softmax weights, and not by Phi's sparse mixer",),
            unread=("input_jitter_noise", "hidden_dropout", "original_max_position_embeddings"),
        ),
    ),
    "qwen2": ("Qwen2ForCausalLM", Form(heads=Heads("qkv", ""), pattern=patterns.qwen)),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        Form(
            heads=Heads("qkv", "qkv_bias"),
            pattern=patterns.qwen,
            mixture=replace(SHARED, normalized="norm_topk_prob"),
        ),
    ),
    "qwen3": ("Qwen3ForCausalLM", QWEN_3),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", replace(QWEN_NEXT, mixture=SHARED)),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", QWEN_NEXT),
    "qwen3_moe": ("Qwen3MoeForCausalLM", replace(QWEN_3, mixture=Experts())),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        replace(QWEN_NEXT, mixture=replace(SHARED, normalized="norm_topk_prob")),
    ),
    "qwen3_vl_moe_text": (
        "Qwen3VLMoeTextModel",
        replace(QWEN_3, mixture=Experts(normalized=True, only=(("norm_topk_prob", (True,)),))),
    ),
    "qwen3_vl_text": ("Qwen3VLTextModel", QWEN_3),
    "smollm3": (
        "SmolLM3ForCausalLM",
        Form(pattern=patterns.unturned, unread=("use_sliding_window", "max_window_layers")),
    ),
}
"""model_type -> the architecture, and its form."""
