r"""From a model to a problem in the general form (`layoutopt.problem`), for one mesh.

Variables
  x_d       for every dimension d: the tuple of mesh axes it is split over, from `domains`
  y_k       for every group k = (axes, dtype) of small gradient messages: whether any message of it is sent

Objective
  (1) sum_c m_c T_c(x)             time of cluster c with multiplicity m_c                         `_time_terms`
  (2) sum_k alpha_k y_k            the latency that the messages of a group share                  `_message_terms`
Constraints
  (3) y_k = 1 if some cluster sends a small message of group k under x                             `_message_terms`
  (4) assignments that lowering refuses are not in a cluster's table                               `_time_terms`
  (5) sum_v bytes_v(x) over the values alive at point t  <=  memory, for every point t that can be the peak   `_rows`

(5) counts every value that lives at t under any layout. Copies that only some layouts need (gathered operands) are not
in it, so it never forbids a layout that fits; `search` checks the exact peak of what the solver returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.memory import Alive, alive
from costmodels.pricing import Pricer
from layoutopt.clusters import clusters
from layoutopt.problem import Entry as RowEntry
from layoutopt.problem import Problem, Row, Sparse, Term, Variable
from layoutopt.tables import Table, table
from mesh_tf_core.dtypes import itemsize
from mesh_tf_core.layout import Axes, Layout
from mesh_tf_core.lower.combine import Key
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model
from mesh_tf_core.program import Program


@dataclass(frozen=True)
class Extraction:
    """A model's problem on one mesh, and the way back from choices to layouts.

    Attributes:
      domains: dimension -> options; variable i of the problem chooses among those of `dims[i]`.
      tables: the priced clusters.
      problem: variables, times and memory rows.
    """

    mesh: Mesh
    domains: Mapping[str, tuple[Axes, ...]]
    dims: tuple[str, ...]
    tables: tuple[Table, ...]
    groups: tuple[Key, ...]
    problem: Problem

    def layout(self, choices: Sequence[int]) -> Layout:
        fixed = {n: o[0] for n, o in self.domains.items() if len(o) == 1}
        chosen = {n: self.domains[n][c] for n, c in zip(self.dims, choices, strict=False)}
        return Layout({**fixed, **chosen})

    def choices(self, layout: Layout) -> tuple[int, ...] | None:
        """The solver's variables under a layout; None if the layout is not among the options."""
        picked = []
        for name in self.dims:
            if layout.axes(name) not in self.domains[name]:
                return None
            picked.append(self.domains[name].index(layout.axes(name)))
        sent = {k for t in self.tables for k in self._entry_keys(t, layout)}
        return (*picked, *(int(k in sent) for k in self.groups))

    def _entry_keys(self, found: Table, layout: Layout) -> set[Key]:
        entry = found.entries.get(tuple(layout.axes(n) for n in found.dims))
        return set(entry.small) if entry else set()


def extract(
    model: Model,
    mesh: Mesh,
    options: Mapping[str, tuple[Axes, ...]],
    pricer: Pricer,
    memory: float = math.inf,
) -> Extraction:
    """The problem of a model on a mesh.

    Args:
      options: from `domains`.
      memory: bytes that a device may hold.
    """
    program = model.lower(mesh, Layout())
    tables = tuple(table(model.graph, mesh, c, options, pricer) for c in clusters(model.graph, program))
    used = dict.fromkeys(n for t in tables for n in t.dims)
    stored = dict.fromkeys(n for s in program.variables.values() for n in s.variable.shape.names)
    dims = tuple(n for n in dict.fromkeys([*used, *stored]) if len(options[n]) > 1)
    groups = tuple(dict.fromkeys(k for t in tables for e in t.entries.values() for k in e.small))
    variables = [Variable.of(n, ["+".join(a) or "-" for a in options[n]]) for n in dims]
    variables += [Variable.of(f"messages over {'+'.join(a)} in {d}", ["no", "yes"]) for a, d in groups]
    number = {n: i for i, n in enumerate(dims)}
    place = {n: {a: j for j, a in enumerate(options[n])} for n in dims}
    terms = _time_terms(tables, groups, number, place, pricer)
    terms += _message_terms(tables, groups, number, place, pricer)
    rows = tuple(_rows(program, options, dims, number, memory))
    problem = Problem(f"{model.name} on {mesh}", tuple(variables), tuple(terms), rows)
    return Extraction(mesh, options, dims, tables, groups, problem)


def _alpha(key: Key, pricer: Pricer) -> float:
    """Latency of a group's message: the price of its first byte."""
    return pricer.message_seconds("all_reduce", key[0], 1)


