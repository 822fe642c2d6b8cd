"""A search on two cores answers and proves what it does on one."""

from __future__ import annotations

import math
import os
import pickle
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
from layoutopt.optimize import both_cores, second_search
from layoutopt.optimize.both_cores import BothCores, Letter
from layoutopt.optimize.bounds import Bound, ProvenBounds, Source
from layoutopt.optimize.search import LayoutSearch
from layoutopt.optimize.subproblems import SubproblemKey
from layoutopt.runtime.own_process import VARIABLE, OtherProcess, processes
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.restriction import EVERYTHING, Only
from mesh_tf_core.errors import UserError
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
    monkeypatch.setattr("layoutopt.optimize.incumbents.Incumbents.answer_named", lambda *_: None)
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


def test_another_process_proves_the_same_of_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes names otherwise, which nothing that it is told may depend on."""
    asked = SearchSpace(**PIPED)
    machine, mesh = machine_of("tpu-v5e", None, "layoutopt"), mtf.Mesh("a:2;b:2")
    question = LM, machine, 16e9, asked, None, [mesh]
    sent: list[Letter] = []

    def heard(letters: Iterable[Letter]) -> dict[SubproblemKey, float]:
        known = defaultdict[SubproblemKey, ProvenBounds](ProvenBounds)
        for letter in letters:
            for key, bounds in letter.known.items():
                known[key].learn(bounds)
        return {key: bounds.lower(16e9).value for key, bounds in known.items()}

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


def test_a_second_process_that_dies_leaves_its_problems_to_the_first(
    started: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = BothCores._read

    def dies(self: BothCores, letter: Letter) -> None:
        read(self, letter)
        if letter.begun:
            started[0].kill()

    monkeypatch.setattr(BothCores, "_read", dies)
    plan = layoutopt.search(MLP, **ON)
    assert len(started) == 1
    same(plan, alone(monkeypatch))


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
    mine.prove(2.0, Source.TABLES)
    other.prove(1.0, Source.SHARE)
    other.prove(5.0, Source.SOLVER, 100.0)
    other.prove(7.0, Source.SOLVER, 10.0)
    other.hold_at_least(3.0)
    mine.learn(other)
    assert [mine.lower(limit).value for limit in (5.0, 50.0, 500.0)] == [7.0, 5.0, 2.0]
    assert mine.lower(2.0).value == math.inf
    assert mine.proven == [
        Bound(7.0, Source.SOLVER, 10.0),
        Bound(5.0, Source.SOLVER, 100.0),
        Bound(2.0, Source.TABLES),
    ]
