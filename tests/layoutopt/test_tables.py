"""The tables add up to the price of the program, and the memory rows never count more than its peak."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from costmodels.liveness import memory
from costmodels.pricing.pricer import pricer
from examples.moe_lm import model as experts
from examples.transformer_lm import model as transformer
from examples.transformer_seq2seq import model as translator
from layoutopt.formulation import tables
from layoutopt.formulation.extract import Draft, Extraction, extract, legal_problem
from layoutopt.optimize.evaluation.evaluator import Evaluator, TablePrices, evaluate
from layoutopt.optimize.problems.subproblem import ROUNDING, SubproblemSearch
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.collective_matmul import CollectiveMatmul
from layoutopt.space.decisions import Decisions, SearchSpace, decisions
from layoutopt.space.kind import grouped
from layoutopt.space.recompute import again_in
from layoutopt.space.sequence_parallel import written
from mesh_tf_core.ops.context import FORMS
from mesh_tf_core.ops.float8_recipes import RECIPES
from tests.layoutopt.every_kind import MACHINES, question_of, whole_model
from tests.layoutopt.every_layout import Compared, evaluated
from tests.layoutopt.models import (
    EXAMPLES,
    HARDWARE,
    PASSING,
    SMALL,
    crossed,
    random_model,
    some_choices,
    towers,
)
from tests.marks import by_day

PRICE = 1e-9
PINNED = {"pins": {"vocab": ("model",), "d_kv": (), "memory_length": ()}}
"""What is not looked at, where many splits are."""


def extraction(
    model: mtf.Model, mesh: mtf.Mesh, parts: int, hardware: Hardware, **allowed: Any
) -> Extraction:
    graph = model.training_step(parts).graph
    decided = decisions(graph, mesh, SearchSpace(microbatches=(parts,), **allowed))
    return extract(model, mesh, decided, pricer(hardware, mesh))


def compare(
    model: mtf.Model,
    mesh: mtf.Mesh,
    parts: int,
    hardware: Hardware,
    seed: int,
    count: int,
    **allowed: Any,
) -> None:
    """Holds the tables and rows against the lowered program for `count` random legal choices."""
    graph = model.training_step(parts).graph
    decided = decisions(graph, mesh, SearchSpace(microbatches=(parts,), **allowed))
    assert compare_some(model, mesh, decided, hardware, seed, count) >= min(count, 3)


def compare_some(
    model: mtf.Model, mesh: mtf.Mesh, decided: Decisions, hardware: Hardware, seed: int, count: int
) -> int:
    """The same, of any decisions; returns how many were legal."""
    prices, rng = pricer(hardware, mesh), random.Random(seed)
    found, compared = extract(model, mesh, decided, prices), Compared()
    for _ in range(40 * count):
        layout, options = found.decided.read(some_choices(found.decided, rng))
        compared.compare(found, layout, options, evaluated(model, mesh, layout, hardware, options, prices))
        assert not compared.faults, f"{model.name} on {mesh}: {compared.faults[0]}"
        if compared.layouts == count:
            break
    return compared.layouts


def compare_whole(seed: int, count: int) -> int:
    """A random question about every kind."""
    question = question_of(seed)
    asked = ((question.model, each.mesh, each.decided, question.hardware) for each in question.problems)
    return sum(compare_some(*each, seed, count) for each in asked)


@pytest.mark.parametrize("seed", [2, 5, 184])  # 184: a peak before backward, of layers that run again
@pytest.mark.one_in(4)
def test_tables_of_every_kind(seed: int) -> None:
    assert compare_whole(seed, 4)


@pytest.mark.parametrize(("recipe", "parts"), by_day(itertools.product(RECIPES, [1, 2]), first=1))
@pytest.mark.one_in(8)
def test_experts_in_float8(recipe: str, parts: int) -> None:
    """In which weights are made in eight bits by each pass, and gradients have operands of their own."""
    sizes = SMALL | {"layers": 2, "kv_heads": 2, "gated": True, "positions": "rotary"}
    model = experts(**sizes, dtype="bfloat16", float8=recipe)
    hardware = load_hardware(*(("h100", "torch") if parts == 1 else ("tpu-v7",)))
    asked = {"recompute": (False, "selective", True), "storage": ("layout", "zero3")}
    compare_prices(model, mtf.Mesh("x:2"), parts, hardware, 2, **asked)


def compare_prices(
    model: mtf.Model, mesh: mtf.Mesh, parts: int, hardware: Hardware, seed: int, **allowed: Any
) -> None:
    """Holds tables that are made as they are asked for against the lowered program, for random choices."""
    decided = decisions(model.training_step(parts).graph, mesh, SearchSpace(microbatches=(parts,), **allowed))
    prices, rng, compared = pricer(hardware, mesh), random.Random(seed), 0
    tables = TablePrices(Draft(model, mesh, decided, prices))
    while compared < 15:
        layout, options = decided.read(some_choices(decided, rng))
        try:
            cost = evaluate(model, mesh, layout, hardware, options, prices).cost
        except mtf.LayoutError:
            continue
        where = f"{model.name} on {mesh}: {layout}, {options}"
        assert tables.seconds(layout, options) == pytest.approx(cost.device_seconds, rel=PRICE), where
        compared += 1


@pytest.mark.parametrize(("name", "parts"), crossed([1, 2], every=4))
@pytest.mark.one_in(4)
def test_examples(name: str, parts: int) -> None:
    mesh = mtf.Mesh("data:2;model:2" if parts == 1 else "x:4")
    compare(EXAMPLES[name](), mesh, parts, load_hardware("tpu-v3"), seed=parts, count=5)


@pytest.mark.nightly
@pytest.mark.parametrize("parts", by_day([1, 2]))
def test_storage_over_some_axes(parts: int) -> None:
    allowed = {"storage": ("layout", "zero2@pod", "zero3", "hybrid"), "near": ("data",)}
    hardware, mesh = load_hardware("h100"), mtf.Mesh("pod:2;data:2")
    compare(EXAMPLES["transformer"](), mesh, parts, hardware, parts, 4, **allowed)


@pytest.mark.parametrize(
    ("mesh", "parts", "dtype"),
    by_day(
        [(*where, dtype) for where in (("data:3", 1), ("a:3;b:2", 2)) for dtype in ("float32", "bfloat16")],
        every=3,
    ),
)
@pytest.mark.one_in(2)
def test_shards_that_are_padded(mesh: str, parts: int, dtype: str) -> None:
    sizes = {"d_model": 20, "d_kv": 5, "heads": 4, "d_ff": 28, "vocab": 22, "batch": 12, "length": 6}
    model = transformer(layers=2, **sizes, dtype=dtype, clip_norm=1.0)
    compare(model, mtf.Mesh(mesh), parts, load_hardware("tpu-v4"), parts, 4)


@pytest.mark.parametrize("parts", by_day([1, 2], first=1))
@pytest.mark.nightly
def test_what_splits_further_elsewhere(parts: int) -> None:
    hardware, mesh = load_hardware("tpu-v4"), mtf.Mesh("data:2;model:2")
    compare(EXAMPLES["transformer"](), mesh, parts, hardware, parts, 5, elsewhere=("length",), **PINNED)


@pytest.mark.parametrize("parts", by_day([1, 2]))
def test_messages_in_chunks_beside_products(parts: int) -> None:
    hardware, mesh = load_hardware("tpu-v4"), mtf.Mesh("model:4")
    asked = {"elsewhere": ("length",), "collective_matmul": ("d_ff", "heads", "vocab")}
    compare(EXAMPLES["transformer"](), mesh, parts, hardware, parts, 5, **asked, **PINNED)


NARROW: dict[str, Any] = {"layers": 2, "d_model": 64, "d_kv": 16, "kv_heads": 4, "d_ff": 32}
NARROW |= {"vocab": 64, "batch": 4, "length": 256, "positions": "rotary", "dtype": "bfloat16"}
IN_CHUNKS: dict[str, dict[str, Any]] = {
    "wide": {},
    "narrow": NARROW,
    "deep": {**NARROW, "layers": 8, "d_ff": 128, "gated": True},
}
"""Sizes of a transformer whose peak is in feed-forward layers, or among the products of attention."""


@pytest.mark.parametrize("sizes", IN_CHUNKS)
@pytest.mark.parametrize("chunks", [(), ("heads",), ("d_ff",), ("d_ff", "heads")])
@pytest.mark.one_in(8)
def test_what_chunks_hold_is_counted_once(sizes: str, chunks: tuple[str, ...]) -> None:
    """Products of one gather run side by side, after all that does not wait for them: no row has what others
    added up so far besides their results, what is not there yet, or what is gone."""
    model, mesh = transformer(**IN_CHUNKS[sizes]), mtf.Mesh("data:2;model:2")
    space = SearchSpace(microbatches=(1,), elsewhere=("length",), collective_matmul=("d_ff", "heads"))
    decided = decisions(model.training_step(1).graph, mesh, space)
    evaluator = Evaluator(model, load_hardware("tpu-v4" if sizes == "wide" else "h100"))
    for layout in map(mtf.Layout, ("batch:data;heads:model", "batch:data;heads:model;d_ff:model")):
        own = decided.write(layout, mtf.Options(collective_matmul=frozenset(chunks)))
        own |= {written("length"): ("model",)}
        # Chunks stay a choice: the rows hold for both.
        free = decided.of(CollectiveMatmul)
        alone = decided.within({n: [c] for n, c in own.items() if n not in free})
        search = SubproblemSearch.whole(evaluator, mesh, alone)
        choices = search.extraction.choices(*decided.read(own))
        assert choices is not None
        peak = search.evaluate(choices).memory.peak
        assert 0.9 * peak < max(row.use(choices) for row in search.rows) <= peak + ROUNDING


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_messages_in_chunks_beside_products_on_more_axes(seed: int) -> None:
    model = transformer(**{**SMALL, "layers": 2}, kv_heads=2, gated=True)
    hardware = load_hardware("a100" if seed % 2 else "tpu-v5e")
    asked = {"elsewhere": ("length",), "collective_matmul": ("d_ff", "heads", "vocab")}
    compare(model, mtf.Mesh("x:2;y:2"), 1 + seed // 2, hardware, seed, 40, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("name, hardware", crossed(["a100", "tpu-v5e", "cpu-local"], every=12))
@pytest.mark.one_in(2)
def test_examples_on_more_axes_and_hardware(name: str, hardware: str) -> None:
    compare(EXAMPLES[name](), mtf.Mesh("data:2;model:2"), 2, load_hardware(hardware), seed=7, count=6)


@pytest.mark.parametrize("hardware", by_day(["tpu-v4", "a100", "cpu-local"], every=3, first=1))
@pytest.mark.parametrize("name", PASSING)
@pytest.mark.one_in(4)
def test_what_is_passed_on_without_work(name: str, hardware: str) -> None:
    parts = 2 if hardware == "a100" else 1
    compare(PASSING[name](), mtf.Mesh("x:2;y:2"), parts, load_hardware(hardware), seed=3, count=5)


@pytest.mark.parametrize(
    "dtype, hardware", [("float32", "h100"), ("bfloat16", "tpu-v5e"), ("bfloat16", "a100")]
)
def test_what_two_operations_convert_alike(dtype: str, hardware: str) -> None:
    compare(towers(dtype), mtf.Mesh("data:2;model:2"), 1, load_hardware(hardware), seed=11, count=5)


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_attention_to_keys_on_other_devices(parts: int) -> None:
    pins = dict.fromkeys(("length", "memory_length"), ("x",))
    model = transformer(**{**SMALL, "layers": 2}, positions="rotary", kv_heads=2, dtype="bfloat16")
    hardware = load_hardware("tpu-v5e" if parts == 1 else "a100")
    asked = {"pins": pins, "context": ("gather", *FORMS)}
    compare(model, mtf.Mesh("x:2;y:2"), parts, hardware, seed=5, count=6 if parts == 1 else 60, **asked)


@pytest.mark.parametrize("seed", by_day([4, 9, 14, 19, 24, 29, 34, 39], every=8, first=3))
def test_attention_to_renamed_tensors(seed: int) -> None:
    """What backward names once more for itself it moves for itself, too (`SecondRuns.beside`)."""
    machine, further = (found[seed % 4] for found in (MACHINES, ("length", "d", "f", "batch")))
    asked = {"elsewhere": (further,), "recompute": (False, "selective", True), "storage": ("layout", "zero3")}
    compare_prices(
        whole_model(seed), mtf.Mesh("x:2;y:2"), 1 + seed % 2, load_hardware(machine), seed, **asked
    )


@pytest.mark.parametrize("seed", by_day(range(6), every=3))
def test_random_models(seed: int) -> None:
    check_random(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(6, 106, 20))
def test_many_random_models(first: int) -> None:
    for seed in range(first, first + 20):
        check_random(seed)


def check_random(seed: int) -> None:
    mesh = mtf.Mesh(["x:2;y:2", "x:4", "x:2;y:4"][seed % 3])
    hardware = load_hardware(HARDWARE[seed % len(HARDWARE)])
    for parts in (1, 2):
        compare(random_model(seed), mesh, parts, hardware, seed, count=8)


REACHED: dict[str, tuple[str, int, bool, int, int]] = {
    "nothing is split": ("", 0, False, 1, 0),
    "copies are gathered in loops": ("batch:data;d_ff:model", 3, False, 1, 0),
    "copies are gathered where a loop is recomputed": ("batch:data;d_ff:model", 3, True, 1, 32 * 16),
    "gradients are scattered in a loop": ("batch:data;d_ff:model", 2, False, 2, 0),
}
"""Layout, stage of storage, whether layers are recomputed, microbatches, and what rows leave out: the bytes
of the piece that a reduce-scatter makes of a gradient (d_ff:32 over 4 devices, d_model:16), for it is alive
with all of that gradient in no step that splits nothing."""


@pytest.fixture(scope="module")
def of_transformer() -> Callable[[int], tuple[mtf.Model, Extraction]]:
    """A transformer, and its tables for a number of microbatches."""
    model, mesh, hardware = EXAMPLES["transformer"](), mtf.Mesh("data:2;model:2"), load_hardware("tpu-v3")
    return cache(lambda parts: (model, extraction(model, mesh, parts, hardware)))


@pytest.mark.parametrize("name", REACHED)
@pytest.mark.one_in(4)
def test_rows_reach_the_peak(
    name: str, of_transformer: Callable[[int], tuple[mtf.Model, Extraction]]
) -> None:
    layout, stage, recomputed, parts, piece = REACHED[name]
    (model, found), hardware = of_transformer(parts), load_hardware("tpu-v3")
    mesh = found.mesh
    classes = grouped(model.training_step(parts).graph).values()
    stages = {v.name: stage for members in classes for v in members if stage}
    again = {"layers"} if recomputed else ()
    options = mtf.Options(storage=stages, recompute=frozenset(again), microbatches=parts)
    choices = found.choices(mtf.Layout(layout), options)
    assert choices is not None
    peak = evaluate(model, mesh, mtf.Layout(layout), hardware, options).memory.peak
    assert max(row.use(choices) for row in found.memory.rows(again_in(options))) == peak - piece


@pytest.mark.parametrize("name", ["branching", "reversible"])
def test_natural_rows_hold_what_splits_leave_of_everything(name: str) -> None:
    model, mesh = EXAMPLES[name](), mtf.Mesh("data:2;model:2")
    graph, prices = model.training_step().graph, pricer(load_hardware("tpu-v3"), mesh)
    decided = decisions(graph, mesh)
    known = legal_problem(model, mesh, decided, prices)
    layouts = mtf.Layout(), mtf.Layout(f"{model.batch_dim}:data+model")
    choices = [known.choices(layout, mtf.Options()) for layout in layouts]
    assert choices[0] is not None and choices[1] is not None
    whole, split = (max(row.use(c) for row in known.memory.rows()) for c in choices)
    program = model.lower(mesh, mtf.Layout(), mtf.Options())
    assert whole == memory(program).peak
    assert memory(program).variables < split < whole


def test_the_problem_does_not_grow_with_the_layers() -> None:
    few, many = (
        extraction(transformer(**{**SMALL, "layers": n}), mtf.Mesh("x:2"), 1, load_hardware("tpu-v3"))
        for n in (4, 48)
    )
    assert few.problem.sizes == many.problem.sizes
    # A stack of more layers is a larger message, so fewer of them travel together.
    assert len(many.problem.terms) <= len(few.problem.terms)
    for again in ((), ("layers",)):
        rows = again_in(mtf.Options(recompute=frozenset(again)))
        sizes = [[len(row.entries) for row in found.memory.rows(rows)] for found in (few, many)]
        assert sizes[0] == sizes[1]


SHARED: dict[str, tuple[Callable[[], mtf.Model], str, mtf.Options]] = {
    "a stack that nothing reads": (lambda: experts(**SMALL), "expert_batch:x", mtf.Options()),
    "a stack that nothing reads, made anew": (
        lambda: experts(**SMALL),
        "router:x",
        mtf.Options(recompute=frozenset({"layers"})),
    ),
    "what backward alone reads of a second run": (
        lambda: experts(**SMALL),
        "length:x",
        mtf.Options(recompute=frozenset({"layers"})),
    ),
    "positions of two lengths": (lambda: translator(**SMALL), "positions:x+y", mtf.Options()),
}
"""What several operations share, or none needs: model, layout and options that show it."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SHARED)
def test_what_operations_share_is_counted_once(name: str) -> None:
    build, layout, options = SHARED[name]
    model, mesh, hardware = build(), mtf.Mesh("x:2;y:2"), load_hardware("h100")
    graph, prices = model.training_step().graph, pricer(hardware, mesh)
    tables = TablePrices(Draft(model, mesh, decisions(graph, mesh), prices))
    cost = evaluate(model, mesh, mtf.Layout(layout), hardware, options, prices).cost
    assert tables.seconds(mtf.Layout(layout), options) == pytest.approx(cost.device_seconds, rel=PRICE)


