"""Names of dimensions, in this order: the user's, the library's, the role of the dimension, the path of a
parameter, the size.

Every dimension has one name, and every name one dimension (which may have several sizes, as along an image).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from layoutopt.importers.arrays.classes import Classes, FactorNode, template
from layoutopt.importers.arrays.contract import EquationBlock, Leaf, Unimportable, Var
from layoutopt.importers.arrays.relations import TO, Axis, Copies
from layoutopt.importers.arrays.roles import ArgumentArrays, ClassNames, last, name_roles
from mesh_tf_core.errors import known_names

GivenNames = Mapping[str, object]
"""Path of an array -> names of its axes (None: as inferred; a tuple where an axis has several factors); or
the inferred name of a dimension -> another one."""


def named(
    block: EquationBlock,
    classes: Classes,
    arrays: ArgumentArrays,
    given: GivenNames,
    logical: Sequence[LogicalAxis],
    notes: list[str],
) -> dict[FactorNode, str]:
    """Class -> its name; duplicates among logical names are reported in `notes`.

    Raises:
      UserError: names that do not fit the arrays, or that would give a dimension two names.
    """
    found = _Naming(ClassNames(block, classes, arrays), given, logical, notes).all()
    for e in (e for e in block.walk() if e.prim == TO):
        pairs = zip(classes.of(e.ins[0], 0), classes.of(e.out, 0), strict=True)
        found.update((there, f"expert_{found[here]}") for here, there in pairs)
    return found


class _Naming:
    def __init__(
        self, names: ClassNames, given: GivenNames, logical: Sequence[LogicalAxis], notes: list[str]
    ) -> None:
        self.names, self.given, self.logical, self.notes = names, given, logical, notes
        self.block, self.classes, self.arrays = names.block, names.classes, names.arrays
        self.fixed: dict[FactorNode, tuple[str, str]] = {}

    def all(self) -> dict[FactorNode, str]:
        self._given()
        self._logical()
        self._experts()
        name_roles(self.names)
        self._pieces()
        self._paths()
        self._parts()
        free = self.classes.free()
        for root in self.classes.members():
            # Of positions and masks, which a user knows by their sizes alone.
            kind = "constant" if root in free else "dim"
            self.names.give(root, f"{kind}_{self.classes.size[root]}")
        return self._renamed()

    def _experts(self) -> None:
        """Those that tokens choose of, and those that they are sent to."""
        for e in (e for e in self.block.walk() if e.prim == TO):
            self.names.give(self.classes.of(e.ins[1], 0)[0], "experts")
            size = e.ins[1].shape[0]
            for choice in (x for x in self.block.walk() if x.prim == "top_k" and x.ins[0].shape[-1] == size):
                self.names.give(self.classes.of(choice.ins[0], len(choice.ins[0].shape) - 1)[0], "router")

    def _given(self) -> None:
        leaves = {leaf.path: (leaf, v, first) for leaf, v, first in self.arrays.given()}
        for path, said in self.given.items():
            if isinstance(said, str):
                continue
            if path not in leaves:
                raise Unimportable(
                    f"names has an entry for {path!r}, but no array has this path; "
                    f"{known_names(path, leaves)}"
                )
            leaf, v, first = leaves[path]
            axes = list(said) if isinstance(said, tuple | list) else [said]
            if len(axes) != len(leaf.shape):
                raise Unimportable(
                    f"names[{path!r}] has {len(axes)} entries, but the array's shape {leaf.shape} has "
                    f"{len(leaf.shape)} axes; give one name per axis, and None for an axis without a name"
                )
            for a, name in enumerate(axes):
                self._said(path, a, self.classes.of(v, a + first), name)

    def _said(self, path: str, axis: int, nodes: Sequence[FactorNode], name: object) -> None:
        if name is None:
            return
        parts = list(name) if isinstance(name, tuple | list) else [name]
        if len(parts) != len(nodes):
            sizes = " x ".join(str(self.classes.size[n]) for n in nodes) or "1 (no dimension)"
            raise Unimportable(
                f"names[{path!r}] gives axis {axis} the name {name!r}, but the function reshapes this axis "
                f"into {len(nodes)} dimensions ({sizes}); give a tuple of {len(nodes)} names, or None"
            )
        for node, part in zip(nodes, parts, strict=True):
            if part is None:
                continue
            place = f"axis {axis} of {path!r}"
            if node in self.fixed and self.fixed[node][0] != part:
                raise Unimportable(
                    f"names gives two names to one dimension: {part!r} to {place} and "
                    f"{self.fixed[node][0]!r} to {self.fixed[node][1]}; give both axes the same name"
                )
            other = next((n for n, (m, _) in self.fixed.items() if m == part and n != node), None)
            if other is not None:
                raise Unimportable(
                    f"names gives the name {part!r} to both {place} and {self.fixed[other][1]}, "
                    "but these are different dimensions (both occur in one array, or their sizes "
                    "differ); give the two axes different names"
                )
            self.fixed[node] = str(part), place
            self.names.give(node, str(part))

    def _renamed(self) -> dict[FactorNode, str]:
        """With dimensions renamed as the user says."""
        known = {name: root for root, name in self.names.found.items()}
        for old, new in self.given.items():
            if not isinstance(new, str):
                continue
            if old not in known:
                raise Unimportable(
                    f"names renames {old!r}, which is not a dimension; {known_names(old, known)}"
                )
            if new in known and new != old:
                raise Unimportable(
                    f"names renames {old!r} to {new!r}, which is already the name of another "
                    "dimension; choose another name"
                )
            self.names.found[known[old]] = new
        return self.names.found

    def _logical(self) -> None:
        """What libraries noted; one name of several dimensions is numbered."""
        of = [(self.classes.of(*x.axis), x) for x in self.logical]
        found, notes = called([(nodes[0], x) for nodes, x in of if len(nodes) == 1])
        self.notes += notes
        places = dict(self.fixed.values())
        for node, (name, path) in found.items():
            if node in self.names.found:
                continue
            if name in places:
                raise Unimportable(
                    f"names gives {places[name]} the name {name!r}, but the logical axes of "
                    f"{path!r} give this name to another dimension; choose another name in names, or name "
                    f"the axis of {path!r} too"
                )
            self.names.give(node, name)
            if self.names.found[node] != name:
                self.notes.append(
                    f"the logical axis {name!r} stands for several dimensions (they occur in one array or "
                    f"differ in size); the one in {path} is named {self.names.found[node]!r}"
                )

    def _pieces(self) -> None:
        """What counts the pieces that a parameter is cut into, as queries, keys and values of one matrix."""
        for v, leaf in self.arrays.parameters:
            for node in self.classes.all(v):
                if node in self.names.counts:
                    self.names.give(node, f"{last(leaf.path)}_parts")

    def _paths(self) -> None:
        alike: Counter[str] = Counter(template(leaf.path) for _, leaf in self.arrays.parameters)
        for v, leaf in self.arrays.batch:
            self._by_path(v, last(leaf.path))
        made = list(self._made())
        makers = Counter((node, template(leaf.path)) for leaf, nodes in made for node in set(nodes))
        for leaf, nodes in made:
            for node in reversed(nodes):
                # What one layer alone makes is called by its number.
                one = makers[node, template(leaf.path)] == 1 and alike[template(leaf.path)] > 1
                self.names.give(node, last(leaf.path, one))
        for v, leaf in (*self.arrays.parameters, *self.arrays.state):
            self._by_path(v, last(leaf.path))

    def _made(self) -> Iterator[tuple[Leaf, Sequence[FactorNode]]]:
        """What parameters make: the axes that a product with them has and its other factor has not."""
        weights = {id(v): (leaf, tuple(range(len(v.shape)))) for v, leaf in self.arrays.parameters}
        for e in self.block.walk():
            x = e.ins[0] if e.ins else None
            if e.prim in ("transpose", "convert_element_type") and id(x) in weights:
                leaf, axes = weights[id(x)]
                order = e.params.get("permutation", range(len(axes)))
                weights[id(e.out)] = leaf, tuple(axes[a] for a in order)
            elif e.prim == "scan" and e.body is not None:
                for outer, inner in zip(e.ins, e.body.ins, strict=True):
                    if id(outer) in weights:
                        weights[id(inner)] = weights[id(outer)][0], tuple(range(len(inner.shape)))
            elif e.prim == "dot_general":
                (lc, rc), (lb, rb) = e.params["dimension_numbers"]
                for operand, used in ((e.ins[1], (*rc, *rb)), (e.ins[0], (*lc, *lb))):
                    if id(operand) in weights:
                        free = [a for a in range(len(operand.shape)) if a not in used]
                        yield weights[id(operand)][0], [n for a in free for n in self.classes.of(operand, a)]
            elif e.prim == "ragged_dot_general" and id(e.ins[1]) in weights:
                numbers = e.params["ragged_dot_dimension_numbers"]
                used = (*numbers.dot_dimension_numbers[0][1], *numbers.rhs_group_dimensions)
                free = [a for a in range(len(e.ins[1].shape)) if a not in used]
                yield weights[id(e.ins[1])][0], [n for a in free for n in self.classes.of(e.ins[1], a)]
            elif e.prim == "conv_general_dilated" and id(e.ins[1]) in weights:
                if e.params["feature_group_count"] > 1:
                    continue
                made = self.classes.of(e.ins[1], e.params["dimension_numbers"].rhs_spec[0])
                yield weights[id(e.ins[1])][0], made

    def _by_path(self, v: Var, name: str) -> None:
        """Names what an array has: its last axis is what it makes, the one before what it takes."""
        for a in reversed(range(len(v.shape))):
            nodes = self.classes.of(v, a)
            for i, node in enumerate(nodes):
                self.names.give(node, name if len(nodes) == 1 else f"{name}_{'abcdefgh'[i % 8]}")

    def _parts(self) -> None:
        """What is a part of a dimension that has a name, and what counts copies of one."""
        for _, relation in self.classes.factors.related:
            if isinstance(relation, Copies):
                whole, copied = self.classes.of(*relation.x), self.classes.of(*relation.y)
                for node in whole[: len(whole) - len(copied)]:
                    self.names.give(node, "copies")
        for e in self.block.walk():
            if e.prim not in ("slice", "dynamic_slice", "pad"):
                continue
            for a in range(len(e.out.shape)):
                own, part = self.classes.of(e.ins[0], a), self.classes.of(e.out, a)
                if len(own) == len(part) == 1 and own[0] != part[0] and own[0] in self.names.found:
                    self.names.give(
                        part[0], f"{self.names.found[own[0]]}_{'padded' if e.prim == 'pad' else 'part'}"
                    )


_MESH_SHARE = 1 / 3
"""Share of the noted axes whose names stand for several sizes, from which on names are those of a mesh: of
MaxText's own logical axes at most a fifth do (`norm`, of models with normalized keys)."""


