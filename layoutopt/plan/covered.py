"""The space that a search covered, and the choices outside it: the subject of its proof, in files and in
words."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from layoutopt.plan.fields import Data, Flag, WholeNumber

EVERYTHING = "--allow everything"
"""Allows everything except choices that only users can name, such as the AXIS of --diloco."""
FEW = 10**6
"""Number of layouts from which it is rounded."""


class UncoveredChoices(Data):
    """Choices that `cost` prices and the search did not look at.

    Attributes:
      kind: name of their kind of decision.
      what: the choices in words.
      allow: options of `search` that allow them; "": none do.
      finer: the search chose among other choices of this kind.
    """

    kind: str
    what: str
    allow: str = ""
    finer: Flag = False


class CoveredSpace(Data):
    """The layouts that a proof is about.

    Attributes:
      layouts: how many.
      not_looked_at: choices outside the space.
      expressed_by: the framework that can express them; "": all layouts of the kinds that were searched.
    """

    layouts: WholeNumber
    not_looked_at: tuple[UncoveredChoices, ...] = ()
    expressed_by: str = Field(default="", exclude_if=lambda value: not value)

    @property
    def count(self) -> str:
        """The number in words: '6,144 layouts', '1.9e12 layouts that torch can express'."""
        by = f" that {self.expressed_by} can express" * bool(self.expressed_by)
        return f"{count_text(self.layouts)} layout{'s' * (self.layouts != 1)}{by}"

    @property
    def unseen(self) -> str:
        """The kinds without any choice: 'pipelines, sequence parallelism'."""
        return ", ".join(dict.fromkeys(left.kind for left in self.not_looked_at if not left.finer))

    @property
    def in_part(self) -> str:
        """The kinds with some choices and not all: 'storage (ZeRO), recomputation'."""
        whole = {left.kind for left in self.not_looked_at if not left.finer}
        found = (left.kind for left in self.not_looked_at if left.finer and left.kind not in whole)
        return ", ".join(dict.fromkeys(found))

    @property
    def allow(self) -> str:
        """Options of `search` that add the kinds without any choice."""
        own = [left.allow for left in self.not_looked_at if left.allow and not left.finer]
        named = [text for text in dict.fromkeys(own) if text.rpartition(" ")[2].isupper()]
        return " ".join([EVERYTHING] * (len({*own}) > len(named)) + named)

    @property
    def limits(self) -> str:
        """The choices outside the space, and how to have them searched; '' if there are none."""
        allow = f" ({self.allow})" if self.allow else ""
        return self._limits(allow, " (see explain)")

    @property
    def names(self) -> str:
        """The choices outside the space, without how to have them searched."""
        return self._limits("", "")

    def _limits(self, allow: str, see: str) -> str:
        unseen = f"{self.unseen}{allow}" if self.unseen else ""
        part = f"finer options of {self.in_part}{see}" if self.in_part else ""
        return "; ".join(filter(None, (unseen, part)))


def count_text(number: int) -> str:
    """'6,144', '1.9e12'."""
    if number < FEW:
        return f"{number:,}"
    digits, _, power = f"{number:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def listed(left: Iterable[UncoveredChoices]) -> list[tuple[str, str]]:
    """Each with the options that allow it, for a table."""
    return [(each.what, each.allow or "no option yet") for each in left]
