"""Bounds of problems by their layers, of pipelines by those without stages: no layout of any of them takes
less by its tables."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels import load_hardware
from costmodels.pricing.pricer import pricer
from costmodels.stage_times import HEAD
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.evaluation.evaluator import Evaluator, evaluate
from layoutopt.optimize.problems.bounds import SLACK, BoundSource, ProvenBounds
from layoutopt.optimize.problems.subproblems import Subproblem, SubproblemKey, listed, related, subproblems
from layoutopt.optimize.proof import layer_bounds
from layoutopt.optimize.proof.fixing import option_costs
from layoutopt.optimize.proof.layer_bounds import STORED, LayerBounds
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.kind import Target
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import ONE_WAY
from tests.layoutopt.every_kind import opened, some_machine, whole_model
from tests.layoutopt.models import some_choices
from tests.marks import by_day

WIDE = 64
"""Times the width of whole models with which gradients are too large to travel together."""


def pipelines(seed: int, most: int, times: int) -> tuple[Evaluator, list[Subproblem]]:
    """Some pipelines of every schedule, and a problem without stages, with every kind of decision free."""
    rng, model = random.Random(seed), whole_model(seed, times)
    mesh, machine = mtf.Mesh(rng.choice(["x:2;y:2", "x:4"])), some_machine(rng)
    evaluator, target = Evaluator(model, machine), Target.on(machine, model, mesh)
    allowed = opened(rng, model).but(**ScheduleDecision.widest(target), pipeline=("layers",))
    every = [p for p in subproblems(model, [mesh], allowed, evaluator.near) if not p.refused]
    staged = [p for p in every if p.key.stages]
    found = rng.sample(staged, min(most, len(staged)))
    return evaluator, [*found, rng.choice([p for p in every if not p.key.stages])]


def compared(seed: int, most: int, times: int = 1) -> Iterator[tuple[float, float]]:
    """The bounds of such problems by their layers, and their least seconds by their tables."""
    evaluator, every = pipelines(seed, most, times)
    layers = LayerBounds(evaluator)
    for each in every:
        layers.prove(each, math.inf)
        found = [b.value for b in each.bounds.proven if b.source is BoundSource.LAYERS]
        yield max(found, default=0.0), each.opened(evaluator).relaxed()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", by_day(range(10), every=5))
def test_no_layout_takes_less_than_its_layers(seed: int) -> None:
    found = [*compared(seed, 1, (1, WIDE)[seed % 2])]
    assert found and all(0 < bound <= least * (1 + SLACK) for bound, least in found)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 40))
def test_no_layout_of_many_takes_less_than_its_layers(seed: int) -> None:
    assert all(0 < bound <= least * (1 + SLACK) for bound, least in compared(seed, 12, (1, WIDE)[seed % 2]))


def recomputing(seed: int, most: int) -> tuple[Evaluator, list[Subproblem]]:
    """Pipelines whose stages recompute something, with every kind of decision free."""
    rng, model = random.Random(seed), whole_model(seed)
    mesh, machine = mtf.Mesh(rng.choice(["x:2;y:2", "x:4"])), some_machine(rng)
    evaluator, target = Evaluator(model, machine), Target.on(machine, model, mesh)
    allowed = opened(rng, model).but(**ScheduleDecision.widest(target), pipeline=("layers",))
    allowed = allowed.but(recompute=(False, "selective", "some", True))
    every = [p for p in subproblems(model, [mesh], allowed, evaluator.near) if p.key.again and not p.refused]
    return evaluator, rng.sample(every, min(most, len(every)))


def first_runs(seed: int, most: int) -> Iterator[tuple[float, float]]:
    """The bounds of pipelines by the first runs of their stages, and their least seconds by their tables."""
    evaluator, every = recomputing(seed, most)
    for each in every:
        LayerBounds(evaluator).prove(each, 1e9)
        found = [b.value for b in each.bounds.proven if b.source is BoundSource.FIRST_RUNS]
        yield max(found, default=0.0), (least := each.opened(evaluator).relaxed())
        yield from excluded(evaluator, each, 1.01 * least)


def excluded(evaluator: Evaluator, of: Subproblem, enough: float) -> Iterator[tuple[float, float]]:
    """What first runs say that options take which no layout as fast has, and what they take by the tables."""
    plain = replace(of, bounds=ProvenBounds())
    LayerBounds(evaluator).prove(plain, enough)
    costs = option_costs(of.opened(evaluator), of.decided, 1e9) or {}
    for name, found in plain.bounds.costs.items():
        yield from ((low, costs[name][o]) for o, low in found.items() if o in costs.get(name, {}))


def test_first_runs_show_no_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of slower layouts were removed, so what is left may take longer than all there are."""
    evaluator, (each,) = recomputing(0, 1)
    monkeypatch.setattr(layer_bounds, "fix_options", lambda *_: 3.0)
    monkeypatch.setattr(LayerBounds, "_bound", lambda *_: 0.0)
    layers = LayerBounds(evaluator)
    for enough in (1.0, 2.0):
        layers.prove(each, enough)
        assert each.bounds.lower().source is BoundSource.FIRST_RUNS and each.bounds.lower().value == 1.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [0, 5])
