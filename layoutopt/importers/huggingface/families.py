"""Families of language models as records: what distinguishes each from Llama, besides the sizes in its files.

Defaults of fields are those of the classes of transformers (`defaults.json`), because files omit them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layoutopt.importers.huggingface import mixers
from layoutopt.importers.huggingface.decoder import Block, LanguageModel, LayerKind
from layoutopt.importers.huggingface.fields import Fields
from layoutopt.importers.huggingface.forms import Mlp, Norm
from layoutopt.importers.huggingface.mixers import FULL, LINEAR, SLIDING, Heads
from layoutopt.importers.huggingface.mixtures import DEEPSEEK, DEEPSEEK_3, GLM, MIXTRAL, Experts
from layoutopt.importers.huggingface.training import ConfiguredTraining

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""Names of activations there -> here."""
EPSILONS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "norm_eps",
    "norm_epsilon",
)
HIDDEN = ("hidden_activation", "mlp_hidden_act", "hidden_act")
Pattern = Callable[[Fields, int], Sequence[str]]
"""From a configuration and its number of layers: the kind of each."""


def alternating(every: int, *names: str, usual: str = SLIDING) -> Pattern:
    """Layers of kind `usual`; each `every`-th, a number that one of `names` may change, is full."""

    def kinds(fields: Fields, count: int) -> Sequence[str]:
        period = fields.count(fields.first(*names), every) if names else every
        return [usual if (i + 1) % period else FULL for i in range(count)]

    return kinds


def qwen(fields: Fields, count: int) -> Sequence[str]:
    """Windows from `max_window_layers` on, if they are used at all."""
    used, full = fields.flag("use_sliding_window"), fields.count("max_window_layers", 28, least=0)
    if not used:
        fields.raw("sliding_window")
        return [FULL] * count
    return [FULL if i < full else SLIDING for i in range(count)]


def windowed(fields: Fields, count: int) -> Sequence[str]:
    """A window in all layers, if there is one."""
    return [SLIDING if fields.has("sliding_window") else FULL] * count


