"""Time that several pieces of work share, and the end of work that does not check the clock.

Code that can stop at a suitable point checks the clock (`over`, `left`). Whoever cannot is ended where it is,
by an exception that Python raises in its thread, as Ctrl-C raises one in the main thread (`within`). No loop
needs a check only because of the limit. Results that must survive are stored outside the work as soon as they
are known. A call into C is ended once it returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

AGAIN, SOON = 0.5, 0.02
"""Seconds until a lost exception is raised again, and seconds of waiting for a thread that may not receive
it; then the condition is checked again."""
IMPORT = "<frozen importlib._bootstrap>"
LEAST = 0.01
"""Seconds that are left at least for work that needs some."""
SELDOM, WHOLE = 500_000, 1_000
"""New objects between two looks for garbage; looks at what survived some, between two at everything."""
PATIENCE = 8.0
"""Largest multiple, by the clock of a busy machine, of the seconds that work may compute."""


class Late(BaseException):
    """The time is over; no handler of errors is to catch it."""


began: float | None = None
"""When this process began, where a command line is all that it does."""


def begin() -> None:
    """Time that a command has counts from here on: loading it is part of it."""
    global began
    began = time.monotonic()


class Clock:
    """Counts down a time limit, in seconds.

    Attributes:
      limit: seconds after the start; None: there is none.
    """

    def __init__(self, limit: float | None = None, start: float | None = None) -> None:
        self.start = time.monotonic() if start is None else start
        self.limit = limit

    @classmethod
    def of(cls, limit: float | Clock | None) -> Clock:
        """A running clock as it is, or one that starts now."""
        return limit if isinstance(limit, Clock) else cls(limit)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def left(self) -> float | None:
        """Seconds until the limit, at least 0; None without a limit."""
        return None if self.limit is None else max(0.0, self.limit - self.elapsed)

    @property
    def rest(self) -> float | None:
        """Seconds for work that needs some: at least `LEAST`, if the limit is positive."""
        if self.limit is None or self.limit <= 0:
            return self.limit
        return max(self.limit - self.elapsed, LEAST)

    @property
    def over(self) -> bool:
        """The limit has passed."""
        return self.left == 0.0

    def again(self) -> Clock:
        """A clock with the same time left and an end of its own."""
        return Clock(self.limit, self.start)

    def part(self, share: float) -> Clock:
        """A clock for a part of the time left."""
        return Clock(None if self.left is None else share * self.left)

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Allows at most this many seconds inside the block, if there is no limit yet."""
        before, limit = self.limit, self.elapsed + seconds
        if before is None:
            self.limit = limit
        try:
            yield
        finally:
            if before is None and self.limit == limit:  # nobody was in a hurry
                self.limit = None

    def hurry(self, seconds: float = 0.0) -> None:
        """Leaves at most this much time from now on."""
        self.limit = self.elapsed + min(seconds, math.inf if self.left is None else self.left)

    def within(self, grace: float, work: Callable[[], object], needed: float = 0.0) -> bool:
        """Runs `work` until `grace` seconds after the limit and ends it then; returns True if it finished.

        Without a limit it may take any time. Exceptions of the work propagate.

        Args:
          needed: seconds that this process computes before the work is ended, however late it began and
            however busy the machine is; but at most `PATIENCE` times as long by the clock.
        """
        if self.limit is None:
            work()
            return True
        alarm = _Alarm(needed)
        try:
            alarm.set(self.limit - self.elapsed + grace)
            try:
                work()
            finally:
                alarm.off()
        except alarm.late:
            return False
        except Exception as error:
            # pydantic makes another error of what is raised while it writes.
            if not isinstance(error.__cause__, alarm.late):
                raise
            return False
        finally:
            alarm.off()  # again: Ctrl-C, or the alarm itself, may have come in between
        return True


