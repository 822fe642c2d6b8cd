"""What every kind of decision says of itself: its options, which operations they change, what a choice means,
how it is read back, written and parsed.

A kind is a class in a module of its own, named in `layoutopt.space.decisions.KINDS`; the search knows no more
of it. Its decisions are those instances of it that `about` finds in a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.model import Model
from mesh_tf_core.ops.ticks import GPIPE
from mesh_tf_core.tracing.diloco import DiLoCo
from mesh_tf_core.tracing.graph import Graph

Choice = tuple[str, ...]
"""An option in words; `()` is the plain one where a kind has one."""
HYBRID = "hybrid"
"""Among the stages that are allowed: the last one over the axes inside a node or a slice alone (HSDP), on
meshes that have others too."""
STORED = (*STAGES, HYBRID)
"""All that is allowed if nothing is said."""
UNEQUAL = "unequal shards"
"""In words of what is left out: what would need them (`Storage`, `Split`)."""
OFFLOADING = "offloading"
"""The label of kinds that keep something in the hosts' memory."""
GATHER = "gather"
"""Attention to keys that lie split, if nothing else is chosen."""
OF_A_PROBLEM = {"of": "a subproblem"}
"""What marks the fields of `Allowed` that nobody asks for."""


@dataclass(frozen=True)
class Allowed:
    """What may be chosen.

    Attributes:
      pins: dimension -> the axes it must be split over (`()`: none).
      forbid: dimension -> axes it may not be split over.
      orders: "mesh": the axes of a split are in the order of the mesh; "all": in every order.
      elsewhere: dimensions that may be split further where mesh axes split nothing else.
      pipeline: dimensions of layers that may lie over mesh axes, as stages of a pipeline.
      stages: those that do, each with its axes.
      schedule: of pipelines (`mesh_tf_core.ops.ticks.SCHEDULES`); of a subproblem with stages, its only one.
      again: what of stages that go backward at once runs again (`mesh_tf_core.lower.kept.of_stages`).
      storage: stages that variables may be stored at, of all axes, or of some ("zero3@data"), or `HYBRID`.
      near: the axes of `HYBRID`; none where all links are alike.
      recompute: whether loops may (both), must or must not run again in backward; "selective": or may
        while they keep some of their values; "keep=attention+wi": these.
      microbatches: numbers of parts of the batch.
      offload: what may lie in the hosts' memory (`mesh_tf_core.lower.offload`).
      diloco: how replicas along an axis meet, where one synchronises rarely.
      context: "gather", and forms of attention in which keys that lie split are not.
      collective_matmul: dimensions; messages may go in chunks beside products that have one.
    """

    pins: Mapping[str, Axes] = field(default_factory=dict)
    forbid: Mapping[str, Axes] = field(default_factory=dict)
    orders: str = "mesh"
    storage: tuple[str, ...] = STORED
    recompute: tuple[bool | str, ...] = (False, True)
    microbatches: tuple[int, ...] = (1,)
    near: Axes = field(default=(), metadata=OF_A_PROBLEM)
    context: tuple[str, ...] = (GATHER,)
    elsewhere: tuple[str, ...] = ()
    pipeline: tuple[str, ...] = ()
    stages: Mapping[str, Axes] = field(default_factory=dict, metadata=OF_A_PROBLEM)
    offload: tuple[str, ...] = ()
    diloco: DiLoCo | None = None
    schedule: tuple[str, ...] = (GPIPE,)
    again: frozenset[str] = field(default=frozenset(), metadata=OF_A_PROBLEM)
    collective_matmul: tuple[str, ...] = ()

    @classmethod
    def asked(cls) -> tuple[str, ...]:
        """The fields that are asked of a search, as its keywords; others are of one subproblem."""
        return tuple(f.name for f in fields(cls) if f.metadata != OF_A_PROBLEM)

    @property
    def keywords(self) -> dict[str, Any]:
        """What was asked, as arguments of `layoutopt.search`."""
        return {name: getattr(self, name) for name in self.asked()}

    @property
    def apart(self) -> Axes:
        """Mesh axes that nothing is split over: replicas lie along them."""
        return () if self.diloco is None else (self.diloco.axis,)


@dataclass
class Chosen:
    """A layout and options under way: choices are applied to it.

    Attributes:
      options: fields of `Options`, those that are not plain.
    """

    splits: dict[str, Axes] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def done(self) -> tuple[Layout, Options]:
        """What the choices mean."""
        return Layout(self.splits), Options(**self.options)


