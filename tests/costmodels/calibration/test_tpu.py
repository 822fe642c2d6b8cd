"""Calibration for a TPU from the estimates that ship with the project; nothing is compiled here."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import median
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.calibration import tpu_compiled
from costmodels.calibration.residuals import residuals
from costmodels.calibration.tpu import (
    Numbers,
    calibrate_tpu,
    fit_numbers,
    fit_tpu,
    predicted,
    tpu_samples,
    with_numbers,
)
from costmodels.calibration.tpu_compiled import (
    FORMAT,
    GENERATIONS,
    SHIPPED,
    compile_probes,
    ship,
    shipped_probes,
)
from costmodels.calibration.tpu_probes import CHAIN, CHECK, PRODUCT, tpu_probes
from costmodels.hardware import Curve, Hardware, load_hardware, write_profile
from costmodels.kernels.compute import Quantity, compute_seconds
from costmodels.pricing.pricer import pricer
from mesh_tf_core import Mesh, UserError
from mesh_tf_core.engines.jax.compile import CompilerRefusal, Executable

TARGETS = sorted(json.loads(SHIPPED.read_text(encoding="utf-8"))["targets"])
ITEM = 2


@pytest.fixture(scope="module", params=TARGETS)
def made(request):
    return calibrate_tpu(request.param)


@pytest.fixture(scope="module")
def v5e():
    """The preset, and its samples."""
    hardware = load_hardware("tpu-v5e")
    return hardware, tpu_samples(hardware, tpu_probes(), shipped_probes("tpu-v5e"))


def test_what_ships_is_what_the_probes_are() -> None:
    assert "tpu-v5e" in TARGETS
    names = [p.name for p in tpu_probes()]
    assert len(set(names)) == len(names)
    for name, generation in GENERATIONS.items():
        found = shipped_probes(generation.hardware)
        if found is not None:
            assert found.topology == f"{name}:{generation.smallest}"
            assert list(found.cycles) == names
            clock = generation.clock(load_hardware(generation.hardware))
            for probe, cycles in found.cycles.items():
                assert found.seconds[probe] == pytest.approx(cycles / clock, rel=1e-4)


def test_every_kind_of_probe_has_several() -> None:
    kinds = [p.kind for p in tpu_probes()]
    assert kinds.count(PRODUCT) >= 12 and kinds.count(CHAIN) >= 5 and kinds.count(CHECK) >= 3


@pytest.mark.one_in(4)
def test_numbers_are_bounded(made) -> None:
    numbers = made.fit.numbers
    assert 0 < numbers.memory <= 1 and 0 <= numbers.launch < 1e-4 and 0 <= numbers.element < 1e-10
    points = numbers.curve.points
    assert 0 < points[0][1] <= points[-1][1] <= 1
    for (x0, y0), (x1, y1) in pairwise(points):
        assert y0 <= y1 and x0 / y0 <= x1 / y1
    assert all(0 <= u < 1 for u in made.fit.uncertainty.values())


def test_the_fit_holds_and_presets_ship_it(made) -> None:
    for kind in ("matmuls", "chains"):
        errors = made.typical[kind]
        assert errors["fitted"] <= errors["held_out"] < 0.31
        assert errors["preset"] == pytest.approx(errors["fitted"], abs=0.06)


def test_a_profile_loads_and_stays_analytic(made, tmp_path) -> None:
    machine = write_profile(made.content, tmp_path / "profile.json")
    assert load_hardware(tmp_path / "profile.json") == machine
    assert machine.calibrated and not machine.compute_curves
    assert pricer(machine, Mesh("data:2;model:2")).pieces_cost_more
    assert machine.chip.matmul_efficiency.curve == made.fit.numbers.curve
    assert machine.chip.memory_efficiency.value == made.fit.numbers.memory
    assert machine.chip.element_time.value == made.fit.numbers.element
    assert machine.chip.launch_overhead.value == made.fit.numbers.launch
    assert made.compiled.versions["libtpu"] in machine.chip.memory_efficiency.source
    said = json.loads(machine.calibration.fit)
    errors = [abs(m["held_out"]) for m in json.loads(machine.calibration.measurements)]
    assert said["held_out_error"] == median(errors)
    preset = load_hardware(made.compiled.target)
    assert machine.topology == preset.topology and machine.overlap == preset.overlap


sizes = st.builds(lambda power, odd: 2**power * odd, st.integers(1, 13), st.sampled_from([1, 1, 3, 5]))


@given(st.tuples(sizes, sizes, sizes), st.integers(0, 2), st.sampled_from([2, 3, 8]))
@settings(deadline=None, max_examples=60)
def test_pieces_cost_more(piece: tuple[int, int, int], along: int, count: int) -> None:
    machine = _calibrated()
    whole = [size * count if i == along else size for i, size in enumerate(piece)]
    one, all_of_it = (compute_seconds(machine, _product(*dims)) for dims in (piece, whole))
    assert count * one >= all_of_it * (1 - 1e-9)
    assert one <= all_of_it * (1 + 1e-9)


def _product(m: int, n: int, k: int) -> Quantity:
    moved = float(ITEM * (m * k + k * n + m * n))
    return Quantity(2.0 * m * n * k, moved, "matmul", "bfloat16", (m, n, k, 1))


@cache
def _calibrated() -> Hardware:
    return with_numbers(load_hardware("tpu-v5e"), calibrate_tpu("tpu-v5e").fit.numbers)


def test_a_known_machine_is_found_again(v5e) -> None:
    preset, samples = v5e
    hardware = replace(preset, chip=replace(preset.chip, product_launch=None))
    truth = Numbers(3e-6, 0.5, 4e-12, Curve(((1e6, 0.05), (1e9, 0.4), (1e11, 0.8), (1e12, 0.9))))
    machine = with_numbers(hardware, truth)
    # Products see the curve only where nothing else decides: give them no bytes or elements to wait for.
    quick = [_without_bytes(s) if s.kind == PRODUCT else s for s in samples]
    found = fit_tpu(hardware, [replace(s, seconds=predicted(machine, s)) for s in quick])
    assert found.numbers.memory == pytest.approx(truth.memory, rel=0.05)
    assert found.numbers.launch == pytest.approx(truth.launch, rel=0.05)
    assert found.numbers.element == pytest.approx(truth.element, rel=0.05)
    assert found.numbers.curve(1e11) == pytest.approx(0.8, rel=0.1)
    assert max(abs(e) for e in found.fitted.values()) < 0.1


def _without_bytes(sample):
    ((quantity, times),) = sample.kernels
    return replace(sample, kernels=((replace(quantity, bytes=0.0, elements=0), times),))


def test_products_that_wait_for_memory_alone_say_nothing_of_those_in_a_step(v5e) -> None:
    hardware, samples = v5e
    waiting = {"product 128x128x128", "product 512x512x512", "product 8x4096x4096", "product 100x4096x4096"}
    slower = [replace(s, seconds=1.2 * s.seconds) if s.name in waiting else s for s in samples]
    curve = fit_numbers(hardware, samples).curve
    assert fit_numbers(hardware, slower).curve == curve
    without = replace(hardware, chip=replace(hardware.chip, product_launch=None))
    assert fit_numbers(without, slower).curve != fit_numbers(without, samples).curve


def test_held_out_is_held_out(v5e) -> None:
    """What is predicted for a probe that is left out does not depend on what the compiler says of it."""
    hardware, samples = v5e
    before = fit_tpu(hardware, samples).held_out
    for victim in (samples[3], next(s for s in samples if s.kind == CHAIN), samples[-1]):
        changed = [replace(s, seconds=3 * s.seconds) if s is victim else s for s in samples]
        after = fit_tpu(hardware, changed).held_out
        assert 3 * (1 + after[victim.name]) == pytest.approx(1 + before[victim.name])
    assert set(before) == {s.name for s in samples}


def test_residuals(made, tmp_path) -> None:
    machine = write_profile(made.content, tmp_path / "profile.json")
    found = residuals(machine)
    assert len(found) == len(tpu_probes())
    assert sum(r.held_out for r in found) == sum(p.kind == CHECK for p in tpu_probes())
    row = found[0]
    assert (row.what, row.size) == ("product", 2 * 128**3)
    first = made.compiled.seconds[tpu_probes()[0].name]
    assert row.measured_seconds == first
    assert row.predicted_seconds / row.measured_seconds - 1 == pytest.approx(
        made.fit.fitted[tpu_probes()[0].name]
    )


TEXT = """ENTRY %main (a: bf16[2]) -> bf16[2] {
  ROOT %f = bf16[2]{0} fusion(%a), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"1234"}
}
"""


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that answers at once; `asked` holds what it was asked for."""
    asked = []

    def compile_for(program, topology):
        asked.append((program.mesh.devices, topology))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return Executable(TEXT, 0, 0, 0.0)

    monkeypatch.setattr(tpu_compiled, "compile_for", compile_for)
    monkeypatch.setattr(tpu_compiled, "SHIPPED", tmp_path / "probes.json")
    return SimpleNamespace(asked=asked, shipped=tmp_path / "probes.json")


