"""A traced function as a block of plain equations: the visitor of jaxprs that the graph is written from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import (
    FLAT,
    KEY,
    CapturedArray,
    Constants,
    ConvNumbers,
    Equation,
    EquationBlock,
    IndexNumbers,
    Operand,
    RaggedNumbers,
    Var,
)
from layoutopt.importers.arrays.mixtures import sorts_left, without_sorts
from layoutopt.importers.arrays.model import KEEPS
from layoutopt.importers.jax.internals import is_literal, jax_module, type_of, without_dead
from layoutopt.importers.jax.replay import RANDOM, Site, interpret

REMAT = ("remat2", "checkpoint", "remat")


@dataclass(frozen=True)
class TracedBlock:
    """A function of arrays as a block.

    Attributes:
      results: pytree of the results, with numbers of the block's results as leaves.
      notes: parts of the function that are not imported.
    """

    block: EquationBlock
    results: Any
    notes: Sequence[str]


def traced(fn: Callable[..., Any], args: Sequence[Any]) -> TracedBlock:
    """The block of fn(*args), for pytrees of types; its variables are in the order of the leaves."""
    jax = jax_module()
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    reader = JaxprReader(jax)
    ins = [reader.var(v) for v in closed.jaxpr.invars]
    flat, tree = jax.tree_util.tree_flatten(shapes)
    block = reader.block(closed, ins)
    return TracedBlock(block, jax.tree_util.tree_unflatten(tree, range(len(flat))), tuple(reader.notes))


class JaxprReader:
    """Writes jaxprs as blocks of plain equations.

    Attributes:
      notes: parts of the function that are not imported.
    """

    def __init__(self, jax: Any) -> None:
        self.jax = jax
        self.notes: dict[str, None] = {}
        self._inside = 0
        self._made: list[Equation] = []
        self._constants = Constants()

    def var(self, v: Any) -> Var:
        """A variable for one of JAX's."""
        return Var(tuple(map(int, getattr(v.aval, "shape", ()))), type_of(v.aval))

    def block(self, closed: Any, ins: list[Var], scope: str = "", where: str = "") -> EquationBlock:
        """The block of a closed jaxpr with the variables `ins`."""
        block = EquationBlock(ins)
        outer, self._made = self._made, block.equations
        block.outs = interpret(self, without_dead(closed), list[Operand](ins), scope=scope, where=where)
        self._made = outer
        block = without_sorts(block)
        self.notes |= dict.fromkeys(sorts_left(block))
        return block

    def constant(self, value: Any, aval: Any) -> Operand:
        """A constant as an operand."""
        dtype = type_of(aval)
        if dtype == KEY:
            return CapturedArray(np.asarray(self.jax.random.key_data(value)), tuple(aval.shape), KEY)
        return self._constants.of(np.asarray(value), dtype)

    def equation(self, site: Site, ins: Sequence[Operand]) -> Sequence[Operand]:
        """Appends an operation, of a loop with its body."""
        outs = [self.var(v) for v in site.eqn.outvars]
        # A random function that is taken as a whole has its operands alone.
        params = {} if site.name in RANDOM.values() else {k: _plain(v) for k, v in site.eqn.params.items()}
        made = Equation(site.name, list(ins), outs, params, site.where, site.scope)
        if site.name == "scan":
            made.params, inner = self._scan(site), params["jaxpr"]
            made.body = self.block(inner, [self.var(v) for v in inner.jaxpr.invars], site.scope, site.where)
        self._made.append(made)
        return outs

    def call(
        self, site: Site, ins: Sequence[Operand], inline: Callable[[], Sequence[Operand]]
    ) -> Sequence[Operand]:
        """Appends the equations of a call, or it alone with the derivative that its author wrote."""
        if site.name == "custom" and not (site.own or self._inside):
            outs = [self.var(v) for v in site.eqn.outvars]
            made = Equation("custom", list(ins), outs, {}, site.where, site.scope)
            self._custom(made, site)
            self._made.append(made)
            return outs
        before = len(self._made)
        found = inline()
        equations = self._made[before:]
        if site.own:
            _flattened(equations)
        if site.name in REMAT and self._saves_nothing(site):
            for each in equations:
                each.recomputed = site.where or "?"
        return found

    def _saves_nothing(self, site: Site) -> bool:
        """True if a jax.checkpoint recomputes all that it computes."""
        given = site.eqn.params.get("policy")
        policy = str(getattr(given, "__name__", given))
        if policy == "None" or re.match(r"nothing_?saveable", policy, re.IGNORECASE):
            return True
        self.notes[f"{site.where}: jax.checkpoint with the policy {policy} is ignored; {KEEPS}"] = None
        return False

    def _scan(self, site: Site) -> dict[str, Any]:
        """The parameters of a scan: its length, and how many of its operands are constants and carried.

        The shapes say it, in every release of JAX: what is read or written element by element has one
        dimension more outside than inside.
        """
        eqn, inner = site.eqn, site.eqn.params["jaxpr"].jaxpr
        whole, carry = (
            sum(outer.aval.ndim == v.aval.ndim for outer, v in zip(outside, inside, strict=True))
            for outside, inside in ((eqn.invars, inner.invars), (eqn.outvars, inner.outvars))
        )
        length, reverse = int(eqn.params["length"]), bool(eqn.params["reverse"])
        return {"length": length, "reverse": reverse, "consts": whole - carry, "carry": carry}

    def _custom(self, made: Equation, site: Site) -> None:
        """The body of a function, and its own derivative for the operands with fractions."""
        jax, eqn, inner = self.jax, site.eqn, site.inner
        from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

        closed = ClosedJaxpr(self._alone(eqn, inner), ())
        function = jaxpr_as_fun(closed)
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]

        def fractions(x: Any) -> bool:
            return bool(jax.dtypes.issubdtype(x.dtype, np.floating))

        real = [i for i, t in enumerate(types) if fractions(t)]

        def differentiated(xs: Sequence[Any]) -> Any:
            def of_real(*some: Any) -> Any:
                given = list(xs)
                for i, x in zip(real, some, strict=True):
                    given[i] = x
                return function(*given)

            return jax.vjp(of_real, *(xs[i] for i in real))

        def backward(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            ys, pull = differentiated(xs)
            given = iter(cotangents)
            return pull([next(given) if fractions(y) else np.zeros(y.shape, jax.dtypes.float0) for y in ys])

        results = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        floats = [t for t in results if fractions(t)]
        back = jax.make_jaxpr(backward)(types, floats)
        made.params = {"real": tuple(real)}
        ins = [self.var(v) for v in closed.jaxpr.invars]
        # Literals of the call are not variables of the body, and an operand given twice is one.
        given = [*map(id, eqn.invars)]
        made.ins = [made.ins[given.index(id(v))] for v in closed.jaxpr.invars]
        # What a derivative is taken of has the value that its author's forward gives, which may be another.
        if real:
            forward = jax.make_jaxpr(lambda *xs: differentiated(xs)[0])(*types)
        else:
            forward = self._primal(eqn, inner, closed, types)
        # Nobody differentiates these once more: what they call is its plain body.
        self._inside += 1
        made.body = self.block(forward, ins, made.scope, made.where)
        made.backward = self.block(back, [self.var(v) for v in back.jaxpr.invars], made.scope, made.where)
        self._inside -= 1

    def _alone(self, eqn: Any, inner: Any) -> Any:
        """A jaxpr of one call alone."""
        seen = dict.fromkeys(v for v in eqn.invars if not is_literal(v))
        return inner.jaxpr.replace(
            constvars=[], invars=list(seen), outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects
        )

    def _primal(self, eqn: Any, inner: Any, closed: Any, types: Sequence[Any]) -> Any:
        """The call's own body as a function of the variables of `closed`."""
        from jax.extend.core import jaxpr_as_fun

        body = jaxpr_as_fun(inner)

        def call(*xs: Any) -> Any:
            given = dict(zip(map(id, closed.jaxpr.invars), xs, strict=True))
            return body(*(v.val if is_literal(v) else given[id(v)] for v in eqn.invars))

        return self.jax.make_jaxpr(call)(*types)


def _flattened(equations: Sequence[Equation]) -> None:
    """Marks what is flat at its corners in a function of JAX with a derivative of its own: the modulus (in
    `logaddexp`), and ends that nothing but other ends are beside (`relu`, `relu6`)."""
    ends = {e.prim for e in equations} <= {"max", "min", "broadcast_in_dim", "convert_element_type"}
    for e in equations:
        if e.prim == "abs" or (ends and e.prim in ("max", "min")):
            e.params = {**e.params, FLAT: True}


_NUMBERS = {
    **dict.fromkeys(("GatherDimensionNumbers", "ScatterDimensionNumbers"), IndexNumbers),
    "ConvDimensionNumbers": ConvNumbers,
    "RaggedDotDimensionNumbers": RaggedNumbers,
}
"""JAX's record of axes -> the contract's."""


def _plain(x: Any) -> Any:
    """A parameter as the contract has it: Python's whole numbers for NumPy's, also in tuples, text for enums,
    the contract's records for JAX's."""
    if isinstance(x, np.integer):
        return int(x)
    if isinstance(x, Enum):
        return x.name
    if record := _NUMBERS.get(type(x).__name__):
        own = x if isinstance(x, tuple) else (getattr(x, f.name) for f in fields(record))
        return record(*map(_tuples, own))
    return tuple(map(_plain, x)) if type(x) is tuple else x


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, tuple | list) else int(x)
