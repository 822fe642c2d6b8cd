"""The layout of a user's own placements of parameters and inputs, which a front end reads array by array.

A dimension's rule is what the inputs say of it, else what the most elements of parameters say, as far as the
rules can be lowered together. An array that is split further is stored so and gathered where it is read
(FSDP, and HSDP if only some of the batch's axes split it). An array that lies otherwise has rules of its own
path, so that lowering moves it to where its readers want it, as XLA does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from layoutopt.analysis.lint import UnlikeArray
from layoutopt.importers.arrays.model import ImportedModel
from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.plan.units import some
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.blocks import Feed, Read
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import Stage, paddable, shard_layout

NAMED = 3
"""Arrays, and lines, that a finding names."""
STORED = 3
"""The stage of a parameter that is split further than its readers split it."""


@dataclass(frozen=True)
class ReadArray:
    """An array with the axes that its sharding gives it, as the library reads them.

    Attributes:
      spec: mesh axes of each axis; those of one device are left out.
      splits: the same by dimension.
      loose: the axes that are not whole parts of a dimension.
      fed: it is an input.
      stage: of a parameter that is split further than its readers split it.
    """

    array: ArrayAxes
    spec: tuple[Axes, ...]
    splits: Mapping[str, Axes]
    loose: Axes
    fed: bool = False
    stage: int = STORED

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for arrays of the same dimensions that are placed alike."""
        return self.array.axes, self.spec, self.fed


@dataclass(frozen=True)
class WrittenLayout:
    """The layout that shardings imply.

    Attributes:
      arrays: by path, as the library reads them.
      unlike: arrays that lie otherwise than their readers want them.
    """

    mesh: Mesh
    layout: Layout
    options: Options
    arrays: Mapping[str, ReadArray]
    unlike: list[UnlikeArray]


def implied(
    model: ImportedModel,
    mesh: Mesh,
    arrays: Iterable[ReadArray],
    options: Options,
    text: Callable[[Sequence[Axes]], str],
) -> WrittenLayout:
    """The layout and the storage that the placements of arrays imply.

    Args:
      options: what else is decided; they store the arrays whose placements do not.
      text: the mesh axes of each axis of an array as the user writes them.

    Raises:
      UserError: no rule of a layout places an array so.
    """
    return _Reading(model, mesh, list(arrays), text).written(options)


