"""Errors that a user can cause, and the wording they share.

Every message is one line: what was asked, what was found, what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """The user's input is wrong. The command line prints only the message and exits with `exit_code`.

    Attributes:
      more: data for programs, beside the message.
    """

    exit_code = 2
    more: Mapping[str, Any] = {}


class LayoutError(UserError):
    """A layout that cannot be lowered for this graph and mesh."""


class NoLayoutError(UserError):
    """A search found no layout.

    Attributes:
      nearest: the `layoutopt.Plan` with the least memory that a search found, although it does not fit; None
        if there is none.
      diagnose: searches for what conflicts and what helps (`layoutopt.optimize.answers.infeasible.diagnose`).
    """

    nearest: Any = None
    diagnose: Callable[..., Any] | None = None

    @cached_property
    def repairs(self) -> tuple[Any, ...]:
        """Changes of the search under which a layout fits, the cheapest first, each with the plan that was
        found. They are searched for at the first use, for at most two minutes.

        For example, `layoutopt.search(model, **error.repairs[0].asked)` returns a plan.
        """
        return () if self.diagnose is None else self.diagnose().repairs


class InfeasibleError(NoLayoutError):
    """No layout satisfies the request; this is proven."""

    exit_code = 3


class LimitError(UserError):
    """A limit of time or size was reached before a result was found."""

    exit_code = 4


class UndecidedError(NoLayoutError, LimitError):
    """No usual layout satisfies the request; whether another one does was not decided."""


class ClusterError(UserError):
    """A process of the job was lost or did not start; the job can resume from its last checkpoint."""

    exit_code = 5


class BrokenBoundError(UserError):
    """A prediction is above a bound that the user set."""

    exit_code = 6


@cache
def _synonyms() -> tuple[tuple[str, ...], ...]:
    """The words that mean one thing here and in other tools, of each thing; earlier ones are preferred."""
    lines = Path(__file__).with_name("synonyms.txt").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(map(_folded, line.split())) for line in lines)


def _folded(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower())


def meant(asked: str, known: Iterable[str]) -> str:
    """The name among `known` of what a word of another tool means, which may follow the name of its section
    and a dot; '' if there is none."""
    ours, words = {_folded(name): name for name in known}, {*map(_folded, (asked, asked.rpartition(".")[2]))}
    alike = (word for group in _synonyms() if words & {*group} for word in group)
    return next((ours[word] for word in alike if word in ours), "")


def known_names(asked: str, known: Iterable[str]) -> str:
    """The names that exist, the nearest first: the end of every 'unknown name' message."""
    names = sorted(known)
    lower = {name.lower(): name for name in reversed(names)}
    near = [n for n in lower if str(asked).lower().startswith(f"{n}-")][-1:]  # h100-sxm is a kind of h100
    near = near or difflib.get_close_matches(str(asked).lower(), lower, n=1, cutoff=0.6)
    hint = f"did you mean {lower[near[0]]!r}? " if near else ""
    if (ours := meant(str(asked), names)) and _folded(ours) != _folded(str(asked)):
        hint = f"use {ours}; "
    return f"{hint}known: {', '.join(names) if names else 'none'}"


def not_installed(package: str, extra: str, what: str = "this") -> UserError:
    """The error that names the command to install a missing optional package."""
    return UserError(f"{what} needs {package}, which is not installed; run: pip install 'layoutopt[{extra}]'")