@dataclass(frozen=True)
class Touched:
    """What of an operation decisions may change.

    Attributes:
      recomputed: names of the loops whose recomputation makes it run again, or changes what is saved of it.
      variables: trained variables that it updates, or whose gradient it makes.
      keys: the dimension of keys that it attends to.
      updated: the trained variable that it updates.
      read: the trained variable that it brings to those who read it.
      products: dimensions of the product that it is, or that reads what it renames.
    """

    recomputed: Sequence[str] = ()
    variables: Sequence[Variable] = ()
    keys: Sequence[str] = ()
    updated: Sequence[Variable] = ()
    read: Sequence[Variable] = ()
    products: Collection[str] = ()


@dataclass(frozen=True)
class Feature:
    """Some options of a kind, as the trade calls them: what a search may be forbidden.

    Attributes:
      field: of `Allowed`: a list of what may be chosen.
      means: whether an element of that list allows it.
      used: whether a layout and options have it, as far as they alone say.
    """

    name: str
    field: str
    means: Callable[[Any], bool]
    used: Callable[[Layout, Options], bool]


@dataclass(frozen=True)
class Target:
    """For what a search decides.

    Attributes:
      hosts: something may lie in the hosts' memory: the hardware knows the link to it.
    """

    model: Model
    mesh: Mesh
    hosts: bool = True

    @property
    def axes(self) -> Axes:
        """The axes that can split something."""
        return tuple(axis for axis, size in self.mesh.axes if size > 1)


@dataclass(frozen=True)
class LeftOut:
    """Choices that `layoutopt.cost` prices and a search did not look at: what it proves says nothing of them.

    Attributes:
      kind: the label of their kind.
      what: in words.
      allow: options of `search` that allow them; "": none do.
      finer: the search chose among other choices of this kind.
    """

    kind: str
    what: str
    allow: str = ""
    finer: bool = False


@dataclass(frozen=True)
class Decision(ABC):
    """One thing that is decided.

    Attributes:
      subject: what it is about.
      options: what may be chosen, the plain option first.
      prefix: of the names of this kind's decisions.
      label: what the kind is called.
      features: what of it users may forbid.
    """

    subject: str
    options: tuple[Choice, ...]
    prefix: ClassVar[str] = ""
    label: ClassVar[str] = ""
    features: ClassVar[tuple[Feature, ...]] = ()

    @property
    def name(self) -> str:
        """Its name in problems: no other decision has it."""
        return self.prefix + self.subject

    @property
    def leanest(self) -> Choice:
        """The option with which a device holds least."""
        return self.options[-1]

    @classmethod  # noqa: B027  (a kind may have nothing to refuse)
    def check(cls, allowed: Allowed) -> None:
        """Raises UserError if what is allowed means nothing to this kind, whatever the model."""

    @classmethod
    @abstractmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        """Its fields of `Allowed`, each with all that a search can choose there; () where that is nothing."""

    @classmethod
    def left_out(cls, target: Target, allowed: Allowed) -> Iterator[LeftOut]:
        """What of `everything` is not allowed. A kind of which no search can choose all that `layoutopt.cost`
        prices says that too."""
        yield from not_allowed(cls, target, allowed)

    @classmethod
    @abstractmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Allowed) -> Iterator[Self]:
        """The decisions of this kind about a graph; UserError if what is allowed does not suit it."""

    @abstractmethod
    def apply(self, choice: Choice, to: Chosen) -> None:
        """Takes an option."""

    @abstractmethod
    def read(self, layout: Layout, options: Options) -> Choice:
        """The option that a layout and options have taken."""

    @classmethod
    def changing(cls, touched: Touched) -> list[str]:
        """Names of this kind's decisions that change how an operation is lowered; splits are known."""
        return []

    @classmethod
    def written(cls, options: Options) -> dict[str, Any]:
        """Its fields of `layoutopt.plan.decided.Decided`."""
        return {}

    @classmethod
    def parsed(cls, said: Mapping[str, Any]) -> dict[str, Any]:
        """Its fields of `Options`, from those of `layoutopt.plan.decided.Decided`."""
        return {}


def not_allowed(kind: type[Decision], target: Target, allowed: Allowed) -> Iterator[LeftOut]:
    """What of `everything` of a kind is not allowed."""
    for name, widest in kind.everything(target).items():
        yield from missing(kind.label, name, getattr(allowed, name), widest)


def missing(label: str, field: str, allowed: Any, widest: Any) -> Iterator[LeftOut]:
    """What of all values of a field of `Allowed` is not allowed; `label`: of the kind whose field it is."""
    option = f"--{field.replace('_', '-')}"
    if isinstance(widest, str):
        if allowed != widest:
            yield LeftOut(label, f"{label} with {field} of {widest}", f"{option} {widest}", finer=True)
        return
    values = [value for value in widest if value not in allowed]
    if values:
        every, some = dict.fromkeys((*allowed, *values)), len(values) < len(widest)
        what = f"{label}: {', '.join(map(str, values))}" if some else label
        yield LeftOut(label, what, f"{option} {','.join(map(str, every))}", some)
