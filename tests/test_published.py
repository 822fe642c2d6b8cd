"""Predictions against published runs: each bound is what was reached, so a worse model fails here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmarks.framework_rows import Row
from benchmarks.framework_rows import rows as framework_rows
from benchmarks.published import runs
from benchmarks.published_criteria import criteria, most_ranked, quality
from benchmarks.published_fit import STACKS, Fitter, Priced, constants, has_part
from benchmarks.published_gpu import LAUNCHED, MEGATRON_2022, mesh_and_layout, vtrain
from benchmarks.published_layers import layers
from benchmarks.published_megatron import gpt
from benchmarks.published_memory import memory_rows
from benchmarks.published_pipelines import between_stages
from benchmarks.published_rows import PIPELINED, Prices, Run, lowered, read
from benchmarks.unseen import priced
from costmodels import load_hardware
from mesh_tf_core import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, ReduceScatter

PRICES = Prices()
RUNS = tuple(runs())


def rows(table: str, *names: str) -> list[Priced]:
    """Runs of a table that count, or those of some names."""
    own = [r for r in RUNS if table in r.table and (r.name in names or (not names and not r.unjudged))]
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


def test_layers_that_keep_some_values() -> None:
    """MaxText's policies by name: the mean over its 17 rows is 4.6 %."""
    some = rows(
        "dgxc",
        "maxtext llama2-70b x64 fsdp64 (24.11.1)",
        "maxtext llama3-70b x512 fsdp128 (25.02)",
    )
    assert [p.run.keeps for p in some] == ["q+k+v+o", "q+k+v"] and error(some) < 0.05
    assert not any(has_part(r) for r in RUNS if r.keeps)


def test_rows_are_priced_as_they_ran() -> None:
    """Split inside a node and repeated on the others; gradients added up in float32; kernels of one operation
    each where nothing is compiled."""
    (hybrid,) = rows("dgxc", "paxml gpt-5b x32 (24.11)")
    program = hybrid.run.program()
    assert program.mesh.axes == (("replica", 4), ("data", 8))
    assert program.variables["feed_forward/wi"].splits == ((), (), ("data",))
    (eager,) = rows("torchtitan", "llama2-13b A100 x64 fsdp b2 ac=selective (per op)")
    assert abs(eager.error) < 0.08 and not eager.run.compiled
    assert all(r.compiled for r in RUNS if "compile" in r.name or "torchtitan" not in r.table)
    program = eager.run.program()
    sums = {i.outputs[0] for i, _ in program.walk() if isinstance(i, ReduceScatter)}
    assert sums and {program.values[i].dtype for i in sums} == {"float32"}


def test_gpus_with_few_large_kernels() -> None:
    some = rows(
        "published/",
        "nemo nemotron4-15b x64 tp4 (24.11.1)",
        "pax gpt-175b A100 x256 TE BF16 @28603900",
        "llama2-70b A100 x64 fsdp b2 ac=full",
        "llama3-70b A100 x64 fsdp b1 ac=full",
    )
    assert len(some) == 4 and error(some) < 0.12


def test_context_parallelism_projects_no_key_twice() -> None:
    """Ranks of NeMo's context parallelism exchange keys and values of their own positions; priced with every
    rank projecting all positions, this row was 12.5 % too slow."""
    (run,) = rows("dgxc", "nemo llama3.1-8b x8 cp2 (25.04)")
    assert 0 < run.error < 0.11


def test_gpus_whose_host_launches() -> None:
    (large,) = rows("megatron_recompute")
    assert abs(large.error) < 0.12
    some = [Priced.of(r, PRICES) for r in vtrain() if r.workload == "1024x12, 2 GPUs, batch 16"]
    some = [p for p in some if not p.run.unjudged]
    assert len(some) > 4 and error(some) < 0.12


def test_stages_that_are_programs_of_their_own() -> None:
    """What one program for all stages sends besides is left out: with it the first row was priced 38 % too
    slow, the second 29 %. Where tensors are not split, nothing is sent in parts."""
    names = (
        "8192x48, 512 GPUs, batch 1536: tensor 8, data 4, micro batch 4, 16 stages",
        "12288x96, 512 GPUs, batch 1536: tensor 8, data 2, micro batch 2, 32 stages",
        "1024x12, 2 GPUs, batch 4: tensor 1, data 1, micro batch 2, 2 stages",
    )
    for run in (next(r for r in RUNS if r.name == name) for name in names):
        prices, cost = PRICES.by(run, run.program())
        more = between_stages(prices, cost)
        assert more < 0 and abs((cost.step_seconds + more) / run.seconds - 1) < 0.08
        sums = sum(x.exposed * x.times for x in cost.lines if x.axes == ("pipe",) and x.kind == "all_reduce")
        assert more < -sums if "tensor 8" in run.name else more == -sums


def test_memory_of_megatron() -> None:
    state, none, full = (abs(row["error"]) for row in memory_rows())
    assert state < 0.02 and none < 0.001 and full < 0.01


