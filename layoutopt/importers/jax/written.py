"""The layout of a user's own shardings: PartitionSpecs of parameters and inputs, read array by array.

A dimension's rule is what the inputs say of it, else what the most elements of parameters say, as far as the
rules can be lowered together. An array that is split further is stored so and gathered where it is read
(FSDP, and HSDP if only some of the batch's axes split it). An array that lies otherwise has rules of its own
path, so that lowering moves it to where its readers want it, as XLA does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from layoutopt.analysis.lint import UnlikeArray
from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.jax.internals import jax_module
from layoutopt.importers.jax.model import JaxModel
from layoutopt.importers.jax.shardings import flat, partition_spec
from layoutopt.plan.units import some
from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.structure import Feed, Read
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import Stage, shard_layout

INPUT, PARAMETER = "input", "parameter"
NAMED = 3
"""Arrays, and lines, that a finding names."""
STORED = 3
"""The stage of a parameter that is split further than its readers split it."""


@dataclass(frozen=True)
class ReadArray:
    """An array with the axes that its sharding gives it, as JAX reads them.

    Attributes:
      spec: mesh axes of each axis; those of one device are left out.
      splits: the same by dimension.
      loose: the axes that are not whole parts of a dimension.
      fed: it is an input.
    """

    array: ArrayAxes
    spec: tuple[Axes, ...]
    splits: Mapping[str, Axes]
    loose: Axes
    fed: bool = False

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for arrays of the same dimensions that are placed alike."""
        return self.array.axes, self.spec, self.fed


@dataclass(frozen=True)
class WrittenLayout:
    """The layout that shardings imply.

    Attributes:
      arrays: by path, as JAX reads them.
      unlike: arrays that lie otherwise than their readers want them.
    """

    layout: Layout
    options: Options
    arrays: Mapping[str, ReadArray]
    unlike: list[UnlikeArray]


def written(model: JaxModel, mesh: Mesh, parameters: Any, batch: Any, options: Options) -> WrittenLayout:
    """The layout and the storage of pytrees of PartitionSpec or NamedSharding.

    Args:
      options: what else is decided; they store the arrays whose shardings do not.

    Raises:
      UserError: an array or an axis that is not there, and what JAX refuses: an axis twice in one
        PartitionSpec, more entries than the array has axes, a size that the devices do not divide.
    """
    return _Reading(model, mesh, parameters, batch).written(options)


