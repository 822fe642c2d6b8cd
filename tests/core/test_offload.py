"""State, weights, and what loops keep on the hosts: exact bytes, memory, numbers of devices, mistakes."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryRules, memory
from costmodels.pricing.pricer import price
from examples import transformer_lm
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.instructions import HOST
from mesh_tf_core.ir.program import HostLoad, HostStore, Local, Loop, Program, ReadVariable, WriteVariable
from mesh_tf_core.lower.options import offload_of
from mesh_tf_core.lower.verify import ProgramError, verify
from mesh_tf_core.training.trainer import Trainer
from tests.core.test_storage import LAYERS, D, model
from tests.examples.helper import SMALL, Result, check_same, train
from tests.layoutopt.models import branching

STATE = ("w/adam_m", "w/adam_v")
LAYOUTS = ("batch:x", "batch:x;heads:y;d_ff:y", "d_model:x+y", "batch:y;vocab:x", "length:x")
WAYS: tuple[dict[str, Any], ...] = ({}, {"storage": "zero1"}, {"storage": "zero3"}, {"microbatches": 2})


def lowered(offload: bool, stage: int = 0, mesh: str = "data:4", d: mtf.Dim = D) -> Program:
    found = model(d)
    words = ["optimizer"] if offload else []
    options = mtf.Options({"w": stage}, offload=offload_of(words, found.graph.variables))
    return found.lower(mtf.Mesh(mesh), mtf.Layout("batch:data"), options)


@pytest.mark.parametrize(("stage", "ways"), [(0, 1), (1, 4), (3, 4)])
def test_bytes_are_those_of_the_state(stage: int, ways: int) -> None:
    program, state = lowered(True, stage), 2 * 4 * LAYERS.size * D.size**2 // ways
    assert program.transfer_bytes() == {"host_load": state, "host_store": state}
    assert program.host_bytes == state
    assert {name for name, stored in program.variables.items() if stored.host} == {*STATE}
    without = memory(lowered(False, stage))
    assert memory(program).variables == without.variables - state
    # Where the update loads all of it the peak is the same: this model has one variable.
    assert without.peak - state <= memory(program).peak <= without.peak


def test_it_is_priced_by_the_host_link() -> None:
    machine, d = load_hardware("tpu-v5e"), mtf.Dim("d", 512)  # pieces fill the lanes of tiles
    with_it, without = (price(lowered(x, 3, d=d), machine) for x in (True, False))
    seconds = 2 * 2 * 4 * LAYERS.size * d.size**2 // 4 / 15e9
    assert with_it.by(lambda x: "+".join(x.axes))[HOST] == pytest.approx(seconds)
    assert with_it.step_seconds == pytest.approx(without.step_seconds + seconds)
    assert with_it.compute_seconds == pytest.approx(without.compute_seconds)


def test_random_layouts_give_the_numbers_of_one_device() -> None:
    rng = random.Random(3)
    hparams = {**SMALL, "optimizer": "adam", "clip_norm": 1.0}
    variables = transformer_lm.model(**hparams).graph.variables
    offload = offload_of(["optimizer"], variables)
    some = frozenset(rng.sample(sorted(offload), 4))
    want = train(transformer_lm, hparams)
    seen: list[Program] = []
    for way, layout in zip(WAYS, rng.sample(LAYOUTS, len(WAYS)), strict=True):
        options = dict(way)
        if stage := options.pop("storage", ""):
            options["storage"] = {n: stage for n, v in variables.items() if v.trainable and len(v.shape)}
        which = rng.choice((offload, some))
        check_same(
            train(transformer_lm, hparams, "x:2;y:2", layout, 3, seen.append, offload=which, **options), want
        )
    assert all(p.transfer_bytes()["host_load"] == p.host_bytes > 0 for p in seen)


def test_engines_count_what_moves() -> None:
    program, plain = lowered(True, 2), lowered(False, 2)
    batch = {"x": np.random.RandomState(0).randn(16, 64).astype(np.float32)}
    losses = []
    for each in (program, plain):
        engine = open_engine(each, "lockstep")
        losses += [float(engine.step(batch)["loss"])]
        assert engine.transfer_bytes == each.transfer_bytes()
        assert engine.host_variable_bytes == each.host_bytes
        assert engine.peak_memory_bytes == memory(each).peak
    assert losses[0] == losses[1]


def kept_on_hosts(offload: bool = True, keep: str = "layers:keep=products", **options: Any) -> Program:
    """Layers that run again, what they keep on the hosts."""
    found = transformer_lm.model(**SMALL)
    there = offload_of(["activations"], found.graph.variables, [keep]) if offload else frozenset()
    taken = mtf.Options(recompute=frozenset([keep]), offload=there, **options)
    return found.lower(mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data;heads:model;d_ff:model"), taken)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_loops_keep_is_on_the_hosts(parts: int) -> None:
    """The state of each of two layers, float32; with microbatches, one after the other."""
    program, plain = (kept_on_hosts(x, "layers", microbatches=parts) for x in (True, False))
    state = 4 * SMALL["batch"] * SMALL["length"] * SMALL["d_model"] // 2
    assert program.transfer_bytes() == {"host_load": 2 * state, "host_store": 2 * state}
    assert program.host_bytes == 2 * state // parts
    # The peak is between forward's layers and backward's, where a device holds none of it.
    assert memory(program).peak == memory(plain).peak - 2 * state // parts
    found = [hidden(kept_on_hosts(x, "layers", microbatches=parts)) for x in (True, False)]
    assert found[0] > 0 == found[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [1, 2])
def test_all_that_loops_save_is_on_the_hosts(parts: int) -> None:
    """Of layers that do not run again."""
    found = transformer_lm.model(**SMALL)
    mesh, layout = mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data;heads:model;d_ff:model")
    there = offload_of(["activations=layers"], found.graph.variables)
    plain, program = (
        found.lower(mesh, layout, mtf.Options(microbatches=parts, offload=x)) for x in (frozenset(), there)
    )
    forward = next(i for i, _ in plain.walk() if isinstance(i, Loop) and i.dim.name == "layers")
    saved = sum(plain.values[r.outer].local_bytes(mesh) for r in forward.stacked)
    assert program.transfer_bytes() == {"host_load": parts * saved, "host_store": parts * saved}
    assert program.host_bytes == saved
    assert memory(program).peak < memory(plain).peak
    batch = next(transformer_lm.data(**SMALL))
    batch = {n: x.reshape(plain.values[plain.feeds[n]].shape.sizes) for n, x in batch.items()}
    engines = [open_engine(each, "lockstep") for each in (plain, program)]
    losses = [[float(engine.step(batch)["loss"]) for _ in range(3)] for engine in engines]
    assert losses[0] == losses[1]
    assert engines[1].peak_memory_bytes == memory(program).peak
    assert engines[1].transfer_bytes == program.transfer_bytes()


def weights_on_hosts(layout: str, mesh: str = "x:2;y:2", dtype: str = "float32", **options: Any) -> Program:
    """All weights of the small language model there."""
    found = transformer_lm.model(**SMALL, dtype=dtype)
    there = offload_of(["weights"], found.graph.variables)
    return found.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(offload=there, **options))


def test_weights_are_loaded_layer_by_layer() -> None:
    """Forward and backward load what their products read, the update all; a layer at a time in loops."""
    program = weights_on_hosts("batch:x;heads:y;d_ff:y")
    there = {name: s.value.local_bytes(program.mesh) for name, s in program.variables.items() if s.host}
    assert set(there) == {v.name for v in transformer_lm.model(**SMALL).graph.variables.values()}
    # Backward reads neither embedding.
    twice = sum(size for name, size in there.items() if not name.startswith("embedding"))
    every = sum(there.values())
    assert program.transfer_bytes() == {"host_load": 2 * every + twice, "host_store": every}
    assert program.host_bytes == every
    plain = transformer_lm.model(**SMALL).lower(program.mesh, program.layout)
    before, after = memory(plain), memory(program)
    assert after.variables == before.variables - every
    # At the peak a device has what one layer reads.
    layer = sum(size for name, size in there.items() if name.startswith(("attention", "feed"))) / 2
    assert after.peak <= before.peak - every + layer + there["output/projection"]
    loops = [i for i in program.code if isinstance(i, Loop)]
    assert [sum(isinstance(i, HostLoad) for i in loop.body) for loop in loops] == [8, 8]
    assert hidden(program) > 0


@functools.cache
def alone() -> Result:
    """What one device learns."""
    return train(transformer_lm, SMALL)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("batch:x+y", {"storage": "zero3", "recompute": frozenset(["layers"])}),
        ("batch:x;heads:y;d_ff:y", {"storage": "zero1", "microbatches": 2}),
        ("vocab:x+y", {"storage": "zero2"}),
        ("batch:x;length@elsewhere:y;heads:y;d_ff:y", {}),
        ("layers:x;batch:y", {"microbatches": 2}),
        ("layers:x;batch:y", {"microbatches": 2, "schedule": "1f1b"}),
    ],
)
@pytest.mark.one_in(4)
def test_weights_there_give_the_numbers_of_one_device(layout: str, options: dict[str, Any]) -> None:
    """Also in pipelines; without them with all that may lie there."""
    variables = transformer_lm.model(**SMALL).graph.variables
    options = dict(options)
    if stage := options.pop("storage", ""):
        options["storage"] = {n: stage for n, v in variables.items() if v.trainable and len(v.shape)}
    recompute = options.get("recompute", ())
    kinds = ["weights", "optimizer", *["activations"] * bool(recompute)]
    for words in (kinds, kinds[:1]):
        options["offload"] = offload_of(words, variables, recompute)
        seen: list[Program] = []
        check_same(train(transformer_lm, SMALL, "x:2;y:2", layout, 3, seen.append, **options), alone())
        assert seen[0].host_bytes > 0


@pytest.mark.parametrize("stage", [0, 1])
def test_casts_of_weights_there_are_of_one_layer(stage: int) -> None:
    """In half precision: elsewhere a compiler casts all layers at once, and keeps them; here each iteration
    casts what it has loaded, but of a master copy (stage 1) a half, which stays, is made as a step begins."""
    found = {"w": stage}
    there = model().lower(
        mtf.Mesh("data:4"),
        mtf.Layout("batch:data"),
        mtf.Options(found, offload=frozenset({("weights", "w")})),
    )
    loops = [i for i in there.code if isinstance(i, Loop)]
    loads = [any(isinstance(i, HostLoad) for i in loop.body) for loop in loops]
    assert loads == [stage != 1] * 2
    half = 2 * D.size**2 * LAYERS.size
    kept = [
        h
        for h in memory(there, MemoryRules(fuses=Fuses.ALL)).holdings
        if h.bytes >= half and "bfloat16" in h.what
    ]
    plain = memory(lowered(False, stage), MemoryRules(fuses=Fuses.ALL)).holdings
    assert any(h.bytes >= half and "bfloat16" in h.what for h in plain)
    assert bool(kept) is (stage == 1)


def hidden(program: Program) -> float:
    """Seconds of the host link that run beside products."""
    lines = price(program, load_hardware("tpu-v5e")).lines
    return sum((x.seconds - x.exposed) * x.times for x in lines if x.axes == (HOST,))


def test_what_loops_keep_has_the_numbers_of_one_device() -> None:
    want = train(transformer_lm, SMALL)
    for recompute, layout, parts in (
        ("layers", "batch:x;heads:y;d_ff:y", 1),
        ("layers:keep=products+attention", "batch:x;length@elsewhere:y;heads:y;d_ff:y", 2),
    ):
        options: dict[str, Any] = {
            "recompute": frozenset([recompute]),
            "microbatches": parts,
            "offload": frozenset({("activations", "layers"), ("optimizer", "feed_forward/wi")}),
        }
        check_same(train(transformer_lm, SMALL, "x:2;y:2", layout, 3, **options), want)


def stopped_early(offload: bool, parts: int = 1) -> Program:
    """A branch in a loop that stops early, and that runs again."""
    found = branching()
    there = offload_of(["activations"], found.graph.variables, ["step_1"]) if offload else frozenset()
    options = mtf.Options(recompute=frozenset(["step_1"]), microbatches=parts, offload=there)
    return found.lower(mtf.Mesh("data:2"), mtf.Layout("batch:data"), options)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_decides_whether_an_iteration_runs_stays(parts: int) -> None:
    """The state of three steps is stored and loaded once, whatever reads it; what decides stays here."""
    program = stopped_early(True, parts)
    state = 3 * parts * 4 * (8 * 16 // (2 * parts) + 1)
    assert program.transfer_bytes() == {"host_load": state, "host_store": state}
    (x,) = (program.values[i].shape.sizes for i in program.feeds.values())
    batch = {"x": np.random.RandomState(0).randn(*x).astype(np.float32)}
    engines = [open_engine(each, "lockstep") for each in (program, stopped_early(False, parts))]
    losses = [[float(engine.step(batch)["loss"]) for _ in range(2)] for engine in engines]
    assert losses[0] == losses[1]
    assert engines[0].transfer_bytes["host_load"] == engines[0].transfer_bytes["host_store"]


def test_planted_faults_are_caught() -> None:
    program = lowered(True)
    load = next(i for i in program.code if isinstance(i, HostLoad))
    store = next(i for i in program.code if isinstance(i, HostStore))
    there, here = load.inputs[0], load.outputs[0]
    read = next(i for i in program.code if here in i.inputs)
    write = next(i for i in program.code if isinstance(i, WriteVariable) and i.inputs == store.outputs)
    verify(program)
    faults = [
        # Computed on where it lies; loaded twice; stored as it is on the device; read as if it lay there.
        (
            [(read, replace(read, inputs=tuple(there if i == here else i for i in read.inputs)))],
            "is on the host",
        ),
        ([(load, replace(load, inputs=store.inputs))], "is not computed before this instruction"),
        (
            [(write, replace(write, inputs=store.inputs))],
            "does not have the placement in which the variable is stored",
        ),
        (
            [(store, HostLoad(store.inputs, store.outputs, store.origin))],
            "or the result is on the wrong side of the transfer between",
        ),
    ]
    for changes, said in faults:
        code = tuple(next((new for old, new in changes if old is instr), instr) for instr in program.code)
        with pytest.raises(ProgramError, match=said):
            verify(replace(program, code=code))
    loops = kept_on_hosts()
    stack = next(r.outer for i in loops.code if isinstance(i, Loop) for r in i.stacked)
    with pytest.raises(ProgramError, match="stack %"):
        verify(replace(loops, values=tuple(replace(v, host=v.host and v.id != stack) for v in loops.values)))
    # A stage's part of what lies there, as if it came to the device by itself.
    stages = weights_on_hosts("layers:x;batch:y", microbatches=2)
    local = (i for i, _ in stages.walk() if isinstance(i, Local) and i.op.free and i.inputs)
    (part,) = next(i for i in local if stages.values[i.inputs[0]].host).outputs
    with pytest.raises(ProgramError, match=r"stagepart.* is on the host"):
        verify(replace(stages, values=tuple(replace(v, host=v.host and v.id != part) for v in stages.values)))
    values = tuple(replace(v, host=False) if v.id == there else v for v in program.values)
    assert any(isinstance(i, ReadVariable) and i.outputs == (there,) for i in program.code)
    with pytest.raises(ProgramError, match="and the variable are not both on the device or both on the host"):
        verify(replace(program, values=values))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimiser"], "offload: unknown kind 'optimiser'; did you mean 'optimizer'?"),
        (["optimizer=v"], "the model has no variable 'v'"),
        (["weights=v"], "the model has no variable 'v'"),
        (["weights=w/adam_m"], "is optimizer state; name its variable: optimizer=w"),
        (
            ["activations=layer"],
            "no loop over 'layer' saves values for a backward pass; did you mean 'layers'?",
        ),
        (
            ["activations"],
            "offload activations: only loops that are recomputed are",
        ),
    ],
)
def test_mistakes_are_named(words: list[str], said: str) -> None:
    found = model()
    with pytest.raises(mtf.UserError) as refused:
        offload = offload_of(words, found.graph.variables)
        found.lower(mtf.Mesh("a:1"), mtf.Layout(""), mtf.Options(offload=offload))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_an_optimizer_without_state_is_named() -> None:
    found = transformer_lm.model(**{**SMALL, "optimizer": "sgd"})
    words = offload_of(["optimizer=feed_forward/wi"], found.graph.variables)
    with pytest.raises(mtf.UserError, match="has no state for 'feed_forward/wi'"):
        found.lower(mtf.Mesh("a:1"), mtf.Layout(""), mtf.Options(offload=words))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("delay", [0, 1])
def test_replicas_learn_the_same_with_all_on_the_hosts(delay: int) -> None:
    """Also where they meet: what that reads comes from the hosts, and what it changes goes there."""
    found = transformer_lm.model(**SMALL)
    words = ["optimizer", "weights", "activations=layers"]
    there = offload_of(words, found.graph.variables)
    seen = list[list[float]]()
    for offload in (there, frozenset[tuple[str, str]]()):
        how = mtf.Options(diloco=mtf.DiLoCo("data", 2, delay=delay), offload=offload)
        trainer = Trainer(found, "data:2;model:2", "batch:model", how, engine="lockstep")
        programs = found.replicas(trainer.program.mesh, mtf.Layout("batch:model"), how)
        moved = [sum(p.transfer_bytes().values()) for p in (programs.inner, *programs.meetings)]
        assert all(moved) == bool(offload)
        seen.append([r["loss"] for r in trainer.fit(transformer_lm.data(**SMALL), 5)])
    np.testing.assert_allclose(*seen, rtol=1e-6)


def test_hardware_without_a_host_link_is_named() -> None:
    with pytest.raises(
        mtf.UserError,
        match="the bandwidth of the host link is unknown",
    ):
        price(lowered(True), load_hardware("tpu-v2"))
    assert HOST in price(lowered(True), load_hardware("cpu-local")).by(lambda x: "+".join(x.axes))


def test_means_are_evaluated_and_checkpoints_are_read_without_it(tmp_path: Path) -> None:
    """A running mean is state too: evaluation loads it from the host. Files say nothing of hosts."""
    hparams = {**SMALL, "layers": 1, "batch": 4}
    found = transformer_lm.model(**hparams)
    with_means = mtf.Model(found.loss, mtf.Adam(0.01, ema=0.9), name=found.name)
    options = mtf.Options(offload=offload_of(["optimizer"], found.graph.variables))
    layouts: list[tuple[mtf.Options, str]] = [(options, "batch:x"), (mtf.Options(), "")]
    trainers = [mtf.Trainer(with_means, "x:2", layout, o, engine="lockstep") for o, layout in layouts]
    batch = next(transformer_lm.data(**hparams))
    losses = [[float(t.step(batch)["loss"]) for _ in range(2)] for t in trainers]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    means = [t.evaluate([batch], ema=True)["loss"] for t in trainers]
    assert means[0] == pytest.approx(means[1], rel=1e-4)
    trainers[0].save(tmp_path / "kept")
    trainers[1].restore(tmp_path / "kept")
    again = [float(t.step(batch)["loss"]) for t in trainers]
    np.testing.assert_allclose(*again, rtol=1e-5)
