"""No product runs faster than the peak of its type: every preset, every dtype, random programs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import mesh_tf_core as mtf
from costmodels import framework_names, hardware_names, load_framework, load_hardware
from costmodels.hardware import HardwareError, preset_content
from costmodels.hardware.peaks import FLOAT8, TF32, computed_in
from costmodels.hardware.schema import read
from costmodels.kernels.compute import MATMUL_CLASSES, Quantity, compute_cost
from costmodels.kernels.quantities import flops_of
from costmodels.pricing.pricer import pricer
from costmodels.utilisation import utilisation
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core.ir.dtypes import DTYPES, FLOATS
from mesh_tf_core.ir.dtypes import FLOAT8 as FORMATS
from mesh_tf_core.ir.program import Local, Program
from mesh_tf_core.tracing.scan import cond

SIXTEEN_BITS = {
    "tpu-v2": 45e12,
    "tpu-v3": 123e12,
    "tpu-v4": 275e12,
    "tpu-v5e": 197e12,
    "tpu-v5p": 459e12,
    "tpu-v6e": 918e12,
    "tpu-v7": 2307e12,
    "trainium2": 667e12,
    "v100": 125e12,
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
}
"""FLOP/s of a chip in its 16-bit floats, dense, by the makers' data sheets: a second copy on purpose."""


@pytest.mark.parametrize("name", hardware_names())
def test_no_type_is_faster_than_the_chip(name: str) -> None:
    hardware = load_hardware(name)
    most = next((n for known, n in SIXTEEN_BITS.items() if name.startswith(known)), None)
    for dtype in (*DTYPES, *FORMATS):
        peak, own = hardware.peak_flops(dtype), hardware.peak_dtype(dtype)
        assert own in (dtype, FLOAT8, TF32, *FLOATS), f"{dtype} is computed in {own}"
        if dtype in FLOATS:
            assert most is None or peak * hardware.devices_per_chip <= most * (1 + 1e-12), dtype
        for sizes in ((8192, 8192, 8192, 1), (16, 2048, 300, 12), (3, 5, 7, 1)):
            flops = 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
            for kind in MATMUL_CLASSES:
                cost = compute_cost(hardware, Quantity(flops, 0.0, kind, dtype, sizes))
                assert cost.seconds >= flops / peak * (1 - 1e-12), (dtype, kind, sizes)
    wide = [hardware.peak_flops(dtype) for dtype in ("float64", "float32")]
    assert wide[0] <= wide[1] <= max(hardware.peak_flops(d) for d in FLOATS)


