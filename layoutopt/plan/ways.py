"""Compared ways to synchronise: every step, or rarely along an axis."""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import Field

from layoutopt.plan.decided import Decided
from layoutopt.plan.fields import Amount, Data, Flag, Names, PositiveInteger, WholeNumber

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


class AtLink(Data):
    """One bandwidth of the link.

    Attributes:
      times: factor of the hardware's bandwidth; gigabits: per second, between a replica and the others.
      seconds, mfu: of a step, by the name of a way.
    """

    times: Amount
    gigabits: Amount
    seconds: dict[str, Amount]
    mfu: dict[str, Amount] = Field(default_factory=dict)

    @property
    def pays(self) -> bool:
        """True if the fastest way synchronises rarely."""
        return min(self.seconds, key=self.seconds.__getitem__, default=SYNCHRONOUS) != SYNCHRONOUS


class Turning(Data):
    """The comparison of ways on links of different speeds between replicas.

    Attributes:
      axis: that the link is of.
      at: rising bandwidths.
      turns: gigabits per second at which another way becomes the fastest, among those that synchronise rarely
        and the synchronous one.
      searched: every way was searched again at each speed; else its best layout here is predicted there.
    """

    axis: str
    at: tuple[AtLink, ...]
    turns: tuple[Amount, ...] = ()
    searched: Flag = False

    @property
    def words(self) -> str:
        """In one sentence: 'rare synchronisation is faster from 9.1 to 250 Gbit/s ...'."""
        if not self.at:
            return "not determined within the time limit"
        low, high = self.at[0].gigabits, self.at[-1].gigabits
        ends = [None, *self.turns] if self.at[0].pays else [*self.turns]
        spans = []
        for start, end in itertools.zip_longest(ends[::2], ends[1::2]):
            if start is None and end is None:
                spans.append(f"from {low:.3g} to {high:.3g}")
            elif end is None:
                spans.append(f"above {start:.3g}")
            else:
                spans.append(f"below {end:.3g}" if start is None else f"from {start:.3g} to {end:.3g}")
        where = " and ".join(spans) or f"nowhere from {low:.3g} to {high:.3g}"
        whose = "" if self.searched else ", with these layouts"
        return f"rare synchronisation is faster {where} Gbit/s between a replica and the others{whose}"


class ReplicaStrategies(Data):
    """The compared ways, the fastest accepted one first.

    Attributes:
      accepted: relative loss that the user accepts; None: any.
    """

    compared: tuple[ReplicaStrategy, ...]
    accepted: Amount | None = None
    turning: Turning | None = None
