"""A framework's constants, fitted to steps that its user measured.

runs = [(layoutopt.cost(model, mesh, layout, "h100", framework="torch"), seconds), ...]
layoutopt.learn(runs).save("mine.json")  # then framework="mine.json"

Constants are added one by one, each time the one that lowers the error most (`costmodels.step_fit`
prices them). What ships stays unless runs that had no part in the fit are predicted clearly better.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.frameworks import load_framework
from costmodels.hardware import Hardware, hardware_names, split_name
from costmodels.step_fit import (
    EFFICIENCY,
    GATHERED,
    HIDDEN,
    INTERVAL,
    SUSTAINED,
    TENSOR,
    FittedConstant,
    StepFit,
    StepSums,
    constants_of,
)
from layoutopt.api.pricing import PricedLayout
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.plan.known import kind_words
from layoutopt.plan.layout_results import LearnedConstant, LearnResult
from layoutopt.plan.notebook import Shown, table
from layoutopt.plan.units import percent
from layoutopt.space.parallelism import parallelism
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import write_file

WIDTHS = {SUSTAINED: 0.1, EFFICIENCY: 0.2, INTERVAL: 10e-6, HIDDEN: 0.25, TENSOR: 0.25}
"""The constants of one framework on one chip, and how far each may well be off: assumed, not measured."""
CHIP = "measured"
LEAST, MOST = 3, 4
"""Runs, and constants."""
FAR = 100.0
"""A step that takes so many times as long as predicted, or as short, is a mistake."""
GAIN = 0.004
"""Error that one more constant must save."""
FOLDS = 20
"""Fits without some of the runs; of up to so many runs, each is left out alone."""
LESS = 0.8
"""Share of the error, at most, with which constants are taken."""
NOISE = 0.1
"""Error of one run that says nothing: few runs move constants less. These three were chosen on draws of 3, 5
and 10 rows of published tables, for the error of the other rows (`benchmarks.learned`)."""


@dataclass(frozen=True, repr=False)
class Learned(Shown):
    """The constants that measured runs change.

    Attributes:
      machine: the chip under the framework that was fitted.
      constants: name, value before and after, 90 % interval of fits of these constants to runs drawn anew;
        none if what ships is as good.
      before, after: absolute error of each layout, predicted without its runs, as a share.
      kinds: of each layout (`layoutopt.plan.known.kind_words`).
    """

    machine: Hardware
    constants: tuple[LearnedConstant, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    kinds: tuple[str, ...]

    @property
    def error_before(self) -> float:
        return float(np.mean(self.before))

    @property
    def error_after(self) -> float:
        return float(np.mean(self.after))

    @property
    def data(self) -> LearnResult:
        """The result that `layoutopt learn --json` prints."""
        return LearnResult(
            framework=self.machine.framework,
            hardware=self.machine.name,
            rows=len(self.before),
            constants=list(self.constants),
            error_before=self.error_before,
            error_after=self.error_after,
        )

    def save(self, path: str | Path, of: str = "") -> None:
        """Writes the framework with these constants to a file, for `framework=`.

        Args:
          of: what was measured, for the sources of the numbers.

        Raises:
          UserError: `path` cannot be written.
        """
        content = self._content(Path(path).stem, of)
        write_file(path, json.dumps(content, indent=1) + "\n", "the framework")

    def _content(self, name: str, of: str) -> dict[str, Any]:
        base, chip = load_framework(self.machine.framework), split_name(self.machine.name)[0]
        source = (
            f"fitted with `layoutopt learn` to {len(self.before)} measured runs{of and f' of {of}'}: error "
            f"{percent(self.error_before)} with {base.text}, {percent(self.error_after)} with these constants"
        )
        part, date = dict[str, Any](), datetime.now(UTC).date().isoformat()
        for c in self.constants:
            value, unit = float(f"{c.after:.4g}"), "s" if c.name == INTERVAL else "1"
            number = {"value": value, "unit": unit, "source": source, "date": date}
            for path in (c.name, GATHERED) if c.name == HIDDEN else (c.name,):
                room, _, key = path.partition(".")
                part.setdefault(room, {})[key] = number
        variants: dict[str, Any] = {v: {"default": option} for v, option in base.chosen.items()}
        paths = {f"{room}.{key}" for room, numbers in part.items() for key in numbers}
        setters = {n.option for n in base.numbers() if n.path in paths}
        for name_of, option in base.options().items():
            if f"{name_of}={option}" in setters:  # it would replace the number
                variants.setdefault(name_of, {})["options"] = {option: {"on": {chip: part}}}
        # Those of the base go: they were found with its numbers.
        errors: dict[str, Any] = dict.fromkeys(base.errors.get(chip, ()))
        for kind in dict.fromkeys(self.kinds):
            own = [error for error, its in zip(self.after, self.kinds, strict=True) if its == kind]
            errors[kind] = {"rows": len(own), "mean": float(np.mean(own)), "worst": max(own)}
        return {
            "format": "layoutopt-framework/1",
            "name": name,
            "like": base.file or base.name,
            "summary": f"{base.text}, as measured{of and f' in {of}'}",
            "on": {chip: part} if part else {},
            "variants": variants,
            "errors": {chip: errors},
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per constant."""
        return table([c.to_json() for c in self.constants])

    def __repr__(self) -> str:
        errors = f"mean error {percent(self.error_before)} before, {percent(self.error_after)} after"
        its = f"{len(self.constants)} constants of {self.machine.framework}"
        return f"Learned({its}, {len(self.before)} runs: {errors})"


