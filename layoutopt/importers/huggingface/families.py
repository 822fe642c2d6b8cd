"""Families of language models: `families.json` says how each differs from Llama, besides the sizes in its
files, in the words of `Form`, `Heads` and `Experts`.

Defaults of fields are those of the classes of transformers (`defaults.json`), because files omit them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layoutopt.importers.huggingface import patterns
from layoutopt.importers.huggingface.form import Form
from layoutopt.importers.huggingface.mixers import Heads
from layoutopt.importers.huggingface.mixtures import Experts

_ROWS = json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))


def _form(said: Mapping[str, Any]) -> Form:
    """The form of a row, of the row that it is `like` with changes; a pattern is the name of a function of
    `patterns`, or arguments of `alternating`."""
    said = _whole(said)
    parts: dict[str, Any] = {n: v for n, v in said.items() if n not in ("architecture", "like")}
    if encoder := parts.pop("encoder", None):
        parts["encoder"] = _form({**said, "encoder": None, "side": "encoder_", **encoder})
        parts["side"] = "decoder_"
    parts["cases"] = [(wanted, _form({**said, "cases": [], **new})) for wanted, new in said.get("cases", ())]
    for name, made in (("heads", Heads), ("mixture", Experts)):
        if said.get(name) is not None:
            parts[name] = made(**said[name])
    if (pattern := said.get("pattern")) is not None:
        named = isinstance(pattern, str)
        parts["pattern"] = getattr(patterns, pattern) if named else patterns.alternating(**pattern)
    return Form(**parts)


def _whole(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with what it takes from the one that it is `like`."""
    return {**_whole(_ROWS[said["like"]]), **said} if "like" in said else said


FORMS: dict[str, tuple[str, Form]] = {name: (row["architecture"], _form(row)) for name, row in _ROWS.items()}
"""model_type -> the architecture, and its form."""
