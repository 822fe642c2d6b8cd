"""Batches made ahead: in order, no more than asked for, errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mesh_tf_core.training.prefetch import DEPTH, Prefetch, position


class Counting(Iterator[int]):
    """1, 2, 3 ..., and a place."""

    def __init__(self, end: int | None = None) -> None:
        self.at, self.end = 0, end

    def __next__(self) -> int:
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return self.at

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


@pytest.mark.parametrize(("end", "count", "made"), [(None, 7, 7), (4, 7, 4), (4, None, 4), (None, 0, 0)])
def test_batches_come_in_order_with_their_places(end: int | None, count: int | None, made: int) -> None:
    stream = Counting(end)
    with Prefetch(stream, lambda x: x * 10, count) as ready:
        found = [(item.fed, item.position) for item in ready]
    assert found == [(10 * i, i) for i in range(1, made + 1)]
    assert stream.at == made
    assert ready.waited > 0


def test_what_cannot_tell_its_place_has_none() -> None:
    assert position(iter([1])) is None
    with Prefetch(iter([1, 2]), lambda x: x, None) as ready:
        assert [item.position for item in ready] == [None, None]


def test_an_error_comes_after_the_batches_before_it() -> None:
    def prepare(x: int) -> int:
        if x == 3:
            raise ValueError("the third is bad")
        return x

    seen = []
    with pytest.raises(ValueError, match="the third is bad"), Prefetch(Counting(), prepare, 5) as ready:
        for item in ready:
            seen.append(item.fed)
    assert seen == [1, 2]


def test_leaving_early_ends_the_thread() -> None:
    stream = Counting()
    with Prefetch(stream, lambda x: x, None) as ready:
        assert next(iter(ready)).fed == 1
    assert stream.at <= 1 + DEPTH + 1
    assert "input" not in [thread.name for thread in threading.enumerate()]
