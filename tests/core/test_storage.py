"""Storage in mixed precision: the ZeRO paper's bytes, and what a step learns that splits nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryRules, memory
from mesh_tf_core import Dim
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.jax.compile import Executable, compile_for
from mesh_tf_core.engines.jax.hlo import read
from mesh_tf_core.ir.program import AllGather, AllReduce, Loop, Program, ReadVariable, ReduceScatter
from mesh_tf_core.lower.storage import narrow_reads, read_stage
from mesh_tf_core.optimizers import by_name

B, D, LAYERS = Dim("batch", 16), Dim("d", 64), Dim("layers", 4)
DTYPE = "bfloat16"


def model(d: Dim = D, batch: Dim = B, float32: bool = False) -> mtf.Model:
    """Square layers in bfloat16; with `float32` the loss reads their weights as they are, too."""
    g = mtf.Graph("m")
    out = Dim("out", d.size)

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [d, out], mtf.Constant(0.01))
        y = mtf.rename(mtf.einsum([h, w.cast(DTYPE)], [batch, out]), out="d")
        return h + (y * mtf.reduce_mean(w).cast(DTYPE) if float32 else y)

    x = g.input("x", [batch, d], "float32").cast(DTYPE)
    loss = mtf.reduce_mean(mtf.square(mtf.scan(layer, x, LAYERS).cast("float32")))
    return mtf.Model(loss, by_name("adam", 0.01), name="m")


def written(
    layers: int = LAYERS.size, d: int = D.size, batch: int = B.size, dtype: str = DTYPE, tied: bool = False
) -> mtf.Model:
    """Square layers one after the other, no loop; `tied` reads the first layer's weight in the last one."""
    g = mtf.Graph("m")
    b, even, odd = Dim("batch", batch), Dim("even", d), Dim("odd", d)
    x = g.input("x", [b, even], "float32").cast(dtype)
    weights: list[mtf.Tensor] = []
    for i in range(layers):
        out = (odd, even)[i % 2]
        again = tied and i == layers - 2
        weights.append(
            weights[0] if again else g.variable(f"w{i}", [x.shape.dims[1], out], mtf.Constant(0.01))
        )
        x = mtf.relu(mtf.einsum([x, weights[-1].cast(dtype)], [b, out]))
    return mtf.Model(mtf.reduce_mean(mtf.square(x.cast("float32"))), by_name("adam", 0.01), name="m")


def program(stage: int, mesh: str = "data:8", parts: int = 1, **sizes: Dim) -> Program:
    return lowered(model(**sizes), stage, mesh, parts)


def lowered(found: mtf.Model, stage: int, mesh: str, parts: int = 1) -> Program:
    stages = {v.name: stage for v in found.graph.variables.values() if v.trainable}
    options = mtf.Options(storage=stages, microbatches=parts)
    return found.lower(mtf.Mesh(mesh), mtf.Layout("batch:data"), options)


def state_bytes(found: Program) -> int:
    """What a step holds of weights at its peak: as stored, as read by all layers, their gradients. A layer's
    own gathered weights, and what it computes, come on top."""
    total = 0
    for h in memory(found, MemoryRules(fuses=Fuses.ALL)).holdings:
        value = None if h.value < 0 else found.values[h.value]
        if value is None or (
            "batch" not in value.shape.names
            and ("layers" in value.shape.names or h.bytes == LAYERS.size * value.local_bytes(found.mesh))
        ):
            total += h.bytes
    return total


@pytest.mark.parametrize("devices", [1, 4, 64, 1024])
def test_bytes_of_a_parameter_are_those_of_the_paper(devices: int) -> None:
    """Rajbhandari et al. 2020, figure 1, Adam with K = 12: 16; 4 + 12/N; 2 + 14/N; 16/N."""
    d = Dim("d", 4096)
    for stage, each in enumerate((16, 4 + 12 / devices, 2 + 14 / devices, 16 / devices)):
        found = program(stage, f"data:{devices}", d=d, batch=Dim("batch", 1024))
        # The step counter is a number more.
        assert state_bytes(found) == each * LAYERS.size * d.size**2 + 4, stage


