"""Parallelism degrees: the relation of frameworks in which each mesh axis has one use.

Such a framework multiplies degrees: data, tensor and context (sequence) ways, and shards what it stores over
the ranks that hold the same weights. Each axis of a mesh then splits

  data     the batch, and what the batch is called elsewhere
  tensor   in every weight of a layer one dimension (heads, d_ff), and vocab where it divides
  context  the sequence

and nothing else is split. Experts may lie over any of these axes. What is stored split (ZeRO) is split over
all axes but the tensor ones, or in hybrid sharding over those of a node among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from layoutopt.space.diloco import Rarely
from layoutopt.space.kind import Choice, Decision
from layoutopt.space.restriction import Coupling, DecisionRelation, DimRoles, Only, Role
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.stages import StageSplit
from layoutopt.space.storage import Storage
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.storage import MOST_SPLIT

Every = Mapping[str, Decision]
NONE: list[Choice] = []
WHOLE: list[Choice] = [()]


class Use(NamedTuple):
    """The axes of a mesh by use."""

    data: Axes
    tensor: Axes
    context: Axes


@dataclass(frozen=True)
class Degrees(DecisionRelation):
    """Each axis of a mesh splits the batch, the weights or the sequence.

    Attributes:
      copies: tensor ways may exceed the key-value heads, which are then copied; else each weight of a layer
        with such a dimension has all of them.
      stored_over_context: storage is over the ranks of the sequence, too.
      hybrid: the stages that may be over the axes of a node alone.
      experts_apart: experts may lie over some of the axes of the batch, or over axes of several uses.
      experts_on_data: experts lie over axes of the batch alone.
      sequence: the sequence may be split.
      whole_expert_groups: experts lie over the axes of the weights, if they lie over any axes.
      whole_experts: the matrices of an expert are not split.
      experts_where_stored: experts lie over data axes only where these split the storage of the weights.
      experts_without: stages of storage beside which experts lie over no data axes.
      in_stages: the stage of storage of pipelines, and of these alone; "": they have those of others.
    """

    copies: bool = False
    stored_over_context: bool = True
    hybrid: tuple[str, ...] = (MOST_SPLIT,)
    experts_apart: bool = True
    experts_on_data: bool = False
    sequence: bool = True
    whole_expert_groups: bool = False
    whole_experts: bool = False
    experts_where_stored: bool = False
    experts_without: tuple[str, ...] = ()
    in_stages: str = ""

    def options(self, every: Every, roles: DimRoles, mesh: Mesh) -> dict[str, tuple[Choice, ...]]:
        """Stages of storage over the axes of ranks with the same weights, in every use of the mesh."""
        axes = _axes(every, mesh)
        found = {n: dict[Choice, None]() for n, d in every.items() if isinstance(d, Storage)}
        for use in self._uses(axes):
            for name, options in found.items():
                options.update(dict.fromkeys(self._stored(every, name, use, axes)))
        return {name: tuple(options) for name, options in found.items()}

    def couplings(self, every: Every, roles: DimRoles, mesh: Mesh) -> Iterator[Coupling]:
        axes = _axes(every, mesh)
        splits = {n: d for n, d in every.items() if isinstance(d, Split) and not isinstance(d, StageSplit)}
        further = {n: d for n, d in every.items() if isinstance(d, Elsewhere)}
        stored = {n: d for n, d in every.items() if isinstance(d, Storage)}
        experts = roles.named[Role.EXPERTS]
        # The use of every axis, which these tell, allows each of the others what it may be.
        leading = (*roles.named[Role.DATA][:1], *roles.named[Role.INNER])
        others = (*roles.named[Role.DATA][1:], *roles.named[Role.SEQUENCE])
        core = [n for n in splits if n not in others]
        apart = [*leading, *(experts if self.experts_where_stored or self.experts_without else ())]
        first = {False: [n for n in core if n in (*leading, *experts)], True: [n for n in core if n in apart]}
        table = {n: first[n in stored] for n in (*splits, *stored) if n in stored or n in others}
        rows, beside = set[tuple[Choice, ...]](), {name: set[tuple[Choice, ...]]() for name in table}
        for use in self._uses(axes):
            more = [*itertools.product(*(self._further(d, roles, use.tensor) for d in further.values()))]
            stages = {name: self._stored(every, name, use, axes) for name in stored}
            for own in self._experts(splits, roles, use):
                options: dict[str, list[Choice]] = self._options(splits, roles, use, own)
                picked = [*self._picked({n: options[n] for n in core}, roles, use.tensor)]
                if not all(options[n] for n in splits if n in others):
                    continue
                rows.update((*p, *m) for p in picked for m in more)
                options |= {n: [c for c in each if self._holds(own, c, use)] for n, each in stages.items()}
                for name, leaders in table.items():
                    firsts = {tuple(c for n, c in zip(core, p, strict=True) if n in leaders) for p in picked}
                    beside[name].update((*first, c) for first in firsts for c in options[name])
        yield Coupling((*core, *further), frozenset(rows))
        for name, leaders in table.items():
            yield Coupling((*leaders, name), frozenset(beside[name]))

    def blocked(self, every: Every, roles: DimRoles, mesh: Mesh) -> str:
        """The axes that can have no use, with what prevents it."""
        found: dict[str, list[str]] = {}
        for axis in _axes(every, mesh):
            found.setdefault(self._useless(every, roles, axis), []).append(f"{axis} ({mesh.size(axis)})")
        return "; ".join(f"{', '.join(axes)}: {why}" for why, axes in found.items() if why)

    def _useless(self, every: Every, roles: DimRoles, axis: str) -> str:
        splits = {n: d.options for n, d in every.items() if type(d) is Split}
        may = {n for n, options in splits.items() if any(axis in o for o in options)}
        fixed = next((n for n, options in splits.items() if options and all(axis in o for o in options)), "")
        batch, sequence = roles.named[Role.DATA], roles.named[Role.SEQUENCE] if self.sequence else ()
        weights = [own for own in roles.weights if not own & {*roles.named[Role.EXPERTS]}]
        held = min((sorted(own) for own in weights if not own & may), key=len, default=[])
        tensor = not fixed or fixed in roles.names(Role.INNER, Role.OUTER)
        usable = {*batch[:1], *sequence} if not fixed else {*batch, *sequence} & {fixed}
        if (may & usable and not (fixed in batch and batch[0] not in may)) or (
            tensor and weights and not held
        ):
            return ""
        lost = ", ".join(f"{n} cannot: {roles.whole.get(n, 'no option is left')}" for n in held)
        lost = f"a dimension of each weight of layers ({lost})" if lost else "weights of layers"
        if fixed:
            return f"this axis splits {fixed}, so it has to split {lost if tensor else batch[0]}"
        shared = (*batch, "a batch (no dimension is the first of every input)")[0]
        return f"no axis of this size can split {shared} or {lost}"

    def _experts(self, splits: Every, roles: DimRoles, use: Use) -> list[Axes]:
        names = [n for n in roles.named[Role.EXPERTS] if n in splits]
        every = dict.fromkeys(o for n in names for o in splits[n].options) or {(): None}
        if self.experts_on_data:
            return [o for o in every if {*o} <= {*use.data}]
        if self.whole_expert_groups:
            return [o for o in every if not o or {*use.tensor} <= {*o} <= {*use.tensor, *use.data}]
        return [o for o in every if self.experts_apart or {*o} in ({*()}, {*use.data}, {*use.tensor})]

    def _holds(self, experts: Axes, stored: Choice, use: Use) -> bool:
        """True if storage splits the weights over the data axes of the experts."""
        on_data = {*experts} & {*use.data}
        if on_data and {*stored} & {*self.experts_without}:
            return False
        return not (self.experts_where_stored and on_data) or (
            bool(stored) and on_data <= {*(stored[1:] or use.data)}
        )

    def _uses(self, axes: Axes) -> Iterator[Use]:
        return (use for use in _uses(axes) if self.sequence or not use.context)

    def _options(self, splits: Every, roles: DimRoles, use: Use, experts: Axes) -> dict[str, list[Choice]]:
        """The choices of each dimension under one use of the axes; none of the batch, or of the sequence, if
        it cannot have its axes."""
        own = {role: [n for n in roles.named[role] if n in splits] for role in Role}
        sequence = [n for n in own[Role.SEQUENCE] if _having(splits[n], use.context)]
        if (use.data and not own[Role.DATA]) or (use.context and not sequence):
            return dict.fromkeys(splits, NONE)
        found: dict[str, list[Choice]] = {name: [()] for name in splits}
        rest = tuple(a for a in use.data if a not in experts)
        found |= {n: [*_having(splits[n], rest), ()] for n in own[Role.DATA]}
        found |= {n: _having(splits[n], use.data) for n in own[Role.DATA][:1]}
        found |= {n: [*_having(splits[n], use.context), ()] for n in sequence}
        found |= {n: _having(splits[n], use.context) for n in sequence[:1]}
        found |= {n: _having(splits[n], use.tensor) or [()] for n in own[Role.OUTER]}
        found |= {n: [o for o in splits[n].options if {*o} <= {*use.tensor}] for n in own[Role.INNER]}
        if self.whole_expert_groups and experts:
            beside = {n for names in roles.weights if names & {*own[Role.EXPERTS]} for n in names}
            found |= {n: WHOLE for n in own[Role.INNER] if n in beside}
        if self.whole_experts:
            mixed = {*roles.named[Role.EXPERTS]}
            dense = {n for names in roles.weights if not names & mixed for n in names}
            found |= {n: [()] for n in own[Role.INNER] if n not in dense}
        return found | {n: _having(splits[n], experts) for n in own[Role.EXPERTS]}

    def _picked(
        self, options: Mapping[str, list[Choice]], roles: DimRoles, tensor: Axes
    ) -> Iterator[tuple[Choice, ...]]:
        """Combinations in which weights have the tensor axes."""
        experts = {*roles.named[Role.EXPERTS]}
        weights = [{*names} for names in roles.weights if not names & experts]
        if self.copies:
            weights = [own for own in weights if not any(own < other for other in weights)]
        if tensor and not weights:
            return
        picked: list[tuple[Choice, ...]] = [()]
        names = [*options]
        for i, name in enumerate(names):
            picked = [(*before, choice) for before in picked for choice in options[name]]
            # What is wrong with some choices is so with all that has them.
            for own in (own for own in weights if name in own):
                known = [k for k, n in enumerate(names[: i + 1]) if n in own]
                done = own.isdisjoint(names[i + 1 :])
                picked = [p for p in picked if _divides([a for k in known for a in p[k]], tensor, done)]
        yield from picked

    def _stored(self, every: Every, name: str, use: Use, axes: Axes) -> list[Choice]:
        """The stages over all ranks with the same weights; of hybrid sharding, over the near ones of them."""
        decision, own = every[name], self.in_stages
        assert isinstance(decision, Storage)
        staged = any(isinstance(d, StageSplit) and d.options[0] for d in every.values())
        ranks = (*use.data, *use.context) if self.stored_over_context else use.data
        over = tuple(a for a in axes if a in ranks)
        near = tuple(a for a in decision.near if a in over)
        near = near if not self.stored_over_context or {*use.context} <= {*near} else ()
        found: dict[Choice, None] = {choice: None for choice in decision.options if not choice}
        stages = dict.fromkeys(choice[0] for choice in decision.options if choice)
        for stage in (s for s in stages if not own or (s == own) == staged):
            for some in filter(None, (over, near if stage in self.hybrid else ())):
                found[stage, *(some if len(some) < len(axes) else ())] = None
        return [*found]

    @staticmethod
    def _further(decision: Elsewhere, roles: DimRoles, tensor: Axes) -> list[Choice]:
        """What may be split further elsewhere: the sequence, over the tensor axes."""
        own = _having(decision, tensor) if tensor and decision.dim in roles.named[Role.SEQUENCE] else []
        return [(), *own]


@dataclass(frozen=True)
class EvenSequence(DecisionRelation):
    """Each of the ranks that share a sequence has a multiple of some tokens."""

    multiple: int

    def couplings(self, every: Every, roles: DimRoles, mesh: Mesh) -> Iterator[Coupling]:
        only = Only(lambda of, choice: self.fits(roles.lengths.get(of.name, ()), mesh, choice))
        yield from only.couplings(every, roles, mesh)

    def fits(self, lengths: Iterable[int], mesh: Mesh, over: Axes) -> bool:
        """True if sequences of some lengths can be split over axes."""
        return all((n := mesh.group_size(over)) == 1 or size % (n * self.multiple) == 0 for size in lengths)


def _divides(used: list[str], tensor: Axes, done: bool) -> bool:
    """True if a weight has each of some axes once, or may once all of its dimensions are known."""
    return len({*used}) == len(used) and {*used} <= {*tensor} and (not done or len(used) == len(tensor))


def _axes(every: Every, mesh: Mesh) -> Axes:
    """The axes that can split something: neither those of stages nor those of replicas."""
    taken = {a for d in every.values() if isinstance(d, StageSplit) for a in d.options[0]}
    taken |= {a for d in every.values() if isinstance(d, Rarely) for a in d.options[0]}
    return tuple(a for a, size in mesh.axes if size > 1 and a not in taken)


def _uses(axes: Axes) -> Iterator[Use]:
    """Each axis for the data, the weights or the sequence."""
    for uses in itertools.product(range(len(Use._fields)), repeat=len(axes)):
        each = tuple(zip(axes, uses, strict=True))
        yield Use(*(tuple(a for a, use in each if use == i) for i in range(len(Use._fields))))


def _having(decision: Decision | None, axes: Axes) -> list[Choice]:
    """The options over just these axes, in any order."""
    options = ((),) if decision is None else decision.options
    return [o for o in options if {*o} == {*axes}]
