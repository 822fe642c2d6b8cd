"""Layouts: which dimension is split over which mesh axes, everywhere or in a part of a model only.

A dimension's name has one placement wherever it occurs. A rule of a path applies to the operations and
variables there instead, as if the dimension had another name in them. A rule for elsewhere splits a dimension
further where the axes would be unused: in every operation, and in every value between operations, in which
they split no other dimension. With heads and d_ff over `model`, `length@elsewhere:model` is sequence
parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2): products see the whole length, and norms, dropout and the residual stream a part of it. Between them a
sum is scattered and a value is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mesh_tf_core.arguments import check, instance, shown
from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.ir.dims import PaddedDim, Shape
from mesh_tf_core.ir.mesh import Mesh

Axes = tuple[str, ...]
LayoutRules = Mapping[str, str | Iterable[str]]
AT = "@"
NOWHERE = "none"
"""Written as the axis of a rule of a path: not split there."""
ELSEWHERE = "elsewhere"
"""Written as the path of a rule for elsewhere."""
RULES = instance(
    (str, dict, Mapping), "rules such as 'batch:data;heads:model', or a dict from dimensions to mesh axes"
)
"""The rules that a layout takes. `dict` comes before `Mapping` because its check is faster: a search makes
thousands of layouts."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout(Mapping[str, Axes]):
    """A mapping from names of dimensions to tuples of mesh axes; dimensions without a rule are not split.

    Args:
      rules: a string such as `batch:data+pod;heads:model`, or a mapping name -> axis or axes. In a string, a
        rule for a path is `heads@decoder/attention:data` or `heads@decoder/attention:none`; a rule for
        sequence parallelism is `length@elsewhere:model`.
      refined: path -> mapping of the dimensions that have other splits there.

    Attributes:
      refined: rules of paths; a path comes before the paths inside it. The mapping of a layout has only the
        other rules.
      elsewhere: dimension -> axes that split it further where they split nothing else.
      padded: a dimension of a variable's state that is stored longer, because its devices do not divide it
        (`lower.storage`); users do not write it.

    Example:
      >>> import mesh_tf_core as mtf
      >>> layout = mtf.Layout("batch:data;d_ff:model")
      >>> layout["d_ff"]
      ('model',)
    """

    rules: tuple[tuple[str, Axes], ...]
    refined: tuple[tuple[str, tuple[tuple[str, Axes], ...]], ...]
    elsewhere: tuple[tuple[str, Axes], ...]
    padded: PaddedDim | None
    _table: dict[str, Axes] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)
    _at: dict[str, Layout] = field(init=False, repr=False)
    _around: dict[tuple[frozenset[str], frozenset[str]], Layout] = field(init=False, repr=False)

    def __init__(
        self,
        rules: str | LayoutRules = "",
        refined: Mapping[str, LayoutRules] | None = None,
        padded: PaddedDim | None = None,
    ) -> None:
        check("Layout", rules=(rules, RULES), refined=(refined or {}, RULES))
        items = _parse(rules) if isinstance(rules, str) else rules.items()
        tables: dict[str, dict[str, Axes]] = {"": {}}
        for name, axes in items:
            if not isinstance(name, str):
                raise UserError(
                    f"layout: {shown(name)} is not the name of a dimension; give the name as a string"
                )
            dim, _, path = name.partition(AT)
            _add(tables.setdefault(path, {}), name, dim, _axes(axes, bool(path)))
        for path, found in (refined or {}).items():
            for dim, axes in found.items():
                _add(tables.setdefault(path, {}), f"{dim}{AT}{path}", dim, _axes(axes, True))
        rules_ = tuple(sorted((n, a) for n, a in tables.pop("").items() if a))
        further = tuple(sorted((n, a) for n, a in tables.pop(ELSEWHERE, {}).items() if a))
        parts = tuple((path, tuple(sorted(found.items()))) for path, found in sorted(tables.items()) if found)
        object.__setattr__(self, "rules", rules_)
        object.__setattr__(self, "refined", parts)
        object.__setattr__(self, "elsewhere", further)
        object.__setattr__(self, "padded", padded)
        object.__setattr__(self, "_table", dict(rules_))
        more = parts or further or padded
        object.__setattr__(self, "_hash", hash((rules_, parts, further, padded) if more else rules_))
        object.__setattr__(self, "_at", {})
        object.__setattr__(self, "_around", {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        mine, its = ((x.rules, x.refined, x.elsewhere, x.padded) for x in (self, other))
        return mine == its

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        # Another process hashes names otherwise.
        return Layout, (self.written, {path: dict(rules) for path, rules in self.refined}, self.padded)

    def __getitem__(self, name: str) -> Axes:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(n for n, _ in self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __str__(self) -> str:
        plain = [f"{n}:{'+'.join(a)}" for n, a in self.written.items()]
        return ";".join([*plain, *(f"{n}{AT}{p}:{'+'.join(a) or NOWHERE}" for p, n, a in self._parts())])

    def _parts(self) -> Iterator[tuple[str, str, Axes]]:
        return ((path, name, axes) for path, rules in self.refined for name, axes in rules)

    @property
    def written(self) -> dict[str, Axes]:
        """The rules that are not of paths, as they are written: a layout of these is the same."""
        return {**self._table, **{f"{n}{AT}{ELSEWHERE}": axes for n, axes in self.elsewhere}}

    def axes(self, name: str) -> Axes:
        """The mesh axes over which dimension `name` is split."""
        return self._table.get(name, ())

    def axes_of(self, names: Iterable[str]) -> tuple[Axes, ...]:
        """The mesh axes of each of several dimensions, in order."""
        table = self._table
        return tuple([table.get(n, ()) for n in names])

    def further(self, name: str) -> Axes:
        """The axes that split a dimension further elsewhere."""
        return next((axes for dim, axes in self.elsewhere if dim == name), ())

    def split(self, names: Iterable[str]) -> list[str]:
        """Those of the given dimensions that are split."""
        table = self._table
        return [n for n in names if n in table]

    def at(self, path: str) -> Layout:
        """The layout of an operation or a variable: among several rules, that of the longest path applies."""
        if not self.refined:
            return self
        if path not in self._at:
            found = {n: axes for part, rules in self.refined if within(path, part) for n, axes in rules}
            further = {n: axes for n, axes in self.elsewhere if n not in found}
            self._at[path] = Layout({**self._table, **found}, {ELSEWHERE: further})
        return self._at[path]

    def around(self, names: Iterable[str], but: frozenset[str] = frozenset()) -> Layout:
        """The layout of an operation, or of a value between operations, with these dimensions. It includes
        each rule for elsewhere whose axes split no other of them, except the rules for `but`."""
        if not self.elsewhere:
            return self
        key = frozenset(names), but
        if key not in self._around:
            rules = dict(self._table)
            for name, axes in self.elsewhere:
                if name in key[0] - but and not any(a in axes for n in key[0] for a in rules.get(n, ())):
                    rules[name] = (*rules.get(name, ()), *axes)
            self._around[key] = Layout(rules)
        return self._around[key]

    def inside(self, axes: Axes) -> Layout:
        """The layout inside an SPMD region over these axes: rules for elsewhere over any of them are left
        out."""
        rest = {name: found for name, found in self.elsewhere if not set(found) & set(axes)}
        if len(rest) == len(self.elsewhere):
            return self
        return Layout(self._table, {**{path: dict(rules) for path, rules in self.refined}, ELSEWHERE: rest})

    @property
    def used(self) -> frozenset[str]:
        """The mesh axes that split anything anywhere."""
        parts = (axes for _, _, axes in self._parts())
        return frozenset(a for axes in (*self.written.values(), *parts) for a in axes)

    @property
    def plain(self) -> Layout:
        """The rules for everywhere."""
        return Layout(self._table) if self.refined or self.elsewhere else self

    def refined_by(self, refined: Mapping[str, LayoutRules]) -> Layout:
        """With other rules of paths."""
        return Layout(self.written, refined)

    def with_rules(self, rules: Mapping[str, Axes], padded: PaddedDim | None = None) -> Layout:
        """The layout with other rules for some dimensions; rules of paths stay."""
        return Layout({**self.written, **rules}, {path: dict(found) for path, found in self.refined}, padded)

    def held(self, shape: Shape) -> Shape:
        """The shape of a stored value in this layout."""
        long = self.padded
        if long is None or shape.padded is not None or long.name not in shape.names:
            return shape
        return shape.resized(long) if shape.dim(long.name).size == long.real else shape

    def renamed(self, axes: Mapping[str, str]) -> Layout:
        """With other names for some mesh axes."""

        def called(rules: Iterable[tuple[str, Axes]]) -> dict[str, Axes]:
            return {n: tuple(axes.get(a, a) for a in found) for n, found in rules}

        return Layout(called(self.written.items()), {path: called(rules) for path, rules in self.refined})

    def check(self, mesh: Mesh, known_dims: Mapping[str, int], paths: Iterable[str] = ()) -> None:
        """Raises LayoutError unless every axis, dimension and path exists and every size divides.

        Args:
          known_dims: name -> size of every dimension of the model.
          paths: of the operations and variables.
        """
        known = list(paths) if self.refined else []
        for path, _ in self.refined:
            if not any(within(each, path) for each in known):
                scopes = {"/".join(parts[:i]) for p in known for parts in [p.split("/")] for i in range(9)}
                raise LayoutError(
                    f"layout {self}: the model has no operation, variable or scope {path!r}; "
                    f"{known_names(path, scopes - {''})}"
                )
        further = [(name, (*self.axes(name), *axes)) for name, axes in self.elsewhere]
        for name, axes in further:
            if len(set(axes)) < len(axes):
                raise LayoutError(
                    f"layout {self}: {name!r} is already split over {'+'.join(self.axes(name))} in every "
                    f"operation; remove these axes from the rule of {name}{AT}{ELSEWHERE}"
                )
        for name, axes in (*self.rules, *further, *((name, axes) for _, name, axes in self._parts())):
            if name not in known_dims:
                raise LayoutError(
                    f"layout {self}: no operation has a dimension {name!r}; {known_names(name, known_dims)}"
                )
            for axis in axes:
                if axis not in mesh.names:
                    raise LayoutError(
                        f"layout {self}: mesh {mesh} has no axis {axis!r}; {known_names(axis, mesh.names)}"
                    )
            ways = mesh.group_size(axes)
            if known_dims[name] % ways:
                raise LayoutError(
                    f"layout {self}: dimension {name!r} has size {known_dims[name]}, which is not "
                    f"divisible by the {ways} devices of {'+'.join(axes)}; choose a size that is a "
                    f"multiple of {ways}, or another axis"
                )

    def splits(self, shape: Shape, what: str) -> tuple[Axes, ...]:
        """The axes of each dimension of `shape`; an axis may be used once. `what` names the tensor in
        errors."""
        out = tuple(self.axes(d.name) for d in shape)
        check_disjoint(dict(zip(shape.names, out, strict=True)), what)
        return out


def within(path: str, part: str) -> bool:
    """True if a path is another one, or inside of it."""
    return path == part or path.startswith(f"{part}/")


def check_disjoint(splits: Mapping[str, Axes], what: str) -> None:
    """Raises LayoutError if two dimensions are split over the same mesh axis."""
    owner: dict[str, str] = {}
    for name, axes in splits.items():
        for axis in axes:
            if axis in owner:
                raise LayoutError(
                    f"{what} has both {owner[axis]!r} and {name!r} split over mesh axis {axis!r}, but an "
                    "axis can split only one dimension of an operation; remove one of the two rules"
                )
            owner[axis] = name


def _axes(axes: str | Iterable[str], somewhere: bool) -> Axes:
    try:
        found = (axes,) if isinstance(axes, str) else tuple(axes)
        "".join(found)
    except TypeError:
        raise UserError(
            f"layout: {shown(axes)} is not the name of a mesh axis; give a name, or a list of names"
        ) from None
    return () if somewhere and found == (NOWHERE,) else found


def _add(table: dict[str, Axes], name: str, dim: str, axes: Axes) -> None:
    if dim in table and table[dim] != axes:
        raise UserError(
            f"layout: dimension {name!r} has two rules, with the axes {'+'.join(table[dim])} and "
            f"{'+'.join(axes)}; remove one"
        )
    if len(set(axes)) != len(axes):
        raise UserError(
            f"layout: dimension {name!r} is split over {'+'.join(axes)}, which names an axis twice; remove "
            "one"
        )
    table[dim] = axes


def _parse(text: str) -> Iterable[tuple[str, Axes]]:
    for part in filter(None, (p.strip() for p in text.replace(",", ";").split(";"))):
        name, colon, axes = part.partition(":")
        found = tuple(a.strip() for a in axes.split("+"))
        dim, at, path = (each.strip() for each in name.partition(AT))
        if not colon or not dim or not all(found) or bool(at) != bool(path):
            raise UserError(
                f"layout {text!r}: {part!r} is not a rule DIM:AXIS or DIM:AXIS+AXIS; write e.g. "
                "'batch:data;heads:model'"
            )
        yield dim + at + path, found
