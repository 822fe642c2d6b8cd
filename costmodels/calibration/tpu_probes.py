"""The programs that a calibration for a TPU compiles: matrix products, and chains of operations as in steps
of training.

A chain is compiled as a whole, so that its cycles reflect fusion, values that stay in the memory of the core,
and values that are read twice. In half of the training steps the activations fit in the core's own memory, in
half they do not. No example model is used, so whole models remain an independent test of the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mesh_tf_core as mtf
from mesh_tf_core import Dim, Graph, Layout, Mesh, Tensor
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.program import Program
from mesh_tf_core.optimizers import SGD

PRODUCT, CHAIN, CHECK = "product", "chain", "check"
BuildProbe = Callable[[Graph], Sequence[Tensor]]


@dataclass(frozen=True)
class TpuProbe:
    """One program to compile.

    Attributes:
      name: unique; it states the kind and the size, so that results can be stored by it.
      kind: 'product', 'chain', or 'check' (a chain that the fit does not see).
      build: adds the operations to a graph and gives the results.
    """

    name: str
    kind: str
    build: BuildProbe

    def program(self, devices: int) -> Program:
        """Every device does all of it."""
        graph = Graph(self.name)
        results = {f"y{i}": y for i, y in enumerate(self.build(graph))}
        return mtf.lower(graph, Mesh(f"all:{devices}"), Layout(), results)


PRODUCTS = (
    "128x128x128 256x256x256 512x512x512 1024x1024x1024 1536x1536x1536 2048x2048x2048 3072x3072x3072 "
    "4096x4096x4096 8192x8192x8192 1000x1000x1000 300x2048x2048 4096x1024x1024 1024x8192x1024 8192x512x2048 "
    "8192x2048x512 2048x768x3072 8x4096x4096 100x4096x4096 2048x2048x200 16384x1536x1536"
)
"""m x k x n of [m, k] x [k, n]: square ones; activations by weights; gradients of weights, which sum over
many rows; sizes that are not multiples of the matrix unit's; a few rows, as in decoding."""
FEED_FORWARD = (
    ((3, 4, 512, 768), 3072),
    ((2, 16, 512, 1536), 1536),
    ((3, 32, 512, 768), 3072),
    ((2, 16, 1024, 1536), 6144),
)
"""Layers, batch, length and width; the hidden width."""
ATTENTION = (
    ((2, 4, 512, 768), 12, 64),
    ((3, 8, 256, 1536), 6, 128),
    ((3, 32, 512, 768), 12, 64),
    ((2, 16, 1024, 1536), 12, 128),
)
"""Layers, batch, length and width; heads and their size."""


def tpu_probes() -> tuple[TpuProbe, ...]:
    """Everything that one calibration compiles."""
    return (*_products(), *_chains(), *_checks())


def _products() -> Iterator[TpuProbe]:
    for text in PRODUCTS.split():
        m, k, n = (int(size) for size in text.split("x"))
        yield TpuProbe(f"product {text}", PRODUCT, _product(m, k, n))


def _product(m: int, k: int, n: int) -> BuildProbe:
    def build(g: Graph) -> Sequence[Tensor]:
        x, y = _inputs(g, "bfloat16", (("m", m), ("k", k)), (("k", k), ("n", n)))
        return [mtf.einsum([x, y], [Dim("m", m), Dim("n", n)])]

    return build


def _chains() -> Iterator[TpuProbe]:
    for rows, wide in ((64, 512), (512, 1024), (8192, 2048)):
        label = f"{rows}x{wide}"
        yield TpuProbe(f"gelu {label}", CHAIN, _rows(rows, wide, lambda x, y: mtf.gelu(x + y) * y))
        yield TpuProbe(
            f"layer_norm {label}", CHAIN, _rows(rows, wide, lambda x, y: mtf.layer_norm(x + y, "d"))
        )
    yield TpuProbe("softmax 64x256x256", CHAIN, _softmax(64, 256))
    yield TpuProbe("adam 4096x2048", CHAIN, _adam(4096, 2048))
    yield TpuProbe("cross_entropy 4096x16384", CHAIN, _cross_entropy(4096, 16384))
    for sizes, inner in FEED_FORWARD:
        name = f"feed_forward {_text(sizes)} {inner}"
        yield TpuProbe(name, CHAIN, _step(_feed_forward(inner), *sizes))
    for sizes, heads, size in ATTENTION:
        name = f"attention {_text(sizes)} {heads}x{size}"
        yield TpuProbe(name, CHAIN, _step(_attention(heads, size), *sizes))


