"""What is told of errors is what the stored results say."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.known import known
from costmodels.hardware import hardware_names, load_hardware
from costmodels.hardware.known import FILE, known_errors
from layoutopt.plan.known import Known


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
    words = Known.model_validate(said).words.replace("\u00a0", " ")
    assert words == (
        "11 published steps on this hardware: 8.0 % off in the mean, 19 % at most, 8 of them part of the "
        "fit; against its compiler, 1 program: compute 15 % and memory 17 % off in the median"
    )


def test_what_nearly_fills_the_memory_may_not_fit() -> None:
    known = Known.model_validate({"compiler": {"rows": 14, "compute": 0.15, "memory": 0.034}})
    assert known.barely(989, 1000).startswith(
        "1.1\u00a0% of the memory is left, less than predictions are off"
    )
    assert [known.barely(peak, 1000) for peak in (960, 1001)] == ["", ""]
    assert Known().barely(1000, 1000) == ""
