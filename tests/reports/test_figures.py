"""Every figure is drawn, in words too, in the page's colours, whatever names are in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import reports
from mesh_tf_core.errors import UserError
from reports.figures import ALL, Chart
from reports.figures.bars import Bar, Bars, BarSegment
from reports.figures.chart import log_steps
from reports.figures.sheet import WIDTH, FigureSheet, labels, settings
from reports.svg import figure_svg
from reports.theme import LIGHT
from tests.reports import sample

ROOT = Path(__file__).resolve().parents[2]
NAMES = [c.name for c in ALL]


def svg(chart: Chart, plan: dict[str, Any]) -> str:
    found = reports.plan_of(plan)
    return figure_svg(
        chart(found, titled=False), f"x-{chart.name}", chart.title, chart.view(found).in_words()
    )


@pytest.mark.parametrize("make", [sample.full_plan, sample.hostile_plan], ids=["full", "hostile"])
@pytest.mark.parametrize("chart", ALL, ids=NAMES)
@pytest.mark.one_in(3)
def test_figure_as_svg(chart: Chart, make: Any) -> None:
    text = svg(chart, make())
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids)) and all(str(i).startswith(f"x-{chart.name}") for i in ids)
    named = {root.get("aria-labelledby"), root.get("aria-describedby")}
    assert named <= set(ids)
    assert len(root.findtext("desc") or "") > 20
    values = [
        v if k != "href" else f"url({v})" for e in root.iter() for k, v in e.attrib.items() if k != "data-tip"
    ]
    assert set(re.findall(r"url\(#([^)]+)\)", " ".join(values))) <= set(ids)
    styles = " ".join(e.get("style", "") for e in root.iter())
    assert not re.findall(r"#[0-9a-f]{6}\b", styles), "a colour that no theme knows"
    assert "font-family" not in styles and len(text) < 60_000


@pytest.mark.parametrize("chart", ALL, ids=NAMES)
@pytest.mark.one_in(2)
def test_texts_stay_inside(chart: Chart) -> None:
    """By the drawing's own font, the widest that pages use."""
    for plan in (sample.full_plan(), sample.hostile_plan()):
        figure = chart(plan)
        with settings():
            renderer = figure.canvas.get_renderer()
            for text in figure.findobj(lambda a: hasattr(a, "get_text") and a.get_text()):
                box = text.get_window_extent(renderer)
                scale = figure.dpi / 72
                assert box.x0 >= -1 * scale and box.x1 <= (WIDTH + 1) * scale, text.get_text()
                assert box.y0 >= -1 * scale and box.y1 <= figure.bbox.y1 + scale, text.get_text()


@pytest.mark.parametrize("chart", ALL, ids=NAMES)
@pytest.mark.one_in(2)
def test_title_is_the_finding(chart: Chart) -> None:
    plan = reports.plan_of(sample.full_plan())
    texts = " ".join(t.get_text() for t in chart(plan).axes[0].texts)
    assert chart.find(plan).split(";")[0][:30].split()[0] in texts
    assert chart(plan).get_figheight() > chart(plan, titled=False).get_figheight()


@pytest.mark.parametrize("chart", ALL, ids=NAMES)
def test_missing_data_names_what_adds_it(chart: Chart) -> None:
    plan = sample.plain_plan()
    if not chart.missing(reports.plan_of(plan)):
        assert chart(plan).axes
        return
    with pytest.raises(UserError, match=f"no data for the figure '{chart.name}': .*`layoutopt ") as caught:
        chart(plan)
    assert "\n" not in str(caught.value)


def test_some_figures_need_details() -> None:
    plan = reports.plan_of(sample.plain_plan())
    assert {c.name for c in ALL if not c.missing(plan)} == {"mesh", "matrix", "step_time", "memory_by_layout"}


def test_one_point_is_no_frontier() -> None:
    plan = sample.full_plan()
    plan["frontier"] = plan["frontier"][-1:]
    assert "there is no trade-off" in reports.figures.frontier.missing(reports.plan_of(plan))


def widths(figure: Any, token: str) -> list[float]:
    from matplotlib.colors import to_hex
    from matplotlib.patches import PathPatch

    found = [p for p in figure.findobj(PathPatch) if to_hex(p.get_facecolor()) == LIGHT[token]]
    boxes = [p.get_path().get_extents() for p in found]
    return [b.width for b in boxes if b.height > 11]


def test_bars_are_as_long_as_their_numbers() -> None:
    rows = [
        Bar("a", "", (BarSegment(1.0, "compute"), BarSegment(3.0, "exposed"))),
        Bar("b", "", (BarSegment(8.0, "compute"),)),
    ]
    with settings():
        figure = Bars(rows, 8.0).draw().figure
    short, long = widths(figure, "compute")
    (exposed,) = widths(figure, "exposed")
    assert (short + 0.75) * 8 == pytest.approx(long + 0.75)
    assert (exposed + 0.75) * 8 == pytest.approx(3 * (long + 0.75))


