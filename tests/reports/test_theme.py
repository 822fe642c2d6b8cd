"""Contrast as WCAG 2.1 AA asks, in both themes."""

from __future__ import annotations

import pytest

from reports.theme import AXES, DARK, GRAPHIC, LIGHT, TEXT, axis_token, contrast


def test_known_ratios() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["page", "raised", "mark"])
@pytest.mark.parametrize("token", TEXT)
def test_text_contrast(theme: dict[str, str], token: str, ground: str) -> None:
    assert contrast(theme[token], theme[ground]) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("token", GRAPHIC)
def test_graphic_contrast(theme: dict[str, str], token: str) -> None:
    assert contrast(theme[token], theme["page"]) >= 3


def test_tokens_are_the_same_and_tell_roles_apart() -> None:
    assert list(LIGHT) == list(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT), "two roles of one colour cannot be told apart in an SVG"


def test_axes_keep_their_colour_by_name() -> None:
    assert axis_token("model", ["data", "model"]) == axis_token("model", ["model", "data"])
    names = [f"axis {i:02}" for i in range(AXES + 1)]
    assert axis_token(names[0], names) == axis_token(names[AXES], names)
