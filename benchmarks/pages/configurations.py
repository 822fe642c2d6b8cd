"""The published configurations: which are built, with how many parameters, and why others are refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.pages.tables import ROOT, prose, stored, table
from layoutopt.importers.huggingface import from_huggingface
from mesh_tf_core.errors import UserError

DATA = ROOT / "tests" / "data"
HEAD = """\
# Published configurations

`config.json` files of 2024 to 2026, as ai-dynamo/aiconfigurator 095f58a5, inference-sim f90a1e3a and VeOmni
d9774494 ship them, and files with the sizes of further published models. Parameters are those that
layoutopt builds, of the language model alone;
the reference is the count of transformers 5.24.0. {built} of {count}
are built, {equal} with exactly the parameters of the reference.

The files are in `tests/data/published_configurations.json` and `tests/data/huggingface_counts.json`; those of
further models state sizes as published, not whole files.

The [guide](../guides/huggingface.md) lists the families. Losses of tiny models of them equal those of
transformers to 5e-6.
"""


UNSEEN = """\
## Files and classes that nobody had looked at

The version of 2026-11-29 (208742fa) read {files} further files of these repositories, which no test held,
before anything was changed for them: {before}. After the changes: {after}. No file ended in an exception.

The table lists the files that were refused at first. "Not counted" are models that transformers does not
build.
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
    yield from unseen()


def unseen() -> Iterator[str]:
    """What the first version to read files that nobody had looked at made of them."""
    found = stored("unseen_configurations")
    files = found["files"]
    said = {w: Counter(f[w] for f in files.values()) for w in ("first", "now")}
    before, after = (
        ", ".join(f"{n} {state}" for state, n in said[w].most_common()) for w in ("first", "now")
    )
    yield ""
    yield prose(UNSEEN.format(files=len(files), before=before, after=after))
    rows = [(n, f["because"], f["now"]) for n, f in files.items() if f["first"] != "equal"]
    yield from table(("file", "message at first", "now"), rows)
    yield "\nConfigurations of all classes of transformers 5.24.0 with their defaults:\n"
    states = sorted({s for by in found["types"].values() for w in by.values() for s in w})
    lines = [
        (f"{kind}, {when}", *(by[w].get(state, 0) for state in states))
        for kind, by in found["types"].items()
        for w, when in (("first", "at first"), ("now", "now"))
    ]
    yield from table(("classes", *states), lines)


def row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """A configuration: name, model_type, parameters, reference, and whether they are equal, or the reason."""
    config, reference = found["config"], found["parameters"]
    kind = config.get("text_config", {}).get("model_type", config.get("model_type"))
    try:
        made = from_huggingface(config).parameters
    except UserError as error:
        said = str(error).removeprefix("the configuration: ")
        reason = re.split(r"; (?:nearest|all \d+)", said)[0]
        return name, f"`{kind}`", "refused", f"{reference:,}" if reference else "–", reason
    if not found.get("counted", True):
        return name, f"`{kind}`", f"{made:,}", "–", "no independent count"
    return name, f"`{kind}`", f"{made:,}", f"{reference:,}", "equal" if made == reference else "different"
