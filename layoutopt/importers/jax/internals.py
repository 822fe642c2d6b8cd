"""The importer's access to JAX itself; no other module here imports it.

Between versions `scan`, `jit` and the homes of jaxprs differ, which ends here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from layoutopt.importers.jax.equations import (
    FLAT,
    KEY,
    CapturedArray,
    Equation,
    EquationBlock,
    Operand,
    Var,
    constant,
)
from mesh_tf_core.errors import UserError, not_installed

CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "call",
    "remat2",
    "checkpoint",
    "remat",
    "core_closed_call",
)
REMAT = ("remat2", "checkpoint", "remat")
KEEPS = "--recompute DIM:keep=KIND says what layers that run again keep"
RANDOM = {"_uniform": "random_uniform", "_normal_real": "random_normal", "_normal": "random_normal"}
"""Functions of jax.random that are taken as a whole."""
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
"""Functions with derivatives of their own."""
_HERE = str(Path(__file__).resolve().parent)


def jax_module() -> Any:
    """JAX, or a UserError that says how to get it."""
    try:
        import jax
    except ImportError as error:
        raise not_installed("JAX", "jax", "a model from JAX") from error
    return jax


def dtype_of(dtype: Any) -> str:
    """JAX's element type by its name; KEY of random keys."""
    jax = jax_module()
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return KEY
    return np.dtype(dtype).name


@dataclass(frozen=True)
class TracedBlock:
    """A function of arrays as a block.

    Attributes:
      results: pytree of the results, with numbers of the block's results as leaves.
      notes: what the function says that is not kept.
    """

    block: EquationBlock
    results: Any
    notes: Sequence[str]


def traced(fn: Callable[..., Any], args: Sequence[Any]) -> TracedBlock:
    """The block of fn(*args), for pytrees of types; its variables come in the order of the leaves."""
    jax = jax_module()
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    reader = JaxprReader(jax)
    ins = [reader.var(v) for v in closed.jaxpr.invars]
    flat, tree = jax.tree_util.tree_flatten(shapes)
    block = reader.block(closed, ins)
    return TracedBlock(block, jax.tree_util.tree_unflatten(tree, range(len(flat))), tuple(reader.notes))