class _Reading:
    def __init__(
        self,
        model: ImportedModel,
        mesh: Mesh,
        arrays: Sequence[ReadArray],
        text: Callable[[Sequence[Axes]], str],
    ) -> None:
        assert model.origin is not None
        self.model, self.origin, self.mesh, self.text = model, model.origin, mesh, text
        self.variables = model.graph.variables
        self.fed = [each for each in arrays if each.fed]
        self.own = [each for each in arrays if not each.fed]
        self.rows = {a for each in self.fed for axes in each.spec for a in axes}
        self.counted = {n for v in self.variables.values() for n in v.shape.names[: v.stacked]}
        self.base = self._base()

    def written(self, options: Options) -> WrittenLayout:
        rules, stages = dict[str, Mapping[str, Axes]](), dict[str, Stage]()
        odd, layers = list[ReadArray](), defaultdict[str, list[ReadArray]](list)
        for each in self.fed:
            if each.loose:
                raise self._unaligned(each)
            if self._otherwise(each):
                rules[self._path(each)] = self._exactly(each)
                if any(not set(axes) <= {*self.base.axes(dim)} for dim, axes in each.splits.items()):
                    odd.append(each)  # else each device reads its part of what it has
        for each in self.own:
            if each.array.variable in self.variables:
                layers[each.array.variable].append(each)
        placed = {name: self._placed(found[0]) for name, found in layers.items()}
        self.over = {
            name: None if over == self._spare(layers[name][0], own) else over
            for name, (own, over) in placed.items()
            if over
        }
        for name, (own, over) in placed.items():
            each = layers[name][0]
            if own:
                rules[name] = own
            if over:
                stages[name] = self._stage(each, own, over)
            if own or not self.rows.issuperset((*each.loose, *over)):
                odd.append(each)
        layout = self.base.refined_by(rules) if rules else self.base
        said = {name: stage.short for name, stage in stages.items()}
        chosen = replace(options, storage={**options.storage, **said})
        arrays = {each.array.path: each for each in (*self.fed, *self.own)}
        unlike = [*self._mended(odd, layout, chosen), *self._uneven(layers)]
        return WrittenLayout(self.mesh, layout, chosen, arrays, unlike)

    def _base(self) -> Layout:
        """The rules that the inputs give, then those of the most elements, that can be lowered together."""
        whole = {dim for each in self.fed for dim, axes in each.splits.items() if not axes}
        weight: Counter[tuple[str, Axes]] = Counter()
        for each in self.own:
            for dim, axes in each.splits.items():
                weight[dim, tuple(a for a in axes if a not in self.rows)] += math.prod(each.array.shape)
        order = [rule for each in self.fed for rule in each.splits.items()]
        order += sorted(weight, key=lambda rule: (rule[0] in whole, -weight[rule]))
        order = [(dim, axes) for dim, axes in order if axes and dim not in self.counted]
        rules = dict(reversed(order))
        if self._lowers(rules):
            return Layout(rules)
        rules = {}
        for dim, axes in order:
            if dim not in rules and self._lowers({**rules, dim: axes}):
                rules[dim] = axes
        return Layout(rules)

    def _lowers(self, rules: Mapping[str, Axes]) -> bool:
        try:
            self.model.lower(self.mesh, Layout(rules), check=False)
        except LayoutError:
            return False
        return True

    def _otherwise(self, each: ReadArray) -> bool:
        """Whether the rules split an array where its sharding does not, or an input the other way."""
        pairs = [(self.base.axes(dim), axes) for dim, axes in each.splits.items()]
        if each.fed:
            return any(rule != axes for rule, axes in pairs)
        return any(not set(rule) <= set(axes) for rule, axes in pairs)

    def _placed(self, each: ReadArray) -> tuple[dict[str, Axes], Axes]:
        """The rules of a parameter's own path, and the axes that its storage adds to them.

        Axes of the batch are storage: readers need the whole along them.
        """
        exact = self._exactly(each)
        rules: dict[str, Axes] = {}
        if self._otherwise(each):
            for dim, axes in exact.items():
                rule = self.base.axes(dim)
                rules[dim] = tuple(a for a in axes if a in rule or a not in self.rows)
        said = {a for axes in each.spec for a in axes}
        over = tuple(a for a in self._spare(each, rules) if a in said)
        if not over or self._storable(self.variables[each.array.variable], rules, over):
            return rules, over
        if each.loose or not self.counted.isdisjoint(dim for dim, axes in exact.items() if axes):
            raise self._unaligned(each)
        return exact, ()

    def _exactly(self, each: ReadArray) -> dict[str, Axes]:
        """The rules of an array's path that place it as its sharding does."""
        return {dim: axes for dim, axes in each.splits.items() if axes != self.base.axes(dim)}

    def _storable(self, variable: Variable, rules: Mapping[str, Axes], over: Axes) -> bool:
        """Whether storage can split a variable over all of these axes."""
        if not variable.own_storage:
            return False
        layout = Layout({**self.base, **rules})
        padded = paddable(self.model.step_graph).get(variable.name, frozenset())
        view = shard_layout(variable.shape, variable.stacked, layout, self.mesh, over, padded)
        return {a for n in variable.shape.names for a in view.axes(n)} >= set(over)

    def _stage(self, each: ReadArray, rules: Mapping[str, Axes], over: Axes) -> Stage:
        """The stage over some axes, which are named unless they are all that every stored array can have."""
        return Stage(
            each.stage, over if any(self.over.values()) or over != self._spare(each, rules) else None
        )

    def _spare(self, each: ReadArray, rules: Mapping[str, Axes]) -> Axes:
        """The axes over which storage can split an array further."""
        read = {a for dim in each.splits for a in rules.get(dim, self.base.axes(dim))}
        return tuple(a for a, size in self.mesh.axes if size > 1 and a not in read)

    def _mended(self, odd: Sequence[ReadArray], layout: Layout, options: Options) -> Iterator[UnlikeArray]:
        """Arrays that their readers want elsewhere, those of the same dimensions and placement together."""
        alike: dict[object, list[ReadArray]] = defaultdict(list)
        for each in odd:
            alike[each.alike].append(each)
        for found in alike.values():
            first, names = found[0], {self._path(each) for each in found}
            them = "them" if len(found) > 1 else "it"
            if (do := self.text(wanted := self._wanted(first))) == self.text(first.spec):
                continue  # storage that cuts a head, gathered before it is read
            rules = {path: dict(own) for path, own in layout.refined if path not in names}
            stages = {n: s for n, s in options.storage.items() if n not in names}
            over = tuple(a for axes in wanted for a in axes if a in self.rows)
            if over and not first.fed:
                stage = self._stage(first, {}, tuple(a for a in self.mesh.names if a in over))
                stages |= dict.fromkeys((each.array.variable for each in found), stage.short)
            # Layers that are one loop are named together.
            named = some([repr(x.array.path if x.fed else x.array.variable) for x in found], NAMED)
            yield UnlikeArray(
                f"{named}: placed {self.text(first.spec)}, but {self._readers(first)} {them} as "
                f"{self.text(self._read_as(first))}",
                f"place {them} {do}",
                self.base.refined_by(rules) if rules else self.base,
                replace(options, storage=stages),
            )

    def _uneven(self, layers: Mapping[str, Sequence[ReadArray]]) -> Iterator[UnlikeArray]:
        """Layers that are one loop here, and are not placed alike."""
        for found in layers.values():
            first = found[0]
            others = [each for each in found if each.alike != first.alike]
            if others:
                yield UnlikeArray(
                    f"{some([repr(each.array.path) for each in others], NAMED)}: placed "
                    f"{self.text(others[0].spec)}, but {first.array.path!r} "
                    f"{self.text(first.spec)}; equal layers are one loop here, so the prediction places "
                    "all as the first",
                    "place all layers alike",
                )

    def _readers(self, each: ReadArray) -> str:
        """The lines of the operations that read an array."""
        graph, name = self.model.graph, self._path(each)
        reads = {n.index for n in graph.nodes if isinstance(n.op, Read) and n.op.variable.name == name}
        waiting = [n.outputs[0] for n in graph.nodes if n.index in reads or n.path == name]
        parts: dict[int, list[int]] = defaultdict(list)
        for block in graph.blocks:
            for outer, inner in block.sliced:
                parts[outer].append(inner)
        known: set[int] = set()
        while waiting:
            known.add(tensor := waiting.pop())
            waiting += parts[tensor]
        sources = self.origin.sources
        nodes = (n for n, _ in graph.walk() if n.body is None and not known.isdisjoint(n.inputs))
        lines = dict.fromkeys(PurePath(sources[n.index]).name for n in nodes if n.index in sources)
        return f"{some([*lines], NAMED)} read{'s' * (len(lines) == 1)}" if lines else "operations read"

    def _path(self, each: ReadArray) -> str:
        return self._feeds[each.array.variable] if each.fed else each.array.variable

    @cached_property
    def _feeds(self) -> dict[str, str]:
        """Input -> the path of the node that gives it."""
        return {n.op.feed: n.path for n in self.model.graph.nodes if isinstance(n.op, Feed)}

    def _read_as(self, each: ReadArray) -> tuple[Axes, ...]:
        """The placement that an array's readers want."""
        return tuple(tuple(a for n in names for a in self.base.axes(n)) for names in each.array.axes)

    def _wanted(self, each: ReadArray) -> tuple[Axes, ...]:
        """The same, with the axes of the batch that store it."""
        read = self._read_as(each)
        taken = {a for axes in read for a in axes}
        if each.fed:
            return read
        return tuple(
            (*own, *(a for a in axes if a in self.rows - taken))
            for own, axes in zip(read, each.spec, strict=True)
        )

    def _unaligned(self, each: ReadArray) -> UserError:
        return UserError(
            f"shardings(): {each.array} is placed {self.text(each.spec)}, whose pieces are not whole parts "
            "of its dimensions, and no rule of a layout places them so; choose mesh axes that divide the "
            "outermost dimension"
        )


def read_array(array: ArrayAxes, spec: tuple[Axes, ...], mesh: Mesh, **more: Any) -> ReadArray:
    """An array placed so: an axis with several factors is split from its outermost factor inwards."""
    splits: dict[str, Axes] = {}
    loose: list[str] = []
    for names, sizes, axes in zip(array.axes, array.sizes, spec, strict=True):
        rest = list(axes)
        splits |= dict.fromkeys(names, ())
        for name, size in zip(names, sizes, strict=True):
            while rest and size % mesh.group_size((*splits[name], rest[0])) == 0:
                splits[name] += (rest.pop(0),)
            if mesh.group_size(splits[name]) < size:
                break
        loose += rest
    return ReadArray(array, spec, splits, tuple(loose), **more)
