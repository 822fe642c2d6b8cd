"""The local engine gives what the lockstep oracle gives, and counts what the program says."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import mesh_tf_core as mtf
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.tf.local import TfLocalEngine
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.op import Op, Roles
from mesh_tf_core.ir.program import COLLECTIVES, Collective
from mesh_tf_core.ir.schedules import NAMES
from mesh_tf_core.ops.context import FORMS
from tests.core import test_pipelines, test_replicas
from tests.core.test_offload import lowered as offloaded
from tests.engines import number_cases
from tests.engines.programs import every_collective, language_model, numbers, tokens
from tests.marks import by_day

AXES = [("a:2", ("a",)), ("a:1;b:2", ("a",))] + [
    (mesh, axes) for mesh in ("a:2;b:2", "a:2;b:4") for axes in (("a",), ("b",), ("a", "b"), ("b", "a"))
]


def both(program):
    return open_engine(program, "local"), open_engine(program, "lockstep")


def same(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("mesh", "axes"), AXES)
def test_every_collective_equals_lockstep(mesh, axes):
    program = every_collective(mesh, axes)
    assert {i.name for i in program.code if isinstance(i, Collective)} == set(COLLECTIVES)
    local, lockstep = both(program)
    batch = numbers(program)
    same(local.step(batch), lockstep.step(batch))
    assert local.communication_bytes == program.communication_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", by_day(sorted(NAMES), every=len(NAMES)))
def test_a_pipeline_equals_lockstep(schedule: str) -> None:
    program = test_pipelines.example(schedule)
    batch = test_pipelines.batch(program)
    local, lockstep = both(program)
    for _ in range(2):
        same(local.step(batch), lockstep.step(batch))
    for name in program.variables:
        np.testing.assert_allclose(local.read(name), lockstep.read(name), 1e-10, err_msg=name)
    # Branches are taken in some of the turns: a share of each is counted.
    assert local.communication_bytes == pytest.approx(program.communication_bytes(), 1e-12)


@pytest.mark.nightly
def test_replicas_equal_lockstep() -> None:
    found = []
    for engine in ("local", "lockstep"):
        made, how = test_replicas.example()
        trainer = mtf.Trainer(made, engine=engine, **how)
        trainer.fit(test_replicas.data(), 5)
        found.append({name: trainer.engine.read(name) for name in trainer.program.variables})
    for name, value in found[1].items():
        np.testing.assert_allclose(found[0][name], value, 1e-9, 1e-12, err_msg=name)


@pytest.mark.parametrize("name", number_cases.CASES)
@pytest.mark.one_in(2)
def test_numbers_at_the_edges_of_their_types(name: str) -> None:
    number_cases.check(name, "local")


def nested(mesh, layout):
    """A loop in a loop, with a sum over devices in the inner one, and a variable of both loops."""
    g = mtf.Graph()
    b, d = mtf.Dim("b", 8), mtf.Dim("d", 4)
    x = g.input("x", [b, d], dtype="float32")

    def inner(c):
        return c * 0.5 + mtf.broadcast(
            mtf.reduce_mean(mtf.tanh(c * g.variable("w", [d], mtf.Normal(1.0))), b), [b, d]
        )

    outer = mtf.scan(lambda c: mtf.scan(inner, c, mtf.Dim("i", 3)), x, mtf.Dim("j", 2))
    return mtf.lower(g, mtf.Mesh(mesh), mtf.Layout(layout), {"y": outer})


def test_loops_in_loops(devices):
    program = nested("a:4", "b:a")
    engine = TfLocalEngine(program, devices[:4])
    batch = numbers(program)
    same(engine.step(batch), open_engine(program, "lockstep").step(batch), 1e-6)
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.communication_bytes["a"] > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
def test_attention_to_keys_on_other_devices(form: str) -> None:
    sizes = {n: mtf.Dim(n, k) for n, k in {"l": 16, "m": 16, "h": 4, "d": 2}.items()}
    g = mtf.Graph()
    q, k, v = (
        g.input(n, [sizes[p], sizes["h"], sizes["d"]], "float64") for n, p in zip("qkv", "lmm", strict=True)
    )
    y = mtf.attention(q, k, v, "l", "m", "d", causal=True)
    found = mtf.gradients(mtf.reduce_sum(y * y), [q, k, v])
    results = {"y": y, **{f"d{n}": dx for n, dx in zip("qkv", found, strict=True) if dx is not None}}
    options = mtf.Options(context=frozenset({("m", form)}))
    program = mtf.lower(g, mtf.Mesh("a:2;b:2"), mtf.Layout("l:b;m:b;h:a"), results, options)
    local, lockstep = both(program)
    batch = numbers(program)
    same(local.step(batch), lockstep.step(batch))
    assert local.communication_bytes == program.communication_bytes()


def test_large_sums_are_shared_between_cores():
    """Above the size from which a sum is cut into parts."""
    b = mtf.Dim("b", 4), mtf.Dim("d", 512), mtf.Dim("e", 256)
    g = mtf.Graph()
    x = g.input("x", b, dtype="float64")
    program = mtf.lower(g, mtf.Mesh("data:4"), mtf.Layout("b:data"), {"y": mtf.reduce_sum(x, b[0])})
    local, lockstep = both(program)
    batch = numbers(program)
    same(local.step(batch), lockstep.step(batch))


MODELS = [
    ("a:1", "", {}),
    ("a:2", "batch:a", {"dropout": 0.2}),
    ("a:2;b:2", "batch:a;heads:b;d_ff:b;vocab:b", {"dropout": 0.2, "optimizer": "sgd"}),
    ("a:2", "vocab:a;heads:a;d_ff:a", {}),
    ("a:2;b:4", "batch:a+b;expert_batch:a;experts:b", {"experts": 8, "optimizer": "sgd"}),
    ("a:2;b:4", "batch:b+a", {"optimizer": "adafactor"}),
    ("a:2;b:2", "batch:a+b", {"tied": True}),
    ("a:2;b:2", "length:a;batch:b", {}),
    ("a:2;b:4", "batch:a;d_model:b", {"optimizer": "sgd"}),
    ("a:2;b:4", "batch:a;vocab:b;heads:b;d_ff:b", {"optimizer": "sgd"}),
]


@pytest.mark.parametrize(("mesh", "layout", "hparams"), by_day(MODELS, every=5))
@pytest.mark.one_in(2)
def test_training_equals_lockstep(mesh, layout, hparams):
    """Losses of three steps and all variables afterwards; the optimizer's state starts alike everywhere."""
    program = language_model(mesh, layout, **hparams)
    local, lockstep = both(program)
    local.initialize()
    lockstep.initialize()
    for seed in range(3):
        batch = tokens(program, seed)
        same(local.step(batch), lockstep.step(batch), 2e-5)
    for name in program.variables:
        np.testing.assert_allclose(local.read(name), lockstep.read(name), rtol=2e-3, atol=2e-4, err_msg=name)
    assert local.communication_bytes == program.communication_bytes()


