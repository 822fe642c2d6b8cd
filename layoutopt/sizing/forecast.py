"""Further inputs of a scaling law besides size and tokens, and the resulting loss.

(1) repeated data  D' = U + U R_D (1 - exp(-(D / U - 1) / R_D)) of U tokens seen D / U times, and
                   N' = V + V R_N (1 - exp(-(N / V - 1) / R_N)) with V the size that U tokens suit, or N
                   if that is less                                  Muennighoff et al. 2023, equations 5, 6
(2) pre-training   D + k D^alpha N^beta, in characters                 Hernandez et al. 2021, equation 1.1
(3) replicas       L times the ratio of DiLoCo's loss with M replicas to that of data-parallel training,
                   both at this N; the best batch is A N^alpha M^beta sequences, of all replicas
                                                                     Charles et al. 2025, tables 7 and 10
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from layoutopt.plan.units import count
from layoutopt.sizing.laws import FLOPS, Law, data, replicas_loss
from mesh_tf_core.errors import UserError, known_names

CHARACTERS = 4.0
"""Characters of a token by default: about the value of byte-pair codes of English."""
STEPS = 60
"""Halvings of a range of logarithms."""
SMALLEST, LARGEST = 1.0, 1e30
"""Tokens that are looked at."""
WORK = 60.0
"""Decimal digits of the FLOPs that are looked at."""
MOST = 1e40
"""Upper limit of every quantity in a question."""


def is_positive(value: Any) -> bool:
    """True if a user's value is a positive number."""
    return isinstance(value, Real) and 0 < float(value) < MOST


def is_count(value: Any) -> bool:
    """True if it is a whole number of at least one."""
    return isinstance(value, Integral) and int(value) >= 1


@dataclass(frozen=True)
class ParameterCount:
    """Number of a model's parameters: all, all except those of words and positions, and those of experts that
    a token does not use."""

    total: int
    non_embedding: int
    idle: int = 0

    def counted(self, law: Law) -> float:
        """N as a law counts it. Laws are of dense models, so of a mixture it has what a token uses."""
        return (self.non_embedding if law.counts == "non-embedding" else self.total) - self.idle