class JaxprReader:
    """Turns jaxprs into blocks."""

    def __init__(self, jax: Any) -> None:
        self.jax = jax
        import jax.extend.core as core

        self.core = core
        self.notes: dict[str, None] = {}
        self.inside = 0
        self._constants: dict[tuple[Any, ...], CapturedArray] = {}

    def var(self, v: Any) -> Var:
        aval = v.aval
        return Var(tuple(map(int, getattr(aval, "shape", ()))), self.dtype(aval))

    def dtype(self, aval: Any) -> str:
        return dtype_of(aval.dtype) if hasattr(aval, "dtype") else "token"

    def block(self, closed: Any, ins: list[Var], prefix: str = "", where: str = "") -> EquationBlock:
        """The block of a closed jaxpr, whose variables are `ins`."""
        closed = without_dead(closed)
        block = EquationBlock(ins)
        block.outs = self.inline(block.equations, closed, list(ins), prefix, where)
        return block

    def inline(
        self, out: list[Equation], closed: Any, ins: Sequence[Operand], prefix: str, where: str
    ) -> list[Operand]:
        """Appends the equations of a jaxpr for these operands; its results."""
        jaxpr = closed.jaxpr
        known: dict[Any, Operand] = {}
        for v, value in zip(jaxpr.constvars, closed.consts, strict=True):
            known[v] = self.constant(value, v.aval)
        known.update(zip(jaxpr.invars, ins, strict=True))

        def read(x: Any) -> Operand:
            return self.constant(x.val, x.aval) if isinstance(x, self.core.Literal) else known[x]

        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            scope = "/".join(filter(None, (prefix, _scope(eqn))))
            place = _place(eqn) or where
            for v, found in zip(eqn.outvars, self.equation(out, eqn, operands, scope, place), strict=True):
                known[v] = found
        return [read(x) for x in jaxpr.outvars]

    def constant(self, value: Any, aval: Any) -> CapturedArray:
        dtype = self.dtype(aval)
        if dtype == KEY:
            return CapturedArray(np.asarray(self.jax.random.key_data(value)), tuple(aval.shape), KEY)
        array = np.asarray(value)
        if array.ndim == 0:
            return constant(array, dtype)
        # One array that every layer has, as a mask, is one.
        key = (dtype, array.shape, sha256(np.ascontiguousarray(array).tobytes()).digest())
        if key not in self._constants:
            self._constants[key] = constant(array, dtype)
        return self._constants[key]

    def equation(
        self, out: list[Equation], eqn: Any, ins: list[Operand], scope: str, where: str
    ) -> Sequence[Operand]:
        name, params = str(eqn.primitive.name), {k: _plain(v) for k, v in eqn.params.items()}
        outs = [self.var(v) for v in eqn.outvars]
        if name in CALLS:
            function = str(params.get("name", ""))
            inner = self.called(params)
            if function in RANDOM and ins and ins[0].dtype in (KEY, "uint32"):
                out.append(Equation(RANDOM[function], ins, outs, {}, where, scope))
                return outs
            before = len(out)
            found = self.inline(out, inner, ins, scope, where)
            if name in REMAT and self.saves_nothing(params, where):
                for made in out[before:]:
                    made.recomputed = where or "?"
            return found
        if name in CUSTOM:
            inner = self.called(params)
            own = name == "custom_jvp_call" and is_jax_own(inner)
            if own or self.inside:
                before = len(out)
                found = self.inline(out, inner, ins, scope, where)
                if own:
                    _flattened(out[before:])
                return found
            made = Equation("custom", ins, outs, {}, where, scope)
            self.custom(made, eqn, inner)
            out.append(made)
            return outs
        made = Equation(name, ins, outs, params, where, scope)
        if name == "scan":
            made.params = self.scan(params, len(ins), len(outs))
            inner = params["jaxpr"]
            made.body = self.block(inner, [self.var(v) for v in inner.jaxpr.invars], scope, where)
        out.append(made)
        return outs

    def saves_nothing(self, params: dict[str, Any], where: str) -> bool:
        """True if a jax.checkpoint recomputes all that it computes."""
        given = params.get("policy")
        policy = str(getattr(given, "__name__", given))
        if policy == "None" or re.match(r"nothing_?saveable", policy, re.IGNORECASE):
            return True
        self.notes[f"{where}: jax.checkpoint with the policy {policy} is left out: {KEEPS}"] = None
        return False

    def called(self, params: dict[str, Any]) -> Any:
        """The closed jaxpr of a call."""
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if key in params:
                found = params[key]
                return found if hasattr(found, "consts") else self.core.ClosedJaxpr(found, ())
        raise UserError(f"from_jax: this version of JAX ({self.jax.__version__}) has calls of unknown form")

    def scan(self, params: dict[str, Any], ins: int, outs: int) -> dict[str, Any]:
        """The parameters of a scan in one form."""
        found = {"length": int(params["length"]), "reverse": bool(params["reverse"])}
        if "num_consts" in params:
            return {**found, "consts": int(params["num_consts"]), "carry": int(params["num_carry"])}
        consts, carry = (len(self.jax.tree_util.tree_leaves(t)) for t in params["ft_in"].unpack()[:2])
        return {**found, "consts": consts, "carry": carry}

    def custom(self, made: Equation, eqn: Any, inner: Any) -> None:
        """The body of a function with a derivative of its own, and this derivative, for the operands with
        fractions."""
        jax = self.jax
        from jax.extend.core import jaxpr_as_fun

        closed = self.core.ClosedJaxpr(self._alone(eqn, inner), ())
        function = jaxpr_as_fun(closed)
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
        real = [i for i, t in enumerate(types) if jax.dtypes.issubdtype(t.dtype, np.floating)]

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
            return pull(
                [
                    next(given)
                    if jax.dtypes.issubdtype(y.dtype, np.floating)
                    else np.zeros(y.shape, jax.dtypes.float0)
                    for y in ys
                ]
            )

        results = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        floats = [t for t in results if jax.dtypes.issubdtype(t.dtype, np.floating)]
        back = jax.make_jaxpr(backward)(types, floats)
        made.params = {"real": tuple(real)}
        ins = [self.var(v) for v in closed.jaxpr.invars]
        # Literals of the call are not variables of the body.
        named = {id(v): n for n, v in enumerate(closed.jaxpr.invars)}
        made.ins = [made.ins[i] for i in self._order(eqn, named)]
        # What a derivative is taken of has the value that its author's forward gives, which may be another.
        if real:
            forward = jax.make_jaxpr(lambda *xs: differentiated(xs)[0])(*types)
        else:
            forward = self._primal(eqn, inner, closed)
        # Nobody differentiates these once more: what they call is its plain body.
        self.inside += 1
        made.body = self.block(forward, ins, made.scope, made.where)
        made.backward = self.block(back, [self.var(v) for v in back.jaxpr.invars], made.scope, made.where)
        self.inside -= 1

    def _alone(self, eqn: Any, inner: Any) -> Any:
        """A jaxpr of one call alone."""
        seen = dict.fromkeys(v for v in eqn.invars if not isinstance(v, self.core.Literal))
        return inner.jaxpr.replace(
            constvars=[], invars=list(seen), outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects
        )

    def _order(self, eqn: Any, named: dict[int, int]) -> list[int]:
        """Which operand of the equation each variable of its one-equation jaxpr is."""
        found: dict[int, int] = {}
        for i, v in enumerate(eqn.invars):
            if id(v) in named:
                found.setdefault(named[id(v)], i)
        return [found[n] for n in range(len(named))]

    def _primal(self, eqn: Any, inner: Any, closed: Any) -> Any:
        """The call's own body as a function of the variables of `closed`."""
        from jax.extend.core import jaxpr_as_fun

        body = jaxpr_as_fun(inner)

        def call(*xs: Any) -> Any:
            given = dict(zip(map(id, closed.jaxpr.invars), xs, strict=True))
            literal = self.core.Literal
            return body(*(v.val if isinstance(v, literal) else given[id(v)] for v in eqn.invars))

        return self.jax.make_jaxpr(call)(
            *(self.jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars)
        )


