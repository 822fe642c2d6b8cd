"""Memoised queries of a lowering: sizes and order of the mesh, rows of its table.

Everything else in a program follows from the graph and from which axes split which dimension; their names do
not matter. If all queries have the same answers on another mesh, for other placements, or with other names of
axes, the program is therefore the same except for its mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.values import Splits
from mesh_tf_core.lower.placement import Placement, Row
from mesh_tf_core.lower.redistribute import Relayout, plan_moves, straight
from mesh_tf_core.lower.storage import BETWEEN, STATE, VARIABLE

Question = tuple[Any, ...]
"""A method of `Oracle` and its arguments."""
Answers = tuple[tuple[Question, Any], ...]


class Oracle:
    """Answers the questions of one lowering, and notes them.

    Args:
      placement: where values live.
      known: name -> sizes of dimensions that the layout is known to divide; these need no query.
      real: the real names of the mesh's axes, which decide between equally cheap moves.
      apart: axes of replicas, which nothing is moved over.

    Attributes:
      asked: every query so far, with its answer.
      shards: the state of a variable may be split further than in the layout.
    """

    def __init__(
        self,
        placement: Placement,
        known: Mapping[str, Set[int]] | None = None,
        real: Mapping[str, str] | None = None,
        apart: Axes = (),
    ) -> None:
        self.placement, self.known, self.real, self.apart = placement, known or {}, real, apart
        self.mesh, self.layout = placement.mesh, placement.layout
        self.shards = bool(placement.stages)
        self.asked: dict[Question, Any] = {}
        self._answers: dict[Question, Any] = {}

    @classmethod
    def of(cls, program: Program) -> Oracle:
        """The queries about a program's mesh only."""
        return cls(Placement(program.mesh, program.layout, {}))

    def _ask(self, *question: Any) -> Any:
        if question not in self.asked:
            self.asked[question] = self._answer(question)
        return self.asked[question]

    def _answer(self, question: Question) -> Any:
        if question not in self._answers:
            self._answers[question] = self._worked_out(*question)
        return self._answers[question]

    def _worked_out(self, what: str, *about: Any) -> Any:
        if what == "row":
            return self.placement.row(*about)
        if what == "ways":
            return self.mesh.group_size(about[0])
        if what == "divides":
            return about[0] % self.mesh.group_size(about[1]) == 0
        if what == "spare":
            return tuple(a for a, n in self.mesh.axes if n > 1 and a not in {*about[0], *self.apart})
        if what == "ordered":
            return tuple(a for a in self.mesh.names if a in about[0])
        return self._moves(*about)

    def _moves(
        self, have: Splits, want: Splits, sizes: tuple[int, ...], within: Axes
    ) -> tuple[Relayout, ...]:
        named = {a for splits in (have, want) for split in splits for a in split}
        own = tuple((a, n) for a, n in self.mesh.axes if a in named or a not in (*within, *self.apart))
        if self.real is None:
            return plan_moves(have, want, sizes, own)
        real = self.real
        here = {name: ours for ours, name in real.items()}
        axes = tuple((real[a], n) for a, n in own)
        there = [tuple(tuple(real[a] for a in split) for split in splits) for splits in (have, want)]
        moves = plan_moves(there[0], there[1], sizes, axes)
        return tuple(m._replace(axes=tuple(here[a] for a in m.axes)) for m in moves)

    def agree(self, answers: Iterable[tuple[Question, Any]]) -> bool:
        """True if the answers to all these questions would be the same here."""
        return all(self._answer(question) == answer for question, answer in answers)

    def row(self, what: str, name: str, phase: str) -> Row:
        """A row of where values live (see `Placement.row`)."""
        row: Row = self._ask("row", what, name, phase)
        return row

    def stored(self, variable: Variable) -> Row:
        """The storage of a variable (or an optimizer's slot) between steps."""
        if variable.slot_of is not None:
            return self.row(STATE, variable.slot_of, BETWEEN)
        return self.row(VARIABLE, variable.name, BETWEEN)

    def ways(self, axes: Axes) -> int:
        """Number of devices in a group over some axes."""
        return int(self._ask("ways", axes)) if axes else 1

    def ordered(self, axes: Iterable[str]) -> Axes:
        """Axes in the order of the mesh."""
        found = frozenset(axes)
        if len(found) < 2:
            return tuple(found)
        ordered: Axes = self._ask("ordered", found)
        return ordered

    def spare(self, used: Iterable[str]) -> Axes:
        """The axes of several devices that are unused, in the order of the mesh."""
        found: Axes = self._ask("spare", frozenset(used))
        return found

    def divides(self, dim: Dim, axes: Axes) -> bool:
        """True if a dimension can be split over some axes of the layout."""
        if not axes or ((sizes := self.known.get(dim.name)) and dim.size in sizes):
            return True
        return self.divides_evenly(dim, axes)

    def divides_evenly(self, dim: Dim, axes: Axes) -> bool:
        """True if a dimension can be split over any axes."""
        return bool(self._ask("divides", dim.size, axes))

    def moves(
        self, have: Splits, want: Splits, sizes: tuple[int, ...], within: Axes = ()
    ) -> tuple[Relayout, ...]:
        """The cheapest steps from some splits of a value to others.

        Args:
          within: axes along which devices hold separate values, over which nothing is exchanged.
        """
        simple = straight(have, want)
        if simple is not None:
            return simple
        found: tuple[Relayout, ...] = self._ask("moves", have, want, sizes, within)
        return found