def test_steps_and_compile_time():
    program = language_model("a:2", "batch:a")
    one, many = (open_engine(program, "local") for _ in range(2))
    batches = [tokens(program, s) for s in range(3)]
    assert [many.step(b)["loss"] for b in batches] == [one.step(b)["loss"] for b in batches]
    assert many.compile_seconds > 0


@pytest.mark.nightly
def test_same_seed_same_numbers():
    program = language_model("a:2", "batch:a", dropout=0.1, optimizer="sgd")
    engines = [open_engine(program) for _ in range(2)]
    runs = [[engine.step(tokens(program)) for _ in range(2)] for engine in engines]
    assert runs[0] == runs[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["", "batch:a", "vocab:b+a;d_ff:b", "vocab:a+b;heads:a", "d_model:a+b"])
def test_write_then_read(layout):
    program = language_model("a:2;b:2", layout)
    engine = open_engine(program)
    for name, stored in program.variables.items():
        array = np.arange(stored.variable.shape.size).reshape(stored.variable.shape.sizes)
        engine.write(name, array)
        np.testing.assert_array_equal(engine.read(name), array)


@pytest.mark.parametrize("phase", ["update", "forward"])
def test_variables_change_places(phase, devices):
    """An update that reads nothing but variables: both are read before either is stored."""
    g, dim = mtf.Graph(), mtf.Dim("n", 4)
    one, two = (g.variable(name, [dim], mtf.ONES) for name in ("one", "two"))
    total = mtf.reduce_sum(one)
    with g.phase(phase):
        g.assign(g.lookup("one"), two * 2.0)
        g.assign(g.lookup("two"), one)
    program = mtf.lower(g, mtf.Mesh("a:2"), mtf.Layout("n:a"), {"total": total})
    engine = TfLocalEngine(program, devices[:2])
    assert [float(engine.step({})["total"]) for _ in range(4)] == [4, 8, 8, 16]
    np.testing.assert_array_equal(engine.read("one"), [4, 4, 4, 4])
    np.testing.assert_array_equal(engine.read("two"), [4, 4, 4, 4])


def test_state_on_the_host_is_counted() -> None:
    """Here device and host have one memory, so nothing moves; the bytes are those of the tensors."""
    program, plain = offloaded(True, 2, "data:2"), offloaded(False, 2, "data:2")
    engine, other, batch = open_engine(program), open_engine(plain), numbers(program)
    assert [engine.step(batch)["loss"] for _ in range(2)] == [other.step(batch)["loss"] for _ in range(2)]
    assert engine.transfer_bytes == program.transfer_bytes() and not any(other.transfer_bytes.values())
    assert engine.host_variable_bytes == program.host_bytes
    assert engine.variable_bytes + engine.host_variable_bytes == other.variable_bytes


