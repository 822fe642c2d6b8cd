"""Pipelines: what splits the layers gives the numbers of one device, and the program says what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pipeline_bubble import waiting
from costmodels.pricing.pricer import pricer
from costmodels.stage_ends import end_work
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.instructions import AllReduce, Instr, Local, Permute
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import ONE_WAY, PipelineSchedule
from mesh_tf_core.ir.values import Loop
from mesh_tf_core.lower.verify import verify
from tests.layoutopt.models import nested as loops_in_groups

B, L, D = mtf.Dim("batch", 8), mtf.Dim("length", 3), mtf.Dim("d", 4)
E, V = mtf.Dim("e", 8), mtf.Dim("vocabulary", 8)
LAYERS = mtf.Dim("layers", 4)


def model(dropout: float = 0.0, linear: bool = True, layers: mtf.Dim = LAYERS) -> mtf.Model:
    """Layers that read, besides their state, a mask and what was learned of each example, and that carry and
    stack losses; `linear`: what they stack is only added to the loss."""
    g = mtf.Graph()
    ids, labels = g.input("ids", [B, L]), g.input("labels", [B, L])
    table = g.variable("table", [V, D], mtf.Normal(0.5), "float64")
    shared = g.variable("shared", [D], mtf.Normal(0.5), "float64")
    x = mtf.gather(table, ids, V)
    valid, context = (ids > 0).cast("float64"), mtf.reduce_sum(x, L)

    def layer(state: tuple[mtf.Tensor, mtf.Tensor]) -> Any:
        h, total = state
        wi = g.variable("wi", [D, E], mtf.Normal(0.5), "float64")
        wo = g.variable("wo", [E, D], mtf.Normal(0.5), "float64")
        inner = mtf.tanh(mtf.einsum([h * shared, wi], [B, L, E]))
        inner = mtf.dropout(inner, dropout) if dropout else inner
        y = mtf.einsum([inner, wo], [B, L, D]) * valid + context * 0.1
        size = mtf.reduce_mean(mtf.square(y))
        return (h + y, total + size * 0.3), [size, mtf.reduce_sum(mtf.square(wi))]

    state, (sizes, norms) = mtf.scan(layer, (x, mtf.zeros(g, [], "float64")), layers)
    h, total = state
    ce = mtf.softmax_cross_entropy(mtf.einsum([h, table], [B, L, V]), labels, V)
    more = mtf.reduce_sum(sizes if linear else mtf.square(sizes)) + mtf.reduce_sum(norms) * 0.01
    loss = mtf.reduce_sum(ce * valid) / mtf.reduce_sum(valid) + total + more
    return mtf.Model(loss, mtf.SGD(0.3), {"total": total})


def example(schedule: str = "gpipe") -> Program:
    """A pipeline beside other splits, for engines."""
    given = mtf.Options({"wi": 3, "wo": 2}, frozenset({"layers"}), 4, schedule=schedule)
    return model(0.2).lower(mtf.Mesh("pipe:2;t:2"), mtf.Layout("layers:pipe;e:t;vocabulary:t+pipe"), given)


def batch(program: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    found = {"ids": rng.integers(0, 6, (8, 3)), "labels": rng.integers(0, 6, (8, 3))}
    return {n: x.reshape(program.values[program.feeds[n]].shape.sizes) for n, x in found.items()}


def steps(program: Program, count: int = 2) -> tuple[dict[str, float], dict[str, np.ndarray], Any]:
    """Results of the last step, the variables afterwards, and the engine."""
    engine = LockstepEngine(program)
    for _ in range(count):
        found = engine.step(batch(program))
    results = {name: float(x) for name, x in found.items()}
    return results, {name: np.asarray(engine.read(name)) for name in program.variables}, engine


@pytest.fixture(scope="module")
def plain() -> mtf.Model:
    return model()


@pytest.fixture(scope="module")
def dense(plain: mtf.Model) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    results, variables, _ = steps(plain.lower(mtf.Mesh("one:1"), mtf.Layout()))
    return results, variables


def same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=False):
        for name, x in theirs.items():
            np.testing.assert_allclose(mine[name], x, rtol=1e-9, atol=1e-12, err_msg=name)


FURTHER = {"wi": 3, "wo": 2, "table": 1, "shared": 3}
TICKS = {"recompute": {"tick"}, "storage": FURTHER}
BOTH = {"recompute": {"tick", "layers"}, "storage": FURTHER}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("pipe:2", "layers:pipe", {"microbatches": 4}),
    ("pipe:4", "layers:pipe", {"microbatches": 1}),
    ("pipe:4;data:2", "layers:pipe;batch:data;vocabulary:pipe", {"microbatches": 2}),
    ("t:2;pipe:2", "layers:pipe;e:t;vocabulary:pipe+t", {"microbatches": 8}),
    ("a:2;b:2", "layers:b+a", {"microbatches": 4}),
    ("pipe:2;data:2", "layers:pipe;batch:data", {"microbatches": 4, "recompute": {"layers"}}),
    ("pipe:2;t:2", "layers:pipe;e:t", {"microbatches": 2, "recompute": {"layers:keep=products"}}),
    ("pipe:2;data:2", "layers:pipe;batch:data", {"microbatches": 2, **TICKS}),
    ("pipe:2;t:2", "layers:pipe;d:t", {"microbatches": 4, **BOTH}),
]


def options(given: dict[str, Any]) -> mtf.Options:
    return mtf.Options(**{**given, "recompute": frozenset(given.get("recompute", ()))})


@pytest.mark.parametrize(("mesh", "layout", "given"), CASES)
@pytest.mark.one_in(3)
def test_losses_and_variables_are_those_of_one_device(
    mesh: str, layout: str, given: dict[str, Any], plain: mtf.Model, dense: Any
) -> None:
    program = plain.lower(mtf.Mesh(mesh), mtf.Layout(layout), options(given))
    *found, engine = steps(program)
    same(found, dense)
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.variable_bytes == sum(s.value.local_bytes(program.mesh) for s in program.variables.values())


def test_a_stage_holds_its_layers_alone(plain: mtf.Model) -> None:
    program = plain.lower(mtf.Mesh("pipe:4"), mtf.Layout("layers:pipe"), mtf.Options(microbatches=2))
    assert program.variables["wi"].splits == (("pipe",), (), ())


@pytest.mark.parametrize(("stages", "parts"), [(2, 8), (4, 4)])
def test_what_is_sent_and_what_waits_is_what_the_schedule_says(
    stages: int, parts: int, plain: mtf.Model
) -> None:
    schedule = PipelineSchedule("gpipe", stages, parts)
    assert schedule.idle() == (stages - 1) / (parts + stages - 1)
    program = plain.lower(
        mtf.Mesh(f"pipe:{stages}"), mtf.Layout("layers:pipe"), mtf.Options(microbatches=parts)
    )
    sent: dict[tuple[str, str, tuple[int, ...]], int] = {}
    done = 0
    for instr, times in program.walk():
        if isinstance(instr, Permute):
            v = program.values[instr.inputs[0]]
            key = v.dtype, instr.origin.phase, v.local(program.mesh).shape.sizes
            sent[key] = sent.get(key, 0) + times
        if isinstance(instr, Local) and instr.op.name == "einsum" and instr.origin.phase == Phase.FORWARD:
            done += times if instr.origin.scope == "" and "e" in _names(program, instr) else 0
    rows = 8 // parts
    state, context = (1, rows, 3, 4), (1, rows, 4)
    for phase in ("forward", "backward"):
        for sizes in (state, context, (1,)):
            assert sent.pop(("float64", phase, sizes)) == schedule.ticks, (phase, sizes)
    assert not sent
    # Two products for each of a stage's layers at every tick; those of the microbatches are of use.
    useful = 2 * parts * (4 // stages)
    assert 1 - useful / done == pytest.approx(schedule.idle())


@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.one_in(4)
def test_devices_that_have_the_same_state_send_a_part_each(schedule: str) -> None:
    built = model()
    how = options({"microbatches": 2, "schedule": schedule})
    alone, parts = (
        built.lower(mtf.Mesh(mesh), mtf.Layout("layers:pipe"), how) for mesh in ("pipe:2", "pipe:2;t:2")
    )
    for instr, _ in parts.walk():
        if isinstance(instr, Permute):
            v = parts.values[instr.inputs[0]]
            assert v.local(parts.mesh).shape.size == max(v.shape.size // 4, 1)
    *found, engine = steps(parts)
    same(found, steps(alone)[:2])
    assert engine.communication_bytes == parts.communication_bytes()


def test_how_long_stages_wait_is_their_share_of_what_the_ticks_take(plain: mtf.Model) -> None:
    given = mtf.Options(recompute=frozenset({"layers"}), microbatches=4)
    program = plain.lower(mtf.Mesh("pipe:4;t:2"), mtf.Layout("layers:pipe;e:t"), given)
    cost = pricer(load_hardware("tpu-v5e"), program.mesh).cost(program)
    found = waiting(program, cost)
    assert found is not None
    of = found.schedule
    assert (found.dim, of.stages, of.ticks, of.works) == ("layers", 4, 7, 4)
    # What runs in the slots of stages: the same in the sum as seven ticks of each kind.
    slots = end_work(program.outline).slots  # type: ignore[arg-type]
    ticking = sum(x.exposed * x.times for x in cost.lines if x.origin.node in slots and x.times > 1)
    assert 0 < found.seconds == pytest.approx(ticking * 3 / 7)


def _names(program: Program, instr: Instr) -> set[str]:
    return {n for i in (*instr.inputs, *instr.outputs) for n in program.values[i].shape.names}


def test_a_trainer_saves_and_evaluates_under_any_layout(plain: mtf.Model, tmp_path: Path) -> None:
    def trainer(mesh: str, layout: str, parts: int) -> mtf.Trainer:
        return mtf.Trainer(plain, mesh, layout, options=mtf.Options(microbatches=parts), engine="lockstep")

    data = batch(plain.lower(mtf.Mesh("one:1"), mtf.Layout()))
    piped, one = trainer("pipe:4;t:2", "layers:pipe;e:t", 4), trainer("one:1", "", 1)
    for each in (piped, one):
        each.step(data)
    whole = [one.evaluate([data]), piped.evaluate([data])]
    assert whole[1] == pytest.approx(whole[0])
    piped.save(tmp_path)
    others = trainer("pipe:2", "layers:pipe", 2), trainer("pipe:1;t:2", "layers:pipe;e:t", 2)
    for each in (*others, one):
        each.restore(tmp_path)
    loss = float(one.step(data)["loss"])
    for other in others:
        assert other.evaluate([data]) == pytest.approx(whole[0])
        assert float(other.step(data)["loss"]) == pytest.approx(loss)


def changed(code: tuple[Instr, ...], change: Any) -> tuple[Instr, ...]:
    """Code with another instruction for every one of which `change` makes one, in loops too."""
    made: list[Instr] = []
    for instr in code:
        if isinstance(instr, Loop):
            instr = instr.remade(body=changed(instr.body, change))
        made.append(change(instr) or instr)
    return tuple(made)


FAULTS = {
    "the state goes the other way": lambda i: (
        replace(i, shift=-i.shift) if isinstance(i, Permute) and i.origin.phase == Phase.FORWARD else None
    ),
    "gradients go on": lambda i: (
        replace(i, shift=-i.shift) if isinstance(i, Permute) and i.origin.phase == Phase.BACKWARD else None
    ),
    "the first stage alone counts": lambda i: (
        replace(i, combine="min") if isinstance(i, AllReduce) and i.axes == ("pipe",) else None
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, plain: mtf.Model, dense: Any) -> None:
    program = plain.lower(mtf.Mesh("pipe:2"), mtf.Layout("layers:pipe"), mtf.Options(microbatches=2))
    broken = replace(program, code=changed(program.code, FAULTS[fault]))
    assert broken.code != program.code
    with pytest.raises(AssertionError):
        same(steps(verify(broken))[:2], dense)


def refused(layout: str, why: str, built: mtf.Model, mesh: str = "pipe:2;t:2", **given: Any) -> None:
    with pytest.raises(mtf.UserError, match=why) as error:
        built.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(**given))
    assert "\n" not in str(error.value)


def test_what_cannot_be_a_pipeline_is_refused_with_what_to_do(plain: mtf.Model) -> None:
    refused("layers:pipe;batch:pipe", "both 'layers' and 'batch' split over mesh axis 'pipe'", plain)
    refused("layers:pipe", "stages do not divide the 4 layers, which is required because an", plain, "pipe:3")
    refused("layers:pipe", "microbatches=3: the size of 'batch',", plain, microbatches=3)
    for rule in (
        "microbatch:t",
        "microbatch@elsewhere:t",
    ):  # a piece of a part would be asked of other devices
        said = ", because its iterations "
        refused(f"layers:pipe;{rule}", said, plain, microbatches=2)
    g = mtf.Graph()
    x = g.input("x", [B, D], "float64")

    def centred(h: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [D], mtf.ONES, "float64")
        return (h - mtf.reduce_mean(h, B)) * w

    mixing = mtf.Model(mtf.reduce_mean(mtf.square(mtf.scan(centred, x, LAYERS))))
    refused("layers:pipe", "over 'layers': loss is not a sum over the microbatches, because of sub", mixing)

    g = mtf.Graph()
    x = g.input("x", [B, D], "float64")

    def inner(h: mtf.Tensor) -> mtf.Tensor:
        return h * g.variable("w", [D], mtf.ONES, "float64")

    nested = mtf.scan(lambda h: mtf.scan(inner, h, LAYERS), x, mtf.Dim("groups", 2))
    refused("layers:pipe", "inside another", mtf.Model(mtf.reduce_mean(mtf.square(nested))))
    refused("groups:pipe", "reversible layers are not supported", loops_in_groups(True), "pipe:3")

    g = mtf.Graph()
    x = g.input("x", [B, D], "float64")

    def numbered(h: mtf.Tensor) -> mtf.Tensor:
        bias = mtf.reduce_sum(mtf.exp(mtf.mtf_range(g, E, "float64") * -1.0))
        return h * g.variable("w", [D], mtf.ONES, "float64") + bias

    inside = mtf.Model(mtf.reduce_mean(mtf.square(mtf.scan(numbered, x, LAYERS))))
    refused("layers:pipe;e:pipe", "axis 'pipe' already separates the pipeline stages, so it", inside)
