"""The question of a sizing, and the number of tokens of a candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layoutopt.sizing.family import SizeCandidate
from layoutopt.sizing.forecast import Forecast, is_count, is_positive
from layoutopt.sizing.timing import OfferedHardware, Timing
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.mesh import MOST_DEVICES

DAY, HOUR = 86_400.0, 3_600.0
GOALS = ("budget", "loss", "money", "tokens")
GUESSED_MFU = 0.4
"""The assumed MFU of machines before a search: it only decides which sizes are searched."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of a sizing: one of `budget`, `loss`, `money` and `tokens`, or `devices` with `days`.

    Attributes:
      budget: FLOP of training.
      loss: the loss to reach, in nats per token.
      money: the money to spend, in the currency of the prices.
      tokens: the number of training tokens.
      days: the days of training; with `budget`, `loss`, `money` or `tokens`, a deadline.
      devices: the numbers of devices to consider. If empty, the search chooses them.
      inference: tokens to generate after training, at the same cost per FLOP.
    """

    budget: float | None = None
    loss: float | None = None
    money: float | None = None
    tokens: float | None = None
    days: float | None = None
    devices: int | Sequence[int] = ()
    inference: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SizingQuestion(Goal):
    """A goal that can be reached: with one of the first four, days are a deadline."""

    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in GOALS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(
                f"--{given[0]} and --{given[1]} cannot be combined, because each one determines the "
                "other; remove one"
            )
        if not given and (self.days is None or not self.devices):
            raise UserError(
                "size requires a target; give --budget FLOP, --loss L, --money M with --price, --tokens "
                "T to train the model's own size, or --devices N with --days D"
            )
        for name in (*given, *(["days"] if self.days is not None else [])):
            value = getattr(self, name)
            if not is_positive(value):
                raise UserError(f"--{name} is {value!r}; give a positive number")
        if self.inference != 0 and not is_positive(self.inference):
            raise UserError(f"--inference is {self.inference!r}; give a positive number of tokens")
        for number in self.devices:
            if not is_count(number) or number > MOST_DEVICES:
                raise UserError(f"--devices is {number}; give a whole number from 1 to {MOST_DEVICES:,}")

    @property
    def goal(self) -> str:
        """The given goal: one of `GOALS`, or `days`."""
        return next((name for name in GOALS if getattr(self, name) is not None), "days")

    @property
    def by_cost(self) -> bool:
        """True if sizes are compared by cost, because all reach the same loss."""
        return self.loss is not None

    @property
    def deadline(self) -> float:
        """Days in which training has to end; inf: any."""
        return math.inf if self.days is None or self.goal == "days" else self.days

    def facts(self) -> dict[str, Any]:
        """It as plain data."""
        said = {**vars(self), "devices": list(self.devices)}
        return {name: value for name, value in said.items() if value}

    def trained(self, forecast: Forecast, candidate: SizeCandidate, timing: Timing | None) -> float:
        """Tokens on which a candidate is trained; inf if it never reaches the loss.

        Args:
          timing: needed for `days` and `money`.
        """
        if self.tokens is not None:
            return self.tokens
        if self.budget is not None:
            return self.budget / candidate.flops_per_token - self.inference / 3
        if self.loss is not None:
            return forecast.tokens_to(candidate.size, self.loss)
        assert timing is not None
        return timing.tokens_per_second * self._seconds(timing.machine, timing.devices)

    def _seconds(self, machine: OfferedHardware, devices: int) -> float:
        if self.money is None:
            assert self.days is not None
            return self.days * DAY
        assert machine.price is not None
        return self.money / machine.price / machine.hardware.chips(devices) * HOUR

    def refusal(self, candidate: SizeCandidate, tokens: float) -> str:
        """Why a candidate cannot answer; '' if it can."""
        if self.loss is not None and math.isinf(tokens):
            return f"the loss never reaches {self.loss:g}, however long the training"
        if tokens < candidate.tokens:
            return f"the budget covers less than one training step of {candidate.tokens:,} tokens"
        return ""

    def devices_in_time(
        self, forecast: Forecast, candidate: SizeCandidate, machine: OfferedHardware, dtype: str
    ) -> float:
        """Devices that about end by the deadline, by a guess."""
        seconds = self.deadline * DAY
        if self.money is not None:
            assert machine.price is not None
            return self.money / machine.price * HOUR / seconds * machine.hardware.devices_per_chip
        tokens = self.trained(forecast, candidate, None)
        rate = machine.hardware.product_flops(dtype) * GUESSED_MFU
        return candidate.flops_per_token * tokens / rate / seconds if math.isfinite(tokens) else 1

    def work(self, machine: OfferedHardware, dtype: str) -> tuple[float, float]:
        """FLOPs of training that a machine gives by a guess, the least and the most."""
        if self.budget is not None:
            return self.budget, self.budget
        peak = machine.hardware.product_flops(dtype) * GUESSED_MFU
        if self.money is not None:
            assert machine.price is not None
            found = self.money / machine.price * HOUR * peak * machine.hardware.devices_per_chip
            return found, found
        assert self.days is not None
        rates = [peak * n / machine.hardware.contention(n) for n in self.devices]
        return min(rates) * self.days * DAY, max(rates) * self.days * DAY
