"""Element types under torch.autocast, which a trace does not record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from layoutopt.importers.arrays.contract import CapturedArray, Operand, Var
from layoutopt.importers.torch.elementwise import Type
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.internals import FLOATS

_PRODUCTS = ("linear", "addmm", "matmul", "bmm", "mm", "mv", "baddbmm", "einsum")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_IN_NARROW = frozenset((*_PRODUCTS, *_CONVOLUTIONS, "scaled_dot_product_attention"))
"""Operations that autocast runs in its narrow type."""
_SUMS = ("softmax", "log_softmax", "layer_norm", "group_norm", "rms_norm", "sum", "cumsum", "norm")
_LOSSES = ("cross_entropy_loss", "nll_loss_nd", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits")
_IN_WIDE = frozenset((*_SUMS, *_LOSSES, "exp", "log", "pow", "rsqrt", "softplus"))
"""Operations that it runs in float32."""
_TYPED = frozenset(("to", "_to_copy", "float", "type_as"))
"""Operations that choose a type."""


class Autocast:
    """The types of values in and after the regions of torch.autocast.

    Attributes:
      dtype: of the region that is read, "" outside of one.
    """

    def __init__(self) -> None:
        self.dtype, self._met = "", False

    def enter(self, dtype: str) -> None:
        """Begins a region; "" ends it."""
        self.dtype = dtype
        self._met = self._met or bool(dtype)

    def typed(self, m: Equations, name: str, args: Sequence[Any], v: Any) -> tuple[Sequence[Any], Any]:
        """The operands and the type of an operation's result, as autocast chooses them."""
        if self.dtype and name in (_IN_NARROW | _IN_WIDE):
            dtype = self.dtype if name in _IN_NARROW else "float32"
            cast = _each(args, lambda x: m.cast(x, dtype) if x.dtype in FLOATS else x)
            return cast, _retyped(v, dtype)
        if self._met and isinstance(v, Type) and v.dtype == "float32" and name not in _TYPED:
            own = {x.dtype for x in flat(args) if isinstance(x, Var | CapturedArray) and x.shape}
            own &= {*FLOATS}
            if own and own <= {"bfloat16", "float16"}:
                return args, _retyped(v, max(own))
        return args, v


def _retyped(v: Any, dtype: str) -> Any:
    return Type(v.shape, dtype) if isinstance(v, Type) and v.dtype in FLOATS else v


def _each(args: Sequence[Any], function: Callable[[Operand], Operand]) -> list[Any]:
    """Arguments with their arrays changed."""
    return [
        _each(x, function)
        if isinstance(x, list | tuple)
        else function(x)
        if isinstance(x, Var | CapturedArray)
        else x
        for x in args
    ]


def flat(given: Any) -> list[Any]:
    """Arguments in lists of arguments."""
    return [y for x in given for y in (flat(x) if isinstance(x, list | tuple) else [x])]
