"""Why nothing fits, in the words of who asked, and what would help, each with its price.

What was asked is a set of conditions: the pins, the prohibitions, the memory, and the stages, recomputation
and microbatches that were allowed. Those are dropped one after the other as long as still nothing fits (a
deletion filter, Chinneck and Dravnieks 1991): what remains cannot hold together, and every smaller set of it
can. Then single changes are searched: dropping one of them, more microbatches, twice the devices; where none
helps, all conditions but the memory are dropped together, and the devices are doubled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layoutopt.plan.build import Plan
from layoutopt.plan.units import size_text
from layoutopt.space.kind import STORED
from layoutopt.space.microbatches import USUAL
from layoutopt.space.splits import parse_forbid, parse_rules
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

PARSED = {"pins": parse_rules, "forbid": parse_forbid}
MORE_PARTS = (16, 32, 64, 128)
PATIENCE = 20.0
"""Seconds for one search of a change."""
Asked = Mapping[str, Any]
"""Arguments of `layoutopt.search`."""


@dataclass(frozen=True)
class Repair:
    """A change under which something fits.

    Attributes:
      change: in words, as options of `search`.
      proven: nothing is faster under the change.
    """

    change: str
    seconds: float
    peak: int
    proven: bool

    def __str__(self) -> str:
        return f"{self.change}: {self.seconds:.3g} s a step, {size_text(self.peak)}"


@dataclass(frozen=True)
class Diagnosis:
    """What cannot hold together, and what would help, the fastest first.

    Attributes:
      conflict: the conditions in words; empty if nothing fits whatever is allowed.
      minimal: without any one of them something fits; False where the time ran out before that was known.
    """

    conflict: tuple[str, ...]
    repairs: tuple[Repair, ...]
    minimal: bool = True

    def __str__(self) -> str:
        parts = []
        if len(self.conflict) > 1:
            fewer = "" if self.minimal else " (there was no time to see whether some of them can)"
            parts.append(f"these cannot hold together: {', '.join(self.conflict)}{fewer}")
        if self.repairs:
            parts.append("what would help: " + "; ".join(map(str, self.repairs)))
        return "; ".join(parts)


def diagnose(find: Callable[..., Plan], model: Model, asked: Asked, seconds: float = 120.0) -> Diagnosis:
    """Searches for the conflict and the repairs of a question that is proven to have no answer.

    Args:
      find: `layoutopt.search`.
      asked: its arguments besides the model.
      seconds: stops looking for more after so many.
    """
    return _Diagnosing(find, model, asked, time.monotonic() + seconds).diagnosis()


@dataclass
class _Trial:
    """What a search under some change came to: a plan, or known to be none, or neither in time."""

    plan: Plan | None
    none: bool


class _Diagnosing:
    def __init__(self, find: Callable[..., Plan], model: Model, asked: Asked, deadline: float) -> None:
        self.find, self.model, self.asked, self.deadline = find, model, dict(asked), deadline

    def diagnosis(self) -> Diagnosis:
        held, minimal = self._conditions(), True
        needed: list[str] = []
        repairs: list[Repair] = []
        for name in list(held):
            without = {n: drop for n, drop in held.items() if n != name}
            trial = self._trial(self._dropped([n for n in self._conditions() if n not in without]))
            if trial.none:
                held = without
            else:
                needed.append(name)
                minimal &= trial.plan is not None
        for name in needed if len(needed) > 1 else ():
            if not name.startswith("--memory"):
                self._add(repairs, f"without {name}", self._trial(self._dropped([name])))
        for change, asked in self._changes(self.asked):
            self._add(repairs, change, self._trial(asked))
        if not repairs:
            for change, asked in self._last_resorts():
                self._add(repairs, change, self._trial(asked))
        repairs.sort(key=lambda r: r.seconds)
        return Diagnosis(tuple(needed), tuple(repairs), minimal)

    def _conditions(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        """In words -> what takes the condition out of the arguments of a search; the memory last."""
        found: dict[str, Callable[[dict[str, Any]], None]] = {}
        for kind, option in (("pins", "--pin"), ("forbid", "--forbid")):
            for name, axes in PARSED[kind](self.asked.get(kind)).items():
                found[f"{option} {name}:{'+'.join(axes) or 'none'}"] = _without_rule(kind, name)
        if set(self.asked.get("storage", STORED)) != set(STORED):
            found[f"--storage {','.join(self.asked['storage'])}"] = _set("storage", STORED)
        if True not in self.asked.get("recompute", (True,)):
            found["--recompute never"] = _set("recompute", (False, True))
        parts = tuple(self.asked.get("microbatches", USUAL))
        if not set(USUAL) <= set(parts):
            found[f"--microbatches {','.join(map(str, parts))}"] = _set("microbatches", USUAL)
        if self.asked.get("memory") is not None:
            found[f"--memory {size_text(self.asked['memory'])}"] = _set("memory", float("1e30"))
        return found

    def _dropped(self, names: Sequence[str]) -> dict[str, Any]:
        asked, conditions = dict(self.asked), self._conditions()
        for name in names:
            conditions[name](asked)
        return asked

    def _changes(self, asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
        """Changes that need no condition to go."""
        parts = tuple(asked.get("microbatches", USUAL))
        if self.model.batch_dim is not None:
            for more in MORE_PARTS:
                if more > max(parts):
                    yield f"--microbatches {more}", {**asked, "microbatches": (more,)}
        if asked.get("devices"):
            twice = 2 * int(asked["devices"])
            yield f"--devices {twice}", {**asked, "devices": twice}
        elif asked.get("mesh") is not None:
            mesh = asked["mesh"]
            mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
            for axis in mesh.names:
                wider = Mesh([(a, n * 2 if a == axis else n) for a, n in mesh.axes])
                yield f'--mesh "{wider}"', {**asked, "mesh": wider}

    def _last_resorts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """All conditions but the memory dropped, alone and together with each change."""
        names = [name for name in self._conditions() if not name.startswith("--memory")]
        if not names:
            return
        words = f"without {', '.join(names)}"
        free = self._dropped(names)
        yield words, free
        for change, asked in self._changes(free):
            yield f"{words}, and {change}", asked

    def _trial(self, asked: dict[str, Any]) -> _Trial:
        left = min(PATIENCE, self.deadline - time.monotonic())
        if left <= 0:
            return _Trial(None, False)
        try:
            return _Trial(self.find(self.model, **{**asked, "time_limit": left, "on_progress": None}), False)
        except InfeasibleError:
            return _Trial(None, True)
        except (LimitError, UserError):
            return _Trial(None, False)

    def _add(self, repairs: list[Repair], change: str, trial: _Trial) -> None:
        if trial.plan is not None:
            p = trial.plan.predicted
            proven = trial.plan.solver.status == "OPTIMAL"
            repairs.append(Repair(change, p.step_seconds, p.peak_memory_bytes, proven))


def _set(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(asked: dict[str, Any]) -> None:
        asked[name] = value

    return change


def _without_rule(kind: str, dim: str) -> Callable[[dict[str, Any]], None]:
    def change(asked: dict[str, Any]) -> None:
        rules: Mapping[str, Axes] = PARSED[kind](asked.get(kind))
        asked[kind] = {name: axes for name, axes in rules.items() if name != dim} or None

    return change
