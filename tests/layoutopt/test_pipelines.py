"""Pipelines as the search decides them: tables add up to the price of the program, rows count no more than
its peak, and the answer is the best of all layouts, tried one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.hardware.model import CompilerName
from costmodels.pricing.compilers import COMPILERS
from costmodels.pricing.pricer import pricer
from examples import transformer_seq2seq
from examples.mlp import model as mlp
from examples.moe_lm import model as experts
from layoutopt import search
from layoutopt.analysis.explain import without
from layoutopt.formulation.extract import extract
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import Evaluator, evaluate
from layoutopt.optimize.problems.subproblems import Subproblem, subproblems
from layoutopt.solver import evaluate as value_of
from layoutopt.space.decisions import SearchSpace, decisions
from layoutopt.space.recompute import again_in
from mesh_tf_core.lower.remat_policy import Policies, policies
from tests.core.test_pipelines import model as reading
from tests.layoutopt.models import SMALL, some_choices
from tests.layoutopt.test_unequal_links import nodes_of
from tests.marks import by_day

PRICE = 1e-9
ROUNDING = 1 + 1e-12


def compare(
    model: mtf.Model,
    on: str,
    parts: int,
    hardware: str,
    axes: str,
    count: int,
    of: str = "layers",
    compiler: CompilerName | None = None,
    tight: float = 0.8,
    **more: Any,
) -> None:
    mesh, machine, rng = mtf.Mesh(on), load_hardware(hardware), random.Random(count)
    machine = machine if compiler is None else replace(machine, compiler=compiler)
    stages = {of: tuple(axes.split("+"))}
    allowed = SearchSpace(microbatches=(parts,), stages=stages, **more)
    counts = {of: mesh.group_size(stages[of])}
    graph = model.training_step(parts, counts, *allowed.schedule, allowed.again).graph
    decided = decisions(graph, mesh, allowed)
    prices = pricer(machine, mesh)
    found, compared = extract(model, mesh, decided, prices), 0
    least = Evaluator(model, machine).least(mesh, Subproblem.of(mesh, decided).plans)
    assert bool(least) is prices.pieces_cost_more
    while compared < count:
        layout, options = decided.read(some_choices(decided, rng))
        choices = found.choices(layout, options)
        try:
            evaluation = evaluate(model, mesh, layout, machine, options, prices)
        except mtf.LayoutError:
            assert choices is None, f"{layout} is not legal, but the tables have it"
            continue
        assert choices is not None, f"{layout} is legal, but the tables refuse it"
        objective = value_of(found.problem, choices).objective
        assert objective == pytest.approx(evaluation.cost.step_seconds, rel=PRICE), (layout, options)
        assert least <= evaluation.cost.step_seconds * ROUNDING, (layout, options)
        rows = found.memory.rows() + found.memory.rows(again_in(options))
        counted = max(row.use(choices) for row in rows)
        assert tight * evaluation.memory.peak <= counted <= evaluation.memory.peak * ROUNDING, (
            layout,
            options,
        )
        assert found.read(choices) == (layout, options)
        compared += 1


LENGTH: dict[str, Any] = {"elsewhere": ("length",)}
STORED: dict[str, Any] = {"pins": {"positions": ("pipe", "t"), "batch": ("t",)}}
"""A weight that is gathered under another name than its variable's."""
KEPT = "layers:keep=products+attention"


def again(text: str) -> Policies:
    """What of stages runs again that go backward at once."""
    return policies([text])


