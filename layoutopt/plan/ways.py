"""Compared ways to synchronise: every step, or rarely along an axis."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from layoutopt.plan.decided import Decided
from layoutopt.plan.fields import Amount, Data, Names, PositiveInteger, WholeNumber

SYNCHRONOUS = "synchronous"
"""The name of the way in which all devices synchronise in every step."""


class ReplicaStrategy(Decided):
    """The best layout of one way to synchronise.

    Attributes:
      replicas: number of replicas that share the examples of a step; 1 if all devices synchronise in every
        step.
      hparams: hyperparameters in which a replica's model differs from the whole.
      step_seconds, mfu, peak_memory_bytes: None if the way has no plan; `reason` explains why.
      rare_bytes: bytes per step that a device sends over the axis that synchronises rarely.
      status: proof of the layout.
      loss: relative increase of the loss by the published law; None: outside the law.
    """

    name: str = SYNCHRONOUS
    replicas: PositiveInteger = 1
    hparams: dict[str, Any] = Field(default_factory=dict)
    mesh: dict[str, PositiveInteger] = Field(default_factory=dict)
    layout: dict[str, Names] = Field(default_factory=dict)
    step_seconds: Amount | None = None
    mfu: Amount | None = None
    peak_memory_bytes: WholeNumber | None = None
    rare_bytes: Amount | None = None
    status: str = ""
    loss: float | None = None
    reason: str = ""


class ReplicaStrategies(Data):
    """The compared ways, the fastest accepted one first.

    Attributes:
      accepted: relative loss that the user accepts; None: any.
    """

    compared: tuple[ReplicaStrategy, ...]
    accepted: Amount | None = None
