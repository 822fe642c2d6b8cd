"""Restrictions: what may be decided, and together with what.

A restriction states
  - the values of each field of the search space that may be searched, so also the kinds of decision,
  - relations over named decisions ("heads, d_ff and vocab over the same axes"), which are combinations of
    their options and cost nothing in the integer program,
  - granularity: one decision for all variables, for each class of them, or for each variable. "All variables
    alike" is granularity, not a relation: the integer program gets smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from layoutopt.space.argument import ARGUMENT, Argument, Space
from layoutopt.space.kind import ALL, Choice, Decision
from layoutopt.space.parallelism import parallelism
from layoutopt.space.storage import Storage
from mesh_tf_core.errors import InfeasibleError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

S = TypeVar("S", bound=Space)
OptionsByName = Mapping[str, tuple[Choice, ...]]
ANY = None
"""All values of a field."""


class Role(StrEnum):
    """Dimensions by the parallelism that splitting them gives (`layoutopt.space.parallelism`)."""

    DATA = "data"
    SEQUENCE = "sequence"
    INNER = "inner"
    """Dimensions of weights inside layers, such as heads and d_ff."""
    OUTER = "outer"
    """Dimensions of weights outside layers alone, such as vocab."""
    EXPERTS = "experts"


@dataclass(frozen=True)
class DimRoles:
    """The dimensions of a model by role.

    Attributes:
      named: role -> its dimensions.
      weights: of each trained variable, its dimensions of the roles `INNER` and `EXPERTS`.
      sizes: of each variable that is stored, the sizes of the dimensions that storage may split.
      whole: dimension -> why it cannot be split at all.
      lengths: of each dimension of inputs that is a sequence, its sizes.
    """

    named: Mapping[Role, tuple[str, ...]]
    weights: frozenset[frozenset[str]] = frozenset()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, Set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model) -> DimRoles:
        """Those of a model."""
        own, graph = parallelism(model), model.step_graph
        stored = [v for v in graph.variables.values() if v.own_storage]
        variables = [v for v in stored if v.trainable]
        layers = {n for v in variables if v.stacked for n in v.shape.names}
        inner = tuple(n for n in own.inner if n not in own.experts)
        outer = tuple(n for n in own.weights if n not in {*layers, *inner, *own.experts})
        named = {
            Role.DATA: own.data,
            Role.SEQUENCE: own.sequence,
            Role.INNER: inner,
            Role.OUTER: outer,
            Role.EXPERTS: own.experts,
        }
        weights = ({*v.shape.names} & {*inner, *own.experts} for v in variables)
        sizes = {v.name: v.shape.sizes[v.stacked :] for v in stored}
        given = {n for t in graph.inputs.values() for n in t.shape.names} & {*own.sequence}
        lengths = {name: found for name, found in graph.dims().items() if name in given}
        held = frozenset(frozenset(names) for names in weights if names)
        return cls(named, held, sizes, graph.unsplit, lengths)

    def names(self, *of: str) -> tuple[str, ...]:
        """The dimensions of roles, and those that are named."""
        found = ((self.named[each] if isinstance(each, Role) else (each,)) for each in of)
        return tuple(dict.fromkeys(name for names in found for name in names))


NO_ROLES = DimRoles(dict.fromkeys(Role, ()))


class RestrictionError(InfeasibleError):
    """No combination of options in one subproblem agrees with a restriction."""


@dataclass(frozen=True)
class Coupling:
    """A relation over the decisions of one subproblem: the combinations of their options that it allows."""

    names: tuple[str, ...]
    rows: frozenset[tuple[Choice, ...]]

    def within(self, options: OptionsByName) -> Coupling:
        """The rows of some options."""
        own = [{*options[name]} for name in self.names]
        rows = (row for row in self.rows if all(c in found for c, found in zip(row, own, strict=True)))
        return Coupling(self.names, frozenset(rows))

    def options(self) -> dict[str, set[Choice]]:
        """The options that some row has."""
        return dict(zip(self.names, map(set, zip(*self.rows, strict=True)), strict=True))

    def allows(self, chosen: Mapping[str, Choice]) -> bool:
        """True if choices of all decisions agree with a row."""
        return tuple(chosen[name] for name in self.names) in self.rows


class DecisionRelation(ABC):
    """A relation over named decisions, whatever the model and the mesh."""

    def options(
        self, every: Mapping[str, Decision], roles: DimRoles, mesh: Mesh
    ) -> dict[str, tuple[Choice, ...]]:
        """Other options of decisions, before any are coupled."""
        return {}

    @abstractmethod
    def couplings(self, every: Mapping[str, Decision], roles: DimRoles, mesh: Mesh) -> Iterator[Coupling]:
        """The combinations that it allows in one subproblem."""

    def blocked(self, every: Mapping[str, Decision], roles: DimRoles, mesh: Mesh) -> str:
        """Why it may allow none: what is in its way, for messages; "": nothing that it knows."""
        return ""


@dataclass(frozen=True)
class Together(DecisionRelation):
    """One choice for several decisions: each has it, or where it is none of its options, the plain one.

    Attributes:
      about: names of decisions, or roles.
      strictly: all have it.
    """

    about: tuple[str, ...]
    strictly: bool = False

    def couplings(self, every: Mapping[str, Decision], roles: DimRoles, mesh: Mesh) -> Iterator[Coupling]:
        names = tuple(name for name in roles.names(*self.about) if name in every)
        options = [every[name].options for name in names]
        rows = set()
        for choice in dict.fromkeys(c for found in options for c in found):
            row = tuple(choice if choice in found else () for found in options)
            if all(c in found for c, found in zip(row, options, strict=True)):
                rows.add(row if not self.strictly or len({*row}) == 1 else None)
        if names:
            yield Coupling(names, frozenset(row for row in rows if row is not None))


@dataclass(frozen=True)
class Only(DecisionRelation):
    """The options of single decisions that pass a test.

    Attributes:
      passes: of a decision and one of its options.
    """

    passes: Callable[[Decision, Choice], bool]

    def couplings(self, every: Mapping[str, Decision], roles: DimRoles, mesh: Mesh) -> Iterator[Coupling]:
        for name, decision in every.items():
            kept = frozenset((c,) for c in decision.options if self.passes(decision, c))
            if len(kept) < len(decision.options):
                yield Coupling((name,), kept)


@dataclass(frozen=True)
class Even(DecisionRelation):
    """Storage in shards of equal size: each variable has a dimension that all devices divide."""

    def couplings(self, every: Mapping[str, Decision], roles: DimRoles, mesh: Mesh) -> Iterator[Coupling]:
        def even(decision: Decision, choice: Choice) -> bool:
            stored = decision.stored(choice) if isinstance(decision, Storage) else ()
            return all(any(size % mesh.devices == 0 for size in roles.sizes[name]) for name in stored)

        yield from Only(even).couplings(every, roles, mesh)


@dataclass(frozen=True)
class Restriction:
    """Limits of what a search may decide.

    Attributes:
      name: of who restricts it, in messages.
      says: field of `SearchSpace` -> the values that may be searched, `ANY` for all; of fields without an
        entry, the plain value alone. None: everything.
      granularity: field of `SearchSpace` -> `kind.ALL`, `CLASS` or `VARIABLE`; by default, classes.
      roles: those of the model (`of`).
      applied: front end -> the limits of models of it, whose plans are applied to the user's program.
      reasons: field of `SearchSpace` -> why it has no other values.
      versions: version of the framework -> the limits of it, where they are others.
    """

    name: str = ""
    says: Mapping[str, tuple[Any, ...] | None] | None = None
    relations: tuple[DecisionRelation, ...] = ()
    granularity: Mapping[str, str] = field(default_factory=dict)
    roles: DimRoles | None = None
    applied: Mapping[str, Restriction] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, Restriction] = field(default_factory=dict)

    @property
    def about(self) -> DimRoles:
        """The roles of the model; none if it is about no model."""
        return self.roles or NO_ROLES

    def of(self, model: Model) -> Restriction:
        """The same, about one model."""
        own = self.applied.get(getattr(model, "front_end", ""), self)
        if own is not self:
            found = model.limits.items()  # type: ignore[attr-defined]
            own = replace(
                own,
                says={**(own.says or {}), **{name: values for name, (values, _) in found}},
                reasons={**own.reasons, **{name: why for name, (_, why) in found}},
            )
        return replace(own, roles=DimRoles.of(model)) if own.relations else own

    def expresses(self, name: str, value: Any, argument: Argument | None = None) -> bool:
        """True if a value of a field of `SearchSpace` may be searched, None: if any but the plain one may;
        its `argument` knows that sets that are kept are among "selective"."""
        said = ANY if self.says is None else self.says.get(name, ())
        if said and argument and argument.within:
            return bool(argument.within((value,), said))
        return said is ANY or (bool(said) if value is None else value in said)

    def among(self, space: Space, name: str) -> tuple[Any, ...]:
        """The values of a field of a space that may be searched; where none may, the first that may."""
        value: tuple[Any, ...] = getattr(space, name)
        said = ANY if self.says is None else self.says.get(name, ())
        within = next(f.metadata[ARGUMENT].within for f in fields(space) if f.name == name)
        return value if said is ANY else within(value, said) or said[:1] or value

    def narrowed(self, space: S, usual: S | None = None) -> S:
        """A space without the values that may not be searched.

        Args:
          usual: what a field has that nobody set: values that somebody set are refused if none is left.

        Raises:
          UserError: a field that somebody set has no value left.
        """
        found: dict[str, Any] = {}
        for f in fields(space) if self.says is not None else ():
            value, argument = getattr(space, f.name), f.metadata.get(ARGUMENT)
            said = (self.says or {}).get(f.name, ())
            if argument is None or argument.within is None or value is None or said is ANY:
                continue
            plain = argument.plain(f.default)
            known = plain if isinstance(plain, tuple) and not said else ()
            more = tuple(v for v in (value if isinstance(value, tuple) else (value,)) if v not in known)
            left = argument.within(more, said)
            if more and not left and usual is not None and value != getattr(usual, f.name):
                raise UserError(self._refused(argument, value, said, self.reasons.get(f.name, "")))
            found[f.name] = argument.within(value, (*said, *known)) or plain
        return space.but(**found)

    def _refused(self, argument: Any, value: Any, said: Sequence[Any], why: str) -> str:
        asked = " ".join(f"{option} {text}" for option, text in argument.texts(value).items() if text)
        can = (
            f"it can express {', '.join(argument.text((v,)) or str(v) for v in said)}"
            if said
            else f"remove {argument.options[0].name}"
        )
        why = f"{self.name} cannot express this{': ' if why else ''}{why}"
        return f"{asked}: {why}; {can}, or search with --framework layoutopt"

    def blocked(self, every: Mapping[str, Decision], couplings: Sequence[Coupling], mesh: Mesh) -> str:
        """Why no options of some decisions agree with it."""
        single = {c.names[0]: tuple(o for (o,) in c.rows) for c in couplings if len(c.names) == 1}
        for name in (n for n, left in single.items() if not left):
            return f"it has none of the options of {name}: {', '.join(map(' '.join, every[name].options))}"
        left = {n: replace(d, options=single.get(n, d.options)) for n, d in every.items()}
        why = "; ".join(filter(None, (r.blocked(left, self.about, mesh) for r in self.relations)))
        fixed = (f"{n} {'+'.join(d.options[0]) or 'whole'}" for n, d in left.items() if len(d.options) == 1)
        return why or f"no options agree with {', '.join(fixed)}"

    def couplings(self, every: Mapping[str, Decision], mesh: Mesh) -> Iterator[Coupling]:
        """Its relations over the decisions of one subproblem."""
        roles = self.about
        for relation in self.relations:
            yield from relation.couplings(every, roles, mesh)
        for name, granularity in self.granularity.items():
            kinds = dict.fromkeys(type(d) for d in every.values() if d.granular == name)
            for kind in kinds if granularity == ALL else ():
                alike = tuple(n for n, d in every.items() if type(d) is kind)
                if len(alike) > 1:  # a kind that has no decision about all at once
                    yield from Together(alike, strictly=True).couplings(every, roles, mesh)


EVERYTHING = Restriction()
"""No restriction."""