def bytes_of_a_parameter(stage: int, devices: int, parts: int, dtype: str) -> float:
    """What one more layer adds to the peak of a model without loops, for each weight. Activations are what
    twice the batch adds once more."""
    d, peak = 1024, dict[tuple[int, int], int]()
    for layers, times in itertools.product((6, 12), (1, 2)):
        found = lowered(written(layers, d, 256 * parts * times, dtype), stage, f"data:{devices}", parts)
        peak[layers, times] = memory(found, MemoryRules(fuses=Fuses.ALL)).peak
    once, twice = (peak[12, times] - peak[6, times] for times in (1, 2))
    return (2 * once - twice) / (6 * d * d)


@pytest.mark.parametrize("devices, parts", [(1, 1), (4, 2), (64, 1)])
@pytest.mark.one_in(4)
def test_bytes_of_a_parameter_without_loops_are_those_of_the_paper(devices: int, parts: int) -> None:
    """Figure 1 in float32: nothing of a layer but its states stays, neither a gathered weight from forward to
    backward nor a whole gradient until the update."""
    for stage, each in enumerate((16, 8 + 8 / devices, 4 + 12 / devices, 16 / devices)):
        assert bytes_of_a_parameter(stage, devices, parts, "float32") == each, stage


def test_half_precision_without_loops_takes_less_than_in_the_paper() -> None:
    """A half and its gradient: the one is read for the last time as the other is made."""
    for stage, each in enumerate((14, 2 + 12 / 64, 2 + 12 / 64, 14 / 64)):
        assert bytes_of_a_parameter(stage, 64, 1, DTYPE) == each, stage


def test_weights_are_gathered_for_each_pass_and_gradients_scattered_as_they_are_made() -> None:
    found = lowered(written(dtype="float32", tied=True), 3, "data:8")
    passes: dict[str, list[str]] = {}
    stored = {i.outputs[0]: i.variable for i in found.code if isinstance(i, ReadVariable)}
    for instr in found.code:
        if isinstance(instr, AllGather):
            passes.setdefault(stored[instr.inputs[0]], []).append(instr.origin.phase)
    # Layers 0 and 2 read one weight: each pass gathers it once.
    assert passes == {name: ["forward", "backward"] for name in ("w0", "w1", "w3")}
    scatters = [n for n, i in enumerate(found.code) if isinstance(i, ReduceScatter)]
    assert len(scatters) == 3
    assert all(found.code[n].inputs == found.code[n - 1].outputs for n in scatters)


def test_the_tpu_compiler_gathers_for_each_pass_too() -> None:
    """It keeps nothing of forward for backward, though it merges equal operations."""
    found = lowered(written(3, 512, 256), 3, "data:4")
    made = compile_for(found, "v5e:2x2")
    assert isinstance(made, Executable)
    for kind, times in (("all_gather", 5), ("reduce_scatter", 3)):
        assert sum(i.name == kind for i in found.code) == times
        assert sum(c.times for c in read(made.text).collectives if c.kind == kind) == times


def test_half_the_weights_are_gathered_once_and_the_master_copy_never() -> None:
    for parts in (1, 2):
        for stage in (1, 2):
            found = program(stage, parts=parts)
            gathers = [i for i in found.code if isinstance(i, AllGather)]
            (whole,) = (found.values[o] for i in gathers for o in i.outputs)
            assert (whole.dtype, whole.shape.names) == (DTYPE, ("layers", "d", "out"))
            loops = [i for i, _ in found.walk() if isinstance(i, Loop)]
            assert not any(isinstance(i, AllGather) for loop in loops for i in loop.body)
            assert found.variables["w"].splits == ((), ("data",), ())


def test_a_variable_that_is_read_in_float32_too_is_no_master_copy() -> None:
    assert narrow_reads(model().step_graph) == {"w": DTYPE}
    wide = model(float32=True)
    assert narrow_reads(wide.step_graph) == {}
    found = wide.lower(mtf.Mesh("data:8"), mtf.Layout("batch:data"), mtf.Options(storage={"w": 1}))
    assert found.variables["w"].splits == ((), (), ())


