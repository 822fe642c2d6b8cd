"""Explains in the user's terms why nothing fits, and lists changes that would help with their predicted
times.

A condition (`conditions`) is a rule about splits, or a field of the space with fewer values than there
are, whether the user said it or not. Each is lifted alone, and if no single one helps, all are, and those
that need not be are put back. Beside these are more and more devices until something fits, a smaller and
smaller batch, and hardware with more memory.

What the user said, and the memory, are conditions. They are dropped one after the other while still nothing
fits (a deletion filter, Chinneck and Dravnieks 1991). The remaining conditions contradict each other, and
every smaller set of them can be satisfied.

A search for a change ends with the first layout that fits, or with the proof that none does, so the listed
changes do not depend on the machine's speed unless the time limit ends one of these searches. The time that
is left goes to better layouts under the changes that were found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from costmodels.frameworks import load_framework
from costmodels.hardware import hardware_names, load_hardware, machine_of
from layoutopt.optimize.answers.conditions import (
    MEMORY,
    Asked,
    Condition,
    conditions,
    lifted,
    limit_in,
    machine_in,
    of_memory,
    option_text,
    space_of,
)
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.heuristics.incumbents import covers
from layoutopt.plan.build import Plan
from layoutopt.plan.schema import ProofStatus
from layoutopt.plan.units import size_text
from layoutopt.space.decisions import ARGUMENTS
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

MOST_TIMES = 64
"""As many devices are looked at."""
SMALLER = (2, 4, 8, 16, 32)
"""Parts of a batch that are looked at."""
MACHINES = 3
"""Other pieces of hardware that are looked at."""
SHARE = 0.125
"""Part of the time left in which one search has to find a layout that fits, or prove that there is none."""
POLISH = 6.0
"""Seconds for a better layout under a change that was found."""
CUT_OFF = "the time for changes ended before every one was tried"
NOTHING: Asked = {}
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
      free: it only allows more choices, on the same devices, and keeps all rules.
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
        """The order of repairs: first those that need nothing, then by device-seconds per example."""
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
      repairs: the changes that help.
      complete: the time limit ended no search. Otherwise a part of the conflict may conflict too, and other
        changes may help.
      asked: the arguments of the search in which nothing fits.
    """

    conflict: tuple[str, ...]
    repairs: tuple[FoundRepair, ...]
    complete: bool = True
    asked: Asked = field(default_factory=dict, repr=False, compare=False)

    @property
    def why(self) -> str:
        """The conflict in words, unless it is the memory alone, and whether the time was too short."""
        conflict = f"these conditions conflict: {', '.join(self.conflict)}" if self.conflict[1:] else ""
        return "; ".join(filter(None, (conflict, "" if self.complete else CUT_OFF)))

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


@dataclass(frozen=True)
class _Trial:
    """What a search came to: a plan, or known to be none, or neither in time."""

    plan: Plan | None
    none: bool


@dataclass(frozen=True)
class _Change:
    """A change of a question under which something fits.

    Attributes:
      plan: the first one that was found.
      without: conditions that are lifted.
      words: what else changes, as options of `search`.
      more: those options as arguments.
    """

    plan: Plan
    without: Sequence[Condition] = ()
    words: str = ""
    more: Asked = field(default_factory=dict)
    note: str = ""
    model: Model | None = None
    parts: int = 1