@dataclass(frozen=True)
class LogicalAxis:
    """An axis of an array that has a logical name."""

    axis: Axis
    name: str
    path: str


def logical_axes(arrays: Sequence[tuple[Var, Leaf]], notes: list[str]) -> list[LogicalAxis]:
    """Names of dimensions that Flax, and libraries on it, attach to parameters; names that are left out are
    reported in `notes`.

    The function itself decides which axes are one dimension. A logical name gives the dimension a name, and
    makes axes of one size and one name one dimension unless a relation contradicts. Flax also writes mesh
    axes into the same places (`with_partitioning(init, ("data", "model"))`). They are recognised because they
    name axes of different sizes, and are not used as names.

    Raises:
      Unimportable: more names than axes.
    """
    sure: list[LogicalAxis] = []
    perhaps: list[LogicalAxis] = []
    for v, leaf in arrays:
        if leaf.noted is None:
            continue
        names = leaf.noted.names
        if len(names) > len(v.shape):
            raise Unimportable(
                f"{leaf.path!r} has the logical axes {_text(names)}, but its shape {v.shape} "
                f"has {len(v.shape)} axes; give one name per axis"
            )
        if len(names) < len(v.shape):
            notes.append(
                f"{leaf.path} has the logical axes {_text(names)}, but its shape {v.shape} has "
                f"{len(v.shape)} axes, so the names are ignored; name the axis of stacked layers with "
                "nn.PARTITION_NAME"
            )
            continue
        found = [LogicalAxis((v, a), name, leaf.path) for a, name in enumerate(names) if name]
        (sure if leaf.noted.logical else perhaps).extend(found)
    sizes: dict[str, set[int]] = defaultdict(set)
    for x in perhaps:
        sizes[x.name].add(x.axis[0].shape[x.axis[1]])
    several = [x for x in perhaps if len(sizes[x.name]) > 1]
    if len(several) >= _MESH_SHARE * len(perhaps) > 0:
        name = several[0].name
        notes.append(
            f"the axis names of {several[0].path} and other arrays are read as mesh axes, not as dimensions, "
            f"because {name!r} occurs with the sizes {', '.join(map(str, sorted(sizes[name])))}; name "
            "dimensions with names=, and check these shardings with `layoutopt lint`"
        )
        perhaps = []
    return sure + perhaps


