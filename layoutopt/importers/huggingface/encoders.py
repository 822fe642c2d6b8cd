"""Encoders: BERT that fills in masked tokens, and ViT that classifies images."""

from __future__ import annotations

import mesh_tf_core as mtf
from layoutopt.importers.huggingface.decoder import initial
from layoutopt.importers.huggingface.fields import Fields
from layoutopt.importers.huggingface.form import ACTIVATIONS
from layoutopt.importers.huggingface.training import ConfiguredTraining
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.scan import scan


def bert(fields: Fields, training: ConfiguredTraining) -> Model:
    """BertForMaskedLM (Devlin et al. 2019): inputs `tokens`, `segments` and `targets` [batch, length];
    targets below 0 do not count."""
    fields.only("position_embedding_type", "absolute")
    fields.raw("classifier_dropout")
    width, rate = fields.count("hidden_size"), fields.number("hidden_dropout_prob", 0.1)
    epsilon = fields.number("layer_norm_eps", 1e-12)
    tied = fields.flag("tie_word_embeddings", True)
    act = _activation(fields)
    vocab = Dim("vocab", fields.count("vocab_size"))
    kinds = Dim("segment_kinds", fields.count("type_vocab_size", 2))
    positions = nn.LearnedPositions(fields.count("max_position_embeddings", 512))
    layer = _layer(fields, training, after=True)

    g = training.graph("bert")
    text = [Dim("batch", training.batch), Dim("length", training.length)]
    tokens, segments, targets = (g.input(name, text) for name in ("tokens", "segments", "targets"))

    def norm(x: Tensor, name: str) -> Tensor:
        return nn.LayerNorm(bias=True, name=name, epsilon=epsilon)(x)

    with g.initialized(initial(fields.number("initializer_range", 0.02))):
        embedding = nn.Embedding(vocab, Dim("d_model", width), training.dtype)
        table = embedding.table(g)
        with g.scope("embedding"):
            of = g.variable(
                "segments", [kinds, Dim("d_model", width)], Normal(0.02), activation_dtype=training.dtype
            )
        x = norm(positions(embedding(table, tokens) + mtf.gather(of, segments, kinds)), "embedding_norm")
        with g.scope("layers"):
            x = scan(layer, mtf.dropout(x, rate), Dim("layers", fields.layers()))
        hidden = mtf.rename(x, d_model="d_hidden")
        x = nn.Dense((Dim("d_model", width),), ("d_hidden",), True, act, "transform")(hidden)
        logits = embedding.logits(norm(x, "transform_norm"), table if tied else None)
        with g.scope("output"):
            logits = logits + g.variable("bias", [vocab], ZEROS, activation_dtype=training.dtype)
    counted = (targets >= 0).cast("float32")
    entropy = mtf.softmax_cross_entropy(logits, targets, vocab)
    loss = mtf.reduce_sum(entropy * counted) / mtf.reduce_sum(counted)
    return training.model(loss, "bert", text)


def vit(fields: Fields, training: ConfiguredTraining) -> Model:
    """ViTForImageClassification (Dosovitskiy et al. 2021): inputs `image` [batch, height, width, colours] and
    `label` [batch]."""
    size, patch = fields.count("image_size", 224), fields.count("patch_size", 16)
    fields.raw("encoder_stride")
    fields.skip("pooler_output_size", "pooler_act")
    named = fields.raw("id2label", {})
    if not isinstance(named, dict):
        raise fields.wrong("id2label", "give an object")
    classes = Dim("classes", fields.count("num_labels", len(named) or 2))
    epsilon, rate = fields.number("layer_norm_eps", 1e-12), fields.number("hidden_dropout_prob")
    layer = _layer(fields, training, after=False)

    g, b = training.graph("vit"), Dim("batch", training.batch)
    colours = Dim("colours", fields.count("num_channels", 3))
    image = g.input("image", [b, Dim("height", size), Dim("width", size), colours], "float32")
    label = g.input("label", [b])
    with g.initialized(initial(fields.number("initializer_range", 0.02))):
        x = nn.ImageTokens(patch, Dim("d_model", fields.count("hidden_size")))(image.cast(training.dtype))
        with g.scope("layers"):
            x = scan(layer, mtf.dropout(x, rate), Dim("layers", fields.layers()))
        x = nn.LayerNorm(bias=True, name="final_norm", epsilon=epsilon)(x)
        logits = nn.Dense((classes,), ("d_model",), True, name="output")(mtf.reduce_first(x, "length"))
    return training.model(mtf.reduce_mean(mtf.softmax_cross_entropy(logits, label, classes)), "vit")


def _layer(fields: Fields, training: ConfiguredTraining, after: bool) -> nn.EncoderLayer:
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if width % heads:
        raise fields.wrong("hidden_size", f"give a multiple of num_attention_heads ({heads})")
    fields.only("qkv_bias", True)
    rate = fields.number("hidden_dropout_prob", 0.1 if after else 0.0)
    return nn.EncoderLayer(
        nn.Attention(
            Dim("heads", heads),
            Dim("d_kv", width // heads),
            dropout=fields.number("attention_probs_dropout_prob", 0.1 if after else 0.0),
            biases="all",
            attention=training.attention,
        ),
        nn.FeedForward(Dim("d_ff", fields.count("intermediate_size")), _activation(fields), bias=True),
        after,
        rate,
        fields.number("layer_norm_eps", 1e-12),
    )


def _activation(fields: Fields) -> str:
    return ACTIVATIONS[fields.text("hidden_act", "gelu", ACTIVATIONS)]
