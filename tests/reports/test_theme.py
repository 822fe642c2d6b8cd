"""Contrast as WCAG 2.1 AA asks, in both themes."""

from __future__ import annotations

import itertools

import pytest

from reports.theme import AXES, DARK, LIGHT, axis_token

TEXT = ("ink", "muted", "link", "good", "warn", "bad", "axis0", "axis1", "axis2", "axis3", "axis4", "axis5")
"""Tokens that text is written in: 4.5 to 1 against the page, raised areas and marks (WCAG 2.1, 1.4.3)."""
GRAPHIC = ("compute", "hidden", "exposed", "other", "memory", "variables", "link", "bad")
"""Tokens that carry a meaning as areas and lines: 3 to 1 against the page (WCAG 2.1, 1.4.11)."""


def luminance(colour: str) -> float:
    """Relative luminance of '#rrggbb' (WCAG 2.1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.1)."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_known_ratios() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_contrast(theme: dict[str, str]) -> None:
    pairs = itertools.product(TEXT, ["page", "raised", "mark"])
    assert [pair for pair in pairs if contrast(theme[pair[0]], theme[pair[1]]) < 4.5] == []


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_graphic_contrast(theme: dict[str, str]) -> None:
    assert [token for token in GRAPHIC if contrast(theme[token], theme["page"]) < 3] == []


def test_tokens_are_the_same_and_tell_roles_apart() -> None:
    assert list(LIGHT) == list(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT), "two roles of one colour cannot be told apart in an SVG"


def test_axes_keep_their_colour_by_name() -> None:
    assert axis_token("model", ["data", "model"]) == axis_token("model", ["model", "data"])
    names = [f"axis {i:02}" for i in range(AXES + 1)]
    assert axis_token(names[0], names) == axis_token(names[AXES], names)
