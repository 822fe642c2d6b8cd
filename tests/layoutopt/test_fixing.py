"""Options that leave while tables are made are in nothing faster; what is legal, and single prices, without
tables."""

from __future__ import annotations

import itertools
import math
import random

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from costmodels.pricing.pricer import pricer
from layoutopt.formulation.extract import Draft, extract, legal_problem
from layoutopt.optimize.evaluation.evaluator import Evaluator, TablePrices
from layoutopt.optimize.problems.bounds import EXACT, Bound
from layoutopt.optimize.problems.subproblems import Subproblem
from layoutopt.optimize.proof.fixing import _ways, faster, fill
from layoutopt.runtime.clock import Clock
from layoutopt.solver import eliminate
from layoutopt.solver import evaluate as value_of
from layoutopt.space.decisions import SearchSpace, decisions
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options
from tests.layoutopt.every_kind import question_of
from tests.layoutopt.models import EXAMPLES, HARDWARE, random_model, some_choices
from tests.marks import by_day

PRICE = 1e-12


def subproblem_of(model: mtf.Model, mesh: str, parts: int = 1) -> Subproblem:
    graph, on = model.training_step(parts).graph, mtf.Mesh(mesh)
    return Subproblem.of(on, decisions(graph, on, SearchSpace(microbatches=(parts,))))


def check(model: mtf.Model, space: Subproblem, hardware: Hardware, above: float, few: bool) -> None:
    """Below `above` times the least seconds, the fixed problem's best costs what that of the whole does.

    Args:
      few: options are looked at after every table.
    """
    whole = extract(model, space.mesh, space.decided, pricer(hardware, space.mesh))
    least = eliminate(whole.problem).bound
    upper, proposed = above * least, list[tuple[Layout, Options]]()

    def propose(layout: Layout, options: Options) -> float:
        proposed.append((layout, options))
        choices = whole.choices(layout, options)
        costs = math.inf if choices is None else value_of(whole.problem, choices).objective
        return min(upper, costs)

    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr("layoutopt.optimize.proof.fixing.FIRST", 1)
            patch.setattr("layoutopt.optimize.proof.fixing.MORE", 0.0)
            patch.setattr("layoutopt.formulation.couplings.FEW", 1)
        search = faster(Evaluator(model, hardware), space, upper, propose)
    bound = space.bounds.lower().value
    if above <= 1 or least == math.inf:  # nothing is faster, or no layout is legal
        assert search is None and bound >= upper * (1 - EXACT)
        return
    assert search is not None and bound <= least * (1 + PRICE)
    found = search.eliminated
    assert found.bound == pytest.approx(least, rel=PRICE)
    best = found.best()
    assert best is not None
    layout, options = search.extraction.read(best)
    choices = whole.choices(layout, options)
    assert choices is not None
    seconds = value_of(whole.problem, choices).objective
    if whole.waits:  # for hosts, in steps, which are bounds (`host_link`)
        assert seconds >= least * (1 - PRICE)
    else:
        assert seconds == pytest.approx(least, rel=PRICE)
    if few:
        assert proposed and len(search.extraction.names) <= len(whole.names)


@pytest.mark.parametrize(
    ("seed", "above"), by_day(itertools.product(range(5), [1.0, 1.05, 2.0, math.inf]), every=11)
)
def test_random_models(seed: int, above: float) -> None:
    model, hardware = random_model(seed), load_hardware(HARDWARE[seed % len(HARDWARE)])
    check(model, subproblem_of(model, "a:2;b:2"), hardware, above, few=True)


def check_whole(seed: int) -> None:
    """A random question about every kind."""
    question, above = question_of(seed), [1.0, 1.05, 2.0, math.inf][seed % 4]
    for each in question.problems:
        check(question.model, each, question.hardware, above, few=True)


@pytest.mark.parametrize("seed", by_day([5, 2]))
def test_every_kind(seed: int) -> None:
    check_whole(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 200, 20))
def test_every_kind_in_many_models(first: int) -> None:
    for seed in range(first, first + 20):
        check_whole(seed)


