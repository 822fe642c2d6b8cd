"""Models of images, of images beside texts, and of speech, whose layers are those of a `Form`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.huggingface.decoder import LanguageModel, initial
from layoutopt.importers.huggingface.fields import ConfiguredTraining, Fields, class_defaults
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Constant, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.graph import Graph

LayersReader = Callable[[Fields, ConfiguredTraining], LanguageModel]
"""reader(fields, training) -> the layers, and what is around them in a language model."""


@dataclass(frozen=True)
class Speech:
    """The first part of an encoder of speech: two convolutions over spectra, which halve the positions."""

    bins: int
    frames: int
    activation: str

    def __call__(self, graph: Graph, batch: Dim, width: Dim, dtype: str) -> Tensor:
        """The input `audio` [batch, 2 frames, mel_bins] as [batch, frames, d_model]."""
        dims = [batch, Dim("length", 2 * self.frames), Dim("mel_bins", self.bins)]
        x = graph.input("audio", dims, "float32").cast(dtype)
        for name, inputs, stride in (("conv1", "mel_bins", 1), ("conv2", "", 2)):
            form = nn.Conv(
                width, ("length",), 3, stride, bias=True, even=True, activation=self.activation, name=name
            )
            x = replace(form, inputs=inputs)(x)
        return x


def _image(fields: Fields, training: ConfiguredTraining, graph: Graph, tokens: nn.ImageTokens) -> Tensor:
    """The input `image` [batch, height, width, colours] as tokens."""
    size, colours = fields.count("image_size"), Dim("colours", fields.count("num_channels"))
    sides = [Dim("batch", training.batch), Dim("height", size), Dim("width", size), colours]
    tokens = replace(tokens, patch=fields.count("patch_size"))
    return tokens(graph.input("image", sides, "float32").cast(training.dtype))


def classifier(name: str, stack: LayersReader, fields: Fields, training: ConfiguredTraining) -> Model:
    """ViT (Dosovitskiy et al. 2021) and its kind with a map to classes: inputs `image` [batch, height, width,
    colours] and `label` [batch]. Classes follow from the token of the whole image; in DINOv2 (Oquab et al.
    2023) also from the mean of the others."""
    named = fields.raw("id2label", {})
    if not isinstance(named, dict):
        raise fields.wrong("id2label", "give an object")
    tower, g = stack(fields, training), training.graph(name)
    label = g.input("label", [Dim("batch", training.batch)])
    classes = Dim("classes", fields.count("num_labels", len(named) or 2))
    with g.initialized(initial(tower.stddev)):
        x = _image(fields, training, g, nn.ImageTokens(1, tower.width))
        if name == "dinov2":  # the token of hidden squares, of which classification has none
            x = x + g.variable("mask", [tower.width], ZEROS, activation_dtype=x.dtype) * 0.0
        (x,) = tower.hidden((mtf.dropout(x, tower.rates[0]),), {})
        y, inputs = mtf.reduce_first(x, "length"), ["d_model"]
        if name == "dinov2":
            count = x.dim("length").size
            others = (mtf.reduce_sum(x, "length") - y) * (1 / (count - 1))
            y, inputs = mtf.stack([y, others], "pooled"), ["pooled", "d_model"]
        logits = nn.Dense((classes,), tuple(inputs), True, name="output")(y)
    return training.model(mtf.reduce_mean(mtf.softmax_cross_entropy(logits, label, classes)), name)


def pairs(name: str, stack: LayersReader, fields: Fields, training: ConfiguredTraining) -> Model:
    """Images beside their texts: inputs `image` [batch, height, width, colours] and `text` [batch, length].
    In CLIP (Radford et al. 2021) every image chooses its text and every text its image; in SigLIP (Zhai et
    al. 2023) each pair is a choice of its own between yes and no. Texts have all their positions."""
    seen, said = (
        fields.part(n, fields.raw(n, {}), class_defaults()["parts"][f"{name}: {n}"])
        for n in ("vision_config", "text_config")
    )
    seen.only("vision_use_head", True)
    fields.raw("initializer_factor")
    for part in (seen, said):
        part.skip("output_attentions", "projection_dim", "initializer_factor")
    g, b, clip = training.graph(name), Dim("batch", training.batch), name == "clip"
    image, texts = (replace(stack(part, training), final=False) for part in (seen, said))
    positions = said.count("max_position_embeddings")
    text = g.input("text", [b, Dim("length", min(training.length, positions))])
    joint = Dim("d_joint", fields.count("projection_dim") if clip else said.count("projection_size"))
    with g.scope("image"):
        x = _image(seen, training, g, nn.ImageTokens(1, image.width, not clip, clip))
        x = image.norm(x, "embedding_norm") if clip else x
        (x,) = replace(image, side="image_").hidden((x,), {})
        if clip:
            y = image.norm(mtf.reduce_first(x, "length"), "final_norm")
            y = nn.Dense((joint,), ("d_model",), name="head")(y)
        else:
            y = mtf.rename(_pooled(image, image.norm(x, "final_norm")), d_model="d_joint")
        pictures = _unit(y)
    with g.scope("text"):
        embedding = nn.Embedding(Dim("vocab", said.count("vocab_size")), texts.width, training.dtype)
        x = nn.LearnedPositions(positions)(embedding(embedding.table(g), text))
        texts = replace(texts, side="text_")
        if clip:
            mixer: Any = texts.layers[0].mixer
            causal = replace(texts.layers[0], mixer=replace(mixer, causal=True))
            texts = replace(texts, layers=(causal,) * len(texts.layers))
        (x,) = texts.hidden((x,), {})
        length = text.dim("length")
        last = mtf.equal(mtf.mtf_range(g, length), length.size - 1).cast(x.dtype)
        y = mtf.einsum([texts.norm(x, "final_norm"), last], [b, texts.width])
        words = _unit(mtf.rename(nn.Dense((joint,), ("d_model",), not clip, name="head")(y), batch="texts"))
    begin = {"logit_scale": 2.6592} if clip else {"logit_scale": 2.303, "logit_bias": -10.0}
    scale, *offset = (g.variable(n, [], Constant(v), activation_dtype="float32") for n, v in begin.items())
    logits = mtf.einsum([pictures, words], [b, words.dim("texts")]) * mtf.exp(scale)
    if clip:
        own = mtf.mtf_range(g, b)
        chosen = [(logits, own, words.dim("texts")), (logits, mtf.rename(own, batch="texts"), b)]
        losses = [mtf.reduce_mean(mtf.softmax_cross_entropy(*each)) for each in chosen]
        return training.model((losses[0] + losses[1]) * 0.5, name)
    paired = mtf.equal(mtf.mtf_range(g, b), mtf.rename(mtf.mtf_range(g, b), batch="texts")).cast("float32")
    loss = mtf.reduce_sum(mtf.softplus((logits + offset[0]) * (1.0 - paired * 2.0)))
    return training.model(loss * (1.0 / training.batch), name)


def _pooled(tower: LanguageModel, x: Tensor) -> Tensor:
    """[batch, length, d_model] -> [batch, d_model], by attention from one learned query."""
    g, (b, _, d) = x.graph, x.shape.dims
    one, layer = Dim("length", 1), tower.layers[0]
    mixer: Any = layer.mixer
    with g.scope("pool"):
        probe = g.variable("probe", [d], Normal(1.0), activation_dtype=x.dtype)
        attention = replace(mixer, dropout=0.0)
        y = attention(mtf.broadcast(probe, [b, one, d]), memory=mtf.rename(x, length="memory_length"))
        y = y + layer.feed_forward(tower.norm(y, "norm"))  # type: ignore[misc]
    return mtf.reduce_sum(y, one)


def _unit(x: Tensor) -> Tensor:
    """Vectors of norm 1 along d_joint, in float32."""
    y = x.cast("float32")
    return y * mtf.rsqrt(mtf.reduce_sum(mtf.square(y), "d_joint"))


READERS: Mapping[str, Callable[[str, LayersReader, Fields, ConfiguredTraining], Model]]
READERS = {"vit": classifier, "deit": classifier, "dinov2": classifier, "clip": pairs, "siglip": pairs}
"""Makers of a model of the layers that a form reads."""