class _Reading:
    def __init__(self, model: JaxModel, mesh: Mesh, parameters: Any, batch: Any) -> None:
        assert model.origin is not None
        self.model, self.origin, self.mesh = model, model.origin, mesh
        self.variables = model.graph.variables
        self.fed = list(_read(batch, self.origin.batch, mesh, INPUT))
        self.own = list(_read(parameters, self.origin.parameters, mesh, PARAMETER))
        self.rows = {a for each in self.fed for axes in each.spec for a in axes}
        self.counted = {n for v in self.variables.values() for n in v.shape.names[: v.stacked]}
        self.base = self._base()

    def written(self, options: Options) -> WrittenLayout:
        rules, stages = dict[str, Mapping[str, Axes]](), dict[str, Stage]()
        odd, layers = list[ReadArray](), defaultdict[str, list[ReadArray]](list)
        for each in self.fed:
            if each.loose:
                raise _unaligned(each)
            if self._otherwise(each):
                rules[self._path(each)] = self._exactly(each)
                if any(not set(axes) <= {*self.base.axes(dim)} for dim, axes in each.splits.items()):
                    odd.append(each)  # else each device reads its part of what it has
        for each in self.own:
            if each.array.variable in self.variables:
                layers[each.array.variable].append(each)
        for name, found in layers.items():
            each = found[0]
            own, over = self._placed(each)
            if own:
                rules[name] = own
            if over:
                stages[name] = self._stage(each, own, over)
            if own or each.loose or not self.rows.issuperset(over):
                odd.append(each)
        layout = self.base.refined_by(rules) if rules else self.base
        said = {name: stage.short for name, stage in stages.items()}
        chosen = replace(options, storage={**options.storage, **said})
        arrays = {each.array.path: each for each in (*self.fed, *self.own)}
        unlike = [*self._mended(odd, layout, chosen), *self._uneven(layers)]
        return WrittenLayout(layout, chosen, arrays, unlike)

    # -- rules of dimensions ---------------------------------------------------------------------------------

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

    # -- arrays ----------------------------------------------------------------------------------------------

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
        read = {a for dim in each.splits for a in rules.get(dim, self.base.axes(dim))}
        said = {a for axes in each.spec for a in axes}
        over = tuple(a for a in self.mesh.names if a in said - read)
        if not over or self._storable(self.variables[each.array.variable], rules, over):
            return rules, over
        if each.loose or not self.counted.isdisjoint(dim for dim, axes in exact.items() if axes):
            raise _unaligned(each)
        return exact, ()

    def _exactly(self, each: ReadArray) -> dict[str, Axes]:
        """The rules of an array's path that place it as its sharding does."""
        return {dim: axes for dim, axes in each.splits.items() if axes != self.base.axes(dim)}

    def _storable(self, variable: Variable, rules: Mapping[str, Axes], over: Axes) -> bool:
        """Whether storage can split a variable over all of these axes."""
        if not variable.own_storage:
            return False
        layout = Layout({**self.base, **rules})
        view = shard_layout(variable, layout, self.mesh, over)
        return {a for n in variable.shape.names for a in view.axes(n)} >= set(over)

    def _stage(self, each: ReadArray, rules: Mapping[str, Axes], over: Axes) -> Stage:
        read = {a for dim in each.splits for a in rules.get(dim, self.base.axes(dim))}
        spare = tuple(a for a, size in self.mesh.axes if size > 1 and a not in read)
        return Stage(STORED, None if over == spare else over)

    # -- findings --------------------------------------------------------------------------------------------

    def _mended(self, odd: Sequence[ReadArray], layout: Layout, options: Options) -> Iterator[UnlikeArray]:
        """Arrays that their readers want elsewhere, those of the same dimensions and placement together."""
        alike: dict[object, list[ReadArray]] = defaultdict(list)
        for each in odd:
            alike[each.alike].append(each)
        for found in alike.values():
            first, names = found[0], {self._path(each) for each in found}
            them = "them" if len(found) > 1 else "it"
            wanted = self._wanted(first)
            rules = {path: dict(own) for path, own in layout.refined if path not in names}
            stages = {n: s for n, s in options.storage.items() if n not in names}
            over = tuple(a for axes in wanted for a in axes if a in self.rows)
            if over and not first.fed:
                stage = self._stage(first, {}, tuple(a for a in self.mesh.names if a in over))
                stages |= dict.fromkeys((each.array.variable for each in found), stage.short)
            # Layers that are one loop are named together.
            named = some([repr(x.array.path if x.fed else x.array.variable) for x in found], NAMED)
            yield UnlikeArray(
                f"{named}: placed {partition_spec(first.spec)}, but {self._readers(first)} {them} as "
                f"{partition_spec(self._read_as(first))}",
                f"place {them} {partition_spec(wanted)}",
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
                    f"{partition_spec(others[0].spec)}, but {first.array.path!r} "
                    f"{partition_spec(first.spec)}; equal layers are one loop here, so the prediction places "
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


def _read(tree: Any, known: Mapping[str, ArrayAxes], mesh: Mesh, what: str) -> Iterator[ReadArray]:
    """Every array of a pytree of shardings."""
    jax = jax_module()
    spec, sharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    for path, leaf, _ in flat(tree, is_leaf=lambda x: isinstance(x, spec | sharding)):
        if path not in known:
            raise UserError(f"shardings(): the model has no {what} {path!r}; {known_names(path, known)}")
        found = leaf.spec if isinstance(leaf, sharding) else leaf
        if not isinstance(found, spec):
            raise UserError(
                f"shardings(): {what} {path!r} has the sharding {leaf!r}; give a PartitionSpec or a "
                "NamedSharding"
            )
        entries = _entries(known[path], found, mesh, f"shardings(): {what} {path!r}")
        yield replace(_dimensions(known[path], entries, mesh), fed=what == INPUT)


def _entries(array: ArrayAxes, spec: Any, mesh: Mesh, what: str) -> tuple[Axes, ...]:
    """The mesh axes of each axis of an array; UserError where JAX refuses the sharding."""
    entries = [
        ()
        if entry is None or entry is type(spec).UNCONSTRAINED
        else (entry,)
        if isinstance(entry, str)
        else tuple(entry)
        for entry in spec
    ]
    shape = array.shape
    if len(entries) > len(shape):
        raise UserError(
            f"{what} has {spec} with {len(entries)} entries, but its shape {shape} has {len(shape)} axes; "
            "give at most one entry per axis"
        )
    named = [axis for axes in entries for axis in axes]
    for axis in named:
        if axis not in mesh.names:
            raise UserError(
                f"{what} has {spec}, but mesh {mesh} has no axis {axis!r}; {known_names(axis, mesh.names)}"
            )
    twice = [axis for axis, times in Counter(named).items() if times > 1]
    if twice:
        raise UserError(
            f"{what} has {spec}, which names mesh axis {twice[0]!r} twice, and JAX refuses that "
            "(DuplicateSpecError); name each mesh axis at most once in a PartitionSpec"
        )
    for a, (size, axes) in enumerate(zip(shape, entries, strict=False)):
        ways = mesh.group_size(axes)
        if size % ways:
            raise UserError(
                f"{what} has {spec}, but axis {a} of its shape {shape} has size {size}, which the {ways} "
                f"devices of {'+'.join(axes)} do not divide, and JAX refuses that (IndivisibleError); pad "
                f"the axis to {size + -size % ways}, or split another axis"
            )
    split = [tuple(a for a in axes if mesh.size(a) > 1) for axes in entries[: len(shape)]]
    return (*split, *((),) * (len(shape) - len(split)))


def _dimensions(array: ArrayAxes, spec: tuple[Axes, ...], mesh: Mesh) -> ReadArray:
    """The axes of every dimension: of an axis with several factors, from its outermost factor inwards."""
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
    return ReadArray(array, spec, splits, tuple(loose))


def _unaligned(each: ReadArray) -> UserError:
    return UserError(
        f"shardings(): {each.array} is placed {partition_spec(each.spec)}, whose pieces are not whole parts "
        "of its dimensions, and no rule of a layout places them so; choose mesh axes that divide the "
        "outermost dimension"
    )