@pytest.mark.parametrize(
    ("name", "above"),
    by_day(itertools.product(["transformer", "nested", "branching"], [1.0, 1.2, math.inf]), every=9, first=3),
)
def test_examples(name: str, above: float) -> None:
    model = EXAMPLES["loops in loops" if name == "nested" else name]()
    check(model, subproblem_of(model, "x:2;y:4"), load_hardware("tpu-v4"), above, few=False)


def test_most_options_leave() -> None:
    model, hardware = EXAMPLES["transformer"](), load_hardware("tpu-v4")
    space = subproblem_of(model, "data:2;model:2")
    whole = extract(model, space.mesh, space.decided, pricer(hardware, space.mesh))
    least = eliminate(whole.problem).bound
    search = faster(Evaluator(model, hardware), space, 1.01 * least, lambda *_: math.inf)
    assert search is not None
    left, all_of_them = (sum(len(t.entries) for t in e.tables) for e in (search.extraction, whole))
    assert left < all_of_them / 4


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "hardware", "parts"),
    by_day(
        itertools.product(
            ["transformer in bfloat16", "branching", "loops in loops", "reversible"],
            ["tpu-v5e", "h100", "a100"],
            [1, 4],
        ),
        every=9,
    ),
)
def test_no_entry_takes_less_than_a_device_computes_of_it(name: str, hardware: str, parts: int) -> None:
    model, machine, mesh = EXAMPLES[name](), load_hardware(hardware), mtf.Mesh("a:2;b:2")
    graph = model.training_step(parts).graph
    decided = decisions(graph, mesh, SearchSpace(microbatches=(parts,), context=("gather", "ring")))
    draft = Draft(model, mesh, decided, pricer(machine, mesh))
    weights, tight = fill({}, draft), 0
    for cluster in [*draft.left]:
        least = weights[id(cluster)].computed / _ways(cluster, draft)
        for entry in draft.make(cluster).entries.values():
            assert cluster.multiplicity * entry.seconds >= least * (1 - 1e-9), cluster.name
            tight += cluster.multiplicity * entry.seconds < 2 * least
    assert tight


def test_no_time_is_said() -> None:
    evaluator = Evaluator(EXAMPLES["mlp"](), load_hardware("tpu-v4"))
    space = subproblem_of(evaluator.model, "a:2;b:2")
    assert faster(evaluator, space, math.inf, lambda *_: math.inf, clock=Clock(0.0)) is None
    assert space.bounds.lower() == Bound()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["branching", "loops in loops"])
def test_what_is_legal_follows_from_dimensions_alone(name: str) -> None:
    model, hardware = EXAMPLES[name](), load_hardware("tpu-v4")
    space = subproblem_of(model, "data:2;model:2")
    prices = pricer(hardware, space.mesh)
    known = legal_problem(model, space.mesh, space.decided, prices)
    for bare, priced in zip(
        known.tables, extract(model, space.mesh, space.decided, prices).tables, strict=True
    ):
        assert bare.names == priced.names
        assert bare.entries.keys() == priced.entries.keys(), priced.cluster.name


@pytest.mark.parametrize("hardware", ["tpu-v3", "cpu-local"])
@pytest.mark.parametrize("name", by_day(["branching", "transformer in bfloat16"]))
def test_a_quote_is_what_the_tables_say(name: str, hardware: str) -> None:
    model, machine, rng = EXAMPLES[name](), load_hardware(hardware), random.Random(5)
    space = subproblem_of(model, "data:2;model:2")
    prices = pricer(machine, space.mesh)
    whole = extract(model, space.mesh, space.decided, prices)
    table_prices, legal = TablePrices(Draft(model, space.mesh, space.decided, prices)), 0
    for _ in range(60):
        layout, options = space.decided.read(some_choices(space.decided, rng))
        choices = whole.choices(layout, options)
        if choices is None:
            assert table_prices.seconds(layout, options) == math.inf
            continue
        legal += 1
        costs = value_of(whole.problem, choices).objective
        assert table_prices.seconds(layout, options) == pytest.approx(costs, rel=PRICE)
    assert legal > 3
