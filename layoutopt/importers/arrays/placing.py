"""A plan's splits of a function's arrays, and of the values in between, axis by axis.

JAX and PyTorch split whole axes, from the outside. An axis that is a product of factors, such as heads x
d_kv, can be split over the mesh axes of its outer factor, and also over those of the next factor if the outer
one is split to single elements. Nothing expresses a split of an inner factor alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutopt.importers.arrays.contract import KEY, Operand
from layoutopt.importers.arrays.origin import ArrayAxes, ImportedFunction
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program

Spec = tuple[Axes | None, ...]
"""Mesh axes per axis of an array; None: no split of whole axes expresses it."""


@dataclass(frozen=True)
class ArrayPlacing:
    """The placement of all arrays.

    Attributes:
      program: the model, lowered under the plan.
    """

    mesh: Mesh
    layout: Layout
    origin: ImportedFunction
    program: Program

    def axis(self, sizes: Sequence[int], splits: Sequence[Axes]) -> Axes | None:
        """The mesh axes of an axis with factors of these sizes and splits; None if whole axes cannot express
        them."""
        found: Axes = ()
        inside = True
        for size, axes in zip(sizes, splits, strict=True):
            if axes and not inside:
                return None
            found += axes
            inside = inside and self.mesh.group_size(axes) == size
        return found

    def value(self, v: Operand) -> Spec:
        """The placement of a value of the traced function; () for one that the model does not have, as the
        sorted rows of experts: propagation places it."""
        if v.shape and not self.origin.classes.all(v):
            return ()
        if v.dtype == KEY:
            return ((),) * len(v.shape)
        classes, names = self.origin.classes, self.origin.names
        dims = [[names[c] for c in classes.of(v, a)] for a in range(len(v.shape))]
        layout = self.layout.around(n for own in dims for n in own)
        return tuple(
            self.axis(classes.factors.of(v, a), list(map(layout.axes, own))) for a, own in enumerate(dims)
        )

    def argument(self, found: ArrayAxes) -> Spec:
        """The placement of an argument at the start of the step, but for parameters."""
        layout = self.layout.around(n for names in found.axes for n in names)
        return tuple(
            self.axis(sizes, list(map(layout.axes, names)))
            for names, sizes in zip(found.axes, found.sizes, strict=True)
        )

    def stored(self, array: ArrayAxes, slot: bool = False) -> Spec:
        """The placement of a parameter or of state between steps, or of a parameter's optimizer state.

        Raises:
          UserError: splits of whole axes cannot express it.
        """
        # Storage splits what a layer has, never the layers.
        first = int(array.layer is not None)
        found = self.program.variables.get(array.variable)
        if found is None:
            own: Sequence[Axes] = ((),) * (first + sum(map(len, array.axes)))
            return self._said(array, own[first:], 0)
        own = self._slots.get(array.variable, found.splits) if slot else found.splits
        return self._said(array, own[first:], found.variable.stacked - first)

    @cached_property
    def split_stored(self) -> frozenset[int]:
        """ids of the function's parameters and state that are stored otherwise than operations read them."""
        kept = (*self.origin.parameters.values(), *self.origin.state.values())
        own = zip(self.origin.block.ins, kept, strict=False)  # its first arguments
        return frozenset(id(v) for v, array in own if self.stored(array) != self.value(v))

    @cached_property
    def _slots(self) -> Mapping[str, Sequence[Axes]]:
        """Variable -> the splits of its optimizer state, where that has its dimensions."""
        known = self.program.variables
        kept = ((s.variable.slot_of or "", s.splits) for s in known.values())
        return {of: splits for of, splits in kept if of in known and len(splits) == len(known[of].splits)}

    def _said(self, array: ArrayAxes, splits: Sequence[Axes], layers: int) -> Spec:
        """How an array is stored: as operations read it, and then over the axes that storage alone adds.

        These cut the first axis that they divide, whatever lowering says: XLA lays what it gathers along
        another one out the other way round, and copies it element by element.

        Args:
          layers: axes in front that are never cut so.
        """
        rest, out, added = list(splits), list[Axes](), list[Axes]()
        layout = self.layout.around(n for names in array.axes for n in names)
        for a, (names, sizes) in enumerate(zip(array.axes, array.sizes, strict=True)):
            own, rest = rest[: len(names)], rest[len(names) :]
            read = [tuple(x for x in s if x in layout.axes(n)) for n, s in zip(names, own, strict=True)]
            more = tuple(x for n, s in zip(names, own, strict=True) for x in s if x not in layout.axes(n))
            axes = self.axis(sizes, read)
            if axes is None:
                inner, over = next((n, s) for n, s in zip(names[1:], read[1:], strict=True) if s)
                raise UserError(
                    f"{self.origin.front_end.plan}: the plan splits {inner!r} over {'+'.join(over)}, but "
                    f"{inner!r} is only an inner part of axis {a} of {array.path!r}, and "
                    f"{self.origin.front_end.splits} cannot split such a part; search again without pinning "
                    f"{inner!r}, or give {inner!r} an axis of its own in {array.path!r}"
                )
            out.append(axes)
            added.append(more)
        more = tuple(x for axes in added for x in axes)
        for a in range(layers, len(out)):
            if more and array.shape[a] % self.mesh.group_size(out[a] + more) == 0:
                added = [more if b == a else () for b in range(len(out))]
                break
        return tuple(x + y for x, y in zip(out, added, strict=True))


def inner_dims(arrays: Iterable[ArrayAxes], splits: str) -> dict[str, str]:
    """Dimensions that `splits` cannot split in some argument, with the reason."""
    found: dict[str, str] = {}
    for array in arrays:
        for a, (names, sizes) in enumerate(zip(array.axes, array.sizes, strict=True)):
            for inner in names[1:]:
                text = " x ".join(f"{n}:{size}" for n, size in zip(names, sizes, strict=True))
                found.setdefault(
                    inner,
                    f"{inner!r} is an inner part of axis {a} of {array.path!r} ({text}), and {splits} "
                    f"cannot split such a part; give {inner!r} an axis of its own in {array.path!r}",
                )
    return found
