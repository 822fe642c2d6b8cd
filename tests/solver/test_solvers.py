"""Every solver against enumeration, every reduction against the problem it reduced."""

from __future__ import annotations

import itertools
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from layoutopt.solver import (
    ChoiceVariable,
    Intervals,
    Problem,
    ProblemError,
    ResourceRow,
    RowTerm,
    Sparse,
    Status,
    Term,
    Usage,
    evaluate,
    lagrangian,
    solve,
)
from layoutopt.solver.answer import Solution
from layoutopt.solver.backends.base import Raw, SolverRequest
from layoutopt.solver.backends.cp_sat import scale_costs, scale_row
from layoutopt.solver.backends.highs import DUAL_TOLERANCE, ask, leave
from layoutopt.solver.backends.highs_process import LinearRow, Task
from layoutopt.solver.linear import linearise
from layoutopt.solver.reductions import reduce
from layoutopt.solver.run import SOLVERS
from tests.solver.strategies import problems

MANY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def close(first: float, second: float) -> bool:
    return first == second or math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)


def enumerated(problem: Problem) -> Solution:
    """The best feasible choices, the first of equal ones, of all that there are."""
    found = {choices: evaluate(problem, choices) for choices in itertools.product(*map(range, problem.sizes))}
    fitting = {choices: each.objective for choices, each in found.items() if each.feasible}
    if not fitting:
        return Solution(Status.INFEASIBLE, None, math.inf, math.inf, 0.0, "enumeration")
    best = min(fitting, key=lambda choices: fitting[choices])
    return Solution(Status.OPTIMAL, best, fitting[best], fitting[best], 0.0, "enumeration")


@pytest.mark.parametrize("solver", ["cp-sat", "highs"])
@MANY
@given(problem=problems)
def test_optimum_is_what_enumeration_finds(solver: str, problem: Problem) -> None:
    truth = enumerated(problem)
    answer = solve(problem, solver)
    assert answer.status is truth.status
    if answer.choices is not None:
        found = evaluate(problem, answer.choices)
        assert found.feasible
        assert found.objective == answer.objective
        assert close(answer.objective, truth.objective)
        assert answer.bound <= truth.objective * (1 + 1e-12) + 1e-12 or close(answer.bound, truth.objective)


@MANY
@given(problem=problems)
def test_reductions_keep_an_optimum_and_lift_it(problem: Problem) -> None:
    truth = enumerated(problem)
    reduced = reduce(problem)
    if reduced.problem is None:
        assert truth.status is Status.INFEASIBLE
        return
    smaller = enumerated(reduced.problem)
    assert smaller.status is truth.status
    if smaller.choices is not None:
        assert close(smaller.objective, truth.objective)
        lifted = evaluate(problem, reduced.lift(smaller.choices))
        assert lifted.feasible
        assert close(lifted.objective, truth.objective)


@MANY
@given(problem=problems)
def test_the_gentle_reductions_keep_every_solution_one_to_one(problem: Problem) -> None:
    feasible = {
        choices: evaluate(problem, choices).objective
        for choices in itertools.product(*map(range, problem.sizes))
        if evaluate(problem, choices).feasible
    }
    reduced = reduce(problem, keep_all=True)
    found = {}
    if reduced.problem is not None:
        for choices in itertools.product(*map(range, reduced.problem.sizes)):
            evaluation = evaluate(reduced.problem, choices)
            if evaluation.feasible:
                lifted = reduced.lift(choices)
                assert lifted not in found
                assert reduced.project(lifted) == choices
                found[lifted] = evaluation.objective
    assert found.keys() == feasible.keys()
    assert all(close(found[choices], feasible[choices]) for choices in found)


@MANY
@given(problem=problems)
def test_the_0_1_program_says_what_the_problem_says(problem: Problem) -> None:
    program = linearise(problem)
    for choices in itertools.product(*map(range, problem.sizes)):
        truth = evaluate(problem, choices)
        values = program.values(choices)
        sums = np.zeros(int(program.marginals[0].max(initial=-1)) + 1)
        np.add.at(sums, program.marginals[0], program.marginals[2] * values[program.marginals[1]])
        allowed = not sums.any() and not values[program.forbidden].any() and math.isfinite(program.constant)
        assert allowed == (not truth.forbidden)
        if allowed:
            assert close(float(program.costs @ values) + program.constant, truth.objective)
            for row in problem.all_rows():
                constraint = program.resource(row)
                use = (
                    float(constraint.coefficients @ values[constraint.columns]) + row.limit - constraint.limit
                )
                assert close(use, row.use(choices))


