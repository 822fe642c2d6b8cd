"""Published runs under their frameworks: stored predictions are today's, constants are those of the fit, and
no table gets worse unnoticed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import layoutopt
from benchmarks import framework_fit, framework_rows, unseen
from benchmarks.framework_fit import (
    FITS,
    base_of,
    family,
    fitter_of,
    halves,
    rows_of,
    sums_of,
)
from benchmarks.framework_rows import Row, rows, tables
from costmodels import framework_names, load_framework, load_hardware
from costmodels.step_fit import StepFit


@cache
def stored() -> Any:
    return json.loads(unseen.OUT.read_text(encoding="utf-8"))


@cache
def every(table: str) -> tuple[Row, ...]:
    return tuple(rows(table))


def quick(table: str) -> Row:
    """The row of a table that is the least to price."""
    timed = [row for row in every(table) if row.seconds and row.ran]
    return min(
        timed or every(table), key=lambda r: (r.stages, len(r.ways), int(r.published["layers"]), r.name)
    )


TABLES = [table for table in tables() if every(table)]


def test_every_row_is_stored_with_its_framework_and_half() -> None:
    half = halves()
    for table in tables():
        found = stored()["tables"][table]["found"]
        assert [(r["name"], r["framework"], r["half"]) for r in found] == [
            (row.name, row.framework, half(row)) for row in every(table)
        ]
        for row in every(table):
            assert load_framework(row.framework).name in framework_names()


@pytest.mark.parametrize("table", TABLES)
def test_a_row_is_predicted_as_stored(table: str) -> None:
    row, at = quick(table), every(table).index(quick(table))
    told, found = stored()["tables"][table]["found"][at], unseen.priced(row)
    assert found["predicted_seconds"] == pytest.approx(told["predicted_seconds"], rel=1e-6), row.name


def test_no_table_gets_worse_unnoticed() -> None:
    """`python -m benchmarks.unseen` lowers the bounds where errors fall; one that rises by more than a tenth
    needs a note there."""
    bounds = json.loads(unseen.BOUNDS.read_text(encoding="utf-8"))
    found = unseen.means(stored()["tables"])
    assert found.keys() == bounds["means"].keys() and len(found) > 25
    risen = {k for k, mean in found.items() if mean > 1.1 * bounds["means"][k]}
    assert risen <= bounds["notes"].keys()


def test_no_model_has_a_part_in_both_halves() -> None:
    half, parts = halves(), dict[tuple[str, str], set[str]]()
    for table in TABLES:
        for row in every(table):
            if base_of(row) in FITS and row.seconds and row.ran:
                parts.setdefault((base_of(row), family(row)), set()).add(half(row))
    assert parts and all(not {"judged", "fitted"} <= found for found in parts.values())


@pytest.mark.parametrize("name", [name for name, fit in FITS.items() if fit.adopted])
def test_constants_that_ship_lie_in_the_intervals_of_the_fit(name: str) -> None:
    found = json.loads(framework_fit.OUT.read_text(encoding="utf-8"))["frameworks"][name]
    assert 0 < len(found["constants"]) == len(FITS[name].constants) <= 6
    for each in found["constants"]:
        low, high = each["interval"]
        for chip in set(each["chips"]) - framework_fit.BOARD.keys():
            values = dict(load_hardware(chip, name).numbers())
            if each["name"] in values:
                assert low * 0.99 <= values[each["name"]].value <= high * 1.01, (chip, each["name"])


@pytest.mark.parametrize("name", FITS)
def test_a_fit_prices_as_the_product_does(name: str) -> None:
    """With the constants that ship it is the price of a row."""
    own = [row for t in TABLES for row in rows_of(name, [quick(t)]) if row.seconds and row.ran][:2]
    for row in own:
        (seconds,) = StepFit([], [sums_of(row)]).predicted([])
        assert seconds == pytest.approx(unseen.priced(row)["predicted_seconds"], rel=1e-9), row.name
    assert own


def test_a_price_of_parts_is_that_of_the_product() -> None:
    row = quick("fms_fsdp_llama2")
    asked = row.model_built(), row.mesh, row.layout, row.hardware
    found = layoutopt.cost(*asked, framework=row.framework, **row.decided).predicted
    told = unseen.priced(row)
    assert told["predicted_seconds"] == pytest.approx(found.step_seconds, rel=1e-9)
    assert told["predicted_gib"] == pytest.approx(found.peak_memory_bytes / 2**30)


def test_constants_are_found_again() -> None:
    """Of steps that are predicted with other constants than those expected."""
    own = [quick(table) for table in ("fms_fsdp_llama2", "torchtitan", "yafsdp_a100")]
    fitter = fitter_of(FITS["torch"].constants, [(row, sums_of(row)) for row in own])
    fitter.seconds = fitter.predicted([c.around + 0.4 * c.width for c in fitter.used])
    found = fitter.predicted(fitter.best())
    assert found == pytest.approx(fitter.seconds, rel=0.02)


def test_words_of_a_row_choose_its_framework() -> None:
    row = {"framework": "AA-Scaling (PyTorch, own)", "attention": "flash: flash_attentionv1.0.8"}
    ours = "gradients=bfloat16,checkpoint=whole"
    assert framework_rows.framework_of(row) == f"torch:attention=fa1,{ours},loss=outputs"
    row |= {"attention": "flash: flash_attention2 + RMS kernel", "tp": "2"}
    assert framework_rows.framework_of(row) == f"torch:kernels=norms,{ours},attention=fa2,loss=gathered"
    for software, name in {
        "torchtitan: PyTorch FSDP2": "torch:attention=fa2",
        "torchtitan: PyTorch FSDP2 + TP, torch.compile, async TP": "torchtitan:tensor_messages=async",
        "Megatron-DeepSpeed (PyTorch)": "megatron:kernels=2022",
        "nanotron": "torch:gradients=buffer,loss=in_place,optimizer=fused,kernels=norms,attention=fa2",
        "InternEvo (PyTorch)": "megatron:optimizer=flat,gradients=bfloat16",
        "NeMo, TransformerEngine (PyTorch)": "megatron",
        "MaxText on XLA:GPU (24.11.1 recipe)": "maxtext",
        "Paxml on XLA:GPU + TransformerEngine": "jax",
    }.items():
        assert framework_rows.framework_of({"framework": software, "attention": "flash"}) == name
