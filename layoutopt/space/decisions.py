"""All that is decided for a model on a mesh, whatever its kinds.

Every decision has a name and a finite list of options, each a tuple of words; `()` is the plain one. The
record of each kind (`KINDS`) states its own, for example
  a dimension's name       the mesh axes that it is split over                             `splits`
  "storage of <class>"     (), ("zero1",), ("zero2",), ("zero3",)                          `storage`
  "recompute <dim>"        (), ("on",), ("on", "products"): but for what it keeps        `recompute`
The mesh's own shape (`mesh_shapes`) and the axes of layers (`stages`) are decided outside, by subproblem.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from layoutopt.space.argument import ARGUMENT, Argument, Option, Space, argument, asking
from layoutopt.space.collective_matmul import CollectiveMatmul
from layoutopt.space.context import Context
from layoutopt.space.diloco import Rarely
from layoutopt.space.kind import (
    MIXED,
    Affects,
    Beyond,
    Choice,
    Chosen,
    Decision,
    Feature,
    LeftOut,
    Target,
    Typed,
)
from layoutopt.space.microbatches import Microbatches
from layoutopt.space.offload import OptimizerOffload, Weights
from layoutopt.space.recompute import Recompute
from layoutopt.space.restriction import EVERYTHING, Coupling, Restriction, RestrictionError
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.stages import StageSplit
from layoutopt.space.storage import Storage
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import GPIPE
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Policies, Sets, of_stages
from mesh_tf_core.model import NO_STAGES, NOTHING, Model, TrainingStep
from mesh_tf_core.tracing.diloco import DiLoCo
from mesh_tf_core.tracing.graph import Graph


class HasTrainingStep(Protocol):
    """An object with training steps: a model, or the outer step of replicas."""

    def training_step(
        self,
        microbatches: int = 1,
        stages: Mapping[str, int] = NO_STAGES,
        schedule: str = GPIPE,
        again: Policies = NOTHING,
    ) -> TrainingStep: ...


KINDS: tuple[type[Decision], ...] = (
    Split,
    StageSplit,
    ScheduleDecision,
    Elsewhere,
    Storage,
    OptimizerOffload,
    Weights,
    Recompute,
    Context,
    CollectiveMatmul,
    Microbatches,
    Rarely,
)
"""The kinds of decisions, in the order of their variables in problems."""
FEATURES: dict[str, Feature] = {f.name: f for kind in KINDS for f in kind.features}
"""The features that users may forbid, by name."""
ARGUMENTS: dict[str, Argument] = {
    name: each.metadata[ARGUMENT] for kind in KINDS for name, each in kind.asks.items()
}
"""Name -> argument: the fields of `SearchSpace` that users give."""


@asking(kind.asks for kind in KINDS)
class SearchSpace(Space):
    """The decisions that a search may make: one field for each kind of decision in `KINDS`.

    Give a field as the text of its command-line option or as the parsed value: `storage="layout,zero3"`
    equals `storage=("layout", "zero3")`.

    Attributes:
      allow: names of decisions to allow or forbid (`layoutopt.space.allow`); without any, the usual ones are
        searched first, then everything. A field that is set overrides `allow`.
      restriction: what couples the decisions; not for users.
      stages, again, near: of a subproblem, not for users: dimensions of layers that are stages, each with its
        axes; recomputed parts of stages (`mesh_tf_core.lower.remat_policy.of_stages`); the axes of `HYBRID`
        storage, none if all links are equal.

    Raises:
      UserError: a value is invalid.

    Example:
      >>> import layoutopt
      >>> layoutopt.SearchSpace(storage="layout,zero3").storage
      ('layout', 'zero3')
    """

    allow: tuple[str, ...] = argument(
        (),
        Option(
            "--allow",
            "WORDS",
            "Kinds of decision to search: usual, everything, or changes to usual, e.g. "
            "+pipeline,-context (repeatable). By default the search proves the best usual layout, then "
            "searches everything for --time-limit, else 60 s. A wrong name lists all names. More "
            "specific options override --allow.",
            several=True,
        ),
        within=None,
    )
    restriction: Restriction = EVERYTHING
    stages: Mapping[str, Axes] = field(default_factory=dict)
    again: Policies = NOTHING
    near: Axes = ()

    @property
    def apart(self) -> Axes:
        """Mesh axes that nothing is split over: replicas lie along them."""
        return () if self.diloco is None else (self.diloco.axis,)

    @property
    def named(self) -> Axes:
        """The mesh axes that pins and prohibitions name."""
        return tuple(dict.fromkeys(itertools.chain(*self.pins.values(), *self.forbid.values())))

    @property
    def keywords(self) -> dict[str, Any]:
        """The space as keywords of `layoutopt.search`."""
        words = {"allow": self.allow} if self.allow else {}
        return {**{name: getattr(self, name) for name in ARGUMENTS}, **words, "given": self.given}

    def settled(self, objective: str) -> SearchSpace:
        """A copy in which fields that are None have the usual value for an objective."""
        unsaid = {name: a.usual for name, a in ARGUMENTS.items() if getattr(self, name) is None}
        return self.but(**{name: usual(objective) for name, usual in unsaid.items() if usual is not None})


ALLOW: Argument = SearchSpace.__dataclass_fields__["allow"].metadata[ARGUMENT]
"""Words for all arguments (`layoutopt.space.allow`)."""
BY_HAND = [kind.by_hand for kind in sorted(KINDS, key=lambda kind: kind.place) if kind.by_hand is not None]
"""The options of commands that take one layout."""


def typed(model: Model, texts: Mapping[str, Sequence[str]]) -> Options:
    """Reads the options of `BY_HAND` as options of a model's program.

    A stage without a variable is for all of which it splits something, weights on hosts are all. A form of
    attention without a dimension is for all keys.

    Raises:
      UserError: a text that means nothing to this model.
    """
    about, found = Typed(model, texts), dict[str, Any]()
    for kind in KINDS:
        if kind.by_hand is not None:
            found |= kind.typed(texts.get(kind.by_hand.name, ()), about)
    return Options(**found)


ANYTHING = SearchSpace(microbatches=(1,))
"""The space of one subproblem where nothing is given."""


@dataclass(frozen=True)
class Structure:
    """The structure of a step that decisions imply before any option is chosen: its graph, and which
    operations must be lowered together. Problems that agree here share clusters and all that is known of
    them.

    Attributes:
      stages: dimensions of layers -> number of pipeline stages, in `schedule`.
      again: parts of them that are recomputed (`mesh_tf_core.lower.remat_policy.of_stages`).
      further: dimensions that may be split further elsewhere.
      keeps: values that recomputed loops may keep (`remat_policy.Recomputed`).
      products: dimensions; messages may overlap products with one of them in chunks.
      granularity: that of kinds of decisions, where it is not by class (`Affects.granularity`).
    """

    microbatches: int = 1
    stages: tuple[tuple[str, int], ...] = ()
    schedule: str = GPIPE
    again: Policies = NOTHING
    further: frozenset[str] = frozenset()
    keeps: Sets = ()
    products: frozenset[str] = frozenset()
    granularity: tuple[tuple[str, str], ...] = ()

    def step_of(self, model: HasTrainingStep) -> TrainingStep:
        """The step of a model."""
        return model.training_step(self.microbatches, dict(self.stages), self.schedule, self.again)


@dataclass(frozen=True)
class Decisions:
    """All decisions of one subproblem.

    Attributes:
      couplings: combinations of options that a restriction allows.
      granularity: see `Structure`.
    """

    every: tuple[Decision, ...]
    couplings: tuple[Coupling, ...] = ()
    granularity: tuple[tuple[str, str], ...] = ()

    @cached_property
    def named(self) -> dict[str, Decision]:
        """Name -> decision."""
        return {d.name: d for d in self.every}

    @cached_property
    def options(self) -> dict[str, tuple[Choice, ...]]:
        """Name -> options, the plain option first."""
        return {d.name: d.options for d in self.every}

    @cached_property
    def fixed(self) -> dict[str, Choice]:
        """Decisions with one option that is not the plain one."""
        return {n: o[0] for n, o in self.options.items() if len(o) == 1 and o[0]}

    @cached_property
    def free(self) -> tuple[str, ...]:
        """Decisions with more than one option."""
        return tuple(n for n, o in self.options.items() if len(o) > 1)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches of this subproblem."""
        return self.read({})[1].microbatches

    @cached_property
    def schedule(self) -> str:
        """The schedule of the stages of this subproblem."""
        return self.read({})[1].schedule

    @cached_property
    def again(self) -> Policies:
        """The recomputed part of the stages of this subproblem."""
        return of_stages(self.read({})[1].recompute, self.stages)

    @cached_property
    def stages(self) -> dict[str, Axes]:
        """Dimensions of layers that are stages in this subproblem, with their axes."""
        return {d.subject: d.options[0] for d in self.every if isinstance(d, StageSplit)}

    @cached_property
    def diloco(self) -> DiLoCo | None:
        """The synchronisation of replicas in this subproblem, if it has any."""
        return next((d.diloco for d in self.every if isinstance(d, Rarely)), None)

    def structure(self, mesh: Mesh) -> Structure:
        """The structure of a step under these decisions; the same for fewer options."""
        return Structure(
            self.microbatches,
            tuple((dim, mesh.group_size(axes)) for dim, axes in self.stages.items()),
            self.schedule,
            self.again,
            frozenset(d.dim for d in self.every if isinstance(d, Elsewhere)),
            tuple(dict.fromkeys(keep for d in self.every if isinstance(d, Recompute) for keep in d.kept)),
            frozenset(d.subject for d in self.every if isinstance(d, CollectiveMatmul)),
            self.granularity,
        )

    def of(self, kind: type[Decision]) -> tuple[str, ...]:
        """Names of the decisions of one kind."""
        return tuple(d.name for d in self.every if isinstance(d, kind))

    def within(self, options: Mapping[str, Iterable[Choice]]) -> Decisions:
        """With other options for the decisions that are named."""
        every = tuple(replace(d, options=tuple(options.get(d.name, d.options))) for d in self.every)
        return replace(self, every=every)

    def under(self, restriction: Restriction, mesh: Mesh) -> Decisions:
        """With the couplings of a restriction, and without options that no row of theirs has.

        Raises:
          RestrictionError: nothing is left.
        """
        found = self
        for relation in restriction.relations:
            found = found.within(relation.options(found.named, restriction.about, mesh))
        couplings = tuple(restriction.couplings(found.named, mesh))
        agreed = replace(found, couplings=couplings).agreeing()
        if agreed is None:
            who = restriction.name or "the restriction"
            said = restriction.blocked(found.named, couplings, mesh)
            raise RestrictionError(
                f"{who} can express no layout on {mesh}: {said}; use another mesh, or other pins"
            )
        return agreed

    def agreeing(self) -> Decisions | None:
        """Without options that agree with no row of a coupling; None if a decision or coupling gets empty."""
        found = self
        while found.couplings:
            couplings = tuple(each.within(found.options) for each in found.couplings)
            if not all(each.rows for each in couplings):
                return None
            left = found.options
            for own in (each.options() for each in couplings):
                left = {n: tuple(o for o in left[n] if n not in own or o in own[n]) for n in left}
            if not all(left.values()):
                return None
            if left == found.options:
                return replace(found, couplings=tuple(c for c in couplings if len(c.names) > 1))
            found = replace(found.within(left), couplings=couplings)
        return found

    def read(self, chosen: Mapping[str, Choice]) -> tuple[Layout, Options]:
        """The layout and options of some choices; decisions without one have their only or plain option."""
        found = Chosen()
        for name, choice in {**self.fixed, **chosen}.items():
            if choice != MIXED:
                self.named[name].apply(choice, found)
        return found.done()

    def write(self, layout: Layout, options: Options) -> dict[str, Choice]:
        """The choices that mean a layout and options."""
        return {d.name: d.read(layout, options) for d in self.every}

    def agrees(self, layout: Layout) -> bool:
        """True if a layout with the options that hold least agrees with a restriction."""
        wanted = self.write(layout, self.least_memory) if self.couplings else {}
        return all(each.allows(wanted) for each in self.couplings)

    def allows(self, layout: Layout, options: Options) -> bool:
        """True if a layout and options are among what may be chosen."""
        wanted = self.write(layout, options)
        legal = all(wanted[name] in found for name, found in self.options.items())
        legal = legal and all(each.allows(wanted) for each in self.couplings)
        return legal and self.read(wanted) == (layout, options)

    @cached_property
    def least_memory(self) -> Options:
        """The options with which a device holds least, whatever the layout."""
        return self.read({d.name: d.least_memory for d in self.every})[1]


