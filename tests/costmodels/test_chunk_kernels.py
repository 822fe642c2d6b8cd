"""Libraries' kernels for delta rules, linear attention and state spaces against published times on H100.

Rows of one source decided `chunk_efficiency`, `chunk_products` and `chunk_time`, those of heads of 128 of
another one `chunk_vector`, and on B200 both shares; the others were predicted first.
"""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.items import Computed
from costmodels.pricing.pricer import price
from mesh_tf_core import layers
from mesh_tf_core.layers.recurrent import KERNEL, Recurrence, kernels

DIM = mtf.Dim("d_model", 128)


def layer(rule: str, heads: int, keys: int, chunk: int, elements: int) -> Recurrence:
    """Keys and values of so many elements."""
    many, size = mtf.Dim("heads", heads), mtf.Dim("d_v", elements)
    if rule == "scan":
        return layers.Mamba2(many, size, mtf.Dim("d_state", 128), keys, chunk=chunk, fused=True)
    key = mtf.Dim("d_k", elements)
    return layers.GatedDeltaNet(many, keys, key, size, chunk=chunk, channels=rule == "decaying", fused=True)


def milliseconds(
    rule: str, batch: int, length: int, heads: int, keys: int, elements: int = 128, chip: str = "h100"
) -> tuple[float, float]:
    """Forward and backward of one layer's kernels, without launches."""
    graph = mtf.Graph()
    x = graph.input("x", [mtf.Dim("batch", batch), mtf.Dim("length", length), DIM], "bfloat16")
    y = layer(rule, heads, keys, 64, elements)(x)
    model = mtf.Model(mtf.reduce_mean(y.cast("float32")), mtf.SGD(0.1))
    cost = price(model.lower(mtf.Mesh("x:1"), mtf.Layout("")), load_hardware(chip, "megatron"))
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("source", "rule", "batch", "length", "heads", "keys", "published"), FORWARD)
def test_forward_takes_as_long_as_published(
    source: str, rule: str, batch: int, length: int, heads: int, keys: int, published: float
) -> None:
    forward, backward = milliseconds(rule, batch, length, heads, keys)
    assert forward == pytest.approx(published, rel=0.15), source
    assert 1.9 * forward < backward < (3 if rule == "delta" else 4.2) * forward


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("chip", "rule", "batch", "length", "heads", "elements", "published"),
    [
        ("h100", "delta", 1, 8192, 96, 128, 6.925),
        ("h100", "decaying", 1, 8192, 96, 128, 17.387),
        ("h100", "decaying", 4, 2048, 16, 128, 2.998),
        ("h100", "decaying", 8, 2048, 32, 256, 24.834),
        ("b200", "delta", 2, 16384, 16, 128, 4.07),
        ("b200", "decaying", 2, 16384, 16, 128, 7.78),
        ("b200", "decaying", 4, 4096, 64, 128, 14.62),
    ],
)
def test_both_ways_take_as_long_as_published(
    chip: str, rule: str, batch: int, length: int, heads: int, elements: int, published: float
) -> None:
    """pytorch/helion examples/linear/BENCHMARKS.md @3e928d1e, column "fla f+b"."""
    both = sum(milliseconds(rule, batch, length, heads, heads, elements, chip))
    assert both == pytest.approx(published, rel=0.17)


def test_a_scan_without_products_runs_on_the_vector_units() -> None:
    """Mamba's exponentials and its float32 sums do not become faster with tensor cores."""
    graph, chip = mtf.Graph(), load_hardware("h100", "megatron")
    x = graph.input("x", [mtf.Dim("batch", 8), mtf.Dim("length", 2048), DIM], "bfloat16")
    y = layers.SelectiveStateSpace(mtf.Dim("inner", 1536), mtf.Dim("d_state", 16), 48, fused=True)(x)
    program = mtf.Model(mtf.reduce_mean(y.cast("float32")), mtf.SGD(0.1)).lower(
        mtf.Mesh("x:1"), mtf.Layout("")
    )
    lines = [line for line in price(program, chip).lines if line.name == "librarykernels"]
    assert {line.origin.phase for line in lines} == {"forward", "backward"}
    assert chip.chip.vector_flops is not None
    for line in lines:
        assert isinstance(line.item, Computed) and line.item.quantity.flops == 0
        assert line.seconds > line.item.quantity.vector / chip.chip.vector_flops.value > 1e-4


def test_few_heads_do_not_take_less_than_their_chunks_in_turn() -> None:
    """So tensor parallelism gains less than its ways; twice the batch of few heads takes hardly longer."""
    one, half, two = (milliseconds("delta", b, 16384, h, h)[0] for b, h in ((1, 8), (1, 4), (2, 4)))
    assert half > 0.6 * one and two < 1.4 * half


def test_mamba_moves_twice_what_linear_attention_does() -> None:
    """12.5 and 6.2 ms for 16 texts of 16,384, 8 heads of 128 (fla-org/flash-linear-attention pull request
    50); linear attention on H100 takes 0.96 ms forward and 3.43 with backward for 96 heads (pytorch/helion
    examples/fla/BENCHMARKS.md @fea89d2, retention)."""

    def moved(rule: str, phase: str) -> float:
        return sum(elements for elements, *_ in kernels(rule, phase, 128, 128, 64, 1))

    assert 1.9 < moved("scan", "forward") / moved("linear", "forward") < 2.3
    phases = ("forward", "backward")
    seconds = [2 * 8192 * 96 * moved("linear", phase) / (0.58 * 3.35e12) for phase in phases]
    assert seconds[0] == pytest.approx(0.961e-3, rel=0.15)
    assert sum(seconds) == pytest.approx(3.426e-3, rel=0.15)
