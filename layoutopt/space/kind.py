"""The base of kinds of decisions: a kind defines its options, the operations that they affect, the meaning of
a choice, and how it is read back, written and parsed.

A kind is a class in a module of its own, named in `layoutopt.space.decisions.KINDS`; the search depends only
on this interface. Its decisions are those instances of it that `about` finds in a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from costmodels.hardware import Hardware
from costmodels.pricing.compilers import compiler_of
from layoutopt.space.argument import Option, Space
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Policies, policies
from mesh_tf_core.lower.rematerialization import recomputable
from mesh_tf_core.lower.storage import ONCE, STAGES
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.graph import Graph

Choice = tuple[str, ...]
"""An option in words; `()` is the plain one where a kind has one."""
HYBRID = "hybrid"
"""Among the stages that are allowed: the last one over the axes inside a node or a slice alone (HSDP), on
meshes that have others too."""
STORED = (*(stage for stage in STAGES if stage != ONCE), HYBRID)
"""The stages that are allowed by default."""
ALL, CLASS, VARIABLE = "all", "class", "variable"
"""Granularities: one decision for everything of a kind, for each class of variables, for each variable."""
UNEQUAL = "unequal shards"
"""Feature that left-out choices would need, in words (`Storage`, `Split`)."""
OFFLOADING = "offloading"
"""The label of kinds that keep something in the hosts' memory."""
ALWAYS, NEVER = "always", "never"
"""Words of --recompute, for all loops."""
GATHER = "gather"
"""Attention to keys that lie split, if nothing else is chosen."""
FROZEN = "not trained"
"""Word for the class of a variable that is not trained, beside its dimensions."""
EVERY_VARIABLE = "all variables"
"""The name of the group of all variables."""
MIXED: Choice = ("mixed",)
"""The option that a layout has taken where it differs within a group: none that a decision offers."""
Words = tuple[str, str]
PLAIN: Words = ("", "")
"""The words of a decision that is plain."""


@dataclass(frozen=True)
class Typed:
    """The options of one layout of a model, as they were typed.

    Attributes:
      texts: of every option (`Decision.by_hand`), those that were given.
    """

    model: Model
    texts: Mapping[str, Sequence[str]]

    @property
    def recomputed(self) -> Policies:
        """The recomputed loops; by default, those of a JAX program (jax.checkpoint).

        Raises:
          UserError: `NEVER` together with others.
        """
        own = getattr(getattr(self.model, "origin", None), "recomputed", ())
        texts = self.texts.get("--recompute") or None
        if texts and NEVER in texts and {*texts} != {NEVER}:
            others = ", ".join(text for text in texts if text != NEVER)
            raise UserError(f"--recompute {NEVER} and --recompute {others}: remove one of them")
        found: list[str] = []
        for text in sorted(own) if texts is None else texts:
            word, colon, keep = text.partition(":")
            every = recomputable(self.model.step_graph) if word == ALWAYS else [word] * (text != NEVER)
            found += [f"{loop}{colon}{keep}" for loop in every]
        return policies(found)


@dataclass(frozen=True)
class Beyond:
    """A decision that another library may not be able to express.

    Attributes:
      field: of `SearchSpace`; `value`: the element of it that the decision needs, None for any.
      words: in a sentence: "that ...".
      instead: a search whose plan the library can express.
    """

    field: str
    value: Any
    words: str
    instead: str