def _checks() -> Iterator[TpuProbe]:
    for sizes in ((2, 8, 384, 1280), (2, 24, 768, 1280)):
        yield TpuProbe(f"feed_forward {_text(sizes)} 2560", CHECK, _step(_feed_forward(2560), *sizes))
        yield TpuProbe(f"attention {_text(sizes)} 10x64", CHECK, _step(_attention(10, 64), *sizes))
    for sizes in ((0, 4, 512, 1280), (0, 24, 512, 1280)):
        yield TpuProbe(f"gated {_text(sizes)} 2560", CHECK, _step(_feed_forward(2560, gated=True), *sizes))
    normalised = _rows(16384, 3072, lambda x, y: mtf.rms_norm(x * y, "d") + y)
    yield TpuProbe("rms_norm 16384x3072", CHECK, normalised)


def _text(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _inputs(g: Graph, dtype: str, *shapes: tuple[tuple[str, int], ...]) -> list[Tensor]:
    return [g.input(f"x{i}", [Dim(*d) for d in shape], dtype) for i, shape in enumerate(shapes)]


def _rows(rows: int, wide: int, do: Callable[[Tensor, Tensor], Tensor]) -> BuildProbe:
    """`do` of two arrays [rows, wide]."""
    shape = (("b", rows), ("d", wide))
    return lambda g: [do(*_inputs(g, "bfloat16", shape, shape))]


def _softmax(batch: int, length: int) -> BuildProbe:
    """Forward and backward."""
    shape = (("b", batch), ("l", length), ("m", length))

    def build(g: Graph) -> Sequence[Tensor]:
        x, weight = _inputs(g, "bfloat16", shape, shape)
        y = mtf.softmax(x, "m")
        return [y, *_gradients(y * weight, x)]

    return build


def _adam(rows: int, wide: int) -> BuildProbe:
    """An optimizer's step (Kingma & Ba 2015) in float32, and the variable as activations use it."""
    shape = (("b", rows), ("d", wide))

    def build(g: Graph) -> Sequence[Tensor]:
        x, m, v = _inputs(g, "float32", shape, shape, shape)
        slope = g.input("slope", [Dim(*d) for d in shape], "bfloat16").cast("float32")
        m, v = m * 0.9 + slope * 0.1, v * 0.999 + slope * slope * 0.001
        new = x - m * mtf.rsqrt(v + 1e-8) * 0.001
        return [m, v, new, new.cast("bfloat16")]

    return build


def _cross_entropy(rows: int, vocab: int) -> BuildProbe:
    """Loss and gradient of the logits."""

    def build(g: Graph) -> Sequence[Tensor]:
        (logits,) = _inputs(g, "bfloat16", (("b", rows), ("v", vocab)))
        loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, g.input("target", [Dim("b", rows)]), "v"))
        return [loss, *_gradients(loss, logits)]

    return build


ProbeLayer = Callable[[Tensor], Tensor]


def _step(layer: ProbeLayer, layers: int, batch: int, length: int, wide: int) -> BuildProbe:
    """A training step of `layers` times x + layer(normalised x), [batch, length, wide]; without a loop if
    `layers` is 0."""

    def body(x: Tensor) -> Tensor:
        return x + layer(nn.LayerNorm("d")(x))

    def build(g: Graph) -> Sequence[Tensor]:
        (x,) = _inputs(g, "bfloat16", (("b", batch), ("l", length), ("d", wide)))
        y = mtf.scan(body, x, Dim("layers", layers)) if layers else body(x)
        loss = mtf.reduce_mean(y.cast("float32"))
        mtf.minimize(loss, SGD(0.1))
        return [loss]

    return build


def _gradients(y: Tensor, *wrt: Tensor) -> list[Tensor]:
    """Of the sum of y."""
    return [g for g in mtf.gradients(mtf.reduce_sum(y.cast("float32")), wrt) if g is not None]


def _feed_forward(inner: int, gated: bool = False) -> ProbeLayer:
    return nn.FeedForward(Dim("f", inner), "silu" if gated else "gelu", gated, d_model="d")


def _attention(heads: int, size: int) -> ProbeLayer:
    # Written out: the compiler estimates no time of a library's kernel.
    sizes = Dim("h", heads), Dim("k", size)
    return nn.Attention(*sizes, causal=True, attention="plain", d_model="d", length="l")
