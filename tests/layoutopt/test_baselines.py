"""What stands beside an answer, and what is remembered to make it."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest

import layoutopt.optimize.evaluation.evaluator as evaluator_module
import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryRules
from examples.transformer_lm import model as transformer
from layoutopt.cli.units import parse_bytes
from layoutopt.formulation.shared import SharedContext
from layoutopt.optimize.answers import alternatives, planning
from layoutopt.optimize.answers.alternatives import HEADROOM, TIED
from layoutopt.optimize.entry import search
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import Evaluator, evaluate
from layoutopt.optimize.heuristics.baselines import HEURISTICS, Pinned
from layoutopt.optimize.problems import request
from layoutopt.optimize.problems.request import Request
from layoutopt.plan.build import options_of
from layoutopt.plan.schema import Alternative
from layoutopt.space.decisions import SearchSpace
from mesh_tf_core.errors import InfeasibleError
from mesh_tf_core.ir.schedules import ONE_WAY
from mesh_tf_core.lower.uses import compact
from reports.views.layouts import layouts
from reports.views.view import Cell
from tests.layoutopt.every_kind import opened, some_machine, whole_model
from tests.layoutopt.models import EXAMPLES
from tests.marks import by_day

V3 = load_hardware("tpu-v3")


@pytest.mark.nightly
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.one_in(2)
def test_baselines_of_a_searched_mesh_come_to_what_their_layouts_do(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = EXAMPLES["mlp"](), {"devices": 4, "hardware": V3, "microbatches": (1,)}
    monkeypatch.setattr(Request, "late", late)
    roomy = search(model, **asked)
    # Some fit and some do not; the reasons speak of the axes that the plan has.
    peaks = sorted(a.predicted.peak_memory_bytes for a in roomy.alternatives if a.predicted)
    plan = search(model, memory=(peaks[0] + peaks[-1]) / 2, **asked)
    assert {a.feasible for a in plan.alternatives} >= {False, True}
    for each in plan.alternatives:
        options = options_of(each)
        own = evaluate(model, mtf.Mesh(each.mesh), mtf.Layout(each.layout), V3, options)
        assert each.predicted == own.predicted
        reason = own.reason((peaks[0] + peaks[-1]) / 2)
        assert each.reason == reason or (late and reason and each.reason and each.reason.endswith(reason))
    with pytest.raises(InfeasibleError) as error:
        search(model, memory=100, **asked)
    assert not re.search(r"axis\d", f"{error.value}{plan.data.notes}")


QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mesh": ("mlp", {"mesh": "x:4"}),
    "devices, microbatches": ("mlp", {"devices": 2, "microbatches": (1, 2), "storage": ("layout", "zero3")}),
    "recompute": ("transformer", {"mesh": "x:2", "storage": ("layout",), "microbatches": (1,)}),
}


def with_memory(usable: float) -> Hardware:
    """A device with so many usable bytes, two of which are a chip."""
    return load_hardware(f"tpu-v3,memory={2 * math.floor(usable)}B,memory_reserve=0B")


@pytest.mark.parametrize("name", by_day(QUESTIONS))
@pytest.mark.one_in(2)
@pytest.mark.nightly
def test_what_barely_fits_has_a_remedy_that_helps(name: str) -> None:
    """The fastest layout with headroom is offered, and a search with the advised limit finds it."""
    model, asked = EXAMPLES[QUESTIONS[name][0]](), QUESTIONS[name][1]
    roomy = search(model, hardware=V3, alternatives=False, **asked)
    machine = with_memory(1.001 * roomy.predicted.peak_memory_bytes)
    plan = search(model, hardware=machine, **asked)
    (note,) = [n for n in plan.data.notes if "for more headroom" in n]
    advised = re.search(r"for more headroom, search with --memory (\S+) \(with memory headroom: ", note)
    assert advised is not None
    eased = search(model, hardware=machine, memory=parse_bytes(advised[1]), **asked)
    assert not [n for n in eased.data.notes if "of the memory is free" in n]
    offered = plan.alternative(HEADROOM)
    assert offered.predicted is not None and plan.solver.proven and eased.solver.proven
    assert offered.predicted.step_seconds == pytest.approx(eased.predicted.step_seconds, rel=1e-9)


def test_no_remedy_is_advised_that_nothing_fits() -> None:
    """The layout with the least memory leaves nothing free either."""
    model, asked = EXAMPLES["mlp"](), {"mesh": "x:2", "microbatches": (1,)}
    least = search(model, hardware=V3, objective="memory", alternatives=False, **asked)
    plan = search(model, hardware=with_memory(1.001 * least.predicted.peak_memory_bytes), **asked)
    (note,) = [n for n in plan.data.notes if "of the memory is free" in n]
    assert note.endswith(
        "; no layout searched leaves enough, so use more devices or a smaller batch, or --allow everything"
    )


@pytest.mark.parametrize("tie", by_day([0.5, alternatives.TIE]))
@pytest.mark.nightly
def test_half_the_memory_is_offered_where_it_takes_no_longer(
    tie: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If and only if the fastest layout with half the memory is within the tie."""
    model, asked = EXAMPLES["mlp"](), {"mesh": "x:4", "microbatches": (1,), "storage": ("layout", "zero3")}
    roomy = search(model, hardware=V3, alternatives=False, **asked)
    step, peak = roomy.predicted.step_seconds, roomy.predicted.peak_memory_bytes
    lean = search(model, hardware=V3, alternatives=False, memory=peak / 2, **asked)
    monkeypatch.setattr(alternatives, "TIE", tie)
    plan = search(model, hardware=with_memory(1.5 * peak), **asked)
    offered = [a for a in plan.alternatives if a.name == TIED]
    assert bool(offered) == (lean.predicted.step_seconds <= step * (1 + tie))
    for each in offered:
        assert each.predicted is not None and each.predicted.peak_memory_bytes <= peak / 2
        assert each.predicted.step_seconds == pytest.approx(lean.predicted.step_seconds, rel=1e-9)


