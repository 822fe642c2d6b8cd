"""Problem files: what is written is read back; what is damaged or hostile is one clear error."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.contest import published, recount
from layoutopt.solver import Problem, Sparse, Status, evaluate, load, solve
from mesh_tf_core.errors import UserError
from tests.solver.strategies import dump, problems, random_problem

SYNTHETIC = Path(__file__).parent / "data" / "synthetic.json"
ROOT = Path(__file__).resolve().parents[2]


def same_table(first: Any, second: Any) -> bool:
    if isinstance(first, Sparse) or isinstance(second, Sparse):
        return np.array_equal(first.assignments, second.assignments) and np.array_equal(
            first.values, second.values
        )
    return np.array_equal(first, second)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(problem=problems)
def test_our_own_form_comes_back_equal(problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("p.json", "p.json.gz"):
        path = tmp_path_factory.mktemp("files") / name
        dump(problem, path)
        again = load(path)
        assert (again.name, again.variables, again.constant) == (
            problem.name,
            problem.variables,
            problem.constant,
        )
        assert [t.scope for t in again.terms] == [t.scope for t in problem.terms]
        assert all(same_table(a.table, b.table) for a, b in zip(again.terms, problem.terms, strict=True))
        assert [(r.name, r.limit) for r in again.rows] == [(r.name, r.limit) for r in problem.rows]
        rng = np.random.default_rng(0)
        choices = tuple(int(rng.integers(size)) for size in problem.sizes)
        assert evaluate(again, choices) == evaluate(problem, choices)


def test_the_contest_format_is_solved_and_recounted_from_the_file() -> None:
    problem = load(SYNTHETIC)
    assert (problem.name, len(problem.variables)) == ("synthetic-4", 40)
    answers = [solve(problem, solver) for solver in ("cp-sat", "highs")]
    assert answers[0].objective == answers[1].objective
    for answer in answers:
        assert answer.status is Status.OPTIMAL
        assert answer.bound == answer.objective
        assert answer.choices is not None
        assert problem.intervals is not None
        cost, peak = recount(str(SYNTHETIC), answer.choices)
        assert cost == answer.objective
        assert peak == problem.intervals.profile(answer.choices).max() <= problem.intervals.limit
    without = solve(Problem(problem.name, problem.variables, problem.terms))
    assert without.objective < answers[0].objective


def test_the_recount_contradicts_a_planted_answer() -> None:
    problem = load(SYNTHETIC)
    answer = solve(problem, "highs")
    assert answer.choices is not None
    with pytest.raises(SystemExit, match=r"the answer uses .* of"):
        recount(str(SYNTHETIC), [int(np.argmax(u.table)) for u in problem.intervals.usages])  # type: ignore[union-attr]
    other = list(answer.choices)
    node = next(i for i, variable in enumerate(problem.variables) if variable.size > 1)
    other[node] = (other[node] + 1) % problem.variables[node].size
    planted = evaluate(problem, other)
    assert planted.objective > answer.objective or not planted.feasible


def test_the_benchmark_prints_the_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.contest", str(SYNTHETIC)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heading, row = done.stdout.splitlines()
    assert heading.split()[:3] == ["instance", "limit", "s"]
    assert row.split()[0] == SYNTHETIC.name
    assert row.split()[-1] == "OPTIMAL"
    assert published()["B"]["contest_best_cost"] == "532843"
    assert len(published()) == 25


def instance(**changes: object) -> dict[str, Any]:
    """The contest's smallest legal file with some of it replaced (dots are path steps)."""
    data = {
        "problem": {
            "name": "tiny",
            "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [3]], "usages": [[4, 5], [6]]},
            "edges": {"nodes": [[0, 1]], "costs": [[7, 8]]},
            "usage_limit": 20,
        }
    }
    for dotted, value in changes.items():
        inner: Any = data
        *path, last = dotted.split("__")
        for step in path:
            inner = inner[step]
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"problem__nodes__costs": [[1, math.nan], [3]]}, "contains NaN, which is not a JSON number"),
        (
            {"problem__nodes__costs": [[1, "2"], [3]]},
            r"nodes.costs\[0\] must contain only numbers, not str",
        ),
        (
            {"problem__nodes__costs": [[1, True], [3]]},
            r"nodes.costs\[0\] must contain only numbers, not bool",
        ),
        (
            {"problem__nodes__costs": [[1, None], [3]]},
            r"nodes.costs\[0\] must contain only numbers, not null",
        ),
        (
            {"problem__nodes__costs": [[1, [2]], [3]]},
            r"nodes.costs\[0\] must contain only numbers, all lists of one length",
        ),
        (
            {"problem__nodes__costs": [[1, -2], [3]]},
            r"nodes.costs\[0\] must contain only numbers from 0 to 2\^53, not -2",
        ),
        (
            {"problem__nodes__costs": [[1, 2**60 // 3], [3]]},
            r"nodes.costs\[0\] must contain only numbers from 0 to 2\^53, not 3.843e\+17",
        ),
        (
            {"problem__nodes__costs": [[1, 10**400], [3]]},
            r"nodes.costs\[0\] must contain only numbers that float64 can hold",
        ),
        (
            {"problem__nodes__costs": [[], [3]]},
            "variable 'node 0' has 0 choices; a variable needs at least one",
        ),
        ({"problem__nodes__costs": {}}, "nodes.costs must be a list, not {}"),
        ({"problem__nodes__costs": [[1, 2]]}, "nodes has 2 intervals, 1 costs and 2 usages"),
        (
            {"problem__nodes__usages": [[4], [6]]},
            r"usage \[0, 2\) has a table of shape \(1,\), but its variables \(node 0\) require",
        ),
        ({"problem__nodes__usages": [[4, -5], [6]]}, "must be a list with one whole number >= 0 per choice"),
        ({"problem__nodes__usages": [[4, 5.5], [6]]}, "must be a list with one whole number >= 0 per choice"),
        (
            {"problem__nodes__intervals": [[0], [1, 3]]},
            r"nodes.intervals\[0\]\[1\] is missing",
        ),
        (
            {"problem__nodes__intervals": [[0, 1.5], [1, 3]]},
            r"nodes.intervals\[0\]\[1\] must be a whole number, not 1.5",
        ),
        ({"problem__nodes__intervals": [[-4, 2], [1, 3]]}, "starts before time 0"),
        (
            {"problem__edges__nodes": [[0, 2]]},
            "term 'edge 0' uses the variable index 2, but problem 'tiny' has 2",
        ),
        (
            {"problem__edges__nodes": [[0, -1]]},
            "term 'edge 0' uses the variable index -1, but problem 'tiny' has 2",
        ),
        ({"problem__edges__nodes": [[1, 1]]}, "term 'edge 0' has a variable twice in its scope"),
        ({"problem__edges__nodes": []}, "edges has 0 pairs of nodes but 1 lists of costs"),
        (
            {"problem__edges__costs": [[7]]},
            r"edges.costs\[0\] has 1 costs, but its two nodes have 2 x 1 strategies",
        ),
        ({"problem__usage_limit": "20"}, 'usage_limit must be a number, not "20"'),
        ({"problem__edges": None}, "edges must be a JSON object, not null"),
        ({"problem__name": 5}, "name must be text, not 5"),
        ({"problem": []}, r"problem must be a JSON object, not \[\]"),
    ],
)
def test_hostile_contest_files_are_one_line_that_names_path_and_fault(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(instance(**changes)))
    with pytest.raises(UserError, match=f"instance.json.*{text}") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def own(**changes: object) -> dict[str, Any]:
    data = {
        "format": "layoutopt-problem/1",
        "name": "own",
        "variables": [{"name": "batch", "labels": ["a", "b"]}, {"name": "heads", "size": 2}],
        "terms": [{"name": "t", "scope": [0, 1], "table": [[1, 2], [None, 0]]}],
        "rows": [{"name": "memory", "limit": 10, "entries": [{"scope": [0], "table": [4, 8]}]}],
    }
    return {**data, **changes}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], 'neither "format": "layoutopt-problem/1" nor "problem"'),
        (
            own(format="layoutopt-problem/9"),
            "the format is 'layoutopt-problem/9', but this version of layoutopt reads",
        ),
        (
            own(variables=[{"name": "a", "size": 10**9}]),
            r"variables\[0\].size must be at most 100000",
        ),
        (
            own(variables=[{"name": f"v{i}", "size": 10**5} for i in range(201)]),
            "the variables have 20,100,000 choices in total; the limit is 20,000,000",
        ),
        (own(variables=[{"name": "a"}]), "variable 'a' has 0 choices; a variable needs at least one"),
        (own(variables=[{"name": "a", "labels": [1]}]), r"variables\[0\].labels\[0\] must be text, not 1"),
        (own(variables=[{"name": 3, "size": 1}]), r"variables\[0\].name must be text, not 3"),
        (
            own(terms=[{"scope": [0, 9], "table": [[1]]}]),
            "term 'term 0' uses the variable index 9, but problem 'own' has 2",
        ),
        (
            own(terms=[{"scope": [0], "table": [1, 2, 3]}]),
            r"term 'term 0' has a table of shape \(3,\), but its variables \(batch\) require the shape",
        ),
        (
            own(terms=[{"scope": [0, 1], "table": [1, 2]}]),
            "term 'term 0' has a table over 1 variables, but its scope lists 2",
        ),
        (
            own(terms=[{"scope": [0], "assignments": [[5]], "values": [1]}]),
            "lists an assignment with a choice out of range",
        ),
        (
            own(terms=[{"scope": [0], "assignments": [[0]], "values": [1, 2]}]),
            "a sparse table has assignments",
        ),
        (
            own(rows=[{"name": "m", "limit": None, "entries": []}]),
            r"rows\[0\].limit must be a number, not null",
        ),
        (
            own(rows=[{"name": "m", "limit": 1, "entries": [{"scope": [0], "table": [None, 1]}]}]),
            "a row entry over the variables .* is infinite",
        ),
        (own(constant="1"), 'constant must be a number, not "1"'),
    ],
)
def test_hostile_problem_files_are_one_line_too(data: object, text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"own.json: .*{text}"):
        load(path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not valid JSON: Expecting value"),
        (b'{"problem": {"name": "x"', "is not valid JSON: Expecting ',' delimiter"),
        (b"\xff\xfe\x00{", "is not valid JSON|is not UTF-8 text"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"problem": ' + b"9" * 5000 + b"}", "contains a number with too many digits"),
        (gzip.compress(json.dumps(instance()).encode())[:-20], "is damaged or truncated gzip data"),
        (b"\x1f\x8b" + b"garbage" * 9, "is damaged or truncated gzip data"),
    ],
)
def test_damaged_files_are_named(data: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"damaged.json' .*({text})"):
        load(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.json' cannot be read: No such file or directory"):
        load(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match=r"cannot be read: Is a directory"):
        load(tmp_path)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_is_a_user_error_or_a_problem(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut and replaced bytes of a legal file never end in anything but a `UserError` or a valid problem."""
    path = tmp_path_factory.mktemp("fuzz") / "p.json"
    dump(random_problem(data.draw(st.integers(0, 50)), True), path)
    if data.draw(st.booleans()):
        path.write_text(json.dumps(instance()))
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b"-", b"9", b"null", b"[", b"]", b"1e999", b'"x"', b"{}", b"0.5", b"\x00"])
        )
    path.write_bytes(bytes(text))
    try:
        problem = load(path)
    except UserError as error:
        assert "\n" not in str(error)
        assert "p.json" in str(error)
    else:
        assert isinstance(problem, Problem)
