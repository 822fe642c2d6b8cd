"""Programs on eight virtual JAX devices against the lockstep oracle; TensorFlow is never loaded.

    JAX_PLATFORMS=cpu python -m tests.engines.jax_cases [night]

Prints one JSON object: case -> what was wrong ("" if nothing was).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples import mlp
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.jax.compat import devices
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.program import Loop, Program
from mesh_tf_core.ir.schedules import NAMES
from tests.core import (
    test_kept,
    test_kept_arrays,
    test_offload,
    test_padded_storage,
    test_pipelines,
    test_replicas,
    test_unequal_stages,
)
from tests.core.test_storage import lowered, written
from tests.core.test_storage import program as mixed
from tests.engines import jax_layouts, loop_cases, number_cases, test_some_layers
from tests.engines.control import PROGRAMS, batches
from tests.engines.programs import every_collective, language_model, numbers, tokens

AXES = [("a:2", ("a",)), ("a:1;b:2", ("a",))] + [
    (mesh, axes) for mesh in ("a:2;b:2", "a:2;b:4") for axes in (("a",), ("b",), ("a", "b"), ("b", "a"))
]
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("a:2;b:2", "batch:a;heads:b;d_ff:b;vocab:b", {"dropout": 0.2, "optimizer": "sgd", "layers": 2}),
    ("a:2;b:4", "batch:b+a", {"optimizer": "adafactor"}),
    ("a:2;b:4", "batch:a+b;expert_batch:a;experts:b", {"experts": 8, "optimizer": "sgd"}),
    ("a:2;b:4", "batch:a;d_model:b", {"optimizer": "adam", "dtype": "bfloat16"}),
]


def equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, (name, found[name].dtype, array.dtype)
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def one_step(program: Program, tolerance: float) -> None:
    """Results and counted bytes of one step."""
    engine, batch = open_engine(program, "jax"), numbers(program)
    equal(engine.step(batch), open_engine(program, "lockstep").step(batch), tolerance)
    assert engine.communication_bytes == program.communication_bytes()


def training(mesh: str, layout: str, hparams: dict[str, Any]) -> None:
    """Three steps, and all variables afterwards."""
    program = language_model(mesh, layout, **hparams)
    engine, oracle = open_engine(program, "jax"), open_engine(program, "lockstep")
    low = hparams.get("dtype") == "bfloat16"
    for seed in range(3):
        batch = tokens(program, seed)
        equal(engine.step(batch), oracle.step(batch), 0.02 if low else 2e-5)
    for name in () if low else program.variables:
        np.testing.assert_allclose(engine.read(name), oracle.read(name), 2e-3, 2e-4, err_msg=name)
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.variable_bytes == oracle.variable_bytes
    assert engine.compile_seconds > 0


def loops() -> None:
    """A loop in a loop with sums over devices in the inner one, stacked and sliced values; their gradients
    run from the last iteration and add up what a value from outside is given."""
    g = mtf.Graph()
    b, d, i, j = mtf.Dim("b", 8), mtf.Dim("d", 4), mtf.Dim("i", 3), mtf.Dim("j", 2)
    x = g.input("x", [b, d], dtype="float64")
    given = g.input("given", [i, b, d], dtype="float64")

    w = g.input("w", [d], dtype="float64")

    def inner(c: Any, part: Any) -> tuple[Any, list[Any]]:
        mean = mtf.broadcast(mtf.reduce_mean(mtf.tanh(c * w), b), [b, d])
        new = c * 0.5 + mean + part
        return new, [mtf.tanh(new)]

    def outer(c: Any) -> Any:
        final, (stacked,) = mtf.scan(inner, c, i, [given])
        return final + mtf.reduce_sum(stacked, i)

    loss = mtf.reduce_sum(mtf.square(mtf.scan(outer, x, j)))
    found = mtf.gradients(loss, [x, given, w])
    results = {"loss": loss, **{f"gradient {n}": dx for n, dx in enumerate(found)}}
    program = mtf.lower(g, mtf.Mesh("a:4"), mtf.Layout("b:a"), results)
    kinds = [instr for instr, _ in program.walk() if isinstance(instr, Loop)]
    assert any(loop.reverse for loop in kinds) and any(loop.summed for loop in kinds)
    assert any(loop.stacked for loop in kinds) and any(loop.sliced for loop in kinds)
    one_step(program, 1e-10)


def half(stage: int) -> None:
    """Weights in half precision, their master copies split, two microbatches; in a loop and without one."""
    for program in (mixed(stage, "data:2", 2), lowered(written(tied=True), stage, "data:2", 2)):
        engine, oracle = open_engine(program, "jax"), open_engine(program, "lockstep")
        batch = numbers(program)
        for _ in range(3):
            equal(engine.step(batch), oracle.step(batch), 0.02)
        assert engine.variable_bytes == oracle.variable_bytes
        assert engine.communication_bytes == program.communication_bytes()


def pipeline(schedule: str = "gpipe") -> None:
    """Layers as stages of a pipeline, beside other splits, stored further and recomputed."""
    piped(test_pipelines.example(schedule))


def unequal() -> None:
    """Stages that do not divide the layers."""
    built, where = test_unequal_stages.model(5), ("pipe:2;t:2", "layers:pipe;e:t")
    piped(test_unequal_stages.lowered(built, *where, "interleaved:2", 4))


def piped(program: Program) -> None:
    """Two steps of a pipeline."""
    engine, oracle, batch = (
        open_engine(program, "jax"),
        open_engine(program, "lockstep"),
        test_pipelines.batch(program),
    )
    for _ in range(2):
        equal(engine.step(batch), oracle.step(batch), 1e-10)
    for name in program.variables:
        np.testing.assert_allclose(engine.read(name), oracle.read(name), 1e-10, err_msg=name)
    assert engine.communication_bytes == program.communication_bytes()


def replicas() -> None:
    """Replicas that train separately for some steps, beside other splits, and meet."""
    found = []
    for engine in ("jax", "lockstep"):
        made, how = test_replicas.example()
        trainer = mtf.Trainer(made, engine=engine, **how)
        trainer.fit(test_replicas.data(), 5)
        found.append({name: trainer.engine.read(name) for name in trainer.program.variables})
    for name, value in found[1].items():
        np.testing.assert_allclose(found[0][name], value, 1e-9, 1e-12, err_msg=name)


def kept(seed: int) -> None:
    """Layers that keep some of their values, under a random layout: the numbers of one device."""
    test_kept.same(test_kept.trained(test_kept.drawn(seed), "jax"), "fused")


def padded(case: Any) -> None:
    program = test_padded_storage.lowered(test_padded_storage.model(), *case)
    test_padded_storage.compare(program, test_padded_storage.model(), "jax")


def offloaded() -> None:
    """The optimizer's state on the hosts: moved, read, written, and kept for a checkpoint."""
    program = test_offload.lowered(True, 3, "data:2")
    engine, oracle, batch = open_engine(program, "jax"), open_engine(program, "lockstep"), numbers(program)
    for _ in range(2):
        equal(engine.step(batch), oracle.step(batch), 0.02)
    assert engine.transfer_bytes == oracle.transfer_bytes == program.transfer_bytes()
    assert engine.host_variable_bytes == oracle.host_variable_bytes == program.host_bytes > 0
    assert engine.variable_bytes == oracle.variable_bytes
    state = test_offload.STATE[0]
    before = engine.read(state)
    engine.write(state, before * 2)
    kept = {piece.name: array for piece, array in engine.snapshot().items()}
    np.testing.assert_array_equal(kept[state], engine.read(state))
    np.testing.assert_array_equal(kept[state], 2 * before)
    engine.step(batch)