def check_whole(seed: int) -> None:
    """Of a random model, where every kind may be chosen: plans by name cost what their layouts do."""
    model, rng = whole_model(seed), random.Random(seed)
    machine = some_machine(rng)
    allowed = replace(opened(rng, model), microbatches=(1,), pipeline=(), schedule=("gpipe",))
    plan = search(model, mesh="x:2", hardware=machine, **allowed.keywords)
    assert {a.name for a in plan.alternatives} >= {"replicated", "data parallel"}
    for each in plan.alternatives:
        own = evaluate(
            model, mtf.Mesh(each.mesh), mtf.Layout(each.layout, each.refined), machine, options_of(each)
        )
        assert each.predicted == own.predicted, each.name


@pytest.mark.parametrize("seed", by_day(range(12), every=12, first=2))
def test_plans_by_name_cost_what_their_layouts_do_whatever_is_allowed(seed: int) -> None:
    check_whole(seed)


def test_without_time_only_the_layouts_by_name_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "late", True)
    plan = search(EXAMPLES["mlp"](), mesh="x:2", hardware=V3, time_limit=1e6)
    names = {a.name for a in plan.alternatives}
    assert names >= {"replicated", "data parallel"} and not names & set(HEURISTICS)
    (note,) = [
        n for n in plan.data.notes if "the searches of some named layouts reached their time limit" in n
    ]
    assert all(name in note for name in HEURISTICS)
    assert {a.name for a in plan.alternatives if a.cut} == {
        a.name for a in plan.alternatives if a.name in note
    }
    table = layouts(plan.data)
    step = [c.key for c in table.columns].index("step_seconds")
    assert any(row[step].text.startswith("≤ ") for row in table.rows if isinstance(row[step], Cell))