def test_variable_bytes_are_those_of_the_shards():
    whole, split = (language_model("a:2", layout) for layout in ("", "vocab:a;d_ff:a;heads:a"))
    total = sum(s.variable.bytes for s in whole.variables.values())
    assert open_engine(whole).variable_bytes == total
    assert open_engine(split).variable_bytes == sum(
        s.variable.bytes // (2 if any(s.splits) else 1) for s in split.variables.values()
    )


@dataclass(frozen=True)
class Probe(Op):
    """The identity; counts how often it is traced and fails at run time on numbers that are not finite."""

    calls: ClassVar[list] = []
    kind: ClassVar[str] = "elementwise"

    def roles(self, *inputs):
        return Roles(parallel=inputs[0].shape.names)

    def infer(self, *inputs):
        return inputs[0]

    def kernel(self, k, at, *slices):
        self.calls.append(at)
        return tf.debugging.check_numerics(slices[0], "probe")

    def flops(self, *local):
        return 0.0

    def gradient(self, dy, inputs, output):
        return (dy,)


def probed(mesh, layout, layers=3):
    """A loop over layers around a probe, and a variable that every step changes."""
    g = mtf.Graph()
    b, d = mtf.Dim("b", 8), mtf.Dim("d", 4)
    x = g.input("x", [b, d], dtype="float32")
    y = mtf.scan(
        lambda c: c.graph.apply(Probe(), c) * g.variable("s", [d], mtf.ONES), x, mtf.Dim("layers", layers)
    )
    model = mtf.Model(mtf.reduce_sum(y), mtf.SGD(0.5))
    return model.lower(mtf.Mesh(mesh), mtf.Layout(layout))


@pytest.mark.parametrize("mesh", ["a:1", "a:8"])
@pytest.mark.parametrize("layers", [1, 5])
def test_a_body_is_traced_once_for_all_devices_and_iterations(mesh, layers):
    Probe.calls.clear()
    program = probed(mesh, "b:a", layers)
    open_engine(program).step({"x": np.ones((8, 4), np.float32)})
    assert len(Probe.calls) == 1


def test_a_failed_step_changes_nothing_and_the_next_one_works():
    program = probed("a:8", "b:a")
    engine = open_engine(program)
    x = np.ones((8, 4), np.float32)
    engine.step({"x": x})
    before = engine.read("s")
    bad = x.copy()
    bad[5, 0] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match="probe"):
        engine.step({"x": bad})
    np.testing.assert_array_equal(engine.read("s"), before)
    engine.step({"x": x})
    assert not np.array_equal(engine.read("s"), before)


def test_closing_gives_the_shards_back():
    program = language_model("a:2", "batch:a")
    engine = open_engine(program)
    engine.initialize()
    name = next(iter(program.variables))
    kept = engine.variables
    engine.close()
    with pytest.raises(tf.errors.OpError, match=r"(?i)not found|does not exist"), tf.device(kept.devices[0]):
        kept.value(name)


@pytest.mark.nightly
def test_tensorflow_forgets_a_step_with_its_engine():
    from tensorflow.python.eager import context

    def known():
        return {n for n in map(str, context.context().list_function_names()) if "layoutopt_" in n}

    program, before = language_model("a:2", "batch:a"), known()
    closed, dropped = open_engine(program), open_engine(program)
    for engine in (closed, dropped):
        engine.step(tokens(program))
    assert len(known() - before) >= 2
    closed.close()
    del engine, dropped
    gc.collect()
    assert not known() - before


def test_errors_say_what_to_do():
    program = language_model("a:2", "batch:a")
    engine = open_engine(program)
    batch = tokens(program)
    with pytest.raises(UserError, match=r"the batch has no array for the model's input.*known: tokens"):
        engine.step({"tokens": batch["tokens"]})
    with pytest.raises(
        UserError, match=r"built for shape \[batch:8 length:6\], but the array has shape \[4, 6\]"
    ):
        engine.step({**batch, "tokens": batch["tokens"][:4]})
    with pytest.raises(UserError, match="expects int32, found float64"):
        engine.step({**batch, "tokens": batch["tokens"] * 1.0})
    with pytest.raises(UserError, match="unknown engine 'loca'; did you mean 'local'"):
        open_engine(program, "loca")


LATER = """
from mesh_tf_core.engines import prepare
from mesh_tf_core.engines.tf.devices import make_virtual
make_virtual(2)
print(len(prepare(16, "local")))
"""


@pytest.mark.nightly
def test_more_devices_can_be_asked_for_until_tensorflow_runs():
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["16"]


def test_too_few_devices_once_tensorflow_runs():
    program = language_model("a:64", "")
    with pytest.raises(UserError, match="the mesh needs 64 devices, but TensorFlow has already started"):
        open_engine(program)
