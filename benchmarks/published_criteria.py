"""How good predictions of published rows are, and what they have to be."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata, spearmanr

from benchmarks.published_rows import Priced
from benchmarks.published_tpu import TPU

LEAST_RANKED = 6
"""Rows of a model from which on their order counts."""


@dataclass(frozen=True)
class Quality:
    """How good predictions of some rows are; `spearman` and `regret` are means over workloads of at least
    three runs (None: there are none)."""

    rows: int
    mape: float
    bias: float
    worst: float
    spearman: float | None
    regret: float | None
    worst_regret: float | None


@dataclass(frozen=True)
class Criterion:
    """One bound.

    Attributes:
      reached: the number that is bounded; None where no row says anything.
      least: the bound is from below.
      rows, fitted: how many rows say it, and how many of them had a part in a fit.
      unfitted: the same number over the others.
      most: no prediction of these rows can reach more, as rows of one program have one prediction; None: not
        known.
    """

    name: str
    bound: float
    reached: float | None
    least: bool
    rows: int
    fitted: int
    unfitted: float | None
    most: float | None = None

    @property
    def met(self) -> bool:
        if self.reached is None:
            return False
        return self.reached >= self.bound if self.least else self.reached <= self.bound

    @property
    def text(self) -> str:
        if self.reached is None:
            return ""
        own = f"; unfitted {_of(self.unfitted)}" if self.fitted and self.unfitted is not None else ""
        return f"{_of(self.reached)} of {self.rows} rows{own}"


def _of(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def quality(rows: Sequence[Priced]) -> Quality:
    """Errors of steps, and of choices within workloads."""
    errors = [p.error for p in rows]
    ranked = _workloads(rows)
    ranks = [_spearman(g) for g in ranked]
    regrets = [regret(g) for g in ranked]
    return Quality(
        len(rows),
        statistics.fmean(map(abs, errors)),
        statistics.fmean(errors),
        max(map(abs, errors)),
        _mean(ranks),
        _mean(regrets),
        max(regrets, default=None),
    )


def words_of(q: Quality) -> str:
    words = f"{q.rows} rows, mean error {q.mape:.1%} (in the mean {q.bias:+.1%}), largest {q.worst:.1%}"
    if q.spearman is not None:
        words += f"; within workloads Spearman {q.spearman:.3f}, regret {q.regret:.1%} (largest "
        words += f"{q.worst_regret:.1%})"
    return words


def regret(rows: Sequence[Priced]) -> float:
    """What the run predicted fastest takes over the fastest, less 1."""
    chosen = min(rows, key=lambda p: p.shipped)
    return chosen.run.seconds / min(p.run.seconds for p in rows) - 1


def _workloads(rows: Sequence[Priced]) -> list[list[Priced]]:
    groups: dict[str, list[Priced]] = defaultdict(list)
    for p in rows:
        if p.run.workload:
            groups[p.run.workload].append(p)
    return [g for g in groups.values() if len(g) >= 3]


def _spearman(rows: Sequence[Priced]) -> float:
    return float(spearmanr([p.shipped for p in rows], [p.run.seconds for p in rows]).statistic)


def most_ranked(rows: Sequence[Priced]) -> float:
    """An upper bound of the rank correlation of any prediction that is the same for rows of one program: the
    root of the share of the ranks' variance that lies between programs (here: different predictions)."""
    ranks = rankdata([p.run.seconds for p in rows])
    groups: dict[float, list[float]] = defaultdict(list)
    for p, rank in zip(rows, ranks, strict=True):
        groups[p.shipped].append(float(rank))
    means = np.array([statistics.fmean(groups[p.shipped]) for p in rows])
    return float(np.sqrt(np.var(means) / np.var(ranks)))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def criteria(rows: Sequence[Priced], memory: Sequence[Mapping[str, Any]]) -> list[Criterion]:
    """Every bound, and what is reached."""
    every = [p for p in rows if p.run.stages == 1]
    ran = [p for p in every if not p.run.keeps]
    gpus = [p for p in ran if p.run.stack != TPU]
    node = [p for p in gpus if "vtrain" in p.run.table and "multi" not in p.run.table]
    named = {
        "MaxText, TPU v4 and v5: mean error": ([p for p in ran if "maxtext" in p.run.table], 0.08),
        "vTrain, one node: mean error": (node, 0.09),
        "vTrain, several nodes, at 100 GB/s a node: mean error": (
            [p for p in gpus if "multi" in p.run.table],
            0.13,
        ),
        "Mesh-TensorFlow: mean error": ([p for p in ran if "mesh_tf" in p.run.table], 0.16),
        "layers that keep some values: mean error": ([p for p in every if p.run.keeps], 0.12),
    }
    found = [_bounded(name, own, bound, _error) for name, (own, bound) in named.items()]
    found += _orders(gpus)
    found.append(_bounded("vTrain, one node: regret in the mean", node, 0.03, _regret))
    found.append(_bounded("vTrain, one node: largest regret", node, 0.10, _worst_regret))
    held = [abs(m["error"]) for m in memory]
    found.append(
        Criterion("Korthikanti et al. 2022: largest error of memory", 0.03, max(held), False, 3, 0, None)
    )
    return found


def _bounded(
    name: str, rows: Sequence[Priced], bound: float, value: Callable[[Sequence[Priced]], float]
) -> Criterion:
    apart = [p for p in rows if not p.run.fitted]
    return Criterion(
        name,
        bound,
        value(rows) if rows else None,
        False,
        len(rows),
        len(rows) - len(apart),
        value(apart) if apart else None,
    )


def _orders(rows: Sequence[Priced]) -> list[Criterion]:
    """The order of the runs of every model that has enough of them, in one table."""
    models: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for p in rows:
        models[p.run.table, p.run.model].append(p)
    return [
        Criterion(
            f"{Path(table).stem} {model}: rank correlation",
            0.9,
            _spearman(own),
            True,
            len(own),
            sum(p.run.fitted for p in own),
            None,
            most_ranked(own),
        )
        for (table, model), own in models.items()
        if len(own) >= LEAST_RANKED
    ]


def _error(rows: Sequence[Priced]) -> float:
    return statistics.fmean(abs(p.error) for p in rows)


def _regret(rows: Sequence[Priced]) -> float:
    return statistics.fmean(regret(g) for g in _workloads(rows)) if _workloads(rows) else 0.0


def _worst_regret(rows: Sequence[Priced]) -> float:
    return max((regret(g) for g in _workloads(rows)), default=0.0)
