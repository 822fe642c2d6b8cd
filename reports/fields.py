"""Reading typed fields out of plain objects; every refusal names the plan and the field's path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, overload

from mesh_tf_core.errors import UserError
from reports.units import clean

T = TypeVar("T")


class _Required:
    """Stands for 'no default'."""


REQUIRED = _Required()
LARGEST = 1e100
"""No quantity is as large."""
LONGEST = 80
"""Characters of a user's value that an error repeats."""


def words(value: Any) -> str:
    """Any plain value in words: lists joined, mappings as 'key: value'."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(str(k))}: {words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "+".join(words(v) for v in value)
    return clean(str(value))


class Fields:
    """One object of a plan file, its path in the file, and the name of the plan for errors."""

    def __init__(self, found: Mapping[str, Any], plan: str, advice: str, path: str = "") -> None:
        self.found = found
        self.plan = plan
        self.advice = advice
        self.path = path

    def fail(self, key: str, trouble: str) -> NoReturn:
        """Raises the one line."""
        where = clean(f"{self.path}.{key}" if self.path else key)[:LONGEST]
        raise UserError(f"{self.plan}: '{where}' {clean(trouble)}; {self.advice}")

    def has(self, key: str) -> bool:
        return self.found.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def items(self) -> Iterable[tuple[str, Any]]:
        return self.found.items()

    def raw(self, key: str, default: Any = REQUIRED) -> Any:
        """The value as it is; null counts as missing."""
        value = self.found.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            self.fail(key, "is missing, so the plan is truncated or was written by something else")
        return default

    def object(self, key: str, default: Any = REQUIRED) -> Fields:
        value = self.raw(key, default)
        if not isinstance(value, Mapping):
            self.fail(key, f"must be an object, found {type(value).__name__}")
        return Fields(value, self.plan, self.advice, f"{self.path}.{key}" if self.path else key)

    def array(self, key: str, default: Any = REQUIRED) -> list[Any]:
        value = self.raw(key, default)
        if not isinstance(value, list | tuple):
            self.fail(key, f"must be a list, found {type(value).__name__}")
        return list(value)

    def objects(self, key: str) -> Iterable[Fields]:
        """The objects of a list; none when the list is absent."""
        for position, value in enumerate(self.array(key, [])):
            name = f"{key}[{position}]"
            if not isinstance(value, Mapping):
                self.fail(name, f"must be an object, found {type(value).__name__}")
            yield Fields(value, self.plan, self.advice, f"{self.path}.{name}" if self.path else name)

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            self.fail(key, f"must be text, found {type(value).__name__}")
        return clean(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, found {type(value).__name__}")
        return value

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: T, signed: bool = ...) -> float | T: ...
    def number(self, key: str, default: Any = REQUIRED, signed: bool = False) -> Any:
        """A finite number, not below zero unless `signed`."""
        value = self.raw(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"must be a number, found {type(value).__name__}")
        if not abs(value) <= LARGEST:
            found = value if isinstance(value, float) else "a number of more than a hundred digits"
            self.fail(key, f"must be a finite number, found {found}")
        if value < 0 and not signed:
            self.fail(key, f"must not be negative, found {value}")
        return float(value)

    def whole(self, key: str, default: Any = REQUIRED, minimum: int = 0) -> int | None:
        value = self.number(key, default)
        if value is None:
            return None
        if value != int(value) or value < minimum:
            self.fail(key, f"must be a whole number, at least {minimum}, found {value:g}")
        return int(value)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of texts; a single text is a list of one."""
        value = self.raw(key, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            self.fail(key, "must be a list of names")
        return tuple(clean(v) for v in value)

    def numbers(self, key: str) -> dict[str, float]:
        """A mapping to numbers; empty when absent."""
        inner = self.object(key, {})
        return {clean(k): inner.number(k) for k in inner}
