"""Reads hardware files by the fields of `costmodels.hardware.model`: every fault at once, each with its path
in the file."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from costmodels.hardware.links import TOPOLOGIES
from costmodels.hardware.model import Hardware
from costmodels.hardware.numbers import WrittenNumber
from mesh_tf_core.faults import at_path


@cache
def _form() -> TypeAdapter[Hardware]:
    return TypeAdapter(Hardware)


def read(content: Any) -> tuple[Hardware | None, list[str]]:
    """The hardware in parsed JSON `content`, and its faults as 'path: fault'; one of the two is empty."""
    try:
        return _form().validate_python(content), []
    except ValidationError as error:
        return None, [_fault(e) for e in error.errors()]


NUMBER = '{"value": 80, "unit": "GB", "source": "…", "date": "2026-01"}'


def _fault(error: ErrorDetails) -> str:
    location, message = error["loc"], error["msg"]
    if error.get("ctx", {}).get("class_name") == WrittenNumber.__name__:
        message = f"must be a JSON object such as {NUMBER}"
    elif error["type"] == "string_pattern_mismatch":
        message = "must be a date such as 2026-01-31, 2026-01 or 2026"
    parts = [
        " ".join(str(p).split())  # a key may be anything, also several lines
        for i, p in enumerate(location)
        if not (i == 1 and location[0] == "topology" and p in TOPOLOGIES)  # pydantic names the chosen variant
    ]
    return at_path(".".join(parts) or "the file", message)
