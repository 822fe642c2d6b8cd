"""The errors that answers show are those of the stored results, by kind."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.known import KnownRow, known, profile, rows
from costmodels.hardware import hardware_names, load_hardware
from costmodels.hardware.known import FILE, compared, known_kinds
from costmodels.pricing.compilers import COMPILERS
from examples import moe_lm, transformer_lm
from layoutopt.plan.known import LEAST_MARGIN, Known
from layoutopt.plan.machine_details import errors_known, sure
from mesh_tf_core import Model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "accuracy.md"
PRESETS = [name for name in hardware_names() if not name.startswith("cpu-")]
STAGES = {False: (), True: ("layers",)}


@cache
def model(mixture: bool) -> Model:
    sizes = {"layers": 2, "d_model": 8, "d_kv": 2, "heads": 2, "d_ff": 8, "vocab": 8, "batch": 4, "length": 4}
    return moe_lm.model(**sizes, experts=4) if mixture else transformer_lm.model(**sizes)


@cache
def every() -> tuple[KnownRow, ...]:
    return tuple(rows())


def test_the_file_is_of_the_stored_results() -> None:
    """`python -m benchmarks.known` writes it anew."""
    assert json.loads(FILE.read_text(encoding="utf-8")) == known()


def test_every_run_of_the_page_is_in_exactly_one_kind() -> None:
    """By table of the page, and whether it had a part in a fit."""
    page = PAGE.read_text(encoding="utf-8")
    shown = Counter[tuple[str, bool]]()
    for table, count in re.findall(r"^\|[^|]*\| `(\w+)` \| (\d+) \|", page, re.MULTILINE):
        shown[table, False] += int(count)
    for table, part, count in re.findall(
        r"^\| `(\w+)` \| (no|yes)(?: \(selective\))? \| (\d+) \|", page, re.MULTILINE
    ):
        shown[table, part == "yes"] += int(count)
    timed = [row for row in every() if row.seconds is not None]
    found = Counter((row.table, row.fitted) for row in timed if not row.stages or "vtrain" not in row.table)
    assert found.pop(("one_gpu", False)) == 8 and found == shown and len(shown) > 15
    (staged,) = re.findall(r"^\| all \| (\d+) \|", page, re.MULTILINE)
    assert int(staged) == sum(row.stages and "vtrain" in row.table for row in every())
    kinds = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]
    assert sum(len(kind["seconds"]) for kind in kinds) == len(timed)


@pytest.mark.parametrize(("name", "stages", "mixture"), [*product(PRESETS, (False, True), (False, True))])
def test_what_is_shown_is_of_the_rows_of_the_kind(name: str, stages: bool, mixture: bool) -> None:
    """None of which had a part in a fit; where there is none, the answer says so."""
    machine, software = load_hardware(name), profile(name).software
    found = errors_known(machine, model(mixture), STAGES[stages])
    alike = [
        row
        for row in every()
        if (row.hardware, row.priced, row.stages, row.mixture) == (name, software, stages, mixture)
        and not row.fitted
    ]
    own = [row for row in alike if row.software == software]
    errors = [abs(row.seconds) for row in own if row.seconds is not None]
    if errors:
        assert found.runs is not None and found.runs.rows == len(errors)
        shown = found.runs.mean, found.runs.worst
        assert shown == pytest.approx((fmean(errors), max(errors)), abs=1e-4)
        assert f"{len(errors)} run" in sure(machine, found).replace(" ", " ")
    else:
        assert found.runs is None and "no published run of this kind" in sure(machine, found)
    assert {*found.others} == {row.software for row in alike if row.seconds is not None} - {software}
    low = [max(0.0, -row.memory) for row in own if row.memory is not None]
    doubt = machine.chip.memory_doubt
    least = [LEAST_MARGIN, doubt.value if doubt else 0.0, (compared(machine) or {"memory": 0.0})["memory"]]
    assert found.margin == pytest.approx(max([*least, *([fmean(low)] if low else [])]), abs=1e-4)


def test_the_rows_of_h100_are_those_of_the_pages() -> None:
    """Grok's, NeMo's stages, nanotron's, a half of FSDP's and our own."""
    count = Counter(row.table for row in every() if row.hardware == "h100" and row.seconds is not None)
    assert count["dgxc_grok1_h100"] == 18 and count["dgxc_pipelines_h100"] == 55
    assert count["nanotron_llama1b_h100"] == 23 and count["fms_fsdp_llama2"] == count["one_gpu"] == 8
    dense = errors_known(load_hardware("h100"), model(False), ()).runs
    assert dense is not None and dense.worst == pytest.approx(0.65, abs=0.01)


def test_every_kind_is_of_a_preset_and_a_profile() -> None:
    kinds = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]
    software = {profile.software for profile in COMPILERS.values()}
    assert {kind["hardware"] for kind in kinds} <= {*PRESETS}
    assert {kind[name] for kind in kinds for name in ("software", "priced")} <= software


def test_other_numbers_and_calibrated_machines_have_none() -> None:
    assert known_kinds(load_hardware("tpu-v4")) and compared(load_hardware("tpu-v4"))
    changed = load_hardware("a100-eager, node_egress=100GB/s")
    own = replace(load_hardware("tpu-v4"), calibrated=True)
    for machine in (changed, own):
        assert not known_kinds(machine) and not compared(machine)
    assert "not calibrated" in sure(load_hardware("cpu-local"), Known())


def test_words() -> None:
    said = {
        "kind": "dense, no pipeline, compiled kernels",
        "runs": {"rows": 11, "mean": 0.08, "worst": 0.19},
        "others": {"eager kernels": {"rows": 1, "mean": 0.5, "worst": 0.5}},
        "compiler": {"rows": 1, "compute": 0.15, "memory": 0.17},
    }
    words = Known.model_validate(said).words.replace(" ", " ")
    assert words == (
        "11 runs of this kind (dense, no pipeline, compiled kernels), none used in a fit: mean error 8.0 %, "
        "worst 19 %; the same with eager kernels, 1 run: mean error 50 %, worst 50 %; against the compiler's "
        "estimates, 1 program: median error 15 % in compute time, 17 % in memory"
    )


def test_what_nearly_fills_the_memory_may_not_fit() -> None:
    known = Known.model_validate({"compiler": {"rows": 14, "compute": 0.15, "memory": 0.034}})
    assert known.barely(989, 1000).startswith(
        "1.1 % of the memory is free, but a step may need 5.0 % more than predicted"
    )
    assert known.barely(989, 1000).endswith("; check with the compiler: `layoutopt verify`")
    assert [known.barely(peak, 1000) for peak in (940, 1001)] == ["", ""]
    assert "verify" not in Known().barely(1000, 1000) != ""
    measured = errors_known(load_hardware("h100"), model(False), ()).barely(950, 1000).replace(" ", " ")
    assert measured == (
        "5.0 % of the memory is free, but predictions were 14 % below 7 measured peaks of this kind on "
        "average, so the step may not fit"
    )


@pytest.mark.parametrize("name", hardware_names())
def test_every_hardware_has_a_doubt_with_its_source(name: str) -> None:
    """Above 95 %, or above the limit less the doubt, nothing is a plain yes, compiler or not."""
    machine = load_hardware(name)
    doubt, known = machine.chip.memory_doubt, errors_known(machine, model(False), ())
    assert doubt is not None and doubt.source and known.margin >= max(doubt.value, LEAST_MARGIN)
    limit = machine.usable_memory_bytes
    edge = limit * (1 - known.margin)
    peaks = (edge * 0.999, edge * 1.001, 0.951 * limit, limit, limit * 1.001)
    said = [known.fits(peak, limit) for peak in peaks]
    assert said == ["yes", "barely", "barely", "barely", "no"]


def test_a_file_without_a_doubt_has_the_least() -> None:
    machine = load_hardware("h200")
    bare = replace(machine, chip=replace(machine.chip, memory_doubt=None))
    known, unknown = (errors_known(each, model(False), ()) for each in (machine, bare))
    assert unknown.margin == LEAST_MARGIN < known.margin == 0.059
    assert errors_known(load_hardware("h100, memory_doubt=0.2"), model(False), ()).margin == 0.2