def further_offloaded() -> None:
    """What loops keep; weights, also of the stages of a pipeline."""
    pipeline = test_offload.weights_on_hosts("layers:x;batch:y", microbatches=2, schedule="1f1b")
    for program in (test_offload.kept_on_hosts(), pipeline, test_offload.stopped_early(True)):
        engine, oracle = open_engine(program, "jax"), open_engine(program, "lockstep")
        for seed in range(2):
            batch = numbers(program) if "x" in program.feeds else tokens(program, seed)
            equal(engine.step(batch), oracle.step(batch), 2e-5)
        assert engine.transfer_bytes == oracle.transfer_bytes == program.transfer_bytes()
        assert engine.variable_bytes == oracle.variable_bytes


def control(name: str) -> None:
    """Branches and loops that stop early."""
    program = PROGRAMS[name]()
    engine, oracle = open_engine(program, "jax"), open_engine(program, "lockstep")
    for batch in batches(program):
        equal(engine.step(batch), oracle.step(batch), 1e-10)
    assert engine.communication_bytes == program.communication_bytes()


def state() -> None:
    """What is written is read, split any way; what is not there is refused."""
    program = language_model("a:2;b:2", "vocab:b+a;d_ff:b;heads:a")
    engine = open_engine(program, "jax")
    for name, stored in program.variables.items():
        array = np.arange(stored.variable.shape.size).reshape(stored.variable.shape.sizes)
        engine.write(name, array)
        np.testing.assert_array_equal(engine.read(name), array)
    refused(lambda: engine.read("nothing"), "there is no variable 'nothing'")
    refused(lambda: engine.write(name, np.zeros([1, 1, 1, 1, 1])), "has shape")
    refused(
        lambda: open_engine(language_model("a:64", ""), "jax"),
        "the mesh needs 64 devices, but JAX in this process has",
    )
    engine.close()