class _Diagnosing:
    def __init__(
        self,
        find: Callable[..., Plan],
        model: Model,
        asked: Asked,
        deadline: float,
        smaller: Smaller | None = None,
    ) -> None:
        space = space_of(asked)
        self.find, self.model, self.deadline, self.smaller = find, model, deadline, smaller
        self.asked = {**asked, **{name: getattr(space, name) for name in ARGUMENTS if name in asked}}
        self.found: list[_Change] = []
        self.complete = True

    def diagnosis(self, least: float) -> Diagnosis:
        every = conditions(self.model, self.asked)
        conflict = self._conflict([*(each for each in every if each.said), of_memory(self.asked)])
        alone = [each for each in every if self._try([each]).plan is not None]
        self._look(least)
        self._less()
        self._machines()
        if not alone:
            self._together(every)
        if not self.found:
            self._look(least, [each for each in every if each.said])
        repairs: dict[str, FoundRepair] = {}
        for number, each in enumerate(self.found):
            repair = self._repair(each, len(self.found) - number)
            repairs.setdefault(repair.change, repair)
        ordered = tuple(sorted(repairs.values(), key=lambda repair: repair.cost))
        return Diagnosis(tuple(each.said for each in conflict), ordered, self.complete, self.asked)

    # -- what was asked --------------------------------------------------------------------------------------

    def _conflict(self, held: list[Condition]) -> list[Condition]:
        """Those conditions that cannot hold together."""
        conditions, needed = [*held], list[Condition]()
        for each in conditions:
            if len(held) == 1:  # without any condition, some layout fits
                return [*needed, each]
            others = [other for other in held if other is not each]
            if self._trial(lifted(self.asked, (c for c in conditions if c not in others))).none:
                held = others
            else:
                needed.append(each)
        return needed

    # -- what would help -------------------------------------------------------------------------------------

    def _together(self, every: Sequence[Condition]) -> None:
        """Lifts all conditions at once: first all but the rules, then all that there are."""
        most = tuple(conditions(self.model, self.asked, everything=True))
        free = (tuple(each for each in found if not each.rule) for found in (every, most))
        for left in dict.fromkeys((*free, most)):
            if not left or (plan := self._trial(lifted(self.asked, left)).plan) is None:
                continue
            for each in left:
                fewer = tuple(other for other in left if other is not each)
                if self._covers(lifted(self.asked, fewer), plan):
                    left = fewer
                elif fewer and (other := self._trial(lifted(self.asked, fewer)).plan) is not None:
                    left, plan = fewer, other
            self.found.append(_Change(plan, left))
            return

    def _look(self, least: float, without: Sequence[Condition] = ()) -> None:
        """Tries more devices; not those of which each would have to hold less than its part of `least`."""
        asked = self.asked
        small = f"{asked['devices']} devices are too few" if asked.get("devices") else ""
        for wider in self._larger(least / limit_in(asked)):
            trials = [self._try(without, words, more, small) for words, more in wider]
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
            words, model = made
            note = ", ".join(filter(None, (f"with 1/{parts} of the batch per step", small)))
            trial = self._trial(self.asked, model)
            if trial.plan is not None:
                self.found.append(_Change(trial.plan, (), words, {}, note, model, parts))
                return
            small = f"1/{parts} does not fit" if trial.none else ""

    def _used(self, change: _Change) -> tuple[dict[Condition, Any], Plan]:
        """The conditions that have to be lifted, each with as few values as a layout that fits needs, and
        this layout."""
        base, kept = {**self.asked, **change.more}, change.without
        for each in change.without:
            fewer = [other for other in kept if other is not each]
            kept = fewer if self._covers(lifted(base, fewer), change.plan) else kept
        wide = lifted(base, kept)
        for each in (k for k in kept if not k.rule):
            for value in each.values:
                rest = tuple(other for other in wide[each.field] if other != value)
                narrow = {**wide, each.field: rest}
                if rest and self._covers(narrow, change.plan):
                    wide = narrow
                elif rest and (other := self._trial(narrow, change.model).plan) is not None:
                    wide, change = narrow, replace(change, plan=other)
        return {each: wide[each.field] for each in kept}, change.plan

    def _covers(self, asked: Asked, plan: Plan) -> bool:
        """Whether a question allows the layout of a plan."""
        near = Evaluator(self.model, machine_in(asked)).near
        return covers(space_of(asked), self.model, plan, near)

    def _repair(self, change: _Change, others: int) -> FoundRepair:
        """A change without what its first layout does not use, so that its words do not depend on the time,
        and the best layout under it that is found in its part of the time left."""
        used, first = self._used(change)
        rules = ", ".join(each.said for each in used if each.rule)
        fields = {each.field: values for each, values in used.items() if not each.rule}
        texts = " ".join(option_text(name, values) for name, values in fields.items())
        words = ", and ".join(filter(None, (f"without {rules}" * bool(rules), texts, change.words)))
        asked = {**lifted(self.asked, used), **fields, **change.more}
        free = not rules and not change.words
        left = min(POLISH, (self.deadline - time.monotonic()) / others)
        with suppress(LimitError, UserError):
            model, wide = change.model or self.model, {**asked, "alternatives": False}
            first = self.find(model, **wide, time_limit=left, start=first) if left > 0 else first
        return FoundRepair(words, asked, first, limit_in(asked), change.note, change.parts, free)

    def _larger(self, least: float) -> Iterator[list[RepairChange]]:
        """More and more devices, at least so many times as many: of a given mesh, along each axis. Twice as
        many and so on, and between them what divides the batch."""
        asked = self.asked
        for times in (t for t in range(2, MOST_TIMES + 1) if t >= least and self._divides(t)):
            if asked.get("devices"):
                more = times * int(asked["devices"])
                yield [(f"--devices {more}", {"devices": more})]
            elif asked.get("mesh") is not None:
                mesh = asked["mesh"]
                mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
                wider = [
                    Mesh([(a, n * times if a == axis else n) for a, n in mesh.axes]) for axis in mesh.names
                ]
                yield [(f'--mesh "{each}"', {"mesh": each}) for each in wider]

    def _divides(self, times: int) -> bool:
        """Whether so many times as many devices are a power of two as many, or can share the batch evenly."""
        if times & (times - 1) == 0:
            return True
        name, mesh = self.model.batch_dim, self.asked.get("mesh")
        if name is None:
            return False
        mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
        count = int(self.asked.get("devices") or 0) or (1 if mesh is None else mesh.devices)
        return all(size % (count * times) == 0 for size in self.model.graph.dims()[name])

    def _machines(self) -> None:
        """Tries hardware with more memory, of the same maker first, the least first; none where the user said
        how much there is."""
        own = machine_in(self.asked)
        if self.asked.get(MEMORY) is not None or own.kind == "cpu":
            return
        runs = load_framework(own.framework).kinds
        chips = [name for name in hardware_names() if load_hardware(name).kind in runs]
        every = [machine_of(name, own.framework) for name in chips]
        larger = [m for m in every if m.kind != "cpu" and m.usable_memory_bytes > own.usable_memory_bytes]
        larger.sort(key=lambda m: (m.kind != own.kind, m.usable_memory_bytes))
        for machine in larger[:MACHINES]:
            self._try((), f"--hardware {machine.name}", {"hardware": machine})

    def _trial(self, asked: Asked, model: Model | None = None) -> _Trial:
        """Whether anything fits: the first that does."""
        enough = list[str]()

        def found(words: str, *_: object) -> None:
            enough.append(words)
            raise KeyboardInterrupt

        left = SHARE * (self.deadline - time.monotonic())
        given = {"time_limit": left, "on_better": found, "keep_best": True, "alternatives": False}
        try:
            if left > 0:
                plan = self.find(model or self.model, **{**asked, "on_progress": None, **given})
                if plan.stopped and not enough:  # the user's own Ctrl-C
                    raise KeyboardInterrupt
                return _Trial(plan, False)
        except InfeasibleError:
            return _Trial(None, True)
        except LimitError:
            pass
        except UserError:
            return _Trial(None, False)
        self.complete = False
        return _Trial(None, False)

    def _try(
        self, without: Sequence[Condition], words: str = "", more: Asked = NOTHING, note: str = ""
    ) -> _Trial:
        """Looks whether anything fits under a change, and keeps it if so."""
        trial = self._trial({**lifted(self.asked, without), **more})
        if trial.plan is not None:
            self.found.append(_Change(trial.plan, without, words, more, note))
        return trial
