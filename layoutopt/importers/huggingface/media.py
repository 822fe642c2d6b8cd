"""Models of two media: images beside their texts (SigLIP), and the texts of speech (Whisper)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.huggingface.decoder import initial
from layoutopt.importers.huggingface.fields import Fields
from layoutopt.importers.huggingface.form import ACTIVATIONS
from layoutopt.importers.huggingface.training import ConfiguredTraining
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Constant, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.scan import scan


def siglip(fields: Fields, training: ConfiguredTraining) -> Model:
    """SiglipModel (Zhai et al. 2023): inputs `image` [batch, height, width, colours] and `text` [batch,
    length]; every pair of an image and a text is a choice of its own between yes and no."""
    fields.raw("initializer_factor")
    seen, said = (fields.part(n, fields.raw(n, {})) for n in ("vision_config", "text_config"))
    seen.only("vision_use_head", True)
    for part in (seen, said):
        part.raw("output_attentions")
    g, b = training.graph("siglip"), Dim("batch", training.batch)
    size, patch = seen.count("image_size", 224), seen.count("patch_size", 16)
    sides = [Dim("height", size), Dim("width", size), Dim("colours", seen.count("num_channels", 3))]
    image = g.input("image", [b, *sides], "float32").cast(training.dtype)
    positions = said.count("max_position_embeddings", 64)
    text = g.input("text", [b, Dim("length", min(training.length, positions))])
    with g.scope("image"):
        tower = _Tower(seen, training)
        x = nn.ImageTokens(patch, tower.width, whole=False)(image)
        pictures = _unit(tower.pooled(tower.stack(x, "image_layers")))
    with g.scope("text"):
        tower = _Tower(said, training)
        embedding = nn.Embedding(Dim("vocab", said.count("vocab_size", 32000)), tower.width, training.dtype)
        x = tower.stack(nn.LearnedPositions(positions)(embedding(embedding.table(g), text)), "text_layers")
        last = mtf.equal(mtf.mtf_range(g, text.dim("length")), text.dim("length").size - 1).cast(x.dtype)
        joint = Dim("d_joint", said.count("projection_size", tower.width.size))
        y = nn.Dense((joint,), ("d_model",), True, name="head")(mtf.einsum([x, last], [b, tower.width]))
        words = mtf.rename(_unit(mtf.rename(y, d_joint="d_model")), batch="texts")
    scale, offset = (
        g.variable(n, [], Constant(v), activation_dtype="float32")
        for n, v in (("logit_scale", 2.303), ("logit_bias", -10.0))
    )
    logits = mtf.einsum([pictures, words], [b, words.dim("texts")]) * mtf.exp(scale) + offset
    paired = mtf.equal(mtf.mtf_range(g, b), mtf.rename(mtf.mtf_range(g, b), batch="texts")).cast("float32")
    loss = mtf.reduce_sum(mtf.softplus(logits * (1.0 - paired * 2.0))) * (1.0 / training.batch)
    return training.model(loss, "siglip")


class _Tower:
    """A stack of layers with norms before their blocks, and biases."""

    def __init__(self, fields: Fields, training: ConfiguredTraining) -> None:
        width, heads = fields.count("hidden_size", 768), fields.count("num_attention_heads", 12)
        if width % heads:
            raise fields.wrong("hidden_size", f"give a multiple of num_attention_heads ({heads})")
        self.width, self.layers = Dim("d_model", width), fields.count("num_hidden_layers", 12)
        self.epsilon = fields.number("layer_norm_eps", 1e-6)
        self.attention = nn.Attention(
            Dim("heads", heads),
            Dim("d_kv", width // heads),
            dropout=fields.number("attention_dropout"),
            biases="all",
            attention=training.attention,
        )
        act = ACTIVATIONS[fields.text("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS)]
        self.block = nn.FeedForward(Dim("d_ff", fields.count("intermediate_size", 3072)), act, bias=True)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.LayerNorm(bias=True, name=name, epsilon=self.epsilon)(x)

    def stack(self, x: Tensor, name: str) -> Tensor:
        layer = nn.EncoderLayer(self.attention, self.block, epsilon=self.epsilon)
        return self.norm(scan(layer, x, Dim(name, self.layers)), "final_norm")

    def pooled(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, d_model], by attention from one learned query."""
        g, (b, _, d) = x.graph, x.shape.dims
        one = Dim("length", 1)
        with g.scope("pool"):
            probe = mtf.broadcast(
                g.variable("probe", [d], Normal(1.0), activation_dtype=x.dtype), [b, one, d]
            )
            attention = replace(self.attention, dropout=0.0)
            y = attention(probe, memory=mtf.rename(x, length="memory_length"))
            y = y + self.block(self.norm(y, "norm"))
        return mtf.reduce_sum(y, one)


