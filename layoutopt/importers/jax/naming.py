"""Names for dimensions: what the user says, what the model's library noted, what the dimension does, the
path of a parameter, else its size.

What a dimension does is read off the operations: what token numbers look up is `vocab`, what a product of two
activations sums out and parameters have is `d_kv`, and so on. Every dimension has one name, and every name
one dimension (which may have several sizes, as along an image).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layoutopt.importers.jax.classes import PARAMETER, Classes, Node, template
from layoutopt.importers.jax.equations import Block, Equation, Operand, Var
from layoutopt.importers.jax.indexing import indexing
from layoutopt.importers.jax.leaves import Leaf
from layoutopt.importers.jax.logical import LogicalAxis, called
from layoutopt.importers.jax.relations import Part
from mesh_tf_core.errors import UserError, known_names

Given = Mapping[str, object]
"""Path of an array -> names of its axes (None: as inferred; a tuple where an axis has several factors); or
the inferred name of a dimension -> another one."""

_KINDS = ("kernel", "weight", "w", "bias", "b", "scale", "embedding", "embeddings", "gamma", "beta", "value")


@dataclass(frozen=True)
class Arrays:
    """The arguments: variables of the block with the arrays that they stand for.

    Attributes:
      stacks: variable that several layers' arrays became -> these.
    """

    parameters: Sequence[tuple[Var, Leaf]]
    state: Sequence[tuple[Var, Leaf]]
    batch: Sequence[tuple[Var, Leaf]]
    stacks: Mapping[Var, Sequence[Leaf]] = field(default_factory=dict)

    def all(self) -> Iterator[tuple[Var, Leaf]]:
        yield from self.parameters
        yield from self.state
        yield from self.batch

    def given(self) -> Iterator[tuple[Leaf, Var, int]]:
        """The arrays as the user gives them: their variable, and which of its axes is their first."""
        for v, leaf in self.all():
            for own in self.stacks.get(v, (leaf,)):
                yield own, v, int(v in self.stacks)


def named(
    block: Block,
    classes: Classes,
    arrays: Arrays,
    given: Given,
    logical: Sequence[LogicalAxis],
    notes: list[str],
) -> dict[Node, str]:
    """Class -> its name; what logical names say twice is told in `notes`.

    Raises:
      UserError: names that do not fit the arrays, or that would give a dimension two names.
    """
    return _Naming(block, classes, arrays, given, logical, notes).names()


class _Naming:
    def __init__(
        self,
        block: Block,
        classes: Classes,
        arrays: Arrays,
        given: Given,
        logical: Sequence[LogicalAxis],
        notes: list[str],
    ) -> None:
        self.block, self.classes, self.arrays, self.given = block, classes, arrays, given
        self.logical, self.notes = logical, notes
        self.found: dict[Node, str] = {}
        self.taken: set[str] = set()
        self.fixed: dict[Node, tuple[str, str]] = {}
        self.in_parameters: Counter[Node] = Counter()
        for v, _ in arrays.parameters:
            self.in_parameters.update(classes.all(v))
        self.held = [set(classes.all(v)) for v, _ in arrays.parameters]
        self.of_batch = {n for v, _ in arrays.batch for n in classes.all(v)}
        self.counts: set[Node] = set()
        for _, relation in classes.factors.related:
            if isinstance(relation, Part):
                own, inner = classes.of(*relation.x), classes.of(*relation.y)
                self.counts.update(own[: len(own) - len(inner)])

    def names(self) -> dict[Node, str]:
        self._given()
        self._logical()
        self._batch()
        self._roles()
        self._pieces()
        self._paths()
        self._parts()
        free = self.classes.free()
        for root in self.classes.members():
            # Splitting positions and masks gains nothing: no layout does.
            anonymous = "_anonymous_" if root in free else ""
            self.give(root, f"{anonymous}dim_{self.classes.size[root]}")
        return self._renamed()

    def give(self, node: Node, name: str) -> None:
        """A name for a class that has none; numbered if another has it."""
        root = self.classes.find(node)
        if root in self.found:
            return
        self.found[root] = self.free(name)
        self.taken.add(self.found[root])

    def free(self, name: str) -> str:
        name = re.sub(r"[^\w.\-]+", "_", name) or "dim"
        number, full = 2, name
        while full in self.taken:
            full, number = f"{name}_{number}", number + 1
        return full

    # -- what is said --------------------------------------------------------------------------------------

    def _given(self) -> None:
        leaves = {leaf.path: (leaf, v, first) for leaf, v, first in self.arrays.given()}
        for path, said in self.given.items():
            if isinstance(said, str):
                continue
            if path not in leaves:
                raise UserError(
                    f"from_jax: names has {path!r}, which is no array; {known_names(path, leaves)}"
                )
            leaf, v, first = leaves[path]
            axes = list(said) if isinstance(said, tuple | list) else [said]
            if len(axes) != len(leaf.shape):
                raise UserError(
                    f"from_jax: names[{path!r}] has {len(axes)} entries, the array {len(leaf.shape)} axes "
                    f"{leaf.shape}; give one name per axis, None to leave one as it is"
                )
            for a, name in enumerate(axes):
                self._said(path, a, self.classes.of(v, a + first), name)

    def _said(self, path: str, axis: int, nodes: Sequence[Node], name: object) -> None:
        if name is None:
            return
        parts = list(name) if isinstance(name, tuple | list) else [name]
        if len(parts) != len(nodes):
            sizes = " x ".join(str(self.classes.size[n]) for n in nodes) or "1 (no dimension)"
            raise UserError(
                f"from_jax: names[{path!r}] calls axis {axis} {name!r}; it has {len(nodes)} factors, "
                f"{sizes}: give a tuple of as many names, or None"
            )
        for node, part in zip(nodes, parts, strict=True):
            if part is None:
                continue
            place = f"axis {axis} of {path!r}"
            if node in self.fixed and self.fixed[node][0] != part:
                raise UserError(
                    f"from_jax: names calls {place} {part!r} and {self.fixed[node][1]} "
                    f"{self.fixed[node][0]!r}, but they are one dimension; give them one name"
                )
            other = next((n for n, (m, _) in self.fixed.items() if m == part and n != node), None)
            if other is not None:
                raise UserError(
                    f"from_jax: names calls both {place} and {self.fixed[other][1]} {part!r}, but they "
                    "meet in one array, or differ in size; give them different names"
                )
            self.fixed[node] = str(part), place
            self.give(node, str(part))

    def _renamed(self) -> dict[Node, str]:
        """With dimensions renamed as the user says."""
        known = {name: root for root, name in self.found.items()}
        for old, new in self.given.items():
            if not isinstance(new, str):
                continue
            if old not in known:
                raise UserError(
                    f"from_jax: names renames {old!r}, which is no dimension; {known_names(old, known)}"
                )
            if new in known and new != old:
                raise UserError(
                    f"from_jax: names renames {old!r} to {new!r}, which is another dimension's name"
                )
            self.found[known[old]] = new
        return self.found

    def _logical(self) -> None:
        """What libraries noted; one name of several dimensions is numbered."""
        of = [(self.classes.of(*x.axis), x) for x in self.logical]
        found, notes = called([(nodes[0], x) for nodes, x in of if len(nodes) == 1])
        self.notes += notes
        places = dict(self.fixed.values())
        for node, (name, path) in found.items():
            if node in self.found:
                continue
            if name in places:
                raise UserError(
                    f"from_jax: names calls {places[name]} {name!r}, as the model's logical axes call "
                    f"another dimension, of {path!r}; give it another name, or name that one too"
                )
            self.give(node, name)
            if self.found[node] != name:
                self.notes.append(
                    f"logical axis {name!r} is several dimensions, which meet in an array or differ in size: "
                    f"that of {path} is called {self.found[node]}"
                )

    # -- what it does --------------------------------------------------------------------------------------

    def _batch(self) -> None:
        leaves = [(v, leaf) for v, leaf in self.arrays.batch if v.shape]
        places = self._places()
        for v, _ in sorted(leaves, key=lambda x: -len(x[0].shape)):
            for node in self.classes.of(v, 0)[:1]:
                if "batch" not in self.taken:
                    self.give(node, "batch")
        for v, leaf in leaves:
            for node in self.classes.of(v, 0)[:1]:
                self.give(node, f"{_last(leaf.path)}_batch")
            if v.dtype.startswith("int") and len(v.shape) >= 2 and id(v) not in places:
                for node in self.classes.of(v, 1)[:1]:
                    self.give(node, "length" if "length" not in self.taken else f"{_last(leaf.path)}_length")

    def _places(self) -> set[int]:
        """ids of inputs whose numbers are places in other values, as the ends of a graph's edges are: none of
        tokens, which look up parameters."""
        found = set()
        for v, _ in self.arrays.batch:
            numbers = {id(v)}
            for e in self.block.walk() if v.dtype.startswith("int") else ():
                if e.prim.startswith(("gather", "scatter")) and id(e.ins[1]) in numbers:
                    at = indexing(e)
                    rows = e.ins[0] if e.prim == "gather" else e.ins[2]
                    made_of = self.classes.made_of.get(id(rows), 0)
                    if len(at.looked_up) == 1 and at.others and made_of & ~PARAMETER:
                        found.add(id(v))
                if any(id(x) in numbers for x in e.ins):
                    numbers.update(id(y) for y in e.outs if y.dtype.startswith("int"))
        return found

    def _roles(self) -> None:
        equations = list(self.block.walk())
        whole = {id(v) for v, leaf in self.arrays.batch if v.dtype.startswith("int")}
        from_batch = _reached(equations, whole)
        for e in equations:
            if e.prim == "scan":
                stacks = [*e.ins[e.params["consts"] + e.params["carry"] :], *e.outs[e.params["carry"] :]]
                in_params = [n for x in stacks if x.shape for n in self.classes.of(x, 0)[:1]]
                for node in in_params[:1]:
                    self.give(node, "layers" if self.in_parameters[node] else "time")
        for e in equations:
            if e.prim == "gather":
                self._lookup(e, from_batch)
        for e in equations:
            if e.prim == "dot_general":
                self._attention(e)
            elif e.prim == "conv_general_dilated":
                self._convolution(e)
            elif e.prim == "top_k":
                for node in self.classes.of(e.ins[0], len(e.ins[0].shape) - 1):
                    if self.in_parameters[node]:
                        self.give(node, "experts")
                for node in self.classes.of(e.out, len(e.out.shape) - 1):
                    self.give(node, "top_k")
        self._feed_forward()
        for a, b in self.classes.refused:
            for x, y in ((a, b), (b, a)):
                if (
                    self.found.get(self.classes.find(x)) == "length"
                    and not self.in_parameters[self.classes.find(y)]
                ):
                    self.give(y, "memory_length")

    def _pieces(self) -> None:
        """What counts the pieces that a parameter is cut into, as queries, keys and values of one matrix."""
        for v, leaf in self.arrays.parameters:
            for node in self.classes.all(v):
                if node in self.counts:
                    self.give(node, f"{_last(leaf.path)}_parts")

    def _parts(self) -> None:
        """What is a part of a dimension that has a name."""
        for e in self.block.walk():
            if e.prim not in ("slice", "dynamic_slice", "pad"):
                continue
            for a in range(len(e.out.shape)):
                own, part = self.classes.of(e.ins[0], a), self.classes.of(e.out, a)
                if len(own) == len(part) == 1 and own[0] != part[0] and own[0] in self.found:
                    self.give(part[0], f"{self.found[own[0]]}_{'padded' if e.prim == 'pad' else 'part'}")

    def _lookup(self, e: Equation, from_batch: set[int]) -> None:
        """A table of parameters that numbers of the batch look up."""
        found, table = indexing(e), e.ins[0]
        if len(found.looked_up) != 1:
            return
        nodes = self.classes.of(table, found.looked_up[0][0])
        if len(nodes) != 1:
            return
        if found.common:
            if not self.in_parameters[nodes[0]]:
                return
            self.give(nodes[0], "vocab" if "length" in self.taken else "classes")
        elif self.in_parameters[nodes[0]] and len(table.shape) == 2:
            self.give(nodes[0], "vocab" if id(e.ins[1]) in from_batch else "positions")
            for a, _ in found.kept if id(e.ins[1]) in from_batch else ():
                for node in self.classes.of(table, a)[:1]:
                    self.give(node, "d_model")

    def _attention(self, e: Equation) -> None:
        """A product of two activations over a dimension that parameters have too."""
        (lc, _), (lb, _) = e.params["dimension_numbers"]
        x, y = e.ins[:2]
        if not lb or len(lc) != 1:
            return
        summed = self.classes.of(x, lc[0])
        if any(self.classes.made_of.get(id(v)) == PARAMETER for v in (x, y)):
            return
        heads = [n for a in lb for n in self.classes.of(x, a) if self.in_parameters[n]]
        shared = {n for a in lb for n in self.classes.of(x, a)}
        groups = [
            n
            for operand in (x, y)
            for n in self.classes.all(operand)
            if n not in shared and n not in summed and any({n, *heads} <= nodes for nodes in self.held)
        ]
        if not heads or not summed:
            return
        if not any({summed[-1], *heads} <= nodes for nodes in self.held):
            # The product of weights and values sums out positions.
            left = [n for n in groups if n not in self.found]
            for node in left if len(left) == 1 else ():
                self.give(node, "d_v")
            return
        for node in summed[-1:]:
            self.give(node, "d_kv")
        for node in summed[:-1]:
            self.give(node, "d_kv_parts")
        if len(heads) == 2 and not groups:
            # Keys were repeated for every group of queries: fewer parameters have the groups.
            heads.sort(key=lambda n: -self.in_parameters[n])
            groups = [heads.pop()]
        for node in heads:
            self.give(node, "kv_heads" if groups else "heads")
        for node in groups:
            self.give(node, "query_group")
        ends = [n for n in self.classes.all(e.out) if n not in shared and n not in groups]
        if len(ends) == 2:
            ends.sort(key=lambda n: (n not in self.found, -self.in_parameters[n]))
            self.give(ends[0], "length")
            self.give(ends[1], "memory_length")
        projections = (nodes for nodes in self.held if {*heads, *summed} <= nodes)
        others = Counter(n for nodes in projections for n in nodes if n not in self.counts)
        if others and not others.keys() & {n for n, name in self.found.items() if name == "d_model"}:
            left = [n for n, _ in others.most_common() if n not in self.found]
            for node in left[:1]:
                self.give(node, "d_model")

    def _convolution(self, e: Equation) -> None:
        d = e.params["dimension_numbers"]
        (x, w), spatial = e.ins[:2], len(d.lhs_spec) - 2
        names = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}.get(spatial, ())
        for name, a, t in zip(names, d.lhs_spec[2:], d.rhs_spec[2:], strict=False):
            for node in self.classes.of(x, a)[:1]:
                self.give(node, name)
            for node in self.classes.of(w, t)[:1]:
                self.give(node, f"{name}_taps")
        for node in self.classes.of(x, d.lhs_spec[1])[:1]:
            if node in self.of_batch:
                self.give(node, "channels")

    def _feed_forward(self) -> None:
        """What lies between two projections from and to d_model."""
        model = next((n for n, name in self.found.items() if name in ("d_model", "embed")), None)
        if model is None:
            return
        beside: Counter[Node] = Counter()
        for v, _ in self.arrays.parameters:
            nodes = self.classes.all(v)
            if model in nodes:
                beside.update(n for n in nodes if n != model and n not in self.found and n not in self.counts)
        for node, count in beside.most_common():
            if count >= 2:
                self.give(node, "d_ff")

    # -- where it is ---------------------------------------------------------------------------------------

    def _paths(self) -> None:
        alike: Counter[str] = Counter(template(leaf.path) for _, leaf in self.arrays.parameters)
        for v, leaf in self.arrays.batch:
            self._by_path(v, _last(leaf.path))
        made = list(self._made())
        makers = Counter((node, template(leaf.path)) for leaf, nodes in made for node in set(nodes))
        for leaf, nodes in made:
            for node in reversed(nodes):
                # What one layer alone makes is called by its number.
                one = makers[node, template(leaf.path)] == 1 and alike[template(leaf.path)] > 1
                self.give(node, _last(leaf.path, one))
        for v, leaf in (*self.arrays.parameters, *self.arrays.state):
            self._by_path(v, _last(leaf.path))

    def _made(self) -> Iterator[tuple[Leaf, Sequence[Node]]]:
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
                self.give(node, name if len(nodes) == 1 else f"{name}_{'abcdefgh'[i % 8]}")


def _reached(equations: Sequence[Equation], sources: set[int]) -> set[int]:
    """ids of what follows from some variables."""
    found = set(sources)
    for e in equations:
        if any(id(x) in found for x in e.ins):
            found.update(map(id, e.outs))
            for inner in (e.body, e.backward):
                if inner is not None:
                    found.update(id(v) for x, v in zip(e.ins, inner.ins, strict=False) if id(x) in found)
    return found


def _last(path: str, numbered: bool = False) -> str:
    """The part of a path that says most about an array, with the number of its layer."""
    parts = [p for p in path.split("/") if p]
    names = [i for i, p in enumerate(parts) if not re.fullmatch(r"\d+(-\d+)?", p)]
    kept = [i for i in names if parts[i].lower() not in _KINDS] or names
    if not kept:
        return "dim"
    at = kept[-1]
    found = parts[at]
    if not numbered:
        return re.sub(r"_?\d+(-\d+)?$", "", found) or found
    return f"{found}_{parts[at + 1]}" if at + 1 < len(parts) and parts[at + 1].isdigit() else found


def axes_text(names: Mapping[Node, str], classes: Classes, v: Operand) -> str:
    """The dimensions of an array, axis by axis, as users read them."""
    axes = []
    for a in range(len(v.shape)):
        parts = [names[n] for n in classes.of(v, a)]
        axes.append(parts[0] if len(parts) == 1 else f"({' '.join(parts)})" if parts else "1")
    return " ".join(axes)
