"""What a lowering asks besides the axes of dimensions: sizes and order of the mesh, storage of variables.

Everything else in a program follows from the graph and from which axes split which dimension; their names do
not matter. So where all that was asked has the same answers, on another mesh, for another storage, or with
the axes named otherwise, the program is the same but for the mesh that it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.offload import ACTIVATIONS, Offload, place_of
from mesh_tf_core.lower.redistribute import Move, Splits, plan_moves, straight
from mesh_tf_core.lower.storage import Stages, Storage

Question = tuple[Any, ...]
"""A method of `Oracle` and its arguments."""
Answers = tuple[tuple[Question, Any], ...]


class Oracle:
    """Answers the questions of one lowering, and notes them.

    Args:
      stages: of variables (see `storage`).
      known: name -> sizes of dimensions that the layout is known to divide; nothing is asked about these.
      real: the names that the mesh's axes have elsewhere, which decide between equally cheap moves.
      narrow: see `storage.narrow_reads`.
      offload: what lies in the hosts' memory.
      paddable: see `padding.paddable`.

    Attributes:
      asked: every question so far, with its answer.
      shards: the state of a variable may be split further than the layout says.
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        variables: Mapping[str, Variable],
        stages: Stages,
        known: Mapping[str, Set[int]] | None = None,
        real: Mapping[str, str] | None = None,
        narrow: Mapping[str, str] | None = None,
        offload: Offload = frozenset(),
        paddable: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self.offload = offload
        self.real, self.narrow = real, narrow or {}
        self.mesh, self.layout, self.variables, self.known = mesh, layout, variables, known or {}
        self.storage = Storage(mesh, layout, variables, stages, paddable)
        self.shards = bool(self.storage.stages)
        self.asked: dict[Question, Any] = {}
        self._answers: dict[Question, Any] = {}

    def _ask(self, *question: Any) -> Any:
        if question not in self.asked:
            self.asked[question] = self._answer(question)
        return self.asked[question]

    def _answer(self, question: Question) -> Any:
        if question not in self._answers:
            self._answers[question] = self._worked_out(*question)
        return self._answers[question]

    def _worked_out(self, what: str, *about: Any) -> Any:
        if what == "stage":
            return self.storage.stage(about[0]) >= about[1]
        if what == "host":
            return about in self.offload
        if what == "view":
            view = self.storage.view(about[0])
            return (*(view.axes(n) for n in self.variables[about[0]].shape.names), view.padded)
        if what == "ways":
            return self.mesh.group_size(about[0])
        if what == "divides":
            return about[0] % self.mesh.group_size(about[1]) == 0
        if what == "ordered":
            return tuple(a for a in self.mesh.names if a in about[0])
        return self._moves(*about)

    def _moves(self, have: Splits, want: Splits, sizes: tuple[int, ...], within: Axes) -> tuple[Move, ...]:
        named = {a for splits in (have, want) for split in splits for a in split}
        own = tuple((a, n) for a, n in self.mesh.axes if a in named or a not in within)
        if self.real is None:
            return plan_moves(have, want, sizes, own)
        real = self.real
        here = {name: ours for ours, name in real.items()}
        axes = tuple((real[a], n) for a, n in own)
        there = [tuple(tuple(real[a] for a in split) for split in splits) for splits in (have, want)]
        moves = plan_moves(there[0], there[1], sizes, axes)
        return tuple(replace(m, axes=tuple(here[a] for a in m.axes)) for m in moves)

    def agree(self, answers: Iterable[tuple[Question, Any]]) -> bool:
        """Whether the answers to all these questions would be the same here."""
        return all(self._answer(question) == answer for question, answer in answers)

    def stage(self, variable: str, least: int) -> bool:
        """Whether a variable is stored at a stage, or a later one."""
        return bool(self._ask("stage", variable, least))

    def view(self, variable: str) -> Layout:
        """The layout in which the state of a variable is kept and updated."""
        if not self.stage(variable, 1):
            return self.storage.read_in(variable)
        self._ask("view", variable)
        return self.storage.view(variable)

    def stored(self, variable: Variable) -> Layout:
        """The layout in which a variable (or an optimizer's slot) lies between steps."""
        if variable.slot_of is not None:
            return self.view(variable.slot_of)
        least = 1 if variable.name in self.narrow else 3
        name = variable.name
        return self.view(name) if self.stage(name, least) else self.storage.read_in(name)

    def on_host(self, variable: Variable) -> bool:
        """Whether a variable (or an optimizer's slot) lies in the hosts' memory between steps."""
        place = place_of(variable)
        return place is not None and bool(self._ask("host", *place))

    def keeps_on_host(self, dim: str) -> bool:
        """Whether what loops over a dimension keep for their second runs lies in the hosts' memory."""
        return bool(self._ask("host", ACTIVATIONS, dim))

    def half(self, variable: Variable) -> str | None:
        """The dtype in which a variable is gathered as a step begins, if its master copy alone is stored
        split."""
        dtype = self.narrow.get(variable.name)
        if dtype is None or not self.stage(variable.name, 1) or self.stage(variable.name, 3):
            return None
        return dtype

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

    def divides(self, dim: Dim, axes: Axes) -> bool:
        """Whether a dimension can be split over some axes."""
        if not axes or ((sizes := self.known.get(dim.name)) and dim.size in sizes):
            return True
        return bool(self._ask("divides", dim.size, axes))

    def moves(
        self, have: Splits, want: Splits, sizes: tuple[int, ...], within: Axes = ()
    ) -> tuple[Move, ...]:
        """The cheapest steps from some splits of a value to others.

        Args:
          within: axes along which devices hold values of their own, over which nothing is exchanged.
        """
        simple = straight(have, want)
        if simple is not None:
            return simple
        found: tuple[Move, ...] = self._ask("moves", have, want, sizes, within)
        return found
