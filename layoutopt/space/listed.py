"""Makes `options.json` of the records of all kinds: `python -m layoutopt.space.listed`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from layoutopt.space.decisions import ALLOW, ARGUMENTS, BY_HAND, FEATURES
from layoutopt.space.option import FILE
from mesh_tf_core.files import write_file


def of_records() -> dict[str, Any]:
    """The content of `options.json`, made of the records."""
    asked = [ALLOW, *ARGUMENTS.values()]
    return {
        "asked": [asdict(o) for a in asked for o in a.options],
        "axes": [o.name for a in asked if a.names_axes for o in a.options],
        "by_hand": [asdict(o) for o in BY_HAND],
        "features": [*FEATURES],
    }


if __name__ == "__main__":
    write_file(FILE, json.dumps(of_records(), indent=1, ensure_ascii=False) + "\n")
