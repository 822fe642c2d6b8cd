"""Circular schedules give the numbers of one device, whatever the number of rounds; devices wait as long as
the closed form says, and what is saved is in the order of the model."""

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
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.pieces import in_order, in_runs, lying, runs
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.instructions import Local, Permute
from mesh_tf_core.ir.program import Program, Stored
from mesh_tf_core.ir.schedules import PipelineSchedule
from mesh_tf_core.ir.stage_orders import Interleaved
from mesh_tf_core.ir.values import Loop
from mesh_tf_core.lower.verify import verify
from tests.core.test_pipelines import FAULTS, changed, options, same

B, D, L = mtf.Dim("batch", 12), mtf.Dim("d", 4), mtf.Dim("layers", 8)
E = mtf.Dim("e", 8)


def model(linear: bool = True, optimizer: mtf.Optimizer | None = None) -> mtf.Model:
    """Layers that read a stack which is not a variable, carry and stack losses; a variable that is read
    outside of them too, and one that they store."""
    g = mtf.Graph()
    x = g.input("x", [B, D], "float64")
    rates = mtf.mtf_range(g, L, "float64") * 0.01 + 0.9

    def layer(state: tuple[mtf.Tensor, mtf.Tensor], rate: mtf.Tensor) -> Any:
        h, total = state
        wi = g.variable("wi", [D, E], mtf.Normal(0.5), "float64")
        inner = mtf.tanh(mtf.einsum([h, wi], [B, E]))
        y = mtf.einsum([inner, g.variable("wo", [E, D], mtf.Normal(0.5), "float64")], [B, D]) * rate
        size = mtf.reduce_mean(mtf.square(y))
        norm = mtf.reduce_sum(mtf.square(wi)) * rate
        return (h + y, total + size * 0.3), [size, norm]

    start = x * g.variable("shared", [D], mtf.Normal(0.5), "float64"), mtf.zeros(g, [], "float64")
    (h, total), (sizes, norms) = mtf.scan(layer, start, L, [rates])
    by_layer = mtf.reduce_sum(mtf.square(g.read(g.variables["wo"])), [E, D])
    more = mtf.reduce_sum(sizes if linear else mtf.square(sizes) * rates) + mtf.reduce_sum(norms) * 0.01
    weighted = mtf.reduce_sum(by_layer * mtf.square(rates)) * 0.02
    loss = mtf.reduce_mean(mtf.square(h - 1.0)) + total + more + weighted
    return mtf.Model(loss, optimizer or mtf.Adam(0.05), {"total": total})


def batch() -> dict[str, Any]:
    return {"x": np.random.default_rng(4).normal(size=(12, 4))}


def steps(program: Program) -> tuple[dict[str, float], dict[str, Any], Any]:
    """Results of the second step, the variables afterwards, and the engine."""
    engine = open_engine(program, "lockstep")
    fed = {n: x.reshape(program.values[program.feeds[n]].shape.sizes) for n, x in batch().items()}
    engine.step(fed)
    results = {name: float(x) for name, x in engine.step(fed).items()}
    return results, {name: np.asarray(engine.read(name)) for name in program.variables}, engine


@pytest.fixture(scope="module")
def plain() -> mtf.Model:
    return model()


@pytest.fixture(scope="module")
def dense(plain: mtf.Model) -> Any:
    return steps(plain.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]


def lowered(
    built: mtf.Model, mesh: str, layout: str, parts: int, rounds: int, order: str = "circular", **given: Any
) -> Program:
    how = options({**given, "microbatches": parts, "schedule": f"{order}:{rounds}"})
    return built.lower(mtf.Mesh(mesh), mtf.Layout(layout), how)


FURTHER = {"wi": 3, "wo": 2, "shared": 1}
CASES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("pipe:2", "layers:pipe", 4, 2, {}),
    ("pipe:2", "layers:pipe", 3, 4, {"recompute": {"layers"}}),
    ("pipe:4", "layers:pipe", 6, 2, {"storage": FURTHER}),
    ("t:2;pipe:2", "layers:pipe;e:t", 2, 2, {"recompute": {"tick"}, "storage": FURTHER}),
    ("a:2;b:2", "layers:b+a", 1, 2, {}),
]


