"""What each dimension may be split over: tuples of mesh axes that divide it, less what the user pins and
forbids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.tracing.graph import Graph

NOWHERE = ("none", "-")
"""Written as an axis in a pin, `batch:none`: not split at all."""


def domains(
    graph: Graph, mesh: Mesh, pins: Mapping[str, Axes] | None = None, forbid: Mapping[str, Axes] | None = None
) -> dict[str, tuple[Axes, ...]]:
    """Dimension name -> the tuples of axes it may be split over, `()` first.

    Args:
      pins: dimension -> the axes it must be split over (`()`: none).
      forbid: dimension -> axes it may not be split over.

    Raises:
      UserError: a pin or prohibition on an unknown dimension or axis, or a pin that the dimension's size
      does not allow.
    """
    sizes = graph.dims()
    counted = {b.dim.name for b in graph.blocks if b.dim is not None}
    pins, forbid = dict(pins or {}), dict(forbid or {})
    for what, rules in (("pin", pins), ("forbid", forbid)):
        for name, axes in rules.items():
            if name not in sizes:
                raise UserError(
                    f"--{what} {name}: no operation has this dimension; {known_names(name, sizes)}"
                )
            for axis in axes:
                mesh.size(axis)
    out: dict[str, tuple[Axes, ...]] = {}
    for name, found in sizes.items():
        options = [()] if name in counted else list(_options(mesh, found, set(forbid.get(name, ()))))
        if name in pins:
            wanted = pins[name]
            if wanted not in options:
                raise UserError(_why_not(name, wanted, mesh, found, name in counted, forbid.get(name, ())))
            options = [wanted]
        out[name] = tuple(options)
    return out


def _options(mesh: Mesh, sizes: set[int], forbidden: set[str]) -> Iterator[Axes]:
    usable = [a for a in mesh.names if mesh.size(a) > 1 and a not in forbidden]
    for count in range(len(usable) + 1):
        for axes in itertools.combinations(usable, count):
            if all(size % mesh.group_size(axes) == 0 for size in sizes):
                yield axes


def _why_not(name: str, axes: Axes, mesh: Mesh, sizes: set[int], counted: bool, forbidden: Axes) -> str:
    asked = f"--pin {name}:{'+'.join(axes) or 'none'}"
    if counted:
        return f"{asked}: {name!r} counts the layers of a loop and cannot be split; drop this pin"
    if set(axes) & set(forbidden):
        return f"{asked}: --forbid {name}:{'+'.join(forbidden)} forbids the same split; drop one of the two"
    ways, over = mesh.group_size(axes), "+".join(axes)
    for size in sorted(sizes):
        if size % ways:
            return (
                f"{asked}: {name!r} has size {size}, not divisible by the {ways} devices of {over}; "
                "choose another axis or size"
            )
    if any(mesh.size(a) == 1 for a in axes):
        return f"{asked}: an axis of size 1 splits nothing; leave it out"
    return f"{asked}: write the axes in the order of the mesh, {'+'.join(a for a in mesh.names if a in axes)}"


def parse_rules(rules: str | Mapping[str, Axes] | None) -> dict[str, Axes]:
    """Dimension -> the axes that it must be split over; an axis `none` means not split."""
    pins: dict[str, Axes] = {}
    for dim, found in _parsed(rules):
        if pins.get(dim, found) != found:
            raise UserError(
                f"{dim!r} is asked to be split over {'+'.join(pins[dim]) or 'none'} and over "
                f"{'+'.join(found) or 'none'}: these contradict each other; keep one"
            )
        pins[dim] = found
    return pins


def parse_forbid(rules: str | Mapping[str, Axes] | None) -> dict[str, Axes]:
    """Dimension -> all axes that it may not be split over."""
    forbid: dict[str, Axes] = {}
    for dim, found in _parsed(rules):
        if not found:
            raise UserError(f"--forbid {dim}:none names no axis; to have {dim!r} split, pin it to one")
        known = forbid.get(dim, ())
        forbid[dim] = (*known, *(a for a in found if a not in known))
    return forbid


def _parsed(rules: str | Mapping[str, Axes] | None) -> Iterator[tuple[str, Axes]]:
    if not isinstance(rules, str):
        yield from ((dim, Layout({dim: axes}).axes(dim)) for dim, axes in (rules or {}).items())
        return
    for part in filter(None, (p.strip() for p in rules.replace(",", ";").split(";"))):
        dim, _, axes = part.partition(":")
        if axes.strip() in NOWHERE:
            yield dim.strip(), ()
        else:
            yield from Layout(part).items()