def _text(names: Sequence[str | None]) -> str:
    return f"({', '.join(map(str, names))})"


def same_dimensions(axes: Sequence[LogicalAxis], apart: Collection[str]) -> list[list[Axis]]:
    """Axes with one logical name and one size, except those of arrays in `apart`, which the user names."""
    found: dict[tuple[str, int], list[Axis]] = defaultdict(list)
    for x in axes:
        if x.path not in apart:
            found[x.name, x.axis[0].shape[x.axis[1]]].append(x.axis)
    return [listed for listed in found.values() if len(listed) > 1]


def called(
    axes: Sequence[tuple[FactorNode, LogicalAxis]],
) -> tuple[dict[FactorNode, tuple[str, str]], list[str]]:
    """Class -> its logical name and an array that has it, from (class, axis) of all, most frequent first; and
    notes of classes that have several names."""
    votes: dict[FactorNode, Counter[str]] = defaultdict(Counter)
    where: dict[FactorNode, str] = {}
    for node, x in axes:
        votes[node][x.name] += 1
        where.setdefault(node, x.path)
    found, notes = {}, []
    for node, names in sorted(votes.items(), key=lambda item: -item[1].total()):
        first, *others = (name for name, _ in names.most_common())
        found[node] = first, where[node]
        if others:
            listed = ", ".join(repr(n) for n in (first, *others))
            notes.append(f"the logical axes {listed} are the same dimension, which is named {first!r}")
    return found, notes
