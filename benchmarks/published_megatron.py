"""GPT as Megatron-LM builds it (Shoeybi et al. 2019; NVIDIA/Megatron-LM, megatron/model), for pricing.

What differs from `examples/transformer_lm.py` in what is computed: biases behind the projection and the
products of the feed-forward block, gelu in it, dropout of 0.1 on attention weights and on what is added
to the residual stream; variables are float16, their float32 masters belong to the optimizer. So
microbatches add up float16 gradients, and float16 is what data-parallel replicas send. Left out: biases
of norms, queries, keys and values, clipping (whether it was on is not stated). Queries, keys and values
are three products here; there they are one, whose parts are views: as one they would be copied apart
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mesh_tf_core as mtf
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.initializers import Normal, Variable
from mesh_tf_core.optimizers import Adam
from mesh_tf_core.optimizers.base import LearningRate, Updates, slot, times

DROPOUT = 0.1
HALF = "float16"


@dataclass(frozen=True)
class MasterAdam(Adam):
    """Adam of float16 variables whose float32 master copies are a third slot: 16 bytes a parameter
    (Rajbhandari et al. 2020, section 3). To be priced: a master begins at zero here, not at its variable."""

    def update(
        self, graph: mtf.Graph, variable: Variable, gradient: mtf.Tensor, rate: LearningRate
    ) -> Updates:
        g = gradient.cast("float32")
        (m_state, m), (v_state, v), (state, master) = (
            slot(graph, variable, name, variable.shape) for name in ("adam_m", "adam_v", "master")
        )
        m = m * self.beta1 + g * (1 - self.beta1)
        v = v * self.beta2 + g * g * (1 - self.beta2)
        master = master - times(m / (mtf.sqrt(v) + self.epsilon), rate)
        yield from ((m_state, m), (v_state, v), (state, master), (variable, master.cast(variable.dtype)))


def gpt(
    layers: int, d_model: int, heads: int, vocab: int, length: int, batch: int, dropout: float = DROPOUT
) -> mtf.Model:
    """The training step; heads, d_ff and vocab are what tensor parallelism splits."""
    b, s = mtf.Dim("batch", batch), mtf.Dim("length", length)
    d, f, v = mtf.Dim("d_model", d_model), mtf.Dim("d_ff", 4 * d_model), mtf.Dim("vocab", vocab)
    h, k = mtf.Dim("heads", heads), mtf.Dim("d_kv", d_model // heads)
    attention = nn.Attention(h, k, causal=True, dropout=dropout, attention="plain")
    g = mtf.Graph("megatron_gpt")

    def weight(name: str, dims: Sequence[mtf.Dim]) -> mtf.Tensor:
        return g.variable(name, dims, Normal(0.02), HALF)

    def linear(x: mtf.Tensor, name: str, inner: Sequence[mtf.Dim], outer: Sequence[mtf.Dim]) -> mtf.Tensor:
        kept = [dim for dim in x.shape if dim not in inner]
        return mtf.einsum([x, weight(name, [*inner, *outer])], [*kept, *outer])

    def norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return mtf.layer_norm(x, d, weight(f"{name}/scale", [d]))

    def attend(x: mtf.Tensor) -> mtf.Tensor:
        memory = mtf.rename(x, length="memory_length")
        q, keys, values = (
            linear(y, name, [d], [h, k]) for y, name in ((x, "q"), (memory, "k"), (memory, "v"))
        )
        mixed = attention.attended(q, keys, values, x, None, None)
        return linear(mixed, "projection", [h, k], [d]) + weight("projection_bias", [d])

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        x = x + mtf.dropout(attend(norm(x, "attention_norm")), dropout)
        hidden = linear(norm(x, "feed_forward_norm"), "up", [d], [f]) + weight("up_bias", [f])
        y = linear(mtf.gelu(hidden), "down", [f], [d]) + weight("down_bias", [d])
        return x + mtf.dropout(y, dropout)

    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    table, positions = weight("tokens", [v, d]), weight("positions", [s, d])
    x = mtf.dropout(mtf.gather(table, tokens, v) + positions, dropout)
    x = norm(mtf.scan(layer, x, mtf.Dim("layers", layers)), "final_norm")
    logits = mtf.einsum([x, table], [b, s, v]).cast("float32")
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    return mtf.Model(loss, MasterAdam(1e-4), name="megatron_gpt")
