"""A search on two cores answers and proves what it does on one."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.frameworks import framework_names
from costmodels.hardware import machine_of
from examples import mlp, transformer_lm
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.driver import both_cores, second_search
from layoutopt.optimize.driver.both_cores import BothCores, Letter
from layoutopt.optimize.driver.fastest import FastestSearch
from layoutopt.optimize.driver.search import LayoutSearch
from layoutopt.optimize.heuristics.incumbents import WarmStart
from layoutopt.optimize.problems.bounds import Bound, BoundSource, ProvenBounds
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblems import SubproblemKey
from layoutopt.runtime.clock import Clock
from layoutopt.runtime.own_process import VARIABLE, OtherProcess, processes
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.objective import Objective
from layoutopt.space.restriction import EVERYTHING, Only
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options
from tests.layoutopt.outside import TINY

ON: dict[str, Any] = {"mesh": "a:2;b:2", "hardware": "tpu-v5e", "allow": "everything", "alternatives": False}
MLP = mlp.model()
LM = replace(transformer_lm.model(**TINY, dtype="bfloat16"), network=None)
SEED = {"PYTHONHASHSEED": "7"}
PIPED: dict[str, Any] = {
    "pipeline": ("layers",),
    "schedule": ("gpipe",),
    "microbatches": (1, 2),
    "context": ("gather",),
    "storage": ("layout",),
    "recompute": (False, True),
}
LIMIT = 16e9
Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Every search begins its second process at once. These processes; all have ended after the test."""
    found: Processes = []
    begin = subprocess.Popen.__init__

    def begun(self: subprocess.Popen[bytes], *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", begun)
    monkeypatch.setattr(both_cores, "LONG", -1.0)
    monkeypatch.setattr(both_cores, "processes", lambda: 2)
    yield found
    assert all(each.poll() is not None for each in found)


def alone(monkeypatch: pytest.MonkeyPatch, **asked: Any) -> layoutopt.Plan:
    with monkeypatch.context() as patch:
        patch.setattr(both_cores, "LONG", math.inf)
        return layoutopt.search(MLP, **{**ON, **asked})


def same(plan: layoutopt.Plan, other: layoutopt.Plan) -> None:
    for each in (plan, other):
        assert each.solver.status == "OPTIMAL"
    assert (plan.mesh, plan.layout, plan.options) == (other.mesh, other.layout, other.options)
    assert plan.solver.objective == other.solver.objective
    assert plan.solver.layouts_considered == other.solver.layouts_considered


def test_both_processes_find_what_one_does(started: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    same(layoutopt.search(MLP, **ON), alone(monkeypatch))
    assert len(started) == 1


def test_the_second_process_can_prove_all(started: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, looked = BothCores._start, list[object]()

    def finished(self: BothCores) -> None:
        begin(self)
        while self.running:
            time.sleep(0.01)

    monkeypatch.setattr(BothCores, "_start", finished)
    monkeypatch.setattr(LayoutSearch, "_fixed", lambda _, problem, limit: looked.append(problem.key))
    plan = layoutopt.search(MLP, **ON)
    assert started and not looked
    monkeypatch.undo()
    same(plan, alone(monkeypatch))


FINDS = """
import pickle, sys
import mesh_tf_core as mtf
table = {mtf.Shape([mtf.Dim("a", 3)]): 1, mtf.Layout("batch:x+y;heads:z;length@elsewhere:z;heads@dec:x"): 2}
assert [table[each] for each in pickle.load(sys.stdin.buffer)] == [1, 2]
"""


def test_another_process_finds_shapes_and_layouts_in_its_tables() -> None:
    layout = mtf.Layout("batch:x+y;heads:z;length@elsewhere:z;heads@dec:x")
    letter = pickle.dumps([mtf.Shape([mtf.Dim("a", 3)]), layout])
    subprocess.run([sys.executable, "-c", FINDS], input=letter, env=os.environ | SEED, check=True)


@pytest.mark.nightly
def test_another_process_proves_the_same_of_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes names otherwise, which nothing that it is told may depend on."""
    asked = SearchSpace(**PIPED)
    machine, mesh = machine_of("tpu-v5e", None, "layoutopt"), mtf.Mesh("a:2;b:2")
    question = LM, machine, LIMIT, asked, None, [mesh]
    sent: list[Letter] = []

    def heard(letters: Iterable[Letter]) -> dict[SubproblemKey, float]:
        known = defaultdict[SubproblemKey, ProvenBounds](ProvenBounds)
        for letter in letters:
            for key, (bounds, _) in letter.known.items():
                known[key].learn(bounds)
        return {key: bounds.lower(LIMIT).value for key, bounds in known.items()}

    monkeypatch.setattr(second_search, "first_letter", lambda: (question, deque(), sent.append))
    second_search.main()
    with monkeypatch.context() as patch:
        patch.setenv(*next(iter(SEED.items())))
        process = OtherProcess(both_cores.PROCESS, question)
    while not process.ended:
        time.sleep(0.01)
    process.end()
    here, there = heard(sent), heard(process.news)
    assert len(here) > 10 and here.keys() == there.keys()
    assert all(there[key] == pytest.approx(bound, rel=1e-12) for key, bound in here.items())
    assert sorted(map(math.isinf, here.values())) == sorted(map(math.isinf, there.values()))
    assert not all(map(math.isinf, here.values()))


def test_what_no_other_process_reads_is_searched_by_one(
    started: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(EVERYTHING, name="of a script", relations=(Only(lambda decision, choice: True),))
    plan = layoutopt.search(MLP, **ON, restriction=here)
    assert not started
    same(plan, alone(monkeypatch, restriction=here))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_second_process_that_is_gone_leaves_its_problems_to_the_first(
    name: str, started: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, left = BothCores._start, list[Letter]()

    def gone(self: BothCores) -> None:
        begin(self)
        while not left:
            assert self.running
            time.sleep(0.01)
            left.extend(each for each in [*self._heard] if each.begun)
        started[0].send_signal(getattr(signal, name))
        self._heard = deque(left[:1])  # it began this, and says no more

    monkeypatch.setattr(BothCores, "_start", gone)
    monkeypatch.setattr(both_cores, "SILENCE", 0.2)
    plan = layoutopt.search(MLP, **ON)
    assert len(started) == 1
    monkeypatch.undo()
    same(plan, alone(monkeypatch))


def a_search(heard: deque[Any], sent: deque[Any] | None = None) -> FastestSearch:
    """One of two processes, in this one: letters go into `sent`, unless it works alone."""
    asked, machine = SearchSpace(**PIPED), machine_of("tpu-v5e", None, "layoutopt")
    search = FastestSearch(Request(LM, machine, LIMIT, Objective.TIME, asked, 1, Clock(None), None, None))
    search.both = BothCores(search.incumbents, heard, None if sent is None else sent.append)
    search.both._starts = False
    search.problems, search.listed = WarmStart(search.request, [mtf.Mesh("a:2;b:2")]).problems, True
    search.incumbents.subproblems = {each.key: each for each in search.problems}
    return search


def solved(search: FastestSearch) -> dict[SubproblemKey, tuple[Layout, Options]]:
    found = {each.key: best for each in search.problems if (best := each.bounds.best) is not None}
    assert all(search.incumbents.subproblem_of(best).key == key for key, best in found.items())
    return {key: (best.layout, best.options) for key, best in found.items()}


@pytest.mark.nightly
def test_a_letter_about_several_problems_tells_the_best_of_each() -> None:
    first, second = deque[Letter](), deque[Letter]()
    one, two = a_search(first, second), a_search(second, first)
    staged = [each for each in one.problems if each.key.stages]
    looked = [each for each in staged if not each.refused][::-1][:12]
    for each in looked:
        one.look_at(each, LIMIT)
    assert 1 < len(solved(one)) < len(looked)
    one.both.report(staged)
    two.both.exchange()
    assert solved(two) == solved(one)
    bounds = {each.key: each.bounds.lower(LIMIT) for each in staged}
    assert {each.key: each.bounds.lower(LIMIT) for each in two.problems if each.key.stages} == bounds
    two.both.report([each for each in two.problems if each.key.stages])
    before = solved(one)
    one.both.exchange()
    assert solved(one) == before


def test_multiples_of_microbatches_have_the_bound_of_a_problem_that_time_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before they are looked at themselves."""
    search, late = a_search(deque()), type("Late", (BaseException,), {})

    def ended(*_: Any) -> None:
        raise late

    monkeypatch.setattr(FastestSearch, "_ask", ended)
    first, *more = search.plain
    assert more and all(first in each.fewer for each in more)
    with pytest.raises(late):
        search.look_at(first, LIMIT)
    known = max(b.value for b in first.bounds.proven if b.source is BoundSource.TABLES)
    assert all(each.bounds.lower(LIMIT).value >= known > 0 for each in more)


def test_a_bound_above_a_known_layout_is_not_believed() -> None:
    """Nor is what the same process said before; what no known layout contradicts is."""
    alone, heard, sent = a_search(deque()), deque[Letter](), deque[Letter]()
    best, search = alone.fastest(LIMIT), a_search(heard, sent)
    assert best is not None and alone.proven
    here, other = alone.incumbents.subproblem_of(best).key, alone.problems[-1].key
    search.incumbents.offer(best.mesh, best.layout, best.options)
    for key, seconds in ((here, best.seconds), (other, 1.0), (here, 1.1 * best.seconds)):
        assert search.both.running
        told = ProvenBounds()
        told.prove(seconds, BoundSource.SOLVER, LIMIT)
        heard.append(Letter(known={key: (told, None)}))
        search.both.exchange()
        learned = {each.key: each.bounds.lower(LIMIT).value for each in search.problems}
        assert learned[key] == (seconds if search.both.running else 0.0)
    assert not search.both.running and not any(learned.values())
    found = search.fastest(LIMIT)
    assert search.proven and found is not None and found.seconds == best.seconds
    assert search.bound.value == alone.bound.value


def test_one_core_starts_none(started: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both_cores, "processes", processes)
    assert processes() == 1  # as tests are told
    layoutopt.search(MLP, **ON)
    assert not started
    for wrong in ("no", "0", "-1", "1.5"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(UserError, match=f"LAYOUTOPT_CORES is '{wrong}'; give a number of cores"):
            layoutopt.search(MLP, **ON)


@pytest.mark.parametrize("name", framework_names())
def test_the_other_process_reads_every_restriction(name: str) -> None:
    found = restriction_of(name).of(MLP)
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_is_proven_elsewhere_holds_within_its_memory_alone() -> None:
    mine, other = ProvenBounds(), ProvenBounds()
    mine.prove(2.0, BoundSource.TABLES)
    other.prove(1.0, BoundSource.SHARE)
    other.prove(5.0, BoundSource.SOLVER, 100.0)
    other.prove(7.0, BoundSource.SOLVER, 10.0)
    other.hold_at_least(3.0)
    mine.learn(other)
    assert [mine.lower(limit).value for limit in (5.0, 50.0, 500.0)] == [7.0, 5.0, 2.0]
    assert mine.lower(2.0).value == math.inf
    assert mine.proven == [
        Bound(7.0, BoundSource.SOLVER, 10.0),
        Bound(5.0, BoundSource.SOLVER, 100.0),
        Bound(2.0, BoundSource.TABLES),
    ]