EXCHANGED = ("experts:x;heads:y;d_ff:y", "experts:x;heads:y", "experts:x+y;heads:y", "experts:y;heads:y")


@pytest.mark.parametrize("rules", EXCHANGED)
@pytest.mark.parametrize("there", [(), ("length",), ("length", "expert_length"), ("expert_length",)])
@pytest.mark.one_in(8)
def test_what_experts_exchange_in_parts(rules: str, there: tuple[str, ...]) -> None:
    model, mesh, hardware = experts(**SMALL), mtf.Mesh("x:2;y:2"), load_hardware("h100")
    layout = mtf.Layout(";".join(["batch:x", rules, *(f"{dim}@elsewhere:y" for dim in there)]))
    graph, prices = model.training_step().graph, pricer(hardware, mesh)
    decided = decisions(graph, mesh, SearchSpace(elsewhere=("length", "expert_length")))
    tables = TablePrices(Draft(model, mesh, decided, prices))
    cost = evaluate(model, mesh, layout, hardware, mtf.Options(), prices).cost
    assert tables.seconds(layout, mtf.Options()) == pytest.approx(cost.device_seconds, rel=PRICE)


@pytest.mark.parametrize("further", [(), ("length",), ("length", "memory_length")])
@pytest.mark.one_in(3)
def test_forms_of_attention_that_are_not_lowered_would_be_refused(
    further: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mesh = transformer(**{**SMALL, "layers": 2}), mtf.Mesh("x:2;y:2")
    pins = dict.fromkeys(("batch", "d_model", "d_ff", "heads", "d_kv", "vocab", "positions"), ())

    def entries() -> list[set[tables.Assignment]]:
        asked = {"pins": pins, "context": ("gather", *FORMS), "elsewhere": further}
        found = extraction(model, mesh, 1, load_hardware("tpu-v3"), **asked)
        return [{*t.entries} for t in found.tables if t.cluster.crossed]

    some = entries()
    monkeypatch.setattr(tables, "_crossing", lambda cluster, names, found, given: found)
    assert some and some == entries()


def test_masks_of_dropout_are_counted_once() -> None:
    """Two products that layers keep are alike, but masks are held beside the first one."""
    graph = mtf.Graph("dropped")
    rows, width, layers = mtf.Dim("rows", 8), mtf.Dim("width", 32), mtf.Dim("layers", 4)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        for name in ("a", "b"):
            w = graph.variable(name, [width, mtf.Dim("inner", 32)], mtf.Normal(0.1))
            y = mtf.rename(mtf.einsum([x, w], [rows, mtf.Dim("inner", 32)]), inner="width")
            x = x + mtf.dropout(y, 0.1)
        return x

    loss = mtf.reduce_mean(mtf.scan(layer, graph.input("x", [rows, width], "float32"), layers))
    model, mesh = mtf.Model(loss, mtf.SGD(0.1), name="dropped"), mtf.Mesh("pipe:2")
    asked = SearchSpace(
        pipeline=("layers",), microbatches=(1,), storage=("layout",), recompute=("keep=products",)
    )
    compared = 0
    for each in subproblems(model, [mesh], asked):
        compared += compare_some(model, mesh, each.decided, load_hardware("h100", "torch"), 1, 2)
    assert compared
