"""Every generated page, and what makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import forbidden
from benchmarks.pages import accuracy, commands, compiler, diloco, jax_models, picks, speed, training
from benchmarks.pages.tables import stored


def decisions() -> Iterator[str]:
    """docs/results/decisions.md."""
    return forbidden.page(stored("forbidden"))


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "docs/reference/commands.md": commands.page,
    "docs/results/accuracy.md": accuracy.page,
    "docs/results/picks.md": picks.page,
    "docs/results/decisions.md": decisions,
    "docs/results/compiler.md": compiler.page,
    "docs/results/speed.md": speed.page,
    "docs/results/jax_models.md": jax_models.page,
    "docs/results/diloco.md": diloco.page,
    "docs/results/training.md": training.page,
}
"""Path -> the lines of the page."""


def written(path: str) -> str:
    """The text of a generated page."""
    return "\n".join(PAGES[path]()).rstrip("\n") + "\n"