def chain(length: int = 12, size: int = 4) -> Problem:
    """A chain with a tight row; its tables come from a fixed seed."""
    rng = np.random.default_rng(7)
    variables = tuple(ChoiceVariable(f"v{i}", size) for i in range(length))
    pairs = [
        Term((i, i + 1), rng.integers(0, 50, (size, size)).astype(float), f"e{i}") for i in range(length - 1)
    ]
    entries = tuple(RowTerm((i,), rng.integers(1, 20, size).astype(float)) for i in range(length))
    return Problem("chain", variables, tuple(pairs), (ResourceRow("memory", 60.0, entries),))


def test_two_solvers_agree_where_enumeration_cannot_follow() -> None:
    problem = chain()
    first, second = solve(problem, "cp-sat"), solve(problem, "highs")
    assert first.status is second.status is Status.OPTIMAL
    assert first.objective == second.objective


def test_the_answer_is_the_same_on_every_run() -> None:
    assert len({solve(chain(), "cp-sat").choices for _ in range(3)}) == 1


def test_progress_hint_and_upper_bound() -> None:
    problem = chain()
    heard: list[tuple[float, float]] = []
    best = solve(problem, "cp-sat", on_progress=lambda objective, bound: heard.append((objective, bound)))
    assert min(objective for objective, _ in heard) == best.objective
    assert max(bound for _, bound in heard) <= best.objective
    assert best.choices is not None
    for solver in ("cp-sat", "highs"):
        assert solve(problem, solver, hint=best.choices).objective == best.objective
        assert solve(problem, solver, upper_bound=best.objective).objective == best.objective
        assert solve(problem, solver, upper_bound=best.objective - 1).status is Status.INFEASIBLE
    with pytest.raises(
        ProblemError, match="2 choices were given for problem 'chain', which has 12 variables"
    ):
        solve(problem, hint=(0, 0))


@pytest.mark.parametrize("solver", ["cp-sat", "highs"])
def test_a_hint_survives_a_limit_that_leaves_no_time(solver: str) -> None:
    problem = chain(40, 8)
    entries = tuple(RowTerm((i,), np.ones(8)) for i in range(40))
    problem = Problem(problem.name, problem.variables, problem.terms, (ResourceRow("memory", 60.0, entries),))
    hint = (3,) * 40
    answer = solve(problem, solver, time_limit=1e-6, hint=hint)
    assert answer.choices is not None
    assert answer.objective <= evaluate(problem, hint).objective
    assert answer.bound <= answer.objective


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ProblemError, match="unknown solver 'cplex'; choose one of auto, cp-sat"):
        solve(chain(), "cplex")
    with pytest.raises(ProblemError, match="the time limit is -1 seconds; give"):
        solve(chain(), time_limit=-1)


def test_interval_rows_enter_only_when_violated_and_hold() -> None:
    rng = np.random.default_rng(3)
    variables = tuple(ChoiceVariable(f"v{i}", 5) for i in range(30))
    terms = tuple(
        Term((i,), np.array([0.0, 3, 6, 9, 12]) + rng.integers(0, 3, 5), f"t{i}") for i in range(30)
    )
    usages = tuple(Usage(i, i, i + 6, np.array([9.0, 7, 5, 3, 1])) for i in range(30))
    problem = Problem("sliding", variables, terms, intervals=Intervals(30.0, usages))
    answers = [solve(problem, solver) for solver in ("cp-sat", "highs")]
    assert answers[0].objective == answers[1].objective
    for answer in answers:
        assert answer.status is Status.OPTIMAL
        assert answer.choices is not None
        assert evaluate(problem, answer.choices).feasible


def test_wide_sparse_tables_need_no_dense_copy() -> None:
    rng = np.random.default_rng(1)
    variables = tuple(ChoiceVariable(f"v{i}", 9) for i in range(8))
    scope = tuple(range(8))
    cells = np.unique(rng.integers(0, 9, (400, 8)), axis=0)
    costs = rng.integers(0, 1000, len(cells)).astype(float)
    use = Sparse(cells, rng.integers(0, 100, len(cells)).astype(float))
    problem = Problem(
        "wide",
        variables,
        (Term(scope, Sparse(cells, costs), "block"),),
        (ResourceRow("memory", 20.0, (RowTerm(scope, use),)),),
    )
    truth = min(cost for cost, used in zip(costs, use.values, strict=True) if used <= 20)
    for solver in ("cp-sat", "highs"):
        assert solve(problem, solver).objective == truth


