"""The agreement of predicted with measured times, over many layouts of a model.

(1) mape         mean of |predicted - measured| / measured
(2) kendall_tau  tau-b of the two orders (Kendall 1945)          1: the model orders all layouts rightly
(3) spearman     rank correlation (Spearman 1904)
(4) regret       measured time of the layout that the model ranks first / best measured time - 1
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layoutopt.optimize.baselines import by_name
from layoutopt.space.decisions import ANYTHING
from layoutopt.space.splits import domains
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

TRIES = 50
"""Random layouts tried for each one that is wanted: many split two dimensions of a tensor over one axis."""


@dataclass(frozen=True)
class ValidationRow:
    """One layout, predicted and measured."""

    layout: str
    predicted_seconds: float
    measured_seconds: float


def summary(rows: Sequence[ValidationRow]) -> dict[str, Any]:
    """(1)-(4) with the rows; correlations of fewer than two different times are NaN."""
    from scipy import stats

    predicted = [row.predicted_seconds for row in rows]
    measured = [row.measured_seconds for row in rows]
    ordered = len(set(predicted)) > 1 and len(set(measured)) > 1
    first = min(rows, key=lambda row: row.predicted_seconds)
    return {
        "rows": [asdict(row) for row in rows],
        "mape": sum(abs(p - m) / m for p, m in zip(predicted, measured, strict=True)) / len(rows),
        "kendall_tau": float(stats.kendalltau(predicted, measured).statistic) if ordered else float("nan"),
        "spearman": float(stats.spearmanr(predicted, measured).statistic) if ordered else float("nan"),
        "regret": first.measured_seconds / min(measured) - 1.0,
    }


def sample_layouts(model: Model, mesh: Mesh, count: int, seed: int = 0) -> list[Layout]:
    """Up to `count` different legal layouts on a mesh: the named ones, then random ones by `seed`."""
    options = domains(model.graph, mesh, ANYTHING)
    found = [layout for _, own, layout, _ in by_name(model, mesh) if own == mesh]
    layouts = [x for x in dict.fromkeys(found) if _legal(model, mesh, x)]
    rng = random.Random(seed)
    splittable = sorted(name for name, axes in options.items() if len(axes) > 1)
    for _ in range(TRIES * count if splittable else 0):
        if len(layouts) >= count:
            break
        chosen = rng.sample(splittable, rng.randint(1, min(4, len(splittable))))
        layout = Layout({name: rng.choice(options[name]) for name in chosen})
        if layout not in layouts and _legal(model, mesh, layout):
            layouts.append(layout)
    return layouts[:count]


def _legal(model: Model, mesh: Mesh, layout: Layout) -> bool:
    try:
        model.lower(mesh, layout, check=False)
    except LayoutError:
        return False
    return True