def test_longer_bars_are_cut_and_say_so() -> None:
    with settings():
        whole = Bars([Bar("a", "", (BarSegment(8.0, "compute"),))], 8.0).draw().figure
        cut = Bars([Bar("a", "", (BarSegment(80.0, "compute"),))], 8.0).draw().figure
    assert widths(cut, "compute") == pytest.approx(widths(whole, "compute"))
    assert len(cut.axes[0].lines) == len(whole.axes[0].lines) + 2


def test_step_bars_add_up_to_the_step() -> None:
    plan = reports.plan_of(sample.full_plan())
    p = plan.predicted
    parts = (p.compute_seconds - p.hidden_seconds, p.hidden_seconds, p.exposed_communication_seconds)
    assert sum(parts) == pytest.approx(p.step_seconds)


@pytest.mark.parametrize(
    "mesh",
    [{}, {"all": 1}, {"all": 512}, {"a": 2, "b": 3, "c": 4}, {"a": 2, "b": 2, "c": 2, "d": 2, "e": 64}],
)
def test_meshes_of_any_shape(mesh: dict[str, int]) -> None:
    plan = sample.plain_plan() | {"mesh": mesh, "layout": {}, "alternatives": []}
    assert svg(reports.figures.mesh, plan).startswith("<svg")


@pytest.mark.parametrize("field", ["step_seconds", "peak_memory_bytes"])
def test_nothing_but_zeros(field: str) -> None:
    plan = sample.full_plan()
    plan["predicted"] = {k: {} if isinstance(v, dict) else 0 for k, v in plan["predicted"].items()}
    for line in plan["details"]["lines"]:
        line |= {"seconds": 0.0, "exposed_seconds": 0.0}
    plan["details"]["by_kind"] = {}
    for chart in ALL:
        if not chart.missing(reports.plan_of(plan)):
            assert svg(chart, plan)


def test_drawing_leaves_matplotlib_alone() -> None:
    code = (
        "import matplotlib, sys, reports\n"
        "before = dict(matplotlib.rcParams)\n"
        "from tests.reports import sample\n"
        "for chart in reports.figures.ALL: chart(sample.full_plan())\n"
        "assert dict(matplotlib.rcParams) == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


def test_files_in_all_formats_are_the_same_twice(tmp_path: Path) -> None:
    first = reports.write_figures(sample.plain_plan(), tmp_path / "a")
    second = reports.write_figures([sample.plain_plan()], tmp_path / "b")
    names = ("mesh", "matrix", "step_time", "memory_by_layout")
    assert {p.name for p in first} == {f"{n}.{kind}" for n in names for kind in ("svg", "png", "pdf")}
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    assert all(p.read_bytes().startswith(starts[p.suffix[1:]]) for p in first)
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_every_figure_is_a_file(tmp_path: Path) -> None:
    written = reports.write_figures(sample.full_plan(), tmp_path, ("svg",))
    assert [p.stem for p in written] == NAMES


def test_files_of_several_plans_are_lettered(tmp_path: Path) -> None:
    written = reports.write_figures(sample.five_plans()[:2], tmp_path, ("svg",))
    names = {p.name for p in written}
    assert {"a-mesh.svg", "b-mesh.svg", "plans_time.svg", "plans_memory.svg"} <= names


def test_files_refuse_what_they_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown figure format 'gif'; choose one of svg, png, pdf"):
        reports.write_figures(sample.plain_plan(), tmp_path, ("gif",))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"figures and tables .*file.* cannot be written: Not a directory"):
        reports.write_figures(sample.plain_plan(), tmp_path / "file" / "x")


def test_labels_stand_on_nothing_and_what_has_no_place_is_left_out() -> None:
    with settings():
        sheet = FigureSheet(200, "")
        ax = sheet.axes(40, 20, WIDTH - 80, 150)
        ax.set_xlim(0, 100)
        ax.set_ylim(0, 100)
        points = [(50 + i / 10, 50.0) for i in range(40)]
        labels(ax, [(x, y, "1,024", "ink", False) for x, y in points], points)
    drawn = [text for text in ax.texts if text.get_text() == "1,024"]
    assert 1 < len(drawn) < len(points)
    boxes = [text.get_window_extent(sheet.figure.canvas.get_renderer()) for text in drawn]  # type: ignore[attr-defined]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("low", "high"), [(2264.0, 2544.0), (0.93, 0.99), (41.0, 47.0), (3.0e19, 3.4e19)])
def test_a_narrow_range_has_round_ticks_too(low: float, high: float) -> None:
    found = log_steps(low, high)
    assert 2 <= len(found) <= 6 and all(low * 0.999 <= v <= high * 1.001 for v in found)