def _unit(x: Tensor) -> Tensor:
    """Vectors of norm 1, in float32."""
    y = x.cast("float32")
    return y * mtf.rsqrt(mtf.reduce_sum(mtf.square(y), "d_model"))


def whisper(fields: Fields, training: ConfiguredTraining) -> Model:
    """WhisperForConditionalGeneration (Radford et al. 2022): inputs `audio` [batch, frames, mel_bins], and
    `tokens` and `targets` [batch, length]."""
    for name in ("encoder_layerdrop", "decoder_layerdrop", "activation_dropout"):
        fields.only(name, 0, 0.0)
    fields.only("apply_spec_augment", False)
    width, rate = Dim("d_model", fields.count("d_model")), fields.number("dropout")
    act = ACTIVATIONS[fields.text("activation_function", "gelu", ACTIVATIONS)]
    frames, words = fields.count("max_source_positions"), fields.count("max_position_embeddings")
    times = width.size**0.5 if fields.flag("scale_embedding") else 1.0

    def attending(kind: str, name: str, **more: Any) -> nn.Attention:
        heads = fields.count(f"{kind}_attention_heads")
        if width.size % heads:
            raise fields.wrong("d_model", f"give a multiple of {kind}_attention_heads ({heads})")
        size, off = Dim("d_kv", width.size // heads), fields.number("attention_dropout")
        form = training.attention
        return nn.Attention(
            Dim("heads", heads), size, biases="qvo", dropout=off, attention=form, name=name, **more
        )

    def plus(x: Tensor, layer: Any, name: str, *memory: Tensor) -> Tensor:
        return x + mtf.dropout(
            layer(nn.LayerNorm(bias=True, name=f"{name}_norm", epsilon=1e-5)(x), *memory), rate
        )

    def block(kind: str) -> nn.FeedForward:
        return nn.FeedForward(Dim("d_ff", fields.count(f"{kind}_ffn_dim")), act, bias=True)

    g, b = training.graph("whisper"), Dim("batch", training.batch)
    text = [b, Dim("length", min(training.length, words))]
    bins = Dim("mel_bins", fields.count("num_mel_bins"))
    x = g.input("audio", [b, Dim("length", 2 * frames), bins], "float32").cast(training.dtype)
    tokens, targets = g.input("tokens", text), g.input("targets", text)
    vocab = Dim("vocab", fields.count("vocab_size"))
    with g.initialized(initial(fields.number("init_std", 0.02))):
        with g.scope("encoder"):
            for name, inputs, stride in (("conv1", "mel_bins", 1), ("conv2", "", 2)):
                form = nn.Conv(width, ("length",), 3, stride, bias=True, even=True, activation=act, name=name)
                x = replace(form, inputs=inputs)(x)
            x = mtf.dropout(nn.LearnedPositions(frames)(x), rate)
            own, inner = attending("encoder", "attention"), block("encoder")

            def encode(x: Tensor) -> Tensor:
                return plus(plus(x, own, "attention"), inner, "feed_forward")

            x = scan(encode, x, Dim("encoder_layers", fields.count("encoder_layers")))
            x = nn.LayerNorm(bias=True, name="final_norm", epsilon=1e-5)(x)
            memory = mtf.rename(x, length="memory_length")
        with g.scope("decoder"):
            embedding = nn.Embedding(vocab, width, training.dtype)
            table = embedding.table(g)
            x = mtf.dropout(nn.LearnedPositions(words)(embedding(table, tokens) * times), rate)
            back, across = (
                attending("decoder", "attention", causal=True),
                attending("decoder", "cross_attention"),
            )
            last = block("decoder")

            def decode(x: Tensor) -> Tensor:
                x = plus(plus(x, back, "attention"), across, "cross_attention", memory)
                return plus(x, last, "feed_forward")

            x = scan(decode, x, Dim("decoder_layers", fields.count("decoder_layers")))
            x = nn.LayerNorm(bias=True, name="final_norm", epsilon=1e-5)(x)
        logits = embedding.logits(x, table if fields.flag("tie_word_embeddings", True) else None)
    return training.model(mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, vocab)), "whisper", text)