def layers_of_first_stage(row: Row) -> int:
    """The layers of a model in which every stage has as many as nanotron's first one, whose memory is logged:
    that takes blocks until their cost passes its share; a layer costs its weights, the head its own, the
    embedding nothing (huggingface/nanotron @f1adf520, `build_model` of src/nanotron/models/base.py and
    `get_block_compute_costs` of llama.py)."""
    layers, width, inner, vocab = (int(row.sizes[n]) for n in ("layers", "d_model", "d_ff", "vocab"))
    stages = Mesh(row.mesh).size("pipe") if row.stages else 1
    one = 4 * width * width + 3 * inner * width
    share = (layers * one + vocab * width) / stages
    return min(int(share // one) + 1, layers) * stages if stages > 1 else layers


def test_memory_as_nanotron_holds_it() -> None:
    """Under `torch`: with stages and without, split products or whole; one ran out of memory."""
    named = {row.name.removeprefix("llama-1B "): row for row in framework_rows("nanotron_llama1b_h100")}
    asked = "x16 dp1 tp1 pp16 mb2", "x16 dp1 tp8 pp2 mb8", "x8 dp1 tp8 pp1 mb8", "x16 dp16 tp1 pp1 mb1"
    for name in (*asked, "x8 dp1 tp4 pp2 mb32 OOM"):
        row = named[name]
        found = priced(replace(row, sizes=row.sizes | {"layers": layers_of_first_stage(row)}))
        if row.ran:
            assert abs(found["predicted_gib"] / found["gib"] - 1) < 0.03, name
        else:
            assert found["fits"] is False


def test_every_row_is_there() -> None:
    """Every row of every table is a run; those that cannot be expressed say why."""
    counts = Counter(r.table for r in RUNS)
    for table in ("mesh_tf_runs.csv", "gspmd_tpuv3.csv", "maxtext_tpu.csv", "vtrain_a100_h1024.csv"):
        assert counts[table] == len(read(table))
    judged = Counter(r.table for r in RUNS if not r.unjudged)
    assert judged["vtrain_a100_h1024.csv"] == judged["published/vtrain_a100_h2048.csv"] == 360
    assert judged["published/vtrain_a100_multi.csv"] == 28
    assert all(r.unjudged for r in RUNS if "every other layer" in r.name)
    assert all(r.keeps for r in RUNS if "per op" in r.name)


def test_nothing_is_set_per_row_but_the_network() -> None:
    settings = {s.strip().partition("=")[0] for r in RUNS for s in r.hardware.split(",")[1:]}
    assert settings == {"node_egress"}


def test_axes_of_one_device_are_left_out() -> None:
    found = mesh_and_layout({"data": 1, "model": 4}, "batch:data;heads:model;rows:data+model")
    assert found == ("model:4", "heads:model")


# -- fitting and judging --


def test_a_fit_begins_with_what_ships() -> None:
    """Equation (1) with the preset's constants is the preset's price."""
    for stack, table in zip(STACKS, ("gspmd", "pax", "megatron_recompute"), strict=True):
        own = rows(table)[:1]
        for p in own:
            shipped = constants(p.run.machine)
            values = [shipped.get(name, shipped["gradient"]) for name in stack.names]
            assert Fitter(stack, [p], shipped).predicted(values) == pytest.approx([p.shipped], rel=0.01)


def made(values: tuple[float, ...], models: str = "abcd") -> list[Priced]:
    """Runs that take what equation (1) says with some constants."""
    stack, rng, found = STACKS[2], np.random.default_rng(0), []
    fixed = constants(load_hardware("a100", MEGATRON_2022))
    for model in models:
        for _ in range(8):
            kernels = rng.uniform(1e-6, 1e-4, (20, 6)) * [1, 0.3, 0, 1, 0.01, 1e6]
            run = Run("vtrain_a100_h1024.csv", "", model, model, 1.0, lambda: None, "a100", LAUNCHED)  # type: ignore[arg-type,return-value]
            p = Priced(run, 1.0, 0, 1.0, kernels, rng.uniform(0, 0.05, 3), rng.uniform(0, 1000, 3))
            seconds = float(Fitter(stack, [p], fixed).predicted(values)[0])
            found.append(replace(p, run=replace(run, seconds=seconds), shipped=seconds))
    return found


def test_constants_are_found_again() -> None:
    true = (4e-5, 0.6, 1e-4)
    fitter = Fitter(STACKS[2], made(true), constants(load_hardware("a100", MEGATRON_2022)))
    assert fitter.fit() == pytest.approx(true, rel=0.05)
    low, high = fitter.intervals()
    assert all(low <= np.array(true) * 1.05) and all(np.array(true) * 0.95 <= high)


def test_a_bad_model_is_seen() -> None:
    listed = [replace(p, shipped=1 / p.shipped) for p in made((4e-5, 0.6, 1e-4))]
    q = quality(listed)
    assert q.spearman == pytest.approx(-1.0) and q.regret is not None and q.regret > 0.1
    (found,) = (c for c in criteria(listed, [{"error": 0.5}]) if c.name == "vTrain, one node: mean error")
    assert not found.met and found.rows == found.fitted == len(listed) and found.unfitted is None


def test_a_run_that_is_too_large_is_counted() -> None:
    fine = made((4e-5, 0.6, 1e-4))
    listed = [replace(fine[0], peak=2), *fine[1:]]
    (found,) = (c for c in criteria(listed, [{"error": 0.0}]) if "too large" in c.name)
    assert found.reached == pytest.approx(1 / len(listed)) and not found.met


def test_rows_with_a_part_in_a_fit_are_known() -> None:
    fitted = {r.table for r in RUNS if has_part(r)}
    assert {"vtrain_a100_h1024.csv", "published/vtrain_a100_h2048.csv"} < fitted
    assert "published/torchtitan.csv" not in fitted and "megatron_recompute_a100.csv" not in fitted
    # Looked at when a shipped number was set: no evidence for it.
    assert {"published/vtrain_a100_multi.csv", "published/dgxc_benchmarking_h100.csv"} <= fitted
    assert not any(has_part(r) for r in RUNS if r.unjudged == PIPELINED)


def test_rows_of_one_program_bound_every_order() -> None:
    """Two programs, each run twice: no prediction tells runs of one apart."""
    fine = made((4e-5, 0.6, 1e-4), "a")
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
    fine, listed = made((4e-5, 0.6, 1e-4), "abcd")[0], []
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