def about_each(option: str, texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Reads the texts of an option that may be given again: subject -> its text and its value.

    Values for everything ('') come first; values for names override them, in any order.

    Raises:
      UserError: two values for the same.
    """
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        about, _, value = text.rpartition("=")
        before = found.setdefault(about, (text, value))
        if before[1] != value:
            which = f"both apply to {about!r}" if about else "both apply to everything that is not named"
            raise UserError(f"{option} {before[0]} and {option} {text} {which}; remove one of them")
    return dict(sorted(found.items(), key=lambda item: item[0] != ""))


@dataclass
class Chosen:
    """A layout and options to which choices are applied.

    Attributes:
      options: fields of `Options`, those that are not plain.
    """

    splits: dict[str, Axes] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def done(self) -> tuple[Layout, Options]:
        """The layout with the choices applied."""
        return Layout(self.splits), Options(**self.options)


@dataclass(frozen=True)
class Affects:
    """The parts of an operation that decisions may affect.

    Attributes:
      recomputed: names of the loops whose recomputation repeats it, or changes its saved values.
      variables: trained variables that it updates, or whose gradient it computes.
      keys: the dimension of keys that it attends to.
      updated: the trained variable that it updates.
      read: the trained variable that it brings to those who read it.
      products: dimensions of the product that it is, or whose renamed result it reads.
      granularity: field of `SearchSpace` -> granularity of its decisions; `CLASS` where it is missing.
    """

    recomputed: Sequence[str] = ()
    variables: Sequence[Variable] = ()
    keys: Sequence[str] = ()
    updated: Sequence[Variable] = ()
    read: Sequence[Variable] = ()
    products: Collection[str] = ()
    granularity: Mapping[str, str] = field(default_factory=dict)

    def named(self, kind: type[Decision], variables: Sequence[Variable]) -> list[str]:
        """The names of a kind's decisions about some variables."""
        granularity = self.granularity.get(kind.granular, CLASS)
        return [kind.prefix + group_of(v, granularity) for v in variables]


@dataclass(frozen=True)
class PlanField:
    """A field of `layoutopt.plan.decided.Decided`, so of plan files and results.

    Attributes:
      type: there; `plain`: the value of a plain decision, or what makes it.
      written: the value there of the field of `Options` with the same name; None: there is no such field.
      parsed: the value of `Options` again.
    """

    name: str
    type: Any
    plain: Any
    written: Callable[[Any], Any] | None = None
    parsed: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Feature:
    """Some options of a kind under their usual name, which a search may forbid.

    Attributes:
      field: of `SearchSpace`: a list of choices.
      means: whether an element of that list allows it.
      uses: True if a layout and options use it, as far as they determine this; None: if the field of that
        name of `Options` is not empty.
    """

    name: str
    field: str
    means: Callable[[Any], bool] = lambda value: True
    uses: Callable[[Layout, Options], bool] | None = None

    def used(self, layout: Layout, options: Options) -> bool:
        """True if a layout and options use it."""
        return bool(getattr(options, self.field)) if self.uses is None else self.uses(layout, options)


@dataclass(frozen=True)
class Target:
    """The model, the mesh and the hardware of a search.

    Attributes:
      hosts: the hosts' memory may be used: the hardware has a link to it.
      stage_programs: each stage of a pipeline is a program of its own.
    """

    model: Model
    mesh: Mesh
    hosts: bool = True
    stage_programs: bool = False

    @classmethod
    def on(cls, hardware: Hardware, model: Model, mesh: Mesh) -> Target:
        """The model on a mesh of some hardware."""
        return cls(model, mesh, hardware.hosts_apart, compiler_of(hardware).memory.stage_programs)

    @property
    def axes(self) -> Axes:
        """The axes that can split something."""
        return tuple(axis for axis, size in self.mesh.axes if size > 1)


@dataclass(frozen=True)
class LeftOut:
    """Choices that `layoutopt.cost` predicts and a search does not consider: its proof does not cover them.

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
    """One decision.

    Attributes:
      subject: its subject.
      options: its options, the plain option first.
      prefix: of the names of this kind's decisions.
      label: names the kind in sentences.
      features: the parts of it that users may forbid.
      asks: its fields of `SearchSpace` by name, each made by `argument`.
      says: its field of plan files.
      always: plan files have this field where it is plain too.
      by_hand: the option of commands that take one layout.
      word: its name in plans; "": plans do not mention it.
      place: position of its words among those of others.
      least: which of its options holds least.
      needs: a field of `SearchSpace` without which its own mean nothing.
      granular: the field of `SearchSpace` whose granularity its decisions about variables have.
      beside: its options decide where values are between their uses, and what runs again, and take nothing
        from the first run of a layer (`layoutopt.optimize.proof.layer_bounds`).
    """

    subject: str
    options: tuple[Choice, ...]
    prefix: ClassVar[str] = ""
    label: ClassVar[str] = ""
    features: ClassVar[tuple[Feature, ...]] = ()
    asks: ClassVar[Mapping[str, Any]] = {}
    says: ClassVar[PlanField | None] = None
    always: ClassVar[bool] = False
    by_hand: ClassVar[Option | None] = None
    word: ClassVar[str] = ""
    place: ClassVar[int] = 99
    least: ClassVar[int] = -1
    needs: ClassVar[str] = ""
    granular: ClassVar[str] = ""
    beside: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Its name in problems: no other decision has it."""
        return self.prefix + self.subject

    @property
    def least_memory(self) -> Choice:
        """The option with which a device holds least."""
        return self.options[self.least]

    @classmethod  # noqa: B027  (a kind may have nothing to refuse)
    def check(cls, allowed: Space) -> None:
        """Raises UserError if a value is invalid for this kind, whatever the model."""

    @classmethod
    @abstractmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        """Its fields of `Space`, each with all that a search can choose there; () where that is nothing."""

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        """The part of `everything` that `--allow everything` means."""
        return cls.everything(target)

    @classmethod
    def useless(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `Space` that mean nothing beside what else is chosen, as they are by default."""
        if not cls.needs or chosen.get(cls.needs):
            return {}
        return {name: each.default for name, each in cls.asks.items() if name in chosen}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        """The choices of `everything` that are not allowed. A kind whose choices no search can cover
        completely adds them here."""
        yield from not_allowed(cls, target, allowed)

    @classmethod
    @abstractmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        """The decisions of this kind about a graph; UserError if the space does not suit it."""

    @abstractmethod
    def apply(self, choice: Choice, to: Chosen) -> None:
        """Takes an option."""

    @abstractmethod
    def read(self, layout: Layout, options: Options) -> Choice:
        """The option that a layout and options have taken."""

    @classmethod
    def changing(cls, touched: Affects) -> list[str]:
        """Names of this kind's decisions that change how an operation is lowered; splits are known."""
        return []

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        """Its fields of `Options`, from the text of its option; UserError."""
        return {}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        """The decision in words, whole and in short; `PLAIN` where it is plain.

        Args:
          said: a `layoutopt.plan.decided.Decided`.
        """
        return PLAIN

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        """The parts that another library must be able to express: by default the whole decision, unless it is
        plain."""
        if words := cls.in_words(said)[0]:
            yield Beyond(cls.word, None, f"the plan decides on {cls.label}: {words}", "search without it")


def group_of(variable: Variable, granularity: str) -> str:
    """The name of the variables that are decided on together with one, and with its copies for replicas: by
    class, those with its dimensions that are trained as it is."""
    if granularity != CLASS:
        return variable.name if granularity == VARIABLE else EVERY_VARIABLE
    names = " ".join(name for name in variable.shape.names if name != REPLICA)
    return names if variable.trainable else f"{names} ({FROZEN})"


def grouped(graph: Graph, granularity: str = CLASS) -> dict[str, list[Variable]]:
    """Name of the group -> its variables; scalars and optimizer state are in none."""
    out: dict[str, list[Variable]] = {}
    for v in graph.variables.values():
        if v.own_storage:
            out.setdefault(group_of(v, granularity), []).append(v)
    return out


def not_allowed(kind: type[Decision], target: Target, allowed: Space) -> Iterator[LeftOut]:
    """The choices of `everything` of a kind that are not allowed."""
    for name, widest in kind.everything(target).items():
        yield from missing(kind.label, name, allowed.said(name), widest)


def missing(label: str, field: str, allowed: Any, widest: Any) -> Iterator[LeftOut]:
    """The values of a field of `Space` that are not allowed; `label`: name of the kind."""
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
