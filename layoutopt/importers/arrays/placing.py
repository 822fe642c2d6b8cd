"""A plan's splits of a function's arrays, and of the values in between, axis by axis.

JAX and PyTorch split whole axes, from the outside. An axis that is a product of factors, such as heads x
d_kv, can be split over the mesh axes of its outer factor, and also over those of the next factor if the outer
one is split to single elements. Nothing expresses a split of an inner factor alone.

The function of an imported model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from layoutopt.front_ends import FrontEnd
from layoutopt.importers.arrays.classes import Classes, FactorNode
from layoutopt.importers.arrays.contract import KEY, Equation, EquationBlock, Operand
from layoutopt.importers.arrays.layers import PRODUCTS
from layoutopt.importers.arrays.reroll import Rerolled
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program


@dataclass(frozen=True)
class ArrayAxes:
    """The axes of one of the function's arrays as dimensions.

    Attributes:
      path: of the array among the arguments.
      axes: per axis the names of its factors, from the outermost; none for an axis of one element.
      sizes: of these factors.
      variable: of the graph that holds it.
      layer: where layers became a loop, and the variable is the stack of all of theirs, which of them.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    variable: str = ""
    layer: int | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """Every axis by its factors."""
        return tuple(a[0] if len(a) == 1 else f"({' '.join(a)})" if a else "1" for a in self.axes)

    def __str__(self) -> str:
        return f"{self.path} [{' '.join(self.named)}]"


@dataclass(frozen=True)
class ImportedFunction:
    """The function, its arrays, and the inferred dimensions.

    Attributes:
      loss: the user's function; `arguments`: their types, in its order, and `roles` their roles:
        params, state, batch or rng.
      parameters, state, batch: path -> its dimensions.
      results: the paths of the arrays that it returns, the loss first.
      sources: number of a node of the graph -> file and line of the user's code.
      notes: parts that were left out.
      block, classes, names: the traced function, and the class and name of every factor of every axis.
      rerolled: the same with its equal layers as loops; the graph is made of it.
      tensors: id of a value of that -> the graph's tensor.
      front_end: of the function.
    """

    loss: Callable[..., Any] = field(repr=False)
    arguments: tuple[Any, ...] = field(repr=False)
    roles: tuple[str, ...]
    parameters: Mapping[str, ArrayAxes]
    state: Mapping[str, ArrayAxes]
    batch: Mapping[str, ArrayAxes]
    results: tuple[str, ...]
    sources: Mapping[int, str] = field(repr=False)
    notes: tuple[str, ...]
    block: EquationBlock = field(repr=False)
    classes: Classes = field(repr=False)
    names: Mapping[FactorNode, str] = field(repr=False)
    rerolled: Rerolled = field(repr=False)
    tensors: Mapping[int, int] = field(repr=False)
    front_end: FrontEnd = field(repr=False)

    def loop_dims(self, loop: Equation) -> frozenset[str]:
        """The names of the dimensions of a loop's iterations."""
        carry = loop.params["carry"]
        stacks = [*loop.ins[loop.params["consts"] + carry :], *loop.outs[carry:]]
        return frozenset(self.names[c] for x in stacks if x.shape for c in self.classes.of(x, 0))

    @property
    def keys(self) -> list[bool]:
        """True for each array of the arguments that holds random keys."""
        wrapped = {id(e.ins[0]) for e in self.block.walk() if e.prim == "random_wrap"}
        return [v.dtype == KEY or id(v) in wrapped for v in self.block.ins]

    @property
    def recomputed(self) -> frozenset[str]:
        """Dimensions of the loops that the function itself recomputes in backward."""
        return frozenset(dim for loop in self._recomputed() for dim in self.loop_dims(loop))

    @property
    def parts_recomputed(self) -> list[str]:
        """File and line of every checkpoint of the function that is around less than a loop's body."""
        whole = {id(e) for loop in self._recomputed() if loop.body for e in loop.body.equations}
        parts = (e for e in self.rerolled.block.walk() if e.prim in PRODUCTS and id(e) not in whole)
        return list(dict.fromkeys(e.recomputed for e in parts if e.recomputed))

    def _recomputed(self) -> Iterator[Equation]:
        for e in self.rerolled.block.walk():
            if e.prim == "scan" and e.body is not None:
                products = [inner.recomputed for inner in e.body.equations if inner.prim in PRODUCTS]
                if products and all(products):
                    yield e


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
        """The mesh axes of an axis with factors of these sizes and splits; None if no whole axes say it."""
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