def _time_terms(
    tables: Sequence[Table],
    groups: Sequence[Key],
    number: Mapping[str, int],
    place: Mapping[str, Mapping[Axes, int]],
    pricer: Pricer,
) -> list[Term]:
    """(1) and (4): tables over the same dimensions are added up; each small message pays its bytes here."""
    alpha = {k: _alpha(k, pricer) for k in groups}
    joined: dict[tuple[str, ...], dict[tuple[Axes, ...], float]] = {}
    for t in tables:
        costs = {}
        for assignment, entry in t.entries.items():
            bytes_of = ((pricer.message_seconds("all_reduce", k[0], b), k) for k, b in entry.small.items())
            small = sum(max(seconds - alpha[k], 0.0) for seconds, k in bytes_of)
            costs[assignment] = t.cluster.multiplicity * (entry.seconds + small)
        order = tuple(sorted(t.dims, key=number.__getitem__))
        swap = [t.dims.index(n) for n in order]
        moved = {tuple(a[i] for i in swap): c for a, c in costs.items()}
        if order not in joined:
            joined[order] = moved
        else:
            # An assignment that either table refuses is refused.
            known = joined[order]
            joined[order] = {a: known[a] + c for a, c in moved.items() if a in known}
    terms = []
    for dims, costs in joined.items():
        rows = np.array([[place[n][x] for n, x in zip(dims, a, strict=True)] for a in costs], np.int64)
        rows = rows.reshape(len(costs), len(dims))
        scope = tuple(number[n] for n in dims)
        terms.append(Term(scope, Sparse(rows, np.array(list(costs.values()))), "time of " + " ".join(dims)))
    return terms


def _message_terms(
    tables: Sequence[Table],
    groups: Sequence[Key],
    number: Mapping[str, int],
    place: Mapping[str, Mapping[Axes, int]],
    pricer: Pricer,
) -> list[Term]:
    """(2) and (3)."""
    terms = []
    for i, key in enumerate(groups):
        y = len(number) + i
        terms.append(Term((y,), np.array([0.0, _alpha(key, pricer)]), f"latency of group {i}"))
        seen: set[tuple[tuple[str, ...], frozenset[tuple[Axes, ...]]]] = set()
        for t in tables:
            sending = frozenset(a for a, e in t.entries.items() if key in e.small)
            if not sending or (t.dims, sending) in seen:
                continue
            seen.add((t.dims, sending))
            rows = [
                (*(place[n][x] for n, x in zip(t.dims, a, strict=True)), sent)
                for a in t.entries
                for sent in ((1,) if a in sending else (0, 1))
            ]
            scope = (*(number[n] for n in t.dims), y)
            name = f"group {i} sent by {t.cluster.name}"
            terms.append(Term(scope, Sparse(np.array(rows, np.int64), np.zeros(len(rows))), name))
    return terms


def _rows(
    program: Program,
    options: Mapping[str, tuple[Axes, ...]],
    dims: Sequence[str],
    number: Mapping[str, int],
    memory: float,
) -> list[Row]:
    """(5), one row for every point that no other point dominates."""
    points: list[tuple[Alive, Counter[tuple[tuple[str, ...], int]]]] = []
    for point in alive(program):
        use: Counter[tuple[tuple[str, ...], int]] = Counter()
        for shape, dtype, count in point.held:
            free = tuple(sorted((n for n in shape.names if n in number), key=number.__getitem__))
            use[(free, 0)] += count * shape.size * itemsize(dtype)
        points.append((point, use))
    kept: list[tuple[Alive, Counter[tuple[tuple[str, ...], int]]]] = []
    for point, use in sorted(points, key=lambda p: -p[1].total()):
        if not any(use <= other for _, other in kept):
            kept.append((point, use))
    rows = []
    for point, use in kept:
        entries = [_bytes_entry(free, total, options, program.mesh, number) for (free, _), total in use.items()]
        rows.append(Row(f"memory at {point.name} #{point.position}", memory, tuple(entries)))
    return rows


def _bytes_entry(
    free: tuple[str, ...], total: int, options: Mapping[str, tuple[Axes, ...]], mesh: Mesh, number: Mapping[str, int]
) -> RowEntry:
    """Bytes of values with the dimensions `free` for every assignment of them (dense: at most a few of them)."""
    ways = [np.array([mesh.group_size(a) for a in options[n]], float) for n in free]
    bytes_: np.ndarray = np.array(float(total))
    for w in ways:
        bytes_ = bytes_[..., None] / w
    return RowEntry(tuple(number[n] for n in free), bytes_)


def count_layouts(options: Mapping[str, tuple[Axes, ...]]) -> int:
    """How many layouts the options allow, legal or not."""
    total = 1
    for found in options.values():
        total *= len(found)
    return total


