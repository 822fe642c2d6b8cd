"""The page: whole, alone, readable by everyone, and honest; hostile names are text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import reports
from layoutopt.plan.schema import PlanFile, PricedAlternative, plan_file
from layoutopt.plan.units import seconds_text
from mesh_tf_core.errors import UserError
from reports import svg
from reports.figures.chart import Chart
from reports.page.answers import parallelism_text, run, speed
from reports.views.facts import proof
from tests.reports import sample

SECTIONS = [
    *("mesh", "split", "pieces", "time", "memory", "frontier"),
    *("sensitivity", "operations", "evidence", "calibration", "assumptions", "record"),
]
VOID = {"meta", "link", "path", "use", "rect", "br", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes and texts; fails on tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] not in ("style", "script"):
            self.texts.append(data.strip())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


PLANS = {
    "plain": lambda: [sample.plain_plan()],
    "full": lambda: [sample.full_plan()],
    "five": sample.five_plans,
    "hostile": lambda: [sample.hostile_plan()],
    "hostile five": lambda: [sample.hostile_plan() for _ in range(5)],
}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: reports.report_html(make(), written="2020-01-01") for name, make in PLANS.items()}


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of words do without figures, whose drawing takes nearly all of a page's time."""
    if not {"pages", "figures"} & set(request.fixturenames):
        monkeypatch.setattr(Chart, "__call__", lambda *_, **__: None)
        monkeypatch.setattr(svg, "_file", lambda _: b'<svg viewBox="0 0 1 1"/>')


