"""The colours of pages and figures, light and dark; figures are drawn in light colours and follow the page.

A token is a role, not a hue: compute has one colour on all figures. The mesh's axes have hues of their own.
The axis's name is always beside them, because not everyone can distinguish the hues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LIGHT: Mapping[str, str] = {
    "page": "#fcfbf8",
    "raised": "#f4f2ec",
    "ink": "#1b1d20",
    "muted": "#5a5f66",
    "rule": "#cfcbc0",
    "grid": "#e6e3da",
    "link": "#1d5a93",
    "good": "#1d6f42",
    "warn": "#8a5300",
    "bad": "#b0271f",
    "compute": "#35618c",
    "hidden": "#7391b5",
    "exposed": "#cc4f1c",
    "other": "#85878b",
    "memory": "#3d8378",
    "variables": "#1f5d54",
    "device": "#a9a69c",
    "mark": "#fbefc9",
    "axis0": "#6a4ba6",
    "axis1": "#10744e",
    "axis2": "#a35a00",
    "axis3": "#b02e72",
    "axis4": "#0b6f8f",
    "axis5": "#5f6b17",
}
DARK: Mapping[str, str] = {
    "page": "#15171a",
    "raised": "#1d2024",
    "ink": "#eceae4",
    "muted": "#a9adb3",
    "rule": "#43474e",
    "grid": "#2a2d32",
    "link": "#8cbdf0",
    "good": "#6fcf97",
    "warn": "#e6b35c",
    "bad": "#ff8a7d",
    "compute": "#7fb0e0",
    "hidden": "#557aa3",
    "exposed": "#f28a52",
    "other": "#8d9096",
    "memory": "#66bdac",
    "variables": "#3f8478",
    "device": "#5d6168",
    "mark": "#3d3516",
    "axis0": "#b79df0",
    "axis1": "#5fc99a",
    "axis2": "#e9a550",
    "axis3": "#f08fbd",
    "axis4": "#62bfdf",
    "axis5": "#bcc765",
}
AXES = 6


def axis_token(axis: str, mesh: Iterable[str]) -> str:
    """The colour of a mesh axis, by name, so that plans side by side agree; after six hues start again."""
    return f"axis{sorted(mesh).index(axis) % AXES}"


def css(tokens: Mapping[str, str]) -> str:
    """The tokens as custom properties."""
    return "".join(f"--{name}:{value};" for name, value in tokens.items())
