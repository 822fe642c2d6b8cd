"""Replicas that are jobs of their own and synchronise through a directory (`outer_step_rounds`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mesh_tf_core.arguments import FUNCTION, check, optional
from mesh_tf_core.errors import UserError
from mesh_tf_core.ops.few_bits import WHOLE
from mesh_tf_core.tracing.diloco import OUTER, Settings, check_outer, read_settings

_SETTINGS: Settings = {
    "dir": ("directory", str),
    "replica": ("replica", str),
    **OUTER,
    "patience": ("patience", float),
    "staleness": ("staleness", int),
}


@dataclass(frozen=True)
class Met:
    """One meeting.

    Attributes:
      round: the state that was taken.
      present: replicas whose work it contains.
      dropped: True if this replica's work was too old or was left out.
      bytes: that it posted, each time it did, without the file's own.
      left: replicas whose posts were left out, and why.
    """

    round: int
    present: tuple[int, ...]
    dropped: bool
    bytes: int = 0
    left: Mapping[int, str] = field(default_factory=dict)

    def words(self, count: int) -> str:
        """'round 3, 3 of 4 replicas'."""
        lost = (
            "; the update of this replica was too old and is discarded"
            if self.dropped and not self.left
            else ""
        )
        lost += "".join(f"; the update of replica {one} is excluded: {why}" for one, why in self.left.items())
        return f"round {self.round}, {len(self.present)} of {count} replicas{lost}"


@dataclass(frozen=True)
class Decoupled:
    """A replica that is a job of its own and synchronises with others through a directory.

    Attributes:
      directory: a directory that all replicas reach.
      replica, count: rank of this replica, from 0, and number of replicas.
      period: steps between two synchronisations.
      learning_rate, momentum: of the outer step.
      patience: seconds to wait for the other replicas.
      staleness: the largest age, in rounds, of the progress that a replica sends.
      bits: bits of each number that it sends: 32, 8 or 4. The rounding error is added to the next message.
      fragments: number of parts of the variables (`tracing.diloco.fragments_of`) that synchronise in turn,
        each once in a period, every `period / fragments` steps.
      on_met: called with (step number, result of the synchronisation).

    As text: `dir=/shared/run,replica=1/4,period=30`, and `rate`, `momentum`, `patience`, `staleness`, `bits`,
    `fragments`.
    """

    directory: str | Path
    replica: int
    count: int
    period: int = 30
    learning_rate: float = 0.7
    momentum: float = 0.9
    patience: float = 60.0
    staleness: int = 1
    bits: int = WHOLE
    fragments: int = 1
    on_met: Callable[[int, Met], object] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Decoupled:
        """Its text; UserError if it is none."""
        given = read_settings("meet", text, text, _SETTINGS, cls)
        place = re.fullmatch(r"(\d+)/(\d+)", given.pop("replica", ""))
        if not given.get("directory") or place is None:
            raise UserError(
                f"meet {text!r}: give the directory and the replica, e.g. dir=/shared/run,replica=0/4 "
                "for the first of four replicas"
            )
        return cls(replica=int(place[1]), count=int(place[2]), **given)

    @property
    def shared(self) -> dict[str, float]:
        """The settings that all replicas of a directory must have in common, by name."""
        return {
            "replica": self.count,
            "rate": self.learning_rate,
            "momentum": self.momentum,
            "fragments": self.fragments,
        }

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))
        if self.count < 1:
            raise UserError(
                f"meet: the number of replicas must be at least 1, found {self.count} in "
                f"{self.replica}/{self.count}"
            )
        if not 0 <= self.replica < self.count:
            raise UserError(
                f"meet: replica {self.replica}/{self.count} does not exist: use 0/{self.count} to "
                f"{self.count - 1}/{self.count}"
            )
        check("meet", on_met=(self.on_met, optional(FUNCTION)))
        check_outer("meet", self.period, self.learning_rate, self.momentum, self.fragments, self.bits)
        if not (self.patience >= 0 and self.staleness >= 0):
            raise UserError(
                f"meet: patience={self.patience:g} and staleness={self.staleness} must both be at least 0"
            )
