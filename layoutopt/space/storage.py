"""The storage of variables: with the splits of the layout, or split further (see
`mesh_tf_core.lower.storage`).

Variables of the same dimensions, trained or not, are one class, and one decision, unless a search decides for
all of them together, or for each (`layoutopt.space.restriction`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument, names
from layoutopt.space.kind import (
    CLASS,
    HYBRID,
    MIXED,
    STORED,
    UNEQUAL,
    Affects,
    Beyond,
    Choice,
    Chosen,
    Decision,
    Feature,
    LeftOut,
    PlanField,
    Target,
    Typed,
    Words,
    about_each,
    grouped,
    not_allowed,
)
from layoutopt.space.undivided import few, first_of, storage_of, stored_at, undivided
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import AT, Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import (
    BACKWARD,
    BETWEEN,
    GRADIENT,
    MOST_SPLIT,
    ONCE,
    SPLIT,
    STAGES,
    VARIABLE,
    Stage,
    StageByVariable,
    read_stage,
    splits,
    splits_some,
)
from mesh_tf_core.tracing.graph import Graph

_SAID = f"{STAGES[0]} (no ZeRO), {', '.join(STAGES[1:])} (ZeRO stages)"


def _named(value: Any) -> tuple[str, ...]:
    return tuple(stage if stage == HYBRID else str(read_stage(stage)) for stage in names(value, "storage"))


def _written(stages: StageByVariable) -> dict[str, str]:
    found = {name: read_stage(said) for name, said in sorted(stages.items())}
    return {name: str(stage) for name, stage in found.items() if stage.number}


def _parsed(said: Mapping[str, str]) -> StageByVariable:
    return {name: read_stage(stage).short for name, stage in said.items()}


@dataclass(frozen=True)
class Storage(Decision):
    """The stage of some variables: (), ("zero1",), ("zero2",), ("zero3",), or with the axes that it is over,
    ("zero3", "data", "pod").

    Attributes:
      frozen: those of them that are not trained.
      late: those outside of stages that are stored together with some inside, whose gradient is not scattered
        as it is made.
      near: the axes of hybrid sharding.
    """

    variables: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    near: Axes = ()
    beside = True
    granular = "storage"
    prefix = "storage of "
    label = "storage (ZeRO)"
    asks: ClassVar[Mapping[str, Any]] = {
        "storage": argument(
            STORED,
            Option(
                "--storage",
                "STAGES",
                f"Storage stages to consider: {_SAID}, hybrid (zero3 inside a node); comma-separated.",
                usual=",".join(STORED),
            ),
            parse=_named,
            within=lambda value, said: tuple(s for s in value if (HYBRID if AT in s else s) in said),
        ),
    }
    says = PlanField("storage", dict[str, str], dict, _written, _parsed)
    always = True
    by_hand = Option(
        "--storage",
        "[VARIABLE=]STAGE",
        f"Storage of variables: {_SAID}, or a stage over some axes only, e.g. zero3@data (repeatable).",
        usual="layout",
        several=True,
    )
    word = "storage"
    place = 1
    features = (
        Feature("zero", "storage", lambda stage: stage != STAGES[0], lambda _, options: bool(_said(options))),
        Feature(
            "hybrid",
            "storage",
            lambda stage: stage == HYBRID or AT in stage,
            lambda _, options: any(stage.over for stage in _said(options)),
        ),
    )

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        stages = (*STAGES, HYBRID) if len(target.axes) > 1 else STAGES
        return {"storage": stages if target.axes and grouped(target.model.graph) else ()}

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        """Not `ONCE`: its tables in stages, and of what is offloaded, do not add up to its price."""
        return {"storage": tuple(s for s in cls.everything(target)["storage"] if s != ONCE)}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        yield from not_allowed(cls, target, allowed)
        graph, over = target.model.step_graph, f"--storage {MOST_SPLIT}@AXIS"
        if len(target.axes) > 1:
            yield LeftOut(cls.label, f"{cls.label} over other axes", over, finer=True)
        if target.axes and any(len(alike) > 1 for alike in grouped(graph).values()):
            yield LeftOut(cls.label, f"{cls.label} of single variables", finer=True)
        if allowed.pipeline:
            late = f"{cls.label} {STAGES[2]} and {STAGES[3]} of variables outside the pipeline stages"
            yield LeftOut(cls.label, late, finer=True)
        split = stored_at(graph.variables.values(), MOST_SPLIT)
        if undivided(storage_of(graph, target.mesh, Layout(), split)):
            yield LeftOut(cls.label, f"{cls.label} in {UNEQUAL}", finer=True)

    @classmethod
    def check(cls, allowed: Space) -> None:
        if not allowed.storage:
            raise UserError(f"storage is empty; name one or more of {', '.join(STAGES)}")
        for stage in (stage for stage in allowed.storage if stage != HYBRID):
            read_stage(stage)

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        near = f"{MOST_SPLIT}{AT}{'+'.join(allowed.near)}" if allowed.near else ""
        found = (near if stage == HYBRID else stage for stage in allowed.storage)
        stages = tuple(dict.fromkeys(_choice(read_stage(stage)) for stage in found if stage)) or ((),)
        for axis in {axis for choice in stages for axis in choice[1:]}:
            mesh.size(axis)
        # The gradient of what is not of a stage is added up in several loops over ticks. Scattered there,
        # from zero2 on, it costs less than tables say: no search chooses that.
        few = tuple(s for s in stages if not splits(stage_of(s).number, GRADIENT, BACKWARD)) or ((),)
        granularity = allowed.restriction.granularity.get(cls.granular, CLASS)
        for name, variables in grouped(graph, granularity).items():
            every = tuple(v.name for v in variables)
            beside = (v.name for v in variables if allowed.stages.keys().isdisjoint(v.shape.names))
            late = frozenset(beside if allowed.stages else ())
            frozen = frozenset(v.name for v in variables if not v.trainable)
            alone = len(late) == len(every)
            own = cls(
                name, few if alone else stages, every, frozen, frozenset() if alone else late, allowed.near
            )
            # Stages that split nothing are one option.
            options = dict.fromkeys(s if own.stored(s) else () for s in own.options)
            yield replace(own, options=tuple(options))

    def stored(self, choice: Choice) -> dict[str, Stage]:
        """The stage of each variable that an option stores split."""
        stage = stage_of(choice)
        deepest = max(n for n in range(stage.number + 1) if not splits(n, GRADIENT, BACKWARD))
        found = {v: stage._replace(number=deepest) if v in self.late else stage for v in self.variables}
        itself = {n for n in range(len(STAGES)) if splits(n, VARIABLE, BETWEEN)}
        return {v: s for v, s in found.items() if s.number in itself or (s.number and v not in self.frozen)}

    @property
    def least_memory(self) -> Choice:
        return max(self.options, key=_holds_less)

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            stages = to.options.setdefault("storage", {})
            stages.update((v, stage.short) for v, stage in self.stored(choice).items())

    def read(self, layout: Layout, options: Options) -> Choice:
        stages = {v: read_stage(options.storage.get(v, 0)) for v in self.variables}
        said = {v: stage for v, stage in stages.items() if stage.number}
        every = (*self.options, *map(_choice, dict.fromkeys(said.values())))
        return next((choice for choice in every if self.stored(choice) == said), MIXED)

    @classmethod
    def changing(cls, touched: Affects) -> list[str]:
        return touched.named(cls, touched.variables)

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        variables = about.model.graph.variables
        known = {name: v for name, v in variables.items() if v.own_storage}
        stages: dict[str, int | Stage] = {}
        for variable, (text, said) in about_each("--storage", texts).items():
            stage = read_stage(said)
            if not variable:
                stages |= stored_at(known.values(), said)
            elif variable not in known:
                raise UserError(
                    f"--storage {text}: the model has no variable {variable!r}; "
                    f"{known_names(variable, known)}"
                )
            elif stage.number and not splits_some(stage, known[variable]):
                raise UserError(
                    f"--storage {text}: {variable!r} is not trained, so it has no gradient and no optimizer "
                    f"state that {stage} could split; use {MOST_SPLIT} or {STAGES[0]}"
                )
            else:
                stages[variable] = stage.short
        return {"storage": stages}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        stages = by_stage(said.storage)
        whole = "; ".join(f"{stage}: {few(names)}" for stage, names in stages.items())
        return whole, "; ".join(f"{s} ×{len(names)}" for s, names in sorted(stages.items()))

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        for stage, its in chosen_stages(said).items():
            words = f"the storage of {first_of(its)} is {stage}"
            yield Beyond("storage", stage.partition(AT)[0], words, "search with --storage layout")


def chosen_stages(said: Any) -> dict[str, list[str]]:
    """Stages of storage of a `layoutopt.plan.decided.Decided`, without what follows from another one:
    variables outside pipeline stages, whose gradients are whole at each tick."""
    found = by_stage(said.storage)
    if said.pipeline and len(found) > 1:
        return {stage: its for stage, its in found.items() if stage.partition(AT)[0] != STAGES[1]}
    return found


def by_stage(storage: Mapping[str, str]) -> dict[str, list[str]]:
    """Stages of storage with their variables, in the order of the plan."""
    found: dict[str, list[str]] = {}
    for name, stage in storage.items():
        found.setdefault(stage, []).append(name)
    return found


def _said(options: Options) -> list[Stage]:
    """Of the variables that are not stored as the layout says."""
    return [stage for said in options.storage.values() if (stage := read_stage(said)).number]


def stage_of(choice: Choice) -> Stage:
    """The stage that an option is."""
    return Stage(STAGES.index(choice[0]), choice[1:] or None) if choice else Stage(0)


def _choice(stage: Stage) -> Choice:
    return (STAGES[stage.number], *(stage.over or ())) if stage.number else ()


def _holds_less(choice: Choice) -> tuple[int, float]:
    """Orders options by what a device holds: less where more is split, and over more axes."""
    stage = STAGES[stage_of(choice).number]
    return len(SPLIT[stage]), len(choice) if choice[1:] else math.inf