CASES: list[tuple[str, str, int, str, str, dict[str, Any]]] = [
    ("reading", "pipe:4;t:2", 2, "a100", "pipe", {}),
    ("transformer", "a:2;b:2;t:2", 4, "tpu-v3", "a+b", {"recompute": (False, "selective", True)}),
    ("transformer", "pipe:2;t:2", 2, "h100", "pipe", LENGTH),
    ("transformer", "t:2;pipe:2", 8, "cpu-local", "pipe", {}),
    ("experts", "pipe:2;t:2", 2, "tpu-v5e", "pipe", {"pins": {"length": ()}}),
    ("reading", "pipe:2;t:2", 4, "a100", "pipe", {"schedule": ("circular:2",)}),
    ("transformer", "t:2;pipe:2", 4, "tpu-v3", "pipe", {"schedule": ("circular:2",)}),
    ("experts", "pipe:2;t:2", 2, "h100", "pipe", {"pins": {"length": ()}, "schedule": ("circular:2",)}),
    ("transformer", "a:2;b:2;t:2", 4, "tpu-v3", "a", {**LENGTH, "schedule": ("circular:2",)}),
    ("transformer", "t:2;pipe:2", 4, "h100", "pipe", {"schedule": ("interleaved:2",)}),
    ("experts", "pipe:2;t:2", 2, "tpu-v5e", "pipe", {"pins": {"length": ()}, "schedule": ("interleaved:2",)}),
    ("transformer", "pipe:2;t:2", 2, "h100", "pipe", {**LENGTH, "schedule": ("interleaved:2",)}),
    ("transformer", "pipe:2;t:2", 2, "h100", "pipe", {**LENGTH, **STORED, "schedule": ("1f1b",)}),
    ("transformer", "a:2;b:2;t:2", 4, "tpu-v3", "a+b", {"schedule": ("1f1b",)}),
    ("transformer", "t:2;pipe:2", 8, "h100", "pipe", {"schedule": ("1f1b",)}),
    ("experts", "pipe:2;t:2", 2, "tpu-v5e", "pipe", {"pins": {"length": ()}, "schedule": ("1f1b",)}),
    ("five", "pipe:2;t:2", 2, "h100", "pipe", {"schedule": ("1f1b",)}),
    ("five", "pipe:2;t:2", 4, "h100", "pipe", {"schedule": ("zb-h1",)}),
    ("experts", "pipe:2;t:2", 2, "tpu-v5e", "pipe", {"pins": {"length": ()}, "schedule": ("zb-h1",)}),
    ("transformer", "a:2;b:2;t:2", 4, "a100", "a", {"schedule": ("zb-h1",), "again": again("layers")}),
    ("five", "pipe:4;t:2", 2, "tpu-v3", "pipe", {}),
    ("both", "pipe:2;t:2", 2, "h100", "pipe", {"of": "decoder_layers", "schedule": ("interleaved:2",)}),
    ("transformer", "t:2;pipe:2", 4, "h100", "pipe", {"schedule": ("1f1b",), "again": again("tick")}),
    ("experts", "pipe:2;t:2", 2, "tpu-v5e", "pipe", {"schedule": ("1f1b",), "again": again("layers")}),
    ("transformer", "a:2;b:2;t:2", 4, "a100", "a", {"schedule": ("1f1b",), "again": again(KEPT)}),
    ("transformer", "pipe:2;t:2", 2, "h100", "pipe", {"schedule": ("interleaved:2",), "again": again(KEPT)}),
]
ORDERED: list[tuple[str, str, int, str, str, dict[str, Any]]] = [
    ("transformer", "pipe:2;t:2", 4, "h100", "pipe", {"schedule": ("zb-v",), "again": again("layers")}),
    ("five", "pipe:2;t:2", 4, "h100", "pipe", {"schedule": ("dualpipev",)}),
    ("transformer", "pipe:2;t:2", 4, "h100", "pipe", {"schedule": ("dualpipe",)}),
]
"""Those that only programs for each stage run."""


def large() -> mtf.Model:
    from examples.transformer_lm import model as transformer

    sizes = {"layers": 8, "d_model": 4096, "d_kv": 128, "heads": 32, "d_ff": 16384, "vocab": 32768}
    return transformer(**sizes, batch=64, length=1024, dtype="bfloat16")


def built(name: str) -> mtf.Model:
    from examples.transformer_lm import model as transformer

    small = {**SMALL, "layers": 4}
    sizes = {n: x for n, x in SMALL.items() if n != "layers"}
    makers = {
        "reading": reading,
        "transformer": lambda: transformer(**small, dtype="bfloat16"),
        "experts": lambda: experts(**small),
        "five": lambda: transformer(**{**small, "layers": 5}, dtype="bfloat16"),
        "both": lambda: transformer_seq2seq.model(**sizes, encoder_layers=2, decoder_layers=4),
    }
    return makers[name]()


@pytest.mark.parametrize("case", by_day(range(len(CASES)), every=13))
@pytest.mark.one_in(2)
def test_tables_and_rows(case: int) -> None:
    name, mesh, parts, hardware, axes, more = CASES[case]
    compare(built(name), mesh, parts, hardware, axes, 8, **more)


APART = [
    (name, case)
    for name, kind in COMPILERS.items()
    if kind.memory.stage_programs
    for case in (*range(20), 22, *range(len(CASES), len(CASES + ORDERED)))
]
"""Compilers under which each stage is a program of its own, and cases."""


@pytest.mark.parametrize(("compiler", "case"), by_day(APART, every=13))
@pytest.mark.one_in(12)
def test_tables_and_rows_of_stages_with_programs_of_their_own(compiler: CompilerName, case: int) -> None:
    name, mesh, parts, _, axes, more = (CASES + ORDERED)[case]
    compare(built(name), mesh, parts, "h100", axes, 8, compiler=compiler, tight=0.75, **more)


