"""The function of an imported model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from layoutopt.front_ends import FrontEnd
from layoutopt.importers.arrays.classes import Classes, FactorNode
from layoutopt.importers.arrays.contract import KEY, Equation, EquationBlock
from layoutopt.importers.arrays.layers import PRODUCTS
from layoutopt.importers.arrays.reroll import Rerolled


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