def test_compiling_goes_on_where_it_stopped(compiler, tmp_path) -> None:
    probes, partial, told = tpu_probes()[:4], tmp_path / "partial.json", []
    with pytest.raises(KeyboardInterrupt):
        compile_probes("tpu-v3", probes, resume=partial)
    found = compile_probes("tpu-v3", probes, lambda *said: told.append(said), resume=partial)
    assert compiler.asked == [(8, "v3:2x2")] * 5
    assert told == [(p.name, i, 4) for i, p in enumerate(probes)]
    assert not partial.exists()
    assert found.cycles == {p.name: 1234 for p in probes}
    clock = GENERATIONS["v3"].clock(load_hardware("tpu-v3"))
    assert found.seconds[probes[0].name] == pytest.approx(1234 / clock)
    assert ship(found) == compiler.shipped
    again = shipped_probes("tpu-v3")
    assert again.cycles == found.cycles and again.versions == found.versions
    assert json.loads(compiler.shipped.read_text(encoding="utf-8"))["format"] == FORMAT
    with pytest.raises(
        UserError, match=r"shipped results for tpu-v3 have no result for 40 probes, e.g. .*--refresh"
    ):
        calibrate_tpu("tpu-v3")


def test_a_refused_probe_is_told(monkeypatch) -> None:
    monkeypatch.setattr(tpu_compiled, "compile_for", lambda *_: CompilerRefusal("no room", True))
    with pytest.raises(UserError, match="the TPU compiler rejected the probe 'product 128x128x128': no room"):
        compile_probes("tpu-v5e", tpu_probes()[:1])


def test_without_the_extra(monkeypatch, tmp_path) -> None:
    """What ships needs no compiler; anything else says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert calibrate_tpu("tpu-v5e").shipped
    why = "needs jax, which is not installed; run: pip install 'layoutopt"
    with pytest.raises(UserError, match=why):
        calibrate_tpu("tpu-v5e", refresh=True)
    monkeypatch.setattr(tpu_compiled, "SHIPPED", tmp_path / "none.json")
    with pytest.raises(UserError, match=why):
        calibrate_tpu("tpu-v5e")


def test_an_unknown_target() -> None:
    with pytest.raises(UserError, match="--target 'tpu-v5' is not a known TPU; did you mean 'tpu-v5p'"):
        calibrate_tpu("tpu-v5")


def test_a_file_that_cannot_be_written(monkeypatch, tmp_path) -> None:
    found = shipped_probes("tpu-v5e")
    monkeypatch.setattr(tpu_compiled, "SHIPPED", tmp_path / "no" / "where" / "probes.json")
    with pytest.raises(UserError, match="cannot be written: there is no folder"):
        ship(found)
