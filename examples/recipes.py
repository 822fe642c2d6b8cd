"""Short functions for model structures and training loops; docs/guides/recipes.md lists them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.huggingface import names_of
from mesh_tf_core import layers as nn

Layer = Callable[[mtf.Tensor], mtf.Tensor]


def universal(block: Layer, x: mtf.Tensor, steps: int) -> mtf.Tensor:
    """The Universal Transformer (Dehghani et al. 2019): iterations share their variables."""
    with x.graph.sharing():
        return mtf.scan(block, x, mtf.Dim("steps", steps))


def adaptive_time(
    block: Layer, x: mtf.Tensor, steps: int, epsilon: float = 0.01
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Adaptive computation time (Graves 2016, section 2.1): each position stops on its own.

    Returns:
      The mean of the states, weighted by stopping probabilities, and the mean ponder cost for the loss.
    """
    stops = nn.Dense((mtf.Dim("halt", 1),), ("d_model",), bias=True, activation="sigmoid", name="halt")
    number = mtf.Dim("steps", steps)

    def step(state: Any, i: mtf.Tensor) -> Any:
        x, mean, stopped, cost = state
        p = mtf.squeeze(stops(x), "halt")
        running = (stopped < 1.0).cast("float32")
        last = ((stopped + p > 1.0 - epsilon) | i.equal(steps - 1)).cast("float32") * running
        weight = p * (running - last) + (1.0 - stopped) * last
        x = block(x)
        return x, mean + x * weight, stopped + weight, cost + running + (1.0 - stopped) * last

    nothing = mtf.reduce_sum(x * 0.0, "d_model")
    start = (x, x * 0.0, nothing, nothing)
    with x.graph.sharing():
        _, mean, _, cost = mtf.scan(step, start, number, [mtf.mtf_range(x.graph, number)])
    return mean, mtf.reduce_mean(cost)


def funnel(layer: Layer, x: mtf.Tensor, counts: Sequence[int], pool: int = 2) -> mtf.Tensor:
    """The Funnel Transformer (Dai et al. 2020): pooling shortens the sequence between stacks."""
    for i, count in enumerate(counts):
        if i:
            x = mtf.avg_pool(x, [x.dim("length")], [pool])
        with x.graph.scope(f"stack_{i}"):
            x = mtf.scan(layer, x, mtf.Dim(f"layers_{i}", count))
    return x


def transparent(
    encoder_layer: Layer,
    decoder_layer: Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor],
    x: mtf.Tensor,
    y: mtf.Tensor,
    encoder_layers: mtf.Dim,
    decoder_layers: mtf.Dim,
) -> mtf.Tensor:
    """Transparent attention (Bapna et al. 2018, section 3.2): each decoder layer attends to its own weighted
    mean of all encoder layers."""

    def encode(x: mtf.Tensor) -> Any:
        x = encoder_layer(x)
        return x, (x,)

    _, (outputs,) = mtf.scan(encode, x, encoder_layers)
    outputs = mtf.rename(outputs, length="memory_length")
    g, stddev = x.graph, encoder_layers.size**-0.5
    shares = g.variable("shares", [decoder_layers, encoder_layers], mtf.Normal(stddev))
    shares = mtf.softmax(shares, encoder_layers)
    memories = mtf.einsum([shares, outputs], [decoder_layers, *outputs.shape.without(encoder_layers.name)])
    return mtf.scan(decoder_layer, y, decoder_layers, [memories])


def residual(layer: Layer, x: mtf.Tensor, name: str) -> mtf.Tensor:
    """x plus the layer of its normalised values."""
    with x.graph.scope(name):
        return x + layer(nn.LayerNorm(bias=True)(x))


def beside(wide: mtf.Tensor, narrow: mtf.Tensor) -> mtf.Tensor:
    """The sum of two branches of different widths."""
    more = wide.dim("d_model").size - narrow.dim("d_model").size
    return wide + mtf.pad(narrow, "d_model", 0, more)