def learn(runs: Sequence[tuple[PricedLayout, float]]) -> Learned:
    """Fits a framework's constants to measured steps.

    Args:
      runs: at least 3 different layouts, all predicted for one hardware under one framework, each with the
        seconds that a step of it took. Of equal layouts the mean counts.

    Raises:
      UserError: fewer layouts, seconds that are no positive number or far from those predicted, several
        machines, or one that is no preset.

    Example:
      >>> import layoutopt
      >>> from examples import transformer_lm
      >>> plain = [
      ...     layoutopt.cost(
      ...         transformer_lm.model(batch=8 * n), f"data:{n}", "batch:data", "h100", framework="torch"
      ...     )
      ...     for n in (2, 4, 8)
      ... ]
      >>> found = layoutopt.learn([(each, 1.2 * each.predicted.step_seconds) for each in plain])
      >>> found.error_after < found.error_before
      True
    """
    if not runs:
        raise UserError(f"learn: no measured runs; give at least {LEAST}")
    machine = runs[0][0].evaluation.prices.hardware
    chip, settings = split_name(machine.name)
    for setting in settings:
        if setting.partition("=")[0].strip().rpartition(".")[2] in {n.rpartition(".")[2] for n in WIDTHS}:
            raise UserError(
                f"learn: the setting {setting} of the hardware is what would be fitted; remove it"
            )
    if chip not in hardware_names() or machine.kind == "cpu":
        raise UserError(f"learn: {chip} is no preset of GPUs or TPUs; choose one of `layoutopt hardware`")
    for at, (each, seconds) in enumerate(runs, start=1):
        if not 0 < seconds < np.inf:
            raise UserError(f"learn: run {at} took {seconds!r} s; give a positive number of seconds")
        if (its := each.evaluation.prices.hardware) != machine:
            raise UserError(
                f"learn: run {at} is predicted for {its.name} under {its.framework}, but run 1 for "
                f"{machine.name} under {machine.framework}; learn from one of them at a time"
            )
        likely = each.predicted.step_seconds
        if not 1 / FAR < seconds / likely < FAR:
            far = f"{seconds:.3g} s, but {likely:.3g} s are predicted"
            raise UserError(f"learn: run {at} took {far}; give the seconds of one step")
    apart = defaultdict[Hashable, list[tuple[Evaluation, float]]](list)
    for each, seconds in runs:
        of = each.evaluation
        key = of.model.fingerprint, of.program.mesh, of.program.layout, of.options.key
        apart[key].append((of, seconds))
    if len(apart) < LEAST:
        runs_of = f"{len(runs)} measured runs of {len(apart)} different layouts"
        raise UserError(f"learn: {runs_of}; give at least {LEAST} layouts")
    sums, kinds = [], []
    for own in apart.values():
        of, seconds = own[0][0], float(np.mean([took for _, took in own]))
        sums.append(StepSums(of.prices, ((x.times, x.item) for x in of.cost.lines), seconds, CHIP))
        kinds.append(kind_words(bool(parallelism(of.model).experts), bool(of.pipeline)))
    before, after, found = taken(sums)
    names, ships = [c for c, _ in found], constants_of(machine)
    ends = StepFit(names, sums, shrink=NOISE / len(sums)).intervals(range(len(sums))).T.tolist()
    constants = (
        LearnedConstant(name=c.name, before=ships[c.name], after=value, interval=(low, high))
        for (c, value), (low, high) in zip(found, ends, strict=True)
    )
    return Learned(machine, tuple(constants), before, after, tuple(kinds))


def taken(
    sums: Sequence[StepSums],
) -> tuple[tuple[float, ...], tuple[float, ...], list[tuple[FittedConstant, float]]]:
    """Errors of steps as shipped, those with constants of all others, and the constants: none where the
    latter are hardly less."""
    before = tuple(error_of(each, []) for each in sums)
    count = min(FOLDS, len(sums))
    others = [fitted([s for at, s in enumerate(sums) if at % count != fold]) for fold in range(count)]
    after = tuple(error_of(each, others[at % count]) for at, each in enumerate(sums))
    if np.mean(after) >= LESS * np.mean(before):
        return before, before, []
    return before, after, fitted(sums)


def fitted(sums: Sequence[StepSums]) -> list[tuple[FittedConstant, float]]:
    """The constants that lower the error of some steps of one machine most, with their values.

    There are at most `MOST`, and two runs for each but the first.
    """
    ships, shrink = constants_of(sums[0].machine), NOISE / len(sums)
    launched = sums[0].machine.chip.launch_interval is not None
    left = [
        FittedConstant((CHIP,), name, ships[name], width, 1e-3 if name == INTERVAL else 1.0)
        for name, width in WIDTHS.items()
        if name != INTERVAL or launched
    ]
    found, values = StepFit([], sums), list[float]()
    found.best()
    while left and len(found.used) < min(MOST, (len(sums) + 1) // 2):
        tried = [StepFit([*found.used, c], sums, shrink=shrink) for c in left]
        of = [fit.best() for fit in tried]
        best = min(range(len(tried)), key=lambda n: tried[n].loss)
        if tried[best].loss > found.loss - GAIN:
            break
        found, values = tried[best], of[best]
        del left[best]
    return [*zip(found.used, values, strict=True)]


def error_of(step: StepSums, constants: Sequence[tuple[FittedConstant, float]]) -> float:
    """Absolute error of a step with some constants, as a share."""
    (seconds,) = StepFit([c for c, _ in constants], [step]).predicted([value for _, value in constants])
    return float(abs(seconds / step.seconds - 1))
