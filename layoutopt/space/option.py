"""Options of the command line for kinds of decisions, and the options of all kinds as plain data.

Help and completion read `options.json`, so that they need not load the kinds and the runtime below them;
`python -m benchmarks.pages layoutopt/space/options.json` makes it of the records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("options.json")


@dataclass(frozen=True)
class Option:
    """One option of the command line.

    Attributes:
      usual: the default that help shows; False: none.
      several: it may be given again.
      prefix: of the elements of a list that this option has, without the prefix; "" has the others.
    """

    name: str
    metavar: str
    help: str
    usual: str | bool = False
    several: bool = False
    prefix: str = ""

    @property
    def parameter(self) -> str:
        """The parameter that it is read as."""
        return self.name.removeprefix("--").replace("-", "_")


@cache
def listed() -> dict[str, Any]:
    """The file: the options of choices (`asked`), those of them that name mesh axes (`axes`), the options of
    one layout (`by_hand`), and features that may be forbidden (`features`)."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: [Option(**o) for o in said] if said and isinstance(said[0], dict) else said
        for name, said in found.items()
    }
