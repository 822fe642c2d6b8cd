"""Explains in the user's terms why nothing fits, and lists changes that would help with their predicted
times.

The request is a set of conditions: the pins, the prohibitions, the memory, and the allowed stages,
recomputation and microbatches. They are dropped one after the other while still nothing fits (a deletion
filter, Chinneck and Dravnieks 1991). The remaining conditions contradict each other, and every smaller set of
them can be satisfied. Then changes are searched: dropping one of them, the choices of every kind of decision
that were left out, more and more devices until something fits, a smaller and smaller batch, hardware with
more memory. Where none helps, all conditions but the memory are dropped together, and there are more devices
again.

A change lists only the left-out choices that its plan uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.hardware import Hardware, hardware_names, machine_of
from layoutopt.optimize.evaluator import Evaluator
from layoutopt.optimize.incumbents import covers
from layoutopt.plan.build import Plan
from layoutopt.plan.schema import ProofStatus
from layoutopt.plan.units import size_text
from layoutopt.space import allow
from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from layoutopt.space.kind import Target
from layoutopt.space.mesh_shapes import meshes
from layoutopt.space.splits import parse_forbid, parse_rules
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

USUAL_SPACE = SearchSpace()
PARSED = {"pins": parse_rules, "forbid": parse_forbid}
MOST_TIMES = 64
"""As many devices are looked at."""
SMALLER = (2, 4, 8, 16, 32)
"""Parts of a batch that are looked at."""
MACHINES = 3
"""Other pieces of hardware that are looked at."""
PATIENCE = 20.0
"""Seconds for one search of a change."""
SHORT = 6.0
"""Seconds for one search with more choices, which need not be proven."""
MEMORY = "memory"
Asked = Mapping[str, Any]
"""Arguments of `layoutopt.search`."""
Smaller = Callable[[int], tuple[str, Model] | None]
"""Parts of the batch -> the change in words and the changed model; None if there is none."""
RepairChange = tuple[str, dict[str, Any]]
"""In words, as options of `search`, and the arguments under it."""


@dataclass(frozen=True)
class FoundRepair:
    """A change under which something fits.

    Attributes:
      change: in words, as options of `search`.
      asked: the arguments of `layoutopt.search` with this change.
      limit: bytes that a device may hold there.
      note: a remark about a smaller change.
      parts: a step uses 1/parts of the requested examples.
      free: it only allows more choices, on the same devices.
    """

    change: str
    asked: Asked = field(repr=False, compare=False)
    plan: Plan
    limit: float
    note: str = ""
    parts: int = 1
    free: bool = False

    @property
    def cost(self) -> tuple[bool, float]:
        """The order of repairs: those that need nothing first, then by device-seconds for the same
        examples."""
        return not self.free, self.seconds * self.parts * self.plan.mesh.devices

    @property
    def seconds(self) -> float:
        return self.plan.predicted.step_seconds

    @property
    def peak(self) -> int:
        return self.plan.predicted.peak_memory_bytes

    @property
    def proven(self) -> bool:
        """Nothing is faster under the change."""
        return self.plan.solver.status == ProofStatus.OPTIMAL

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.change}{note}: {self.seconds:.3g} s per step, {size_text(self.peak)}"


@dataclass(frozen=True)
class Diagnosis:
    """The conditions that cannot hold together, and repairs, the cheapest first.

    Attributes:
      conflict: the conditions in words; empty if nothing fits whatever is allowed.
      minimal: without any one of them something fits; False where the time ran out before that was known.
    """

    conflict: tuple[str, ...]
    repairs: tuple[FoundRepair, ...]
    minimal: bool = True

    @property
    def why(self) -> str:
        """The conflict in words; '' where it is the memory alone."""
        if len(self.conflict) < 2:
            return ""
        fewer = "" if self.minimal else " (the time limit was reached before smaller conflicts were checked)"
        return f"these conditions conflict: {', '.join(self.conflict)}{fewer}"

    def __str__(self) -> str:
        helps = "possible changes: " + "; ".join(map(str, self.repairs)) if self.repairs else ""
        return "; ".join(filter(None, (self.why, helps)))


def diagnose(
    find: Callable[..., Plan],
    model: Model,
    asked: Asked,
    seconds: float = 120.0,
    least: float = 0.0,
    smaller: Smaller | None = None,
) -> Diagnosis:
    """Searches for the conflict and the repairs of a question that is proven to have no answer.

    Args:
      find: `layoutopt.search`.
      asked: the arguments besides the model.
      seconds: time limit of the search for repairs.
      least: bytes that no layout needs less than.
      smaller: the model with a batch of 1/parts as much.
    """
    return _Diagnosing(find, model, asked, time.monotonic() + seconds, smaller).diagnosis(least)


@dataclass
class _Trial:
    """What a search under some change came to: a plan, or known to be none, or neither in time."""

    plan: Plan | None
    none: bool


class _Diagnosing:
    def __init__(
        self,
        find: Callable[..., Plan],
        model: Model,
        asked: Asked,
        deadline: float,
        smaller: Smaller | None = None,
    ) -> None:
        self.find, self.model, self.asked, self.deadline = find, model, dict(asked), deadline
        self.smaller = smaller
        self.repairs: list[FoundRepair] = []

    def diagnosis(self, least: float) -> Diagnosis:
        held, minimal = self._conditions(), True
        needed: list[str] = []
        for name in list(held):
            if len(held) == 1:  # without any condition, some layout fits
                needed += held
                break
            without = {n: drop for n, drop in held.items() if n != name}
            trial = self._trial(self._dropped([n for n in self._conditions() if n not in without]))
            if trial.none:
                held = without
            else:
                needed.append(name)
                minimal &= trial.plan is not None
        memory = self._memory()
        for name in needed if len(needed) > 1 else ():
            if name != memory:
                self._try(f"without {name}", self._dropped([name]))
        self._look(self.asked, least=least)
        self._less()
        for change, asked in self._machines():
            self._try(change, asked)
        names = [name for name in self._conditions() if name != memory]
        if not self.repairs and names:
            words, free = f"without {', '.join(names)}", self._dropped(names)
            self._try(words, free)
            self._look(free, f"{words}, and ")
        repairs = sorted(self.repairs, key=lambda repair: repair.cost)
        return Diagnosis(tuple(needed), tuple(repairs), minimal)

    # -- what was asked --------------------------------------------------------------------------------------

    def _memory(self) -> str:
        """The condition that it fits, in words."""
        limit, machine = self.asked.get(MEMORY), _machine(self.asked)
        if limit is None:
            return f"the memory of a {machine.name} device ({size_text(machine.usable_memory_bytes)})"
        return f"--memory {size_text(limit)}"

    def _limit(self, asked: Asked) -> float:
        """Bytes that a device may hold."""
        limit = asked.get(MEMORY)
        return _machine(asked).usable_memory_bytes if limit is None else float(limit)

    def _conditions(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        """In words -> what takes the condition out of the arguments of a search; the memory last."""
        found: dict[str, Callable[[dict[str, Any]], None]] = {}
        for kind, option in (("pins", "--pin"), ("forbid", "--forbid")):
            for name, axes in PARSED[kind](self.asked.get(kind)).items():
                found[f"{option} {name}:{'+'.join(axes) or 'none'}"] = _without_rule(kind, name)
        for name, argument in ARGUMENTS.items():
            usual = getattr(USUAL_SPACE, name)
            if isinstance(usual, tuple) and not {*usual} <= {*argument.parse(self.asked.get(name, usual))}:
                texts = argument.texts(argument.parse(self.asked[name])).items()
                found[" ".join(f"{option} {text}" for option, text in texts if text)] = _set(name, usual)
        found[self._memory()] = _set(MEMORY, float("1e30"))
        return found

    def _dropped(self, names: Sequence[str]) -> dict[str, Any]:
        asked, conditions = dict(self.asked), self._conditions()
        for name in names:
            conditions[name](asked)
        return asked

    # -- what would help -------------------------------------------------------------------------------------

    def _look(self, asked: Asked, words: str = "", least: float = 0.0) -> None:
        """Tries what needs no condition to go; `words`: what is changed already. Devices of which each would
        have to hold less than its part of `least` are not tried."""
        if not words:
            self._left_out(asked)
        small = f"{asked['devices']} devices are too few" if asked.get("devices") else ""
        for wider in self._larger(asked, least / self._limit(asked)):
            trials = [self._try(words + change, changed, small) for change, changed in wider]
            if any(trial.plan is not None for trial in trials):
                break
            sure = asked.get("devices") and all(trial.none for trial in trials)
            small = f"{wider[0][1]['devices']} devices are too few" if sure else ""

    def _less(self) -> None:
        """Tries a batch of half as much and so on, until something fits."""
        small = ""
        for parts in SMALLER if self.smaller is not None else ():
            made = self.smaller(parts) if self.smaller is not None else None
            if made is None:
                return
            change, model = made
            notes = ", ".join(filter(None, (f"with 1/{parts} of the batch per step", small)))
            trial = self._trial(self.asked, model)
            if trial.plan is not None:
                found = FoundRepair(change, self.asked, trial.plan, self._limit(self.asked), notes, parts)
                self.repairs.append(found)
                return
            small = f"1/{parts} does not fit" if trial.none else ""

    def _left_out(self, asked: Asked) -> None:
        """Tries the choices that were left out: what `--allow everything` allows, then all that there are."""
        for everything in (False, True):
            if (wider := self._wider(asked, everything)) and self._allow(wider, asked).plan is not None:
                return

    def _wider(self, asked: Asked, everything: bool) -> dict[str, tuple[Any, ...]]:
        """Every field of the space that has choices beside the allowed ones, with all of them."""
        space, machine = self._space(asked), _machine(asked)
        shapes = meshes(asked.get("mesh"), asked.get("devices"), asked.get("max_axes", 2), machine)
        targets = [Target(self.model, mesh, machine.hosts_apart) for mesh in shapes]
        found: dict[str, tuple[Any, ...]] = {}
        for name, every in allow.found(targets, everything).items():
            known = space.said(name) or ()
            if isinstance(every, tuple) and not {*every} <= {*known}:
                found[name] = tuple(dict.fromkeys((*known, *every)))
        return found

    def _allow(self, wider: Mapping[str, tuple[Any, ...]], asked: Asked) -> _Trial:
        """Searches with more choices, and keeps the fields that are needed, with the values that are used."""
        trial = self._trial({**asked, **wider}, patience=SHORT)
        if trial.plan is None:
            return trial
        kept, plan = self._used(dict(wider), asked, trial.plan), trial.plan
        for name in [*kept]:
            fewer = {other: value for other, value in kept.items() if other != name}
            again = self._trial({**asked, **fewer}, patience=SHORT) if fewer else _Trial(None, True)
            if again.plan is not None:
                kept, plan = self._used(fewer, asked, again.plan), again.plan
        if kept:
            texts = {o: t for name in kept for o, t in ARGUMENTS[name].texts(kept[name]).items() if t}
            change = " ".join(f"{option} {text}" for option, text in texts.items())
            self.repairs.append(FoundRepair(change, {**asked, **kept}, plan, self._limit(asked), free=True))
        return trial

    def _used(self, wider: Mapping[str, tuple[Any, ...]], asked: Asked, plan: Plan) -> dict[str, Any]:
        """Fields with more choices, without the values that a plan does not use."""
        kept, near = dict(wider), Evaluator(self.model, _machine(asked)).near
        for name, every in wider.items():
            said = self._space(asked).said(name) or ()
            for value in (v for v in every if v not in said):
                less = {**kept, name: tuple(v for v in kept[name] if v != value)}
                if covers(self._space({**asked, **less}), self.model, plan, near):
                    kept = less
            if {*kept[name]} == {*said}:
                del kept[name]
        return kept

    def _space(self, asked: Asked) -> SearchSpace:
        """The space of a question."""
        return SearchSpace(**{name: asked[name] for name in ARGUMENTS if name in asked})

    def _larger(self, asked: Asked, least: float) -> Iterator[list[RepairChange]]:
        """More and more devices, at least so many times as many: of a given mesh, along each axis. Twice as
        many and so on, and between them what divides the batch."""
        for times in (t for t in range(2, MOST_TIMES + 1) if t >= least and self._divides(asked, t)):
            if asked.get("devices"):
                more = times * int(asked["devices"])
                yield [(f"--devices {more}", {**asked, "devices": more})]
            elif asked.get("mesh") is not None:
                mesh = asked["mesh"]
                mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
                wider = [
                    Mesh([(a, n * times if a == axis else n) for a, n in mesh.axes]) for axis in mesh.names
                ]
                yield [(f'--mesh "{each}"', {**asked, "mesh": each}) for each in wider]

    def _divides(self, asked: Asked, times: int) -> bool:
        """Whether so many times as many devices are a power of two as many, or can share the batch evenly."""
        if times & (times - 1) == 0:
            return True
        name, mesh = self.model.batch_dim, asked.get("mesh")
        if name is None:
            return False
        mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
        count = int(asked.get("devices") or 0) or (1 if mesh is None else mesh.devices)
        return all(size % (count * times) == 0 for size in self.model.graph.dims()[name])

    def _machines(self) -> Iterator[RepairChange]:
        """Hardware with more memory, of the same maker first, the least first; none where the user said how
        much there is."""
        own = _machine(self.asked)
        if self.asked.get(MEMORY) is not None or own.kind == "cpu":
            return
        every = [machine_of(name) for name in hardware_names()]
        larger = [m for m in every if m.kind != "cpu" and m.usable_memory_bytes > own.usable_memory_bytes]
        larger.sort(key=lambda m: (m.kind != own.kind, m.usable_memory_bytes))
        for machine in larger[:MACHINES]:
            yield f"--hardware {machine.name}", {**self.asked, "hardware": machine}

    def _trial(self, asked: Asked, model: Model | None = None, patience: float = PATIENCE) -> _Trial:
        left = min(patience, self.deadline - time.monotonic())
        if left <= 0:
            return _Trial(None, False)
        given = {**asked, "time_limit": left, "on_progress": None, "alternatives": False}
        try:
            return _Trial(self.find(model or self.model, **given), False)
        except InfeasibleError:
            return _Trial(None, True)
        except (LimitError, UserError):
            return _Trial(None, False)

    def _try(self, change: str, asked: dict[str, Any], note: str = "") -> _Trial:
        """Searches under a change, and keeps it if it helps."""
        trial = self._trial(asked)
        if trial.plan is not None:
            self.repairs.append(FoundRepair(change, asked, trial.plan, self._limit(asked), note))
        return trial


def _machine(asked: Asked) -> Hardware:
    return machine_of(asked.get("hardware", "cpu-local"))


def _set(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(asked: dict[str, Any]) -> None:
        asked[name] = value

    return change


def _without_rule(kind: str, dim: str) -> Callable[[dict[str, Any]], None]:
    def change(asked: dict[str, Any]) -> None:
        rules: Mapping[str, Axes] = PARSED[kind](asked.get(kind))
        asked[kind] = {name: axes for name, axes in rules.items() if name != dim} or None

    return change
