"""DiLoCo: replicas that train separately for some steps and then synchronise: its settings, and which part of
the variables synchronises when.

Replicas along a mesh axis (`DiLoCo`) and replicas that are separate jobs (`training.decoupled`) have the same
settings of the outer step, which are read and checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeVar

from mesh_tf_core.arguments import check, instance
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.few_bits import BITS, WHOLE

Settings = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Name in a text -> field, and type of its value."""
OUTER: Settings = {
    "period": ("period", int),
    "rate": ("learning_rate", float),
    "momentum": ("momentum", float),
    "fragments": ("fragments", int),
    "bits": ("bits", int),
}
"""The settings of the outer step, equal in all replicas: word -> field, type."""
T = TypeVar("T", Tensor, Any)
ParameterSlice = slice | EllipsisType
"""Every so manyth layer of a stack, or all of a variable."""


class DoNotFit(UserError):
    """Settings that are known but contradict each other: fragments of a period, a delay between outer
    steps."""


def read_settings(what: str, text: str, pairs: str, known: Settings, cls: type) -> dict[str, Any]:
    """Fields of `cls` as `name=value,...` gives them.

    Args:
      what, text: name in messages, and the whole text.

    Raises:
      UserError: an unknown or repeated name, or a missing number.
    """
    check(what, text=(text, instance(str, "the settings as a string")))
    said: dict[str, Any] = {}
    for pair in filter(None, map(str.strip, pairs.split(","))):
        name, _, value = (p.strip() for p in pair.partition("="))
        if name not in known:
            raise UserError(f"{what} {text!r}: unknown setting {name!r}; {known_names(name, known)}")
        field, kind = known[name]
        if field in said:
            raise UserError(f"{what} {text!r}: {name} is given twice; remove one of them")
        try:
            said[field] = kind(value)
        except ValueError:
            due = "whole number" if kind is int else "number"
            usual = getattr(cls, field)
            raise UserError(
                f"{what} {text!r}: {name}={value!r} is not a {due}; write e.g. {name}={usual}"
            ) from None
    return said


def check_outer(
    what: str, period: int, learning_rate: float, momentum: float, fragments: int, bits: int
) -> None:
    """UserError, which names `what`, unless the settings of an outer step are valid."""
    if period < 1:
        raise UserError(f"{what}: the period must be at least 1 step, found {period}")
    if not 0 < learning_rate < math.inf:
        raise UserError(
            f"{what}: the outer learning rate must be positive and finite, found {learning_rate:g}"
        )
    if not 0 <= momentum < 1:
        raise UserError(f"{what}: the outer momentum must be in [0, 1), found {momentum:g}")
    if fragments < 1 or period % fragments:
        raise DoNotFit(
            f"{what}: the number of fragments, {fragments}, must divide the period of {period} steps; "
            f"choose a divisor of {period}"
        )
    if bits not in BITS:
        raise UserError(f"{what}: bits must be 32, 8 or 4, found {bits}")


def outer_step(before: T, momentum: T, came: T, rate: float, mu: float) -> tuple[T, T]:
    """The outer step: the shared variables and the new momentum, by algorithm 1 of Douillard et al. 2023 with
    Nesterov's momentum.

    Args:
      before: the values that all replicas began from.
      came: mean progress of the replicas: their start minus their current values.
      rate, mu: of the outer step.

    It takes tensors of a graph or arrays, with the same order of operations, so that both forms agree to the
    last bit.
    """
    momentum = momentum * mu + came
    return before - (came + momentum * mu) * rate, momentum


def wide(dtype: str) -> str:
    """The dtype of the outer step: at least float32."""
    return "float64" if dtype == "float64" else "float32"


