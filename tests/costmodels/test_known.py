"""What is told of errors is what the stored results say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.known import known
from costmodels.hardware import hardware_names, load_hardware
from costmodels.hardware.known import FILE, known_errors
from layoutopt.plan.known import LEAST_MARGIN, Known
from layoutopt.plan.machine_details import errors_known


def test_the_file_is_of_the_stored_results() -> None:
    """`python -m benchmarks.known` writes it anew."""
    assert json.loads(FILE.read_text(encoding="utf-8")) == known()


def test_every_entry_is_of_a_preset_and_reads() -> None:
    found = json.loads(FILE.read_text(encoding="utf-8"))["hardware"]
    assert set(found) <= set(hardware_names())
    for name, said in found.items():
        assert known_errors(load_hardware(name)) == said
        assert Known.model_validate(said).words


def test_other_numbers_and_calibrated_machines_have_none() -> None:
    assert known_errors(load_hardware("tpu-v4"))
    assert known_errors(load_hardware("a100-eager, node_egress=100GB/s")) == {}
    assert known_errors(replace(load_hardware("tpu-v4"), calibrated=True)) == {}


def test_words() -> None:
    said = {
        "steps": {"rows": 11, "fitted": 8, "mean": 0.08, "worst": 0.19},
        "compiler": {"rows": 1, "compute": 0.15, "memory": 0.17},
    }
    words = Known.model_validate(said).words.replace(" ", " ")
    assert words == (
        "11 published steps on this hardware: mean error 8.0 %, worst 19 %, 8 of them used in the "
        "fit; against the compiler's estimates, 1 program: median error 15 % in compute time, 17 % in memory"
    )


def test_what_nearly_fills_the_memory_may_not_fit() -> None:
    known = Known.model_validate({"compiler": {"rows": 14, "compute": 0.15, "memory": 0.034}})
    assert known.barely(989, 1000).startswith(
        "1.1 % of the memory is free, but a step may need 5.0 % more than predicted"
    )
    assert known.barely(989, 1000).endswith("; check with the compiler: `layoutopt verify`")
    assert [known.barely(peak, 1000) for peak in (940, 1001)] == ["", ""]
    assert "verify" not in Known().barely(1000, 1000) != ""


@pytest.mark.parametrize("name", hardware_names())
def test_every_hardware_has_a_doubt_with_its_source(name: str) -> None:
    """Above 95 %, or above the limit less the doubt, nothing is a plain yes, compiler or not."""
    machine = load_hardware(name)
    doubt, known = machine.chip.memory_doubt, errors_known(machine)
    assert doubt is not None and doubt.source and known.margin >= max(doubt.value, LEAST_MARGIN)
    limit = machine.usable_memory_bytes
    edge = limit * (1 - known.margin)
    peaks = (edge * 0.999, edge * 1.001, 0.951 * limit, limit, limit * 1.001)
    said = [known.fits(peak, limit) for peak in peaks]
    assert said == ["yes", "barely", "barely", "barely", "no"]


def test_a_file_without_a_doubt_has_the_least() -> None:
    machine = load_hardware("h100")
    bare = replace(machine, chip=replace(machine.chip, memory_doubt=None))
    assert errors_known(bare).margin == LEAST_MARGIN < errors_known(machine).margin == 0.059
    assert errors_known(load_hardware("h100, memory_doubt=0.2")).margin == 0.2
