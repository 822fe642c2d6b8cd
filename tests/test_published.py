"""Predictions against published runs: each bound is what was reached, so a worse model fails here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmarks.framework_rows import rows as framework_rows
from benchmarks.published import runs, stages
from benchmarks.published_criteria import criteria, most_ranked, quality
from benchmarks.published_gpu import LAUNCHED, MEGATRON_2022, mesh_and_layout, vtrain
from benchmarks.published_layers import layers
from benchmarks.published_megatron import gpt
from benchmarks.published_memory import memory_rows
from benchmarks.published_rows import Priced, Prices, Run, lowered, read
from benchmarks.unseen import priced
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce

PRICES = Prices()
RUNS = tuple(runs())


def rows(table: str, *names: str) -> list[Priced]:
    """Runs of a table that count, or those of some names."""
    own = [r for r in RUNS if table in r.table and (r.name in names or not names)]
    return [Priced.of(r, PRICES) for r in own]


def error(found: Iterable[Priced]) -> float:
    return fmean(abs(p.error) for p in found)


def test_mesh_tensorflow_paper() -> None:
    language, translation = rows("mesh_tf_runs")
    assert -0.18 < language.error < 0 and -0.16 < translation.error < 0


def test_gspmd_within_a_fifth_and_in_order() -> None:
    found = rows("gspmd")
    assert len(found) == 8 and max(abs(p.error) for p in found) < 0.2
    by_time = np.argsort([p.run.seconds for p in found]).tolist()
    assert np.argsort([p.shipped for p in found]).tolist() == by_time


def test_maxtext() -> None:
    found = rows("maxtext")
    assert len(found) == 14 and error(found) < 0.09


def test_gpus_whose_host_launches() -> None:
    (large,) = rows("megatron_recompute")
    assert abs(large.error) < 0.12
    named = (r for r in vtrain() if r.workload == "1024x12, 2 GPUs, batch 16" and r.stages == 1)
    some = [Priced.of(r, PRICES) for r in named]
    assert len(some) > 4 and error(some) < 0.12


def test_stages_that_are_programs_of_their_own() -> None:
    """1F1B of few and of many stages, on one node and on 64."""
    names = (
        "8192x48, 512 GPUs, batch 1536: tensor 8, data 4, micro batch 3, 16 stages",
        "12288x96, 512 GPUs, batch 1536: tensor 4, data 4, micro batch 3, 32 stages",
        "1024x12, 2 GPUs, batch 4: tensor 1, data 1, micro batch 2, 2 stages",
    )
    found = [Priced.of(next(r for r in RUNS if r.name == name), PRICES) for name in names]
    assert error(found) < 0.08


def test_memory_of_megatron() -> None:
    state, none, full = (abs(row["error"]) for row in memory_rows())
    assert state < 0.02 and none < 0.001 and full < 0.01


def test_memory_as_nanotron_holds_it() -> None:
    """Under `torch`: with stages and without, split products or whole; one ran out of memory."""
    named = {row.name.removeprefix("llama-1B "): row for row in framework_rows("nanotron_llama1b_h100")}
    asked = "x16 dp1 tp1 pp16 mb2", "x16 dp1 tp8 pp2 mb8", "x8 dp1 tp8 pp1 mb8", "x16 dp16 tp1 pp1 mb1"
    for name in (*asked, "x8 dp1 tp4 pp2 mb32 OOM"):
        row = named[name]
        found = priced(row)
        if row.ran:
            assert abs(found["predicted_gib"] / found["gib"] - 1) < 0.03, name
        else:
            assert found["fits"] is False


def test_every_row_is_there() -> None:
    """Every row of a table is a run."""
    counts = Counter(r.table for r in RUNS)
    for table in ("mesh_tf_runs.csv", "gspmd_tpuv3.csv", "maxtext_tpu.csv"):
        assert counts[table] == len(read(table))
    plain = Counter(r.table for r in RUNS if r.stages == 1)
    assert plain["published/vtrain_a100_h1024.csv"] == plain["published/vtrain_a100_h2048.csv"] == 360
    assert plain["published/vtrain_a100_multi.csv"] == 28 and sum(r.stages > 1 for r in RUNS) == 201


def test_nothing_is_set_per_row_but_the_network() -> None:
    settings = {s.strip().partition("=")[0] for r in RUNS for s in r.hardware.split(",")[1:]}
    assert settings == {"node_egress"}


def test_axes_of_one_device_are_left_out() -> None:
    found = mesh_and_layout({"data": 1, "model": 4}, "batch:data;heads:model;rows:data+model")
    assert found == ("model:4", "heads:model")


# -- judging --


def made(models: str = "abcd") -> list[Priced]:
    """Runs that take what is predicted."""

    def run(model: str, seconds: float) -> Run:
        nothing: Any = None
        return Run("published/vtrain_a100_h1024.csv", "", model, model, seconds, nothing, "a100", LAUNCHED)

    times = np.random.default_rng(0).uniform(0.1, 1.0, (len(models), 8)).tolist()
    return [Priced(run(m, t), t) for m, own in zip(models, times, strict=True) for t in own]


def test_a_bad_model_is_seen() -> None:
    listed = [replace(p, shipped=1 / p.shipped) for p in made()]
    q = quality(listed)
    assert q.spearman == pytest.approx(-1.0) and q.regret is not None and q.regret > 0.1
    (found,) = (c for c in criteria(listed, [{"error": 0.5}]) if c.name == "vTrain, one node: mean error")
    assert not found.met and found.rows == found.fitted == len(listed) and found.unfitted is None


def test_stages_are_counted_and_their_choices_judged() -> None:
    """The layout that is predicted fastest takes twice as long as the fastest."""
    one, two, other = (
        replace(p, run=replace(p.run, stages=n, seconds=t), shipped=s)
        for p, n, t, s in zip(made("a"), (1, 2, 4), (1.0, 2.0, 3.0), (3.0, 1.0, 3.0), strict=False)
    )
    found = stages([one, two, other])
    assert found["regret"] == {"workloads": 1, "mean": 1.0, "worst": 1.0}
    assert {k: q["mean"] for k, q in found["by_stages"].items()} == {"2": 0.5, "4": 0.0, "all": 0.25}


def test_rows_with_a_part_in_a_fit_are_known() -> None:
    fitted = {r.table for r in RUNS if r.fitted}
    assert {"published/vtrain_a100_h1024.csv", "published/vtrain_a100_multi.csv", "gspmd_tpuv3.csv"} < fitted
    assert "megatron_recompute_a100.csv" not in fitted and "maxtext_tpu.csv" not in fitted
    assert all(r.fitted for r in RUNS if r.stages > 1) and not any(r.fitted for r in RUNS if r.keeps)


def test_rows_of_one_program_bound_every_order() -> None:
    """Two programs, each run twice: no prediction tells runs of one apart."""
    fine = made("a")
    told = [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0), (2.0, 4.0)]
    listed = [
        replace(p, shipped=s, run=replace(p.run, seconds=t)) for p, (s, t) in zip(fine, told, strict=False)
    ]
    assert most_ranked(listed) == pytest.approx(0.8**0.5)
    assert spearmanr(*zip(*told, strict=True)).statistic == pytest.approx(most_ranked(listed))
    apart = [replace(p, shipped=p.run.seconds) for p in listed]
    assert most_ranked(apart) == pytest.approx(1.0)


def test_steps_fall_into_layers() -> None:
    """Steps made of known times of a layer give them back."""
    fine, listed = made()[0], []
    for count, data, micro, parts in itertools.product((12, 16), (1, 2), (1, 2), (2, 4)):
        step = parts * (count * 1e-3 * (2 + micro) + 5e-3) + count * 1e-4 * data + 1e-3
        gpus, batch = 2 * data, parts * micro * data
        name = f"1024x{count}, {gpus} GPUs, batch {batch}: tensor 2, data {data}, micro batch {micro}"
        listed.append(replace(fine, shipped=2 * step, run=replace(fine.run, name=name, seconds=step)))
    found = layers(listed)
    assert found.off < 1e-9
    assert found.published == pytest.approx({(1024, 2, 1): 3.0, (1024, 2, 2): 4.0})
    assert found.predicted == pytest.approx({(1024, 2, 1): 6.0, (1024, 2, 2): 8.0})


def test_megatron_sums_gradients_in_half_precision() -> None:
    """Of 16 bytes a parameter 12 are the optimizer's; microbatches add and send float16."""
    sizes = {"layers": 2, "d_model": 32, "heads": 4, "vocab": 64, "length": 16, "batch": 8}
    program = lowered(gpt, sizes, "data:2", "batch:data", recompute=True, microbatches=2)
    sent = [i for i, _ in program.walk() if isinstance(i, AllReduce) and i.origin.phase == Phase.BACKWARD]
    values = [program.values[x] for instr in sent for x in instr.inputs]
    assert values and {v.dtype for v in values} == {"float16"}
    bytes_of = {"float16": 2, "float32": 4, "int32": 4}
    held = [(v.variable.shape.size, bytes_of[v.variable.dtype]) for v in program.variables.values()]
    trained = sum(size for size, each in held if each == 2)
    assert sum(size * each for size, each in held if size > 1) == 14 * trained


def test_an_odd_vocabulary_is_slow_where_no_compiler_pads() -> None:
    """A product with rows of 50257 halves costs more than one with 50258."""
    odd, even = (
        lowered(
            gpt,
            {"layers": 1, "d_model": 1024, "heads": 8, "vocab": v, "length": 512, "batch": 2},
            "data:1",
            "",
        )
        for v in (50257, 50258)
    )
    run = replace(RUNS[0], hardware="a100", framework=MEGATRON_2022)
    assert PRICES.of(run, odd)[1].step_seconds > 1.2 * PRICES.of(run, even)[1].step_seconds
    run = replace(RUNS[0], hardware="a100")
    assert PRICES.of(run, odd)[1].step_seconds == pytest.approx(
        PRICES.of(run, even)[1].step_seconds, rel=0.01
    )
