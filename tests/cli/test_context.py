"""`--context`: by hand, in plans, in exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

LM = "examples/transformer_lm.py"
SIZES = ("layers=2", "d_model=16", "d_ff=32", "d_kv=4", "heads=4", "length=16", "batch=4", "positions=rotary")
SETS = tuple(word for size in SIZES for word in ("--set", size))
SPLIT = ("--mesh", "seq:2", "--layout", "length:seq;memory_length:seq")
PINS = tuple(word for name in ("length", "memory_length") for word in ("--pin", f"{name}:seq"))


def test_by_hand(run: Callable[..., Result]) -> None:
    done = run("lower", LM, *SETS, *SPLIT, "--context", "zigzag")
    assert done.exit_code == 0, done.stderr
    assert (
        "permute_start(seq, +1, wrap; ring)" in done.stdout
        and "all_gather(seq, memory_length)" not in done.stdout
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("ring", "--layout", "length:seq"),
            "the same axes, found length:seq, memory_length:none;",
        ),
        (("rnig",), "did you mean 'ring'"),
        (("length=ring",), "no fused attention has keys along 'length'; dimensions of"),
        (("ring", "--context", "zigzag"), "--context ring and --context zigzag both apply to everything"),
        (
            ("memory_length=ring", "--context", "memory_length=zigzag"),
            "--context memory_length=ring and --context memory_length=zigzag both apply to 'memory_length'",
        ),
        (
            ("ring", "--storage", "zero1", "--storage", "zero3"),
            "--storage zero1 and --storage zero3 both apply to everything that is not named; remove one",
        ),
        (("ring", "--set", "attention=plain"), "the model has no fused attention"),
        (
            ("all_to_all", "--set", "heads=1", "--set", "batch=1"),
            "needs a dimension of heads whose size is divisible by 2",
        ),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str, run: Callable[..., Result]) -> None:
    layout = SPLIT if "--layout" not in words else SPLIT[:2]
    done = run("cost", LM, *SETS, *layout, "--hardware", "tpu-v3", "--context", *words)
    assert done.exit_code == 2 and said in done.stderr


def test_names_count_more_than_everything_in_any_order(run: Callable[..., Result]) -> None:
    texts = [
        run("lower", LM, *SETS, *SPLIT, "--context", first, "--context", second).stdout
        for first, second in (("ring", "memory_length=zigzag"), ("memory_length=zigzag", "ring"))
    ]
    alone = run("lower", LM, *SETS, *SPLIT, "--context", "zigzag").stdout
    assert texts == [alone, alone]


def test_a_search_picks(result: Callable[..., dict[str, Any]]) -> None:
    """Of all forms, which it looks at unasked, the one that is fastest alone under one layout."""
    here = ("--set", "length=16384", "--set", "dtype=bfloat16", "--hardware", "tpu-v5p")
    plain = ("--recompute", "never", "--microbatches", "1", "--storage", "layout")
    plan = result("search", LM, *SETS, *here, "--mesh", "seq:2", *PINS, *plain)
    alone = {}
    for form in ("gather", "ring", "zigzag", "all_to_all"):
        words = () if form == "gather" else ("--context", form)
        found = result("cost", LM, *SETS, *here, *SPLIT, *words)
        alone[form] = found["predicted"]["step_seconds"]
    best = min(alone, key=alone.__getitem__)
    assert best != "gather" and plan["context"] == {"memory_length": best}
    assert plan["predicted"]["step_seconds"] == pytest.approx(alone[best])


@pytest.mark.nightly
def test_a_plan_says_it(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    out = str(tmp_path / "plan.json")
    asked = (*PINS, "--context", "ring", "--recompute", "never", "--microbatches", "1", "--storage", "layout")
    plan = result("search", LM, *SETS, "--mesh", "seq:2", "--hardware", "tpu-v3", *asked, "--out", out)
    assert not [note for note in plan["notes"] if "--context" in note]
    asked = (*PINS, "--context", "gather", *asked[-6:])
    gathered = result("search", LM, *SETS, "--mesh", "seq:2", "--hardware", "tpu-v3", *asked)
    (note,) = [note for note in gathered["notes"] if "--context" in note]
    assert note.startswith(
        "the best layout splits memory_length and gathers the keys and values for attention"
    )
    assert plan["context"] == {"memory_length": "ring"} and plan["solver"]["status"] == "OPTIMAL"
    assert plan["details"]["search"]["context"] == ["ring"]
    found = result("cost", LM, *SETS, "--layout", out, "--hardware", "tpu-v3")
    assert found["predicted"]["step_seconds"] == pytest.approx(plan["predicted"]["step_seconds"])
    refused = run("export", out, "--to", "jax")
    assert refused.exit_code == 2 and "attention to 'memory_length' is ring" in refused.stderr
