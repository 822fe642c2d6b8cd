"""Some model types of transformers at a reduced size, as `benchmarks/torch_unseen.py` imports all of them."""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.torch_unseen import in_process, one

STORED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "torch_unseen.json"
ENDS = {r["type"]: r["end"] for r in json.loads(STORED.read_text(encoding="utf-8"))["rows"]}
GOOD = sorted(kind for kind, end in ENDS.items() if end == "equal")


def test_no_type_of_the_sweep_crashes_or_differs() -> None:
    assert not {kind for kind, end in ENDS.items() if end in ("crash", "different")} and len(GOOD) > 150


@pytest.mark.nightly
@pytest.mark.parametrize("kind", random.Random(date.today().toordinal()).sample(GOOD, 8))
def test_a_type_that_was_equal_is_equal(kind: str) -> None:
    row = in_process(one, kind, 120)
    assert row["end"] == "equal", row
