"""Peak memory, counted by the engines from the values that they hold, against the program's own figure."""

from __future__ import annotations

import itertools

import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from examples import mlp, resnet, transformer_lm
from layoutopt.space.parallelism import looped
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.meter import Meter
from mesh_tf_core.engines.tf.local import TfLocalEngine
from tests.engines.programs import network, numbers, tokens
from tests.layoutopt.models import branching, nested
from tests.marks import by_day

SIZES = {"layers": 2, "d_model": 16, "d_kv": 4, "heads": 4, "d_ff": 32, "vocab": 24, "batch": 8, "length": 4}
MESH = "a:2;b:2"
MODELS = {
    "mlp": (
        lambda: mlp.model(batch=8, hidden=16),
        ["", "batch:a", "batch:a;hidden:b", "batch:a+b", "hidden:a"],
    ),
    "loop": (network, ["", "batch:a", "batch:a;hidden:b", "features:a;batch:b"]),
    "adam": (
        lambda: transformer_lm.model(**SIZES, dropout=0.1),
        ["", "batch:a", "batch:a;heads:b;d_ff:b;vocab:b", "d_model:a", "length:a;batch:b"],
    ),
    "adafactor": (
        lambda: transformer_lm.model(**SIZES, optimizer="adafactor", gated=True, tied=True),
        ["batch:a;vocab:b", "heads:b;d_ff:b", "d_model:a+b"],
    ),
    # A loop begins from what the loop around it carries, or that this reads later.
    "loops in loops": (lambda: nested(False), ["", "batch:a", "hidden:b", "batch:a;d:b"]),
    "branching": (branching, ["", "batch:a", "f:a+b", "batch:a;d:b"]),
    # Its loops begin from what lies in memory under another name.
    "renamed": (
        lambda: resnet.model(batch=8, size=16, channels=8, stages=2, groups=4),
        ["", "batch:a", "batch:a;height:b"],
    ),
}


def options(model):
    wide = [v.name for v in model.graph.variables.values() if v.trainable and len(v.shape) > 1]
    loops = looped(model.graph)
    yield mtf.Options()
    yield mtf.Options(storage=dict.fromkeys(wide, 1), microbatches=2)
    yield mtf.Options(storage=dict.fromkeys(wide, 3), recompute=loops)


def programs(name):
    made, layouts = MODELS[name]
    model = made()
    for layout, chosen in itertools.product(layouts, options(model)):
        yield model.lower(mtf.Mesh(MESH), mtf.Layout(layout), chosen)


def batch(program):
    integers = {n for n, id in program.feeds.items() if program.values[id].dtype == "int32"}
    found, real = tokens(program, beyond=10), numbers(program)  # classes, or tokens
    return {n: found[n] if n in integers else real[n] for n in found}


@pytest.mark.parametrize("name", by_day(MODELS, every=3))
@pytest.mark.one_in(3)
def test_lockstep_holds_what_the_program_says(name: str) -> None:
    peaks = set()
    for program in programs(name):
        engine = open_engine(program, "lockstep")
        assert engine.peak_memory_bytes is None
        engine.step(batch(program))
        assert engine.peak_memory_bytes == memory(program).peak, program.layout
        peaks.add(engine.peak_memory_bytes)
    assert len(peaks) > 3


@pytest.mark.parametrize(("name", "which"), [("mlp", 7), ("loop", 0), ("loop", 4), ("loop", 8)])
@pytest.mark.one_in(4)
def test_tensorflow_holds_what_the_program_says(name: str, which: int, devices) -> None:
    program = next(itertools.islice(programs(name), which, None))
    engine = TfLocalEngine(program, devices[:4])
    assert engine.peak_memory_bytes is None
    engine.step(batch(program))
    assert engine.peak_memory_bytes == memory(program).peak
    engine.close()


@pytest.mark.parametrize("layout", ["", "batch:a"])
def test_gradients_of_microbatches_are_held_once(layout: str) -> None:
    """Large weights, few examples: a step in two microbatches holds the weights, one sum of their gradients,
    and a layer's term of it."""
    n, layers = mtf.Dim("n", 256), mtf.Dim("layers", 16)
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 4), n], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [n, mtf.Dim("out", 256)], mtf.Constant(0.01))
        return h + mtf.rename(mtf.einsum([h, w], [h.shape.dims[0], mtf.Dim("out", 256)]), out="n")

    model = mtf.Model(mtf.reduce_mean(mtf.square(mtf.scan(layer, x, layers))), mtf.SGD(0.1))
    program = model.lower(mtf.Mesh("a:2"), mtf.Layout(layout), mtf.Options(microbatches=2))
    weights = layers.size * n.size * 256 * 4
    engine = open_engine(program, "lockstep")
    engine.step(batch(program))
    assert engine.peak_memory_bytes == memory(program).peak
    assert 2 * weights < memory(program).peak < (2 + 3 / layers.size) * weights


def test_the_count_follows_what_is_held() -> None:
    """By hand: 8 floats of x; y = exp(x) takes their place only if x is not read again."""
    for again, expected in ((False, 32), (True, 64)):
        g = mtf.Graph()
        x = g.input("x", [mtf.Dim("n", 8)], "float32")
        y = mtf.exp(x)
        total = mtf.reduce_sum(y * x if again else y)
        program = mtf.lower(g, mtf.Mesh("a:1"), mtf.Layout(""), {"total": total})
        engine = open_engine(program, "lockstep")
        engine.step({"x": [0.0] * 8})
        assert engine.peak_memory_bytes == expected + (4 if not again else 0)


def test_a_result_of_another_size_than_declared_is_noticed() -> None:
    program = next(programs("adam"))
    meter = Meter(program, 0)
    (loop, *_) = (i for i in program.code if i.name == "loop")
    meter.entered(loop, lambda i: program.local(i).bytes)
    with pytest.raises(ValueError, match=r"a loop's result has 1 bytes, but \d+ bytes were reserved"):
        meter.left(loop, lambda i: 1)


def _looped(renamed: bool) -> mtf.Program:
    """The gradient of a loop's end, which a reshape takes; or the end beside what the loop began with."""
    g, n = mtf.Graph(), mtf.Dim("n", 8)
    x = g.input("x", [n], "float32")
    start = x if renamed else mtf.tanh(x)
    y = mtf.scan(lambda h: mtf.tanh(h * g.variable("w", [n], mtf.Normal(0.3))), start, mtf.Dim("L", 3))
    results = {"y": y, "start": start}
    if renamed:
        (dx,) = mtf.gradients(mtf.reduce_sum(mtf.reshape(y, [n, mtf.Dim("one", 1)])), [x])
        assert dx is not None
        results = {"dx": dx}
    return mtf.lower(g, mtf.Mesh("a:1"), mtf.Layout(), results)


@pytest.mark.parametrize(("renamed", "bytes"), [(True, 352), (False, 256)])
def test_ends_of_loops_are_counted_once(renamed: bool, bytes: int) -> None:
    program = _looped(renamed)
    engine = open_engine(program, "lockstep")
    engine.step(numbers(program))
    assert engine.peak_memory_bytes == memory(program).peak == bytes
