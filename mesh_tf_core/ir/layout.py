"""Layouts: which dimension is split over which mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.mesh import Mesh

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout(Mapping[str, Axes]):
    """Maps dimension names to tuples of mesh axes; dimensions that are not named are not split.

    Args:
      rules: a string `batch:data+pod;heads:model`, or a mapping name -> axis or axes.
    """

    rules: tuple[tuple[str, Axes], ...]
    _table: dict[str, Axes] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __init__(self, rules: str | Mapping[str, str | Iterable[str]] = "") -> None:
        items = _parse(rules) if isinstance(rules, str) else rules.items()
        table: dict[str, Axes] = {}
        for name, axes in items:
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            if name in table and table[name] != axes:
                raise UserError(f"layout: dimension {name!r} is given twice, as {table[name]} and {axes}")
            if len(set(axes)) != len(axes):
                raise UserError(f"layout: dimension {name!r} names an axis twice: {'+'.join(axes)}")
            table[name] = axes
        rules_ = tuple(sorted((n, a) for n, a in table.items() if a))
        object.__setattr__(self, "rules", rules_)
        object.__setattr__(self, "_table", dict(rules_))
        object.__setattr__(self, "_hash", hash(rules_))

    def __eq__(self, other: object) -> bool:
        return self.rules == other.rules if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __getitem__(self, name: str) -> Axes:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(n for n, _ in self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __str__(self) -> str:
        return ";".join(f"{n}:{'+'.join(a)}" for n, a in self.rules)

    def axes(self, name: str) -> Axes:
        """The mesh axes over which dimension `name` is split."""
        return self._table.get(name, ())

    def axes_of(self, names: Iterable[str]) -> tuple[Axes, ...]:
        """The same of several dimensions."""
        table = self._table
        return tuple([table.get(n, ()) for n in names])

    def split(self, names: Iterable[str]) -> list[str]:
        """Those of some dimensions that are split."""
        table = self._table
        return [n for n in names if n in table]

    def check(self, mesh: Mesh, known_dims: Mapping[str, int]) -> None:
        """Raises LayoutError unless every axis and dimension exists and every size divides.

        Args:
          known_dims: name -> size of every dimension of the model.
        """
        for name, axes in self.rules:
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
                    f"layout {self}: dimension {name!r} has size {known_dims[name]}, which is not divisible "
                    f"by the {ways} devices of {'+'.join(axes)}; choose a multiple of {ways} or another axis"
                )

    def splits(self, shape: Shape, what: str) -> tuple[Axes, ...]:
        """The axes of each dimension of `shape`; an axis may be used once. `what` names the tensor in
        errors."""
        out = tuple(self.axes(d.name) for d in shape)
        check_disjoint(dict(zip(shape.names, out, strict=True)), what)
        return out


def check_disjoint(splits: Mapping[str, Axes], what: str) -> None:
    """Raises LayoutError if two dimensions are split over the same mesh axis."""
    owner: dict[str, str] = {}
    for name, axes in splits.items():
        for axis in axes:
            if axis in owner:
                raise LayoutError(
                    f"{what} has both {owner[axis]!r} and {name!r} split over mesh axis {axis!r}; "
                    f"an axis can split one dimension of an operation: drop one of the two rules"
                )
            owner[axis] = name


def _parse(text: str) -> Iterable[tuple[str, Axes]]:
    for part in filter(None, (p.strip() for p in text.replace(",", ";").split(";"))):
        name, colon, axes = part.partition(":")
        found = tuple(a.strip() for a in axes.split("+"))
        if not colon or not name.strip() or not all(found):
            raise UserError(
                f"layout {text!r}: {part!r} is not DIM:AXIS or DIM:AXIS+AXIS; "
                "write for example 'batch:data;heads:model'"
            )
        yield name.strip(), found