_seldom: list[tuple[int, int, int]] = []
"""The process's thresholds before the first search that goes on, once for each that does."""
_collecting = threading.Lock()


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Python seldom looks for garbage in cycles: a search keeps what it makes, and each look visits that. The
    last of several searches in threads sets the thresholds as they were before the first."""
    with _collecting:
        _seldom.append(_seldom[0] if _seldom else gc.get_threshold())
        first, second, third = _seldom[0]
        gc.set_threshold(max(first, SELDOM) if first else 0, second, max(third, WHOLE))
    try:
        yield
    finally:
        with _collecting:
            before = _seldom.pop()
            if not _seldom:
                gc.set_threshold(*before)


UNLIMITED = Clock()
"""For work that may take any time."""
_on: list[_Alarm] = []
"""Alarms of all threads that are not off."""
_hooks: list[Callable[[sys.UnraisableHookArgs], object]] = []
"""The process's hook for exceptions that nobody can hear, while an alarm is on."""
_hooking = threading.Lock()


def _lost(what: sys.UnraisableHookArgs) -> None:
    """Says nothing of a `Late` that Python threw away: a weak reference's callback cannot hand one on, and it
    is raised again."""
    if not issubclass(what.exc_type, Late):
        (_hooks[-1] if _hooks else sys.__unraisablehook__)(what)


class _Alarm:
    """Raises `late`, a class of its own, in the thread that made it, once this process has computed as long
    as is `needed`."""

    def __init__(self, needed: float = 0.0) -> None:
        self.computed, self.last = needed + time.process_time(), PATIENCE * needed + time.monotonic()
        self.late: type[Late] = type("Late", (Late,), {})
        self.thread = threading.get_ident()
        self.around: FrameType | None = sys._getframe(1)
        self.rung = False
        self._off, self._lock = threading.Event(), threading.RLock()

    def set(self, seconds: float) -> None:
        """Rings after so many seconds."""
        with _hooking:
            _on.append(self)
            if not _hooks:
                _hooks.append(sys.unraisablehook)
                sys.unraisablehook = _lost
        threading.Thread(target=self._wait, args=(seconds,), daemon=True).start()

    def off(self) -> None:
        """Rings no more."""
        with self._lock:
            self._off.set()
        self.around = None
        with _hooking:
            if self in _on:
                _on.remove(self)
            if not _on and _hooks:
                if sys.unraisablehook is _lost:
                    sys.unraisablehook = _hooks[-1]
                _hooks.clear()
        if self.rung:
            # A thread has room for one such exception: this one's goes, and those of alarms around it stay.
            _drop()
            for other in [a for a in _on if a.thread == self.thread and a.rung]:
                _raise(other.thread, other.late)

    def _wait(self, seconds: float) -> None:
        ring, deaf = time.monotonic() + seconds, 0.0
        while not self._off.wait(min(max(ring - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            with self._lock:
                now = time.monotonic()
                if now < ring or self._off.is_set():
                    continue
                if now < self.last and (missing := self.computed - time.process_time()) > 0:
                    ring = min(now + missing, self.last)
                    continue
                if deaf < AGAIN and self._deaf():
                    ring, deaf = now + SOON, deaf + SOON
                else:
                    ring, self.rung = now + AGAIN, True
                    _raise(self.thread, self.late)

    def _deaf(self) -> bool:
        """Whether an exception would be lost: libraries make other errors of what is raised in an import, and
        nobody hears what is raised while garbage is collected."""
        collecting = {getattr(each, "__code__", None) for each in gc.callbacks}
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self.around:
            code = frame.f_code
            if code.co_filename == IMPORT or code.co_name == "__del__" or code in collecting:
                return True
            frame = frame.f_back
        return False


def _raise(thread: int, error: type[BaseException]) -> None:
    """Python raises `error` in a thread as soon as that runs Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _drop() -> None:
    """What was to be raised in this thread is not: something else is, here, in its place. Raising nothing
    instead lets Python 3.11 look for it for ever under a profiler or a measurement of coverage."""
    try:
        _raise(threading.get_ident(), Late)
        while True:
            pass
    except Late:
        pass
