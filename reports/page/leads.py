"""How to read each section, in a sentence or two: `templates/leads.json`, by page and section."""

import json
from collections.abc import Mapping
from importlib import resources

_TEXT = resources.files("reports").joinpath("templates/leads.json").read_text(encoding="utf-8")
LEADS: Mapping[str, Mapping[str, str]] = json.loads(_TEXT)
