"""The base of schemas of plans and results: a base class, kinds of numbers, one line that refuses damage.

A file is read by its schema, never by hand. Missing fields have defaults where possible, null counts as
missing, and fields of newer versions are kept.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from layoutopt.plan.units import clean
from mesh_tf_core.errors import UserError
from mesh_tf_core.faults import fault_text

LARGEST = 1e100
"""No quantity is as large."""
LONGEST = 80
"""Characters of a user's value that an error repeats."""


class Data(BaseModel):
    """One object of a file."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_missing(cls, found: Any) -> Any:
        if not isinstance(found, Mapping):
            return found
        needed = _never_none(cls)
        return {k: v for k, v in found.items() if v is not None or k not in needed}

    def to_json(self) -> dict[str, Any]:
        """The object as JSON can hold it; fields with their defaults are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


M = TypeVar("M", bound=Data)


def with_fields(kinds: Mapping[str, tuple[Any, Any]]) -> Callable[[type[M]], type[M]]:
    """Adds fields to a schema: name -> its type, of plain Python, and its default."""

    def made(plain: type[M]) -> type[M]:
        more: dict[str, Any] = {
            name: (schema_of(kind), Field(default_factory=default) if callable(default) else default)
            for name, (kind, default) in kinds.items()
        }
        return create_model(plain.__name__, __base__=plain, __module__=plain.__module__, **more)

    return made


def schema_of(kind: Any) -> Any:
    """A type of plain Python with the checks of this module."""
    known = {int: PositiveInteger, bool: Flag, list[str]: Names}
    if kind in known:
        return known[kind]
    parts = tuple(map(schema_of, get_args(kind)))
    if isinstance(kind, UnionType):
        return functools.reduce(operator.or_, parts)
    return get_origin(kind)[parts] if parts else kind


@cache
def _never_none(kind: type[Data]) -> frozenset[str]:
    return frozenset(n for n, f in kind.model_fields.items() if NoneType not in get_args(f.annotation))


def wrong(said: str, *at: str | int) -> PydanticCustomError:
    """The error that a validator raises: the trouble in words, and the path of its field in the object."""
    return PydanticCustomError("wrong", "{said}", {"said": said, "at": at})


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(f"must be a number, found {_kind(value)}")
    if not abs(value) <= LARGEST:
        found = value if isinstance(value, float) else "a number of more than a hundred digits"
        raise wrong(f"must be a finite number, found {found}")
    return value


def _amount(value: Any) -> Any:
    if _number(value) < 0:
        raise wrong(f"must not be negative, found {value}")
    return value


def _whole(value: Any) -> Any:
    if _amount(value) != int(value):
        raise wrong(f"must be a whole number of at least 0, found {value:g}")
    return int(value)


def _size(value: Any) -> Any:
    if _number(value) < 1 or value != int(value):
        raise wrong(f"must be a whole number of at least 1, found {value:g}")
    return int(value)


def _score(value: Any) -> Any:
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else _number(value)


def _names(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _rules(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    layout = {dim: _names(axes) for dim, axes in value.items()}
    if not all(isinstance(x, list | tuple) and all(isinstance(a, str) for a in x) for x in layout.values()):
        raise wrong("must be a string, or an object that maps dimensions to names of mesh axes")
    return ";".join(f"{dim}:{'+'.join(axes)}" for dim, axes in layout.items() if axes)


def _finite(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise wrong(f"must be a number or null, found {type(value).__name__}")
    return None if isinstance(value, float) and not math.isfinite(value) else value


Amount = Annotated[float, BeforeValidator(_amount)]
"""A finite number, not below zero."""
AsGiven = Annotated[int | float, PlainValidator(_amount)]
"""The same; a whole number is written again as one."""
Score = Annotated[float | None, BeforeValidator(_score)]
"""A finite number; not-a-number (of too few rows) is none."""
WholeNumber = Annotated[int, BeforeValidator(_whole)]
PositiveInteger = Annotated[int, BeforeValidator(_size)]
"""A whole number, at least 1."""
Figure = Annotated[int | float | None, PlainValidator(_finite)]
"""A number as it was counted, or null."""
Flag = StrictBool
Names = Annotated[list[str], BeforeValidator(_names)]
"""Texts; a single one is a list of one."""
TextTuple = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""The same, as a tuple."""
AxisNames = TextTuple
"""Mesh axes, the outermost first."""
LayoutText = Annotated[str, BeforeValidator(_rules)]
"""A layout as `--layout` takes it; an object 'dimension: axes' is turned into it."""


def refusal(error: ValidationError, what: str, again: str) -> UserError:
    """A schema's errors as one line: the file, the path of the first wrong field, its value, the remedy.

    Args:
      what: name of the file.
      again: the remedy.
    """
    first = error.errors(include_url=False)[0]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    path = _path((*first["loc"], *first.get("ctx", {}).get("at", ())))
    where = f"{path[:LONGEST]!r} " if path else ""
    return UserError(f"{clean(what)}: {where}{clean(_trouble(first))}{more}; {again}")


def _path(steps: tuple[str | int, ...]) -> str:
    parts = (f"[{step}]" if isinstance(step, int) else f".{clean(step)}" for step in steps)
    return "".join(parts).removeprefix(".")


def _trouble(error: ErrorDetails) -> str:
    said = fault_text(error["msg"])
    if error["type"] == "missing":
        return f"{said}, so the file is truncated or not written by layoutopt"
    return f"{said}, found {_kind(error['input'])}" if error["type"].endswith("_type") else said
