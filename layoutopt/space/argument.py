"""Arguments of kinds of decisions (keywords in Python, options of commands, fields of plans), and the search
space that consists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from layoutopt.space.option import Option
from mesh_tf_core.errors import UserError

ARGUMENT = "argument"
"""Key of the user's view of a field of `Space` in its metadata."""
S = TypeVar("S", bound="Space")
OptionTexts = Mapping[str, str | None]
"""Option -> its text; None: it is left out."""


@dataclass(frozen=True)
class Argument:
    """One field of `Space` as users give it: a keyword in Python, options of commands, a field of plans.

    Attributes:
      options: those of commands.
      parse: the value that an option's text or a value of Python means, which means itself; UserError.
      text: a value as text of the option; None if it is not set.
      plan: its type in plan files; fields of type str use `text`.
      unsaid: makes the value for a plan file without the field.
      usual: makes the value for an objective where the given one is None.
      names_axes: it is about a mesh that is given: no question about other meshes has it.
      by_name: named plans choose it as a search does (`optimize.baselines`).
      within: the values of a list that a restriction allows, of those that it names; None: the field is a
        rule, which no restriction narrows.
    """

    options: tuple[Option, ...]
    parse: Callable[[Any], Any]
    plan: Any = tuple[str, ...]
    text: Callable[[Any], str | None] = lambda value: ",".join(map(str, value)) or None
    unsaid: Callable[[], Any] | None = None
    usual: Callable[[str], Any] | None = None
    names_axes: bool = False
    by_name: bool = True
    within: Callable[[Any, Sequence[Any]], Any] | None = lambda value, said: tuple(
        each for each in (value if isinstance(value, tuple) else (value,)) if each in said
    )

    def plain(self, default: Any) -> Any:
        """The value with which nothing is chosen; `default`: of the field."""
        value = self.unsaid() if default is None and self.unsaid is not None else default
        return value[:1] if isinstance(value, tuple) else value

    def texts(self, value: Any) -> OptionTexts:
        """A value as its options have it."""
        text = self.text(value)
        left = [] if text is None else text.split(",") if len(self.options) > 1 else [text]
        found: dict[str, str | None] = {}
        for option in sorted(self.options, key=lambda o: -len(o.prefix)):
            own = [each for each in left if each.startswith(option.prefix)]
            left = [each for each in left if each not in own]
            found[option.name] = ",".join(each.removeprefix(option.prefix) for each in own) or None
        return found

    def read(self, texts: OptionTexts) -> str | None:
        """Joins the texts of its options to one that `parse` takes; None: none is given."""
        given = {o: text for o in self.options if (text := texts.get(o.name)) is not None}
        if len(self.options) == 1 or not given:
            return next(iter(given.values()), None)
        words = ((o.prefix, w.strip()) for o, text in given.items() for w in text.split(","))
        return ",".join(prefix + word for prefix, word in words if word)


def argument(default: Any, *options: Option, **said: Any) -> Any:
    """A field of `Space` that users set: its default, its options, and the other fields of `Argument`; a list
    of names where it has no other `parse`."""
    parse = said.pop("parse", lambda value: names(value, options[0].parameter))
    metadata = {ARGUMENT: Argument(options, parse, **said)}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def names(value: Any, what: str) -> tuple[Any, ...]:
    """The names in a comma-separated text or in a list, each once."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, Iterable):
        raise UserError(f"{what} {value!r}: write a list of allowed values, or a comma-separated text")
    return tuple(dict.fromkeys(value))


@dataclass(frozen=True, kw_only=True)
class Space:
    """Base of search spaces; `SearchSpace` of `layoutopt.space.decisions` has the fields of every kind.

    Attributes:
      given: the fields that somebody set, to whatever value.
    """

    given: InitVar[frozenset[str] | None] = None

    def __new__(cls, given: frozenset[str] | None = None, **said: Any) -> Self:
        new = super().__new__(cls)
        object.__setattr__(new, "given", frozenset(said) if given is None else given)
        return new

    def __post_init__(self, given: frozenset[str] | None) -> None:
        for f in fields(self):
            if ARGUMENT in f.metadata:
                try:
                    found = f.metadata[ARGUMENT].parse(getattr(self, f.name))
                except UserError as error:
                    option = f.metadata[ARGUMENT].options[0].name
                    raise UserError(str(error).replace(option, f.name)) from None
                object.__setattr__(self, f.name, found)

    def said(self, name: str) -> Any:
        """The value of a field; for None, its default."""
        value = getattr(self, name)
        unsaid = next(f.metadata[ARGUMENT].unsaid for f in fields(self) if f.name == name)
        return unsaid() if value is None and unsaid is not None else value

    def but(self, **changed: Any) -> Self:
        """A copy with other values for some fields."""
        return replace(self, **changed)

    if TYPE_CHECKING:

        def __init__(self, **said: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


def asking(every: Iterable[Mapping[str, Any]]) -> Callable[[type[S]], type[S]]:
    """A search space with further arguments by name."""

    def made(plain: type[S]) -> type[S]:
        for name, each in (pair for arguments in every for pair in arguments.items()):
            plain.__annotations__[name] = Any
            setattr(plain, name, each)
        return dataclass(frozen=True, kw_only=True)(plain)

    return made
