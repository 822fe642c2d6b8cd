"""What lies on the hosts, as the search decides it: tables add up to the price of the program, rows count no
more than its peak, and the answer is the best of all."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.pricer import pricer
from examples.mlp import model as mlp
from layoutopt.analysis.explain import without
from layoutopt.formulation.extract import extract
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.build import parse_plan
from layoutopt.plan.decided import Decided
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported, ExportedTensor
from layoutopt.solver import evaluate as value_of
from layoutopt.space.decisions import SearchSpace, decisions
from layoutopt.space.offload import OffloadDecision
from layoutopt.space.recompute import Recompute, again_in
from mesh_tf_core.ir.instructions import HOST
from tests.layoutopt.models import EXAMPLES, some_choices

PRICE = 1e-9
ROUNDING = 1 + 1e-12
NAME = "transformer with fused attention"


def compare(name: str, on: str, parts: int, hardware: str, count: int) -> list[int]:
    """Holds tables and rows against the program for some random legal choices; of how many what layers save,
    or their weights, was on the hosts, and did not wait for the link, or did."""
    model, mesh, machine = EXAMPLES[name](), mtf.Mesh(on), load_hardware(hardware)
    state = any(v.slot_of for v in model.training_step(parts).graph.variables.values())
    allowed = SearchSpace(
        microbatches=(parts,),
        offload=(*["optimizer"] * state, "activations", "weights"),
        recompute=(False, "selective", True),
        context=("gather", "ring"),
    )
    decided = decisions(model.training_step(parts).graph, mesh, allowed)
    found = extract(model, mesh, decided, pricer(machine, mesh))
    rng, compared, seen = random.Random(parts), 0, [0, 0]
    looped = {"layers", *(v.name for v in model.graph.variables.values() if v.stacked)}
    while compared < count:
        layout, options = found.decided.read(some_choices(found.decided, rng))
        choices = found.choices(layout, options)
        try:
            evaluation = evaluate(model, mesh, layout, machine, options)
        except mtf.LayoutError:
            assert choices is None
            continue
        assert choices is not None
        objective = value_of(found.problem, choices).objective
        waits = any(choices[-len(found.waits) :])
        if waits:  # for at most a step more
            seconds = evaluation.cost.step_seconds
            waited = sum(x.exposed * x.times for x in evaluation.cost.lines if x.axes == (HOST,))
            assert objective <= seconds * ROUNDING, (layout, options)
            assert seconds - objective <= 0.25 * waited, (layout, options)
        else:
            assert objective == pytest.approx(evaluation.cost.step_seconds, rel=PRICE), (layout, options)
        held = sum(row.use(choices) for row in found.problem.rows if row.name == "host memory")
        assert held == evaluation.program.host_bytes
        rows = found.memory.rows() + found.memory.rows(again_in(options))
        counted = max(row.use(choices) for row in rows)
        assert counted <= evaluation.memory.peak * ROUNDING, (layout, options)
        assert found.read(choices) == (layout, options)
        compared += 1
        seen[waits] += any(name in looped for _, name in options.offload)
    return seen


def test_rows_count_on_axes_of_different_sizes() -> None:
    """A cluster is lowered once for axes of any sizes; its pieces are of the sizes here."""
    compare("branching", "data:2;model:4", 1, "tpu-v3, host_memory=1KiB", 12)


def test_state_that_the_host_updates_takes_its_time() -> None:
    """Under Megatron-LM and DeepSpeed, Adam runs on the host: what an update moves is at the host's rate, as
    tables know, too; JAX moves it to the chip and back."""
    model = EXAMPLES["mlp"]()
    for framework, own in (("layoutopt", None), ("maxtext", None), ("megatron", 8e9), ("deepspeed", 8e9)):
        found = layoutopt.cost(
            model, "data:4", "batch:data", "h100", framework=framework, storage="zero1", offload="optimizer"
        )
        moved = [x for x in found.evaluation.cost.lines if x.axes == (HOST,)]
        rate = own or found.evaluation.prices.hardware.host_link
        assert moved and sum(x.exposed for x in moved) == pytest.approx(
            sum(x.item.sent for x in moved) / rate
        )
    compare("mlp", "data:2;model:4", 1, "a100, host_memory=1KiB, host_update=1GB/s", 4)


@pytest.mark.nightly
def test_transfers_of_any_size_hide_beside_the_same_products() -> None:
    """Those of few elements, which fill a part of a tile, too."""
    compare("mlp", "data:2;model:4", 2, "tpu-v3, host_memory=1KiB", 6)


@pytest.mark.nightly
def test_tables_add_up() -> None:
    """Also the rows of the hosts: of their memory, of which these have too little, and of their link, which
    is far too slow, or as fast as it takes."""
    slow = compare(NAME, "data:4", 2, "tpu-v5e, host_memory=1KiB, host_link=0.001GB/s", 2)
    fast = compare(NAME, "data:2;model:2", 1, "tpu-v5e, host_memory=1KiB, host_link=1e6GB/s", 2)
    assert slow[1] and fast[0]


def test_rows_count_what_is_loaded_for_backward() -> None:
    """From its first reader to its last one a device holds what a loop kept on the hosts."""
    model, mesh, machine = EXAMPLES[NAME](), mtf.Mesh("data:2;model:2"), load_hardware("h100")
    allowed = SearchSpace(microbatches=(1,), offload=("activations",), recompute=(False, "selective", True))
    found = extract(
        model, mesh, decisions(model.training_step(1).graph, mesh, allowed), pricer(machine, mesh)
    )
    for keep in ("outputs", "attention", "products", "products+attention", "products+others"):
        for layout in map(mtf.Layout, ("batch:data", "batch:data;d_ff:model;heads:model")):
            options = mtf.Options(
                recompute=frozenset({f"layers:keep={keep}"}), offload=frozenset({("activations", "layers")})
            )
            choices, peak = found.choices(layout, options), evaluate(model, mesh, layout, machine, options)
            assert choices is not None
            counted = max(row.use(choices) for row in found.memory.rows(again_in(options)))
            assert counted == peak.memory.peak, (keep, layout)


@pytest.mark.parametrize(
    ("memory", "host", "fits"), [(79_900, 8192, True), (76_300, 40_000, True), (79_900, 512, False)]
)
@pytest.mark.one_in(2)
def test_hosts_hold_no_more_than_they_have(memory: int, host: int, fits: bool) -> None:
    """On one device, of all choices that fit there and on its host, the fastest; or none fits."""
    model, mesh, machine = mlp(batch=16, hidden=64, layers=1), mtf.Mesh("one:1"), "tpu-v5e"
    asked: dict[str, Any] = {"recompute": (False,), "microbatches": (1,), "storage": ("layout",)}
    decided = decisions(model.training_step(1).graph, mesh, SearchSpace(offload=("optimizer",), **asked))
    names, fit = decided.of(OffloadDecision), []
    for chosen in itertools.product(*(decided.options[n] for n in names)):
        layout, options = decided.read(dict(zip(names, chosen, strict=True)))
        found = evaluate(model, mesh, layout, load_hardware(machine), options)
        if found.memory.peak <= memory and found.program.host_bytes <= host:
            fit.append(found.cost.step_seconds)
    asked |= {"memory": memory, "alternatives": False, "hardware": f"{machine}, host_memory={host}B"}
    assert bool(fit) is fits
    if not fits:
        with pytest.raises(mtf.InfeasibleError):
            layoutopt.search(model, mesh, offload=("optimizer",), **asked)
        return
    plan = layoutopt.search(model, mesh, offload=("optimizer",), **asked)
    assert plan.solver.status == "OPTIMAL" and 0 < (plan.predicted.host_memory_bytes or 0) <= host
    assert plan.predicted.step_seconds == pytest.approx(min(fit), rel=1e-9)


@pytest.mark.nightly
def test_the_answer_is_the_best_of_all() -> None:
    """On one device, with too little memory for all of the state: what lies on the host is all that is
    decided, and of all choices that fit the fastest is found."""
    model, machine, mesh = EXAMPLES[NAME](), load_hardware("tpu-v5e"), mtf.Mesh("one:1")
    asked: dict[str, Any] = {"recompute": (False,), "microbatches": (1,), "storage": ("layout",)}
    allowed = SearchSpace(offload=("optimizer",), **asked)
    decided = decisions(model.training_step(1).graph, mesh, allowed)
    options = [decided.options[n] for n in decided.of(OffloadDecision)]
    found = []
    for chosen in itertools.product(*options):
        layout, taken = decided.read(dict(zip(decided.of(OffloadDecision), chosen, strict=True)))
        evaluation = evaluate(model, mesh, layout, machine, taken)
        found.append((evaluation.cost.step_seconds, evaluation.memory.peak))
    peaks = sorted(peak for _, peak in found)
    limit = peaks[len(peaks) // 2]
    assert limit < found[0][1]
    best = min(seconds for seconds, peak in found if peak <= limit)
    plan = layoutopt.search(
        model, mesh, hardware="tpu-v5e", memory=limit, offload=("optimizer",), alternatives=False, **asked
    )
    assert plan.solver.status == "OPTIMAL"
    assert plan.predicted.step_seconds == pytest.approx(best, rel=1e-9)
    assert plan.options.offload and plan.data.details.search.offload == ("optimizer",)
    again = parse_plan(plan.to_json())
    assert again.options == plan.options and again.predicted.host == plan.predicted.host != ""
    with pytest.raises(mtf.InfeasibleError):
        layoutopt.search(model, mesh, hardware="tpu-v5e", memory=limit, alternatives=False, **asked)


def test_weights_go_there_where_it_is_best() -> None:
    """On one device, with less memory than any layout needs without: of all choices the fastest that fits."""
    model, mesh, machine = mlp(batch=16, hidden=64, layers=2), mtf.Mesh("one:1"), load_hardware("tpu-v5e")
    asked: dict[str, Any] = {"recompute": (False,), "microbatches": (1,), "storage": ("layout",)}
    decided = decisions(model.training_step(1).graph, mesh, SearchSpace(offload=("weights",), **asked))
    names, found = decided.of(OffloadDecision), []
    for chosen in itertools.product(*(decided.options[n] for n in names)):
        layout, options = decided.read(dict(zip(names, chosen, strict=True)))
        evaluation = evaluate(model, mesh, layout, machine, options)
        found.append((evaluation.cost.step_seconds, evaluation.memory.peak))
    peaks = sorted({peak for _, peak in found})
    limit = peaks[len(peaks) // 2]
    best = min(seconds for seconds, peak in found if peak <= limit)
    assert limit < found[0][1] and best > found[0][0]
    asked |= {"memory": limit, "alternatives": False, "hardware": "tpu-v5e"}
    with pytest.raises(mtf.InfeasibleError):
        layoutopt.search(model, mesh, **asked)
    plan = layoutopt.search(model, mesh, offload=("weights",), **asked)
    assert plan.solver.status == "OPTIMAL"
    assert plan.predicted.step_seconds == pytest.approx(best, rel=1e-9)
    again = parse_plan(plan.to_json())
    assert again.options == plan.options and {kind for kind, _ in plan.options.offload} == {"weights"}


@pytest.mark.nightly
@pytest.mark.parametrize("link", ["1e6GB/s", "0.001GB/s"])
def test_what_loops_save_goes_where_it_is_best(link: str) -> None:
    """On one device, with every set of kinds that loops may keep, there or on the host, in less memory than
    second runs alone need: of all that fits the fastest is found, or where it waits for the link one that
    waits no step longer."""
    model, mesh, machine = EXAMPLES[NAME](), mtf.Mesh("one:1"), f"tpu-v5e, host_link={link}"
    kinds: dict[str, Any] = {"recompute": (False, "selective", True), "offload": ("activations",)}
    asked = {**kinds, "microbatches": (1,), "storage": ("layout",)}
    decided = decisions(model.training_step(1).graph, mesh, SearchSpace(**asked))
    (name,) = decided.of(Recompute)
    found = {}
    for choice in decided.options[name]:
        evaluation = evaluate(
            model, mesh, mtf.Layout(""), load_hardware(machine), decided.read({name: choice})[1]
        )
        found[choice] = evaluation.cost.step_seconds, evaluation.memory.peak
    limit = found["on",][1] - 1
    fit = [seconds for seconds, peak in found.values() if peak <= limit]
    asked |= {"memory": limit, "alternatives": False, "hardware": machine}
    plan = layoutopt.search(model, mesh, **asked)
    assert ("activations", "layers") in plan.options.offload
    assert min(fit) * (1 - 1e-9) <= plan.predicted.step_seconds <= 1.25 * min(fit)
    assert plan.solver.bound is not None and plan.solver.bound <= min(fit) * ROUNDING
    if link == "1e6GB/s":
        assert plan.solver.status == "OPTIMAL"
        assert plan.predicted.step_seconds == pytest.approx(min(fit), rel=1e-9)
    again = parse_plan(plan.to_json())
    assert again.options == plan.options and again.predicted.host == plan.predicted.host != ""


@pytest.mark.parametrize(
    ("hardware", "kinds", "said"),
    [
        ("cpu-local", ("optimizer",), "devices and host share one memory"),
        (
            "tpu-v2",
            ("optimizer",),
            "the bandwidth of the host link is unknown",
        ),
        ("tpu-v5e", ("weight",), "offload 'weight'"),
    ],
)
def test_what_cannot_be_is_refused(hardware: str, kinds: tuple[str, ...], said: str) -> None:
    with pytest.raises(mtf.UserError, match=said):
        layoutopt.search(EXAMPLES[NAME](), "x:2", hardware=hardware, offload=kinds)


def test_it_can_be_forbidden() -> None:
    assert without(SearchSpace(offload=("optimizer",), microbatches=(1,)), "offload") == SearchSpace(
        microbatches=(1,)
    )
    both = SearchSpace(offload=("optimizer", "activations"), microbatches=(1,))
    assert without(both, "recompute") == SearchSpace(
        offload=("optimizer",), recompute=(False,), microbatches=(1,)
    )
    with pytest.raises(
        mtf.UserError, match="--without offload: the plan's search was not allowed to make this decision"
    ):
        without(SearchSpace(microbatches=(1,)), "offload")


def test_exports_say_it_or_refuse_it() -> None:
    weights = [ExportedTensor(n, ("d_model", "d_ff"), ((), ()), (8, 16), True) for n in ("wi", "wo")]
    decided = Decided(offload={"optimizer": ["wi", "wo"]})
    texts = (ExportedTensor("ids", ("batch", "length"), (("a",), ()), (4, 8)),)
    what = Exported("title", mtf.Mesh("a:2"), mtf.Layout("batch:a"), tuple(weights), texts, decided)
    said = {
        "maxtext": "optimizer_memory_host_offload: True",
        "megatron": "--optimizer-cpu-offload",
        "deepspeed": "offload_optimizer",
    }
    assert said.keys() == {to for to, form in FORMATS.items() if form.says.expresses("offload", "optimizer")}
    for to, words in said.items():
        assert words in export(what, to)
    for to in FORMATS.keys() - said.keys():
        with pytest.raises(
            mtf.UserError,
            match=f"^{to} cannot express this plan, in which optimizer offload applies to wi, wo",
        ):
            export(what, to)
    some = replace(what, decided=Decided(offload={"optimizer": ["wi"]}))
    with pytest.raises(mtf.UserError, match="does not offload wo"):
        export(some, "maxtext")
    everything = replace(what, decided=Decided(offload={"weights": ["wi", "wo"]}))
    assert "parameter_memory_host_offload: True" in export(everything, "maxtext")
    assert "offload" not in export(replace(what, decided=Decided()), "maxtext")


@pytest.mark.nightly
@pytest.mark.parametrize("hardware", ["tpu-v3", "a100"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_tables_of_examples_add_up(name: str, hardware: str) -> None:
    for parts in (1, 2):
        compare(name, "data:2;model:4", parts, f"{hardware}, host_memory=1KiB", 8)
