"""A law of the user's own runs: approach 3 of Hoffmann et al. 2022 (section 3.3, appendix D.3).

(1) least sum over runs of Huber_delta(log(E + A / N^alpha + B / D^beta) - log L), delta = 1e-3

The sum, not the mean, and to the end: with the mean solvers stop early, which is how the published
constants were missed (Besiroglu et al. 2024, section 4). log E, log A and log B are searched, the latter two
at the centre of the runs. Intervals are the middle 95 % over bootstraps: runs drawn again with replacement
and fitted again. The interval of a predicted loss also includes the residual of a run, drawn at random.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from layoutopt.plan.units import shorten
from layoutopt.sizing.laws import Additive
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.reading import read_file, reading

FloatArray = npt.NDArray[np.float64]
DELTA = 1e-3
RESAMPLES, SHARE = 200, 0.95
LEAST, KINDS, FALL = 6, 3, 1e-3
"""Runs, different sizes and numbers of tokens among them, and the part of the loss by which it falls from the
fewest to the most of these, that five constants need at least."""
SMALLEST, LARGEST = 1e-30, 1e40
"""The bounds of fitted numbers."""
EXPONENTS, FLOORS = (0.2, 0.5, 1.0), (0.3, 0.6, 0.9)
"""Where the search of the constants begins; floors are parts of the least loss."""
POLISHED = 8
"""Number of starts that the search refines: those nearest to most runs."""
COLUMNS = {"N": ("n", "parameters", "params"), "D": ("d", "tokens"), "loss": ("loss", "l")}


class FittedLaw(Additive):
    """A law with the uncertainties of its constants; `intervals` are 95 %, also of a = beta / (alpha + beta).

    Attributes:
      samples: float64 [bootstraps, 5]: E, A, B, alpha, beta.
      residuals: float64 [runs]: log L less the log of the fit.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    samples: FloatArray = Field(exclude=True, repr=False)
    residuals: FloatArray = Field(exclude=True, repr=False)

    def loss_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """The 95 % interval of the loss of one more run."""
        e, a, b, alpha, beta = self.samples.T
        means = np.log(e + a / parameters**alpha + b / tokens**beta)
        runs = len(self.runs)
        spread = self.residuals * math.sqrt(runs / max(runs - 5, 1))  # five constants were fitted
        drawn = np.random.default_rng(0).choice(spread, (8, len(means)))
        low, high = _middle((means + drawn).ravel())
        return math.exp(low), math.exp(high)


