"""Classes of collectives, and that what the file says of them is what a step waits for."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from costmodels.hardware.numbers import Number
from costmodels.pricing.hidden import hidden
from costmodels.pricing.items import Sent
from costmodels.pricing.overlap import ACTIVATION, CLASSES, EXCHANGE
from costmodels.pricing.pricer import Cost, price, pricer
from examples.moe_lm import model as experts
from layoutopt.formulation.extract import extract
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.solver import evaluate as value_of
from layoutopt.space.decisions import decisions
from mesh_tf_core.ir.instructions import GRADIENT, PARAMETER, STEP
from tests.core.test_context import round_of
from tests.layoutopt.models import EXAMPLES, some_choices

MESH = mtf.Mesh("data:2;model:2")
ULYSSES = {"context": frozenset({("memory_length", "all_to_all")})}


def hiding(**fractions: float) -> Hardware:
    numbers = tuple((n, Number(f, str(f), "a test", "2026")) for n, f in sorted(fractions.items()))
    return replace(load_hardware("tpu-v3"), overlap=numbers)


def mixture(**options: Any) -> mtf.Model:
    sizes = {"layers": 1, "d_model": 8, "d_kv": 4, "heads": 2, "d_ff": 16, "experts": 4}
    return experts(**sizes, vocab=16, batch=4, length=8, **options)


def cost(layout: str, hardware: Hardware, make: Any = EXAMPLES["transformer"], **options: Any) -> Cost:
    model = make()
    _ = model.step_graph
    if "storage" in options:
        stage = options.pop("storage")
        names = [v.name for v in model.graph.variables.values() if v.trainable and len(v.shape)]
        options["storage"] = dict.fromkeys(names, stage)
    return price(model.lower(MESH, mtf.Layout(layout), mtf.Options(**options)), hardware)


def found(cost: Cost) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    for x in cost.lines:
        if x.is_communication:
            out.setdefault(x.purpose, set()).add(x.name)
    return out


def test_data_parallel_sums_are_of_gradients() -> None:
    assert found(cost("batch:data+model", hiding(gradient=0.5))) == {
        GRADIENT: {"all_reduce"},
        ACTIVATION: {"all_reduce"},  # the loss
    }


def test_sums_between_layers_are_of_activations() -> None:
    kinds = found(cost("heads:model;d_ff:model", hiding(gradient=0.5)))
    assert set(kinds) == {ACTIVATION}


def test_kernels_that_send_beside_products_do_not_hide_exchanges() -> None:
    seconds = [cost("batch:data;experts:data", hiding(activation=share), mixture) for share in (0.0, 0.9)]
    exposed = [{c: sum(x.exposed for x in each.lines if x.purpose == c) for c in CLASSES} for each in seconds]
    assert exposed[0][EXCHANGE] == exposed[1][EXCHANGE] > 0
    assert exposed[0][ACTIVATION] > exposed[1][ACTIVATION] > 0


def test_tokens_that_are_gathered_for_their_experts_are_exchanged() -> None:
    """Where experts lie on no more ranks than a token chooses, gathers and sums take the place of rows."""
    layout = "batch:data;experts:data"
    assert found(cost(layout, hiding(), mixture))[ACTIVATION] == {"all_reduce"}  # the losses
    both = found(cost(f"{layout};length@elsewhere:model;heads:model", hiding(), mixture))
    assert all({"all_gather", "reduce_scatter"} <= both[each] for each in (ACTIVATION, EXCHANGE))


def test_only_exchanges_of_experts_are_hidden_with_them() -> None:
    """All-to-alls that other operations make are a class of their own."""
    made = {
        "experts": (mixture, "batch:data;experts:data", {}),
        "context": (EXAMPLES["transformer"], "length:model;memory_length:model", ULYSSES),
        "capacity": (partial(mixture, capacity_factor=2.0), "batch:data;experts:data", {}),
    }
    for name, (make, layout, options) in made.items():
        priced = cost(layout, hiding(experts=0.9), make, **options)
        sent = [x for x in priced.lines if x.name == "all_to_all"]
        hidden = {x.purpose for x in sent if x.exposed < x.seconds}
        assert sent and hidden == ({EXCHANGE} if make is not EXAMPLES["transformer"] else set()), name


@pytest.mark.parametrize("recompute", [(), ("layers",)])
def test_stored_split_variables_are_gathered_as_parameters(recompute: tuple[str, ...]) -> None:
    kinds = found(cost("batch:data", hiding(gradient=0.5), storage=3, recompute=frozenset(recompute)))
    assert kinds[PARAMETER] == {"all_gather"}
    assert "reduce_scatter" in kinds[GRADIENT]


@pytest.mark.parametrize("stage", [1, 2])
def test_new_values_are_gathered_as_parameters_after_the_update(stage: int) -> None:
    priced = cost("batch:data", hiding(gradient=0.5), storage=stage)
    gathers = [x for x in priced.lines if x.name == "all_gather"]
    assert gathers and {(x.origin.phase, x.purpose) for x in gathers} == {("update", PARAMETER)}


def test_hidden_seconds_are_fractions_of_each_class() -> None:
    fractions = {GRADIENT: 0.25, PARAMETER: 0.5, ACTIVATION: 0.75, EXCHANGE: 0.125}
    priced = cost("batch:data;experts:data;d_ff:model", hiding(**fractions), mixture, storage=3)
    seconds = {c: sum(x.seconds * x.times for x in priced.lines if x.purpose == c) for c in CLASSES}
    assert all(seconds[c] for c in fractions)
    exposed = sum((1 - fractions.get(c, 0.0)) * s for c, s in seconds.items())
    assert priced.exposed_communication_seconds == pytest.approx(exposed, rel=1e-12)
    assert priced.communication_seconds == pytest.approx(sum(seconds.values()), rel=1e-12)
    assert priced.step_seconds == priced.compute_seconds + priced.exposed_communication_seconds


def test_what_hides_a_message_takes_as_long_as_what_it_hides() -> None:
    """Of every class whose overlap is a fraction of its own time, or which waits."""
    machine = hiding(**{ACTIVATION: 0.75, EXCHANGE: 0.125})
    model = mixture()
    _ = model.step_graph
    program = model.lower(MESH, mtf.Layout("batch:data;experts:data;d_ff:model"), mtf.Options())
    rows = {each.purpose: each for each in hidden(program, price(program, machine))}
    for purpose in (ACTIVATION, EXCHANGE):
        assert rows[purpose].hidden > 0 and rows[purpose].fits and "nothing" not in rows[purpose].behind


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["mlp", "mlp in bfloat16", "mixture"])
def test_the_tables_add_up_when_classes_are_hidden(name: str) -> None:
    fractions = {"gradient": 0.7, "parameter": 0.8, "activation": 0.3, "experts": 0.9}
    hardware, model = hiding(**fractions), {**EXAMPLES, "mixture": mixture}[name]()
    graph = model.training_step(1).graph
    decided = decisions(graph, MESH)
    prices, rng = pricer(hardware, MESH), random.Random(name)
    whole = extract(model, MESH, decided, prices)
    compared = 0
    while compared < 6:
        layout, options = decided.read(some_choices(decided, rng))
        choices = whole.choices(layout, options)
        if choices is None:
            continue
        evaluation = evaluate(model, MESH, layout, hardware, options, prices)
        assert value_of(whole.problem, choices).objective == pytest.approx(
            evaluation.cost.step_seconds, rel=1e-9
        )
        compared += 1


def test_what_goes_round_a_ring_hides_beside_its_turns() -> None:
    """Keys and values three times, forward and backward; their gradients three times, and home, when no
    turn is left."""
    model = EXAMPLES["transformer"]()
    options = mtf.Options(context=frozenset({("memory_length", "ring")}))
    layout = mtf.Layout("length:data+model;memory_length:data+model")
    lines = price(model.lower(MESH, layout, options), hiding(gradient=0.5)).lines
    layers = next(b.dim.size for b in model.graph.blocks if b.dim.name == "layers")
    sent = [x for x in lines if x.is_communication and x.name == "permute"]
    assert sum(x.times for x in sent if x.purpose == STEP) == layers * 3 * (2 + 2 + 2)
    assert sum(x.times for x in sent if x.purpose != STEP) == layers * 2
    found = [x.item for x in sent if isinstance(x.item, Sent) and x.item.between]
    assert {tuple(part for _, part in item.between) for item in found} == {(1 / 2,), (1 / 4,)}
    assert max(x.seconds for x in sent) > max(x.exposed for x in sent if x.purpose == STEP)


def test_keys_of_a_window_hide_from_either_side() -> None:
    """Three pieces in reach on eight devices: keys come three times from either side, each beside the
    attention of the turn before, and gradients twice and home; nothing is left beside which they could come
    home from the last side."""
    program, _ = round_of("ring", 8, 10, causal=False)
    lines = price(program, hiding(gradient=0.5)).lines
    sent = [x for x in lines if x.is_communication and x.name == "permute"]
    assert sum(x.times for x in sent if x.purpose == STEP) == 2 * 2 * 6 + 2 * (2 + 1 + 2)
    assert sum(x.times for x in sent if x.purpose != STEP) == 2
    assert {len(x.item.between) for x in sent if isinstance(x.item, Sent) and x.item.between} == {1}
