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

from benchmarks.known import KnownRow, known, rows, unseen
from costmodels import Hardware, framework_names, load_framework
from costmodels.hardware import hardware_names, load_hardware
from costmodels.hardware.known import FILE, compared, known_kinds
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
    """By table of the page, and its part in a fit."""
    page, shown = PAGE.read_text(encoding="utf-8"), Counter[tuple[str, bool]]()
    for table, half, count in re.findall(
        r"^\| `(\w+)` \| [\w-]+ \| (judged|fitted) \| (\d+) \|", page, re.MULTILINE
    ):
        shown[table, half == "fitted"] += int(count)
    assert (
        shown == Counter((r.table, r.fitted) for r in unseen() if r.seconds is not None) and len(shown) > 15
    )
    kinds = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]
    assert sum(len(kind["seconds"]) for kind in kinds) == sum(r.seconds is not None for r in every())


@pytest.mark.parametrize("chip", PRESETS)
def test_what_is_shown_is_of_the_rows_of_the_kind(chip: str) -> None:
    """None of which had a part in a fit; where there is none, the answer says so."""
    software = (n for n in framework_names() if load_hardware(chip).kind in load_framework(n).kinds)
    for name, stages, mixture in product(software, (False, True), (False, True)):
        check_shown(load_hardware(chip, name), stages, mixture)


def check_shown(machine: Hardware, stages: bool, mixture: bool) -> None:
    found = errors_known(machine, model(mixture), STAGES[stages])
    kind, same = (stages, mixture, False), {k["framework"] for k in known_kinds(machine)}
    own = [
        row
        for row in every()
        if row.hardware == machine.name and row.framework in same and row.kind[2:] == kind
    ]
    errors = [abs(row.seconds) for row in own if row.seconds is not None]
    if errors:
        assert found.runs is not None and found.runs.rows == len(errors)
        shown = found.runs.mean, found.runs.worst
        assert shown == pytest.approx((fmean(errors), max(errors)), abs=1e-4)
        assert f"{len(errors)} run" in sure(machine, found).replace("\u00a0", " ")
    else:
        assert found.runs is None and "no published run of this kind" in sure(machine, found)
    low = [max(0.0, -row.memory) for row in own if row.memory is not None]
    doubt = machine.chip.memory_doubt
    least = [LEAST_MARGIN, doubt.value if doubt else 0.0, (compared(machine) or {"memory": 0.0})["memory"]]
    assert found.margin == pytest.approx(max([*least, *([fmean(low)] if low else [])]), abs=1e-4)


def test_frameworks_of_equal_numbers_share_their_errors() -> None:
    """A version, the default option of a variant, and one framework like another."""
    for one, other in {
        "torchtitan": "torchtitan@0.3",
        "torch": "torch:attention=cudnn",
        "mesh-tensorflow": "layoutopt",
        "megatron": "megatron:kernels=core",
    }.items():
        assert known_kinds(load_hardware("h100", one)) == known_kinds(load_hardware("h100", other)) != []
    for other in ("torch:kernels=fused", "megatron"):
        assert known_kinds(load_hardware("h100", "torch")) != known_kinds(load_hardware("h100", other))


@pytest.mark.parametrize(
    ("asked", "compared_as"),
    [
        ("torch", ""),
        ("torch:attention=fa2", ""),
        ("torch:attention=masked", " as torch:attention=fa2"),
        ("torch-compile", ""),
        ("torch-compile:attention=masked", " as torch-compile"),
        ("torchtitan@0.3", " as torch-compile"),
    ],
)
def test_an_answer_names_the_runs_where_other_options_were_asked(asked: str, compared_as: str) -> None:
    kind = errors_known(load_hardware("h100", asked), model(False), ()).kind
    assert kind.partition(f"dense, no pipeline, {asked}")[2].split(" and ")[0] == compared_as


def test_every_kind_is_of_a_preset_and_a_framework() -> None:
    kinds = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]
    assert {kind["hardware"] for kind in kinds} <= {*PRESETS}
    for text in {kind["framework"] for kind in kinds}:
        assert load_framework(text).text == text


def test_other_numbers_and_calibrated_machines_have_none() -> None:
    assert known_kinds(load_hardware("tpu-v4")) and compared(load_hardware("tpu-v4"))
    changed = load_hardware("a100-eager, node_egress=100GB/s")
    own = replace(load_hardware("tpu-v4"), calibrated=True)
    for machine in (changed, own):
        assert not known_kinds(machine) and not compared(machine)
    assert "not calibrated" in sure(load_hardware("cpu-local"), Known())


def test_words() -> None:
    said = {
        "kind": "dense, no pipeline, torch",
        "runs": {"rows": 11, "mean": 0.08, "worst": 0.19},
        "compiler": {"rows": 1, "compute": 0.15, "memory": 0.17},
    }
    words = Known.model_validate(said).words.replace(" ", " ")
    assert words == (
        "11 runs of this kind (dense, no pipeline, torch), none used in a fit: mean error 8.0 %, worst 19 %; "
        "against the compiler's estimates, 1 program: median error 15 % in compute time, 17 % in memory"
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
