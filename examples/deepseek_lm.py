"""A language model with latent attention and many small experts (DeepSeek-AI 2024, "DeepSeek-V2").

    layoutopt search examples/deepseek_lm.py:v2_lite --devices 64 --hardware h100
    layoutopt train examples/deepseek_lm.py --layout "batch:data;experts:data" --mesh "data:4" --steps 200

The keys and values of all heads are computed from one short vector per position. The first layers are dense.
In the other layers, each token is processed by its `chosen` best experts and by the shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn


@trained(learning_rate=0.001)
def model(
    layers: int = 4,
    dense: int = 1,
    d_model: int = 128,
    heads: int = 4,
    d_kv: int = 32,
    d_rotary: int = 16,
    d_v: int = 32,
    kv_rank: int = 64,
    q_rank: int = 0,
    d_ff: int = 512,
    experts: int = 8,
    chosen: int = 2,
    shared: int = 1,
    d_expert: int = 128,
    capacity_factor: float = 0.0,
    imbalance: float = 1.0,
    balance: float = 0.01,
    vocab: int = 256,
    batch: int = 16,
    length: int = 128,
    attention: str = "fused",
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      dense: number of layers without experts.
      d_kv, d_rotary: elements of a query or key that know no positions, and those that do; d_v: of a value.
      kv_rank, q_rank: of the vectors that keys and values, and queries (0: they have none), are made of.
      d_ff: of dense layers; d_expert: of one expert, of which `shared` are for all tokens.
      capacity_factor: what an expert can process, relative to its even share; 0: no token is dropped.
      imbalance: tokens of the device with most of them over the mean, where devices share the experts.
      balance: weight of the load-balance loss.
      attention: "fused" (one operation that never stores all logits) or "plain" (products and a softmax).
    """
    g = training.graph("deepseek_lm")
    text = [mtf.Dim("batch", batch), mtf.Dim("length", length)]
    d, v = mtf.Dim("d_model", d_model), mtf.Dim("vocab", vocab)
    attend = nn.LatentAttention(
        mtf.Dim("heads", heads),
        mtf.Dim("d_kv", d_kv),
        causal=True,
        attention=attention,
        kv_rank=mtf.Dim("kv_rank", kv_rank),
        q_rank=mtf.Dim("q_rank", q_rank) if q_rank else None,
        d_rotary=d_rotary,
        d_v=mtf.Dim("d_v", d_v),
    )
    block = nn.FeedForward(mtf.Dim("d_ff", d_ff), "silu", gated=True)
    mixture = nn.MixtureOfExperts(
        mtf.Dim("experts", experts),
        mtf.Dim("d_expert", d_expert),
        nn.TopExperts(capacity_factor, chosen=chosen, normalized=False, imbalance=imbalance),
        "silu",
        gated=True,
        shared=mtf.Dim("d_shared", shared * d_expert) if shared else None,
    )
    tokens, targets = g.input("tokens", text), g.input("targets", text)
    embedding = nn.Embedding(v, d, training.dtype)
    x = embedding(embedding.table(g), tokens)

    def attended(x: mtf.Tensor) -> mtf.Tensor:
        return x + attend(nn.RMSNorm(name="attention_norm")(x))

    def plain(x: mtf.Tensor) -> mtf.Tensor:
        x = attended(x)
        return x + block(nn.RMSNorm(name="feed_forward_norm")(x))

    def mixed(carry: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
        x, unbalance = attended(carry[0]), carry[1]
        y, loss = mixture(nn.RMSNorm(name="experts_norm")(x))
        return x + y, unbalance + loss

    with g.scope("dense"):
        x = mtf.scan(plain, x, mtf.Dim("dense_layers", dense)) if dense else x
    with g.scope("sparse"):
        none = mtf.reduce_sum(targets.cast("float32") * 0.0)
        x, unbalance = mtf.scan(mixed, (x, none), mtf.Dim("layers", layers - dense))
    logits = embedding.logits(nn.RMSNorm(name="final_norm")(x))
    entropy = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    unbalance = unbalance * (1.0 / (layers - dense))
    metrics = {"cross_entropy": entropy, "unbalance": unbalance}
    return training.model(entropy + unbalance * balance, "deepseek_lm", text, metrics)


v2_lite = partial(
    model,
    layers=27,
    d_model=2048,
    heads=16,
    d_kv=128,
    d_rotary=64,
    d_v=128,
    kv_rank=512,
    d_ff=10944,
    experts=64,
    chosen=6,
    shared=2,
    d_expert=1408,
    balance=0.003,
    vocab=102400,
    batch=64,
    length=4096,
    dtype="bfloat16",
)
"""DeepSeek-V2-Lite: 15,706,484,224 parameters."""
v3 = partial(
    v2_lite,
    layers=61,
    dense=3,
    d_model=7168,
    heads=128,
    q_rank=1536,
    d_ff=18432,
    experts=256,
    chosen=8,
    shared=1,
    d_expert=2048,
    vocab=129280,
    batch=15360,
)
"""DeepSeek-V3's sizes: 671,026,404,352 parameters, without its second prediction head, and a softmax over all
experts where it has a sigmoid, biases that balance, and groups."""


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields windows of the standard library's source code as bytes; "held-out" yields other files."""
    from examples.text import batches

    return batches(batch, length, vocab, split)
