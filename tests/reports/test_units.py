"""Numbers and names in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutopt.plan import units


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (units.seconds_text(0), "0 s"),
        (units.seconds_text(3.81e-5), "38.1 µs"),
        (units.seconds_text(0.9996), "1.00 s"),
        (units.seconds_text(0.412), "412 ms"),
        (units.seconds_text(90.0), "90.0 s"),
        (units.seconds_text(173), "2.88 min"),
        (units.seconds_text(86400), "24.0 h"),
        (units.bytes_text(0), "0 B"),
        (units.bytes_text(1023), "1023 B"),
        (units.bytes_text(6.96 * 2**30), "6.96 GiB"),
        (units.bytes_text(2**60 * 3000), "3,000 EiB"),
        (units.bytes_text(4.27e9), "3.98 GiB"),
        (units.count(512), "512"),
        (units.count(4899222528), "4.90 B"),
        (units.percent(0.0004), "<0.1 %"),
        (units.percent(0.0314), "3.1 %"),
        (units.percent(0.18), "18 %"),
        (units.signed_percent(-0.04), "−4.0 %"),
        (units.signed_percent(0.0), "±0 %"),
        (units.against(2.0, 1.0), "2.00×"),
        (units.against(1.1, 1.0), "+10 %"),
        (units.against(1.1, 0.0), ""),
        (units.quantity(4.5e13, "FLOP/s"), "45 TFLOP/s"),
        (units.quantity(1e-6, "s"), "1 µs"),
        (units.quantity(0.9, "1"), "0.9"),
        (units.quantity(16 * 2**30, "bytes"), "16 GiB"),
        (units.rounded("2.00 GiB"), "2 GiB"),
        (units.rounded("2.50 GiB"), "2.5 GiB"),
        (units.rounded("100 ms"), "100 ms"),
        (units.some(["a"], 3), "a"),
        (units.some(["a", "b", "c"], 3), "a, b and c"),
        (units.some(["a", "b", "c", "d"], 2), "a, b and 2 more"),
        (
            units.layout_text({"batch": ("data", "pod"), "heads": (), "d_ff": ("model",)}),
            "batch:data+pod;d_ff:model",
        ),
        (units.mesh_text({}), "one device"),
        (units.letter(0) + units.letter(25) + units.letter(26), "AZAA"),
        (units.clean("a\nb\x00\u202ec"), "a b��c"),
    ],
)
def test_words(said: str, expected: str) -> None:
    assert said == expected


def test_a_number_and_its_unit_share_a_line() -> None:
    said = units.glued("412 ms of 2.00 h, 6.96 GiB (88 %) at 4.9 B, 45 TFLOP/s over data 8 and 3 more")
    assert said.replace("\u00a0", "_") == (
        "412_ms of 2.00_h, 6.96_GiB (88_%) at 4.9_B, 45_TFLOP/s over data 8 and 3 more"
    )


@given(st.floats(1e-9, 1e9), st.sampled_from([units.seconds_text, units.bytes_text, units.count]))
def test_numbers_are_short(value: float, say: object) -> None:
    assert len(say(value)) <= 11  # type: ignore[operator]


@given(st.text(max_size=80), st.integers(8, 40))
def test_shortened_text_keeps_its_ends(text: str, limit: int) -> None:
    short = units.shorten(text, limit)
    assert len(short) <= limit
    assert short == text or (short[0] == text[0] and short[-1] == text[-1] and "…" in short)
