"""The format of the ASPLOS 2025 / EuroSys contest track on intra-operator parallelism for distributed deep
learning.

    {"problem": {"name": "...", "usage_limit": 50,
                 "nodes": {"intervals": [[30, 70], ...],      half-open [start, end); empty ones use nothing
                           "costs":     [[15], [55, 65], ...], one cost per strategy of the node
                           "usages":    [[10], [25, 25], ...]}, one usage per strategy
                 "edges": {"nodes": [[0, 1], ...],            several edges may join two nodes: costs add up
                           "costs": [[30, 40], ...]}}}        row-major: entry i * strategies(second) + j

A cost of 10^18 or more means "not allowed". Source: M. D. Moffitt and P. Fegade, "The ASPLOS 2025 / EuroSys
2025 Contest on Intra-Operator Parallelism for Distributed Deep Learning", ASPLOS 2025, pp. 5-17; the
instances are in github.com/google/iopddl.
"""

from __future__ import annotations

from typing import Any

from layoutopt.solver.form import ChoiceVariable, Intervals, Problem, ProblemError, Term, Usage
from layoutopt.solver.numbers import amount, field, listed, numbers, whole

FORBIDDEN = 1e18


def problem_from(data: Any) -> Problem:
    """A problem from the parsed JSON; raises `ProblemError` that names the node or edge at fault."""
    inner = field(data, "problem", "the file")
    nodes, edges = field(inner, "nodes", "problem"), field(inner, "edges", "problem")
    intervals = listed(nodes, "intervals", "nodes")
    costs = listed(nodes, "costs", "nodes")
    usages = listed(nodes, "usages", "nodes")
    if not len(intervals) == len(costs) == len(usages):
        raise ProblemError(
            f"nodes has {len(intervals)} intervals, {len(costs)} costs and {len(usages)} usages; give one "
            "of each per node"
        )
    name = field(inner, "name", "problem", "contest problem")
    if not isinstance(name, str):
        raise ProblemError("problem.name must be a string")
    variables, terms, live = [], [], []
    for node, cost in enumerate(costs):
        where = f"nodes.costs[{node}]"
        table = numbers(cost, where, infinite=FORBIDDEN)
        if not table.size:
            raise ProblemError(f"{where} is empty; give the cost of at least one strategy")
        variables.append(ChoiceVariable(f"node {node}", len(table)))
        terms.append(Term((node,), _not_negative(table, where), f"node {node}"))
        live.append(_usage(node, intervals[node], usages[node], len(table)))
    terms += _edges(edges, variables)
    limit = amount(field(inner, "usage_limit", "problem"), "problem.usage_limit")
    return Problem(name, tuple(variables), tuple(terms), intervals=Intervals(limit, tuple(live)))


def _usage(node: int, interval: Any, usage: Any, size: int) -> Usage:
    where = f"nodes.usages[{node}]"
    table = numbers(usage, where)
    if len(table) != size:
        raise ProblemError(
            f"{where} has {len(table)} usages, but the node has {size} strategies; give one usage per "
            "strategy"
        )
    start, end = _two(interval, f"nodes.intervals[{node}]")
    return Usage(node, start, end, table)


def _edges(edges: Any, variables: list[ChoiceVariable]) -> list[Term]:
    ends, costs = listed(edges, "nodes", "edges"), listed(edges, "costs", "edges")
    if len(ends) != len(costs):
        raise ProblemError(
            f"edges has {len(ends)} pairs of nodes but {len(costs)} lists of costs; give one list per pair"
        )
    terms = []
    for edge, (pair, cost) in enumerate(zip(ends, costs, strict=True)):
        first, second = _two(pair, f"edges.nodes[{edge}]")
        for node in (first, second):
            if not 0 <= node < len(variables):
                raise ProblemError(
                    f"edges.nodes[{edge}] contains the node {node}, but there are {len(variables)} nodes, "
                    "numbered from 0"
                )
        if first == second:
            raise ProblemError(
                f"edges.nodes[{edge}] connects node {first} to itself; add these costs to the node's costs"
            )
        where = f"edges.costs[{edge}]"
        table = numbers(cost, where, infinite=FORBIDDEN)
        shape = variables[first].size, variables[second].size
        if table.size != shape[0] * shape[1]:
            raise ProblemError(
                f"{where} has {table.size} costs, but its two nodes have {shape[0]} x {shape[1]} "
                f"strategies; give {shape[0] * shape[1]} costs"
            )
        terms.append(Term((first, second), _not_negative(table, where).reshape(shape), f"edge {edge}"))
    return terms


def _not_negative(table: Any, where: str) -> Any:
    if table.min(initial=0.0) < 0:
        raise ProblemError(f"{where} contains the negative cost {table.min():.6g}; costs must be at least 0")
    return table


def _two(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ProblemError(f"{where} must be a pair of whole numbers")
    return whole(value[0], where), whole(value[1], where)
