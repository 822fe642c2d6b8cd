"""Amounts as users write them and as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutopt.cli.units import BYTES, parse_bytes
from layoutopt.plan.units import (
    bytes_text,
    duration_text,
    rate_text,
    seconds_text,
    share_text,
    size_text,
    times_text,
)
from mesh_tf_core.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5TiB", 3 * 2**39),
        (".5KiB", 512),
        ("512B", 512),
        ("1e9", 10**9),
        ("7 B", 7),
    ],
)
def test_memory_is_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16GiBs", r"'GiBs' is not a unit of memory; did you mean 'GiB'\? known: B, GB"),
        ("16 apples", r"'apples' is not a unit of memory; known: "),
        ("much", r"--memory 'much' is not an amount of memory; write for example --memory 16GiB"),
        ("", "is not an amount of memory"),
        ("-1GiB", "is not an amount of memory"),
        ("nan", "is not an amount of memory"),
        ("0", "must be at least 1 B"),
        ("1e30", "must be at least 1 B and less than 8 EiB"),
    ],
)
def test_other_memory_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_bytes(text)


@given(st.integers(1, 2**50), st.sampled_from(sorted(BYTES)))
def test_memory_in_any_unit(number: int, unit: str) -> None:
    if number * BYTES[unit] < 2**53:
        assert parse_bytes(f"{number}{unit}") == number * BYTES[unit]


def test_numbers_are_written_with_three_digits() -> None:
    assert [bytes_text(n) for n in (5, 1536, 15.25 * 2**30, 3 * 2**50)] == [
        "5 B",
        "1.50 KiB",
        "15.2 GiB",
        "3.00 PiB",
    ]
    assert [size_text(n) for n in (5, 1536, 1023.5 * 2**20, 10 * 2**30)] == [
        "5 B",
        "1.5 KiB",
        "1 GiB",
        "10 GiB",
    ]
    assert [seconds_text(s) for s in (-5.6e-17, 2e-7, 0.00186, 0.329, 12.345)] == [
        "0 s",
        "200 ns",
        "1.86 ms",
        "329 ms",
        "12.3 s",
    ]
    assert seconds_text(float("inf")) == "unknown"
    assert [rate_text(x, "FLOP/s") for x in (0, 2.25e15)] == ["0 FLOP/s", "2.25 PFLOP/s"]
    assert [times_text(1, 2), times_text(70, 2), times_text(1, 0)] == ["0.50×", "35×", "–"]
    assert [share_text(1, 8), share_text(1, 0)] == ["12.5%", "–"]
    assert [duration_text(s) for s in (42.4, 185, 7800)] == ["42 s", "3 min 05 s", "2 h 10 min"]
