"""The blocks of configured models that mix positions: attention of every kind, and state spaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any

from layoutopt.importers.huggingface import forms
from layoutopt.importers.huggingface.fields import ConfiguredTraining, Fields
from layoutopt.importers.huggingface.forms import Norm
from layoutopt.importers.huggingface.rotary import Unturned, magnitude, rotary, stretched, turning
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim

FULL, SLIDING, CHUNKED, LINEAR = (f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear"))
UNTURNED, BOTH, MLP, MOE = "attention without positions", "attention beside a state space", "mlp", "moe"
KINDS = {kind: kind for kind in (FULL, SLIDING, CHUNKED, LINEAR, MLP, MOE, UNTURNED, BOTH)}
KINDS |= {"attention": FULL, "mamba": LINEAR, "conv": LINEAR}
KINDS |= dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), FULL)
"""Names of kinds of layers there -> here."""


@dataclass(frozen=True)
class Heads:
    """The attention of a family. The defaults are Llama's.

    Attributes:
      biases: as of `nn.Attention`; when: the field that says whether there are any; "": there are.
      norm: of queries and keys: "head", "all" heads together, "unit" (head by head, without a scale), or "";
        norm_when: the field that says whether there is one, if it does not always say so.
      values_normed: values are normalised too, without a scale.
      turned: whether positions turn queries and keys, or those of layers with a window, if there are any
        ("sliding"); another name is a field that is "rope" if so.
      partial: the share of a head that turns.
      local: the field of the rotary base of layers with a window, and its default; (): that of the others.
      window: the default of `sliding_window`; windowed: fields that layers with a window have of their own.
      full: such fields of layers without a window.
      sinks: "sliding": layers with a window have a learned sink, "all": all have.
      gated: the activation of an output gate; "": none; gates: the field that says whether heads have one
        number of it, or each element; "": each element, None: heads.
      scale: the field of the logits' factor ("query_pre_attn_scalar": its inverse root), or a number.
      cap, clipped: fields of the bounds of logits, and of queries, keys and values.
      times: fields of factors of keys and values.
      latent, indexed: latent attention, with an indexer.
      causal: a query sees keys up to its own position. base: the field of the rotary base.
      keys: the field of the number of heads of keys and values, or it itself.
      slopes: biases that fall with the distance of a key (ALiBi); "scaled": as logits are (Falcon).
    """

    biases: str = "all"
    when: str = "attention_bias"
    norm: str = ""
    norm_when: str = ""
    values_normed: bool = False
    turned: bool | str = True
    partial: float = 1.0
    local: Sequence[Any] = ()
    window: int = 4096
    windowed: Mapping[str, str] = field(default_factory=dict)
    full: Mapping[str, str] = field(default_factory=dict)
    sinks: str = ""
    gated: str = ""
    gates: str | None = ""
    scale: str | float = 0.0
    cap: str = ""
    clipped: str = ""
    times: Sequence[str] = ("", "")
    latent: bool = False
    indexed: bool = False
    causal: bool = True
    base: str = "rope_theta"
    keys: str | int = "num_key_value_heads"
    slopes: str = ""


@dataclass(frozen=True)
class MixerReader:
    """Reads the mixers of a configuration."""

    fields: Fields
    training: ConfiguredTraining
    heads: Heads
    norm: Norm
    linear: str
    layers: int

    def mixer(self, kind: str) -> Any:
        """The mixer of a kind of layers; None: it has none."""
        if kind in (MLP, MOE):
            return None
        if kind == LINEAR:
            return self.scanning(LINEARS[self.linear](self))
        if kind == BOTH:
            return self._side_by_side()
        return self._latent() if self.heads.latent else self._attention(kind)

    def scanning(self, made: Any) -> Any:
        """A layer with states, as the framework's modules compute them."""
        return replace(made, fused=self.training.scans == "kernel") if hasattr(made, "fused") else made

    def _attention(self, kind: str) -> forms.SelfAttention:
        fields, own = self.fields, self.heads
        apart = dict(own.windowed if kind == SLIDING else own.full if kind == FULL else ())
        if kind == FULL and not fields.flag("attention_k_eq_v"):
            apart.pop("num_key_value_heads", None)  # transformers reads Gemma 4's number only then

        def named(name: str) -> str:
            return apart[name] if name in apart and fields.has(apart[name]) else name

        width, heads = fields.count("hidden_size"), fields.count(named("num_attention_heads"))
        size = named("head_dim")
        if not fields.has(size) and width % heads:
            raise fields.wrong("hidden_size", f"give a multiple of num_attention_heads ({heads})")
        of_keys = own.keys if isinstance(own.keys, int) else fields.count(named(own.keys), heads)
        if heads % of_keys:
            raise fields.wrong(
                named("num_key_value_heads"), f"give a divisor of num_attention_heads ({heads})"
            )
        d_kv = fields.count(size, width // heads)
        d_v = fields.count(named("v_head_dim"), d_kv)
        chunk = fields.count("attention_chunk_size") if kind == CHUNKED else 0
        made = forms.SelfAttention(
            Dim("heads", heads),
            Dim("d_kv", d_kv),
            of_keys,
            causal=own.causal,
            window=self._window() if kind == SLIDING else 0,
            rotary=self._rotary(kind, d_kv),
            dropout=fields.number("attention_dropout"),
            shared_kv=kind == FULL and bool(own.full) and fields.flag("attention_k_eq_v"),
            sinks=own.sinks == "all" or (own.sinks == "sliding" and kind == SLIDING),
            biases=own.biases if not own.when or fields.flag(own.when) else "none",
            attention=self.training.attention,
            norm=self._norm(kind),
            across=own.norm == "all",
            value_norm=own.values_normed,
            scale=self._scale(),
            cap=fields.number(own.cap) if own.cap else 0.0,
            gated=own.gated if (gate := self._gate()) else "",
            by_head=gate != "per-element",
            d_v=0 if d_v == d_kv else d_v,
            clipped=fields.number(own.clipped) if own.clipped else 0.0,
            times=(fields.factor(own.times[0]), fields.factor(own.times[1])),
            tuned=self._tuned(kind),
            slopes=(own.slopes and (d_kv**-0.5 if own.slopes == "scaled" else 1.0)) or 0.0,
        )
        same = {f.name: getattr(made, f.name) for f in fields_of(made)}
        return forms.ChunkedSelfAttention(**same, chunk=chunk) if chunk else made

    def _norm(self, kind: str) -> Norm | None:
        own = self.heads
        if not own.norm or (own.norm_when and not self.fields.flag(own.norm_when)):
            return None
        if own.norm == "unit":
            return None if kind == UNTURNED else Norm(self.norm.epsilon, scale=False)
        return self.norm

    def _gate(self) -> Any:
        """What has a number of the output gate: "per-element", or true for heads; false: there is none."""
        by = self.heads.gates
        return True if by is None else self.fields.raw(by, "per-element")

    def _window(self) -> int:
        """The window of layers that have one; null: none."""
        fields = self.fields
        fields.raw("sliding_window")
        if fields.has("local_attention"):  # on both sides, besides the query's own if it sees both
            return fields.count("local_attention") // 2 + (not self.heads.causal)
        if fields.has("sliding_window_size"):  # positions back, besides the query's own
            return fields.count("sliding_window_size") + 1
        if "sliding_window" in fields.values and not fields.has("sliding_window"):
            return 0
        return fields.count("sliding_window", self.heads.window)

    def _rotary(self, kind: str, d_kv: int) -> nn.Rotary | None:
        fields, own = self.fields, self.heads
        unturned = not own.turned
        if own.turned == "sliding":
            unturned = kind != SLIDING and fields.has("sliding_window")
        elif isinstance(own.turned, str):
            unturned = fields.raw(own.turned) != "rope"
        if kind == UNTURNED or unturned:
            fields.skip("rope_theta", "rope_scaling", "rope_parameters")
            return None
        length, partial = self.training.length, own.partial
        if fields.has("rotary_dim"):
            partial = fields.count("rotary_dim") / d_kv
        named = fields.raw("rope_parameters")
        if kind != SLIDING or not own.local or (isinstance(named, dict) and kind in named):
            return rotary(fields, d_kv, length, kind if kind == SLIDING else FULL, partial, own.base)
        share = fields.number("partial_rotary_factor", partial)
        return nn.Rotary(fields.positive(own.local[0], own.local[1], above=1), turned=turning(d_kv, share))

    def _scale(self) -> float:
        said = self.heads.scale
        if not isinstance(said, str):
            return said
        if said == "query_pre_attn_scalar":
            return float(self.fields.positive(said, self.fields.count("head_dim", 256)) ** -0.5)
        return self.fields.positive(said) if self.fields.has(said) else 0.0

    def _tuned(self, kind: str) -> tuple[float, ...]:
        fields = self.fields
        if "llama_4_scaling_beta" in fields.known:
            inner = stretched(fields)
            by = inner.number("llama_4_scaling_beta")
            return (inner.positive("original_max_position_embeddings", 16384), by, 0.0) if by else ()
        if kind != UNTURNED or not fields.raw("attn_temperature_tuning", False):
            return ()
        return fields.positive("floor_scale", 8192.0), fields.number("attn_scale", 0.1), 1.0

    def _latent(self) -> forms.ScaledLatentAttention:
        fields, own = self.fields, self.heads
        fields.only("rope_interleave", True)
        fields.skip("head_dim", "num_key_value_heads", "qk_head_dim", "indexer_rope_interleave")
        turned = fields.count("qk_rope_head_dim", 64)
        inner = stretched(fields)
        all_dims = inner.number("mscale_all_dim")
        rank = fields.count("q_lora_rank") if fields.has("q_lora_rank") else 0
        indexer = None
        if own.indexed:
            heads, size, most = (fields.count(f"index_{n}") for n in ("n_heads", "head_dim", "topk"))
            indexer = forms.Indexer(heads, size, most, turned)
        positions: nn.Rotary = Unturned()
        if own.turned:
            positions = replace(rotary(fields, turned, self.training.length), turned=0)  # of a whole head
        return forms.ScaledLatentAttention(
            Dim("heads", fields.count("num_attention_heads")),
            Dim("d_kv", fields.count("qk_nope_head_dim", 128)),
            causal=True,
            dropout=fields.number("attention_dropout"),
            attention=self.training.attention,
            kv_rank=Dim("kv_rank", fields.count("kv_lora_rank", 512)),
            q_rank=Dim("q_rank", rank) if rank else None,
            d_rotary=turned,
            d_v=Dim("d_v", fields.count("v_head_dim", 128)),
            positions=positions,
            times=magnitude(inner.number("factor", 1.0), all_dims) ** 2 if all_dims else 1.0,
            tuned=self._tuned(FULL),
            gated=own.gated,
            indexer=indexer,
        )

    def _side_by_side(self) -> forms.SideBySide:
        factor = self.fields.factor
        attention = factor("attention_in_multiplier"), factor("attention_out_multiplier")
        state = factor("ssm_in_multiplier"), factor("ssm_out_multiplier")
        return forms.SideBySide(
            ((self._attention(FULL), *attention), (self.scanning(self._falcon()), *state))
        )

    def _falcon(self) -> nn.Mamba2:
        """The state space of Falcon-H1."""
        fields = self.fields
        times = fields.listed("ssm_multipliers")
        norm = "first" if fields.flag("mamba_norm_before_gate") else "gated"
        norm = norm if fields.flag("mamba_rms_norm") else ""
        return replace(_granite(self), norm=norm, times=tuple(map(float, times)) or (1.0,) * 5)


def _delta(reader: MixerReader) -> nn.GatedDeltaNet:
    """The gated delta net of Qwen3-Next."""
    fields = reader.fields
    fields.only("hidden_act", "silu")
    fields.skip("mamba_ssm_dtype", "full_attention_interval")
    return nn.GatedDeltaNet(
        Dim("heads", fields.count("linear_num_value_heads")),
        fields.count("linear_num_key_heads"),
        Dim("d_k", fields.count("linear_key_head_dim")),
        Dim("d_v", fields.count("linear_value_head_dim")),
        fields.count("linear_conv_kernel_dim"),
        epsilon=reader.norm.epsilon,
    )


def _kimi(reader: MixerReader) -> nn.GatedDeltaNet:
    """The delta rule of Kimi Linear, whose channels decay each at a rate of its own."""
    fields = reader.fields
    fields.only("hidden_act", "silu")
    heads = fields.count("linear_num_heads", fields.count("num_attention_heads"))
    size = Dim("d_k", fields.count("linear_head_dim", fields.count("head_dim", 128)))
    bound = fields.raw("kda_lower_bound") if fields.flag("kda_safe_gate") else 0
    if not isinstance(bound, int | float) or not bound <= 0:
        raise fields.wrong("kda_lower_bound", "give a number of at most 0")
    taps = fields.count("linear_conv_kernel_dim", fields.count("short_conv_kernel_size", 4))
    return nn.GatedDeltaNet(
        Dim("heads", heads),
        heads,
        size,
        replace(size, name="d_v"),
        taps,
        epsilon=reader.norm.epsilon,
        channels=True,
        least=float(bound),
        rank=0 if "kda_safe_gate" in fields.known else size.size,
        gate="sigmoid",
    )


def _lightning(reader: MixerReader) -> nn.LightningAttention:
    fields = reader.fields
    heads = fields.count("num_attention_heads")
    d_kv = fields.count("head_dim", fields.count("hidden_size") // heads)
    fields.only("hidden_act", "silu")
    return nn.LightningAttention(
        Dim("heads", heads), Dim("d_kv", d_kv), reader.layers, fields.count("block_size", 256)
    )


def _granite(reader: MixerReader) -> nn.Mamba2:
    """The state space of Granite 4 and Falcon-H1."""
    fields = reader.fields
    heads, expand = fields.count("mamba_n_heads"), fields.number("mamba_expand", 2.0)
    inner = fields.count("mamba_d_ssm", int(expand * fields.count("hidden_size")))
    fields.only("time_step_limit", [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])
    names = ["d_state", "n_groups", "d_conv", "chunk_size", "proj_bias", "conv_bias"]
    return _mamba(reader, heads, inner // heads, [f"mamba_{n}" for n in names])


def _nemotron(reader: MixerReader) -> nn.Mamba2:
    """The state space of Nemotron-H."""
    fields = reader.fields
    fields.skip("expand", "mamba_proj_bias")
    fields.only("mamba_hidden_act", "silu")
    heads, d_head = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
    names = ["ssm_state_size", "n_groups", "conv_kernel", "chunk_size", "use_bias", "use_conv_bias"]
    made = _mamba(reader, heads, d_head, names)
    return replace(made, least=fields.number("time_step_min", 0.001))


def _mamba(reader: MixerReader, heads: int, d_head: int, names: Sequence[str]) -> nn.Mamba2:
    """A state space; `names`: the fields of its state, groups, taps, chunk, and two biases."""
    fields, (state, groups, taps, chunk, bias, conv_bias) = reader.fields, names
    fields.skip("time_step_limit", "time_step_max", "time_step_floor")
    a, b, c = (fields.count(n) for n in (groups, taps, chunk))
    dims = Dim("heads", heads), Dim("d_head", d_head), Dim("d_state", fields.count(state))
    added = fields.flag(bias), fields.flag(conv_bias)
    return nn.Mamba2(*dims, a, b, c, *added, epsilon=reader.norm.epsilon)


def _selective(reader: MixerReader, begin: str = "") -> nn.SelectiveStateSpace:
    """The state space of Mamba; `begin`: of the fields' names. Falcon's and Jamba's have norms inside."""
    fields, norm = reader.fields, reader.norm if begin else None
    if reader.linear == "falcon":
        norm = replace(reader.norm, epsilon=fields.number("mixer_rms_eps", 1e-6), scale=False)
    fields.only("hidden_act", "silu")
    fields.skip("time_step_min", "time_step_max", "time_step_floor")
    width = fields.count("hidden_size")
    inner = int(fields.number(f"{begin}expand", 2.0) * width)
    own = ("d_state", "d_conv", "dt_rank", "proj_bias", "conv_bias")
    theirs = ("state_size", "conv_kernel", "time_step_rank", "use_bias", "use_conv_bias")
    state, taps, rank, bias, conv_bias = [f"{begin}{n}" for n in own] if begin else theirs
    if not begin:
        fields.only("intermediate_size", inner, None)
    low = -(-width // 16) if fields.raw(rank, "auto") == "auto" else fields.count(rank)
    dims = Dim("inner", inner), Dim("d_state", fields.count(state)), low, fields.count(taps)
    return nn.SelectiveStateSpace(*dims, fields.flag(bias), fields.flag(conv_bias), norm, whole=not begin)


LINEARS: dict[str, Callable[[MixerReader], Any]] = {
    "convolution": lambda reader: forms.ShortConvolution(
        reader.fields.count("conv_L_cache"), reader.fields.flag("conv_bias")
    ),
    "delta": _delta,
    "kimi": _kimi,
    "lightning": _lightning,
    "granite": _granite,
    "mamba": _selective,
    "falcon": _selective,
    "jamba": lambda reader: _selective(reader, "mamba_"),
    "nemotron": _nemotron,
    "mamba2": lambda reader: replace(_nemotron(reader), least=0.0),
}
"""Linear attention and state spaces by name."""
