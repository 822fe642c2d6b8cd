"""Searches without words: the usual layouts first, then everything, within a time of its own."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from costmodels.hardware import machine_of
from examples import mlp, transformer_lm
from layoutopt.cli.defaults import _chosen
from layoutopt.optimize.answers import k_best
from layoutopt.optimize.driver.search import LayoutSearch
from layoutopt.optimize.entry import Limits, Objective, SearchSpace
from layoutopt.optimize.heuristics import incumbents
from layoutopt.optimize.heuristics.incumbents import compared_with
from layoutopt.optimize.problems import request
from layoutopt.optimize.problems.request import SearchStatus
from layoutopt.plan.build import load_plan
from layoutopt.space import allow
from layoutopt.space.keywords import gathered
from layoutopt.space.kind import Target
from mesh_tf_core.errors import InfeasibleError, LimitError, UndecidedError, UserError
from mesh_tf_core.ir.mesh import Mesh
from reports.views import facts
from tests.searching import search

ON: dict[str, Any] = {"mesh": "data:2", "hardware": "tpu-v5e", "microbatches": "1"}
MLP = mlp.model()
"""Made once: what a search lowers, another one finds there."""
TIGHT = 230e3
"""Bytes that no usual layout keeps to; weights and optimizer on hosts do."""
pytestmark = pytest.mark.usefixtures("everything_after")


def rows(plan: layoutopt.Plan) -> dict[str, str]:
    return dict(facts.searched(plan.data))


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.one_in(2)
def test_it_is_the_best_of_everything_and_tells_the_best_of_the_usual(objective: str) -> None:
    asked = {**ON, "objective": objective}
    every, usual = (search(MLP, **asked, allow=word) for word in ("everything", "usual"))
    plan = search(MLP, **asked)
    assert plan.solver.status == "OPTIMAL" and plan.solver.objective == every.solver.objective
    assert plan.solver.layouts_considered == every.solver.layouts_considered
    told = plan.data.usual
    assert told is not None and told.status == "OPTIMAL" and told.objective == usual.solver.objective
    assert told.layouts_considered == usual.solver.layouts_considered
    assert usual.data.usual is None and every.data.usual is None
    saved = "save nothing" if usual.solver.objective == every.solver.objective else "save "
    assert saved in rows(plan)["usual"] and "usual" not in rows(usual)


def test_what_is_not_usual_is_found() -> None:
    with pytest.raises(InfeasibleError):
        search(MLP, **ON, memory=TIGHT, allow="usual")
    plan = search(MLP, **ON, memory=TIGHT)
    assert plan.options.offload and rows(plan)["usual"].endswith("of the usual kinds fits")
    assert compared_with(plan, plan_hardware(plan)).offload
    assert not compared_with(plan, plan_hardware(plan)).collective_matmul


def plan_hardware(plan: layoutopt.Plan) -> Any:
    from costmodels.hardware import load_hardware

    return load_hardware(plan.data.hardware)


def test_the_usual_answer_stays_where_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "BEYOND", 0.0)
    plan, usual = search(MLP, **ON, top=3), search(MLP, **ON, allow="usual")
    assert plan.solver.status == "FEASIBLE" and 0 < plan.solver.bound <= plan.solver.objective
    assert plan.solver.objective == usual.solver.objective and "nothing so far" in rows(plan)["usual"]
    told = plan.data.usual
    assert told is not None and (told.status, told.gap) == ("OPTIMAL", 0.0)
    assert [a.name for a in plan.alternatives] == ["usual number 2", "usual number 3"]
    with pytest.raises(UndecidedError, match="allow=everything"):
        search(MLP, **ON, memory=9e4)


def test_ctrl_c_ends_the_search_of_everything() -> None:
    def told(now: SearchStatus) -> None:
        if now.space == "everything":
            raise KeyboardInterrupt

    plan = search(MLP, **ON, on_progress=told, keep_best=True)
    assert plan.stopped and plan.data.usual is not None and plan.data.usual.proven
    with pytest.raises(KeyboardInterrupt):
        search(MLP, **ON, on_progress=told)


def test_questions_about_the_answer_are_about_what_it_is_compared_with(tmp_path: Path) -> None:
    """Those of usual layouts, where it is one: also when the plan is read again."""
    plan = search(MLP, **ON)
    usual = search(MLP, **ON, allow="usual").allowed
    plan.save(tmp_path / "plan.json")
    for each in (plan, load_plan(tmp_path / "plan.json").of(MLP)):
        assert compared_with(each, plan_hardware(plan)) == usual != each.allowed
    assert _chosen(plan) == {"microbatches": "1"}  # `--like` asks the same


def test_what_is_said_is_part_of_both() -> None:
    plan = search(MLP, **ON, storage="layout", forbid="batch:data")
    for space in (plan.allowed, compared_with(plan, plan_hardware(plan))):
        assert space.storage == ("layout",) and space.forbid == {"batch": ("data",)}
    assert plan.data.details.search is not None and "storage" not in plan.data.details.search.first
    assert search(MLP, **ON, allow="-offload").data.usual is None
    assert search(MLP, **ON, objective="pareto").data.usual is None  # a whole frontier takes long


SMALL = transformer_lm.model(
    layers=2, d_model=16, d_kv=8, heads=2, d_ff=32, vocab=32, batch=4, length=8
)  # has layers, which everything may pipeline
ASKED: dict[str, dict[str, Any]] = {
    "pin": {"pins": "batch:data"},
    "forbid": {"forbid": "layers:data"},
    "diloco": {"diloco": "data:period=4,delay=1"},
    "framework": {"framework": "mesh-tensorflow"},
    "memory": {"memory": 2e4},
    "several": {"top": 3},
}
Outcome = tuple[type[Exception] | None, float]


def outcome(**asked: Any) -> Outcome:
    try:
        found = search(SMALL, **{**ON, **asked})
    except UserError as error:
        return type(error), math.inf
    return None, found.solver.objective


def stays(usual: Outcome, found: Outcome) -> bool:
    """Whether it is no worse, or nothing usual fits and what else does was not decided."""
    undecided = usual[0] is InfeasibleError and found[0] is UndecidedError
    return undecided or (found[0] in (usual[0], None) and found[1] <= usual[1])


@pytest.fixture(scope="module")
def usually() -> Callable[[str], Outcome]:
    return functools.cache(lambda name: outcome(**ASKED[name], allow="usual"))


@pytest.mark.parametrize("seconds", [0.0, pytest.param(1.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.one_in(6)
def test_a_search_is_never_worse_than_that_of_the_usual(
    name: str, seconds: float, usually: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "BEYOND", seconds)
    assert stays(usually(name), outcome(**ASKED[name]))


@pytest.mark.parametrize("limit", [pytest.param(s, marks=pytest.mark.nightly) for s in (0.5, 3.0)] + [0.1])
@pytest.mark.parametrize("name", [*ASKED][:5:2])
@pytest.mark.one_in(2)
def test_a_time_limit_ends_it_with_an_answer_or_a_known_error(name: str, limit: float) -> None:
    error, _ = outcome(**ASKED[name], time_limit=limit)
    assert error is None or issubclass(error, LimitError | InfeasibleError)


PLACES: dict[str, tuple[Any, str]] = {
    "listing": (incumbents, "listed"),
    "tables": (LayoutSearch, "_fixed"),
}
BY_DAY = (
    ("pin", "listing", KeyboardInterrupt),
    ("pin", "tables", UserError),
    ("memory", "tables", KeyboardInterrupt),
)
"""The others are tried at night."""


@pytest.mark.parametrize(
    ("name", "place", "raised"),
    [
        pytest.param(*each, marks=() if each in BY_DAY else pytest.mark.nightly)
        for each in itertools.product(ASKED, PLACES, (KeyboardInterrupt, UserError, LimitError))
    ],
)
@pytest.mark.one_in(4)
def test_what_ends_the_search_of_everything_leaves_the_usual_answer(
    name: str,
    place: str,
    raised: type[BaseException],
    usually: Callable[[str], Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, function = PLACES[place]
    real, runs, wide, planted = getattr(owner, function), LayoutSearch.run, list[bool](), list[bool]()

    def run(self: LayoutSearch, *args: Any) -> Any:
        wide[:] = [self.after is not None]
        return runs(self, *args)

    def broken(*args: Any, **more: Any) -> Any:
        if wide == [True]:
            wide.clear()
            planted.append(True)
            raise raised("planted")
        return real(*args, **more)

    monkeypatch.setattr(LayoutSearch, "run", run)
    monkeypatch.setattr(owner, function, broken)
    found = outcome(**ASKED[name], keep_best=True)
    assert name == "framework" or planted  # which narrows both to one space
    assert stays(usually(name), found)


def test_ctrl_c_beside_the_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(k_best, "k_best", stop)
    plan = search(MLP, **ON, top=3, keep_best=True)
    assert plan.stopped and plan.data.usual is not None


def test_what_is_said_counts_though_it_is_the_default() -> None:
    for asked in ({"recompute": (False, True)}, {"storage": SearchSpace().storage}):
        target = Target.on(machine_of("tpu-v5e", None, None), SMALL, Mesh("data:2"))
        (space, _), name = gathered("search", asked, (SearchSpace, None), (Limits, None)), *asked
        assert getattr(allow.spaces(space, [target], Objective.TIME)[1], name) == asked[name]
        (again, _) = gathered("search", space.keywords, (SearchSpace, None), (Limits, None))
        assert again.given == {name}


def test_a_plan_file_with_other_choices_is_refused(tmp_path: Path) -> None:
    plan, path = search(MLP, **ON), tmp_path / "plan.json"
    plan.save(path)
    for first in ({"bogus": 1}, {"storage": 3}):
        said = json.loads(path.read_text())
        said["details"]["search"]["first"] = first
        path.write_text(json.dumps(said))
        with pytest.raises(UserError, match=r"details\.search\.first"):
            load_plan(path)


def test_a_variable_says_what_a_search_without_words_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.on(machine_of("tpu-v5e", None, None), SMALL, Mesh("data:2"))

    def names(space: SearchSpace, words: str) -> list[bool]:
        monkeypatch.setenv(allow.VARIABLE, words)
        return [bool(each.pipeline) for each in allow.spaces(space, [target], Objective.TIME)]

    assert names(SearchSpace(), "") == [False, True]
    assert names(SearchSpace(), "usual") == [False] and names(SearchSpace(), "everything") == [True]
    assert names(SearchSpace(allow=("everything",)), "usual") == [True]
