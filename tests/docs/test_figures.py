"""Figures in README and docs that stand in a file of results, or in a preset: they are its figures."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from costmodels.hardware.load import load_hardware
from examples import mlp
from layoutopt.plan.machine_details import errors_known
from layoutopt.plan.units import percent

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SURE = re.compile(r"accuracy +((?:\d+ runs?|no published run) of this kind .*?)\n(?:proof|fits)", re.DOTALL)
HARDWARE = re.compile(r"\nhardware +([\w.-]+)")


@cache
def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def plain(text: str) -> str:
    return " ".join(text.split())


def test_how_sure_is_what_is_known_today() -> None:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for said in SURE.finditer(text):
            name = HARDWARE.findall(text, 0, said.start())[-1]
            framework = re.findall(r"pipeline, ([^) ]+)", plain(said[1]))[0]
            stages = ("layers",) if ", pipeline," in plain(said[1]) else ()
            machine = load_hardware(name, framework)
            known = errors_known(machine, mlp.model(), stages)
            assert plain(said[1]) == plain(known.words), f"{page.name}: {name}"
            found.append(page.name)
    assert {"huggingface.md", "jax_tutorial.md", "tutorial.md"} <= set(found)


def criterion(name: str) -> float:
    (found,) = [c["reached"] for c in results("published")["criteria"] if c["name"] == name]
    return float(found)


def errors(*tables: str, keeps: bool = False) -> list[float]:
    """Of the runs of some tables that are judged."""
    rows = [row for t in tables for row in results("published")["tables"][t]["rows"]]
    judged = [r for r in rows if r["stages"] == 1 and bool(r["keeps"]) == keeps]
    return [r["predicted_seconds"] / r["published_seconds"] - 1 for r in judged]


def of(found: list[float]) -> str:
    sizes = [abs(e) for e in found]
    return f"mean {percent(fmean(sizes))}, worst {percent(max(sizes))}"


def test_numbers_of_runs_are_those_that_were_priced() -> None:
    assert len(errors("maxtext_tpu.csv")) == 9
    counts = {c["name"]: c["rows"] for c in results("published")["criteria"]}
    assert counts["vTrain, one node: mean error"] == 720