def test_scaling_states_what_rounding_can_hide() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.random(5) * 10.0 ** float(rng.integers(-9, 3)) for _ in range(200)]
    scaled = scale_costs(np.concatenate(groups), groups)
    starts = np.arange(200) * 5
    for _ in range(50):
        chosen = starts + rng.integers(0, 5, 200)
        truth = math.fsum(np.concatenate(groups)[chosen])
        assert abs(float(scaled.whole[chosen].sum()) / scaled.scale - truth) <= scaled.error
    assert 0 < scaled.error < 1e-9 * math.fsum(float(group.max()) for group in groups)
    exact = scale_costs(np.array([3.0, 5.0]), [np.array([3.0, 5.0])])
    assert (exact.scale, exact.error, exact.whole.tolist()) == (1.0, 0.0, [3, 5])


def test_scaled_rows_lose_no_solution() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        coefficients = rng.random(20) * 10.0 ** float(rng.integers(-6, 15))
        picked = rng.random(20) < 0.5
        limit = math.fsum(coefficients[picked])
        whole, whole_limit = scale_row(coefficients, math.nextafter(limit, math.inf))
        assert int(whole[picked].sum()) <= whole_limit


def knapsacks(length: int = 40, size: int = 8) -> Problem:
    """Random pairs and one row: too hard to prove in the time of a test, easy to answer."""
    rng = np.random.default_rng(5)
    pairs = [rng.permutation(length)[:2] for _ in range(4 * length)]
    terms = [
        Term((int(a), int(b)), rng.integers(0, 50, (size, size)) + 0.0, f"t{i}")
        for i, (a, b) in enumerate(pairs)
    ]
    entries = tuple(RowTerm((i,), rng.integers(1, 20, size).astype(float)) for i in range(length))
    variables = tuple(ChoiceVariable(f"v{i}", size) for i in range(length))
    return Problem("knapsacks", variables, tuple(terms), (ResourceRow("memory", 8.0 * length, entries),))


def test_ctrl_c_stops_cp_sat_and_keeps_the_best() -> None:
    best: list[float] = []

    def interrupt(objective: float, bound: float) -> None:
        if math.isfinite(objective):
            best.append(objective)
            if len(best) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    answer = solve(knapsacks(24, 6), "cp-sat", time_limit=100, on_progress=interrupt)
    assert answer.status is Status.FEASIBLE
    assert answer.objective == min(best)
    assert answer.bound < answer.objective


def test_ctrl_c_leaves_highs_and_keeps_the_hint() -> None:
    problem = knapsacks()
    uses = np.stack([np.asarray(entry.table) for entry in problem.rows[0].entries])
    hint = tuple(int(choice) for choice in uses.argmin(axis=1))

    def interrupt(objective: float, bound: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    answer = solve(problem, "highs", time_limit=5, on_progress=interrupt, hint=hint)
    assert answer.status is Status.FEASIBLE
    assert answer.objective == evaluate(problem, hint).objective
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("solver", ["cp-sat", "highs"])
def test_errors_of_a_listener_reach_the_caller(solver: str) -> None:
    def fail(objective: float, bound: float) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        solve(chain(), solver, on_progress=fail)


def test_rows_that_cannot_bind_go_and_equal_rows_become_one() -> None:
    problem = chain(3)
    entries = problem.rows[0].entries
    rows = tuple(
        ResourceRow(name, limit, entries)
        for name, limit in [("loose", 40.0), ("tight", 20.0), ("never", 1e9)]
    )
    reduced = reduce(Problem("rows", problem.variables, problem.terms, rows), keep_all=True)
    assert reduced.problem is not None
    assert [row.name for row in reduced.problem.rows] == ["tight"]


def test_cp_sat_answers_where_the_limit_stops_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` on many cells of pairs: HiGHS stopped without an answer is followed by CP-SAT, which has one."""

    def gives_up(request: SolverRequest) -> Raw:
        return Raw(Status.LIMIT, None, 7.0)

    monkeypatch.setitem(SOLVERS, "highs", gives_up)
    monkeypatch.setattr(lagrangian, "VARIABLES", 0)
    pairs = chain(30, 16)
    entries = tuple(RowTerm((i,), np.arange(16.0)) for i in range(30))
    problem = Problem("long", pairs.variables, pairs.terms, (ResourceRow("memory", 200.0, entries),))
    assert solve(problem, "highs").status is Status.LIMIT
    answer = solve(problem, time_limit=500)
    assert (answer.status, answer.solver) == (Status.OPTIMAL, "highs+cp-sat")


def test_highs_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('of the current folder')\n")
    monkeypatch.chdir(tmp_path)
    leave()
    line = LinearRow(np.array([0]), np.array([1.0]), 2.0, 9.0)
    task = Task(np.array([1.0]), np.array([5.0]), 1, (line,), None, DUAL_TOLERANCE)
    answers = [ask(task) for _ in range(2)]  # the second of the process that is there
    leave()
    assert [answer and answer.dual_bound for answer in answers] == [2.0, 2.0]
