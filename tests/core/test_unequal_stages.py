"""Stages that do not divide the layers: numbers of one device, padding held and nothing else changed."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.liveness import memory
from costmodels.pipeline_bubble import waiting
from costmodels.pricing.compilers.launched import Launched
from costmodels.pricing.pricer import pricer
from costmodels.stage_ends import StageEnd
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import NAMES, ONE_WAY, layer_order, rounds_of
from mesh_tf_core.ir.stage_orders import PADDING, Interleaved
from mesh_tf_core.ops.stages import LayerNumbers
from tests.core.test_one_forward_one_backward import POLICIES
from tests.core.test_pipelines import B, D, E, L, V, batch, options, same
from tests.core.test_pipelines import model as stacking


def model(layers: int, optimizer: mtf.Optimizer | None = None, dropout: float = 0.0) -> mtf.Model:
    """Layers that read a mask and what was learned of each example, and that carry a loss."""
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
        return h + y, total + mtf.reduce_mean(mtf.square(y)) * 0.3

    h, total = mtf.scan(layer, (x, mtf.zeros(g, [], "float64")), mtf.Dim("layers", layers))
    ce = mtf.softmax_cross_entropy(mtf.einsum([h, table], [B, L, V]), labels, V)
    loss = mtf.reduce_sum(ce * valid) / mtf.reduce_sum(valid) + total
    return mtf.Model(loss, optimizer or mtf.SGD(0.3), {"total": total})


def steps(program: Program, count: int = 2) -> tuple[dict[str, float], dict[str, np.ndarray], Any]:
    """Results of the last step, the model's variables afterwards, and the engine."""
    engine = LockstepEngine(program)
    for _ in range(count):
        found = engine.step(batch(program))
    return (
        {name: float(x) for name, x in found.items()},
        {name: np.asarray(engine.read(name)) for name in program.variables},
        engine,
    )


@pytest.fixture(scope="module")
def plain() -> mtf.Model:
    return model(5)


@pytest.fixture(scope="module")
def dense(plain: mtf.Model) -> Any:
    return steps(plain.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]


def check(program: Program, dense: Any) -> None:
    *found, engine = steps(program)
    same(found, dense)
    # Thirds of sums are not exact.
    assert engine.communication_bytes == pytest.approx(program.communication_bytes(), rel=1e-14)
    assert engine.peak_memory_bytes == memory(program).peak


def lowered(built: mtf.Model, mesh: str, layout: str, schedule: str, parts: int, **given: Any) -> Program:
    how = options({**given, "microbatches": parts, "schedule": schedule})
    return built.lower(mtf.Mesh(mesh), mtf.Layout(layout), how)


@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.parametrize(
    "recompute", [set(), {"layers"}, {"layers:keep=products"}, {"layers:count=1"}], ids=str
)
@pytest.mark.one_in(18)
def test_losses_and_variables_are_those_of_one_device(
    schedule: str, recompute: set[str], plain: mtf.Model, dense: Any
) -> None:
    program = lowered(plain, "pipe:2;t:2", "layers:pipe;e:t", schedule, 4, recompute=recompute)
    check(program, dense)
    places = Interleaved(2, rounds_of(schedule)).size(5)
    stored = program.variables["wi"]
    assert stored.value.shape.sizes == (places, 4, 8) and stored.variable.shape.sizes == (5, 4, 8)


NAMED = ["gpipe:first=1", "1f1b:first=4", "1f1b:layers=0+5", "zb-h1:last=2", "circular:2:layers=2+0+2+1"]
NAMED += ["interleaved:2:layers=0+2+3+0", "interleaved:2:layers=1+1+1+2"]


@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.one_in(4)
def test_layers_of_stages_by_name(schedule: str, plain: mtf.Model, dense: Any) -> None:
    program = lowered(plain, "pipe:2;t:2", "layers:pipe;e:t", schedule, 4)
    check(program, dense)
    assert layer_order(schedule, 2).numbers(5).reshape(-1).tolist() != Interleaved(2, 1).numbers(5).tolist()