def beside() -> None:
    """Evaluation shares the variables of the training; a snapshot stays what it was."""
    runs = [
        mtf.Trainer(mlp.model(batch=8, hidden=8), "a:2;b:2", "batch:a;hidden:b", engine=kind)
        for kind in ("jax", "lockstep")
    ]
    rng = np.random.default_rng(0)
    fed = [
        {"image": rng.random((8, 64)).astype(np.float32), "label": rng.integers(0, 10, 8).astype(np.int32)}
        for _ in range(3)
    ]
    short = {name: array[:3] for name, array in fed[1].items()}
    before = {name: runs[0].engine.read(name) for name in runs[0].program.variables}
    kept, initial = runs[0].engine.snapshot(), before["output/weight"]
    for batch in fed:
        found, expected = ([run.step(batch), run.evaluate([fed[0], short])] for run in runs)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose([a[name] for name in b], list(b.values()), 1e-5)
    for piece, value in kept.items():
        np.testing.assert_array_equal(before.pop(piece.name), value)
    assert not before
    assert not np.array_equal(runs[0].engine.read("output/weight"), initial)


def in_flight() -> None:
    """A step that begins before the results of the last one are asked for, as accelerators run them."""
    program = language_model("a:1", "", layers=1)
    engine, oracle = open_engine(program, "jax"), open_engine(program, "lockstep")
    assert engine.in_flight == 1  # CPU devices
    engine.in_flight = 2  # type: ignore[misc]
    fed = [tokens(program, seed) for seed in range(3)]
    begun = [engine.begin(engine.feed(batch)) for batch in fed]
    for found, batch in zip(begun, fed, strict=True):
        equal(found(), oracle.step(batch), 2e-5)


def refused(call: Callable[[], Any], why: str) -> None:
    try:
        call()
    except UserError as error:
        assert why in str(error), str(error)
        return
    raise AssertionError(f"not refused: {why}")


CASES: dict[str, Callable[[], None]] = {
    **{
        f"collectives {m} {'+'.join(a)}": lambda m=m, a=a: one_step(every_collective(m, a), 1e-12)
        for m, a in AXES
    },
    **{f"training {m} {layout}": lambda m=m, n=layout, h=h: training(m, n, h) for m, layout, h in MODELS},
    "loops": loops,
    **{f"schedule {schedule}": lambda s=schedule: pipeline(s) for schedule in NAMES},
    "unequal stages": unequal,
    "some layers run again": lambda: test_some_layers.compare(lambda p: open_engine(p, "jax")),
    "replicas": replicas,
    **{f"kept {seed}": lambda seed=seed: kept(seed) for seed in range(8)},
    **{
        f"stored split: {kind}": lambda k=kind: test_kept_arrays.compare(k, "zero3", "jax")
        for kind in test_kept_arrays.KINDS
    },
    "sequence, context and hybrid parallelism": jax_layouts.all_at_once,
    "messages in chunks beside products": jax_layouts.in_chunks,
    **{f"half stage {stage}": lambda stage=stage: half(stage) for stage in (1, 2, 3)},
    **{
        f"loop {name}": lambda case=case: case.check(lambda p, batch: open_engine(p, "jax").step(batch))
        for name, case in loop_cases.CASES.items()
    },
    **{f"control {name}": lambda n=name: control(n) for name in PROGRAMS},
    **{f"numbers {name}": lambda n=name: number_cases.check(n, "jax") for name in number_cases.CASES},
    **{f"padded {number}": lambda c=case: padded(c) for number, case in enumerate(test_padded_storage.CASES)},
    "offload": offloaded,
    "offload of what loops keep and of stages": further_offloaded,
    "state": state,
    "beside": beside,
    "in flight": in_flight,
}


BY_NIGHT = {
    *(f"padded {number}" for number in range(1, len(test_padded_storage.CASES))),
    *(f"kept {seed}" for seed in range(8)),
    *(f"training {mesh} {layout}" for mesh, layout, _ in MODELS),
    *[name for n, name in enumerate(CASES) if name.startswith("collectives ") and n % 4],
    "messages in chunks beside products",
    "some layers run again",
    "beside",
    "half stage 1",
    "half stage 2",
    "sequence, context and hybrid parallelism",
    "in flight",
    *(f"schedule {schedule}" for schedule in NAMES if schedule != "interleaved:2"),
    "offload of what loops keep and of stages",
    *[name for name in CASES if name.startswith(("numbers ", "stored split: "))][1::2],
}
"""Cases that take long, or have another one like them."""


def main() -> None:
    devices(8)
    night = sys.argv[1:] == ["night"]
    said = {}
    for name, case in CASES.items():
        if (name in BY_NIGHT) != night:
            continue
        try:
            case()
            said[name] = ""
        except Exception as error:  # every case reports; the test says which failed
            said[name] = f"{type(error).__name__}: {error}"
    said["no TensorFlow"] = "TensorFlow was loaded" if "tensorflow" in sys.modules else ""
    print(json.dumps(said))


if __name__ == "__main__":
    main()
