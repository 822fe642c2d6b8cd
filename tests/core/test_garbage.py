"""The collector is held off, not lost: what was made is old afterwards, and is collected later."""

from __future__ import annotations

import gc
import weakref

import pytest

from mesh_tf_core import garbage


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def test_nothing_is_collected_inside_and_all_can_be_afterwards() -> None:
    with garbage.kept():
        assert not gc.isenabled()
        with garbage.kept():
            found = weakref.ref(Knot())
        assert not gc.isenabled()
        gone = [Knot() for _ in range(2000)]
        gone.clear()
        assert found() is not None
    assert gc.isenabled()
    gc.collect()
    assert found() is None


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with garbage.kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_inside_does_not_leave_it_off() -> None:
    with pytest.raises(RuntimeError, match="inside"), garbage.kept():
        raise RuntimeError("inside")
    assert gc.isenabled()


def test_much_of_it_is_looked_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "MANY", 1000)
    with garbage.kept():
        found = weakref.ref(Knot())
        alive = [[] for _ in range(2000)]
    assert found() is None and len(alive) == 2000


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with garbage.kept():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
