"""The door of sizing: a question about a model's size, checked, and its answer as data and frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware import Hardware, machine_of
from layoutopt.optimize.entry import Limits
from layoutopt.optimize.evaluation.evaluator import check_limit
from layoutopt.plan.build import Plan
from layoutopt.plan.size_results import SizedCandidate, SizeResult
from layoutopt.runtime.clock import Clock
from layoutopt.sizing.answer import Answering, Tell
from layoutopt.sizing.family import POWERS, RULES, Family
from layoutopt.sizing.fitting import fit, read_runs
from layoutopt.sizing.forecast import CHARACTERS, Forecast, is_count, is_positive
from layoutopt.sizing.laws import data, published
from layoutopt.sizing.question import Goal, SizingQuestion
from layoutopt.sizing.result import result_of
from layoutopt.sizing.timing import OfferedHardware, Timer
from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from layoutopt.space.keywords import gathered
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.mesh import MOST_DEVICES
from mesh_tf_core.model import Model

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_CANDIDATES = 200
HARDWARE = "cpu-local"
LAYOUTS = tuple(name for name, argument in ARGUMENTS.items() if not argument.names_axes)
"""The choices of layouts in a sizing: none that names axes, as meshes are searched."""
LIMITS = ("memory", "max_axes", "time_limit", "keep_best")
"""The limits in a sizing: fields of `Limits`."""


@dataclass(frozen=True)
class Sizing:
    """The result of `layoutopt.size`.

    Attributes:
      data: the output of `layoutopt size --json`.
      plan: the best layout of the best size.
      model: the model of the best size.
      stopped: True if Ctrl-C ended the search. The result is then the best size found until then.
    """

    data: SizeResult
    plan: Plan = field(repr=False)
    model: Model = field(repr=False)
    stopped: bool = False

    @property
    def best(self) -> SizedCandidate:
        return self.data.best

    @cached_property
    def candidates(self) -> DataFrame:
        """One row per size, hardware and number of devices, with one column per hyperparameter."""
        import pandas as pd

        rows = []
        for each in self.data.candidates:
            row = each.model_dump()
            rows.append({**row.pop("hparams"), **row})
        return pd.DataFrame(rows)

    @cached_property
    def frontier(self) -> DataFrame:
        """The Pareto-optimal candidates in loss, days and cost, by number of parameters."""
        found = self.candidates
        return found[found["frontier"]].sort_values(["parameters", "days"], ignore_index=True)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling law of the loss and its inputs.

    Attributes:
      law: the name of a published law (`layoutopt/sizing/laws.json`); "" is the default law.
      runs: your own runs to fit a law to: a CSV file, or a data frame with the columns N (parameters), D
        (tokens) and loss.
      unique: the number of unique tokens in the data (None: tokens never repeat).
      pretrained: the data of an earlier pre-training, "text" or "text+code" (None: train from scratch).
      characters: the mean number of characters per token.
      replicas: the number of DiLoCo replicas (None: no replicas).
    """

    law: str = ""
    runs: Any = None
    unique: float | None = None
    pretrained: str | None = None
    characters: float = CHARACTERS
    replicas: int | None = None


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """The sizes to search.

    Attributes:
      scale: the hyperparameters that grow with the size: "both", "depth", "width", or powers such as
        "layers:1;d_model:1" (`layoutopt.sizing.family`).
      sizes: the smallest and the largest number of parameters (None: around the law's optimum).
      candidates: the number of sizes.
      every: also search sizes that cannot be on the frontier with any layout (`beaten`).
    """

    scale: str = "both"
    sizes: tuple[float, float] | None = None
    candidates: int = 9
    every: bool = False


def size(
    model: Callable[..., Model],
    hparams: Mapping[str, Any] | None = None,
    *,
    goal: Goal | None = None,
    hardware: str | Hardware | Sequence[str | Hardware] = HARDWARE,
    price: float | Mapping[str, float] | None = None,
    space: SearchSpace | None = None,
    limits: Limits | None = None,
    on_progress: Tell | None = None,
    framework: str | None = None,
    **asked: Any,
) -> Sizing:
    """Finds the best size of a model to train, the chips, their number and the days of training.

    Args:
      model: a function from hyperparameters to a model, like model() in a model file.
      hparams: hyperparameters with other values than their defaults.
      price: the price of a chip-hour: one number, or a mapping from the name of the hardware.
      framework: the training software (None: the model's own).
      space: the search space of the layouts, without decisions that name axes of a mesh.
      limits: `memory` and `max_axes` apply to each search, `time_limit` and `keep_best` to all together.
      asked: fields of `Goal`, `Scaling`, `SizeRange`, `SearchSpace` and `Limits`; they override `goal`,
        `space` and `limits`.

    Raises:
      InfeasibleError: no size on any of the hardware meets the goal.
      LimitError: a limit ended the search before any size was searched.
      UserError: an argument is wrong.

    Example:
      >>> import layoutopt
      >>> from examples import transformer_lm
      >>> found = layoutopt.size(
      ...     transformer_lm.model, {"batch": 64}, budget=1e17, devices=2, hardware="tpu-v5e", candidates=3
      ... )
      >>> f"{found.best.parameters:,}", round(found.best.loss, 2), found.best.hparams["layers"]
      ('25,502,208', 4.35, 8)
    """
    for name in asked.keys() & ARGUMENTS.keys() - {*LAYOUTS}:
        raise UserError(
            f"size: the layout searches of size have no option {name!r}; {known_names(name, LAYOUTS)}"
        )
    parts = (Goal, goal), (Scaling, None), (SizeRange, None), (SearchSpace, space), (Limits, limits)
    goal, scaling, sizes, chosen, limits = gathered("size", asked, *parts)
    for f in fields(Limits):
        if f.name not in LIMITS and getattr(limits, f.name) != f.default:
            raise UserError(
                f"size: {f.name!r} applies only to a single search of a layout, not to size; "
                f"{known_names(f.name, LIMITS)}"
            )
    question = SizingQuestion(**{**vars(goal), "devices": _numbers(goal.devices)})
    _check(sizes.candidates, sizes.sizes, limits.memory, sizes.scale)
    forecast = _forecast(question, scaling, sizes)
    family = Family(model, _all_hparams(model, hparams), sizes.scale)
    machines = machines_of(hardware, price, limits.memory, framework, family.own.model)
    if question.money is not None:
        _check_priced(machines)
    clock = Clock.of(limits.time_limit).again()
    may = {name: value for name, value in chosen.keywords.items() if name in (*LAYOUTS, "allow", "given")}
    timer = Timer(limits.max_axes, clock, may)
    which = sizes.candidates, sizes.sizes, sizes.every
    answering = Answering(question, forecast, family, machines, timer, *which, on_progress)
    best = answering.run(limits.keep_best)
    assert best.timing.plan is not None
    return Sizing(result_of(answering, best), best.timing.plan, best.candidate.model, answering.stopped)


