"""The record that a family of models is, and how it reads a configuration; `families.json` says how each
differs from Llama, besides the sizes in its files, in the words of `Form`, `Heads` and `Experts`.

Defaults of fields are those of the classes of transformers (`defaults.json`), because files omit them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from layoutopt.importers.huggingface import mixers, patterns
from layoutopt.importers.huggingface.decoder import ALONE, LanguageModel, LayerBlock, LayerKind
from layoutopt.importers.huggingface.fields import ConfiguredTraining, Fields
from layoutopt.importers.huggingface.forms import BesideExperts, Mlp, Norm, SelfAttention
from layoutopt.importers.huggingface.media import READERS, Speech
from layoutopt.importers.huggingface.mixers import FULL, LINEAR, SLIDING, Heads
from layoutopt.importers.huggingface.mixtures import Blocks, Experts, limited
from layoutopt.importers.huggingface.patterns import LayerPattern, chunked, unturned
from layoutopt.importers.huggingface.sharing import LayerEmbedding, share_keys, share_masks
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.model import Model

ACTIVATIONS = {n: n for n in ("silu", "relu", "quick_gelu", "sigmoid", "xielu", "tanh")}
ACTIVATIONS |= {"swish": "silu", "relu2": "relu_squared", "gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu"}
ACTIVATIONS["gelu_fast"] = "gelu_fast"
ACTIVATIONS |= dict.fromkeys(("gelu_accurate", "gelu_new", "gelu_python_tanh"), "gelu_new")
"""Names of activations there -> here."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps")
HIDDEN = ("hidden_activation", "mlp_hidden_act", "hidden_act")
ROOTED = ("mup_enabled", "scale_embedding")
LLAMA = Heads()


