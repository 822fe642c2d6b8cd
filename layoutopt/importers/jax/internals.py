"""The importer's access to JAX itself; no other module here imports it.

Between versions `scan`, `jit` and the homes of jaxprs differ, which ends here.
"""

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import KEY
from mesh_tf_core.errors import UserError, not_installed
from mesh_tf_core.tables import words

_HERE = str(Path(__file__).resolve().parent)


def jax_module() -> Any:
    """JAX, or a UserError that explains its installation."""
    try:
        import jax
    except ImportError as error:
        raise not_installed("JAX", "jax", "importing a model from JAX") from error
    return jax


def dtype_of(dtype: Any) -> str:
    """JAX's element type by its name; KEY of random keys."""
    jax = jax_module()
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return KEY
    return np.dtype(dtype).name


def type_of(aval: Any) -> str:
    """The element type of an abstract value by its name; "token" if it has none."""
    return dtype_of(aval.dtype) if hasattr(aval, "dtype") else "token"


def is_literal(x: Any) -> bool:
    """True if an operand of an equation is a number that is written there."""
    from jax.extend.core import Literal

    return isinstance(x, Literal)


def called(params: Mapping[str, Any]) -> Any:
    """The closed jaxpr of a call.

    Raises:
      UserError: this version of JAX has it elsewhere.
    """
    from jax.extend.core import ClosedJaxpr

    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            found = params[key]
            return found if hasattr(found, "consts") else ClosedJaxpr(found, ())
    raise UserError(
        f"from_jax: JAX {jax_module().__version__} represents function calls in a form that layoutopt "
        "does not know; install a version that pip install 'layoutopt[jax]' allows"
    )


def without_dead(closed: Any) -> Any:
    """Without equations that no result needs. Equations that derive keys from keys stay: each layer derives
    the next one's, and the last layer must equal the others."""
    from jax.interpreters import partial_eval

    jaxpr = closed.jaxpr
    found, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    rest = iter(found.eqns)
    live = next(rest, None)
    eqns, keys = [], {id(v) for v in found.invars if _is_key(v)}
    for eqn in jaxpr.eqns:
        # What is left of an equation has some of its results.
        kept = live is not None and (eqn is live or any(a is b for a in eqn.outvars for b in live.outvars))
        of_keys = bool(eqn.invars) and id(eqn.invars[0]) in keys and str(eqn.primitive.name) in _OF_KEYS
        if kept or of_keys:
            eqns.append(live if kept else eqn)
            keys.update(id(v) for v in eqn.outvars if of_keys or _is_key(v))
        live = next(rest, None) if kept else live
    return type(closed)(found.replace(eqns=eqns), closed.consts)


_OF_KEYS = words("random_unwrap random_wrap slice dynamic_slice squeeze reshape unstack split")
"""What makes keys of keys, of their own type or as whole numbers."""


def _is_key(v: Any) -> bool:
    return hasattr(v.aval, "dtype") and dtype_of(v.aval.dtype) == KEY


def is_jax_own(inner: Any) -> bool:
    """True if a function with a custom derivative is JAX's: that of its operations but for rounding."""
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


def place_of(eqn: Any) -> str:
    """file:line of the user's code that an equation is of; "" if unknown."""
    traceback = getattr(eqn.source_info, "traceback", None)
    return _frame(traceback) if traceback is not None else ""


def scope_of(eqn: Any) -> str:
    """The names that the model's library gave, without those of transformations."""
    text = str(getattr(eqn.source_info, "name_stack", ""))
    text = re.sub(
        r"\b(?:vmap|jvp|transpose|checkpoint|rematted_computation|while|body|closed_call)\b", "", text
    )
    named = (p for p in text.split("/") if "->" not in p)  # an einsum's own formula says nothing of the model
    return "/".join(p for p in (re.sub(r"[^\w.\-]+", "", p) for p in named) if p)
