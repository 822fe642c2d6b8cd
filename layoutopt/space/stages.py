"""Pipelines: the mesh axes that the layers of a loop lie over, each device a stage of them.

Other stages are another graph (`mesh_tf_core.tracing.pipelined_step`), so every choice is a separate
subproblem, in which nothing is left to choose. They are searched after the usual decisions, because a search
then has many more subproblems.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from layoutopt.space.argument import Option, Space, argument
from layoutopt.space.kind import Beyond, Feature, LeftOut, PlanField, Target, Words, not_allowed
from layoutopt.space.recompute import counts, kept_sets
from layoutopt.space.splits import Split, domains, split_options
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import TICK, loop_dims
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import GPIPE, layer_order
from mesh_tf_core.lower.recomputed import keep_sets
from mesh_tf_core.lower.remat_policy import Policies, Recomputed
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.virtual_stages import check_stages

S = TypeVar("S", bound=Space)


@dataclass(frozen=True)
class StageSplit(Split):
    """The axes that one dimension of layers is split over."""

    label = "pipelines"
    asks: ClassVar[Mapping[str, Any]] = {
        "pipeline": argument(
            (),
            Option(
                "--pipeline",
                "DIMS",
                "Layer dimensions that may be split into pipeline stages, e.g. layers (comma-separated).",
            ),
            by_name=False,
        ),
    }
    says = PlanField("pipeline", dict[str, int], dict)
    word = "pipeline"
    place = 7
    features = (Feature("pipeline", "pipeline", uses=lambda *_: True),)

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        dims = target.model.graph.dims()
        # A loop that reads nothing by its steps, as one that decodes, counts no layers.
        layers = (n for n in loop_dims(target.model.graph) if n in dims)
        ways = {n: [*_ways_to_split(target.model, target.mesh, n, set(), "mesh")] for n in layers}
        return {"pipeline": tuple(n for n, found in ways.items() if len(found) > 1)}

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        return cls.everything(target)

    @classmethod
    def useless(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Replicas that train alone are programs without stages."""
        return {"pipeline": ()} if chosen.get("diloco") else {}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        yield from not_allowed(cls, target, allowed)

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        for dim, axes in allowed.stages.items():
            yield cls(dim, (axes,))

    @classmethod
    def in_words(cls, said: Any) -> Words:
        order = f" in {said.schedule}" if said.schedule else ""
        stages = [f"{n} stages of {dim}{order}" for dim, n in said.pipeline.items()]
        return " and ".join(stages), "; ".join(stages)

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        for dim, n in said.pipeline.items():
            stages = f"{dim!r} is split into {n} pipeline stages"
            yield Beyond("pipeline", dim, stages, f"search without --pipeline {dim}")


def ways(model: Model, mesh: Mesh, allowed: Space) -> Iterator[Space]:
    """The choices for each use of pipelines on a mesh: the choice without pipelines first.

    Raises:
      UserError: a dimension counts no layers, its pin excludes all choices, or a schedule is given without a
        dimension.
    """
    others = [s for s in allowed.schedule if s != GPIPE and "schedule" in allowed.given]
    if others and not allowed.pipeline:
        counted = ",".join(loop_dims(model.graph))
        todo = (
            f"add --pipeline {counted}"
            if counted
            else "this model has no stacked layers to pipeline, so remove --schedule"
        )
        raise UserError(f"--schedule {','.join(others)} needs --pipeline; {todo}")
    options = []
    for dim in allowed.pipeline:
        _check(model, dim)
        banned, pin = {*allowed.forbid.get(dim, ()), *allowed.apart}, allowed.pins.get(dim)
        found = [*_ways_to_split(model, mesh, dim, banned, allowed.orders)]
        if pin is not None and set(pin) not in map(set, found):
            known = ", ".join("+".join(axes) for axes in found if axes) or "none"
            raise UserError(
                f"--pin {dim}:{'+'.join(pin)}: the layers cannot be split into stages over these "
                f"axes; possible axes: {known}"
            )
        options.append([axes for axes in found if axes] if pin is None else [pin] * bool(pin))
        options[-1] += [()] * (not pin)
    pins, forbid = (
        {dim: axes for dim, axes in rules.items() if dim not in allowed.pipeline}
        for rules in (allowed.pins, allowed.forbid)
    )
    plain = allowed.but(pins=pins, forbid=forbid)
    every = (dict(zip(allowed.pipeline, chosen, strict=True)) for chosen in itertools.product(*options))
    split = [{dim: axes for dim, axes in chosen.items() if axes} for chosen in every]
    made = [
        plain.but(stages=stages, schedule=(schedule,), again=again)
        for stages in sorted(split, key=lambda each: sum(map(len, each.values())))
        for schedule in (allowed.restriction.among(allowed, "schedule") if stages else (GPIPE,))
        for again in (runs_again(model, stages, allowed, mesh, schedule) if len(stages) < 2 else ())
    ]
    if not made:
        raise UserError(
            f"--pin of {', '.join(dim for dim in allowed.pipeline if dim in allowed.pins)} is not possible: "
            "one dimension alone is split into stages, and these recompute all of their layers or none; "
            "remove a pin, or use --recompute auto"
        )
    yield from made


