"""Constants of frameworks, fitted to published runs of half of the models and judged on the others.

    python -m benchmarks.framework_fit [FRAMEWORK …]

The models of a framework, by name, are fitted and judged in turn (`judged`); no model is in both halves. At
most six constants of a framework (`costmodels.step_fit`), each with what physics or sources let expect of it:
without that, few rows move a constant to where another one should be. Least mean absolute error of the
logarithm, where each table, model and release counts by the root of its rows. The interval of 90 % is of fits
to models drawn with replacement. Results, with what ships beside what was found:
`benchmarks/results/framework_fit.json`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.errors import errors_of, order
from benchmarks.framework_parts import parts
from benchmarks.framework_rows import Row, rows, tables
from costmodels import load_hardware
from costmodels.pricing.pricer import Pricer
from costmodels.step_fit import (
    EFFICIENCY,
    HIDDEN,
    INTERVAL,
    LAUNCH,
    SUSTAINED,
    TENSOR,
    FittedConstant,
    StepFit,
    StepSums,
    constants_of,
)
from mesh_tf_core.errors import UserError

OUT = Path(__file__).parent / "results" / "framework_fit.json"
BOARD = {"h100-hbm2e": 0.894}
"""Chips of another power limit: the cube root of 500 W / 700 W."""


@dataclass(frozen=True)
class Fit:
    """The constants of a framework.

    Attributes:
      adopted: what was found ships; if not, as the judged rows would be further off, none has a part.
    """

    constants: tuple[FittedConstant, ...]
    adopted: bool = True


A100, H100, V100 = ("a100",), ("h100", "h100-hbm2e"), ("v100",)
TPUS, GPUS = ("tpu-v5e", "tpu-v5p"), A100 + H100 + V100
FITS = {
    "torch": Fit((
        FittedConstant(A100, SUSTAINED, 0.85, 0.1),
        FittedConstant(H100, SUSTAINED, 0.75, 0.1),
        FittedConstant(GPUS, EFFICIENCY, 0.7, 0.2),
        FittedConstant(A100, HIDDEN, 0.5, 0.2),
        FittedConstant(H100, HIDDEN, 0.5, 0.2),
        FittedConstant(GPUS, INTERVAL, 10e-6, 10e-6),
    )),
    "torch-compile": Fit((
        FittedConstant(A100, SUSTAINED, 0.85, 0.1),
        FittedConstant(H100, SUSTAINED, 0.75, 0.1),
        FittedConstant(H100, EFFICIENCY, 0.8, 0.15),
        FittedConstant(GPUS, HIDDEN, 0.5, 0.25),
    )),
    "megatron": Fit((
        FittedConstant(A100 + V100, SUSTAINED, 0.8, 0.1),
        FittedConstant(H100, SUSTAINED, 0.85, 0.1),
        FittedConstant(A100 + V100, EFFICIENCY, 0.7, 0.2),
        FittedConstant(A100 + V100, INTERVAL, 20e-6, 20e-6),
        FittedConstant(GPUS, HIDDEN, 0.5, 0.2),
        FittedConstant(H100, TENSOR, 0.7, 0.3),
    )),
    "megatron:kernels=2022": Fit((
        FittedConstant(A100 + V100, SUSTAINED, 0.9, 0.1),
        FittedConstant(A100 + V100, INTERVAL, 44e-6, 20e-6),
        FittedConstant(A100 + V100, EFFICIENCY, 0.6, 0.2),
        FittedConstant(A100 + V100, LAUNCH, 100e-6, 50e-6),
    )),
    "maxtext": Fit((
        FittedConstant(H100, SUSTAINED, 0.88, 0.1),
        FittedConstant(TPUS, SUSTAINED, 0.95, 0.05),
        FittedConstant(TPUS, TENSOR, 0.3, 0.3),
    )),
    "jax": Fit(
        (
            FittedConstant(A100, SUSTAINED, 0.85, 0.1),
            FittedConstant(H100, SUSTAINED, 0.85, 0.1),
            FittedConstant(GPUS, EFFICIENCY, 0.8, 0.15),
            FittedConstant(GPUS, HIDDEN, 0.5, 0.25),
        ),
        adopted=False,
    ),
}  # fmt: skip
SAME = {"torchtitan": "torch-compile"}
"""Frameworks that are fitted as another."""
LATER = ("megatron_bridge", "llm_foundry", "bigscience", "nanotron_best", "primus", "xtuner", "pai_")
"""How tables begin that were priced after the fits; shares of hidden exchanges were fitted to the first."""

CHOSEN = ("launches=each",)
"""Options that were chosen for the errors of the rows that have them."""


def chip_of(row: Row) -> str:
    return row.hardware.split(",")[0]


def family(row: Row) -> str:
    """The model of a row; a model that was cut to fewer layers is the model."""
    return row.model.split(" cut")[0]


def judged(found: Iterable[Row]) -> set[str]:
    """The models that are judged: every second one by name."""
    return set(sorted({family(row) for row in found})[1::2])


def base_of(row: Row) -> str:
    """The framework whose models are judged in turn with that of a row."""
    name = row.framework.partition(":")[0]
    return SAME.get(name, name)


def fit_of(row: Row) -> str:
    """The fit of the constants of a row: that of an option, or of its framework."""
    name, _, options = row.framework.partition(":")
    own = (f"{name}:{option}" for option in options.split(","))
    return next((each for each in own if each in FITS), base_of(row))


def timed() -> list[Row]:
    """The rows that fits may have: those that ran and have a time."""
    return [r for t in tables() for r in rows(t) if r.seconds and r.ran]


def rows_of(name: str, every: Iterable[Row]) -> list[Row]:
    """The rows of a fit, fitted and judged."""
    return [row for row in every if fit_of(row) == name and not row.table.startswith(LATER)]


def judged_of(name: str, every: Iterable[Row]) -> set[str]:
    """The models of a fit that are judged, each in all fits of its framework."""
    base = name.partition(":")[0]
    return judged(row for row in every if base_of(row) == base and not row.table.startswith(LATER))


def halves() -> Callable[[Row], str]:
    """Says of a row of any table: judged, fitted, or no part, as a row of a fitted model without a time."""
    every = timed()
    shares = {family(row) for row in every if "exchange=" in row.framework}
    apart = {name: judged_of(name, every) for name, fit in FITS.items() if fit.adopted}

    def half(row: Row) -> str:
        if any(option in row.framework for option in CHOSEN):
            return "fitted"
        if row.table.startswith(LATER):
            return "fitted" if family(row) in shares else "judged"
        name = fit_of(row)
        if name not in apart or family(row) in apart[name]:
            return "judged"
        return "fitted" if row.seconds and row.ran else "no part"

    return half


def sums_of(row: Row) -> StepSums:
    """The quantities of a row; UserError as of `layoutopt.cost`."""
    kept, chip = parts(row), chip_of(row)
    machine = load_hardware(row.hardware, row.framework)
    assert row.seconds, row.name
    prices = Pricer(machine, kept.placement)
    return StepSums(prices, kept.items, row.seconds, chip, BOARD.get(chip, 1.0))


def fitter_of(constants: Sequence[FittedConstant], own: Sequence[tuple[Row, StepSums]]) -> StepFit:
    """Rows of a table, model and release together count by the root of their number."""
    groups = [(row.table, family(row), row.software) for row, _ in own]
    count = Counter(groups)
    return StepFit(constants, [sums for _, sums in own], [count[g] ** -0.5 for g in groups])


def quality(found: Sequence[tuple[Row, float]]) -> dict[str, Any]:
    """Errors of rows with their predicted seconds."""
    tokens = [row.sizes["batch"] * row.sizes["length"] for row, _ in found]
    pairs = zip(found, tokens, strict=True)
    tau = order((r.model, r.hardware, s, r.seconds or 1.0, n) for (r, s), n in pairs)
    return {**(errors_of(s / (r.seconds or 1.0) - 1 for r, s in found) or {}), "tau": tau}


def priceable(found: Iterable[Row]) -> list[tuple[Row, StepSums]]:
    sums = []
    for row in found:
        with suppress(UserError):
            sums.append((row, sums_of(row)))
    return sums


def fitted(name: str, every: Iterable[Row]) -> dict[str, Any]:
    """The constants of a framework and the errors with them and with those that ship, judged rows first."""
    apart, sums = judged_of(name, every), priceable(rows_of(name, every))
    part = [each for each in sums if family(each[0]) not in apart]
    fitter, whole = fitter_of(FITS[name].constants, part), fitter_of(FITS[name].constants, sums)
    values, ends = fitter.best(), fitter.intervals([family(row) for row, _ in part])
    told: dict[str, Any] = {"adopted": FITS[name].adopted, "judged_models": sorted(apart), "constants": []}
    told["fitted_models"] = sorted({family(row) for row, _ in part})
    for c, value, low, high in zip(fitter.used, values, *ends, strict=True):
        chip = next(chip for chip in c.chips if any(chip_of(row) == chip for row, _ in part))
        ships = constants_of(load_hardware(chip, name))[c.name]
        found = {"chips": c.chips, "name": c.name, "ships": ships, "value": value, "interval": [low, high]}
        told["constants"].append(found)
    by_name = {(c.chips, c.name): v for c, v in zip(fitter.used, values, strict=True)}
    new = whole.predicted([by_name.get((c.chips, c.name), c.around) for c in whole.used]).tolist()
    whole.used = []
    groups = defaultdict[str, dict[str, list[tuple[Row, float]]]](lambda: {"found": [], "ships": []})
    for (row, _), *seconds in zip(sums, new, whole.predicted([]).tolist(), strict=True):
        half = "judged" if family(row) in apart else "fitted"
        stages = ", stages" if row.stages else ""
        for table in ("all", row.table):
            of = groups[f"{half}, {table}, {chip_of(row)}{stages}"]
            for which, each in zip(of, seconds, strict=True):
                of[which].append((row, each))
    told["errors"] = {
        key: {which: quality(found) for which, found in of.items()}
        for key, of in sorted(groups.items(), key=lambda each: (not each[0].startswith("judged"), each[0]))
    }
    return told


def shown(name: str, told: Mapping[str, Any]) -> Iterable[str]:
    for c in told["constants"]:
        low, high = c["interval"]
        value = f"{c['value']:.4g} ({low:.3g} to {high:.3g}), ships {c['ships']:.4g}"
        yield f"{name:14} {'+'.join(c['chips']):28} {c['name']:24} {value}"
    for key, of in told["errors"].items():
        for which, q in of.items():
            tau = "" if q["tau"] is None else f"tau {q['tau']:.2f}"
            signed = f"signed {q['signed_mean']:+6.1%} worst {q['worst']:+5.0%}"
            said = f"{q['rows']:3} mean {q['mean']:5.1%} {signed}"
            yield f"    {key if which == 'found' else '':62} {which} {said} {tau}"


def main() -> None:
    every = timed()
    stored = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"frameworks": {}}
    for name in sys.argv[1:] or FITS:
        told = stored["frameworks"][name] = fitted(name, every)
        print(*shown(name, told), sep="\n", flush=True)
    stored["date"] = datetime.now(UTC).date().isoformat()
    OUT.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