def test_no_recomputation_takes_less_than_the_first_runs(seed: int) -> None:
    found = [*first_runs(seed, 2)]
    assert any(bound for bound, _ in found) and all(bound <= least * (1 + SLACK) for bound, least in found)


def test_excluding_what_first_runs_leave_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerBounds, "_bound", lambda *_: 0.0)
    evaluator, (each,) = recomputing(5, 1)
    enough = 1.01 * each.opened(evaluator).relaxed()
    left = [*excluded(evaluator, each, enough)]
    assert left and all(low <= least * (1 + SLACK) for low, least in left)
    own = layer_bounds.removed
    monkeypatch.setattr(
        layer_bounds,
        "removed",
        lambda draft, asked, known: (
            own(draft, asked, known) | {n: dict.fromkeys(asked.options[n], known) for n in asked.of(Split)}
        ),
    )
    assert any(low > least for low, least in excluded(evaluator, each, enough))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(14, 40))
def test_no_recomputation_of_many_takes_less_than_the_first_runs(seed: int) -> None:
    assert all(bound <= least * (1 + SLACK) for bound, least in first_runs(seed, 6))


@pytest.mark.nightly
def test_counting_what_is_saved_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What recomputation makes superfluous is no part of the bound."""
    monkeypatch.setattr(layer_bounds, "_saves", lambda *_: False)
    assert any(bound > least for seed in (0, 3) for bound, least in first_runs(seed, 3))


def test_layers_that_a_stage_lacks_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a stage had the layers of all stages, the bound would exceed the tables."""
    own = Evaluator.slot_runs
    monkeypatch.setattr(
        Evaluator,
        "slot_runs",
        lambda of, mesh, dim, plan: tuple(plan.stages * r for r in own(of, mesh, dim, plan)),
    )
    assert any(bound > least for seed in range(3) for bound, least in compared(seed, 2))


