"""The number of parts of the batch that run one after the other.

Another number is another graph, so every number is a separate subproblem, in which nothing is left to choose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument, names
from layoutopt.space.kind import PLAIN, Choice, Chosen, Decision, Feature, PlanField, Target, Typed, Words
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.graph import Graph

USUAL: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
"""The numbers that a search considers by default, where ranks have a power of two of examples (`usual`)."""


def _numbers(value: Any) -> tuple[Any, ...]:
    """In order; what is not a number is refused when a search is asked for."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
            raise UserError(
                f"--microbatches {value!r} is not a list of positive numbers; write for example "
                "--microbatches 4, or --microbatches 1,2,4 to search several"
            )
        value = map(int, parts)
    found = names(value, "microbatches")
    return tuple(sorted(found)) if all(isinstance(each, int) for each in found) else found


@dataclass(frozen=True)
class Microbatches(Decision):
    """The number of microbatches, as a word."""

    label = "microbatches"
    asks: ClassVar[Mapping[str, Any]] = {
        "microbatches": argument(
            USUAL,
            Option(
                "--microbatches",
                "NUMBERS",
                "Numbers of microbatches per step to consider, e.g. 1,2,4 (comma-separated). By default, "
                "each of the numbers shown is replaced by the nearest one that divides the examples of a "
                "rank.",
                usual=",".join(map(str, USUAL)),
            ),
            parse=_numbers,
            plan=tuple[int, ...],
        ),
    }
    says = PlanField("microbatches", int, 1, written=int)
    always = True
    by_hand = Option("--microbatches", "N", "Number of microbatches per step.", usual="1")
    word = "microbatches"
    place = 6
    features = (
        Feature("microbatches", "microbatches", lambda n: n > 1, lambda _, options: options.microbatches > 1),
    )

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        return {"microbatches": divisors(_size(target.model))}

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        """The usual numbers: with others a search takes longer, and finds hardly more."""
        return {"microbatches": USUAL}

    @classmethod
    def check(cls, allowed: Space) -> None:
        for number in allowed.microbatches or (0,):
            if not isinstance(number, int) or number < 1:
                raise UserError(
                    f"microbatches {allowed.microbatches}: write whole numbers of at least 1, e.g. 1, 2, 4"
                )

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        yield cls("number of microbatches", tuple((str(number),) for number in allowed.microbatches))

    def apply(self, choice: Choice, to: Chosen) -> None:
        to.options["microbatches"] = int(choice[0])

    def read(self, layout: Layout, options: Options) -> Choice:
        return (str(options.microbatches),)

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        numbers = _numbers(texts[-1]) if texts else (1,)
        if len(numbers) != 1:
            raise UserError(
                f"--microbatches {texts[-1]}: only a search compares several numbers; write a single number"
            )
        return {"microbatches": numbers[0]}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        parts = said.microbatches
        return (str(parts), f"{parts} microbatches") if parts > 1 else PLAIN


def usual(model: Model, ranks: int) -> tuple[int, ...]:
    """The numbers that a search considers by default: for each power of two the nearest number into which
    every rank of the batch can part its examples, or so many times all of these."""
    own = (size := _size(model)) // math.gcd(size, ranks)
    if own & (own - 1) == 0:
        return USUAL
    fit = [n for n in (*divisors(own), *(own * each for each in USUAL)) if size % n == 0]
    return tuple(sorted({min(fit, key=lambda n: max(n / each, each / n)) for each in USUAL}))


def numbers(model: Model, allowed: Sequence[int]) -> list[int]:
    """The numbers of microbatches that the model can be split into, in order; UserError if there is none."""
    found = dividing(model, allowed)
    refused = impossible(model, found)
    if len(refused) == len(found):
        raise UserError(refused[found[0]])
    return [number for number in found if number not in refused]


def impossible(model: Model, allowed: Sequence[int]) -> dict[int, str]:
    """Those numbers that divide the batch, but that the model cannot be split into, each with why."""
    found = {}
    for number in dividing(model, allowed):
        try:
            model.training_step(number)
        except UserError as error:
            found[number] = str(error)
    return found


def dividing(model: Model, allowed: Sequence[int]) -> list[int]:
    """The numbers of microbatches that divide the batch, in order; UserError if there is none."""
    size = _size(model)
    found = [m for m in sorted(set(allowed)) if size % m == 0]
    if not found:
        has = (
            "the model has no batch to split"
            if model.batch_dim is None
            else f"{model.batch_dim!r} has size {size}, which is divisible by none of these numbers"
        )
        raise UserError(
            f"--microbatches {','.join(map(str, allowed))}: {has}; use --microbatches "
            f"1{' or another divisor of this size' if size > 1 else ''}"
        )
    return found


def _size(model: Model) -> int:
    """The examples of a batch that parts may divide; 1 without a batch."""
    if model.batch_dim is None:
        return 1
    return min(t.shape.dims[0].size for t in model.graph.inputs.values() if len(t.shape))
