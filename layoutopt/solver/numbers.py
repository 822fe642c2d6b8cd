"""Reads numbers and lists from unchecked JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from layoutopt.solver.form import Floats, ProblemError

EXACT = 2**53
"""Whole numbers above this are not all float64."""
_MISSING = object()


def field(item: Any, key: str, where: str, default: Any = _MISSING) -> Any:
    """item[key] of a JSON object."""
    if not isinstance(item, dict):
        raise ProblemError(f"{where} must be an object, not {type(item).__name__}")
    if key in item:
        return item[key]
    if default is _MISSING:
        raise ProblemError(f"{where} has no field {key!r}")
    return default


def listed(item: Any, key: str, where: str, missing_ok: bool = False) -> list[Any]:
    """item[key], which must be a list."""
    value = field(item, key, where, [] if missing_ok else _MISSING)
    if not isinstance(value, list):
        raise ProblemError(f"{where}.{key} must be a list, not {type(value).__name__}")
    return value


def whole(value: Any, where: str) -> int:
    """A whole number that float64 and int64 hold exactly."""
    if type(value) is not int:
        raise ProblemError(f"{where} must be a whole number, not {_shown(value)}")
    if abs(value) > EXACT:
        raise ProblemError(f"{where} is {_shown(value)}; the absolute value must be at most 2^53")
    return value


def amount(value: Any, where: str) -> float:
    """A finite number."""
    if type(value) not in (int, float):
        raise ProblemError(f"{where} must be a number, not {_shown(value)}")
    if not abs(value) <= EXACT:
        raise ProblemError(f"{where} is {_shown(value)}; the absolute value must be at most 2^53")
    return float(value)


def numbers(value: Any, where: str, forbidden: bool = False, infinite: float = math.inf) -> Floats:
    """A flat list of numbers; null (where allowed) and numbers of at least `infinite` become inf."""
    if not isinstance(value, list):
        raise ProblemError(f"{where} must be a list, not {type(value).__name__}")
    kinds = set(map(type, value))
    if forbidden and type(None) in kinds:
        value = [math.inf if item is None else item for item in value]
        kinds.discard(type(None))
    if not kinds <= {int, float}:
        wrong = next(item for item in value if type(item) not in (int, float))
        raise ProblemError(f"{where} must contain only numbers, not {_shown(wrong)}")
    try:
        found = np.array(value, dtype=np.float64)
    except OverflowError:
        raise ProblemError(f"{where} contains a number that is too large for float64") from None
    if infinite < math.inf:
        found[found >= infinite] = math.inf
    elif not forbidden and np.isinf(found).any():
        raise ProblemError(f"{where} contains an infinite number; give finite numbers")
    finite = found[np.isfinite(found)]
    if finite.size and np.abs(finite).max() > EXACT:
        raise ProblemError(
            f"{where} contains {finite[np.abs(finite).argmax()]:.4g}; the absolute value must be at most 2^53"
        )
    return found


def _shown(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else type(value).__name__
    if isinstance(value, str):
        text = f"the string {value[:20]!r}"
    elif type(value) is int:
        text = "an integer above 10^30" if abs(value) > 10**30 else str(value)
    elif value is None:
        text = "null"
    return text
