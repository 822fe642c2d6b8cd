"""A JAX function with every fraction in float64: what float32 rounds is told from what is wrong.

A function that was traced in float32 is run again equation by equation, whatever its library says of types.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

CALLS = {"call_jaxpr", "fun_jaxpr", "jaxpr"}
"""Parameters that hold the function of a call: of jit, jax.checkpoint, custom derivatives."""
WITHOUT = {"sharding_constraint", "reduce_precision", "optimization_barrier"}
"""What changes nothing but places and precision."""


def wide(x):
    """An array, or its type of elements, in float64 if it has fractions."""
    if isinstance(x, np.dtype | type):
        return np.dtype(np.float64) if jnp.issubdtype(x, jnp.floating) else x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def gradients(loss, args) -> tuple[float, list[np.ndarray]]:
    """The loss and its gradients by the leaves of its first argument, in float64.

    Raises:
      NotImplementedError: the function branches, or loops without a count.
    """
    closed = jax.make_jaxpr(loss)(*args)
    leaves = [wide(x) for x in jax.tree.leaves(args)]
    count = len(jax.tree.leaves(args[0]))
    with jax.enable_x64(True):

        def value(first):
            return _run(closed.jaxpr, closed.consts, [*first, *map(jnp.asarray, leaves[count:])])[0]

        found, grads = jax.jit(jax.value_and_grad(value))(leaves[:count])
        return float(found), [np.asarray(g) for g in grads]


def _run(jaxpr, consts, args):
    known = dict(zip(jaxpr.constvars, (jnp.asarray(wide(x)) for x in consts), strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def read(x):
        if isinstance(x, core.Literal):
            return jnp.asarray(wide(np.asarray(x.val, x.aval.dtype)))
        return known[x]

    for eqn in jaxpr.eqns:
        found = _one(eqn, [read(x) for x in eqn.invars])
        known |= dict(zip(eqn.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _one(eqn, ins):
    name, params = eqn.primitive.name, eqn.params
    if name in WITHOUT:
        return ins
    if name in ("cond", "while"):
        raise NotImplementedError(f"{name} in float64")
    inner = next((params[k] for k in CALLS if k in params), None)
    if name == "scan":
        consts, carry = params["num_consts"], params["num_carry"]

        def body(carried, xs):
            found = _run(inner.jaxpr, inner.consts, [*ins[:consts], *carried, *xs])
            return found[:carry], found[carry:]

        kept, stacked = jax.lax.scan(
            body, ins[consts : consts + carry], ins[consts + carry :], params["length"], params["reverse"]
        )
        return [*kept, *stacked]
    if inner is not None:
        closed = inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())
        return _run(closed.jaxpr, closed.consts, ins)
    params = {k: wide(v) if isinstance(v, np.dtype | type) else v for k, v in params.items()}
    found = eqn.primitive.bind(*ins, **params)
    return found if eqn.primitive.multiple_results else [found]
