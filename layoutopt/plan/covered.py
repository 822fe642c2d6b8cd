"""What a search looked at, and what it did not: what its proof is about, as files and people say it."""

from __future__ import annotations

from collections.abc import Iterable

from layoutopt.plan.fields import Data, Flag, Whole

FEW = 10**6
"""From so many layouts on their number is rounded."""


class LeftOut(Data):
    """Choices that `cost` prices and the search did not look at.

    Attributes:
      kind: what their kind of decision is called.
      what: the choices in words.
      allow: options of `search` that allow them; "": none do.
      finer: the search chose among other choices of this kind.
    """

    kind: str
    what: str
    allow: str = ""
    finer: Flag = False


class Space(Data):
    """The layouts that a proof is about.

    Attributes:
      layouts: how many.
      not_looked_at: what is none of them.
    """

    layouts: Whole
    not_looked_at: tuple[LeftOut, ...] = ()

    @property
    def count(self) -> str:
        """How many in words: '6,144 layouts', '1.9e12 layouts'."""
        return f"{count_text(self.layouts)} layout{'s' * (self.layouts != 1)}"

    @property
    def names(self) -> str:
        """What was not looked at, kinds of which there was nothing to choose first: 'pipelines, sequence
        parallelism, finer choices of storage'."""
        whole = dict.fromkeys(left.kind for left in self.not_looked_at if not left.finer)
        finer = dict.fromkeys(
            left.kind for left in self.not_looked_at if left.finer and left.kind not in whole
        )
        return ", ".join([*whole, *([f"finer choices of {', '.join(finer)}"] if finer else [])])

    @property
    def allow(self) -> str:
        """Options of `search` with which it looks at the kinds of which it chose nothing."""
        options: dict[str, dict[str, None]] = {}
        for left in self.not_looked_at:
            if left.allow and not left.finer:
                option, _, values = left.allow.partition(" ")
                options.setdefault(option, {}).update(dict.fromkeys(values.split(",")))
        return " ".join(f"{option} {','.join(values)}" for option, values in options.items())

    @property
    def limits(self) -> str:
        """What was not looked at, and how to have it looked at; '' if that is nothing."""
        if not self.not_looked_at:
            return ""
        return "; ".join(filter(None, (f"not looked at: {self.names}", self.allow)))


def count_text(number: int) -> str:
    """'6,144', '1.9e12'."""
    if number < FEW:
        return f"{number:,}"
    digits, _, power = f"{number:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def listed(left: Iterable[LeftOut]) -> list[tuple[str, str]]:
    """Each with the options that allow it, for a table."""
    return [(each.what, each.allow or "no option yet") for each in left]
