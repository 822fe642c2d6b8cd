"""The results of sizes: loss against compute with the law, and time against money over hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layoutopt.plan.size_results import SizedCandidate, SizeResult
from layoutopt.plan.units import count, number, plural, rounded
from reports.figures.chart import log_steps, padded
from reports.figures.sheet import MARGIN, SMALL, WIDTH, FigureSheet, Label, labels, settings, ticks
from reports.theme import AXES, LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT = 230.0
UNITS = (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0))
"""Units of time; the first unit of which the longest training has at least two is used."""
FLOPS = 6.0
"""The FLOPs of a parameter and token, where runs state no FLOPs."""


def loss_compute(found: SizeResult, title: str = "") -> Figure:
    """Loss against FLOPs: courses of sizes, their ends, the optimum of the law, and the user's runs."""
    with settings():
        sheet = FigureSheet(PLOT + 74, title)
        sheet.text(MARGIN, 11, "loss (nats per token)", "muted", SMALL)
        ax = sheet.axes(48, 24, WIDTH - 64, PLOT)
        runs = [(FLOPS * n * d, loss) for n, d, loss in found.law.runs]
        ends = [(c.flops, c.loss) for c in found.candidates if c.flops and c.loss]
        last = max(x for x, _ in ends or [(1.0, 1.0)])
        curves = [point for course in found.courses for point in course.points]
        curves += [point for point in found.least if point[0] <= 2 * last]
        _logarithmic(ax, [x for x, _ in (*ends, *curves, *runs)], [y for _, y in (*ends, *curves, *runs)])
        for course in found.courses:
            _line(ax, course.points, "other", 1.0)
        _line(ax, found.least, "compute", 1.75)
        _dots(ax, runs, "memory", 3)
        _dots(ax, ends, "ink", 4)
        best = found.best
        if best.flops and best.loss:
            _dots(ax, [(best.flops, best.loss)], "exposed", 9)
            named = [(best.flops, best.loss, rounded(count(best.parameters)), "ink", True)]
            others = [c for c in found.courses if c.parameters != best.parameters]
            ends_of = {id(c): c for c in (*others[:1], *others[-1:])}.values()
            named += [(*c.points[-1], rounded(count(c.parameters or 0)), "muted", False) for c in ends_of]
            labels(ax, named, [*ends, *runs])
        sheet.text(WIDTH - MARGIN, PLOT + 62, "FLOP of training", "muted", SMALL, "right")
        return sheet.figure


def _logarithmic(ax: Axes, xs: Sequence[float], ys: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.set_xlim(*padded(xs, 0.12))
    ax.set_ylim(min(ys) - 0.04, min(max(ys), 2.5 * min(ys)) + 0.05)
    steps = log_steps(*ax.get_xlim(), 5)
    ticks(ax, "x", steps, [f"{v:.2g}".replace("e+", "e") for v in steps], grid=False)
    low, high = ax.get_ylim()
    step = next(s for s in (0.05, 0.1, 0.25, 0.5, 1.0, 2.5) if (high - low) / s <= 8 or s == 2.5)
    first = int(low / step) + 1
    values = [step * i for i in range(first, int(high / step) + 1)]
    ticks(ax, "y", values, [f"{v:.2f}" for v in values])


def _line(ax: Axes, points: Sequence[tuple[float, float]], token: str, width: float) -> None:
    ax.plot([x for x, _ in points], [y for _, y in points], color=LIGHT[token], linewidth=width)


def _dots(ax: Axes, points: Sequence[tuple[float, float]], token: str, size: float) -> None:
    ax.plot([x for x, _ in points], [y for _, y in points], "o", color=LIGHT[token], markersize=size)


def find_loss_compute(found: SizeResult) -> str:
    """The best size's loss, and how flat the optimum is."""
    best = found.best
    text = (
        f"{rounded(count(best.parameters))} parameters reach a loss of {best.loss:.3f} with "
        f"{best.flops:.2g} FLOP"
    )
    return text if found.flat is None else f"{text}; {found.flat.in_words()}"


def time_money(found: SizeResult, title: str = "") -> Figure:
    """Time against money (chip-hours where no price is known): the best size over hardware and devices."""
    rows = of_best(found)
    priced = all(r.money is not None for r in rows)
    with settings():
        names = list(dict.fromkeys(r.hardware for r in rows))
        sheet = FigureSheet(PLOT + 92, title)
        sheet.text(MARGIN, 11, "money" if priced else "chip-hours", "muted", SMALL)
        ax = sheet.axes(58, 24, WIDTH - 78, PLOT)
        ax.set_xscale("log")
        ax.set_yscale("log")
        unit, each = next((u for u in UNITS if max(r.days or 0.0 for r in rows) * u[1] >= 2), UNITS[-1])
        spent, costs = [each * (r.days or 0.0) for r in rows], [_cost(r, priced) for r in rows]
        ax.set_xlim(*padded(spent, 0.1))
        ax.set_ylim(*padded(costs, 0.15))
        x, y = log_steps(*ax.get_xlim(), 5), log_steps(*ax.get_ylim(), 5)
        ticks(ax, "x", x, [rounded(number(v)) for v in x], grid=False)
        ticks(ax, "y", y, [rounded(number(v)) for v in y])
        named: list[Label] = []
        dots: list[tuple[float, float]] = []
        for i, name in enumerate(names):
            own = sorted((r for r in rows if r.hardware == name), key=lambda r: r.devices)
            points = [(each * (r.days or 0.0), _cost(r, priced)) for r in own]
            token = f"axis{i % AXES}"
            _line(ax, points, token, 1.5)
            _dots(ax, points, token, 5)
            dots += points
            ends = ((own[0], points[0]), (own[-1], points[-1]))[: len(own)]
            named += [(*at, f"{row.devices:,}", token, False) for row, at in ends]
        labels(ax, named, dots)
        best = found.best
        ax.plot(
            [each * (best.days or 0.0)],
            [_cost(best, priced)],
            "o",
            markersize=11,
            markerfacecolor="none",
            markeredgecolor=LIGHT["ink"],
        )
        sheet.text(WIDTH - MARGIN, PLOT + 62, unit, "muted", SMALL, "right")
        sheet.key(PLOT + 80, [(f"axis{i % AXES}", name) for i, name in enumerate(names)])
        return sheet.figure


def of_best(found: SizeResult) -> list[SizedCandidate]:
    """The rows of the best size."""
    own = found.best
    return [c for c in found.candidates if c.parameters == own.parameters and c.hparams == own.hparams]


def _cost(row: SizedCandidate, priced: bool) -> float:
    return (row.money if priced else row.chip_hours) or 0.0


def find_time_money(found: SizeResult) -> str:
    """Where it trains, for how long, for how much."""
    best = found.best
    return f"{plural(best.devices, 'device')} of {best.hardware}: {best.lasts()}, {best.costs()}"