def decisions(graph: Graph, mesh: Mesh, allowed: Space = ANYTHING) -> Decisions:
    """The decisions about a graph on a mesh; UserError if the space does not suit it."""
    restriction: Restriction = allowed.restriction
    every = tuple(d for kind in KINDS for d in kind.about(graph, mesh, allowed))
    found = Decisions(every, granularity=tuple(sorted(restriction.granularity.items())))
    return found if restriction is EVERYTHING else found.under(restriction, mesh)


def left_out(target: Target, allowed: Space) -> list[LeftOut]:
    """The choices that `layoutopt.cost` prices and a search did not cover, in the order of the kinds; of
    those that options allow, those that a restriction leaves."""
    every = (left for kind in KINDS for left in kind.left_out(target, allowed))
    return [left for left in every if _adds(left.allow, allowed)]


def _adds(options: str, allowed: Space) -> bool:
    """True if options, such as "--storage layout,zero1", would add to what is allowed."""
    option, _, text = options.partition(" ")
    name = next((n for n, a in ARGUMENTS.items() if text and a.options[0].name == option), None)
    if name is None or allowed.restriction.says is None:
        return True
    with suppress(UserError):  # a placeholder, such as AXIS, is no value
        more = getattr(allowed.restriction.narrowed(allowed.but(**{name: text})), name)
        return not {*more} <= {*allowed.said(name)} if isinstance(more, tuple) else more is not None
    return allowed.restriction.says.get(name, ()) != ()


def beyond(says: Restriction, said: Any) -> Beyond | None:
    """The first decision of a `layoutopt.plan.decided.Decided` that a restriction excludes."""
    every = (each for kind in KINDS for each in kind.beyond(said))
    return next((e for e in every if not says.expresses(e.field, e.value, ARGUMENTS.get(e.field))), None)


def changing(touched: Affects) -> tuple[str, ...]:
    """Names of the decisions, except splits, that change how an operation is lowered."""
    return tuple(dict.fromkeys(name for kind in KINDS for name in kind.changing(touched)))
