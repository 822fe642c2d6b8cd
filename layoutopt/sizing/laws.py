"""Scaling laws: the loss (nats per token) of a model of N parameters after D tokens.

(1) additive   L = E + A / N^alpha + B / D^beta                            Hoffmann et al. 2022, equation 10
(2) joint      L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D        Kaplan et al. 2020, equation 1.5
(3) least L under C = k N D:  N = G (C / k)^a,  D = (C / k)^b / G
    of (1)  a = beta / (alpha + beta),  G = (alpha A / (beta B))^(1 / (alpha + beta))
    of (2)  a = 1 / (1 + q),  G = (q N_c^q / D_c)^a  with q = alpha_N / alpha_D;  b = 1 - a in both

k is 6 for a dense model without attention (Kaplan et al. 2020, section 2.1). Constants are data, each with
its source: `laws.json`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from pydantic import model_validator

from layoutopt.plan.size_results import LawInfo
from layoutopt.plan.units import count
from mesh_tf_core.errors import UserError, known_names

FLOPS = 6.0
"""Training FLOPs per parameter and token."""


class Law(LawInfo, ABC):
    """A law that can be asked; `ranges` are of `parameters` and `tokens`, constants give its `exponents`."""

    exponents: tuple[float, float] = (0.0, 0.0)

    @model_validator(mode="before")
    @classmethod
    def _with_exponents(cls, found: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**found, "exponents": cls.powers(found["constants"])}

    @staticmethod
    @abstractmethod
    def powers(constants: Mapping[str, float]) -> tuple[float, float]:
        """a and b of (3)."""

    @property
    @abstractmethod
    def ratio(self) -> float:
        """G of (3)."""

    @abstractmethod
    def loss(self, parameters: float, tokens: float) -> float:
        """L; `tokens` may be infinite."""

    @abstractmethod
    def tokens_to(self, loss: float, parameters: float) -> float:
        """D after which a size has this loss; inf if it never has."""

    def optimum(self, flops: float, per: float = FLOPS) -> tuple[float, float]:
        """N and D of the least loss under C = `per` N D."""
        a, b = self.exponents
        work = flops / per
        return self.ratio * work**a, work**b / self.ratio

    def matched(self, tokens: float) -> float:
        """N for which D tokens are the optimum."""
        a, b = self.exponents
        return self.ratio * (self.ratio * tokens) ** (a / b)

    def outside(self, parameters: float, tokens: float) -> list[str]:
        """States in words where a question lies outside the runs of the law's fit."""
        said = []
        for what, value in (("parameters", parameters), ("tokens", tokens)):
            low, high = self.ranges[what]
            if not low <= value <= high:
                side = "fewer" if value < low else "more"
                end = low if value < low else high
                said.append(
                    f"{count(value)} {what} are {side} than in the law's runs (at "
                    f"{'least' if value < low else 'most'} {count(end)})"
                )
        return said


class Additive(Law):
    """Equation (1)."""

    @staticmethod
    def powers(constants: Mapping[str, float]) -> tuple[float, float]:
        alpha, beta = constants["alpha"], constants["beta"]
        return beta / (alpha + beta), alpha / (alpha + beta)

    @property
    def ratio(self) -> float:
        c = self.constants
        return (c["alpha"] * c["A"] / (c["beta"] * c["B"])) ** (1 / (c["alpha"] + c["beta"]))

    def loss(self, parameters: float, tokens: float) -> float:
        c = self.constants
        return c["E"] + c["A"] / parameters ** c["alpha"] + c["B"] / tokens ** c["beta"]

    def tokens_to(self, loss: float, parameters: float) -> float:
        c = self.constants
        left = loss - self.loss(parameters, math.inf)
        return math.inf if left <= 0 else (c["B"] / left) ** (1 / c["beta"])


class JointLaw(Law):
    """Equation (2)."""

    @property
    def _q(self) -> float:
        return self.constants["alpha_N"] / self.constants["alpha_D"]

    @staticmethod
    def powers(constants: Mapping[str, float]) -> tuple[float, float]:
        q = constants["alpha_N"] / constants["alpha_D"]
        return 1 / (1 + q), q / (1 + q)

    @property
    def ratio(self) -> float:
        c, q = self.constants, self._q
        return (q * c["N_c"] ** q / c["D_c"]) ** (1 / (1 + q))

    def loss(self, parameters: float, tokens: float) -> float:
        c = self.constants
        return ((c["N_c"] / parameters) ** self._q + c["D_c"] / tokens) ** c["alpha_D"]

    def tokens_to(self, loss: float, parameters: float) -> float:
        c = self.constants
        if loss <= self.loss(parameters, math.inf):
            return math.inf
        return c["D_c"] / (loss ** (1 / c["alpha_D"]) - (c["N_c"] / parameters) ** self._q)


FORMS: dict[str, type[Law]] = {"additive": Additive, "joint": JointLaw}


@cache
def data() -> dict[str, Any]:
    """The content of `laws.json`."""
    text = resources.files("layoutopt.sizing").joinpath("laws.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def published(name: str) -> Law:
    """A published law; UserError for a name that there is not."""
    known = data()["laws"]
    if name not in known:
        raise UserError(f"--law {name} is not a known scaling law; {known_names(name, known)}")
    said = {field: value for field, value in known[name].items() if field in LawInfo.model_fields}
    return FORMS[known[name]["form"]].model_validate({"name": name, **said})


def critical_batch(loss: float) -> float:
    """Tokens of a batch above which more of them save few steps: Kaplan et al. 2020, equation 5.3."""
    c = data()["critical_batch"]["constants"]
    return float(c["B"] / loss ** (1 / c["alpha"]))


def replicas_loss(parameters: float, replicas: int) -> float:
    """The loss of replicas that synchronise rarely (DiLoCo) over that of data-parallel training, both of this
    size: Charles et al. 2025, tables 7 and 10."""
    said = data()["replicas"]
    own, joint = said["data_parallel"], said["joint"]
    apart = joint["A"] * parameters ** joint["alpha"] * replicas ** joint["beta"]
    return float(apart / (own["A"] * parameters ** own["alpha"]))
