"""The colours of pages and figures, light and dark; figures are drawn in light colours and follow the page.

A token is a role, not a hue: compute has one colour on all figures. The mesh's axes have hues of their own.
The axis's name is always beside them, because not everyone can distinguish the hues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_COLOURS = {
    "page": ("#fcfbf8", "#15171a"),
    "raised": ("#f4f2ec", "#1d2024"),
    "ink": ("#1b1d20", "#eceae4"),
    "muted": ("#5a5f66", "#a9adb3"),
    "rule": ("#cfcbc0", "#43474e"),
    "grid": ("#e6e3da", "#2a2d32"),
    "link": ("#1d5a93", "#8cbdf0"),
    "good": ("#1d6f42", "#6fcf97"),
    "warn": ("#8a5300", "#e6b35c"),
    "bad": ("#b0271f", "#ff8a7d"),
    "compute": ("#35618c", "#7fb0e0"),
    "hidden": ("#7391b5", "#557aa3"),
    "exposed": ("#cc4f1c", "#f28a52"),
    "other": ("#85878b", "#8d9096"),
    "memory": ("#3d8378", "#66bdac"),
    "variables": ("#1f5d54", "#3f8478"),
    "device": ("#a9a69c", "#5d6168"),
    "mark": ("#fbefc9", "#3d3516"),
    "axis0": ("#6a4ba6", "#b79df0"),
    "axis1": ("#10744e", "#5fc99a"),
    "axis2": ("#a35a00", "#e9a550"),
    "axis3": ("#b02e72", "#f08fbd"),
    "axis4": ("#0b6f8f", "#62bfdf"),
    "axis5": ("#5f6b17", "#bcc765"),
}
LIGHT: Mapping[str, str] = {name: light for name, (light, _) in _COLOURS.items()}
DARK: Mapping[str, str] = {name: dark for name, (_, dark) in _COLOURS.items()}
AXES = 6


def axis_token(axis: str, mesh: Iterable[str]) -> str:
    """The colour of a mesh axis, by name, so that plans side by side agree; after six hues start again."""
    return f"axis{sorted(mesh).index(axis) % AXES}"


def css(tokens: Mapping[str, str]) -> str:
    """The tokens as custom properties."""
    return "".join(f"--{name}:{value};" for name, value in tokens.items())
