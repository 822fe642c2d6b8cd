"""A matplotlib figure as an SVG element of a page: in the page's colours and fonts, with a text alternative.

Colours of `theme.LIGHT` become the custom properties of the same role, so one drawing is right in light and
dark. Parts that only a separate file needs (declarations, groups, identifiers, fonts, distant decimals) are
left out.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape, quoteattr

from reports.figures.sheet import settings
from reports.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from reports.figures.sheet import Tips

TOKENS = {value: f"var(--{name})" for name, value in LIGHT.items()}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
DROPPED = {"font-family", "stroke-linejoin", "stroke-linecap", "stroke-miterlimit"}
NUMBER = re.compile(r"-?\d+\.\d+")
NO_TURN = re.compile(r"^rotate\(-?0(\.0+)? ")
REFERENCE = re.compile(r"url\(#([^)]+)\)")


def figure_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """An `<svg role="img">` whose title and description are texts of the page.

    Args:
      name: unique on the page; prefix of every identifier.
    """
    root = ET.fromstring(_file(figure))
    used = _referenced(root)
    _tip(root, getattr(figure, "tips", {}))
    names = {identifier: f"{name}-{position}" for position, identifier in enumerate(sorted(used))}
    width, height = root.get("viewBox", "0 0 1 1").split()[2:]
    body = "".join(_element(child, names) for child in root if _tag(child) != "metadata")
    return (
        f'<svg class="figure" role="img" viewBox="0 0 {_short(width)} {_short(height)}" '
        f'aria-labelledby="{name}-t" aria-describedby="{name}-d">'
        f'<title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(description)}</desc>{body}</svg>'
    )


def _tip(root: ET.Element, tips: Mapping[str, Tips]) -> None:
    """Puts what is said of marks under the pointer where the page's script finds it."""
    for group in root.iter():
        found = tips.get(group.get("id", ""))
        if found is None:
            continue
        marks = [each for each in group.iter() if _tag(each) == "use"] or [group]
        for mark, text in zip(marks, found.texts, strict=False):
            mark.set("data-tip", text)
        if found.near:
            group.set("data-near", "")


def _file(figure: Figure) -> bytes:
    figure.patch.set_visible(False)
    out = io.BytesIO()
    with settings():
        figure.savefig(out, format="svg", metadata=NO_METADATA)
    figure.patch.set_visible(True)
    return out.getvalue()


def _tag(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _referenced(root: ET.Element) -> set[str]:
    found: set[str] = set()
    for element in root.iter():
        for key, value in element.attrib.items():
            if key.endswith("href"):
                found.add(value.removeprefix("#"))
            else:
                found.update(REFERENCE.findall(value))
    return found


def _element(element: ET.Element, names: dict[str, str]) -> str:
    tag = _tag(element)
    if tag == "style":
        return ""
    inside = "".join(_element(child, names) for child in element)
    attributes = "".join(f" {key}={quoteattr(value)}" for key, value in _attributes(element, names))
    text = escape(element.text) if tag == "text" and element.text else ""
    if tag in ("g", "defs") and not inside:
        return ""
    if tag == "g" and not attributes:
        return inside
    return f"<{tag}{attributes}>{text}{inside}</{tag}>" if text or inside else f"<{tag}{attributes}/>"


def _attributes(element: ET.Element, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in element.attrib.items():
        if key == "id":
            if value in names:
                yield "id", names[value]
        elif key.endswith("href"):
            yield "href", "#" + names[value.removeprefix("#")]
        elif key == "style":
            if style := _style(value, names):
                yield "style", style
        elif key == "clip-path":
            yield key, _resolved(value, names)
        elif key == "fill":
            yield "style", f"fill:{TOKENS.get(value, value)}"
        elif key.startswith("data-"):
            yield key, value
        elif key == "transform" and NO_TURN.match(value):
            continue
        else:
            yield key, _short(value)


def _style(value: str, names: dict[str, str]) -> str:
    kept = []
    for declaration in value.split(";"):
        key, _, said = (part.strip() for part in declaration.partition(":"))
        if not key or key in DROPPED:
            continue
        said = _resolved(TOKENS.get(said, said), names)
        kept.append(f"{key}:{_short(said) if key != 'fill' else said}")
    return ";".join(kept)


def _resolved(value: str, names: dict[str, str]) -> str:
    """References by the new identifiers."""
    return REFERENCE.sub(lambda m: f"url(#{names[m.group(1)]})", value)


def _short(value: str) -> str:
    """Decimals that no screen shows are left out."""
    return NUMBER.sub(lambda m: f"{float(m.group()):.2f}".rstrip("0").rstrip(".") or "0", value).replace(
        "\n", ""
    )