def unturned(fields: Fields, count: int) -> Sequence[str]:
    """No positions in the layers that `no_rope_layers` lists, or each `no_rope_layer_interval`-th."""
    every = fields.count("no_rope_layer_interval", 4)
    turned = fields.listed("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    return [FULL if t else mixers.UNTURNED for t in turned]


def chunked(fields: Fields, count: int) -> Sequence[str]:
    """Llama 4: chunks where positions turn."""
    kinds = unturned(fields, count)
    if not fields.has("attention_chunk_size"):
        return kinds
    return [mixers.CHUNKED if kind == FULL else kind for kind in kinds]


def mimo(fields: Fields, count: int) -> Sequence[str]:
    """MiMo: windows where `hybrid_layer_pattern` has a 1."""
    listed = fields.listed("hybrid_layer_pattern") or [int(i > 0 and (i + 1) % 6 > 0) for i in range(count)]
    return [SLIDING if i else FULL for i in listed]


def lettered(fields: Fields, count: int) -> Sequence[str]:
    """Nemotron-H: letters of `hybrid_override_pattern`, or a list."""
    letters = {"M": LINEAR, "*": FULL, "-": mixers.MLP, "E": mixers.MOE}
    said = fields.raw("hybrid_override_pattern")
    if said is None:
        return fields.listed("layers_block_type") or [LINEAR, mixers.MOE, FULL, mixers.MLP]
    if not isinstance(said, str) or set(said) - set(letters):
        raise fields.wrong("hybrid_override_pattern", f"give one of {' '.join(letters)} for each layer")
    return [letters[letter] for letter in said]


def minimax(fields: Fields, count: int) -> Sequence[str]:
    """MiniMax: 0 in `attn_type_list` is lightning attention."""
    listed = fields.listed("attn_type_list") or [(i + 1) % 2 for i in range(count)]
    return [FULL if full else LINEAR for full in listed]


def hybrid(fields: Fields, count: int) -> Sequence[str]:
    """Falcon-H1: attention and a state space side by side."""
    return [mixers.BOTH] * count


def linear(fields: Fields, count: int) -> Sequence[str]:
    """State spaces, where `layer_types` says nothing else."""
    return [LINEAR] * count


LLAMA = Heads()


@dataclass(frozen=True)
class Form:
    """What a family of language models is. The defaults are Llama's.

    Attributes:
      norm: fields of `Norm`; place: where norms stand (`decoder.PLACES`).
      heads: of attention (`Heads`).
      linear: the mixer of layers of linear attention (`mixers.LINEARS`).
      pattern: the kinds of layers, where the file has no `layer_types`; None: full attention.
      single: a layer has one block, a mixer or a feed-forward block, which its kind names.
      gated, mlp_bias: of feed-forward blocks; a name is a field.
      activation: of them, where a file does not have the field `hidden_activation`; "": it is `hidden_act`.
      mixture: its experts (`Experts`); None: none.
      dense: the field of the hidden size of feed-forward blocks.
      head_bias: of the logits; a name is a field.
      times, logits, added: fields of factors of embeddings, logits and results of blocks; "root": the root of
        the width; after "/", the field of a divisor.
      factors: blocks' inputs and results have factors by kind of layer (MiniMax).
      remarks: where the model is not what its family publishes, in words.
      unread: fields that change nothing here.
      only: fields that may have no other values.
    """

    norm: dict[str, bool] | tuple[()] = ()
    place: str = "before"
    heads: Heads = LLAMA
    linear: str = ""
    pattern: Pattern | None = None
    single: bool = False
    gated: bool = True
    mlp_bias: bool | str = "mlp_bias"
    activation: str = ""
    mixture: Experts | None = None
    dense: str = "intermediate_size"
    head_bias: bool | str = False
    times: str = ""
    logits: str = ""
    added: str = ""
    factors: bool = False
    remarks: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    only: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def read(self, fields: Fields, training: ConfiguredTraining) -> LanguageModel:
        """The model of a configuration."""
        for name in self.unread:
            fields.raw(name)
        for name, values in self.only:
            fields.only(name, *values)
        kinds = self._kinds(fields)
        norm = Norm(fields.number(fields.first(*EPSILONS), 1e-6), **dict(self.norm))
        act = self._activation(fields)
        reader = mixers.Reader(fields, training, self.heads, norm, self.linear, len(kinds))
        mixing = None if self.mixture is None else self.mixture.read(fields, training, act, len(kinds))
        dense = self._mlp(fields, act, mixing is not None and all(mixing.where))
        added = fields.number(self.added, 1.0) if self.added else 1.0

        def block(kind: str, number: int) -> Block | None:
            mixed = kind == mixers.MOE if self.single else mixing is not None and mixing.where[number]
            if self.single and kind not in (mixers.MOE, mixers.MLP):
                return None
            return mixing.block if mixed and mixing is not None else dense

        layers = tuple(
            LayerKind(reader.mixer(kind), block(kind, i), *self._factors(fields, kind, added))
            for i, kind in enumerate(kinds)
        )
        width = fields.count("hidden_size")
        return LanguageModel(
            layers,
            fields.count("vocab_size"),
            width,
            norm,
            fields.flag("tie_word_embeddings"),
            fields.number("initializer_range", 0.02),
            self.place,
            fields.flag(self.head_bias) if isinstance(self.head_bias, str) else self.head_bias,
            fields.number("final_logit_softcapping"),
            width**0.5 if self.times == "root" else fields.factor(self.times),
            1 / fields.positive(self.logits[1:], 1.0) if "/" in self.logits else fields.factor(self.logits),
            self.remarks,
        )

    def _kinds(self, fields: Fields) -> Sequence[str]:
        count = fields.layers() if fields.has("num_hidden_layers") else 0
        usual = [FULL] * count if self.pattern is None else self.pattern(fields, count)
        listed = [mixers.KINDS.get(str(kind), "") for kind in fields.listed("layer_types")]
        if self.pattern in (unturned, chunked):  # lists of kinds do not say which layers have no positions
            listed = []
        kinds = listed or [mixers.KINDS.get(kind, "") for kind in usual]
        if "" in kinds or (self.linear == "" and LINEAR in kinds):
            known = ", ".join(k for k in mixers.KINDS if self.linear or mixers.KINDS[k] != LINEAR)
            raise fields.wrong("layer_types", f"give a list of one entry per layer; known: {known}")
        if len(kinds) < count and not self.single:
            raise fields.wrong(
                "layer_types", f"it has {len(kinds)} entries for {count} layers; give one entry per layer"
            )
        return kinds[:count] if count and not self.single else kinds

    def _activation(self, fields: Fields) -> str:
        if self.activation and not fields.has("hidden_activation"):
            fields.raw("hidden_act")
            return ACTIVATIONS[self.activation]
        name = fields.first(*HIDDEN)
        if name == "hidden_activation":
            fields.raw("hidden_act")
        return ACTIVATIONS[fields.text(name, "silu", ACTIVATIONS)]

    def _mlp(self, fields: Fields, act: str, unused: bool) -> Mlp:
        biased = self.mlp_bias
        bias = fields.flag(biased) if isinstance(biased, str) and biased else bool(biased)
        size = 1 if unused and not fields.has(self.dense) else fields.count(self.dense)
        times = fields.listed("mlp_multipliers") or [1.0, 1.0]
        return Mlp(size, act, self.gated, bias, (float(times[0]), float(times[1])))

    def _factors(
        self, fields: Fields, kind: str, added: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        if not self.factors:
            return (1.0, 1.0), (added, added)
        of = "linear" if kind == LINEAR else "full"
        kept, new = (
            [
                fields.number(fields.first(f"{n}_{f}_factor", f"layernorm_{m}_{f}"), 1.0)
                for n, m in ((f"{of}_attn", f"{of}_attention"), ("mlp", "mlp"))
            ]
            for f in ("alpha", "beta")
        )
        return (kept[0], kept[1]), (new[0], new[1])


QWEN_3 = Form(heads=Heads(norm="head"), pattern=qwen, only=(("use_qk_norm", (True,)),), unread=("qkv_bias",))
QWEN_NEXT = Form(
    norm={"around_one": True},
    heads=Heads(norm="head", gated=True, partial=0.25),
    pattern=alternating(4, "full_attention_interval", usual=LINEAR),
    linear="delta",
    only=(("attn_output_gate", (True,)),),
    unread=(
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
            pattern=hybrid,
            times="embedding_multiplier",
            logits="lm_head_multiplier",
            only=(("projectors_bias", (False,)),),
            unread=("num_logits_to_keep",),
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
            pattern=linear,
            linear="granite",
            dense="shared_intermediate_size",
        ),
    ),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", GRANITE_MOE),
    "llama": ("LlamaForCausalLM", Form()),
    "llama4_text": (
        "Llama4ForCausalLM",
        Form(
            heads=Heads(norm="unit", norm_when="use_qk_norm"),
            pattern=chunked,
            dense="intermediate_size_mlp",
            mixture=Experts(
                "num_local_experts",
                d_ff="intermediate_size",
                scores="sigmoid",
                normalized=False,
                shared="intermediate_size",
            ),
            remarks=("the gates of experts multiply their results, and not their inputs as in Llama 4",),
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
            pattern=mimo,
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
            pattern=minimax,
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
    "mistral": ("MistralForCausalLM", Form(pattern=windowed)),
    "mixtral": ("MixtralForCausalLM", Form(pattern=windowed, mixture=MIXTRAL)),
    "nemotron_h": (
        "NemotronHForCausalLM",
        Form(
            heads=Heads(turned=False),
            pattern=lettered,
            linear="nemotron",
            single=True,
            gated=False,
            mixture=replace(
                DEEPSEEK_3,
                first=None,
                shared="moe_shared_expert_intermediate_size",
                shared_count="",
                gated=False,
            ),
            only=(("moe_latent_size", (None,)),),
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
    "phi3": ("Phi3ForCausalLM", Form(pattern=windowed, unread=("resid_pdrop", "embd_pdrop"))),
    "phimoe": (
        "PhimoeForCausalLM",
        Form(
            {"center": True, "bias": True},
            pattern=windowed,
            head_bias="lm_head_bias",
            mixture=MIXTRAL,
            remarks=("experts are chosen by the two largest softmax weights, and not by Phi's sparse mixer",),
            unread=("input_jitter_noise", "hidden_dropout"),
        ),
    ),
    "qwen2": ("Qwen2ForCausalLM", Form(heads=Heads("qkv", ""), pattern=qwen)),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        Form(
            heads=Heads("qkv", "qkv_bias"), pattern=qwen, mixture=replace(SHARED, normalized="norm_topk_prob")
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
    "qwen3_vl_moe_text": ("Qwen3VLMoeTextModel", replace(QWEN_3, mixture=Experts())),
    "qwen3_vl_text": ("Qwen3VLTextModel", QWEN_3),
    "smollm3": ("SmolLM3ForCausalLM", Form(pattern=unturned, unread=("use_sliding_window",))),
}
"""model_type -> the architecture, and its form."""