def _flattened(equations: Sequence[Equation]) -> None:
    """Marks what is flat at its corners in a function of JAX with a derivative of its own: the modulus (in
    `logaddexp`), and ends that nothing but other ends are beside (`relu`, `relu6`)."""
    ends = {e.prim for e in equations} <= {"max", "min", "broadcast_in_dim", "convert_element_type"}
    for e in equations:
        if e.prim == "abs" or (ends and e.prim in ("max", "min")):
            e.params = {**e.params, FLAT: True}


def _plain(x: Any) -> Any:
    """Python's whole numbers for NumPy's, also in tuples."""
    if isinstance(x, np.integer):
        return int(x)
    return tuple(map(_plain, x)) if type(x) is tuple else x


def without_dead(closed: Any) -> Any:
    """Without equations that no result needs, but for those that take keys out of keys: each layer makes the
    next one's, also the last, which is to be like the others."""
    from jax.interpreters import partial_eval

    jaxpr = closed.jaxpr
    found, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    rest = iter(found.eqns)
    live = next(rest, None)
    eqns, keys = [], {id(v) for v in found.invars if _is_key(v)}
    for eqn in jaxpr.eqns:
        # What is left of an equation has some of its results.
        kept = live is not None and _same(eqn, live)
        of_keys = bool(eqn.invars) and id(eqn.invars[0]) in keys and str(eqn.primitive.name) in _OF_KEYS
        if kept or of_keys:
            eqns.append(live if kept else eqn)
            keys.update(id(v) for v in eqn.outvars if of_keys or _is_key(v))
        live = next(rest, None) if kept else live
    return type(closed)(found.replace(eqns=eqns), closed.consts)


_OF_KEYS = (
    "random_unwrap",
    "random_wrap",
    "slice",
    "dynamic_slice",
    "squeeze",
    "reshape",
    "unstack",
    "split",
)
"""What makes keys of keys, of their own type or as whole numbers."""


def _is_key(v: Any) -> bool:
    return hasattr(v.aval, "dtype") and dtype_of(v.aval.dtype) == KEY


def _same(eqn: Any, left: Any) -> bool:
    """Whether an equation is what is left of another one."""
    return eqn is left or any(a is b for a in eqn.outvars for b in left.outvars)


def is_jax_own(inner: Any) -> bool:
    """True if a function with a derivative of its own is one of JAX, whose derivative is that of its
    operations but for rounding."""
    info = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    home = f"{Path(jax_module().__file__).parent}{os.sep}"  # jaxopt, say, lies beside it
    return home in str(getattr(info, "func_src_info", "") or "")


@lru_cache(maxsize=1 << 16)
def _frame(traceback: Any) -> str:
    """file:line of the user's innermost frame; of the innermost frame at all if only libraries are there."""
    from jax._src import source_info_util

    first = ""
    for frame in source_info_util.user_frames(traceback):
        place = f"{frame.file_name}:{frame.start_line}"
        if "-packages" not in frame.file_name and not frame.file_name.startswith(_HERE):
            return place
        if not first and not frame.file_name.startswith(_HERE):
            first = place
    return first


def _place(eqn: Any) -> str:
    traceback = getattr(eqn.source_info, "traceback", None)
    return _frame(traceback) if traceback is not None else ""


def _scope(eqn: Any) -> str:
    """The names that the model's library gave: without those of transformations."""
    text = str(getattr(eqn.source_info, "name_stack", ""))
    text = re.sub(
        r"\b(?:vmap|jvp|transpose|checkpoint|rematted_computation|while|body|closed_call)\b", "", text
    )
    named = (p for p in text.split("/") if "->" not in p)  # an einsum's own formula says nothing of the model
    return "/".join(p for p in (re.sub(r"[^\w.\-]+", "", p) for p in named) if p)