def learned(found: Program, engine: str, weight: str = "w") -> list[np.ndarray]:
    """Losses of three steps, and a weight after them."""
    running = open_engine(found, engine)
    x = np.random.default_rng(0).normal(size=(B.size, D.size)).astype(np.float32)
    losses = [
        np.asarray(running.step({"x": x.reshape(found.values[found.feeds["x"]].shape.sizes)})["loss"])
        for _ in range(3)
    ]
    weights = np.asarray(running.read(weight))
    running.close()
    return [*losses, weights]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_every_stage_learns_the_same_without_loops(engine: str) -> None:
    expected = learned(lowered(written(tied=True), 0, "data:2"), engine, "w0")
    assert expected[2] < expected[0]
    for stage in (1, 2, 3):
        for found, wanted in zip(
            learned(lowered(written(tied=True), stage, "data:2"), engine, "w0"), expected, strict=True
        ):
            np.testing.assert_array_equal(found, wanted, err_msg=f"stage {stage}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["lockstep", "local"])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_stage_learns_the_same(engine: str, parts: int) -> None:
    """To the last bit; but from stage 2 on a microbatch's terms are summed over devices at once, in the half
    precision that they are made in, not with the others after all of them."""
    *expected, weights = learned(program(0, "data:2", parts), engine)
    assert expected[2] < expected[0]
    for stage in (1, 2, 3):
        exact = parts == 1 or stage == 1
        *losses, found = learned(program(stage, "data:2", parts), engine)
        np.testing.assert_allclose(losses, expected, 0.0 if exact else 0.02, err_msg=f"stage {stage}")
        if exact:
            np.testing.assert_array_equal(found, weights, err_msg=f"stage {stage}")


NODES = mtf.Mesh("pod:2;data:2")


def hybrid(stage: str, parts: int = 1, found: mtf.Model | None = None) -> Program:
    """Hybrid sharding: two nodes of two devices, the batch over all."""
    found = found or model()
    stages = {v.name: read_stage(stage) for v in found.graph.variables.values() if v.trainable}
    options = mtf.Options(storage=stages, microbatches=parts)
    return found.lower(NODES, mtf.Layout("batch:pod+data"), options)


def sent(found: Program) -> dict[tuple[str, tuple[str, ...], bool], int]:
    """Kind, axes and whether in a loop, of what is sent of the weights -> how often."""
    inside = {i for loop, _ in found.walk() if isinstance(loop, Loop) for i in loop.body}
    counts: dict[tuple[str, tuple[str, ...], bool], int] = {}
    for instr, _ in found.walk():
        if isinstance(instr, AllGather | ReduceScatter | AllReduce) and (
            "d" in found.values[instr.outputs[0]].shape.names
        ):
            key = instr.name, instr.axes, instr in inside
            counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.mark.parametrize("parts", [1, 2])
def test_hybrid_sharding_gathers_in_a_node_and_sums_between_nodes_once(parts: int) -> None:
    """However many microbatches: what nodes add up waits for the last one."""
    assert sent(hybrid("zero3@data", parts)) == {
        ("all_gather", ("data",), True): 2,
        ("reduce_scatter", ("data",), True): 1,
        ("all_reduce", ("pod",), False): 1,
    }
    assert ("all_gather", ("pod", "data"), True) in sent(hybrid("zero3", parts))


def test_hybrid_sharding_holds_a_node_s_share() -> None:
    """16 bytes a parameter, over the two devices of a node; over all four at stage 3."""
    weights = LAYERS.size * D.size**2
    assert state_bytes(hybrid("zero3@data")) == 16 / 2 * weights + 4
    assert state_bytes(hybrid("zero3@data+pod")) == state_bytes(hybrid("zero3")) == 16 / 4 * weights + 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_hybrid_sharding_learns_the_same(engine: str) -> None:
    exact = written(dtype="float32", tied=True)
    expected = learned(hybrid("layout", 2, exact), engine, "w0")
    for stage in ("zero1@data", "zero2@pod", "zero3@data", "zero3@pod"):
        found = learned(hybrid(stage, 2, exact), engine, "w0")
        for its, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(its, wanted, 1e-5, err_msg=stage)


def test_stages_are_read_and_written() -> None:
    for text in ("layout", "zero1", "zero3@data", "zero2@pod+data"):
        assert str(read_stage(text)) == text
    for text, said in (
        ("zero3@", "name each mesh axis once, e.g. zero3@data+pod"),
        ("zero3@data+data", "name each mesh axis once"),
        ("layout@data", "does not shard variables over further axes; remove"),
        ("hsdp", "use zero3@AXIS; known: "),
    ):
        with pytest.raises(mtf.UserError) as refused:
            read_stage(text)
        assert said in str(refused.value)
    with pytest.raises(mtf.UserError, match="has no axis 'dat'; did you mean 'data'"):
        hybrid("zero3@dat")