@dataclass(frozen=True)
class Forecast:
    """A law with its further inputs.

    Attributes:
      unique: number of different tokens in the data; training beyond it repeats them (None: unlimited data).
      pretrained: `text` or `text+code`: the data of pre-training (None: no pre-training).
      characters: of a token.
      replicas: of DiLoCo, that synchronise rarely (None: data-parallel training).
    """

    law: Law
    unique: float | None = None
    pretrained: str | None = None
    characters: float = CHARACTERS
    replicas: int | None = None

    def __post_init__(self) -> None:
        known = [name for name, each in data()["transfer"].items() if isinstance(each, dict)]
        if self.pretrained is not None and self.pretrained not in known:
            raise UserError(
                f"--pretrained {self.pretrained}: no scaling law for transfer from this data; "
                f"{known_names(self.pretrained, known)}"
            )
        if self.unique is not None and not is_positive(self.unique):
            raise UserError(f"--unique is {self.unique!r}; give a positive number of tokens")
        if not is_positive(self.characters):
            raise UserError(
                f"--characters is {self.characters!r}; give the number of characters per token, above 0"
            )
        if self.replicas is not None and not is_count(self.replicas):
            raise UserError(f"--replicas is {self.replicas}; give a whole number of at least 1")

    def loss(self, size: ParameterCount, tokens: float) -> float:
        """Nats per token after `tokens`, seen once or again."""
        parameters, seen = size.counted(self.law), tokens
        if self.unique is not None and tokens > self.unique:
            parameters, seen = self._repeated(parameters, tokens, self.unique)
        if self.pretrained is not None:
            seen += self.transferred(size, tokens if self.unique is None else min(tokens, self.unique))
        return self.law.loss(parameters, seen) * self.divergence(size)

    def loss_of(self, parameters: float, tokens: float) -> float:
        """The same for a size of which only the number of parameters is known."""
        return self.loss(ParameterCount(round(parameters), round(parameters)), tokens)

    def _repeated(self, parameters: float, tokens: float, unique: float) -> tuple[float, float]:
        """Equations (1)."""
        c = data()["repeated"]["constants"]
        suits = min(parameters, self.law.matched(unique))
        return (
            suits * (1 + c["R_N"] * -math.expm1(-(parameters / suits - 1) / c["R_N"])),
            unique * (1 + c["R_D"] * -math.expm1(-(tokens / unique - 1) / c["R_D"])),
        )

    def transferred(self, size: ParameterCount, tokens: float) -> float:
        """Equation (2): tokens that pre-training replaces."""
        if self.pretrained is None:
            return 0.0
        c = data()["transfer"][self.pretrained]
        found = c["k"] * (tokens * self.characters) ** c["alpha"] * size.non_embedding ** c["beta"]
        return float(found / self.characters)

    def divergence(self, size: ParameterCount) -> float:
        """Equation (3)."""
        return 1.0 if self.replicas is None else replicas_loss(size.total, self.replicas)

    def batch(self, size: ParameterCount) -> float | None:
        """Tokens of the batch that suits the replicas."""
        if self.replicas is None:
            return None
        c = data()["replicas"]["batch"]
        return float(c["tokens"] * c["A"] * size.total ** c["alpha"] * self.replicas ** c["beta"])

    def tokens_to(self, size: ParameterCount, loss: float) -> float:
        """Tokens after which a size has this loss; inf if it never has."""
        if self.loss(size, LARGEST) >= loss:
            return math.inf
        if self.unique is None and self.pretrained is None:
            return self.law.tokens_to(loss / self.divergence(size), size.counted(self.law))
        low, high = math.log(SMALLEST), math.log(LARGEST)
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.loss(size, math.exp(middle)) <= loss else (middle, high)
        return math.exp(high)

    def optimum(self, flops: float, served: float = 0.0, per: float = FLOPS) -> tuple[float, float]:
        """N and D of the least loss under C = `per` N (D + `served` / 3): a token that is served takes
        forward alone (Sardana et al. 2024, equation 3)."""
        if not (served or self.unique or self.pretrained or self.replicas):
            return self.law.optimum(flops, per)
        from scipy.optimize import minimize_scalar

        def lost(log_n: float) -> float:
            n = math.exp(log_n)
            left = flops / (per * n) - served / 3
            return self.loss_of(n, left) if left > SMALLEST else 1e3 * (1 + log_n)

        center = math.log(self.law.optimum(flops, per)[0])
        grid = [center + 0.25 * i for i in range(-60, 41)]
        first = min(grid, key=lost)
        found = minimize_scalar(lost, bounds=(first - 0.3, first + 0.3), method="bounded")
        n = math.exp(float(found.x))
        return n, flops / (per * n) - served / 3

    def least(self, served: float = 0.0) -> float:
        """The loss that no amount of training falls below."""
        return self._least(10**WORK, served)

    def budget_for(self, loss: float, served: float = 0.0) -> float:
        """C with this optimal loss; inf if there is none."""
        low, high = 1.0, WORK  # of log10 C
        if self.least(served) > loss:
            return math.inf
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._least(10**middle, served) <= loss else (middle, high)
        return 10.0**high

    def _least(self, flops: float, served: float) -> float:
        n, d = self.optimum(flops, served)
        return self.loss_of(n, d) if d > SMALLEST else math.inf

    def outside(self, size: ParameterCount, tokens: float) -> list[str]:
        """States in words where an answer lies outside the runs that it is based on."""
        said = self.law.outside(size.counted(self.law), tokens)
        if self.unique is not None and (epochs := tokens / self.unique) > 1:
            most = data()["repeated"]["ranges"]["epochs"][1]
            said += (
                [f"{epochs:,.0f} epochs are more than in the law's runs (at most {most:,})"]
                if epochs > most
                else []
            )
        if self.replicas is not None:
            low, high = data()["replicas"]["ranges"]["parameters"]
            most = data()["replicas"]["ranges"]["replicas"][1]
            if not low <= size.total <= high:
                said.append(
                    f"{count(size.total)} parameters are outside the range of the DiLoCo law's runs "
                    f"({count(low)} to {count(high)})"
                )
            if self.replicas > most:
                said.append(
                    f"{self.replicas} replicas are more than in the DiLoCo law's runs (at most {most})"
                )
        return said

    def sources(self) -> list[str]:
        """The inputs beyond the law, each with the source of its constants."""
        said = data()
        return [
            *([f"data that repeats: {said['repeated']['source']}"] if self.unique is not None else []),
            *([f"pre-training: {said['transfer']['source']}"] if self.pretrained is not None else []),
            *([f"replicas: {said['replicas']['source']}"] if self.replicas is not None else []),
        ]

    def facts(self) -> dict[str, Any]:
        """The inputs, as plain data."""
        told = {"unique": self.unique, "pretrained": self.pretrained, "replicas": self.replicas}
        return {name: value for name, value in told.items() if value is not None}