@pytest.fixture(scope="module")
def eight() -> tuple[mtf.Model, Any]:
    built = model(8)
    return built, steps(built.lower(mtf.Mesh("one:1"), mtf.Layout()), 1)[:2]


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.one_in(6)
def test_only_stages_that_lack_layers_are_masked(schedule: str, eight: tuple[mtf.Model, Any]) -> None:
    """Without given numbers, none does; a program with such numbers computes the same."""
    built, alone = eight
    for ends, stage in (("", 0), (":last=2", 1), (":first=2", 0)):
        program = lowered(built, "pipe:2", "layers:pipe", schedule + ends, 4)
        order, outline = layer_order(schedule + ends, 2), program.outline
        counts = order.counts(8)
        assert counts.sum() == 8
        assert counts[order.virtual[stage, : order.rounds]].sum() == (2 if ends else 4)
        masked = any(isinstance(n.op, LayerNumbers) for n, _ in outline.walk())
        assert masked == (order.lacks(8) > 0) == bool(ends)
    same(steps(program, 1)[:2], alone)


@pytest.mark.parametrize(
    "schedule", ["1f1b:first=9", "1f1b:layers=2+2", "1f1b:layers=5", "1f1b:frst=2", "1f1b:"]
)
def test_layers_that_are_not_those_of_the_model_are_refused(schedule: str, plain: mtf.Model) -> None:
    with pytest.raises(mtf.UserError, match=r"layers|did you mean|known"):
        lowered(plain, "pipe:2", "layers:pipe", schedule, 4)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("ends", ["first=0", "first=3", "last=9", "first=9:last=2", "layers=2+2"])
def test_layers_that_do_not_fit_are_refused_with_those_that_do(ends: str, rounds: int) -> None:
    with pytest.raises(mtf.UserError, match="; write ") as error:
        Interleaved(4, rounds, ends).counts(8)
    for fits in re.findall(r"((?:first|last)=\S+)", str(error.value).partition("; write ")[2]):
        assert Interleaved(4, rounds, fits).counts(8).sum() == 8


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
def test_stages_with_neighbours_on_both_sides(schedule: str, eight: tuple[mtf.Model, Any]) -> None:
    """Results wait in rings of several places, and copies of layers are not next to each other."""
    program = lowered(eight[0], "pipe:4", "layers:pipe", schedule, 8)
    *found, engine = steps(program, 1)
    same(found, eight[1])
    assert engine.communication_bytes == program.communication_bytes()


def test_a_stage_of_its_own_holds_its_layers() -> None:
    """The fullest stage's, wherever it is."""
    built = model(8)
    peaks = {}
    for counts in ("2+2+2+2", "4+2+2+0", "1+5+1+1", "1+1+1+5"):
        program = lowered(built, "pipe:4", "layers:pipe", f"1f1b:layers={counts}", 8)
        found = memory(program, Launched.memory)
        peaks[counts], stage = found.peak, found.stage
        assert stage is {"1+5+1+1": StageEnd.MIDDLE, "1+1+1+5": stage}.get(counts, StageEnd.FIRST)
    assert peaks["4+2+2+0"] > peaks["2+2+2+2"] and peaks["1+5+1+1"] > peaks["2+2+2+2"]


def test_the_ends_may_have_embedding_and_head_alone() -> None:
    built = model(6)
    alone = steps(built.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]
    for schedule in ("circular:2", "interleaved:2"):
        check(lowered(built, "pipe:4", "layers:pipe", schedule, 4), alone)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_random_layouts(seed: int) -> None:
    rng, program = random.Random(seed), None
    built = model(rng.choice([3, 5, 6, 7]))
    while program is None:
        stages, axes = rng.choice([2, 3]), [("a", 2)]
        axes.insert(rng.randrange(2), ("pipe", stages))
        rules = {"layers": "pipe", **{d: "a" for d in ("batch", "e", "d", "length") if rng.random() < 0.3}}
        texts = (";".join(f"{n}:{x}" for n, x in each) for each in (axes, rules.items()))
        schedule, parts = rng.choice(ONE_WAY), rng.choice([1, 2, 4])
        storage = {name: rng.randrange(4) for name in ("wi", "wo", "shared")}
        try:
            again = rng.choice(POLICIES)
            program = lowered(built, *texts, schedule, parts, recompute=again, storage=storage)
        except mtf.UserError:
            continue
    check(program, steps(built.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", [mtf.Adam(0.1), mtf.Adafactor(0.1)], ids=["adam", "adafactor"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved:2"])
