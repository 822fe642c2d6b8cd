"""The splits of each dimension: tuples of mesh axes that divide it, without those that the user's pins and
prohibitions exclude.

The axes are in the order of the mesh unless all orders are allowed. A pin may have another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument
from layoutopt.space.kind import UNEQUAL, Choice, Chosen, Decision, LeftOut, Target, not_allowed
from layoutopt.space.parallelism import looped
from layoutopt.space.undivided import first_of
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import AT, ELSEWHERE, Axes, Layout
from mesh_tf_core.ir.mesh import NO_AXIS, Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.tracing.graph import Graph

ORDERS = ("mesh", "all")


Rules = str | Mapping[str, Axes | str] | None


def parse_rules(rules: Rules) -> dict[str, Axes]:
    """Dimension -> the axes that it must be split over; an axis `none` means not split."""
    pins: dict[str, Axes] = {}
    for dim, found in _parsed(rules, "pins"):
        if pins.get(dim, found) != found:
            raise UserError(
                f"two rules pin {dim!r}, to {'+'.join(pins[dim]) or 'none'} and to "
                f"{'+'.join(found) or 'none'}; remove one of them"
            )
        pins[dim] = found
    return pins


def parse_forbid(rules: Rules) -> dict[str, Axes]:
    """Dimension -> all axes that it may not be split over."""
    forbid: dict[str, Axes] = {}
    for dim, found in _parsed(rules, "forbid"):
        if not found:
            raise UserError(
                f"--forbid {dim}:none names no axis; to require a split of {dim!r}, use --pin {dim}:AXIS"
            )
        known = forbid.get(dim, ())
        forbid[dim] = (*known, *(a for a in found if a not in known))
    return forbid


def rules_text(rules: Rules) -> str | None:
    """Rules as text, which parses to the same; None if there are none."""
    if isinstance(rules, str):
        return rules or None
    return ";".join(f"{dim}:{'+'.join(axes) or NO_AXIS[0]}" for dim, axes in _parsed(rules)) or None


_rules = partial(argument, {}, plan=str, text=rules_text, names_axes=True, by_name=False, within=None)


@dataclass(frozen=True)
class Split(Decision):
    """The mesh axes that one dimension is split over, wherever it appears."""

    label = "splits"
    least = 0  # What splits hold depends on each other; who asks has a layout.
    asks: ClassVar[Mapping[str, Any]] = {
        "pins": _rules(
            Option(
                "--pin",
                "RULES",
                'Require a split, e.g. "batch:data"; "batch:none" keeps a dimension unsplit (repeatable).',
                several=True,
            ),
            parse=parse_rules,
        ),
        "forbid": _rules(
            Option("--forbid", "RULES", 'Forbid a split, e.g. "vocab:model" (repeatable).', several=True),
            parse=parse_forbid,
        ),
        "orders": argument(
            ORDERS[0],
            Option(
                "--orders",
                f"[{'|'.join(ORDERS)}]",
                "Orders of axes to consider where several axes split one dimension: mesh (the mesh's "
                "order) or all.",
                usual=ORDERS[0],
            ),
            parse=lambda value: value,
            plan=str,
            text=str,
            within=None,
        ),
    }

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        return {"orders": ORDERS[1]} if len(target.axes) > 1 else {}

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        """The order of the mesh: others multiply the layouts."""
        return {}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        yield from not_allowed(cls, target, allowed)
        if allowed.pins or allowed.forbid:
            yield LeftOut(cls.label, f"{cls.label} that --pin or --forbid exclude", finer=True)
        if uneven := [*_uneven(target)]:
            what = f"{cls.label} into {UNEQUAL}: {first_of(uneven)}"
            yield LeftOut(cls.label, what, finer=True)
        if target.axes:
            yield LeftOut(cls.label, f"{cls.label} of single operations", finer=True)

    @classmethod
    def check(cls, allowed: Space) -> None:
        if allowed.orders not in ORDERS:
            raise UserError(f"orders {allowed.orders!r}: choose one of {', '.join(ORDERS)}")

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        for dim, options in domains(graph, mesh, allowed).items():
            yield cls(dim, options)

    def apply(self, choice: Choice, to: Chosen) -> None:
        to.splits[self.subject] = choice

    def read(self, layout: Layout, options: Options) -> Choice:
        return layout.axes(self.subject)


def domains(graph: Graph, mesh: Mesh, allowed: Space) -> dict[str, tuple[Axes, ...]]:
    """Dimension name -> the tuples of axes it may be split over, `()` first.

    Raises:
      UserError: a pin or prohibition on an unknown dimension or axis, or a pin that the dimension's size
      does not allow.
    """
    sizes = graph.dims()
    loops = looped(graph)
    used = graph.remembered(
        "used dims",
        lambda: {name for n, _ in graph.walk() for i in n.inputs for name in graph.tensor(i).shape.names},
    )
    pins, forbid = allowed.pins, allowed.forbid
    for what, rules in (("pin", pins), ("forbid", forbid)):
        for name, axes in rules.items():
            dim, further, _ = name.partition(AT)
            if dim not in sizes:
                raise UserError(
                    f"--{what} {name}: no operation has this dimension; {known_names(dim, sizes)}"
                )
            if further and dim not in allowed.elsewhere:
                raise UserError(f"--{what} {name}: {dim!r} may not be split elsewhere; add --elsewhere {dim}")
            for axis in axes:
                mesh.size(axis)
    apart = inside(graph, allowed.stages)
    out: dict[str, tuple[Axes, ...]] = {}
    for name, found in sizes.items():
        if name in allowed.stages:
            continue
        banned = {*forbid.get(name, ()), *apart.get(name, ()), *allowed.apart}
        whole = name in loops or name in graph.unsplit or name not in used  # of variables nobody reads
        options = [()] if whole else list(split_options(mesh, found, banned, allowed.orders))
        if name in pins:
            wanted = pins[name]
            if set(wanted) not in map(set, options):
                if wanted and name in graph.unsplit:
                    raise UserError(
                        f"--pin {name}:{'+'.join(wanted)}: {graph.unsplit[name]}; remove this pin"
                    )
                if set(wanted) & set(apart.get(name, ())):
                    raise UserError(
                        f"--pin {name}:{'+'.join(wanted)}: pipeline stages use these axes; pin "
                        f"{name!r} to other axes, or remove --pipeline"
                    )
                raise UserError(why_not(name, wanted, mesh, found, name in loops, forbid.get(name, ())))
            options = [wanted]
        out[name] = tuple(options)
    return out


def inside(graph: Graph, stages: Mapping[str, Axes]) -> dict[str, Axes]:
    """Dimensions of values of stages -> the axes of the stages, which cannot split them."""
    found: dict[str, Axes] = {}
    for dim, axes in stages.items():
        names = graph.remembered((_spread, dim), partial(_spread, graph, dim))
        found |= {name: (*found.get(name, ()), *axes) for name in names}
    return found


def _spread(graph: Graph, dim: str) -> set[str]:
    """The dimensions of all values in the stages of some layers."""
    blocks = (b for b in graph.blocks if b.spread and b.dim.name == dim)
    held = {t for block in blocks for node, _ in block.walk() for t in (*node.inputs, *node.outputs)}
    return {name for t in held for name in graph.tensor(t).shape.names}


def _uneven(target: Target) -> Iterator[str]:
    """Dimensions that an axis of fewer devices does not divide."""
    graph = target.model.graph
    loops = looped(graph)
    ways = [target.mesh.size(axis) for axis in target.axes]
    for name, sizes in graph.dims().items():
        whole = name in loops or name in graph.unsplit
        if not whole and any(size > n and size % n for size in sizes for n in ways):
            yield name


def split_options(mesh: Mesh, sizes: Set[int], forbidden: set[str], orders: str) -> Iterator[Axes]:
    """The tuples of axes that divide all sizes, `()` first."""
    tuples = itertools.combinations if orders == "mesh" else itertools.permutations
    usable = [a for a in mesh.names if mesh.size(a) > 1 and a not in forbidden]
    for count in range(len(usable) + 1):
        for axes in tuples(usable, count):
            if all(size % mesh.group_size(axes) == 0 for size in sizes):
                yield axes


def why_not(name: str, axes: Axes, mesh: Mesh, sizes: Set[int], counted: bool, forbidden: Axes) -> str:
    """The reason why a pin is not among the splits of a dimension."""
    asked = f"--pin {name}:{'+'.join(axes) or 'none'}"
    if counted:
        return f"{asked}: {name!r} counts layers, which only pipeline stages can split; add --pipeline {name}"
    if set(axes) & set(forbidden):
        both = "+".join(a for a in axes if a in forbidden)
        return f"{asked}: --forbid excludes {both} for {name!r}; remove the pin or the prohibition"
    ways, over = mesh.group_size(axes), "+".join(axes)
    for size in sorted(sizes):
        if size % ways:
            return (
                f"{asked}: {name!r} has size {size}, not divisible by the {ways} devices of {over}; "
                "choose another axis or size"
            )
    return f"{asked}: an axis of size 1 splits nothing; remove this pin"


def _parsed(rules: Rules, what: str = "rules") -> Iterator[tuple[str, Axes]]:
    if not isinstance(rules, str | Mapping | None):
        raise UserError(
            f"{what} {rules!r}: write rules such as 'batch:data', or a dict of dimensions and axes"
        )
    if not isinstance(rules, str):
        for name, axes in (rules or {}).items():
            if isinstance(axes, str):
                yield from _parsed(f"{name}:{axes}")
            else:
                yield _checked(name), Layout({name: axes}).written.get(name, ())
        return
    for part in filter(None, (p.strip() for p in rules.replace(",", ";").split(";"))):
        dim, _, over = part.partition(":")
        name = _checked(dim.strip())
        if over.strip() in NO_AXIS:
            yield name, ()
        else:
            yield from Layout(part).written.items()


def _checked(name: str) -> str:
    """The name of a rule, which holds wherever the dimension appears, or elsewhere."""
    _, at, path = name.partition(AT)
    if at and path != ELSEWHERE:
        raise UserError(
            f"{name}: --pin and --forbid apply to a dimension wherever it appears; remove @{path}"
        )
    return name