@pytest.mark.nightly
@pytest.mark.parametrize("part", by_day([0.6, 1.0]))
def test_a_name_fits_not_only_where_all_of_it_was_searched(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time, a name whose layout as written is too large is tried with the options that hold least;
    if that is too large too, it is undecided."""
    model, asked = EXAMPLES["transformer"](), {"mesh": "x:2", "storage": ("layout", "zero3")}
    roomy = named_without_time(monkeypatch, model, **asked)
    peaks = {a.name: a.predicted.peak_memory_bytes for a in roomy if a.predicted is not None}
    limit = part * peaks["fully sharded (FSDP)"]
    found = named_without_time(monkeypatch, model, memory=limit, **asked)
    ends = {a.name: a.feasible for a in found}
    assert False not in {ends[name] for name in ("data parallel", "fully sharded (FSDP)", "tensor parallel")}
    assert not ends["replicated"] and ends["fully sharded (FSDP)"]
    assert all("not every layout of this name" in (a.reason or "") for a in found if a.feasible is None)


@pytest.mark.nightly
def test_a_name_is_tried_with_the_most_microbatches_that_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EXAMPLES["transformer"]()
    numbers = (1, model.examples // 2, model.examples)  # a device has no example of the last ones
    asked = {"mesh": "x:2", "storage": ("layout", "zero3"), "microbatches": numbers}

    def fsdp(**more: Any) -> Alternative:
        found = named_without_time(monkeypatch, model, **asked, **more)
        return next(a for a in found if a.name == "fully sharded (FSDP)")

    known = fsdp()
    options = replace(options_of(known), recompute=frozenset({"layers"}), microbatches=numbers[1])
    least = evaluate(model, mtf.Mesh("x:2"), mtf.Layout(known.layout), V3, options).memory.peak
    assert known.predicted and known.predicted.peak_memory_bytes > least and fsdp(memory=least).feasible


def named_without_time(patch: pytest.MonkeyPatch, model: mtf.Model, **asked: Any) -> list[Alternative]:
    patch.setattr(Request, "late", True)
    return search(model, hardware=V3, time_limit=1e6, **asked).alternatives


@pytest.mark.parametrize(("name", "most"), [("BESIDE_SHARE", 0.0), ("BEYOND", 1e-6)])
def test_what_stands_beside_an_answer_does_not_take_for_ever(
    name: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit too, neither for an answer of seconds nor for one of minutes."""
    monkeypatch.setattr(request, "BESIDE", 1e-6)
    monkeypatch.setattr(planning if name == "BESIDE_SHARE" else request, name, most)
    plan = search(EXAMPLES["mlp"](), mesh="x:2", hardware=V3)
    assert plan.solver.status == "OPTIMAL" and not {a.name for a in plan.alternatives} & set(HEURISTICS)
    assert [n for n in plan.data.notes if "the searches of some named layouts reached their time limit" in n]


@pytest.mark.nightly
def test_with_time_all_are_there() -> None:
    plan = search(EXAMPLES["mlp"](), mesh="x:2", hardware=V3)
    assert {a.name for a in plan.alternatives} >= set(HEURISTICS)
    assert not [
        n for n in plan.data.notes if "the searches of some named layouts reached their time limit" in n
    ]
    assert not any(a.cut for a in plan.alternatives)


def test_a_search_evaluates_no_layout_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def counting(*args: object, **how: object) -> Evaluation:
        _, mesh, layout, _, options, _ = args
        assert isinstance(options, mtf.Options)
        asked.append((mesh, layout, options.key))
        return evaluate(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluator_module, "evaluate", counting)
    search(EXAMPLES["transformer"](), mesh="x:2", hardware=V3, microbatches=(1,))
    assert asked and len(set(asked)) == len(asked)


def test_what_is_not_legal_stays_so() -> None:
    evaluator = Evaluator(EXAMPLES["mlp"](), V3)
    for _ in range(2):
        with pytest.raises(mtf.LayoutError, match="no axis 'z'"):
            evaluator(mtf.Mesh("x:2"), mtf.Layout("batch:z"))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.one_in(3)
def test_with_nothing_split_programs_differ_in_their_mesh_only(name: str) -> None:
    model = EXAMPLES[name]()
    for mesh in (mtf.Mesh("x:2;y:2"), mtf.Mesh("x:8")):
        program = compact(replace(SharedContext(model).program(), mesh=mesh))
        assert program == model.lower(mesh, mtf.Layout())


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.one_in(3)
def test_no_point_counts_a_tensor_twice(name: str) -> None:
    (points,) = SharedContext(EXAMPLES[name]()).points(frozenset(), MemoryRules(fuses=Fuses.ALL))
    for point in range(len(points.instrs)):
        keys = [key for key, _ in points.at(point) if key[0] == "tensor"]
        assert len(keys) == len(set(keys)), points.instrs[point].text()


@pytest.mark.parametrize("schedule", ONE_WAY)
def test_splits_without_stages_recompute_no_ticks(schedule: str) -> None:
    """A simple search may find a layout without stages, where all that is allowed is about stages."""
    model, mesh = transformer(layers=2, batch=8, d_model=8, d_ff=16, vocab=16, length=8), mtf.Mesh("x:2")
    allowed = SearchSpace(schedule=(schedule,), recompute=(True,), pipeline=("layers",))
    decided = Pinned(model, mesh, mtf.Layout()).decided(allowed, 2)
    assert decided is not None
    layout, options = decided.read({n: found[-1] for n, found in decided.options.items()})
    assert {each.dim for each in options.recompute} == {"layers"} and options.schedule == "gpipe"
    assert evaluate(model, mesh, layout, load_hardware("tpu-v3"), options).memory.peak


@pytest.mark.nightly
def test_greedy_has_the_microbatches_it_was_searched_with() -> None:
    model = EXAMPLES["mlp"]()
    plan = search(model, mesh="x:2;y:2", hardware=V3, microbatches=(4,))
    (greedy,) = [a for a in plan.alternatives if a.name == "greedy"]
    assert greedy.microbatches == 4
    own = evaluate(model, plan.mesh, mtf.Layout(greedy.layout), V3, options_of(greedy))
    assert greedy.predicted == own.predicted