@pytest.mark.parametrize("name", ["tpu-v5e", "tpu-v5p", "tpu-v6e"])
def test_float16_is_no_integer(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.peak_dtype("float16") == "bfloat16"
    assert hardware.peak_flops("float16") * 1.9 < hardware.peak_flops("int8")
    said = hardware.peak_note("float16") or ""
    assert said.startswith(f"{name} has no peak FLOP/s for float16") and "loss scale" in said
    assert hardware.peak_note("bfloat16") is None and hardware.peak_note("float32") is None


def test_notes_of_gpus_and_hosts() -> None:
    v100 = load_hardware("v100")
    assert (v100.peak_note("bfloat16") or "").endswith("float16 would be faster")
    assert v100.peak_note("float64") is None and load_hardware("cpu-local").peak_note("float64") is None
    assert "longer than predicted" in (load_hardware("tpu-v4").peak_note("float64") or "")


FLOAT32 = {"v100": 15.7, "a100": 19.5, "h100": 67, "h200": 67, "b200": 80, "gb200": 80, "gb300": 80}
FLOAT32 |= {"mi300x": 163.4, "mi325x": 163.4, "mi355x": 157.3}
"""TFLOP/s of a chip outside its tensor cores, by the makers' data sheets: a second copy on purpose."""


@pytest.mark.parametrize("name", framework_names())
def test_software_multiplies_float32_in_float32_or_tf32(name: str) -> None:
    """PyTorch's default is float32, XLA's and TransformerEngine's TF32 on NVIDIA's GPUs."""
    slow = name.startswith(("torch", "transformers", "deepspeed"))
    work = Quantity(2.0 * 8192**3, 0.0, "matmul", "float32", (8192, 8192, 8192, 1))
    for chip in (c for c in hardware_names() if load_hardware(c).kind in load_framework(name).kinds):
        hardware = load_hardware(chip, name)
        known = next((n for key, n in FLOAT32.items() if chip.startswith(key)), None)
        has, amd = TF32 in hardware._peaks, chip.startswith("mi")
        in_float32 = known is not None and (slow or amd or not has)
        assert (hardware.product_flops("float32") == (known or 0) * 1e12) == in_float32, chip
        assert hardware.product_flops("float32", convolution=True) == hardware._peaks.get(
            "float32" if amd and has else TF32, hardware.product_flops("float32")
        )
        assert (hardware.peak_note("float32") is not None) == (in_float32 and has)
        seconds = compute_cost(hardware, work).seconds
        assert seconds >= work.flops / hardware.product_flops("float32") * (1 - 1e-12)
        if slow and has:
            faster = load_hardware(chip, f"{name}:float32=tf32")
            assert faster.product_flops("float32") == hardware._peaks[TF32]
            assert compute_cost(faster, work).seconds < seconds
            assert f"--framework {name}:float32=tf32" in (hardware.peak_note("float32") or "")


def test_a_file_gives_rates_of_floats() -> None:
    assert computed_in("float16", ["int8", "float64"]) == "float64"
    content = preset_content("tpu-v5e")
    del content["chip"]["peak_flops"]["bfloat16"]
    hardware, faults = read(content)
    assert (
        hardware is None and "peak_flops has no floating-point type; add at least one of float64" in faults[0]
    )
    content["chip"]["peak_flops"]["bf16"] = content["chip"]["peak_flops"]["int8"]
    assert "peak_flops has unknown element types: bf16; known: float64" in read(content)[1][0]
    with pytest.raises(HardwareError):
        load_hardware("h100, peak_flops.bf16=1TFLOP/s")


# ------------------------------------------------------------------------------------------ random programs


def drawn(seed: int) -> mtf.Model:
    """Products, attention and convolutions of random sizes and types, in loops and branches or not."""
    draw = random.Random(seed)
    g = mtf.Graph(f"random {seed}")
    size = {n: draw.choice((1, 16, 96, 512, 2048)) for n in ("rows", "width", "hidden", "taps")}
    rows, width, hidden = (mtf.Dim(n, size[n]) for n in ("rows", "width", "hidden"))
    batch, heads, head = mtf.Dim("batch", 8), mtf.Dim("heads", 4), mtf.Dim("d_kv", draw.choice((16, 128)))
    keys, tap = mtf.Dim("memory_rows", rows.size), mtf.Dim("tap", 3)
    x = g.input("x", [batch, rows, width], "float32")

    def weight(name: str, dims: list[mtf.Dim], like: mtf.Tensor) -> mtf.Tensor:
        return g.variable(name, dims, mtf.ONES, activation_dtype=like.dtype)

    def dense(x: mtf.Tensor, i: int) -> mtf.Tensor:
        h = mtf.relu(mtf.einsum([x, weight(f"in{i}", [width, hidden], x)], [batch, rows, hidden]))
        return mtf.einsum([h, weight(f"out{i}", [hidden, width], x)], [batch, rows, width])

    def attend(x: mtf.Tensor, i: int) -> mtf.Tensor:
        q, k, v = (weight(f"{n}{i}", [width, heads, head], x) for n in "qkv")
        along = mtf.rename_dimension(x, "rows", "memory_rows")
        query = mtf.einsum([x, q], [batch, heads, rows, head])
        key, value = (mtf.einsum([along, w], [batch, heads, keys, head]) for w in (k, v))
        y = mtf.attention(query, key, value, rows, keys, head, causal=draw.random() < 0.5)
        return mtf.einsum([y, weight(f"o{i}", [heads, head, width], x)], [batch, rows, width])

    def convolve(x: mtf.Tensor, i: int) -> mtf.Tensor:
        out = mtf.Dim("channels", width.size)
        y = mtf.conv(x, weight(f"taps{i}", [tap, width, out], x), [rows], [tap], width)
        return mtf.rename_dimension(y, "channels", "width")

    for i in range(draw.randint(1, 3)):
        x = x.cast(draw.choice(FLOATS))
        step = draw.choice((dense, attend, convolve))
        if draw.random() < 0.2:
            x = cond(mtf.reduce_sum(x) > 0.0, lambda x=x, i=i, step=step: step(x, i), lambda x=x: x * 2.0)
        else:
            x = step(x, i)
    return mtf.Model(mtf.reduce_mean(mtf.square(x.cast("float32"))), mtf.SGD(0.1))


def least_seconds(program: Program, peak: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Of every product, the seconds that its FLOPs take at the peak of its type."""
    for instr, times in program.expected():
        if isinstance(instr, Local) and instr.op.kind in MATMUL_CLASSES:
            inputs = [program.local(i) for i in instr.inputs]
            yield inputs[0].dtype, times * flops_of(instr.op, inputs) / peak[inputs[0].dtype]


def hold(seed: int) -> None:
    draw = random.Random(-seed - 1)
    model = drawn(seed)
    mesh = mtf.Mesh(draw.choice(("one:1", "a:2", "a:8", "a:2;b:4")))
    rules = {"batch": mesh.names[0], "heads": mesh.names[-1], "hidden": mesh.names[-1]}
    layout = ";".join(f"{n}:{a}" for n, a in rules.items() if draw.random() < 0.6)
    for name in draw.sample(hardware_names(), 4):
        hardware = load_hardware(name)
        try:
            found = evaluate(model, mesh, mtf.Layout(layout), hardware, prices=pricer(hardware, mesh))
        except mtf.LayoutError:
            return
        share = hardware.contention(mesh.devices)
        peaks = {dtype: hardware.peak_flops(dtype) / share for dtype in (*DTYPES, *FORMATS)}
        least = sum(seconds for _, seconds in least_seconds(found.program, peaks))
        assert least <= found.cost.compute_seconds * (1 + 1e-9), (seed, name, layout)
        flops: dict[str, float] = {}
        for dtype, seconds in least_seconds(found.program, peaks):
            flops[dtype] = flops.get(dtype, 0.0) + seconds * peaks[dtype] * mesh.devices
        assert utilisation(flops, hardware, mesh.devices, found.cost.step_seconds) <= 1 + 1e-9


def test_random_programs_stay_below_the_peaks() -> None:
    for seed in (*range(7), 12):  # 12: devices that share cores
        hold(seed)


@pytest.mark.nightly
def test_many_random_programs_stay_below_the_peaks() -> None:
    for seed in range(7, 500):
        hold(seed)


@pytest.mark.parametrize("chip", hardware_names())
def test_float8_without_units_is_said(chip: str) -> None:
    found = load_hardware(chip)
    units = "float8" in found._peaks
    note = found.peak_note("float8_e4m3fn")
    assert (note is None) == (units or found.is_host)
    assert note is None or f"{chip} has no units for float8, so its products are predicted in" in note
