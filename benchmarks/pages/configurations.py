"""The published configurations: which are built, with how many parameters, and why others are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.pages.tables import ROOT, prose, table
from layoutopt.importers.huggingface import from_huggingface
from mesh_tf_core.errors import UserError

DATA = ROOT / "tests" / "data"
HEAD = """\
# Published configurations

`config.json` files of 2024 to 2026, as ai-dynamo/aiconfigurator 095f58a5 ships them, and files with the
sizes of further published models. Parameters are those that layoutopt builds, of the language model alone;
the reference is the count of transformers 5.24.0. {built} of {count}
are built, {equal} with exactly the parameters of the reference.

The files are in `tests/data/published_configurations.json` and `tests/data/huggingface_counts.json`; those of
further models state sizes as published, not whole files.

The [guide](../guides/huggingface.md) lists the families. Losses of tiny models of them equal those of
transformers to 5e-6.
"""


def page() -> Iterator[str]:
    """docs/results/configurations.md."""
    shipped = json.loads((DATA / "published_configurations.json").read_text(encoding="utf-8"))["models"]
    further = json.loads((DATA / "huggingface_counts.json").read_text(encoding="utf-8"))["models"]
    named = {n: x for n, x in further.items() if not n.endswith(", defaults")}
    rows = [row(name, found) for name, found in {**named, **shipped}.items()]
    built = [r for r in rows if r[2] != "refused"]
    equal = sum(r[4] == "equal" for r in rows)
    yield prose(HEAD.format(built=len(built), count=len(rows), equal=equal))
    yield from table(("file", "`model_type`", "parameters", "reference", ""), rows)


def row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """A configuration: name, model_type, parameters, reference, and whether they are equal, or the reason."""
    config, reference = found["config"], found["parameters"]
    kind = config.get("text_config", {}).get("model_type", config.get("model_type"))
    try:
        made = from_huggingface(config).parameters
    except UserError as error:
        reason = str(error).removeprefix("the configuration: ").partition("; known: ")[0]
        return name, f"`{kind}`", "refused", f"{reference:,}", reason
    if not found.get("counted", True):
        return name, f"`{kind}`", f"{made:,}", "–", "no independent count"
    return name, f"`{kind}`", f"{made:,}", f"{reference:,}", "equal" if made == reference else "different"
