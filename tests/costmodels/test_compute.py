"""The roofline of local operations: padding, waves, the peak as a bound, measured curves."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh_tf_core as mtf
from costmodels import Quantity, compute_cost, compute_seconds, load_hardware
from costmodels.hardware import ComputeCurve, Curve, Hardware, hardware_names
from costmodels.kernels.fusion import Fuses
from costmodels.kernels.padding import padding_ratio
from costmodels.kernels.quantities import quantity_of, tiling
from costmodels.liveness import MemoryRules, memory
from costmodels.pricing.pricer import price
from mesh_tf_core import Dim, Graph, Shape, TensorType
from mesh_tf_core.errors import UserError
from mesh_tf_core.ops.attention import FusedAttention

L, M = Dim("l", 512), Dim("m", 512)
DIM = st.integers(min_value=1, max_value=10_000)


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "bfloat16") -> Quantity:
    flops = 2.0 * m * n * k * batch
    return Quantity(flops, 2.0 * batch * (m * k + k * n + m * n), "matmul", dtype, (m, n, k, batch))


@given(st.sampled_from(hardware_names()), DIM, DIM, DIM, st.integers(min_value=1, max_value=64))
def test_no_product_is_faster_than_the_peak_or_the_memory(
    name: str, m: int, n: int, k: int, batch: int
) -> None:
    hardware, quantity = load_hardware(name), product(m, n, k, batch)
    seconds = compute_seconds(hardware, quantity)
    assert seconds >= quantity.flops / hardware.peak_flops("bfloat16") * (1 - 1e-12)
    assert seconds >= quantity.bytes / hardware.memory_bandwidth * (1 - 1e-12)
    assert padding_ratio(hardware.chip.matrix_unit, quantity.matmul_dims) >= 1 - 1e-12


@given(
    st.sampled_from(hardware_names()),
    st.floats(min_value=0, max_value=1e15),
    st.floats(min_value=0, max_value=1e15),
    st.sampled_from(("matmul", "elementwise", "gather")),
)
def test_more_work_never_takes_less_time(name: str, one: float, other: float, op_class: str) -> None:
    less, more = sorted((one, other))
    hardware = load_hardware(name)
    for a, b in (
        (Quantity(less, 0, op_class, "float32"), Quantity(more, 0, op_class, "float32")),
        (Quantity(0, less, op_class, "float32"), Quantity(0, more, op_class, "float32")),
    ):
        assert 0 <= compute_seconds(hardware, a) <= compute_seconds(hardware, b) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "dims", "ratio"),
    [
        ("tpu-v5e", (1024, 1024, 1024), 1.0),
        ("tpu-v5e", (1024, 64, 1024), 1.0),  # turned around: 64 rows are whole sublanes
        ("tpu-v5e", (4, 128, 128), 2.0),
        ("tpu-v5e", (1024, 1024, 64), 2.0),
        ("tpu-v6e", (1024, 1024, 128), 2.0),
        ("tpu-v6e", (1024, 1024, 257), 512 / 257),
    ],
)
def test_tpu_padding(name: str, dims: tuple[int, int, int], ratio: float) -> None:
    assert padding_ratio(load_hardware(name).chip.matrix_unit, product(*dims).matmul_dims) == pytest.approx(
        ratio
    )


def test_a_gpu_runs_tiles_in_waves() -> None:
    unit = load_hardware("h100").chip.matrix_unit
    whole = 132 * 128 * 128
    assert padding_ratio(unit, product(132 * 128, 128, 1024).matmul_dims) == pytest.approx(1.0)
    # One row of tiles more: a whole wave more with full tiles, a quarter of one with quarter tiles.
    assert padding_ratio(unit, product(133 * 128, 128, 1024).matmul_dims) == pytest.approx(
        1.25 * whole / (133 * 128 * 128)
    )
    assert padding_ratio(unit, product(8, 8, 1024).matmul_dims) == pytest.approx(132 * 64 * 64 / 64)


def test_causal_or_unknown_shapes_scale_with_the_flops_given() -> None:
    hardware = load_hardware("tpu-v5e")
    chip = hardware.chip
    even = dataclasses.replace(chip.matmul_efficiency, curve=Curve(((1.0, 0.9),)))
    launch = dataclasses.replace(chip.launch_overhead, value=0.0)
    hardware = dataclasses.replace(
        hardware,
        chip=dataclasses.replace(chip, matmul_efficiency=even, launch_overhead=launch, product_launch=launch),
    )
    full = product(4096, 4096, 4096)
    half = dataclasses.replace(full, flops=full.flops / 2)
    assert compute_seconds(hardware, half) == pytest.approx(compute_seconds(hardware, full) / 2)
    assert compute_cost(hardware, dataclasses.replace(full, matmul_dims=None)).padding == 1.0


def test_a_product_has_a_launch_of_its_own_where_the_file_says_so() -> None:
    v5e, v5p = load_hardware("tpu-v5e"), load_hardware("tpu-v5p")
    small, passing = product(256, 256, 256), Quantity(65536.0, 393216.0, "elementwise", "bfloat16")
    assert v5e.chip.product_launch is not None and v5p.chip.product_launch is None
    assert compute_cost(v5e, small).launch_seconds == v5e.chip.product_launch.value
    assert compute_cost(v5e, passing).launch_seconds == v5e.chip.launch_overhead.value
    assert compute_cost(v5p, small).launch_seconds == v5p.chip.launch_overhead.value


def attention(heads: int, d_kv: int, length: int = 4096) -> Quantity:
    """Forward, every query sees every key."""
    flops, moved = 4.0 * heads * length * length * d_kv, 8.0 * heads * length * d_kv
    return Quantity(flops, moved, "attention", "bfloat16", (length, length, d_kv, heads))


def test_attention_has_an_efficiency_of_its_own_by_the_size_of_its_heads() -> None:
    h100 = load_hardware("h100")
    known = dict(h100.chip.attention_efficiency or ())
    for size, number in known.items():
        cost = compute_cost(h100, attention(64, size))
        assert cost.padding == 1
        assert cost.flop_seconds == pytest.approx(
            attention(64, size).flops / h100.peak_flops("bfloat16") / number.value
        )
    largest = compute_seconds(h100, attention(64, max(known)))
    assert compute_seconds(h100, attention(32, 2 * max(known))) == pytest.approx(largest, rel=1e-3)
    least = compute_cost(h100, attention(64, min(known))).flop_seconds
    # Half the FLOPs at half the efficiency: the softmax takes as long.
    assert compute_cost(h100, attention(64, min(known) // 2)).flop_seconds == pytest.approx(least)


def test_attention_on_a_tpu_takes_its_products_and_its_softmax_in_turn() -> None:
    """Forward, causal, one block of 512: all of it, 2 products and 9 vector operations for a logit."""
    tpu, logits = load_hardware("tpu-v5p"), 4096.0 * 512 * 512
    vector = logits * 9 / 14.3e12
    for size, padded in ((128, 128), (256, 256), (64, 128)):
        op = FusedAttention("d", L, M, 1.0, causal=True)
        b, d = Dim("b", 4096), Dim("d", size)
        types = [TensorType(Shape([b, row, d]), "bfloat16") for row in (L, M, M)]
        quantity = quantity_of(op, tuple(types), op.infer(*types))
        assert quantity.work.blocked == (logits * 4 * size, logits * 9, 4 * 4096 * 512 * padded)
        cost = compute_cost(tpu, quantity)
        rate = (logits * 4 * padded) / (cost.flop_seconds - vector)
        assert 0.9 * 459e12 < rate <= 459e12
        assert cost.seconds == pytest.approx(1.3e-6 + cost.flop_seconds + cost.memory_seconds)


def test_taps_of_narrow_convolutions_are_added_with_lanes_filled_up() -> None:
    v5e = load_hardware("tpu-v5e")
    narrow = conv(16)
    assert narrow.work.added == (9 * 64 * 64 * 64, 16)
    cost = compute_cost(v5e, narrow)
    assert cost.flop_seconds == pytest.approx(9 * 64 * 64 * 64 * 128 * 1.08e-12)
    wide = compute_cost(v5e, conv(256))
    assert wide.flop_seconds > 2.0 * 64 * 64 * 64 * 9 * 256 * 256 / 197e12


def conv(channels: int) -> Quantity:
    """Three by three taps over 64 images of 64 x 64."""
    c, o = Dim("c", channels), Dim("o", channels)
    g = Graph()
    h, w, th, tw = Dim("h", 64), Dim("w", 64), Dim("th", 3), Dim("tw", 3)
    x = g.input("x", [Dim("b", 64), h, w, c], "bfloat16")
    f = g.input("f", [th, tw, c, o], "bfloat16")
    y = mtf.conv(x, f, [h, w], [th, tw], c)
    node = g.producer[y.id]
    return quantity_of(node.op, (x.type, f.type), (y.type,))


@pytest.mark.parametrize(
    ("sizes", "waste"),
    [
        ((32, 32, 32, 64), 2),
        ((128, 32, 32, 16), 1),
        ((32, 32, 32, 16), 4),
        ((200, 200), 256 / 200),
        ((4, 4, 4), 32),
        ((32, 32, 32, 4, 16), 2),
    ],
)
def test_one_dimension_lies_along_the_lanes_of_tiles(sizes: tuple[int, ...], waste: float) -> None:
    """In the last one, channels in four groups of sixteen are one dimension elsewhere; few rows have low
    tiles."""
    shape = Shape(Dim(name, size) for name, size in zip("bhwgc", sizes, strict=False))
    assert tiling(shape, frozenset({frozenset("gc")})) == waste


def test_narrow_arrays_take_whole_tiles_in_time_and_memory() -> None:
    g = mtf.Graph()
    x = g.input("x", [Dim("b", 64), Dim("h", 64), Dim("w", 64), Dim("c", 32)], "float32")
    program = mtf.lower(g, mtf.Mesh("all:1"), mtf.Layout(), {"y": mtf.exp(x)})
    size = 4 * 64**3 * 32
    tiled = memory(program, MemoryRules(fuses=Fuses.ALL, tiles=True)).peak
    assert memory(program, MemoryRules(fuses=Fuses.ALL)).peak == tiled / 2 >= size
    tpu, gpu = (price(program, load_hardware(name)).lines[0] for name in ("tpu-v4", "h100"))
    bandwidth, element = 1200e9 * 0.859, 4.82e-12
    assert tpu.seconds == pytest.approx(0.756e-6 + 2 * (2 * size / bandwidth + size / 4 * element))
    assert gpu.bytes == 2 * size


def test_whole_steps_sustain_less_than_the_best_product_of_a_scan() -> None:
    full = load_hardware("h100, sustained=1")
    less = load_hardware("h100, sustained=0.8")
    x = product(8192, 8192, 8192)
    assert compute_cost(less, x).flop_seconds == pytest.approx(compute_cost(full, x).flop_seconds / 0.8)
    assert compute_seconds(less, attention(8, 128)) == compute_seconds(full, attention(8, 128))


def test_virtual_devices_share_the_cores() -> None:
    hardware = load_hardware("cpu-local")
    one = compute_seconds(hardware, product(512, 512, 512))
    assert compute_seconds(hardware, product(512, 512, 512), devices=2) == pytest.approx(one)
    assert compute_seconds(hardware, product(512, 512, 512), devices=8) == pytest.approx(4 * one)
    tpu = load_hardware("tpu-v4")
    assert compute_seconds(tpu, product(512, 512, 512), devices=512) == compute_seconds(
        tpu, product(512, 512, 512)
    )


def test_a_cost_says_what_bounds_it() -> None:
    hardware = load_hardware("a100")
    assert compute_cost(hardware, product(8192, 8192, 8192)).bound == "flops"
    assert compute_cost(hardware, Quantity(1e9, 1e9, "elementwise", "bfloat16")).bound == "memory"
    assert compute_cost(hardware, Quantity(1, 1, "elementwise", "bfloat16")).bound == "launch"
    words = compute_cost(hardware, product(8192, 8192, 8192)).words
    assert words.startswith("1 us launch + max(")
    assert "for padding, at " in words and " TFLOP/s; " in words and " GB/s)" in words


def test_products_use_the_listed_peak_or_that_of_what_computes_them() -> None:
    assert load_hardware("a100").peak_dtype("float32") == "tf32"
    assert load_hardware("tpu-v4").peak_dtype("float32") == "bfloat16"
    assert load_hardware("v100").peak_dtype("bfloat16") == "float32"
    assert load_hardware("cpu-local").peak_dtype("bfloat16") == "float32"
    assert load_hardware("h100").peak_dtype("int32") == "float32"


def test_a_device_waits_for_a_host_that_launches() -> None:
    hardware = load_hardware("a100-eager")
    interval = hardware.chip.launch_interval
    assert interval is not None and load_hardware("a100").chip.launch_interval is None
    small, large = Quantity(1, 1, "elementwise", "float16"), product(8192, 8192, 8192)
    found = compute_cost(hardware, small)
    assert (found.seconds, found.bound) == (interval.value, "launch")
    assert f"at least {interval.value * 1e6:.3g} us between launches" in found.words
    assert hardware.chip.sustained is not None
    patient = load_hardware(f"a100, sustained={hardware.chip.sustained.value}")
    assert compute_seconds(hardware, large) == compute_seconds(patient, large)


# ----------------------------------------------------------------------------------------------- measured


def _measured(*curves: ComputeCurve) -> Hardware:
    return dataclasses.replace(load_hardware("cpu-local"), compute_curves=curves)


def test_measured_curves_replace_the_roofline_but_not_its_bounds() -> None:
    slow = ComputeCurve("matmul", "float32", "flops", 1, Curve(((1e6, 1e-3), (1e9, 8e-3))), "a test", "2026")
    hardware = _measured(slow)
    cost = compute_cost(hardware, Quantity(1e6, 10, "matmul", "float32"))
    assert (cost.seconds, cost.bound) == (pytest.approx(1e-3), "measured")
    fast = dataclasses.replace(slow, seconds=Curve(((1e6, 1e-9), (1e9, 2e-9))))
    cost = compute_cost(_measured(fast), Quantity(1e9, 10, "matmul", "float32"))
    assert (cost.seconds, cost.bound) == (pytest.approx(1e9 / 250e9), "flops")


def test_a_curve_measured_on_all_devices_at_once_already_holds_their_contention() -> None:
    curve = ComputeCurve("elementwise", "float32", "bytes", 8, Curve(((1e6, 8e-3),)), "a test", "2026")
    hardware, quantity = _measured(curve), Quantity(0, 1e6, "reduce", "float32")
    assert compute_seconds(hardware, quantity, devices=8) == pytest.approx(8e-3)
    assert compute_seconds(hardware, quantity, devices=2) == pytest.approx(2e-3)


def test_wrong_quantities_are_refused() -> None:
    with pytest.raises(UserError, match=r"flops and bytes are .*; both must be at least 0"):
        Quantity(-1, 0, "matmul", "float32")
    with pytest.raises(UserError, match=r"give \(m, n, k, batch\), all positive"):
        Quantity(1, 1, "matmul", "float32", (0, 1, 1, 1))