@pytest.fixture
def figures() -> None:
    """A test looks at figures."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLANS)
def test_page_is_whole(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    assert [a["id"] for a in page.of("section")] == SECTIONS
    ids = [str(a["id"]) for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for link in page.of("a"):
        assert str(link["href"]).removeprefix("#") in ids
    for figure in page.of("svg"):
        assert figure["role"] == "img"
        assert figure["aria-labelledby"] in ids and figure["aria-describedby"] in ids
    assert len(page.of("h1")) == 1 and page.of("html")[0]["lang"] == "en"
    assert len(page.of("title")) == 1 + len(page.of("svg"))


@pytest.mark.parametrize("name", PLANS)
def test_page_stands_alone(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "img", "base", "form"}
        assert not any(key.startswith("on") for key in attributes), attributes
        for key in ("src", "srcset", "data", "action", "xlink:href"):
            assert key not in attributes
        assert re.match(r"#|data:,$", attributes.get("href") or "#")
        assert not re.search(r"url\((?!#)|expression|@import", attributes.get("style") or "")
    style = pages[name].split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in pages[name]
    (script,) = re.findall(r"<script>(.*?)</script>", pages[name], re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in pages[name]  # no other runs
    assert not re.search(r"https?:|fetch\(|import\(|XMLHttp|eval\(|innerHTML", script)


@pytest.mark.parametrize("name", PLANS)
def test_page_is_small(pages: dict[str, str], name: str) -> None:
    assert len(pages[name].encode()) < 1_500_000


@pytest.mark.parametrize("name", PLANS)
def test_tables_keep_their_meaning(pages: dict[str, str], name: str) -> None:
    """Phones lay tables out as blocks, which takes their meaning away unless it is said again."""
    page = Page(pages[name])
    assert all(a.get("role") == "table" for a in page.of("table"))
    assert len(page.of("caption")) == len(page.of("table"))
    assert all(a.get("role") in {"rowheader", "columnheader"} for a in page.of("th"))
    assert all(a.get("role") == "cell" and a.get("data-label") is not None for a in page.of("td"))


def hero(html: str) -> str:
    return Page(html.split("</header>")[0] + "</header></body></html>").text.replace("\u00a0", " ")


def test_first_screen_answers(pages: dict[str, str]) -> None:
    said = hero(pages["full"])
    for words in (
        "data 16 splits batch",
        "model 32 splits vocab, heads and d_ff",
        "How fast 412 ms",
        "second best: d_model split too, takes 11 % longer",
        "Does it fit Yes 6.12 GiB of 6.96 GiB",
        "How accurate ±10 %",
        "Proven optimal under this cost model, of 1.3e9 layouts on 10 meshes; gap 0%, 2 s",
    ):
        assert words in said, words


def test_first_screen_admits(pages: dict[str, str]) -> None:
    said = hero(pages["plain"])
    assert "peak memory per device; the plan does not record how much memory a device has" in said
    assert "Not measured" in said
    plan = sample.full_plan()
    plan["solver"] |= {"status": "FEASIBLE", "gap": 0.031}
    plan["predicted"]["peak_memory_bytes"] = 9 * sample.GIB
    del plan["details"]["validation"]
    said = hero(reports.report_html([plan]))
    assert "Does it fit No the plan needs 9.00 GiB, but a device has 6.96 GiB" in said
    assert "Not proven: feasible" in said and "another layout saves at most 3.1% of this" in said
    assert "Calibrated" in said and "no whole training step was measured" in said
    assert "Proven optimal under" not in said
    del plan["details"]["calibration"], plan["solver"]
    said = hero(reports.report_html([plan]))
    assert "based on 5 numbers with sources, 2 of them assumptions" in said
    assert "the plan does not record a search" in said


@pytest.mark.parametrize(
    ("gap", "said"), [(0.00014, "0.014%"), (0.031, "3.1%"), (0.875, "87.5%"), (0.996, "99.6%")]
)
def test_a_gap_has_one_number(gap: float, said: str) -> None:
    plan = sample.full_plan()
    plan["solver"] |= {"status": "FEASIBLE", "gap": gap}
    words = str(proof(PlanFile.model_validate(plan), ""))
    assert words.startswith(f"not proven: another layout saves at most {said} of this (status FEASIBLE")
    assert words.count("%") == 1
    plan["solver"] |= {"bound": 0.0, "gap": 1.0}
    assert "%" not in str(proof(PlanFile.model_validate(plan), ""))
    plan["solver"] |= {"likely_bound": 1.0, "likely_gap": 0.031}  # what a note says is said here, too
    assert str(proof(PlanFile.model_validate(plan), "")).startswith(
        "not proven: no lower bound is known, likely 3.1%"
    )


def test_an_operation_names_its_collective_once(pages: dict[str, str]) -> None:
    said = Page(pages["full"]).text.replace("\u00a0", " ")
    assert said.count("all-reduce over model: 2.05 GiB in 8 runs, 48.0 ms, of which 32.0 ms exposed") == 1
    assert "8 runs of" not in said


def test_what_barely_fits_is_told_so() -> None:
    plan = sample.full_plan()
    plan["details"]["hardware"]["known"] = {"compiler": {"rows": 14, "compute": 0.15, "memory": 0.2}}
    html = reports.report_html([plan])
    assert "Does it fit Barely 6.12 GiB of 6.96 GiB (88 %) on the fullest device; 12 % of the memory" in hero(
        html
    )
    assert '<div class="answer warn"><dt>Does it fit</dt>' in html


def test_a_full_memory_is_no_plain_yes_whatever_is_known() -> None:
    """Of a GPU too, for which no compiler was compared: on the first screen, and in the table of layouts."""
    plan = sample.full_plan()
    limit = plan["details"]["hardware"]["memory_bytes"] = 7.0 * sample.GIB
    plan["details"].pop("memory", None)
    plan["predicted"]["peak_memory_bytes"] = int(0.96 * limit)
    html = reports.report_html([plan])
    assert "Does it fit Barely" in hero(html) and "4.0 % of the memory is free" in hero(html)
    assert '<div class="answer warn"><dt>Does it fit</dt>' in html
    plan["predicted"]["peak_memory_bytes"] = int(0.94 * limit)
    assert "Does it fit Yes" in hero(reports.report_html([plan]))
    plan["details"]["hardware"]["known"] = {"memory": {"share": 0.1, "source": "a run"}}
    assert "Does it fit Barely" in hero(reports.report_html([plan]))
    shown = plan_file(plan)
    assert [shown.fit_of(shown_as(shown, peak)) for peak in (0.8, 0.95, 1.1)] == ["yes", "barely", "no"]


def shown_as(plan: PlanFile, share: float) -> PricedAlternative:
    peak = int(share * (plan.memory_limit or 0.0))
    predicted = plan.predicted.model_copy(update={"peak_memory_bytes": peak})
    return PricedAlternative(predicted=predicted, feasible=True)


def test_first_screen_says_what_is_trained_for_how_long_and_for_how_much(pages: dict[str, str]) -> None:
    assert "Data type bfloat16" in hero(pages["plain"]) and "Batch" not in hero(pages["plain"])
    plan = sample.full_plan()
    plan["predicted"] |= {"examples_per_second": 512 / 0.412, "tokens_per_second": 512 * 1024 / 0.412}
    cost = {"tokens": 3e11, "seconds": 1.08e6, "chip_hours": 153600.0, "price": 4.2, "money": 645120.0}
    plan["training"] = cost
    said = hero(reports.report_html([plan]))
    for words in (
        "Batch 512 524,288 tokens per step in 2 microbatches",
        "Length 1,024 tokens per example",
        "How long 12.5 days 300 B tokens take 12.5 days",
        "Cost 645,120 154 k chip-hours at 4.2 each",
    ):
        assert words in said, words
    plan["training"] = {"seconds": 3600.0, "chip_hours": 512.0}
    said = hero(reports.report_html([plan]))
    assert "Cost 512 chip-hours no price given; for one hour of training" in said and "How long" not in said


def test_where_the_host_takes_longer_the_step_is_its_and_the_batch_stays() -> None:
    plan = sample.full_plan()
    step = plan["predicted"]["step_seconds"]
    rates = {"examples_per_second": 64 / (2 * step), "tokens_per_second": 4096 / (2 * step)}
    plan["predicted"] |= {**rates, "host_seconds": 2 * step}
    batch, length, *_ = run(plan_file(plan))
    assert (batch.value, length.value) == ("64", "64") and batch.note.startswith("4,096 tokens per step")
    found = speed(plan_file(plan))
    assert found.value == seconds_text(2 * step)
    assert f"kernels that take {seconds_text(step)}" in found.note


def test_an_axis_has_the_trades_name() -> None:
    assert [
        parallelism_text(form) for form in ("expert", "data (FSDP) + expert", "data (FSDP)", "idle", "")
    ] == [
        "expert parallelism",
        "data (FSDP) + expert parallelism",
        "data parallelism (FSDP)",
        "idle",
        "",
    ]
    plan = sample.full_plan()
    plan["details"]["parallelism"] = {"model": "tensor + expert"}
    assert "(tensor + expert parallelism)" in hero(reports.report_html([plan]))


def test_close_call_is_called_close() -> None:
    plan = sample.full_plan()
    plan["details"]["validation"]["mape"] = 0.2
    assert "the next best layout is closer than this error, so measure both" in hero(
        reports.report_html([plan])
    )


def test_bad_predictions_are_called_bad() -> None:
    plan = sample.full_plan()
    plan["details"]["validation"] |= {"mape": 5.3, "kendall_tau": -0.2, "noise": {"words": "noisy machine"}}
    html = reports.report_html([plan])
    assert "How accurate 530 % off" in hero(html)
    assert '<div class="answer bad"><dt>How accurate</dt>' in html
    assert "rank correlation −0.20" in html and "noisy machine" in html


def test_proof_names_its_rules() -> None:
    plan = sample.full_plan()
    plan["details"]["search"] = {"pins": "batch:data", "forbid": None}
    assert "layouts on 10 meshes, with pinned batch:data; gap" in hero(reports.report_html([plan]))


ROBUST = {"draws": 40, "wins": 33, "worst": 0.059, "runner_up": "greedy", "uncertain": 71}


def test_first_screen_says_how_robust() -> None:
    plan = sample.full_plan()
    plan["details"]["robustness"] = dict(ROBUST)
    html = reports.report_html([plan])
    drawn = "the fastest layout on 33 of 40 hardware variants drawn within the uncertainties"
    words = f"{drawn}, at most 5.9 % slower than the best on the rest (mostly greedy)"
    assert words in hero(html)
    assert '<div class="answer good"><dt>How accurate</dt>' in html
    assert f"This plan is {words}." in Page(html).text.replace("\u00a0", " ")
    plan["details"]["robustness"] |= {"wins": 20}
    assert '<div class="answer warn"><dt>How accurate</dt>' in reports.report_html([plan])
    plan["details"]["robustness"] |= {"wins": 40, "worst": 0.0, "runner_up": ""}
    assert "the fastest layout on all 40 hardware variants" in hero(reports.report_html([plan]))
    plan["details"]["robustness"] |= {"draws": 0, "wins": 0}
    assert "machines" not in hero(reports.report_html([plan]))
    plan["details"]["robustness"] |= {"wins": 41}
    with pytest.raises(UserError, match=r"'details.robustness.wins' has 41 of 0 draws"):
        reports.report_html([plan])


def test_a_proof_may_be_checked_again() -> None:
    plan = sample.full_plan()
    one = {"mesh": "data:2", "microbatches": 1, "how": "bound", "bound": 0.4, "listed": 0, "faster": ""}
    words = "1 problem, ruled out without a solver: 1 by their own bound"
    plan["details"]["proof"] = {"verified": True, "words": words, "problems": [one]}
    html = reports.report_html([plan])
    assert "gap 0%, 2 s; the proof was verified without a solver" in hero(html)
    assert words in Page(html).text
    plan["details"]["proof"] |= {"verified": False, "words": "1 not checked"}
    assert "check of the proof: 1 not checked" in hero(reports.report_html([plan]))
    plan["details"]["proof"] |= {"words": "wrong: x is faster", "problems": [one | {"how": "faster"}]}
    html = reports.report_html([plan])
    assert "Refuted" in hero(html) and '<div class="answer bad"><dt>Proven or not</dt>' in html


def test_what_the_fit_had_not_seen_counts() -> None:
    plan = sample.full_plan()
    del plan["details"]["validation"]
    assert "fitted to 41 measurements, median error" in hero(reports.report_html([plan]))
    new = {"what": "new", "size": 8.0, "measured_seconds": 1.0, "predicted_seconds": 1.25, "held_out": True}
    plan["details"]["calibration"]["measurements"].append(new)
    plan["details"]["calibration"]["notes"] = ["Measured on a quiet machine."]
    html = reports.report_html([plan])
    said = "fitted to 41 measurements; median error 25 %, worst 25 % on held-out operations"
    assert said in hero(html)
    assert "Measured on a quiet machine." in html
    plan["details"]["calibration"]["of"] = "compiler estimate"
    html = reports.report_html([plan])
    assert "fitted to 41 compiler estimates; median error" in hero(html)
    assert "42 compiler estimates; median error" in Page(html).text.replace("\u00a0", " ")


def test_where_the_mesh_lies(figures: None) -> None:
    plan = sample.full_plan()
    plan["details"]["hardware"]["lies"] = {"data": "16 along y (ring)", "model": "2 cores × 16 along x"}
    page = Page(reports.report_html([plan]))
    assert page.text.count("16 along y (ring)") == 3  # the drawing, its description, the table
    assert "model; 2 cores × 16 along x: size 32, dimensions split over it" in page.text


def test_absent_parts_name_their_command(pages: dict[str, str]) -> None:
    page = pages["plain"]
    absent = re.findall(r'<section id="(\w+)" class="absent">(.*?)</section>', page, re.DOTALL)
    assert [name for name, _ in absent] == [
        *("pieces", "frontier", "sensitivity", "operations", "evidence", "calibration", "assumptions")
    ]
    for _, text in absent:
        assert "Not in this plan: " in text and "<code>layoutopt " in text


def test_hostile_names_are_text(pages: dict[str, str]) -> None:
    html = pages["hostile"]
    assert html.count("<script") == 1 and "&lt;script&gt;alert(" in html
    page = Page(html)
    assert any('<script>alert("x")</script>&amp;$\\frac{1}{2}$' in t for t in page.texts)
    assert html.count("{{ 7*7 }}") > 200
    assert "\x00" not in html and "\u202e" not in html


def test_long_lists_are_folded_not_lost(pages: dict[str, str]) -> None:
    page = Page(pages["hostile"])
    assert sum(1 for t in page.texts if t.startswith("<script>") and "n" * 300 in t) >= 200
    assert len(page.of("details")) >= 1


def test_what_is_left_out_names_the_command_that_has_it() -> None:
    """And no file that may not be there."""
    plan = sample.plain_plan()
    plan["layout"] = {f"d{i}": ["data"] for i in range(310)}
    text = Page(reports.report_html([plan])).text
    said = "10 more rows: layoutopt report PLAN.json --tables DIR writes them all as dims.csv."
    assert said in text.replace(" .", ".")


def test_differences_are_marked() -> None:
    plans = [sample.full_plan(), sample.full_plan()]
    assert "differs" not in reports.report_html(plans).split("</style>")[1].replace("what differs from", "")
    plans[1]["layout"]["d_model"] = ["data"]
    plans[1]["predicted"]["step_seconds"] *= 1.05
    html = reports.report_html(plans)
    marked = re.findall(r'class="[^"]*differs[^"]*" data-label="(\w+)"', html)
    assert marked and set(marked) == {"B"}
    said = hero(html)
    assert "Plan A is the fastest that fits: 412 ms per step; plan B takes 5.0 % longer." in said
    assert "differs: 433 ms +5.0 %" in said


def test_plan_that_does_not_fit_is_not_the_fastest() -> None:
    plans = [sample.full_plan(), sample.full_plan()]
    plans[0]["predicted"]["peak_memory_bytes"] = 9 * sample.GIB
    assert "Plan B is the fastest that fits" in hero(reports.report_html(plans))
    plans[1]["predicted"]["peak_memory_bytes"] = 9 * sample.GIB
    assert "No plan fits in memory." in hero(reports.report_html(plans))


def test_different_models_do_not_compare() -> None:
    plans = [sample.full_plan(), sample.full_plan()]
    plans[1]["model"]["fingerprint"] = "other"
    said = hero(reports.report_html(plans))
    assert "The plans are for different models, so their" in said and "fastest" not in said


def test_one_model_with_other_hyperparameters_says_which() -> None:
    plans = [sample.full_plan(), sample.full_plan()]
    plans[1]["model"] |= {"fingerprint": "other", "hparams": {**plans[1]["model"]["hparams"], "batch": 1024}}
    was = plans[0]["model"]["hparams"]["batch"]
    said = f"The plans differ in batch (A {was}, B 1024), so their step times cannot be compared."
    assert said in hero(reports.report_html(plans))
    for plan, rate in zip(plans, (1000.0, 1500.0), strict=True):
        plan["predicted"]["tokens_per_second"] = rate
    assert f"{said} Of the plans that fit, plan B has the highest throughput: 1,500 tokens/s." in hero(
        reports.report_html(plans)
    )


def test_validation_is_added_where_it_is_missing() -> None:
    plan = sample.full_plan()
    del plan["details"]["validation"]
    assert "24 measured layouts" in hero(reports.report_html([plan], sample.validation()))
    noted = sample.validation() | {"notes": ["measured steps take 2.1 times as long as predicted"]}
    assert noted["notes"][0] in reports.report_html([plan], noted)
    with pytest.raises(UserError, match=r"the validation: 'rows\[0\].measured_seconds' is missing"):
        reports.report_html([plan], {"rows": [{"layout": "x", "predicted_seconds": 1.0}]})


def test_same_plan_same_page(pages: dict[str, str]) -> None:
    assert reports.report_html([sample.full_plan()], written="2020-01-01") == pages["full"]
    assert "Written on 2020-01-01" in pages["full"]
    assert "Written on" not in reports.report_html([sample.plain_plan()], written="")


def test_file(figures: None, tmp_path: Path) -> None:
    reports.write_report([sample.plain_plan()], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(UserError, match=r"the report .* cannot be written: it is a folder"):
        reports.write_report([sample.plain_plan()], tmp_path)


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        ([], "requires at least one plan"),
        ([sample.plain_plan()] * 13, "at most 12 plans side by side, but 13 were given"),
        ([sample.plain_plan(), {"format": "x"}], "plan B has format 'x'"),
    ],
)
def test_refused(plans: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        reports.report_html(plans)


def test_notes_of_the_plan_are_shown() -> None:
    plan = sample.plain_plan() | {"notes": ["the tables sum to 1 s and `lower` says 1.1 s"]}
    assert "<code>lower</code> says 1.1 s" in reports.report_html([plan])


def test_what_readers_point_at_open_and_copy(figures: None) -> None:
    plan = sample.full_plan()
    plan["details"]["search"] = {"command": "layoutopt search model.py --devices 512"}
    line = next(x for x in plan["details"]["lines"] if not x.get("communication"))
    line["place"], plan["details"]["sources"] = "model.py:87", {"model.py:87": "y = attend(x)  # `<b>`"}
    html = reports.report_html([plan])
    page = Page(html)
    tips = [str(a["data-tip"]).replace("\u00a0", " ") for _, a in page.elements if "data-tip" in a]
    assert "This plan: 297 ms compute" in tips and "1×: 412 ms" in tips
    assert "model.py:87: y = attend(x) # '<b>'" in page.text.replace("  ", " ")
    said = hero(html)
    assert "Mesh data:16;model:32" in said and "Command layoutopt search model.py --devices 512" in said
    sorted_by = [float(str(a["data-v"])) for a in page.of("td") if "data-v" in a]
    assert plan["predicted"]["step_seconds"] in sorted_by
    (bandwidth, *_) = [a for a in page.of("div") if a.get("class") == "whatif"]
    first, *_ = json.loads(str(bandwidth["data-trials"]))
    assert first.replace("\u00a0", " ").startswith(
        "0.25×: 634 ms per step (+54 %), with layout a: batch:data"
    )


def test_every_bar_of_a_comparison_names_its_hardware(figures: None) -> None:
    plans = [sample.full_plan(), sample.full_plan()]
    plans[1]["hardware"] = "tpu-v3"
    plans[1]["details"]["memory"]["limit"] = 14 * sample.GIB
    page = Page(reports.report_html(plans))
    text = page.text.replace("\u00a0", " ")
    assert text.count("A data 16 × model 32, tpu-v2") >= 2 and text.count("B data 16 × model 32, tpu-v3") >= 2
    assert "6.12 GiB of 6.96 GiB" in text and "6.12 GiB of 14.0 GiB" in text
