"""Layouts that a search predicts before it lists its subproblems: an earlier plan's, the pinned one, and
those that experts would write (`baselines`), with stages and microbatches where the space has them.

Each takes milliseconds, and no table. So a search has an answer soon, however many subproblems there are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from layoutopt.optimize.baselines import by_name
from layoutopt.optimize.request import Request
from layoutopt.optimize.subproblems import Subproblem, SubproblemKey, listed, possible, related
from layoutopt.plan.build import Plan
from layoutopt.space.splits import Split
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model

EARLIER, PINS, LEAN = "the given plan", "the pins", "with the least memory"
"""The origin of a layout, in words, if it is not a named strategy."""


class FirstLayout(NamedTuple):
    """A layout that is known before a search, as `Incumbents.offer` takes it.

    Attributes:
      origin: where it comes from, in words.
    """

    mesh: Mesh
    layout: Layout
    options: Options
    origin: str


class WarmStart:
    """The layouts that a search predicts first.

    Args:
      shapes: meshes of the search.
      start: an earlier plan; it counts if its mesh has one of these shapes.
    """

    def __init__(self, request: Request, shapes: Sequence[Mesh], start: Plan | None = None) -> None:
        self.request, self.shapes, self.start = request, shapes, start

    @cached_property
    def problems(self) -> list[Subproblem]:
        """The problems of the search, and those that the model refuses."""
        request = self.request
        return [*related(listed(request.model, self.shapes, request.allowed, request.evaluator.near))]

    def possible(self) -> Iterator[Subproblem]:
        """The problems that are not known to be refused; they are listed once these are asked for."""
        yield from possible(self.request.model, self.shapes, self.request.allowed, self.problems)

    def earlier(self) -> Iterator[FirstLayout]:
        """The layout of the earlier plan, on the mesh of the same shape."""
        if (plan := self.start) is None:
            return
        for mesh in self.shapes:
            if mesh.shape == plan.mesh.shape:
                names = dict(zip(plan.mesh.names, mesh.names, strict=True))
                yield FirstLayout(mesh, plan.layout.renamed(names), plan.options.renamed(names), EARLIER)

    def each_use(self, hopeful: Callable[[Subproblem], bool]) -> Iterator[Subproblem]:
        """The possible problem of every use of stages that recomputes most, if it is `hopeful`: bounds tell
        before it has a graph. First that with the least bound."""
        uses = defaultdict[SubproblemKey, list[Subproblem]](list)
        for each in (each for each in reversed(self.problems) if each.key.stages):
            each.bound_by_share(self.request.evaluator)
            uses[each.key._replace(again=frozenset())].append(each)
        for use in sorted(uses.values(), key=lambda use: use[0].bounds.lower().value):
            yield from islice((each for each in use if hopeful(each) and not each.refused), 1)

    def leanest_first(self) -> list[Subproblem]:
        """The problems in which a device has the fewest examples at a time first."""
        model = self.request.model
        size = model.examples if model.batch_dim is not None else 1

        def pieces(each: Subproblem) -> int:
            others = each.mesh.devices // math.prod(each.stages.values())
            return each.microbatches * math.gcd(others, size // each.microbatches)

        return sorted(self.problems, key=lambda each: -pieces(each))


def named(model: Model, subproblem: Subproblem, lean: bool) -> Iterator[FirstLayout]:
    """Layouts by name in a problem: its stages and pins, and what a name splits over the other axes.

    Args:
      lean: with the options that hold least; else as written.
    """
    mesh, decided = subproblem.mesh, subproblem.decided
    fixed, plain = decided.read({})
    splits = {name: decided.options[name] for name in decided.of(Split)}
    pinned = [n for n, options in splits.items() if options != ((),) and len(options) == 1]
    taken = {axis for name in pinned for axis in fixed.axes(name)}  # by stages, too

    def within(dim: str, axes: Axes) -> Axes:
        """The widest option over these axes."""
        free = {*axes} - taken
        return max((o for o in splits.get(dim, ((),)) if {*o} <= free), key=mesh.group_size, default=())

    staged = {axis for axes in decided.stages.values() for axis in axes}
    rest = Mesh([(axis, n) for axis, n in mesh.axes if axis not in staged])
    whole, *split = (found for found in by_name(model, rest) if found[1] == rest)
    # Without any split a layout is legal soonest, and holds most.
    for name, _, layout, options in (*split, whole) if lean else (whole, *split):
        wide = Layout({dim: within(dim, axes) for dim, axes in layout.written.items()} | dict(fixed.written))
        storage = {**plain.storage, **options.storage}
        origin = PINS if wide == fixed and {*pinned} - {*decided.stages} else name
        how = decided.least_memory if lean else replace(plain, storage=storage)
        yield FirstLayout(mesh, wide, how, origin + f", {LEAN}" * lean)