def runs_again(
    model: Model, stages: Mapping[str, Axes], allowed: Space, mesh: Mesh | None = None, schedule: str = GPIPE
) -> Iterator[Policies]:
    """The recomputed parts of stages, each of which makes another graph; of some layers of each, if a mesh
    and a schedule are given."""
    if not stages:
        yield frozenset()
        return
    if False in allowed.recompute:
        yield frozenset()
    for dim, axes in stages.items():
        sets = keep_sets(model.step_graph, dim, kept_sets(allowed.recompute))
        yield from (frozenset({Recomputed(dim, keep)}) for keep in sets)
        if mesh is not None:
            order = layer_order(schedule, mesh.group_size(axes))
            with suppress(UserError):  # layers that do not suit these stages, which is said later
                number = order.size(max(model.graph.dims()[dim])) // order.stages * (order.chunks == 1)
                yield from (frozenset({Recomputed(dim, (), n)}) for n in counts(number, allowed.recompute))
        if True in allowed.recompute:
            yield frozenset({Recomputed(dim)})
    if True in allowed.recompute and allowed.restriction.expresses("recompute", TICK):
        yield frozenset({Recomputed(TICK)})


def _ways_to_split(model: Model, mesh: Mesh, dim: str, banned: set[str], orders: str) -> Iterator[Axes]:
    """The axes that some layers can lie over as stages, which need not divide them; `()` first."""
    for axes in split_options(mesh, set(), banned, orders):
        with suppress(UserError):
            if axes:
                check_stages(model.graph, dim, mesh.group_size(axes))
            yield axes


def suited(model: Model, meshes: list[Mesh], allowed: Space) -> list[Mesh]:
    """Those of the meshes of a search whose sizes suit its pins; all where none does, so that it says why."""

    def suits(mesh: Mesh) -> bool:
        with suppress(UserError):
            return any(domains(model.step_graph, mesh, way) for way in ways(model, mesh, allowed))
        return False

    return [mesh for mesh in meshes if suits(mesh)] or meshes if allowed.pins and meshes[1:] else meshes


def on_mesh(model: Model, mesh: Mesh, allowed: S) -> S:
    """A space without the pipelines that this mesh cannot have; it may be that of a search over several
    meshes."""
    found = []
    for dim in allowed.pipeline:
        _check(model, dim)
        banned = {*allowed.forbid.get(dim, ()), *allowed.apart}
        found += [dim] * any(_ways_to_split(model, mesh, dim, banned, allowed.orders))
    if len(found) == len(allowed.pipeline):
        return allowed
    return allowed.but(pipeline=tuple(found), **({} if found else {"schedule": (GPIPE,)}))


def why_none(model: Model, meshes: Iterable[Mesh], allowed: Space) -> str:
    """The reason why the layers can lie over no axes as stages: what refuses the fewest stages."""
    refused = dict[int, str]()
    for mesh, dim in itertools.product(meshes, allowed.pipeline):
        banned = {*allowed.forbid.get(dim, ()), *allowed.apart}
        for axes in filter(None, split_options(mesh, set(), banned, allowed.orders)):
            try:
                check_stages(model.graph, dim, mesh.group_size(axes))
            except UserError as error:
                refused.setdefault(mesh.group_size(axes), str(error))
    return refused[min(refused)] if refused else "no mesh has an axis that may split the layers"


def _check(model: Model, dim: str) -> None:
    counted = loop_dims(model.graph)
    if dim not in counted:
        raise UserError(
            f"--pipeline {dim}: no loop over layers has this dimension; {known_names(dim, counted)}"
        )