def test_messages_that_no_tick_sends_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine times as many messages between stages would exceed the tables."""
    own = LayerBounds._handed
    monkeypatch.setattr(LayerBounds, "_handed", lambda *asked: 9 * own(*asked))
    assert any(bound > least for bound, least in compared(4, 1))


def heads(seed: int, most: int) -> Iterator[tuple[float, float]]:
    """The bounds of pipelines of language models under a framework by their layers and heads, and their least
    seconds by their tables."""
    rng, mesh, name = random.Random(seed), mtf.Mesh("x:2;y:2"), ("megatron", "torchtitan", "torch")[seed % 3]
    sizes = {"layers": rng.choice([4, 5, 6]), "batch": 64, "length": 256, "d_model": rng.choice([32, 256])}
    build = rng.choice([transformer, partial(transformer, tied=True), mixture])
    model = build(**sizes, vocab=rng.choice([512, 32768]), optimizer="sgd")
    machine = load_hardware("h100", name)
    own, evaluator = restriction_of(name).of(model), Evaluator(model, machine)
    wide = ScheduleDecision.widest(Target.on(machine, model, mesh))
    space = own.narrowed(
        SearchSpace(**wide, pipeline="layers", storage="layout,zero1,zero2", microbatches=(2, 4, 8))
    )
    space = space.but(restriction=own, recompute=(False, True))
    every = [p for p in related(listed(model, [mesh], space, evaluator.near)) if p.key.stages]
    layers = LayerBounds(evaluator)
    for each in itertools.islice((p for p in rng.sample(every, len(every)) if not p.refused), most):
        layers.prove(each, math.inf)
        found = [b.value for b in each.bounds.proven if b.source is BoundSource.LAYERS]
        yield max(found, default=0.0), each.opened(evaluator).relaxed()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", by_day(range(36), every=9))
def test_no_layout_of_a_framework_takes_less_than_its_layers_and_head(seed: int) -> None:
    found = [*heads(seed, 3)]
    assert found and all(0 < bound <= least * (1 + SLACK) for bound, least in found)


def test_a_head_that_the_last_stage_lacks_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it ran once more for each microbatch, the bound would exceed the tables."""
    own = LayerBounds._counted
    monkeypatch.setattr(LayerBounds, "_counted", lambda *a: (*(found := own(*a))[:HEAD], 2 * found[HEAD]))
    assert any(bound > least for bound, least in heads(0, 2))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "circular:2", "interleaved:2"])