def check(program: Program, dense: Any, rounding: float = 1e-9) -> None:
    *found, engine = steps(program)
    for mine, theirs in zip(found, dense, strict=True):
        for name, x in theirs.items():
            np.testing.assert_allclose(mine[name], x, rounding, rounding * 1e-3, err_msg=name)
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.variable_bytes == sum(s.value.local_bytes(program.mesh) for s in program.variables.values())


@pytest.mark.parametrize(("mesh", "layout", "parts", "rounds", "given"), CASES)
@pytest.mark.one_in(2)
def test_losses_and_variables_are_those_of_one_device(
    mesh: str, layout: str, parts: int, rounds: int, given: dict[str, Any], plain: mtf.Model, dense: Any
) -> None:
    check(lowered(plain, mesh, layout, parts, rounds, **given), dense)


@pytest.mark.parametrize(("stages", "parts", "rounds"), [(2, 4, 4), (4, 4, 2)])
def test_what_is_sent_and_what_waits(stages: int, parts: int, rounds: int, plain: mtf.Model) -> None:
    schedule = PipelineSchedule("circular", stages, parts, rounds)
    program = lowered(plain, f"pipe:{stages}", "layers:pipe", parts, rounds, recompute={"layers"})
    sent, done = dict.fromkeys(("forward", "backward"), 0), dict.fromkeys(("forward", "recompute"), 0)
    for instr, times in program.walk():
        names = {n for i in (*instr.inputs, *instr.outputs) for n in program.values[i].shape.names}
        phase = instr.origin.phase
        if isinstance(instr, Permute) and program.values[instr.inputs[0]].shape.names[-1:] == ("d",):
            sent[phase] += times
        if isinstance(instr, Local) and instr.op.name == "einsum" and "e" in names and phase in done:
            done[phase] += times
    assert sent == {"forward": schedule.ticks, "backward": schedule.ticks}
    # Two products for each layer of a chunk at every tick, forward; those of the microbatches are of use.
    useful = 2 * parts * (8 // stages)
    assert 1 - useful / done["forward"] == pytest.approx(schedule.idle())
    cost = pricer(load_hardware("tpu-v5e"), program.mesh).cost(program)
    found = waiting(program, cost)
    assert found is not None and found.schedule == schedule and schedule.ticks - schedule.works == stages - 1
    slots = end_work(program.outline).slots  # type: ignore[arg-type]
    lines = (x for x in cost.lines if x.origin.node in slots and x.times > 1 and x.times % 1 == 0)
    ticking = sum(x.exposed * x.times for x in lines)
    assert 0 < found.seconds == pytest.approx(ticking * schedule.idle())


def test_optimizer_states_lie_as_their_variables() -> None:
    built = model(optimizer=mtf.Adafactor(0.1))
    program = lowered(built, "pipe:2;t:2", "layers:pipe;e:t", 2, 2, storage=FURTHER)
    orders = {name: stored.variable.order for name, stored in program.variables.items()}
    assert len(orders) > 4
    for name, order in orders.items():
        assert (order == Interleaved(2, 2)) is (name.partition("/")[0] in ("wi", "wo")), name
    # Its states are float32.
    check(program, steps(built.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2], 1e-5)


def test_checkpoints_do_not_know_of_rounds(plain: mtf.Model, tmp_path: Path) -> None:
    def trainer(mesh: str, layout: str, schedule: str) -> mtf.Trainer:
        how = mtf.Options(microbatches=4, schedule=schedule)
        return mtf.Trainer(plain, mesh, layout, options=how, engine="lockstep")

    whole = trainer("one:1", "", "gpipe")
    ways = [("pipe:2", "layers:pipe", n) for n in ("circular:4", "circular:2", "gpipe")]
    first, *others = (trainer(*way) for way in ways)
    for each in (whole, first):
        each.step(batch())
    assert first.evaluate([batch()]) == pytest.approx(whole.evaluate([batch()]))
    first.save(tmp_path)
    expected = whole.step(batch())["loss"]
    for other in others:
        other.restore(tmp_path)
        assert float(other.step(batch())["loss"]) == pytest.approx(float(expected))
        for name in other.program.variables:
            np.testing.assert_allclose(other.engine.read(name), whole.engine.read(name), 1e-9, 1e-12)


@pytest.mark.parametrize(("stages", "rounds", "pieces"), [(2, 3, 2), (2, 2, 4), (4, 2, 8), (2, 2, 8)])
def test_pieces_are_made_of_what_the_model_has_there(stages: int, rounds: int, pieces: int) -> None:
    size = 24
    shape = mtf.Shape([mtf.Dim("layers", size), D])
    stored = Stored(
        Variable("w", shape, "float64", mtf.ZEROS, order=Interleaved(stages, rounds)),
        ((), ()),
    )
    array = np.arange(size * 4.0).reshape(size, 4)

    def read(begin: tuple[int, ...], extent: Any) -> Any:
        return array[begin[0] : begin[0] + extent[0], begin[1] : begin[1] + extent[1]]

    there, own = lying(stored, array), size // pieces
    for piece in range(pieces):
        part = in_runs(stored, read)((piece * own, 1), (own, 2))
        np.testing.assert_array_equal(part, there[piece * own : (piece + 1) * own, 1:3])
    chunk = size // (stages * rounds)
    for stage in range(stages):
        for turn in range(rounds):
            at, model = (stage * rounds + turn) * chunk, (turn * stages + stage) * chunk
            np.testing.assert_array_equal(there[at : at + chunk], array[model : model + chunk])
    np.testing.assert_array_equal(in_order(stored, there), array)
    # What a process of several writes of it.
    saved, found = np.zeros_like(array), runs(stored, (own, 0), (own, 4))
    assert len({run.sizes for run in found}) == 1
    for run in found:
        saved[run.begin[0] : run.begin[0] + run.sizes[0]] = there[own : 2 * own][run.within]
    held = (saved != 0).any(1)
    assert held.sum() == own
    np.testing.assert_array_equal(saved[held], array[held])


@pytest.mark.parametrize("fault", [*FAULTS, "another chunk's turn", "layers lie as the model has them"])
def test_planted_faults_are_seen(fault: str, plain: mtf.Model, dense: Any) -> None:
    program = lowered(plain, "pipe:2", "layers:pipe", 2, 2)
    if fault in FAULTS and "goes the other way" not in fault and "gradients" not in fault:
        broken = replace(program, code=changed(program.code, FAULTS[fault]))
    elif fault in FAULTS:
        # Round two stages both ways are one: the ends are not joined instead.
        phase = "forward" if "state" in fault else "backward"
        broken = replace(program, code=changed(program.code, lambda i: _open(i, phase)))
    elif fault.startswith("another"):
        broken = replace(program, code=changed(program.code, another_turn))
    else:
        lies = {
            name: replace(stored, variable=replace(stored.variable, order=None))
            for name, stored in program.variables.items()
        }
        broken = replace(program, variables=lies)
    assert broken != program
    with pytest.raises(AssertionError):
        same(steps(verify(broken))[:2], dense)


def _open(instr: Any, phase: str) -> Any:
    permutes = isinstance(instr, Permute) and instr.origin.phase == phase
    return replace(instr, wrap=False) if permutes else None


def another_turn(instr: Any) -> Any:
    """A forward loop from where its stage is, not its turn."""
    if not isinstance(instr, Loop) or instr.dim.name != "tick":
        return None
    local = [i for i in instr.body if isinstance(i, Local)]
    numbers = [i.outputs for i in local if i.op.name == "stagenumbers"]
    stages = [i.outputs[0] for i in local if i.op.name == "stagepart" and i.inputs in numbers]
    if not stages:
        return None
    body = tuple(
        i.remade(first=stages[0]) if isinstance(i, Loop) and i.first is not None else i for i in instr.body
    )
    return instr.remade(body=body)


def refused(why: str, mesh: str, schedule: str, built: mtf.Model, layout: str = "layers:pipe") -> None:
    with pytest.raises(mtf.UserError, match=why) as error:
        built.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(microbatches=2, schedule=schedule))
    assert "\n" not in str(error.value)


def test_what_it_cannot_do_is_refused_with_what_to_do(plain: mtf.Model) -> None:
    refused("stages do not divide the 8 layers, which is required because an", "pipe:2", "circular:3", plain)
    refused("stages times 3 rounds are too many for a loop of 8 layer", "pipe:8", "circular:3", plain)
    refused(
        "a schedule needs pipeline stages, and the layout has none", "pipe:2", "circular:2", plain, "e:pipe"
    )
    for schedule in ("circular", "circular:1", "circular:x", "circular:"):
        refused(f"schedule '{schedule}': write the number of rounds", "pipe:2", schedule, plain)
    refused("schedule 'circulr:2': did you mean 'circular:2'", "pipe:2", "circulr:2", plain)
