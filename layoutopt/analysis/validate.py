"""Validation: runs many layouts of a model and compares measured with predicted times.

The layouts are the best by the search (without recomputation and split storage), the named ones, and others
spread evenly over the predicted times, so that the sample has both small and large differences. Every layout
stays loaded, and layouts run in turns, so that a disturbance of the machine affects all of them equally.
Times are medians, corrected for the CPU time of other processes (`costmodels.calibration.clock`).

  mape         mean of |predicted - measured| / measured
  kendall_tau  tau-b of the two orders (Kendall 1945); 1: the model orders all layouts rightly
  spearman     rank correlation (Spearman 1904)
  regret       measured time of the layout that the model ranks first / best measured time - 1
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from costmodels.calibration import (
    Drift,
    Team,
    TimingSample,
    assemble,
    noise,
    open_drift,
    repeats_spread,
    steps_for,
    typical,
)
from costmodels.calibration.runner import OnProbe
from costmodels.hardware import Hardware, machine_of
from costmodels.pricing.pricer import Pricer, pricer
from layoutopt.analysis.difference import difference_notes
from layoutopt.optimize.heuristics.baselines import by_name
from layoutopt.plan.evidence import MeasuredLayout, Noise
from layoutopt.plan.results import ValidateResult
from layoutopt.space.allow import USUAL
from layoutopt.space.decisions import ANYTHING
from layoutopt.space.splits import domains
from mesh_tf_core.engines import Cluster
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.model import Model

TRIES = 50
"""Random layouts tried for each one that is wanted: many split two dimensions of a tensor over one axis."""


def summary(rows: Sequence[MeasuredLayout], disturbed: Noise = Noise()) -> ValidateResult:  # noqa: B008
    """(1)-(4) with the rows; correlations of fewer than two different times are unknown."""
    from scipy import stats

    predicted = [row.predicted_seconds for row in rows]
    measured = [row.measured_seconds for row in rows]
    ordered = len(set(predicted)) > 1 and len(set(measured)) > 1
    first = min(rows, key=lambda row: row.predicted_seconds)
    return ValidateResult(
        rows=tuple(rows),
        mape=sum(abs(p - m) / m for p, m in zip(predicted, measured, strict=True)) / len(rows),
        kendall_tau=float(stats.kendalltau(predicted, measured).statistic) if ordered else None,
        spearman=float(stats.spearmanr(predicted, measured).statistic) if ordered else None,
        regret=first.measured_seconds / min(measured) - 1.0,
        noise=disturbed,
    )


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


SAMPLE_SECONDS = 0.05
CANDIDATES = 6
"""Random layouts that are priced for every one that is run."""


@dataclass(frozen=True)
class RunCandidate:
    """A layout to run: its name and its predicted seconds."""

    name: str
    layout: Layout
    seconds: float


@dataclass(frozen=True)
class ValidationRuns:
    """The options of runs by `validate`.

    Attributes:
      count: the number of layouts to run if no layouts are given: the best layout, named and random layouts.
      steps: the number of timed samples per layout. A sample is one step, or a few if steps are short.
      seed: the seed of the random layouts.
      batch: the input of every step (None: zeros).
      engine: runs the steps (`mesh_tf_core.engines.open_engine`).
      cluster: the processes that run them together; one chooses the layouts for all.
    """

    count: int = 12
    steps: int = 7
    seed: int = 0
    batch: Mapping[str, Any] | None = None
    engine: str = "auto"
    cluster: Cluster | None = None


USUAL_RUNS = ValidationRuns()


def validate(
    model: Model,
    mesh: Mesh | str,
    hardware: str | Hardware = "cpu-local",
    layouts: Sequence[Layout | str] | None = None,
    runs: ValidationRuns = USUAL_RUNS,
    on_progress: OnProbe | None = None,
) -> ValidateResult:
    """Runs layouts of a model on this machine's mesh and compares.

    Args:
      hardware: that predicts; a calibrated profile, to mean anything.
      layouts: layouts to run (None: as many as `runs` says, chosen as the module describes).

    Raises:
      UserError: fewer than two layouts, or one that is not legal.
    """
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    machine = machine_of(hardware)
    if layouts is not None:
        prices = pricer(machine, mesh)
        given = [Layout(x) if isinstance(x, str) else x for x in layouts]
        chosen = [RunCandidate("given", x, seconds_of(model, mesh, x, prices)) for x in dict.fromkeys(given)]
    else:
        chosen = _chosen(lambda: choose(model, mesh, machine, runs.count, runs.seed), mesh, runs.cluster)
    if len(chosen) < 2:
        raise UserError(
            f"validate needs at least two layouts on mesh [{mesh}], but found {len(chosen)}; use a "
            "larger mesh, or name two layouts"
        )
    team = assemble(mesh, runs.cluster, runs.engine)
    # The references of a profile run in one process.
    watched = open_drift(mesh, machine, team.engine) if runs.cluster is None else nullcontext(Drift((), ()))
    with watched as drift:
        samples = run(model, team, chosen, runs.steps, runs.batch, on_progress, drift.measure)
        found = result(chosen, samples, drift.ratio)
    times = [(row.predicted_seconds, row.measured_seconds) for row in found.rows]
    load = found.noise.foreign or 0.0
    notes = difference_notes(times, mesh, team.engine, machine, load, drift.ratio)
    return found.model_copy(update={"notes": tuple(notes)})


def _chosen(
    choose: Callable[[], list[RunCandidate]], mesh: Mesh, cluster: Cluster | None
) -> list[RunCandidate]:
    """What one process chooses, for all."""
    if cluster is None:
        return choose()
    cluster.start(mesh.devices)

    def told() -> list[tuple[str, str, float]]:
        return [(c.name, str(c.layout), c.seconds) for c in choose()]

    return [RunCandidate(n, Layout(x), s) for n, x, s in cluster.share("the choice of layouts", told)]


def result(
    chosen: Sequence[RunCandidate], samples: Sequence[Sequence[TimingSample]], drift: float | None = None
) -> ValidateResult:
    """The object of `--json`, from the runs."""
    rows = [
        MeasuredLayout(
            layout=str(c.layout),
            predicted_seconds=c.seconds,
            measured_seconds=typical(s),
            name=c.name,
            spread=repeats_spread(s),
        )
        for c, s in zip(chosen, samples, strict=True)
    ]
    said = noise(samples)
    return summary(rows, Noise(**asdict(said), noisy=said.noisy, words=said.words, drift=drift))


def seconds_of(model: Model, mesh: Mesh, layout: Layout, prices: Pricer) -> float:
    """Predicted seconds of a step; LayoutError for a layout that is not legal."""
    return prices.cost(model.lower(mesh, layout, check=False)).step_seconds


def choose(
    model: Model, mesh: Mesh, hardware: Hardware, count: int, seed: int = 0, best: Layout | None = None
) -> list[RunCandidate]:
    """The best layout by the search, the named ones, and others, evenly spaced in the logarithm of predicted
    time.

    Args:
      best: the answer of the search, if it is known.
    """
    prices = pricer(hardware, mesh)
    if best is None:
        from layoutopt.optimize.entry import search

        plain: dict[str, Any] = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}
        plain |= {"memory": math.inf, "alternatives": False, "allow": USUAL}
        best = search(model, mesh=mesh, hardware=hardware, **plain).layout
    fixed = [RunCandidate("best by the search", best, seconds_of(model, mesh, best, prices))]
    for name, own, layout, _ in by_name(model, mesh):
        if own == mesh and all(layout != c.layout for c in fixed):
            try:
                fixed.append(RunCandidate(name, layout, seconds_of(model, mesh, layout, prices)))
            except LayoutError:
                continue
    known = {c.layout for c in fixed}
    random = [x for x in sample_layouts(model, mesh, CANDIDATES * count, seed) if x not in known]
    others = [RunCandidate("random", x, seconds_of(model, mesh, x, prices)) for x in random]
    return [*fixed[:count], *stratified(others, count - len(fixed[:count]))]


def stratified(candidates: Sequence[RunCandidate], count: int) -> list[RunCandidate]:
    """`count` candidates nearest to evenly spaced places between the logarithms of the least and the largest
    time.
    """
    left = sorted(candidates, key=lambda c: c.seconds)
    if count >= len(left):
        return left
    low, high = (math.log(c.seconds) for c in (left[0], left[-1]))
    out: list[RunCandidate] = []
    for i in range(count):
        place = low + (high - low) * (i + 0.5) / count
        nearest = min(left, key=lambda c: abs(math.log(c.seconds) - place))
        left.remove(nearest)
        out.append(nearest)
    return out


def run(
    model: Model,
    team: Team,
    chosen: Sequence[RunCandidate],
    steps: int,
    batch: Mapping[str, Any] | None = None,
    on_progress: OnProbe | None = None,
    each_turn: Callable[[], object] = lambda: None,
) -> list[list[TimingSample]]:
    """`steps` samples of every layout, in turns; `each_turn` is called between turns."""
    fed = zeros(model) if batch is None else batch
    total = len(chosen) * (steps + 1)
    engines = []
    try:
        for i, c in enumerate(chosen):
            engine = team.open(model.lower(team.mesh, c.layout))
            engines.append(engine)
            engine.initialize()
            engine.step(fed)
            if on_progress is not None:
                on_progress(f"building {c.layout or 'replicated'}", i + 1, total)
        found = [steps_for(lambda e=e: e.step(fed), SAMPLE_SECONDS) for e in engines]  # type: ignore[misc]
        counts = team.broadcast("the numbers of steps", found)
        samples: list[list[TimingSample]] = [[] for _ in chosen]
        for turn in range(steps):
            each_turn()
            for i, engine in enumerate(engines):
                samples[i].append(team.sample(lambda e=engine: e.step(fed), counts[i]))  # type: ignore[misc]
            if on_progress is not None:
                on_progress(f"round {turn + 1} of {steps}", len(chosen) * (turn + 2), total)
    finally:
        for engine in engines:
            engine.close()
    return samples


def zeros(model: Model) -> dict[str, Any]:
    """A batch of zeros: name of an input -> array of its whole shape."""
    import numpy as np

    return {name: np.zeros(t.shape.sizes, np_dtype(t.dtype)) for name, t in model.graph.inputs.items()}