def test_slots_are_counted_as_in_the_graph_of_the_pipeline(schedule: str) -> None:
    """Where they are counted without it."""
    mesh, machine = mtf.Mesh("x:2;y:2"), load_hardware("h100", "megatron")
    for wide, layers, parts in itertools.product((8, 64), (4, 8), (2, 8)):
        model = transformer(layers=layers, d_model=wide, batch=8, length=16, vocab=wide**2 // 32)
        split = frozenset({("layers", ("x",))})
        each = Subproblem(SubproblemKey(mesh, split, schedule, frozenset(), parts), model)
        bounds = LayerBounds(Evaluator(model, machine))
        assert bounds._runs(each, "layers") == pytest.approx(bounds._counted(each, "layers"))
        assert bounds._runs(each, "layers")[HEAD] and not bounds._unknown(each, False)


def test_first_runs_hold_for_another_way_as_far_as_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stages are programs of their own, second runs change which way through the slots is longest."""
    model, mesh, machine = mtf.Model(deep(8)), mtf.Mesh("x:2"), load_hardware("h100", "torch")
    allowed = SearchSpace(
        pipeline=("layers",), schedule=("zb-v",), microbatches=(4,), recompute=(False, True)
    )
    evaluator, found = Evaluator(model, machine), list[float]()
    every = [p for p in subproblems(model, [mesh], allowed) if p.key.again and not p.refused]
    monkeypatch.setattr(LayerBounds, "_bound", lambda *_: 0.0)
    own, first = LayerBounds._times, every[0].key._replace(again=frozenset())
    for times in (1, 2):

        def counted(of: LayerBounds, each: Subproblem, times: int = times) -> Any:
            plain = own(of, replace(each, key=first))
            return replace(plain, ends=(plain.ends[0] / times, *plain.ends[1:])) if each.key.again else plain

        monkeypatch.setattr(LayerBounds, "_times", counted)
        every[0].bounds = ProvenBounds()
        LayerBounds(evaluator).prove(every[0], 1e9)
        found.append(every[0].bounds.lower().value)
    assert found[0] == pytest.approx(2 * found[1]) and found[1] > 0


def gradients(seed: int, most: int, many: int) -> Iterator[tuple[list[list[float]], list[float]]]:
    """Seconds of messages about gradients, and of adding them up: in tables of layers, of a stage, with each
    storage, and in programs of pipelines."""
    (evaluator, every), rng = pipelines(seed, most, WIDE), random.Random(seed)
    for each in every[:-1]:
        (dim, axes), plain = *each.key.stages, each.unstaged
        assert plain is not None
        layers = LayerBounds(evaluator)._made(plain, dim, axes)
        assert layers is not None
        for _ in range(many):
            chosen = some_choices(each.decided, rng)
            for name in (*each.decided.of(Split), *each.decided.of(Elsewhere)):
                outside = {*chosen[name]}.isdisjoint(axes) or name == dim
                chosen[name] = chosen[name] if outside else ()
            with suppress(mtf.LayoutError, KeyError):
                chosen |= dict.fromkeys(layers.draft.decided.options.keys() - chosen.keys(), ())
                found = list[list[list[float]]]()
                for table, seconds in layers.tables:
                    ways = dict(zip(table.entries, seconds, strict=True))[
                        tuple(chosen[n] for n in table.names)
                    ]
                    seconds = [[way.get(what, 0.0) / each.stages[dim] for what in STORED] for way in ways]
                    found.append([[once + more, adding] for once, more, adding in seconds])
                lines = evaluator(each.mesh, *each.decided.read(chosen)).cost.lines
                added = [x for x in lines if x.name in ("stack", "add") and x.origin.phase == Phase.BACKWARD]
                spent = [x for x in lines if x.purpose == GRADIENT], added
                yield found, [sum(x.exposed * x.times for x in of) for of in spent]


def exceeded(found: Sequence[tuple[list[list[list[float]]], list[float]]]) -> bool:
    """True if tables count more than programs take, of messages, of sums, or of both with one storage."""
    for tables, spent in found:
        least = [sum(min(way[what] for way in ways) for ways in tables) for what in (0, 1)]
        together = sum(min(map(sum, ways)) for ways in tables), sum(spent)
        if any(bound > own * (1 + SLACK) for bound, own in (*zip(least, spent, strict=True), together)):
            return True
    return False


@pytest.mark.parametrize("seed", [6, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(7, 20))])
def test_stages_send_and_add_up_the_gradients_of_their_layers(seed: int) -> None:
    """Whatever storage, schedule and recomputed parts; twice as many would be found out."""
    found = [*gradients(seed, 3, 20)]
    assert not exceeded(found)
    for what in (0, 1) if seed == 6 else ():
        most = ((sum(max(way[what] for way in ways) for ways in tables), own) for tables, own in found)
        assert any(2 * bound > own[what] > 0 for bound, own in most)


@pytest.mark.nightly
def test_whole_gradients_where_storage_scatters_them_would_be_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If tables left out the storage with the least."""
    monkeypatch.setattr(layer_bounds, "_scattered", lambda *_: [()])
    assert exceeded([*gradients(10, 3, 20)])


@pytest.mark.parametrize("name", ["cpu-jax", "h100", "gb200", "mi300x", "tpu-v4", "tpu-v5e", "tpu-v7"])
def test_scattering_a_sum_takes_no_longer_than_giving_it_to_all(name: str) -> None:
    """So zero1 stands for the layout's storage, where both are allowed."""
    prices = pricer(load_hardware(name), mtf.Mesh("x:4;y:8"))
    for axes, size in itertools.product([("x",), ("y",), ("x", "y")], [10**n for n in range(3, 10)]):
        scattered = prices.message_seconds(axes, size, kind="reduce_scatter")
        assert scattered <= prices.message_seconds(axes, size) * (1 + SLACK)


def adding(stage: str) -> list[float]:
    """The bounds of pipelines whose layers mostly add to gradients, as parts of their seconds by tables."""
    model, mesh = mtf.Model(deep(4, 1024, 16)), mtf.Mesh("x:2;y:4")
    evaluator, pins = Evaluator(model, load_hardware("tpu-v4")), {"layers": ("x",), "batch": ("y",)}
    space = SearchSpace(pipeline="layers", schedule="1f1b,zb-h1", microbatches=(4,), storage=stage, pins=pins)
    found, layers = list[float](), LayerBounds(evaluator)
    every = [*related(listed(model, [mesh], space.but(recompute=(False,)), evaluator.near))]
    for each in (p for p in every if p.key.stages and not p.refused):
        layers.prove(each, math.inf)
        found.append(each.bounds.lower().value / each.opened(evaluator).relaxed())
    return found


def test_sums_that_no_microbatch_adds_to_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many would exceed the tables."""
    assert all(0.5 < part <= 1 + SLACK for stage in ("layout", "zero2") for part in adding(stage))
    own = layer_bounds._Layers.least
    monkeypatch.setattr(layer_bounds._Layers, "least", lambda *a: own(*a[:3], 4 * a[3]))
    assert max(adding("layout")) > 1


@pytest.mark.parametrize("layers", [8, 9])
def test_messages_count_as_often_as_stages_of_their_own_hand_on(layers: int) -> None:
    """Where stages have as many layers, and where they do not."""
    model, mesh, machine = mtf.Model(deep(layers)), mtf.Mesh("pipe:4"), load_hardware("h100", "torch")
    layout, evaluator = mtf.Layout("layers:pipe"), Evaluator(model, machine)
    for schedule in ONE_WAY:
        key = SubproblemKey(mesh, frozenset({("layers", ("pipe",))}), schedule, frozenset(), 4)
        runs = evaluator.slot_runs(mesh, "layers", (each := Subproblem(key, model)).plans["layers"])
        bound = LayerBounds(evaluator)._handed(each, "layers", ("pipe",), runs)
        options = mtf.Options(schedule=schedule, microbatches=4)
        priced = evaluate(model, mesh, layout, machine, options).cost.exposed_communication_seconds
        assert bound <= priced * (1 + SLACK) and (bound > 0 or layers == 9)


def test_a_pipeline_is_bounded_without_its_graph() -> None:
    """Pipelines are listed, and closed by their layers, before anything of them is built."""
    model = whole_model(0)
    evaluator, asked = Evaluator(model, some_machine(random.Random(0))), opened(random.Random(0), model)
    every = [*subproblems(model, [mtf.Mesh("x:4")], asked.but(schedule=ONE_WAY), evaluator.near)]
    last = every[-1]
    LayerBounds(evaluator).prove(last, math.inf)
    assert last.key.stages and last.bounds.lower().value > 0 and last.layouts > 0
    assert last.given is None and "decided" not in vars(last)


def deep(layers: int, size: int = 4, examples: int = 8) -> mtf.Tensor:
    """The loss of a model with so many layers."""
    g, batch, width = mtf.Graph(), mtf.Dim("batch", examples), mtf.Dim("width", size)
    wide = mtf.Dim("wide", size)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        h = mtf.einsum([x, g.variable("w", [width, wide], mtf.Normal(0.1))], [batch, wide])
        return mtf.rename(h, wide="width")

    x = mtf.scan(layer, g.input("x", [batch, width], "float32"), mtf.Dim("layers", layers))
    return mtf.reduce_mean(mtf.square(x))


def shares() -> list[float]:
    """The bounds of pipelines of wide layers by a device's share, as parts of their seconds by tables."""
    model, mesh, found = mtf.Model(deep(128, 16384, 2**16)), mtf.Mesh("x:4"), list[float]()
    evaluator, asked = Evaluator(model, load_hardware("tpu-v4")), {"schedule": ("circular:2", "zb-h1")}
    space = SearchSpace(**asked, pipeline="layers", microbatches=(1,), storage="layout", recompute=(False,))
    for each in (p for p in subproblems(model, [mesh], space, evaluator.near) if p.key.stages):
        each.bound_by_share(evaluator)
        found.append(each.bounds.lower().value / each.opened(evaluator).relaxed())
    return found


def test_slots_of_weights_counted_as_often_as_others_would_be_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a device's share: with one microbatch, stages wait for it in all slots but these."""
    assert all(0.8 < part <= 1 + SLACK for part in shares())
    own = Evaluator.slot_runs
    monkeypatch.setattr(Evaluator, "slot_runs", lambda *a: (max(own(*a)),) * len(own(*a)))
    assert max(shares()) > 1