def test_states_of_optimizers_and_checkpoints(
    schedule: str, optimizer: mtf.Optimizer, tmp_path: Path
) -> None:
    built = model(5, optimizer)

    def trainer(mesh: str, layout: str, schedule: str) -> mtf.Trainer:
        how = mtf.Options(microbatches=2 if layout else 1, schedule=schedule)
        return mtf.Trainer(built, mesh, layout, options=how, engine="lockstep")

    whole, first = trainer("one:1", "", "gpipe"), trainer("pipe:2", "layers:pipe", schedule)
    rows = batch(whole.program)
    for each in (whole, first):
        each.step(rows)
    first.save(tmp_path)
    other = trainer("pipe:4", "layers:pipe", "1f1b")
    other.restore(tmp_path)
    whole.step(rows)
    other.step(rows)
    for name in whole.program.variables:
        found = other.engine.read(name)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, whole.engine.read(name), 1e-5, 1e-8, err_msg=name)


def test_random_numbers_are_those_of_microbatches_on_one_device() -> None:
    built = model(5, dropout=0.3)
    alone = steps(built.lower(mtf.Mesh("one:1"), mtf.Layout(), mtf.Options(microbatches=4)), 1)
    for schedule in ONE_WAY:
        same(steps(lowered(built, "pipe:2", "layers:pipe", schedule, 4), 1)[:2], alone[:2])


@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (4, 2), (3, 3), (16, 1), (8, 8)])
def test_every_layer_lies_once_and_the_ends_have_less(stages: int, rounds: int) -> None:
    order, parts = Interleaved(stages, rounds), stages * rounds
    for layers in (parts - 2, parts, parts + 1, 2 * parts - 2, 126):
        if layers < max(parts - 2, 1):
            continue
        numbers = order.numbers(layers)
        assert sorted(n for n in numbers.reshape(-1) if n != PADDING) == list(range(layers))
        assert order.moves(layers) == (rounds > 1 or layers % parts > 0)
        by_number = numbers.reshape(stages, rounds, -1).transpose(1, 0, 2).reshape(parts, -1)
        assert [n for row in by_number for n in row if n != PADDING] == list(range(layers))
        lacks = [PADDING in row for row in by_number]
        if sum(lacks) == 2:
            assert lacks[0] and lacks[-1]
        at = [
            (first + i, place + i)
            for first, n, place in order.runs(layers, 0, numbers.size)
            for i in range(n)
        ]
        flat = numbers.reshape(-1)
        assert sorted(at) == sorted((int(flat[p]), p) for p in range(flat.size) if flat[p] != PADDING)


def test_what_stages_lack_is_said(plain: mtf.Model) -> None:
    for schedule, stages, places, empty in (("1f1b", 2, 6, 1), ("1f1b", 4, 8, 3), ("dualpipe", 2, 12, 2)):
        program = lowered(plain, f"pipe:{stages}", "layers:pipe", schedule, 4)
        cost = pricer(load_hardware("tpu-v5e"), program.mesh).cost(program)
        found = waiting(program, cost)
        assert found is not None and (found.places, found.empty) == (places, empty)


def test_a_mask_that_is_left_out_is_seen(plain: mtf.Model, dense: Any, monkeypatch: Any) -> None:
    def one_more(order: Interleaved, layers: int) -> np.ndarray:
        numbers = numbered(order, layers)
        return np.where(numbers == PADDING, 0, numbers)

    numbered = Interleaved.numbers
    program = lowered(plain, "pipe:2", "layers:pipe", "1f1b", 2)
    engine = LockstepEngine(program)
    monkeypatch.setattr(Interleaved, "numbers", one_more)
    found = engine.step(batch(program))
    monkeypatch.undo()
    expected = LockstepEngine(program).step(batch(program))
    assert abs(float(found["loss"]) - float(expected["loss"])) > 1e-6


def test_what_it_cannot_do_is_refused_with_what_to_do(plain: mtf.Model) -> None:
    for built, mesh, schedule, why in (
        (plain, "pipe:8", "gpipe", "are too many for a loop of 5 layers; use fewer stages"),
        (plain, "pipe:4", "interleaved:2", "stages times 2 rounds are too many for a loop of 5 layers; use"),
        (
            stacking(),
            "pipe:3",
            "gpipe",
            "stages do not divide the 4 layers, which is required because an",
        ),
        (
            stacking(),
            "pipe:3",
            "1f1b",
            "stages do not divide the 4 layers, which is required because an",
        ),
    ):
        with pytest.raises(mtf.UserError, match=why) as error:
            lowered(built, mesh, "layers:pipe", schedule, 2)
        assert "\n" not in str(error.value)
