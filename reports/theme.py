"""The colours of pages and figures, light and dark; figures are drawn in light colours and follow the page.

A token is a role, not a hue: compute has one colour on all figures. The mesh's axes have hues of their own.
The axis's name is always beside them, because not everyone can distinguish the hues.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources

_COLOURS: Mapping[str, tuple[str, str]] = json.loads(
    resources.files("reports").joinpath("templates/colours.json").read_text(encoding="utf-8")
)
"""Token -> its colour on light and on dark pages."""
LIGHT: Mapping[str, str] = {name: light for name, (light, _) in _COLOURS.items()}
DARK: Mapping[str, str] = {name: dark for name, (_, dark) in _COLOURS.items()}
AXES = 6


def axis_token(axis: str, mesh: Iterable[str]) -> str:
    """The colour of a mesh axis, by name, so that plans side by side agree; after six hues start again."""
    return f"axis{sorted(mesh).index(axis) % AXES}"


def css(tokens: Mapping[str, str]) -> str:
    """The tokens as custom properties."""
    return "".join(f"--{name}:{value};" for name, value in tokens.items())
