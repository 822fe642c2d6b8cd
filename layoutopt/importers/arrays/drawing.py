"""Primitives that draw random numbers, or make keys of numbers."""

from collections.abc import Mapping

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import KEY, Equation
from layoutopt.importers.arrays.key_rules import KEYED, derived, of_numbers
from layoutopt.importers.arrays.keys import Draw, Keys, counted, key_of
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.writer import Handler, UndrawnUniform, Writer, our_dtype


def _drawing(w: Writer, e: Equation, kind: str) -> Keys:
    """The keys that an equation draws with.

    Raises:
      UserError: they cannot be followed, or draw something else too, which JAX makes of the same bits.
    """
    found = w.value(e.ins[0])
    keys = found if isinstance(found, Keys) else of_numbers(w, e.ins[0])
    if keys.why or any(isinstance(x, np.ndarray) and counted(x) for x in keys.parts):
        refuse(
            e,
            f"its random key comes from {keys.why or 'several keys of a loop'}, so the importer cannot "
            "tell which draws are equal",
            "make keys with jax.random.split and jax.random.fold_in, and do not change them otherwise",
        )
    how = kind, tuple(d.size for d in w.shape(e.out))
    for other in w.drawn_with:
        same = other.keys.identity == keys.identity
        if (same and other.how != how) or (not same and keys.meets(other.keys)):
            refuse(
                e,
                f"{other.where or 'another line'} draws numbers of another kind or shape with the same "
                "key, so JAX makes both from the same bits",
                "give each draw its own key with jax.random.split",
            )
    w.drawn_with.append(Draw(keys, how, e.where))
    return keys


def _uniform(w: Writer, e: Equation) -> None:
    ends = [w.number(x) for x in e.ins[1:3]]
    low, high = (0.0, 1.0) if len(ends) < 2 else ends
    if low is None or high is None:
        refuse(e, "its bounds are not constants", "draw between 0 and 1, then scale and shift the result")
    keys = _drawing(w, e, "uniform")
    w.put(e.out, UndrawnUniform(float(low), float(high), w.shape(e.out), e.out.dtype, keys))


def _normal(w: Writer, e: Equation) -> None:
    keys, dims, dtype = _drawing(w, e, "normal"), w.shape(e.out), our_dtype(e.out.dtype)
    found = w.graph.once(
        (keys.identity, dims, dtype), lambda: mtf.random_normal(key_of(w.graph, keys), dims, dtype=dtype)
    )
    w.put(e.out, found)


def _made(w: Writer, e: Equation) -> None:
    """A key of numbers: a seed, or the words of a key."""
    w.put(e.out, of_numbers(w, e.ins[0], seed=e.prim == "random_seed"))


RANDOM = "draw with jax.random.uniform, jax.random.bernoulli or jax.random.normal"
TABLE: Mapping[str, Handler] = {
    "random_uniform": _uniform,
    "random_normal": _normal,
    "random_bits": lambda _, e: refuse(e, "it draws raw random bits", RANDOM),
    KEY: derived,
    **dict.fromkeys(KEYED, _made),
}
