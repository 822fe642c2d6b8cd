"""The report of a sizing: its figures say every candidate, the page is whole, texts of users stay texts."""

from __future__ import annotations

from typing import Any

import pytest

import reports
from layoutopt.cli import size_tables
from layoutopt.plan.size_results import SizeResult
from reports.figures import size as figures
from reports.tables import sizes


def candidate(parameters: int, devices: int, **more: Any) -> dict[str, Any]:
    days = 100.0 / devices
    return {
        "hparams": {"layers": parameters // 10**8},
        "parameters": parameters,
        "tokens": 2e10,
        "loss": 2.4 + 1e8 / parameters,
        "flops": 6 * parameters * 2e10,
        "hardware": "tpu-v5p",
        "devices": devices,
        "mesh": {"data": devices},
        "layout": {"batch": ["data"]},
        "step_seconds": 0.5,
        "mfu": 0.5,
        "days": days,
        "chip_hours": 24 * days * devices,
        "money": None,
        "status": "OPTIMAL",
        **more,
    }


@pytest.fixture
def found() -> SizeResult:
    best = candidate(10**9, 64, beyond=["1 B parameters are more than in its runs (1 M)"])
    return SizeResult.model_validate(
        {
            "model": "<b>lm</b>",
            "question": {"budget": 1.2e20, "devices": [64, 32]},
            "law": {
                "name": "own",
                "counts": "total",
                "constants": {"E": 1.5, "alpha": 0.3},
                "intervals": {"E": [1.4, 1.6]},
                "runs": [[1e6, 1e8, 4.0]],
                "source": "runs.csv",
            },
            "best": best,
            "candidates": [best, candidate(10**9, 32), candidate(5 * 10**8, 64)],
            "unfit": [{"parameters": 10**10, "hardware": "tpu-v5p", "devices": 64, "reason": "too large"}],
            "flat": {"within": "0.01 nats per token", "low": 5 * 10**8, "high": 10**9},
            "sweeps": [{"hardware": "tpu-v5p", "fits_from": 32, "pays_to": 32, "searched_to": 64}],
            "least": [[1e19, 3.0], [1e20, 2.5]],
            "courses": [{"parameters": 10**9, "points": [[1e19, 3.2], [1.2e20, 2.5]]}],
        }
    )


def test_the_page_answers_and_hides_nothing(found: SizeResult) -> None:
    page = reports.size_html(found, written="")
    for words in (
        "1 B",
        "Beyond the runs",
        "64 × tpu-v5p",
        "1.4 to 1.6",
        "too large",
        "above 32 devices a token costs",
    ):
        assert words.replace(" ", "\u00a0") in page or words in page, words
    assert "<b>lm" not in page and "&lt;b&gt;lm" in page
    assert page.count("<svg") == 2 and "http" not in page.split("</style>")[1]


def test_figures_say_every_candidate_in_words(found: SizeResult) -> None:
    told = sizes.candidates(found).in_words()
    assert told.count("tokens") == 3 and "loss 2.6000" in told and told.count("tpu-v5p") == 3
    assert "500 M to 1 B parameters are within 0.01 nats" in figures.find_loss_compute(found)
    assert figures.find_time_money(found).startswith("64 devices of tpu-v5p: 37 h 30 min")


def test_a_drawing_has_a_dot_for_each_candidate_and_run(found: SizeResult) -> None:
    figure = figures.loss_compute(found)
    dots = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    assert sorted(len(line.get_xdata()) for line in dots) == [1, 1, 3]
    money = figures.time_money(found).axes[1]
    assert [len(line.get_xdata()) for line in money.lines if line.get_marker() == "o"] == [2, 1]


def test_time_is_in_the_unit_that_its_numbers_are_of(found: SizeResult) -> None:
    short = [candidate(10**9, n, days=0.04 / n) for n in (1, 2)]
    data = found.model_dump() | {"candidates": short, "best": short[1]}
    figure = figures.time_money(SizeResult.model_validate(data))
    ax = figure.axes[1]
    assert "minutes" in [text.get_text() for text in figure.axes[0].texts]
    assert [0.04 * 1440, 0.02 * 1440] in [[*line.get_xdata()] for line in ax.lines]


def test_a_long_table_says_what_it_leaves_out_and_keeps_the_frontier(found: SizeResult) -> None:
    many = [candidate((i + 1) * 10**8, 64, frontier=i >= 55) for i in range(60)]
    data = found.model_dump() | {"candidates": many, "best": many[58]}
    shown = size_tables._rows(SizeResult.model_validate(data))
    assert len(shown.rows) == size_tables.MOST == 40
    assert shown.title.startswith("Candidates, 40 of 60, those on the Pareto frontier first")
    assert [row[0] for row in shown.rows[-5:]] == [(i + 1) * 10**8 for i in range(55, 60)]
    assert "costs over 25% more than the least" in found.sweeps[0].in_words()
