"""The predicted step as slices: they take what the price says, in the program's order, one in the other."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.hidden import hidden, under
from costmodels.pricing.timeline import DEVICE, PHASES, TimeSlice, timeline
from examples.transformer_lm import model
from layoutopt.analysis.perfetto import predicted, written
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core.ir.instructions import GRADIENT, STEP
from mesh_tf_core.ir.phase import Phase

LAYERS, PARTS = 3, 2


@pytest.fixture(scope="module", params=["tpu-v5e", "cpu-local"])
def found(request: pytest.FixtureRequest) -> Evaluation:
    """Layers in a loop, recomputed, in microbatches: loops in a loop; fused and not."""
    net = model(layers=LAYERS, d_model=64, d_ff=128, d_kv=8, heads=4, length=16, batch=8, vocab=32)
    options = mtf.Options(recompute=frozenset({"layers"}), microbatches=PARTS)
    layout = mtf.Layout("batch:data;heads:model;d_ff:model")
    return evaluate(net, mtf.Mesh("data:2;model:2"), layout, load_hardware(request.param), options)


def nested(slices: Sequence[TimeSlice], track: str) -> int:
    """How deep the slices of a track lie in each other; those that contain others come first."""
    ends: list[float] = []
    deepest = 0
    for s in (s for s in slices if s.track == track):
        while ends and ends[-1] <= s.begin:
            ends.pop()
        assert not ends or s.end <= ends[-1]
        ends.append(s.end)
        deepest = max(deepest, len(ends))
    return deepest


def test_it_takes_what_the_step_takes(found: Evaluation) -> None:
    slices, cost = timeline(found.program, found.cost), found.cost
    assert (slices[0].name, slices[0].end) == ("step", pytest.approx(cost.step_seconds))
    work = [s for s in slices if s.track == DEVICE and s.line is not None]
    assert sum(s.end - s.begin for s in work) == pytest.approx(cost.step_seconds)
    sent = [s for s in slices if s.track.startswith("messages over ")]
    assert sum(s.end - s.begin for s in sent) == pytest.approx(cost.communication_seconds)
    phases = [s for s in slices[1:] if s.track == PHASES]
    assert {s.name for s in phases} == {line.origin.phase for line in cost.lines}
    assert sum(s.end - s.begin for s in phases) == pytest.approx(cost.step_seconds)


def test_the_device_waits_where_the_program_does() -> None:
    """Chunks go under products: a message begins before them, and is waited for behind them."""
    net = model(layers=2, d_model=64, d_ff=128, d_kv=8, heads=4, length=16, batch=8, vocab=32)
    options = mtf.Options(collective_matmul=frozenset({"d_ff"}))
    layout = mtf.Layout("batch:data;heads:model;d_ff:model;length@elsewhere:model")
    found = evaluate(net, mtf.Mesh("data:2;model:4"), layout, load_hardware("tpu-v5e"), options)
    slices = timeline(found.program, found.cost)
    runs = under(found.program, found.cost)
    sent = [s for s in slices if s.line is not None and s.track != DEVICE and s.line.purpose == STEP]
    assert sent and all(runs[s.line.value].words.startswith("matmuls in ") for s in sent if s.line)
    waits = [s for s in slices if s.name == "waits for permute" and s.line is not None]
    work = {s.begin for s in slices if s.track == DEVICE and s.line is not None and s.name == "addproduct"}
    late = [w for w in waits if any(s.begin < b < w.begin for s in sent if s.line is w.line for b in work)]
    assert late and sum(s.end - s.begin for s in slices if s.track == DEVICE and s.line) == pytest.approx(
        found.cost.step_seconds
    )


def test_loops_are_drawn_turn_by_turn(found: Evaluation) -> None:
    slices = timeline(found.program, found.cost)
    names = [s.name for s in slices if s.track == DEVICE and s.line is None]
    forward = [f"layers {n}" for n in range(LAYERS)]
    assert "".join(forward + forward[::-1]) in "".join(n for n in names if n.startswith("layers "))
    assert names.count("layers 0") == 2 * PARTS
    assert nested(slices, DEVICE) == 5  # microbatches, one of them, layers, one of them, its work
    for track in {s.track for s in slices} - {DEVICE}:
        assert nested(slices, track) <= 2


def test_where_there_are_too_many_two_stand_for_all(found: Evaluation) -> None:
    few = timeline(found.program, found.cost, most=10)
    assert few[0].end == pytest.approx(found.cost.step_seconds)
    assert sum(s.name == "1 more iterations like those shown" for s in few) == 2 * PARTS
    assert nested(few, DEVICE) == 5


def test_the_file_is_what_viewers_open(found: Evaluation) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "X" and "M"."""
    events = json.loads(written(predicted(found, begin=1.0)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert all((e["pid"], e["tid"]) in threads and e["dur"] >= 0 for e in slices)
    assert min(e["ts"] for e in slices) == 1e6
    step = next(e for e in slices if e["name"] == "step")
    assert step["dur"] == pytest.approx(1e6 * found.cost.step_seconds, abs=2e-3)
    products = [e["args"] for e in slices if e["name"] == "einsum"]
    assert all(args["flops"] > 0 and args["price"] and args["phase"] for args in products) and products


def test_the_last_microbatch_alone_runs_under_sums_of_gradients() -> None:
    """Of what a loop over microbatches adds up, the last iteration makes the last term; of what a loop over
    layers stacks, each iteration makes a part."""
    rooms = {}
    for parts in (1, 4):
        net = model(layers=4, d_model=256, d_ff=512, d_kv=32, heads=8, length=64, batch=16, vocab=64)
        options = mtf.Options(microbatches=parts)
        found = evaluate(net, mtf.Mesh("data:2"), mtf.Layout("batch:data"), load_hardware("tpu-v5e"), options)
        (own,) = (h for h in hidden(found.program, found.cost) if h.purpose == GRADIENT)
        backward = sum(
            x.seconds * x.times
            for x in found.cost.lines
            if not x.is_communication and x.origin.phase == Phase.BACKWARD
        )
        assert "backward" in own.behind and own.hidden > 0
        rooms[parts] = own.room / backward
    assert 0.5 < rooms[1] < 1.5 and rooms[4] < rooms[1] / 2
