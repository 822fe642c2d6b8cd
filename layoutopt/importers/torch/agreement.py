"""Agreement of a rule with its operation: the arguments that it reads, and the type of its result.

A rule without these checks would take another operation's arguments in silence.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

from layoutopt.importers.arrays.contract import CapturedArray, Var
from layoutopt.importers.torch.elementwise import Type

GIVEN = "given"
"""A rule that takes `*given` reads all of them."""
IN_THE_RESULT = frozenset(
    {
        *("dtype", "device", "layout", "memory_format", "pin_memory", "non_blocking"),
        *("copy", "generator", "other", "size", "sizes", "shape"),
        *("output_size", "scales", "scale_factors", "scales_d", "scales_h", "scales_w"),
        *("start_dim", "end_dim", "dim", "half_to_float", "scale_grad_by_freq"),
        *("cudnn_enable", "cudnn_enabled", "sparse", "sorted", "implicit", "path"),
    }
)
"""Arguments that a rule need not read: the type of the result has them, or they change no number."""

PRODUCTS = frozenset(
    ("linear", "addmm", "baddbmm", "matmul", "bmm", "mm", "mv", "dot", "conv1d", "conv2d", "conv3d")
)


def check_read(rule: Callable[..., Any], n: Any, args: Sequence[Any], more: Mapping[str, Any]) -> None:
    """Raises NotImplementedError if an argument that its rule does not read has an effect."""
    schema = getattr(n.target, "_schema", None)
    if schema is None:
        return
    names, in_order = _read(rule)
    in_order = len(args) if GIVEN in names else in_order
    positional = [a for a in schema.arguments if not a.kwarg_only]
    unread = [(a.name, x) for a, x in [*zip(positional, args, strict=False)][in_order:]]
    unread += [(name, x) for name, x in more.items() if name not in names]
    default = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    for name, x in unread:
        if name not in IN_THE_RESULT and (name not in default or x != default[name]):
            raise NotImplementedError(f"it has {name}={x}")


@cache
def _read(rule: Callable[..., Any]) -> tuple[frozenset[str], int]:
    """The arguments that a rule reads, and how many of them in order."""
    known = list(signature(rule).parameters.values())[2:]
    return frozenset(p.name for p in known), sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in known)


def check_operands(name: str, args: Sequence[Any]) -> str:
    """Why PyTorch does not multiply the operands of a product, '' if it does: meta tensors let it pass."""
    types = sorted({x.dtype for x in args if name in PRODUCTS and isinstance(x, Var | CapturedArray)})
    return f"its operands are {' and '.join(types)}; give them one element type" if len(types) > 1 else ""


def check_type(found: Any, v: Any) -> None:
    """Raises NotImplementedError if a result is not of the type that PyTorch says."""
    for x, t in zip(found, v, strict=True) if isinstance(v, list) else [(found, v)]:
        if isinstance(t, Type) and isinstance(x, Var | CapturedArray):
            ours, its = (x.dtype, x.shape), (t.dtype, t.shape)
            if ours != its:
                raise NotImplementedError(f"its rule gives {ours}, PyTorch {its}")
