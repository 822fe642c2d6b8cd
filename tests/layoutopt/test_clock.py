"""The clock's alarm: it ends work wherever that is, that work alone, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel, field_serializer

import layoutopt
from examples import mlp
from layoutopt.runtime.clock import UNLIMITED, Clock, Late, seldom_collected
from mesh_tf_core.errors import LimitError, UserError

PAUSE = 0.005


def forever() -> None:
    while True:
        time.sleep(PAUSE)


def a_moment(seconds: float = 0.2) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(PAUSE)


def test_work_is_ended_where_it_is() -> None:
    before = threading.active_count()
    assert not Clock(0.05).within(0.0, forever)
    assert not Clock(0.05).within(-1.0, forever)
    a_moment()  # nothing is raised later
    assert threading.active_count() == before


def computing(seconds: float) -> None:
    """Takes the longer by the clock the busier the machine is."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_work_computes_as_long_as_it_needs_though_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Clock(0.1, start=time.monotonic() - 100)
    assert not late.within(0.0, lambda: computing(0.2))
    assert late.within(0.0, lambda: computing(0.2), needed=10.0)
    assert not late.within(0.0, lambda: computing(100), needed=0.2)
    monkeypatch.setattr("layoutopt.runtime.clock.PATIENCE", 2.0)
    assert not late.within(0.0, forever, needed=0.1)  # which computes hardly at all


def test_it_ends_work_under_a_profiler() -> None:
    """In a process of its own: Python looks for ever for an exception that was taken back."""
    profiled = """
import cProfile, time
from layoutopt.runtime.clock import Clock

def forever():
    while True:
        time.sleep(0.005)

with cProfile.Profile():
    assert not Clock(0.05).within(0.0, forever)
    [each for each in range(9)]
"""
    subprocess.run([sys.executable, "-c", profiled], check=True, timeout=60)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_limit_of_centuries() -> None:
    """Longer than any lock waits."""
    assert Clock(1e12).within(0.0, a_moment)


def test_a_part_of_no_time_ends_a_search_as_a_limit_does() -> None:
    """It is not the 0 seconds that a user is refused for."""
    over, asked = Clock(1.0, start=time.monotonic() - 2.0), {"mesh": "data:2", "hardware": "tpu-v3"}
    with pytest.raises(LimitError, match="the time limit was reached before this search"):
        layoutopt.search(mlp.model(), **asked, time_limit=over.part(0.5))
    with pytest.raises(UserError, match="give a positive number of seconds"):
        layoutopt.search(mlp.model(), **asked, time_limit=0)


def test_work_that_ends_by_itself() -> None:
    done: list[int] = []
    assert Clock(100).within(0.0, lambda: done.append(1))
    assert UNLIMITED.within(0.0, lambda: done.append(2))
    assert done == [1, 2]
    with pytest.raises(ValueError, match="bad"):
        Clock(100).within(0.0, lambda: int("bad"))


def test_handlers_of_errors_do_not_hear_it() -> None:
    def stubborn() -> None:
        try:
            forever()
        except Exception:
            pytest.fail("an error was heard")

    assert not Clock(0.05).within(0.0, stubborn)


@pytest.mark.parametrize("inner_first", [True, False])
def test_work_inside_of_work(inner_first: bool) -> None:
    inner, outer = Clock(0.05 if inner_first else 100), Clock(0.3)
    ended: list[bool] = []

    def work() -> None:
        ended.append(inner.within(0.0, forever))
        forever()

    assert not outer.within(0.0, work)
    assert ended == ([False] if inner_first else [])


def test_both_at_once() -> None:
    inner, outer = Clock(0.05), Clock(0.05)

    def work() -> None:
        inner.within(0.0, forever)
        forever()

    assert not outer.within(0.0, work)
    a_moment(0.1)


def test_a_lost_exception_comes_again() -> None:
    def swallows() -> None:
        for _ in range(2):
            with contextlib.suppress(Late):
                forever()
        forever()

    assert not Clock(0.05).within(0.0, swallows)


