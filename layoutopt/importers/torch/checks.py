"""Checks of values in a module, `if (labels >= n).any(): raise`, which a trace without values must pass."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any
from unittest.mock import patch

from layoutopt.importers.torch.internals import torch_module

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