def fragments_of(variables: Iterable[Variable], count: int) -> list[dict[str, ParameterSlice]]:
    """For every fragment, its variables and its part of them: every n-th layer of a stack; a variable without
    a stack, or with fewer layers, belongs to one fragment.

    Raises:
      DoNotFit: nothing is left for some of them.
    """
    found: list[dict[str, ParameterSlice]] = [{} for _ in range(count)]
    alone, most = 0, 0
    for v in variables:
        layers = v.shape.sizes[0] if v.stacked else 0
        most = max(most, layers)
        if count > 1 and layers >= count:
            for number, parts in enumerate(found):
                parts[v.name] = slice(number, None, count)
        else:
            found[alone % count][v.name] = ...
            alone += 1
    if not all(found):
        # No stack is then deep enough for every fragment to have a part, so each variable is in one alone.
        stacks = f", and its deepest stack has {most} layers" if most else ""
        raise DoNotFit(
            f"{count} fragments are too many: the model has {alone} variables{stacks}; "
            f"choose at most {max(alone, most)} fragments"
        )
    return found


@dataclass(frozen=True)
class DiLoCo:
    """Replicas along a mesh axis that synchronise every `period` steps.

    Attributes:
      axis: mesh axis; each coordinate holds a replica.
      period: inner steps between two outer steps.
      learning_rate, momentum: of the outer step (section 2: 0.7 and Nesterov's 0.9).
      fragments: number of parts of the variables (`fragments_of`) that synchronise in turn, each once in a
        period, every `period / fragments` steps (Douillard et al. 2025, 2501.18512).
      bits: bits of each number that a replica sends: 32, 8 or 4 (`ops.few_bits`). The rounding error is added
        to the next message.
      delay: steps that a synchronisation takes. It exchanges the progress at its start, and replicas train on
        until it is merged (section 3.2, tau).
      alpha: weight of the replica's own variables in the merge: alpha own + (1 - alpha) outer (equation 4).
        It has no effect without a delay.

    As text: `sites`, or `sites:period=100,rate=0.7,momentum=0.9` with any of these, and `fragments`, `bits`,
    `delay`, `alpha`.

    Example:
      >>> import mesh_tf_core as mtf
      >>> print(mtf.DiLoCo("sites", period=100))
      sites:period=100,rate=0.7,momentum=0.9
    """

    axis: str
    period: int = 30
    learning_rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    bits: int = WHOLE
    delay: int = 0
    alpha: float = 0.5

    def __str__(self) -> str:
        own = "".join(f",{n}={getattr(self, n):g}" for n in _MORE if getattr(self, n) != getattr(DiLoCo, n))
        return f"{self.axis}:period={self.period},rate={self.learning_rate:g},momentum={self.momentum:g}{own}"

    @classmethod
    def parse(cls, text: str) -> DiLoCo:
        """Its text; UserError if it is none."""
        axis, _, rest = text.partition(":")
        given = read_settings("diloco", text, rest, _SETTINGS, cls)
        if not axis.strip():
            raise UserError(
                f"diloco {text!r}: begin with the mesh axis of the replicas, e.g. sites:period=30"
            )
        return cls(axis.strip(), **given)

    def __post_init__(self) -> None:
        check_outer("diloco", self.period, self.learning_rate, self.momentum, self.fragments, self.bits)
        if not 0 <= self.delay < self.every:
            raise DoNotFit(
                f"diloco: the delay must be at least 0 and less than the {self.every} steps between two "
                f"synchronisations, found {self.delay}"
            )
        if not 0 <= self.alpha < 1:
            raise UserError(
                "diloco: alpha (the share of a replica's own value when it merges) must be at least 0 and "
                f"less than 1, found {self.alpha:g}"
            )

    @property
    def every(self) -> int:
        """Steps between two meetings, each of another fragment."""
        return self.period // self.fragments

    def meets(self, step: int) -> int | None:
        """The fragment that synchronises, or begins to, after a step, from 1 on; None if none does."""
        begins = step > 0 and step % self.every == 0
        return (step // self.every - 1) % self.fragments if begins else None

    def met(self, step: int) -> int:
        """The step of the newest exchange that is merged after a step; 0 if none is."""
        return max(0, (step - self.delay) // self.every * self.every)

    def flying(self, step: int) -> int | None:
        """The fragment that is exchanged but not merged after a step; None if none is."""
        since = step % self.every
        return self.meets(step - since) if since < self.delay else None


_SETTINGS: Settings = {**OUTER, "delay": ("delay", int), "alpha": ("alpha", float)}
_MORE = ("fragments", "bits", "delay", "alpha")
"""What a text says only where it is not as it would be anyway."""
