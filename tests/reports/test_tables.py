"""Tables hold the plan's own numbers, in seconds and bytes, and survive CSV."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pandas as pd
import pytest

import reports
from reports import tables
from reports.files import csv_text
from reports.tables import rows
from tests.reports import sample


def test_summary_has_every_fact() -> None:
    facts = tables.summary(sample.full_plan()).set_index("fact")["value"]
    assert facts["step_seconds"] == pytest.approx(0.412)
    assert facts["layout"] == "batch:data;vocab:model;heads:model;d_ff:model"
    assert facts["communication_bytes_per_device.model"] == 4.27e9
    assert facts["solver_status"] == "OPTIMAL"


def test_layouts_have_prices_where_there_are() -> None:
    frame = tables.layouts(sample.full_plan())
    assert frame["name"].iloc[0] == "answer" and len(frame) == 6
    assert frame["others"].iloc[0] == "Mesh-TensorFlow paper"  # the answer under another name
    assert frame["step_seconds"].notna().sum() == 5
    assert not frame.loc[frame["name"] == "data parallel", "feasible"].item()


def test_variables_and_operations() -> None:
    variables = tables.variables(sample.full_plan()).set_index("name")
    assert variables.loc["embedding", "piece"] == "1024×1024"
    assert variables["local_bytes"].sum() < variables["bytes"].sum() / 30
    operations = tables.operations(sample.full_plan())
    assert operations["step_seconds"].is_monotonic_decreasing
    collectives = tables.collectives(sample.full_plan())
    assert collectives["exposed_seconds"].sum() == pytest.approx(operations["exposed_seconds"].sum())


def test_errors_are_signed() -> None:
    frame = tables.validation(sample.full_plan())
    expected = frame["predicted_seconds"] / frame["measured_seconds"] - 1
    assert frame["relative_error"].to_list() == pytest.approx(expected.to_list())
    assert tables.calibration(sample.full_plan())["residual"].abs().max() < 0.13


@pytest.mark.parametrize("build", tables.ALL, ids=lambda b: b.__name__)
def test_every_table_of_any_plan(build: object) -> None:
    for plan in (sample.plain_plan(), sample.full_plan(), sample.hostile_plan()):
        frame = build(plan)  # type: ignore[operator]
        assert len(frame.columns) == len(set(frame.columns)) > 1


def test_csv_files_give_the_frames_back(tmp_path: Path) -> None:
    written = reports.write_tables(sample.full_plan(), tmp_path)
    assert {p.stem for p in written} == {b.__name__ for b in tables.ALL}
    frame = pd.read_csv(tmp_path / "memory_timeline.csv")
    pd.testing.assert_frame_equal(frame, tables.memory_timeline(sample.full_plan()), check_dtype=False)


def test_empty_tables_are_no_files(tmp_path: Path) -> None:
    names = {p.stem for p in reports.write_tables(sample.plain_plan(), tmp_path)}
    assert names == {"summary", "layouts", "dims"}


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    """Names come from models of others, and spreadsheets compute what begins so; numbers stay numbers."""
    plan, names = sample.full_plan(), ("=1+1", "+x", "-x", "@x", "-1.5")
    rows = plan["details"]["variables"]
    for name, row in zip(names, itertools.cycle(rows[:1]), strict=False):
        rows.append({**row, "name": name})
    reports.write_tables(plan, tmp_path)
    for path in tmp_path.iterdir():
        with path.open(newline="", encoding="utf-8") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        for cell in cells:
            if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
                float(cell)  # ValueError for what is not a number
        if path.stem == "variables":
            assert {"'=1+1", "'+x", "'-x", "'@x", "-1.5"} <= {*cells}
    text = csv_text(pd.DataFrame({"=a": [-1.5, 2], "b": ["+3", None], "c": ["\tx", "x"]}))
    assert text == "'=a,b,c\n-1.5,+3,'\tx\n2.0,,x\n"


def test_slots_of_stages_are_the_lines_that_explain_shows() -> None:
    plan = reports.plan_of(sample.full_plan())
    shown = [cell.text for _, cell in rows.slots(plan).rows]
    assert shown == list(plan.details.slots) and all(line in reports.report_html([plan]) for line in shown)
