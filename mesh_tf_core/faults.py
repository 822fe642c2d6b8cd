"""The messages of pydantic in the terms of these packages: "must be at least 1", "is missing"."""

from __future__ import annotations

import re

SAID = (
    (r"Value error, (.*)", r"\1"),
    (r"Field required", "is missing"),
    (r"Extra inputs are not permitted|Unexpected keyword argument",
     "is not a known field; remove it, or correct its name"),
    (r"Input should be an? (?:valid )?(?:dictionary|object)\b.*", "must be a JSON object"),
    (r"Input should be a valid (?:list|tuple|array|sequence)\b.*", "must be a list"),
    (r"Input should be a valid string\b.*", "must be text"),
    (r"Input should be a valid boolean\b.*", "must be true or false"),
    (r"Input should be a valid integer\b.*", "must be a whole number"),
    (r"Input should be a valid number\b.*", "must be a number"),
    (r"Input should be a finite number", "must be a finite number"),
    (r"Input should be greater than or equal to (.*)", r"must be at least \1"),
    (r"Input should be less than or equal to (.*)", r"must be at most \1"),
    (r"Input should be greater than (.*)", r"must be above \1"),
    (r"Input should be less than (.*)", r"must be below \1"),
    (r"Input tag '(.*)' found using '(.*)' does not match any of the expected tags: (.*)",
     r"must have a \2 of \3, found '\1'"),
    (r"Unable to extract tag using discriminator '(.*)'", r"has no field '\1'"),
    (r"Input should be (.*)", r"must be \1"),
    (r"String should match pattern '(.*)'", r"must match the pattern \1"),
    (r"\w+ should have at least 1 (?:character|item)\b.*", "must not be empty"),
    (r"\w+ should have (at (?:least|most) \d+) items? after validation, not (\d+)",
     r"must have \1 entries, found \2"),
)  # fmt: skip
"""Messages of pydantic and the text that replaces each; the first match counts."""


def fault_text(message: str) -> str:
    """A message of pydantic's in plain words; any other message unchanged, on one line.

    Example:
      >>> from mesh_tf_core.faults import fault_text
      >>> fault_text("Input should be greater than or equal to 1")
      'must be at least 1'
    """
    message = " ".join(message.split())
    for pattern, plain in SAID:
        if found := re.fullmatch(pattern, message):
            return found.expand(plain)
    return message


def at_path(path: str, message: str) -> str:
    """A fault of the field at a path: "chip is missing", or "chip: …" if the message has its own subject."""
    said = fault_text(message)
    return f"{path} {said}" if re.match(r"(?:must|is|has) ", said) else f"{path}: {said}"
