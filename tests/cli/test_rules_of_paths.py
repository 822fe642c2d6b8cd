"""A plan with rules of single scopes, and what reads it: cost, train, explain, export, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layoutopt.plan.schema import read_plan_file

MODEL = '''
import mesh_tf_core as mtf
import numpy as np


def model(width=8192):
    """Many rows through a narrow product, then few through a wide one."""
    g = mtf.Graph("head")
    batch, rows, wide = mtf.Dim("batch", 64), mtf.Dim("rows", 511), mtf.Dim("wide", width)
    d, out = mtf.Dim("d", 256), mtf.Dim("out", 256)
    x = g.input("x", [batch, rows, d], "float32")
    with g.scope("narrow"):
        y = mtf.einsum([x, g.variable("w", [d, out], mtf.Normal(0.1))], [batch, rows, out])
        x = mtf.reduce_mean(mtf.tanh(y), rows)
    with g.scope("wide"):
        up = g.variable("up", [out, wide], mtf.Normal(0.1))
        down = g.variable("down", [wide, d], mtf.Normal(0.1))
        y = mtf.einsum([mtf.tanh(mtf.einsum([x, up], [batch, wide])), down], [batch, d])
    return mtf.Model(mtf.reduce_mean(mtf.square(y)), mtf.SGD(0.1), name="head")


def data(**_):
    while True:
        yield {"x": np.ones((64, 511, 256), np.float32)}
'''
RULES = {"narrow": {"batch": ["all"], "out": []}, "wide": {"out": [], "wide": ["all"]}}
ASKED = ("--mesh", "all:4", "--hardware", "a100", "--storage", "layout", "--recompute", "never")


@pytest.fixture
def made(run: Callable[..., Any], tmp_path: Path) -> Path:
    """The plan's file."""
    (tmp_path / "head.py").write_text(MODEL, encoding="utf-8")
    plan = tmp_path / "plan.json"
    one = ("--microbatches", "1", "--out", str(plan))
    done = run("search", str(tmp_path / "head.py"), *ASKED, *one)
    assert done.exit_code == 0, done.stderr
    written = {**json.loads(plan.read_text()), "layout": {"out": ["all"]}, "refined": RULES}
    plan.write_text(json.dumps(written), encoding="utf-8")
    return plan


@pytest.mark.nightly
def test_a_refined_plan_end_to_end(
    made: Path, run: Callable[..., Any], result: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    plan, model = read_plan_file(made), str(made.parent / "head.py")
    given = ("--layout", str(made))
    cost = result("cost", model, *given, "--hardware", "a100")
    assert cost["refined"] == plan.refined == RULES
    text = ";".join(
        [
            "out:all",
            *(f"{d}@{p}:{'+'.join(a) or 'none'}" for p, r in plan.refined.items() for d, a in r.items()),
        ]
    )
    typed = result("cost", model, "--mesh", "all:4", "--layout", text, "--hardware", "a100")
    assert typed["predicted"] == cost["predicted"] and typed["refined"] == cost["refined"]
    trained = run("train", model, *given, "--steps", "2")
    assert trained.exit_code == 0, trained.stderr
    explained = run("explain", str(made), "--model", model)
    assert explained.exit_code == 0, explained.stderr
    assert "in the same way everywhere" in refused("export", str(made), "--to", "haliax", "--model", model)
    exported = result("export", str(made), "--to", "jax", "--model", model)
    assert "'wide/up': P(None, 'all')" in exported["text"] and exported["not_said"]["refined"] == plan.refined
    assert result("lower", model, *given)["refined"] == plan.refined
    shown = run("report", str(made), "--out", str(made.parent / "page.html"))
    assert shown.exit_code == 0, shown.stderr