def test_rows_count_what_ticks_add_up() -> None:
    """Gradients of stages, which are no tensors until the last tick."""
    model, mesh, machine = built("transformer"), mtf.Mesh("pipe:2;t:2"), load_hardware("h100")
    stages: dict[str, Any] = {"stages": {"layers": ("pipe",)}, "schedule": ("1f1b",), "recompute": (False,)}
    graph = model.training_step(4, {"layers": 2}, "1f1b").graph
    decided = decisions(graph, mesh, SearchSpace(microbatches=(4,), **stages))
    layout, options = decided.read({})
    found = extract(model, mesh, decided, pricer(machine, mesh))
    choices = found.choices(layout, options)
    assert choices is not None
    held = evaluate(model, mesh, layout, machine, options).memory
    assert max(row.use(choices) for row in found.memory.rows()) == held.peak


def test_a_search_without_stages_has_no_schedule() -> None:
    asked = SearchSpace(pipeline=("layers",), schedule=("1f1b",), microbatches=(1,))
    assert without(asked, "pipeline") == SearchSpace(microbatches=(1,))
    with pytest.raises(mtf.UserError, match="schedule=1f1b needs pipeline; this model has no"):
        search(mlp(), "data:2", schedule=("gpipe", "1f1b"))


@pytest.mark.nightly
@pytest.mark.parametrize("case", range(len(CASES)))
def test_many_layouts(case: int) -> None:
    name, mesh, parts, hardware, axes, more = CASES[case]
    compare(built(name), mesh, parts, hardware, axes, 100, **more)


B, D, E, L = mtf.Dim("batch", 8192), mtf.Dim("d", 4096), mtf.Dim("e", 4096), mtf.Dim("layers", 32)


def perceptrons() -> mtf.Model:
    g = mtf.Graph()
    x = g.input("x", [B, D], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        inner = mtf.relu(mtf.einsum([h, g.variable("wi", [D, E], mtf.Normal(0.1))], [B, E]))
        return h + mtf.einsum([inner, g.variable("wo", [E, D], mtf.Normal(0.1))], [B, D])

    return mtf.Model(mtf.reduce_mean(mtf.square(mtf.scan(layer, x, L))), mtf.SGD(0.1))


ALLOWED = SearchSpace(
    pins={"d": (), "e": ()},
    storage=("layout", "zero3"),
    microbatches=(1, 8),
    recompute=(False, True),
    pipeline=("layers",),
    schedule=("gpipe", "interleaved:4", "circular:4"),
)


@pytest.fixture(scope="module")
def every() -> tuple[mtf.Model, mtf.Mesh, list[Evaluation]]:
    """All layouts of two axes, one inside of nodes."""
    model, mesh, found = perceptrons(), mtf.Mesh("far:2;near:2"), []
    for subproblem in subproblems(model, [mesh], ALLOWED):
        if subproblem.refused:
            continue
        decided = subproblem.decided
        for chosen in itertools.product(*(decided.options[n] for n in decided.free)):
            layout, options = decided.read(dict(zip(decided.free, chosen, strict=True)))
            try:
                found.append(evaluate(model, mesh, layout, nodes_of(2), options))
            except mtf.LayoutError:
                continue
    return model, mesh, found


@pytest.mark.nightly
@pytest.mark.parametrize(("memory", "pipeline"), [(math.inf, {"layers": 2}), (6.8e9, {"layers": 4})])
def test_the_best_of_all(
    memory: float, pipeline: dict[str, int], every: tuple[mtf.Model, mtf.Mesh, list[Evaluation]]
) -> None:
    model, mesh, found = every
    asked: Mapping[str, Any] = {
        n: getattr(ALLOWED, n)
        for n in ("pins", "storage", "microbatches", "recompute", "pipeline", "schedule")
    }
    plan = search(model, mesh=mesh, hardware=nodes_of(2), memory=memory, alternatives=False, **asked)
    best = min((e for e in found if e.memory.peak <= memory), key=lambda e: e.cost.step_seconds)
    assert plan.predicted.step_seconds == pytest.approx(best.cost.step_seconds, rel=PRICE)
    assert plan.solver.status == "OPTIMAL"
    assert plan.data.pipeline == pipeline


@pytest.mark.nightly
@pytest.mark.one_in(2)
def test_rows_of_all_stages_have_names_of_their_own() -> None:
    """The stages between the ends have more layers than the first one, under a limit that little keeps."""
    sizes = {"layers": 6, "d_model": 64, "d_kv": 16, "heads": 4, "d_ff": 128, "vocab": 64}
    stages = {
        "pipeline": "layers",
        "schedule": "1f1b",
        "microbatches": (8,),
        "recompute": ("selective", True),
    }
    from examples.transformer_lm import model as transformer

    # A fast machine proves it within the limit.
    with pytest.raises(mtf.UserError, match=r"no layout (was found|of 'transformer_lm' fits)"):
        search(
            transformer(**sizes, batch=16, length=16),
            mesh="pipe:4",
            hardware="h100",
            framework="megatron",
            memory=8e5,
            time_limit=2,
            alternatives=False,
            **stages,
        )
