"""A decoder-only language model whose feed-forward blocks are mixtures of experts (Lepikhin et al. 2021,
"GShard"; Fedus et al. 2022, "Switch Transformer").

    layoutopt search examples/moe_lm.py --mesh "data:4;model:2"
    layoutopt train examples/moe_lm.py --layout "batch:data;experts:data" --mesh "data:8" --steps 200

Splitting `experts` over the axis that splits `batch` sends tokens to their experts by all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn


@trained()
def model(
    layers: int = 4,
    d_model: int = 256,
    d_kv: int = 32,
    heads: int = 8,
    kv_heads: int = 0,
    d_ff: int = 1024,
    gated: bool = False,
    experts: int = 8,
    chosen: int = 2,
    capacity_factor: float = 0.0,
    imbalance: float = 1.0,
    balance: float = 0.01,
    vocab: int = 256,
    batch: int = 16,
    length: int = 128,
    positions: str = "learned",
    tied: bool = False,
    dropout: float = 0.0,
    attention: str = "fused",
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      d_kv: size of one head.
      kv_heads: heads of keys and values (grouped-query attention); 0 means as many as `heads`.
      gated: three matrices per expert, silu(x a) * (x b), instead of two with relu.
      experts: feed-forward blocks per layer; each token uses `chosen` of them.
      capacity_factor: what an expert can process, relative to its even share; 0: no token is dropped.
      imbalance: tokens of the device with most of them over the mean, where devices share the experts.
      balance: weight of the load-balance loss.
      positions: learned, rotary, none, or the number of learned positions.
      tied: the output projection is the embedding.
      attention: "fused" (one operation that never stores all logits) or "plain" (products and a softmax).
    """
    g = training.graph("moe_lm")
    text = [mtf.Dim("batch", batch), mtf.Dim("length", length)]
    d, v = mtf.Dim("d_model", d_model), mtf.Dim("vocab", vocab)
    attend = nn.Attention(
        mtf.Dim("heads", heads),
        mtf.Dim("d_kv", d_kv),
        kv_heads,
        causal=True,
        rotary=nn.Rotary() if positions == "rotary" else None,
        dropout=dropout,
        attention=attention,
    )
    mixture = nn.MixtureOfExperts(
        mtf.Dim("experts", experts),
        mtf.Dim("d_ff", d_ff),
        nn.TopExperts(capacity_factor, chosen=chosen, normalized=chosen > 1, imbalance=imbalance),
        "silu" if gated else "relu",
        gated,
    )
    tokens, targets = g.input("tokens", text), g.input("targets", text)
    embedding = nn.Embedding(v, d, training.dtype)
    table = embedding.table(g)
    x = embedding(table, tokens)
    if positions not in ("rotary", "none"):
        x = nn.LearnedPositions.named(positions, length, "rotary", "none")(x)

    def layer(carry: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
        x, unbalance = carry
        x = x + mtf.dropout(attend(nn.LayerNorm(name="attention_norm")(x)), dropout)
        y, loss = mixture(nn.LayerNorm(name="experts_norm")(x))
        return x + mtf.dropout(y, dropout), unbalance + loss

    none = mtf.reduce_sum(targets.cast("float32") * 0.0)
    x, unbalance = mtf.scan(layer, (mtf.dropout(x, dropout), none), mtf.Dim("layers", layers))
    logits = embedding.logits(nn.LayerNorm(name="final_norm")(x), table if tied else None)
    entropy = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    unbalance = unbalance * (1.0 / layers)
    return training.model(
        entropy + unbalance * balance, "moe_lm", text, {"cross_entropy": entropy, "unbalance": unbalance}
    )


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields windows of the standard library's source code as bytes; "held-out" yields other files."""
    from examples.text import batches

    return batches(batch, length, vocab, split)