def _middle(values: FloatArray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def fit(runs: Any, name: str = "own", source: str = "own runs", resamples: int = RESAMPLES) -> FittedLaw:
    """The law of some runs.

    Args:
      runs: a frame, or a mapping, with columns N (parameters), D (tokens) and loss.

    Raises:
      UserError: too few runs, too few different runs, or values that are not positive.
    """
    n, d, loss = (_column(runs, name, source) for name in COLUMNS)
    for column, values in zip(COLUMNS, (n, d, loss), strict=True):
        if not ((values > SMALLEST) & (values < LARGEST)).all():
            raise UserError(
                f"{source}: column {column!r} must contain only positive numbers; remove the runs without "
                "them"
            )
    sizes, lengths = len(np.unique(n)), len(np.unique(d))
    if len(loss) < LEAST or sizes < KINDS or lengths < KINDS:
        raise UserError(
            f"{source} has {len(loss)} runs with {sizes} different sizes N and {lengths} different "
            f"numbers of tokens D; to fit the five constants of a law, give at least {LEAST} runs with "
            f"{KINDS} different sizes and {KINDS} different numbers of tokens"
        )
    found = _best(n, d, loss, _starts(n, d, loss))
    constants = dict(zip(("E", "A", "B", "alpha", "beta"), _constants(found, n, d), strict=True))
    for column, values, factor, power in (("N", n, "A", "alpha"), ("D", d, "B", "beta")):
        ends = constants[factor] * np.array([values.min(), values.max()]) ** -constants[power]
        if not ends[0] - ends[1] > FALL * loss.min():
            raise UserError(
                f"{source}: from the smallest to the largest {column}, the loss falls by less than "
                f"{FALL:.1%}, so the law cannot be fitted; add runs with a wider range of {column}"
            )
    rng, samples = np.random.default_rng(0), list[FloatArray]()
    while len(samples) < resamples:
        chosen = rng.integers(0, len(loss), len(loss))
        if len(np.unique(n[chosen])) >= KINDS and len(np.unique(d[chosen])) >= KINDS:
            samples.append(_best(n[chosen], d[chosen], loss[chosen], [found], (n, d)))
    drawn = np.array([_constants(s, n, d) for s in samples])
    e, a, b, alpha, beta = drawn.T
    spread = {"E": e, "A": a, "B": b, "alpha": alpha, "beta": beta, "a": beta / (alpha + beta)}
    return FittedLaw(
        name=name,
        counts="total",
        constants=constants,
        ranges={"parameters": (n.min(), n.max()), "tokens": (d.min(), d.max())},
        source=source,
        note=f"{len(loss)} runs; intervals from {resamples} bootstrap samples of the runs",
        intervals={each: _middle(values) for each, values in spread.items()},
        runs=list(zip(n.tolist(), d.tolist(), loss.tolist(), strict=True)),
        samples=drawn,
        residuals=np.log(loss) - _log_loss(found, n, d, (n, d)),
    )


def _column(runs: Any, name: str, source: str) -> FloatArray:
    """float64 [runs]; UserError if it is none."""
    try:
        known = [*map(str, runs.keys())]
    except AttributeError:
        raise UserError(
            f"runs is {runs!r}; give a CSV file, or a data frame with the columns N, D and loss"
        ) from None
    if name not in known:
        raise UserError(f"{source} has no column {name!r}; {known_names(name, known)}")
    try:
        return np.asarray(runs[name], dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(
            f"{source}: column {name!r} must contain only positive numbers; remove the runs without them"
        ) from None


def _centres(n: FloatArray, d: FloatArray) -> tuple[float, float]:
    return float(np.log(n).mean()), float(np.log(d).mean())


def _constants(found: FloatArray, n: FloatArray, d: FloatArray) -> tuple[float, ...]:
    """E, A, B, alpha, beta of what was searched."""
    a, b, e, alpha, beta = found
    at_n, at_d = _centres(n, d)
    return (math.exp(e), math.exp(a + alpha * at_n), math.exp(b + beta * at_d), float(alpha), float(beta))


def _terms(
    found: FloatArray, n: FloatArray, d: FloatArray, around: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """The logarithms of the three terms, [3, runs]."""
    a, b, e, alpha, beta = found
    at_n, at_d = _centres(*around)
    return np.stack([a - alpha * (np.log(n) - at_n), b - beta * (np.log(d) - at_d), np.full(len(n), e)])


def _log_loss(
    found: FloatArray, n: FloatArray, d: FloatArray, around: tuple[FloatArray, FloatArray]
) -> FloatArray:
    return np.logaddexp.reduce(_terms(found, n, d, around), axis=0)


def _starts(n: FloatArray, d: FloatArray, loss: FloatArray) -> list[FloatArray]:
    """At the centre, what is above the floor is half of the size's and half of the data's."""
    starts = []
    for part in FLOORS:
        floor = part * loss.min()
        half = math.log((float(np.exp(np.log(loss).mean())) - floor) / 2)
        starts += [np.array([half, half, math.log(floor), x, y]) for x in EXPONENTS for y in EXPONENTS]
    return starts


def _best(
    n: FloatArray,
    d: FloatArray,
    loss: FloatArray,
    starts: Sequence[FloatArray],
    around: tuple[FloatArray, FloatArray] | None = None,
) -> FloatArray:
    """Equation (1): log A and log B at the centre, log E, alpha, beta."""
    from scipy.optimize import least_squares

    around, wanted = around or (n, d), np.log(loss)
    at_n, at_d = _centres(*around)
    by_n, by_d = np.log(n) - at_n, np.log(d) - at_d

    def miss(x: FloatArray) -> FloatArray:
        return _log_loss(x, n, d, around) - wanted

    def slope(x: FloatArray) -> FloatArray:
        terms = _terms(x, n, d, around)
        a, b, e = np.exp(terms - np.logaddexp.reduce(terms, axis=0))
        return np.stack([a, b, e, -a * by_n, -b * by_d], axis=1)

    top = math.log(loss.min())
    low, high = [top - 20, top - 20, top - 20, 0.0, 0.0], [top + 10, top + 10, top, 4.0, 4.0]
    options: dict[str, Any] = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-14, "max_nfev": 400}

    def lost(x: FloatArray) -> float:
        return float(np.minimum(np.abs(miss(x)), 10 * DELTA).sum())

    results = [
        least_squares(
            miss,
            np.clip(s, np.array(low) + 1e-9, np.array(high) - 1e-9),
            slope,
            (low, high),
            loss="huber",
            f_scale=DELTA,
            **options,
        )
        for s in sorted(starts, key=lost)[:POLISHED]
    ]
    best: FloatArray = min(results, key=lambda r: float(r.cost)).x
    return best


def read_runs(path: str | Path) -> Any:
    """The runs of a CSV file with a header, as a frame with columns N, D and loss.

    Raises:
      UserError: no such file, no such columns, or a value that is not a number.
    """
    import pandas as pd

    what = f"--fit {str(path)!r}"
    with reading(what, "give a CSV file with the columns N, D and loss"):
        content = io.BytesIO(read_file(path))
    try:
        frame = pd.read_csv(content, comment="#", skipinitialspace=True)
    except ValueError as error:  # also of what is not a text, and of rows that do not agree
        raise UserError(
            f"{what} is not a CSV file with a header row: {' '.join(str(error).split())}"
        ) from None
    by_name = {str(c).strip().lower(): c for c in frame.columns}
    found = {}
    for column, names in COLUMNS.items():
        known = next((by_name[name] for name in names if name in by_name), None)
        if known is None:
            raise UserError(
                f"{what} has no column {column!r}; name the columns N (parameters), D (tokens) and loss; "
                f"{known_names(column, (shorten(str(c), 40) for c in frame.columns))}"
            )
        numbers = pd.to_numeric(frame[known], errors="coerce")
        if numbers.isna().any():
            row = int(numbers.isna().idxmax())
            raise UserError(
                f"{what}: row {row + 1} of column {known!r} is {str(frame[known][row])!r}, which is not a "
                "number; correct or remove this row"
            )
        found[column] = numbers.astype(float)
    return pd.DataFrame(found)