def _forecast(question: SizingQuestion, scaling: Scaling, sizes: SizeRange) -> Forecast:
    if question.tokens is not None and sizes.sizes is not None and sizes.sizes[0] != sizes.sizes[1]:
        raise UserError(
            "--tokens requires a single size, but --sizes gives a range; write e.g. --sizes 13B, or "
            "remove --sizes"
        )
    if scaling.runs is not None and scaling.law:
        raise UserError(
            "--law (a published law) and --fit (a law fitted to your runs) cannot be combined; remove one"
        )
    told = scaling.unique, scaling.pretrained, scaling.characters, scaling.replicas
    return Forecast(_law(scaling.law, scaling.runs), *told)


def _check_priced(machines: Sequence[OfferedHardware]) -> None:
    for machine in machines:
        if machine.price is None:
            raise UserError(
                f"--money requires the price of a chip-hour of {machine.name}; give the price, e.g. "
                f"--price {machine.name}=4.2"
            )


def _check(candidates: Any, sizes: Any, memory: Any, scale: Any) -> None:
    """Refuses arguments of the wrong kind, whatever their annotations say."""
    if not is_count(candidates) or candidates > MOST_CANDIDATES:
        raise UserError(f"--candidates is {candidates!r}; give a whole number from 1 to {MOST_CANDIDATES}")
    if sizes is not None and not (len(sizes) == 2 and all(map(is_positive, sizes)) and sizes[0] <= sizes[1]):
        said = ":".join(f"{each:g}" if is_positive(each) else repr(each) for each in sizes)
        raise UserError(
            f"--sizes is {said}; give the smallest and the largest number of parameters, e.g. 1B:20B"
        )
    check_limit(memory)
    if not isinstance(scale, str):
        raise UserError(
            f"--scale {scale!r} is not a rule; give {', '.join(RULES)}, or powers of hyperparameters, "
            f"e.g. {POWERS!r}"
        )


def machines_of(
    hardware: str | Hardware | Sequence[str | Hardware],
    price: float | Mapping[str, float] | None,
    memory: float | None = None,
    framework: str | None = None,
    model: Model | None = None,
) -> list[OfferedHardware]:
    """The machines of a question, each once, with their prices; under the framework of a model, unless one is
    named."""
    asked: list[Any] = [*hardware] if isinstance(hardware, list | tuple) else [hardware]
    own = () if model is None else (model.framework,)
    loaded = [machine_of(each, framework, *own) for each in asked]
    names = [machine.name for machine in loaded]
    prices = price if isinstance(price, Mapping) else dict.fromkeys(names, price)
    for name, value in prices.items():
        if name not in names:
            raise UserError(
                f"--price {name}={value}: {name!r} is not among the --hardware of this command; "
                f"{known_names(name, names)}"
            )
        if value is not None and not is_positive(value):
            raise UserError(f"--price of {name} is {value!r}; give a positive number")
    found = {
        h.name: OfferedHardware(
            h.name, h, h.usable_memory_bytes if memory is None else memory, prices.get(h.name)
        )
        for h in loaded
    }
    if not found:
        raise UserError("size requires --hardware; give at least one, e.g. --hardware tpu-v5p")
    return [*found.values()]


def _numbers(devices: Any) -> tuple[int, ...]:
    if is_count(devices):
        return (int(devices),)
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise UserError(f"--devices is {devices!r}; give whole numbers from 1 to {MOST_DEVICES:,}")
    return tuple(devices)


def _law(name: str, runs: Any) -> Any:
    if runs is None:
        return published(name or data()["default"])
    return fit(read_runs(runs), source=str(runs)) if isinstance(runs, str | Path) else fit(runs)


def _all_hparams(model: Callable[..., Model], hparams: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's hyperparameters and the defaults of the others."""
    from layoutopt.models.hparams import defaults_of

    if not callable(model):
        raise UserError(
            f"size: {model!r} is not a function; give the function that builds the model from "
            "hyperparameters, e.g. model(layers=12, d_model=512)"
        )
    defaults = defaults_of(model, getattr(model, "__name__", "model"))
    return {**{n: d.value for n, d in defaults.items() if d.given}, **(hparams or {})}