def branches(x: mtf.Tensor) -> mtf.Tensor:
    """A convolution beside a wide layer, then a separable convolution.

    In a decoder, make a convolution of `size` taps causal by shifting its input:
    `mtf.shift(x, (size - 1) // 2, "length")`.
    """
    d = x.dim("d_model").size
    wide, narrow = mtf.Dim("d_model", 4 * d), mtf.Dim("d_model", d // 2)
    inner = mtf.rename(x, d_model="d_model_in")
    left = nn.Dense((wide,), ("d_model_in",), activation="relu", name="conv1x1")(inner)
    right = nn.Conv(narrow, ("length",), 3, activation="relu", inputs="d_model_in", name="conv3x1")(inner)
    h = nn.LayerNorm(bias=True, name="middle")(beside(left, right))
    y = nn.SeparableConv(narrow, ("length",), 9, name="conv9x1")(h)
    return mtf.pad(y, "d_model", 0, d - d // 2)


def gated(x: mtf.Tensor) -> mtf.Tensor:
    """A gated linear unit of the width of x."""
    inner = mtf.rename(x, d_model="d_model_in")
    return nn.DenseProduct((x.dim("d_model"),), ("d_model_in",))(inner)


def evolved(x: mtf.Tensor, attention: Layer, feed_forward: Layer) -> mtf.Tensor:
    """A block of the Evolved Transformer's encoder (So et al. 2019, figure 3)."""
    x = residual(gated, x, "glu")
    x = residual(branches, x, "branches")
    x = residual(attention, x, "attention")
    return residual(feed_forward, x, "feed_forward")


def fixup(branch: Layer, x: mtf.Tensor, branches: int, layers: int, last: str = "wo") -> mtf.Tensor:
    """A residual branch without normalisation (Zhang et al. 2019).

    The last layer of each branch starts at 0; the others are scaled by L^(-1 / (2m - 2)) for L branches of m
    layers.
    """
    smaller = branches ** (-1 / (2 * layers - 2))

    def initial(name: str, found: Any) -> Any:
        if name.endswith(f"/{last}"):
            return mtf.ZEROS
        return mtf.Normal(found.stddev * smaller) if isinstance(found, mtf.Normal) else found

    g = x.graph
    with g.scope("fixup"), g.initialized(initial):
        y = branch(x + g.variable("before", [], mtf.ZEROS))
        return x + y * g.variable("scale", [], mtf.ONES) + g.variable("after", [], mtf.ZEROS)


def distilled(
    student: Layer,
    teacher: Layer,
    x: mtf.Tensor,
    targets: mtf.Tensor,
    vocab: mtf.Dim,
    temperature: float = 2.0,
    share: float = 0.5,
) -> mtf.Tensor:
    """The loss of a student that also learns a frozen teacher's soft distributions (Hinton et al. 2015)."""
    g = x.graph
    with g.scope("teacher"), g.frozen():
        soft = mtf.stop_gradient(mtf.softmax(teacher(x) * (1 / temperature), vocab))
    with g.scope("student"):
        logits = student(x)
    loss = nn.CrossEntropy(vocab)
    hard = mtf.reduce_mean(loss(logits, targets))
    imitated = mtf.reduce_mean(loss(logits * (1 / temperature), soft))
    return hard * (1 - share) + imitated * (share * temperature**2)


def ensemble(model: Layer, x: mtf.Tensor, members: mtf.Dim, vocab: mtf.Dim) -> mtf.Tensor:
    """Log of the mean probabilities of members with their own variables, which run one after the other."""

    def member(x: mtf.Tensor) -> Any:
        return x, (model(x),)

    _, (logits,) = mtf.scan(member, x, members)
    return mtf.logsumexp(mtf.log_softmax(logits, vocab), members) - math.log(members.size)


def parallel(layers: Sequence[Layer], x: mtf.Tensor) -> mtf.Tensor:
    """Layers that read the same input; their outputs are added."""
    return mtf.add_n([layer(x) for layer in layers]) * len(layers) ** -0.5


def masked(attention: Any, x: mtf.Tensor, ids: mtf.Tensor, segments: mtf.Tensor) -> mtf.Tensor:
    """Queries attend to earlier keys of their own text that are not padding; outputs at padding are zero.

    TPU and GPU kernels do not accept a mask of pairs. To avoid one, use a layer with `causal=True` and call
    `attention(x, mask=nn.padding_mask(ids), segments=(segments, memory_segments))` with `memory_segments =
    mtf.rename(segments, length="memory_length")`.
    """
    length = x.dim("length")
    memory = mtf.Dim("memory_length", length.size)
    seen = nn.padding_mask(ids) & nn.segment_mask(segments) & nn.causal_mask(x.graph, length, memory)
    return attention(x, mask=seen) * mtf.not_equal(ids, 0).cast(x.dtype)


def weighted_loss(
    logits: mtf.Tensor, targets: mtf.Tensor, classes: mtf.Dim, weights: np.ndarray
) -> mtf.Tensor:
    """A loss with class weights, a constant of the graph."""
    each = mtf.softmax_cross_entropy(logits, targets, classes)
    counts = mtf.gather(mtf.constant(logits.graph, weights, [classes]), targets, classes)
    return mtf.reduce_sum(each * counts) / mtf.reduce_sum(counts)


def orthogonal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """An orthogonal initial value; a stack calls the function once per layer."""
    q, r = np.linalg.qr(rng.normal(size=shape))
    return q * np.sign(np.diagonal(r))


def recurrent(x: mtf.Tensor, hidden: mtf.Dim) -> mtf.Tensor:
    """A product with a square matrix that starts orthogonal."""
    w = x.graph.variable("w", [mtf.Dim("hidden_in", hidden.size), hidden], orthogonal)
    return mtf.einsum([mtf.rename(x, hidden="hidden_in"), w], x.shape)


def deepseek_experts(experts: int = 64, chosen: int = 6, width: int = 1408, shared: int = 2) -> Any:
    """The mixture of experts of DeepSeek-V2-Lite."""
    router = nn.TopExperts(chosen=chosen, normalized=False)
    block = mtf.Dim("d_ff", width)
    return nn.MixtureOfExperts(
        mtf.Dim("experts", experts), block, router, "silu", gated=True, shared=mtf.Dim("d_ff", shared * width)
    )


def local_and_global(x: mtf.Tensor, groups: mtf.Dim, local: Layer, whole: Layer, block: Layer) -> mtf.Tensor:
    """Groups of two layers with local attention and one with global attention, as in Gemma."""

    def group(x: mtf.Tensor) -> mtf.Tensor:
        for i in range(2):
            with x.graph.scope(f"local_{i}"):
                x = block(x + local(nn.RMSNorm()(x)))
        with x.graph.scope("global"):
            return block(x + whole(nn.RMSNorm()(x)))

    return mtf.scan(group, x, groups)


def float8_stack(layer: Layer, x: mtf.Tensor, layers: mtf.Dim) -> mtf.Tensor:
    """A stack whose products with weights are in float8."""
    with x.graph.float8():
        return mtf.scan(layer, x, layers)


def pooled(x: mtf.Tensor, classes: mtf.Dim) -> mtf.Tensor:
    """Classes of a text by BERT's pooled first token (Devlin et al. 2019, section 3)."""
    first = mtf.rename(mtf.reduce_first(x, "length"), d_model="d_model_in")
    h = nn.Dense((x.dim("d_model"),), ("d_model_in",), bias=True, activation="tanh", name="pooler")(first)
    return nn.Dense((classes,), ("d_model",), bias=True, name="classes")(h)


def denoised(network: Any, x: mtf.Tensor, count: int = 50, steps: int = 1000) -> mtf.Tensor:
    """Images from noise by DDIM (Song et al. 2021, equation 12), with the network of `examples/diffusion.py`.

    To run it eagerly, open `mtf.Eager("data:4", "batch:data").step(unroll=False)`; `Eager.write(name, array)`
    sets trained weights.
    """
    left = np.cumprod(1 - np.linspace(1e-4, 0.02, steps))
    at = np.linspace(steps - 1, 0, count).round().astype(np.int32)
    now, then = left[at], np.append(left[at[1:]], 1.0)
    number, g = mtf.Dim("drawing", count), x.graph

    def step(x: mtf.Tensor, at: mtf.Tensor, now: mtf.Tensor, then: mtf.Tensor) -> mtf.Tensor:
        noise = network(x, at)
        image = (x - noise * mtf.sqrt(1.0 - now)) * mtf.rsqrt(now)
        return image * mtf.sqrt(then) + noise * mtf.sqrt(1.0 - then)

    with g.sharing():
        return mtf.scan(step, x, number, [mtf.constant(g, t, [number]) for t in (at, now, then)])


def evaluated(
    model: mtf.Model, mesh: Any, layout: Any, batches: Any, test: Any, steps: int
) -> tuple[Any, Any]:
    """Held-out results of the last weights and of the running means (an optimizer with `ema=0.9999`)."""
    trainer = mtf.Trainer(model, mesh, layout)
    trainer.fit(batches, steps)
    return trainer.evaluate(test), trainer.evaluate(test, ema=True)


def adapted(
    x: mtf.Tensor, w: mtf.Tensor, rank: int, outputs: Sequence[mtf.Dim], name: str, scale: float = 1.0
) -> mtf.Tensor:
    """The product x w with an adapter (LoRA, Hu et al. 2022), which starts at 0; w is frozen."""
    low, g = mtf.Dim("rank", rank), x.graph
    inner = [d for d in w.shape if d not in outputs]
    down = g.variable(f"{name}/lora_down", [*inner, low], mtf.Normal(1 / rank), activation_dtype=x.dtype)
    up = g.variable(f"{name}/lora_up", [low, *outputs], mtf.ZEROS, activation_dtype=x.dtype)
    kept = [d for d in x.shape if d not in inner]
    more = mtf.einsum([mtf.einsum([x, down], [*kept, low]), up], [*kept, *outputs])
    return mtf.einsum([x, w], [*kept, *outputs]) + more * scale


def fine_tuned(model: mtf.Model, base: str | Path, mesh: Any, layout: Any) -> tuple[mtf.Trainer, Any]:
    """A trainer of a model with adapters and the weights of its base, and what was loaded.

    Variables that match `new` keep their initial values if the weights lack them; another missing variable is
    an error. `loaded.new` lists new variables, `loaded.unused` unused weights.
    """
    trainer = mtf.Trainer(model, mesh, layout)
    loaded = trainer.load(base, new="lora_")
    return trainer, loaded


def continued(folder: str | Path, mesh: Any, layout: Any, **sizes: Any) -> mtf.Trainer:
    """A trainer of a Hugging Face model: a folder with a `config.json` and its weights."""
    config = f"{folder}/config.json"
    trainer = mtf.Trainer(layoutopt.from_huggingface(config, **sizes), mesh, layout)
    trainer.load(folder, names_of(config, **sizes))
    return trainer


def until_no_better(
    trainer: mtf.Trainer,
    batches: Iterable[Any],
    held_out: Any,
    path: str | Path,
    every: int = 100,
    patience: int = 3,
) -> float:
    """Early stopping after `patience` evaluations without a better loss; the best weights are in `path`.

    Returns:
      The best loss.
    """
    best, since = math.inf, 0
    for n, batch in enumerate(batches, 1):
        trainer.step(batch)
        if n % every:
            continue
        loss = trainer.evaluate(held_out)["loss"]
        if loss < best:
            best, since = loss, 0
            trainer.save_weights(path)
        else:
            since += 1
        if since == patience:
            break
    return best
