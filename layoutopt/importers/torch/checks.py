"""Values that a module reads while it is traced without them: those of checks that must pass, as in
`if (labels >= n).any(): raise`, and those of the example batch, as in `for t, h, w in grid.tolist()`.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any
from unittest.mock import patch

from layoutopt.importers.torch.calls import torch_module

DERIVED = "has a backward of its own; the imported one is that of its forward"
PLAIN = f"{os.sep}torch{os.sep}_refs{os.sep}"
"""PyTorch's operations in Python, of which it makes those on the device meta."""
_SAYS = frozenset({"warn", "warning", "warning_once", "info", "info_once", "debug", "error", "print"})


@contextmanager
def checks_passed(library: Callable[[str], bool]) -> Iterator[None]:
    """All is well for branches that only raise or warn; other branches on values fail as they do.

    Args:
      library: True for files that are not the user's.
    """
    torch = torch_module()

    def passing(own: Callable[[Any], bool]) -> Callable[[Any], bool]:
        @wraps(own)
        def truth(x: Any) -> bool:
            try:
                return own(x)
            except RuntimeError:  # of a trace, and of tensors on the device meta
                frame: FrameType | None = sys._getframe(1)
                if isinstance(x, torch.SymBool) and PLAIN in sys._getframe(1).f_code.co_filename:
                    return False  # `numel() == 0` of rows that a mask selects, as PyTorch's kernels assume
                while frame is not None and library(frame.f_code.co_filename):
                    frame = frame.f_back
                if frame is None or (found := _well(frame)) is None:
                    raise
                return found

        return truth

    with ExitStack() as stack:
        for kind in (torch.Tensor, torch.SymBool):
            stack.enter_context(patch.object(kind, "__bool__", passing(kind.__bool__)))
        own = torch.nn.modules.transformer  # it compares a mask's values to choose a kernel
        stack.enter_context(patch.object(own, "_detect_is_causal_mask", lambda _, it, *__: it is True))
        yield


def _well(frame: FrameType) -> bool | None:
    """What the truth value that a frame reads is if nothing is wrong; None if that is no check."""
    line = frame.f_lineno
    for node in ast.walk(_parsed(frame.f_code.co_filename)):
        if not isinstance(node, ast.If | ast.Assert):
            continue
        bad = node.body + node.orelse if isinstance(node, ast.If) else []
        within = node.test.lineno <= line <= (node.test.end_lineno or line)
        if within and all(map(_only_says, bad)):
            read = [*_read(node.test, not bad)]
            # Values are made by calls or compared; a wrong guess meets the error that the branch raises.
            values = {v for v, x in read if any(isinstance(y, ast.Call) for y in ast.walk(x))}
            values = values or {v for v, _ in read}
            return values.pop() if len(values) == 1 else None
    return None


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _read(test: ast.expr, wanted: bool) -> Iterator[tuple[bool, ast.expr]]:
    """The expressions whose truth a test reads, each with the value that makes the test as wanted."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _read(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for each in test.values:
            yield from _read(each, wanted)
    else:
        yield wanted, test


def _only_says(statement: ast.stmt) -> bool:
    called = getattr(getattr(statement, "value", None), "func", None)
    says = getattr(called, "attr", getattr(called, "id", "")) in _SAYS
    return says or isinstance(statement, ast.Raise | ast.Pass)


LARGEST = 1 << 16
"""Elements up to which values are followed."""
_READING = frozenset({"tolist", "item", "__bool__", "__int__", "__index__", "__float__"})
_SIZED = frozenset(
    ("nonzero", "argwhere", "repeat_interleave", "masked_select", "bincount", "unique", "unique_consecutive")
)
"""Operations whose shapes may depend on values."""
_MADE = frozenset(("arange", "linspace", "zeros", "ones", "full", "eye", "tensor"))
"""Operations that are called with numbers."""
_DRAWN = ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "poisson", "empty", "exponential")


@contextmanager
def known_values(given: Sequence[tuple[Any, Any]], told: Callable[[], None]) -> Iterator[None]:
    """Follows the values of small arrays of whole numbers, and of arrays made in the code, beside a trace.

    Args:
      given: tensors of the trace, each with the same tensor outside of it.
      told: called where the code reads a value.
    """
    torch = torch_module()
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils.weak import WeakTensorKeyDictionary

    flat, rebuilt = torch.utils._pytree.tree_leaves, torch.utils._pytree.tree_map
    real: Any = WeakTensorKeyDictionary()
    for x, own in given:
        whole = torch.is_tensor(own) and not (own.is_meta or own.is_floating_point())
        if whole and own.numel() <= LARGEST:
            with _disable_current_modes():
                real[x] = own.clone()

    def valued(x: Any) -> Any:
        """An argument of the same call with values."""
        if isinstance(x, torch.device) or (isinstance(x, str) and x in ("meta", "cuda")):
            return torch.device("cpu")
        return real[x] if torch.is_tensor(x) else x

    def number(x: Any) -> Any:
        return real[x].item() if torch.is_tensor(x) and not x.ndim else x

    def constant(x: Any) -> Any:
        if not torch.is_tensor(x):
            return x
        with _disable_current_modes():
            listed = x.tolist()
        made = torch.tensor(listed, dtype=x.dtype).reshape(x.shape)
        real[made] = x
        return made

    def places(x: Any) -> Any:
        if not torch.is_tensor(x) or x.dtype != torch.bool or x.ndim != 1:
            return x
        with _disable_current_modes():
            found = real[x].nonzero()[:, 0]
        return constant(found)

    class ValuesMode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, kwargs = getattr(of, "__name__", ""), kwargs or {}
            leaves = [x for x in flat((args, kwargs)) if torch.is_tensor(x)]
            drawn = any(each in name for each in _DRAWN)
            known = not drawn and all(real.get(x) is not None for x in leaves)
            by_truth = name == "__getitem__" and any(x.dtype == torch.bool for x in leaves[1:])

            def run() -> Any:
                with _disable_current_modes(), torch.no_grad():
                    return of(*rebuilt(valued, args), **rebuilt(valued, kwargs))

            if known and leaves and (name in _READING | _SIZED or by_truth):
                told()
                return run() if name in _READING else rebuilt(constant, run())
            if known and leaves and name in _MADE:
                told()
                with _disable_current_modes():
                    args, kwargs = rebuilt(number, (args, kwargs))
            if known and name == "__setitem__":  # rows at places instead of where a mask is true
                args = (args[0], rebuilt(places, args[1]), args[2])
            made = of(*args, **kwargs)
            outs = [x for x in flat(made) if torch.is_tensor(x)]
            written = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            if known and (outs or written) and all(x.numel() <= LARGEST for x in outs):
                real.update(zip(outs, (x for x in flat(run()) if torch.is_tensor(x)), strict=True))
            elif leaves and written:
                real[leaves[0]] = None
            return made

    with ValuesMode():
        yield
