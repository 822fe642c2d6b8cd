"""Every generated page, and what makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import forbidden
from benchmarks.pages import (
    accuracy,
    commands,
    compiler,
    configurations,
    diloco,
    examples,
    framework_picks,
    frameworks,
    gpu,
    jax_models,
    machines,
    picks,
    speed,
    torch_modules,
    training,
)
from benchmarks.pages.tables import ROOT, stored


def decisions() -> Iterator[str]:
    """docs/results/decisions.md."""
    return forbidden.page(stored("forbidden"))


BEGINS, ENDS = "<!-- accuracy: python -m benchmarks.pages README.md -->", "<!-- accuracy ends -->"


def readme() -> Iterator[str]:
    """README.md with its table of accuracy made anew."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGINS)
    yield before + BEGINS
    yield ""
    yield from accuracy.readme()
    yield ENDS + rest.partition(ENDS)[2]


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme,
    "layoutopt/space/options.json": commands.options,
    "docs/reference/commands.md": commands.page,
    "docs/reference/hardware.md": machines.page,
    "docs/reference/frameworks.md": frameworks.page,
    "docs/results/accuracy.md": accuracy.page,
    "docs/results/picks.md": picks.page,
    "docs/results/frameworks.md": framework_picks.page,
    "docs/results/decisions.md": decisions,
    "docs/results/compiler.md": compiler.page,
    "docs/results/configurations.md": configurations.page,
    "docs/results/examples.md": examples.page,
    "docs/results/gpu.md": gpu.page,
    "docs/results/speed.md": speed.page,
    "docs/results/jax_models.md": jax_models.page,
    "docs/results/torch_modules.md": torch_modules.page,
    "docs/results/diloco.md": diloco.page,
    "docs/results/training.md": training.page,
}
"""Path -> the lines of the page."""


def written(path: str) -> str:
    """The text of a generated page."""
    return "\n".join(PAGES[path]()).rstrip("\n") + "\n"