@dataclass(frozen=True)
class Form:
    """The parts of a family of language models. The defaults are Llama's.

    Attributes:
      norm: what `Norm` is given; a name is a field. place: where norms stand (`decoder.PLACES`).
      heads: of attention (`Heads`).
      linear: the mixer of layers of linear attention (`mixers.LINEARS`).
      pattern: the kinds of layers, where the file has no `layer_types`; None: full attention.
      varied: layers have sizes of their own, in `block_configs` (Nemotron Super).
      beside: experts stand beside the feed-forward block, and do not replace it, where this field says so.
      single: a layer has one block, a mixer or a feed-forward block, which its kind names.
      gated, mlp_bias: of feed-forward blocks; a name is a field.
      activation: of them, where a file does not have the field `hidden_activation`; "": it is `hidden_act`.
      mixture: its experts (`Experts`); None: none.
      dense: the field of the hidden size of feed-forward blocks.
      head_bias: of the logits; a name is a field.
      times, logits, added: fields of factors of embeddings, logits and results of blocks; "root": the root of
        the width, and a field of `ROOTED` where it is true; after "/", the field of a divisor; "tied": one
        over the root of the width, where the output's weights are the embeddings'.
      factors: blocks' inputs and results have factors by kind of layer (MiniMax).
      limits: fields of bounds of the two products of gated blocks: of "experts", and of "dense" ones and
        those that experts share; `by`: how, as of `activation`.
      by_layer: field with a value for each layer -> the field that it is for that layer.
      only: fields that may have no other values. remarks: where the model is not what its family publishes.
      masked: as of `LanguageModel`: "classifier" has an activation and a bias by fields of that name,
        "hidden" those of the layers, "alone" none.
      own: the field of the size of an embedding of every layer; shared: that of how many last layers read
        keys and values of earlier ones.
      positions: "learned", "sinusoids" in tensor2tensor's form, those "of whole widths" in that of Vaswani et
        al.; behind: how many of the first ones no text uses, or the field of the number of the last.
      segments: the field of the number of kinds; small: that of the size of embeddings.
      normed, repeated, final: as of `LanguageModel`.
      dropout: fields of the rates of embeddings, and of blocks' results.
      wide: the size of a feed-forward block over the model's, where a file omits it.
      relative: biases of attention: fields of the number of buckets, and of the largest distance or itself.
      each: every layer has biases of its own.
      names: field that is read -> its name in the file.
      cases: [[fields with values, other parts of a family that has these], ...].
      encoder: the form of the encoder that a decoder attends to; None: there is none.
      speech: fields of the bins of its spectra and of their number; (): it reads text.
      reads: what makes the model (`READERS`); "": `LanguageModel`.
      scaled: the field of `LanguageModel.scaled`. tied: the output's weights always are the embeddings'.
    """

    norm: Mapping[str, bool | str] = field(default_factory=dict)
    place: str = "before"
    heads: Heads = LLAMA
    linear: str = ""
    pattern: LayerPattern | None = None
    varied: bool = False
    beside: str = ""
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
    remarks: Sequence[str] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    by_layer: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    masked: str = ""
    own: str = ""
    shared: str = ""
    positions: str = ""
    behind: int | str = 0
    segments: str = ""
    small: str = ""
    normed: bool = False
    repeated: bool = False
    final: bool = True
    dropout: Sequence[str] = ()
    wide: int = 0
    relative: Sequence[Any] = ()
    each: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    cases: Sequence[tuple[Mapping[str, Any], Form]] = ()
    encoder: Form | None = None
    side: str = ""
    speech: Sequence[str] = ()
    reads: str = ""
    scaled: str = ""
    tied: bool = False

    def read(self, fields: Fields, training: ConfiguredTraining) -> LanguageModel | Model:
        """The model of a configuration."""
        made = READERS.get(self.reads)
        return made(self.reads, self.stack, fields, training) if made else self.stack(fields, training)

    def stack(self, fields: Fields, training: ConfiguredTraining) -> LanguageModel:
        """The layers of a configuration, and what is around them in a language model."""
        for wanted, other in self.cases:
            if all(fields.raw(n) == v for n, v in wanted.items()):
                return other.stack(fields, training)
        asked, fields = fields, fields.under(self.names) if self.names else fields
        for name, values in self.only.items():
            fields.only(name, *(fields.raw(v[1:]) if str(v)[:1] == "=" else v for v in values))
        kinds = self._kinds(fields)
        told = {n: fields.either(v) for n, v in self.norm.items()}
        told["steps"] = training.norms == "steps"
        norm = Norm(fields.number(fields.first(*EPSILONS, "norm_epsilon"), 1e-6), **told)
        act = self._activation(fields)

        def mixer(kind: str) -> Any:
            own = fields.of_kind(self.by_layer, kinds, kind)
            return mixers.MixerReader(own, training, self.heads, norm, self.linear, len(kinds)).mixer(kind)

        apart: Sequence[str] = (SLIDING,) if self.heads.full or self.heads.windowed else ()
        apart = (FULL, LINEAR) if self.linear and fields.has("num_attention_heads") else apart
        for kind in apart:  # fields of a kind that no layer is
            mixer(kind)
        fields.skip("" if SLIDING in kinds else "sliding_window")
        self._per_layer(fields, kinds)
        mixing: Blocks = [None] * len(kinds)
        if self.mixture is not None and (not self.beside or fields.flag(self.beside)):
            mixing = self.mixture.read(fields, training, act, len(kinds))
        dense = self._mlp(fields, act, self.varied or self.single or all(mixing))
        added, last = fields.number(self.added, 1.0), fields.count(self.shared, 0, least=0)
        doubled = self.shared and fields.flag("use_double_wide_mlp")
        wide = replace(dense, d_ff=2 * dense.d_ff) if doubled else dense

        def block(kind: str, number: int) -> LayerBlock | None:
            if self.single and kind not in (mixers.MOE, mixers.MLP):
                return None
            experts = mixing[number] if kind != mixers.MLP else None
            alone = limited(fields, self.limits, "dense", act, number)
            if experts is None:
                made = wide if number >= len(kinds) - last else dense
                return replace(made, activation=alone[0], up=alone[1])
            if self.limits:
                of, up = limited(fields, self.limits, "experts", experts.activation, number)
                experts = replace(experts, activation=of, up=up, shared_as=alone)
            return BesideExperts(dense, experts, norm) if self.beside else experts

        shared = self._sharing(fields, [mixer(kind) for kind in kinds], kinds)
        layers = tuple(
            LayerKind(mixer, block(kind, i), *self._factors(fields, kind, added))
            for i, (kind, mixer) in enumerate(zip(kinds, shared, strict=True))
        )
        if self.encoder:
            crossing: dict[str, Any] = {"causal": False, "name": "cross_attention"}
            layers = tuple(replace(kind, cross=replace(kind.mixer, **crossing)) for kind in layers)  # type: ignore[type-var]
        width = fields.count("hidden_size")
        bins, frames = map(fields.count, self.speech) if self.speech else (0, 0)
        speech = Speech(bins, frames, act) if bins else None
        rates = [fields.number(n) for n in self.dropout or [""]]
        rooted = self.times == "root" or (self.times in ROOTED and fields.flag(self.times))
        tied = fields.flag("tie_word_embeddings")
        if self.logits == "tied":
            logits = width**-0.5 if fields.flag("scale_decoder_outputs", tied) else 1.0
        else:
            divided = "/" in self.logits
            logits = 1 / fields.positive(self.logits[1:], 1.0) if divided else fields.factor(self.logits)
        ends = (ALONE, False) if self.masked == ALONE else (act, True) if self.masked else ("", False)
        if self.masked == "classifier":
            layers = (replace(layers[0], bare=True), *layers[1:])
            head = ACTIVATIONS[fields.text("classifier_activation", "gelu", ACTIVATIONS)]
            ends = head, fields.flag("classifier_bias")
        if self.varied:
            blocks = fields.listed("block_configs")
            if len(blocks) != len(layers):
                raise fields.wrong("block_configs", f"give one for each of the {len(layers)} layers")
            layers = tuple(map(partial(varied, fields, width), layers, blocks))
        return LanguageModel(
            layers,
            fields.count("vocab_size", 1 if self.reads else None),
            width,
            norm,
            tied or self.tied,
            fields.number("initializer_range", 0.02),
            self.place,
            fields.either(self.head_bias),
            fields.number("final_logit_softcapping"),
            width**0.5 if rooted else 1.0 if self.times in ROOTED else fields.factor(self.times),
            logits,
            tuple(self.remarks),
            *ends,
            self._own(fields, act, norm),
            self._positions(fields),
            fields.count(self.segments, 0, least=0),
            self.normed,
            0 if not self.small or (small := fields.count(self.small, width)) == width else small,
            (rates[0], rates[-1]),
            self._relative(fields),
            self.each,
            self.repeated,
            self.final,
            self.encoder.stack(asked, training) if self.encoder else None,
            self.side,
            speech,
            fields.number(self.scaled),
        )

    def _positions(self, fields: Fields) -> nn.LearnedPositions | nn.Sinusoids | None:
        """What is added to embeddings."""
        if self.positions.startswith("sinusoids") and isinstance(self.behind, int):
            half = fields.count("hidden_size") // 2
            base = 10000.0 ** ((half - 1) / half) if self.positions == "sinusoids of whole widths" else 1e4
            return nn.Sinusoids(base, first=self.behind)
        if not self.positions:
            return None
        count, first = fields.count("max_position_embeddings"), self.behind
        if isinstance(first, str):  # positions of texts begin behind that of what fills them up
            return nn.LearnedPositions(count, first=fields.count(first, least=0) + 1)
        return nn.LearnedPositions(count + first, first=first)

    def _relative(self, fields: Fields) -> nn.RelativeBias | None:
        """The biases that layers share."""
        if not self.relative:
            return None
        buckets, far = self.relative
        most = fields.count(far) if isinstance(far, str) else far
        return nn.RelativeBias(fields.count(buckets), most, bidirectional=not self.heads.causal)

    def _own(self, fields: Fields, act: str, norm: Norm) -> LayerEmbedding | None:
        """The embedding of every layer."""
        size = fields.count(self.own, 0, least=0)
        own = fields.count("vocab_size_per_layer_input", vocab := fields.count("vocab_size", 1))
        name = "vocab" if own == vocab else "own_vocab"
        return LayerEmbedding(Dim(name, own), Dim("d_own", size), act, norm) if size else None

    def _sharing(self, fields: Fields, mixers: list[Any], kinds: Sequence[str]) -> Sequence[Any]:
        """The mixers, where some read what others keep."""
        types = fields.listed("indexer_types") if self.heads.indexed else []
        if "shared" in types:
            if len(types) != len(mixers) or types[0] == "shared":
                raise fields.wrong("indexer_types", f"give {len(mixers)} entries, the first of them 'full'")
            return list(share_masks(mixers, types))
        last = fields.count(self.shared, 0, least=0, most=len(mixers) - 1)
        if not {*kinds[len(kinds) - last :]} <= {*kinds[: len(kinds) - last]}:
            raise fields.wrong(self.shared, "give fewer layers: none before them is of the kind of each")
        return list(share_keys(mixers, kinds, last)) if last else mixers

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
        return kinds[: count or fields.layers()] if not kinds or (count and not self.single) else kinds

    def _per_layer(self, fields: Fields, kinds: Sequence[str]) -> None:
        """UserError unless the fields that a file repeats for single layers are those of their kind."""
        own = {FULL: self.heads.full, SLIDING: self.heads.windowed}
        try:
            for number, said in fields.raw("per_layer_config", {}).items():
                names = own.get(kinds[int(number)], {})
                if any(value != fields.raw(names.get(n, n)) for n, value in said.items()):
                    raise ValueError(number)
        except (AttributeError, IndexError, ValueError):
            raise fields.wrong(
                "per_layer_config", "give each layer what its kind has, or remove it"
            ) from None

    def _activation(self, fields: Fields) -> str:
        fields.skip("hidden_act")
        if self.activation and not fields.has("hidden_activation"):
            return ACTIVATIONS[self.activation]
        return ACTIVATIONS[fields.text(fields.first(*HIDDEN), "silu", ACTIVATIONS)]

    def _mlp(self, fields: Fields, act: str, unused: bool) -> Mlp:
        bias = fields.either(self.mlp_bias)
        width = self.wide * fields.count("hidden_size") if self.wide else None
        size = 1 if unused and not fields.has(self.dense) else fields.count(self.dense, width)
        if fields.flag("block_auto_adjust_ff_dim"):  # of LFM2
            each = fields.count("block_multiple_of", 256)
            size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            size = -(-size // each) * each
        times = fields.listed("mlp_multipliers") or [1.0, 1.0]
        return Mlp(size, act, self.gated, bias, (float(times[0]), float(times[1])))

    def _factors(
        self, fields: Fields, kind: str, added: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        if not self.factors:
            return (1.0, 1.0), (added, added)
        of = "linear" if kind == LINEAR else "full"
        names = ((f"{of}_attn", f"{of}_attention"), ("mlp", "mlp"))
        said = [(f"{n}_{f}_factor", f"layernorm_{m}_{f}") for f in ("alpha", "beta") for n, m in names]
        found = [fields.number(fields.first(*each), 1.0) for each in said]
        return (found[0], found[1]), (found[2], found[3])


def varied(fields: Fields, width: int, layer: LayerKind, block: Any) -> LayerKind:
    """A layer with the sizes that its entry in `block_configs` has."""
    try:
        attention, ffn = block["attention"], block["ffn"]
        odd = any(part.get(n) for part in (attention, ffn) for n in ("replace_with_linear", "sparsify"))
        sizes = int(attention["n_heads_in_group"] or 1), int(2 * (ffn["ffn_mult"] or 0) * width / 3)
    except (TypeError, KeyError, ValueError, AttributeError):
        do = "give objects with attention.n_heads_in_group and ffn.ffn_mult"
        raise fields.wrong("block_configs", do) from None
    if odd or attention.get("num_sink_tokens"):
        raise fields.wrong("block_configs", "linear replacements, sparsity and sink tokens are not supported")
    mixer, mlp = layer.mixer, layer.feed_forward
    assert isinstance(mixer, SelfAttention) and isinstance(mlp, Mlp)
    heads, window = mixer.heads.size // sizes[0], attention.get("window_length") or 0
    return LayerKind(
        None if attention.get("no_op") else replace(mixer, kv_heads=heads, window=window),
        None if ffn.get("no_op") else replace(mlp, d_ff=-(-sizes[1] // 256) * 256),
    )


_ROWS = json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))


def _form(said: Mapping[str, Any]) -> Form:
    """The form of a row, of the row that it is `like` with changes; a pattern is the name of a function of
    `patterns`, or arguments of `alternating`."""
    said = _whole(said)
    parts: dict[str, Any] = {n: v for n, v in said.items() if n not in ("architecture", "like")}
    if encoder := parts.pop("encoder", None):
        parts["encoder"] = _form({**said, "encoder": None, "side": "encoder_", **encoder})
        parts["side"] = "decoder_"
    parts["cases"] = [(wanted, _form({**said, "cases": [], **new})) for wanted, new in said.get("cases", ())]
    for name, made in (("heads", Heads), ("mixture", Experts)):
        if said.get(name) is not None:
            parts[name] = made(**said[name])
    if (pattern := said.get("pattern")) is not None:
        named = isinstance(pattern, str)
        parts["pattern"] = getattr(patterns, pattern) if named else patterns.alternating(**pattern)
    return Form(**parts)


def _whole(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with what it takes from the one that it is `like`."""
    return {**_whole(_ROWS[said["like"]]), **said} if "like" in said else said


SAME = {name: row["like"] for name, row in _ROWS.items() if row.keys() == {"like", "architecture"}}
"""model_type -> another that has all its parts: transformers may have one class for both."""
FORMS: dict[str, tuple[str, Form]] = {name: (row["architecture"], _form(row)) for name, row in _ROWS.items()}
"""model_type -> the architecture, and its form."""
