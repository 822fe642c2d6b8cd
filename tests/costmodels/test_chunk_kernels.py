"""Libraries' kernels for delta rules, linear attention and state spaces against published times on H100.

Rows of one source decided the three numbers (`chunk_efficiency`, `chunk_products`, `chunk_time`); the others
were predicted first.
"""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.pricer import price
from mesh_tf_core import layers
from mesh_tf_core.layers.recurrent import KERNEL, Recurrence, kernels

DIM = mtf.Dim("d_model", 128)


def layer(rule: str, heads: int, keys: int, chunk: int) -> Recurrence:
    """Keys and values of 128 elements."""
    many, size = mtf.Dim("heads", heads), mtf.Dim("d_v", 128)
    if rule == "scan":
        return layers.Mamba2(many, size, mtf.Dim("d_state", 128), keys, chunk=chunk, fused=True)
    key = mtf.Dim("d_k", 128)
    return layers.GatedDeltaNet(many, keys, key, size, chunk=chunk, channels=rule == "decaying", fused=True)


def milliseconds(rule: str, batch: int, length: int, heads: int, keys: int) -> tuple[float, float]:
    """Forward and backward of one layer's kernels, without launches."""
    graph = mtf.Graph()
    x = graph.input("x", [mtf.Dim("batch", batch), mtf.Dim("length", length), DIM], "bfloat16")
    y = layer(rule, heads, keys, 64)(x)
    model = mtf.Model(mtf.reduce_mean(y.cast("float32")), mtf.SGD(0.1))
    cost = price(model.lower(mtf.Mesh("x:1"), mtf.Layout("")), load_hardware("h100", "megatron"))
    found = {"forward": 0.0, "backward": 0.0, "beside": 0.0}
    for line in cost.lines:
        if line.name == "librarykernels" or KERNEL in line.origin.scope:
            found[line.origin.phase if line.name == "librarykernels" else "beside"] += (
                1e3 * line.seconds * line.times
            )
    assert found["beside"] < 0.01 * found["forward"], "what stands for the kernels takes no time"
    return found["forward"], found["backward"]


PADDLE = "PaddlePaddle/flash-attention pull request 133, H800"
FLASHINFER = "flashinfer-ai/flashinfer pull requests 3866 and 3788, FLA/Triton"
FORWARD = [
    (PADDLE, "delta", 1, 8192, 96, 96, 2.033),
    (PADDLE, "decaying", 1, 8192, 96, 96, 3.268),
    (PADDLE, "delta", 2, 16384, 16, 16, 1.342),
    (PADDLE, "decaying", 2, 16384, 16, 16, 2.299),
    (FLASHINFER, "delta", 1, 65536, 8, 2, 1.954),
    (FLASHINFER, "delta", 1, 65536, 64, 16, 8.633),
    (FLASHINFER, "delta", 1, 16384, 64, 16, 2.090),
    (FLASHINFER, "delta", 1, 4096, 64, 16, 0.536),
    ("flagos-ai/FlagGems-vllm pull request 21", "delta", 1, 8192, 96, 96, 1.891),
    ("flagos-ai/FlagGems-vllm pull request 21", "decaying", 1, 8192, 96, 96, 3.501),
    ("meta-pytorch/attention-gym pull request 438", "decaying", 1, 4096, 16, 16, 0.349),
]


@pytest.mark.parametrize(("source", "rule", "batch", "length", "heads", "keys", "published"), FORWARD)
def test_forward_takes_as_long_as_published(
    source: str, rule: str, batch: int, length: int, heads: int, keys: int, published: float
) -> None:
    forward, backward = milliseconds(rule, batch, length, heads, keys)
    assert forward == pytest.approx(published, rel=0.15), source
    assert 1.9 * forward < backward < 3 * forward


def test_few_heads_do_not_take_less_than_their_chunks_in_turn() -> None:
    """So tensor parallelism gains less than its ways; twice the batch of few heads takes hardly longer."""
    one, half, two = (milliseconds("delta", b, 16384, h, h)[0] for b, h in ((1, 8), (1, 4), (2, 4)))
    assert half > 0.6 * one and two < 1.4 * half


def test_mamba_moves_twice_what_linear_attention_does() -> None:
    """12.5 and 6.2 ms for 16 texts of 16,384, 8 heads of 128 (fla-org/flash-linear-attention pull request
    50); linear attention on H100 takes 0.96 ms forward and 3.43 with backward for 96 heads (pytorch/helion
    examples/fla/BENCHMARKS.md @fea89d2, retention)."""

    def moved(rule: str, phase: str) -> float:
        return sum(elements for elements, _, _ in kernels(rule, phase, 128, 128, 64, 1))

    assert 1.9 < moved("scan", "forward") / moved("linear", "forward") < 2.3
    phases = ("forward", "backward")
    seconds = [2 * 8192 * 96 * moved("linear", phase) / (0.58 * 3.35e12) for phase in phases]
    assert seconds[0] == pytest.approx(0.961e-3, rel=0.15)
    assert sum(seconds) == pytest.approx(3.426e-3, rel=0.15)