class Thing:
    """May be referred to weakly."""


class Slow:
    """Takes its time when it goes."""

    def __del__(self) -> None:
        a_moment()


def test_nothing_is_raised_where_nobody_hears_it(recwarn: pytest.WarningsRecorder) -> None:
    def work() -> None:
        Slow()
        forever()

    assert not Clock(0.05).within(0.0, work)
    assert not recwarn.list


def test_what_a_weak_reference_loses_is_said_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Its callback runs while the limit passes, and Python throws away what is raised in it."""
    lost = list[object]()
    before, sys.unraisablehook = sys.unraisablehook, lost.append

    def work() -> None:
        held = weakref.ref(thing := Thing(), lambda _: a_moment(0.3))
        del thing
        assert held() is None
        forever()

    try:
        assert not Clock(0.05).within(0.0, work)
        assert not lost and sys.unraisablehook == lost.append
    finally:
        sys.unraisablehook = before
    assert not capsys.readouterr().err


def test_other_threads_are_left_alone() -> None:
    found: list[bool] = []

    def apart(work: Callable[[], None], limit: float) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(Clock(limit).within(0.0, work)))
        thread.start()
        return thread

    threads = [apart(forever, 0.1), apart(lambda: a_moment(0.4), 100)]
    for thread in threads:
        thread.join()
    assert found == [False, True]


@pytest.mark.parametrize("first", [700, 0, 10**6])
@pytest.mark.nightly
def test_garbage_is_looked_for_as_before(first: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(first, *before[1:])
        with pytest.raises(ValueError, match="x"), seldom_collected():
            assert gc.get_threshold()[0] in (0, 500_000, 10**6)
            raise ValueError("x")
        assert gc.get_threshold() == (first, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_searches_in_threads_leave_the_thresholds_as_they_were() -> None:
    """The first begins and ends first, and the second in between."""
    before, met = gc.get_threshold(), [threading.Event() for _ in range(3)]

    def first() -> None:
        with seldom_collected():
            met[0].set()
            met[1].wait(5)
        met[2].set()

    def second() -> None:
        met[0].wait(5)
        with seldom_collected():
            met[1].set()
            met[2].wait(5)
            assert gc.get_threshold()[0] >= 500_000

    try:
        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(first), pool.submit(second)]:
                each.result(10)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)


def test_no_time_is_left_after_a_hurry() -> None:
    clock = Clock(100)
    assert not clock.over and clock.rest is not None and clock.rest > 1
    clock.hurry()
    assert clock.over and clock.left == 0.0
    assert clock.rest == pytest.approx(0.01)
    assert UNLIMITED.left is UNLIMITED.rest is None


@pytest.mark.parametrize("limit", [None, 5.0])
def test_a_limit_for_a_while_is_for_those_without_one(limit: float | None) -> None:
    clock = Clock(limit)
    with clock.at_most(100):
        assert clock.left is not None and (clock.left > 90) == (limit is None)
    assert clock.limit == limit
    with clock.at_most(100):
        clock.hurry()
    assert clock.over


def test_ctrl_c_in_work_leaves_no_alarm() -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Clock(0.1).within(0.0, stopped)
    a_moment(0.2)


def test_what_is_written_when_time_is_over_raises_no_other_error() -> None:
    """pydantic makes an error of its own of the alarm, if that comes while it calls back."""

    class Slow(BaseModel):
        n: int = 1

        @field_serializer("n")
        def _slowly(self, n: int) -> int:
            forever()
            return n

    assert not Clock(0.05).within(0.0, lambda: Slow().model_dump())


def test_what_reading_took_is_no_limit_of_a_search_within() -> None:
    """Else the search says that the limit, which nobody gave so, is 0."""
    assert layoutopt.lint(mlp.model(), "a:2", "batch:a", hardware="tpu-v5e", time_limit=1e-3).priced.fits
