"""Signals, for all commands: SIGINT (Ctrl-C), SIGTERM and SIGHUP ask a command to end and keep what it has.

Nothing else in the project sets a handler. How to use this module:

- Work with something to save registers a callback and ends soon, at a point where its state is whole:
schedulers kill what still runs 30 s after SIGTERM.

      stopped = threading.Event()
      with signals.handled(stopped.set):
          while more and not stopped.is_set():
              ...  # one whole step
      ...  # save

  The first signal within calls `stopped.set` and nothing else; Ctrl-C once more raises KeyboardInterrupt.
  This works without a command around it too, as in a user's script: there it is Ctrl-C alone.
- All other work gets KeyboardInterrupt in the main thread at once and lets it pass. Code that knows what was
saved reports it and raises the exception again. `Group.main` makes the exit code of it, `exit_code()`: 130,
143, 129.

Signals that were ignored when the process started stay ignored (SIGHUP under nohup, SIGINT of a shell's
background). SIGTERM and SIGHUP after another signal are the same request, and so is Ctrl-C within `BURST`
seconds: a closing terminal sends SIGHUP twice, wrappers forward the Ctrl-C that their child has got already.
An import is not interrupted, since libraries make other errors of that: the signal is heard when it is over,
which may take seconds, or ends the process at once where nothing can be lost (`nothing_to_keep`). While the
command line itself is imported, and once a command is done, a signal ends the process at once (`start`).
Before that is the interpreter's own start: there Ctrl-C is Python's, which may show where it was. While the
interpreter shuts down a signal kills the process; shells show the same exit code.

A main thread inside a library's code does not receive signals. A second thread therefore ends the process: at
the second Ctrl-C, or `PATIENCE` seconds after SIGTERM or SIGHUP, unless work within `told` is still running.
"""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BURST = 0.2
"""Seconds within which signals are one request."""
PATIENCE = 25.0
"""Seconds that a command has after SIGTERM or SIGHUP, of the 30 that Slurm and Kubernetes give."""
IMPORT = 10.0
"""Seconds that a signal waits for the end of an import."""
STUCK = 1.0
"""Seconds after which a signal that the main thread has not heard counts as unheard."""


class _State:
    """What is known of signals in this process.

    Attributes:
      number, at: the last request, and when the main thread heard it.
      told: how work is told, the innermost last; a request takes one away.
      working: pieces of work within `told`, also those that were told already; `done`: when the last ended.
      waits: a request waits for the end of an import; `again`: it is sent once more by ourselves.
      ends: signals end the process at once between commands.
      leaves: what is said before a signal in an import ends the process; the outermost, which comes first.
      undone: what is put right before the process is ended, the first last.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.at = self.done = -math.inf
        self.told, self.leaves = list[Callable[[], None]](), list[Callable[[], None]]()
        self.undone: list[Callable[[], object]] = []
        self.working = 0
        self.waits = self.again = self.ends = False


_state = _State()


def start() -> None:
    """From here on a signal ends this process at once and silently, except inside `command`."""
    _state.ends = True
    for number in _not_ignored(ENDING):
        signal.signal(number, _leave)


@contextlib.contextmanager
def command(numbers: Sequence[int] = ENDING) -> Iterator[None]:
    """Inside the block, `numbers` are handled as the module describes. Only the main thread can."""
    _state.number, _state.at = None, -math.inf
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_waiting)
        for number in _not_ignored(numbers):
            stack.callback(signal.signal, number, signal.signal(number, _hear))
        if _state.ends:
            stack.enter_context(_watched())
        yield


@contextlib.contextmanager
def handled(stop: Callable[[], None], numbers: Sequence[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Within it, the first signal calls `stop`, in the main thread between two bytecodes.

    In other threads it does nothing, for signals are not theirs.

    Args:
      numbers: signals that are handled here even outside a command.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as stack:
        for number in numbers:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL, _leave):
                stack.callback(signal.signal, number, signal.signal(number, _hear))
                _state.at = -math.inf
        stack.callback(_work_ended, stop)
        _state.working += 1
        _state.told.append(stop)
        yield


@contextlib.contextmanager
def nothing_to_keep(say: Callable[[], None]) -> Iterator[None]:
    """Inside the block and outside `told`, a signal during an import ends the process at once, after
    `say`."""
    _state.leaves.append(say)
    try:
        yield
    finally:
        _state.leaves.remove(say)


@contextlib.contextmanager
def put_right(undo: Callable[[], object]) -> Iterator[None]:
    """Does `undo` at the end, also where a signal ends the process."""
    _state.undone.append(undo)
    try:
        yield
    finally:
        _state.undone.remove(undo)
        undo()


def exit_code() -> int:
    """The exit code of a command that was interrupted: 128 + the signal's number."""
    return 128 + (signal.SIGINT if _state.number is None else _state.number)


def _work_ended(stop: Callable[[], None]) -> None:
    _state.working -= 1
    _state.done = time.monotonic()
    if stop in _state.told:
        _state.told.remove(stop)


def _forget_waiting() -> None:
    _state.waits = _state.again = False


def _not_ignored(numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _leave(number: int, frame: FrameType | None = None) -> NoReturn:
    os._exit(128 + number)


def _hear(number: int, frame: FrameType | None) -> None:
    """The handler within commands and `told`."""
    now = time.monotonic()
    if _state.again:
        _state.again = False
    elif now - _state.at < BURST or (number != signal.SIGINT and _state.number is not None):
        return
    elif _state.waits:
        _end(number)
    else:
        _state.number, _state.at = number, now
    _state.waits = _importing(frame) and now - _state.at < IMPORT
    if _state.waits and _state.leaves and not _state.told:
        _end(number, _state.leaves[0])
    elif _state.waits:
        later = threading.Timer(0.05, _send_again, (number,))
        later.daemon = True
        later.start()
    elif _state.told:
        _state.told.pop()()
    else:
        raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    if _state.waits:
        _state.again = True
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def _end(number: int, say: Callable[[], None] = lambda: None) -> NoReturn:
    """Ends the process whatever it does; a display may have hidden the cursor."""
    for undo in _state.undone[::-1]:
        undo()
    say()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")
    _leave(number)


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Within it, a thread hears signals that the main thread does not."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reads,), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)


def _watch(pipe: int) -> None:
    last, asked, number = -math.inf, math.inf, 0
    while True:
        ready = select.select([pipe], [], [], None if math.isinf(asked) else 0.5)[0]
        now = time.monotonic()
        if ready:
            arrived = os.read(pipe, 64)
            if not arrived:  # the command is done
                os.close(pipe)
                return
            for number in set(arrived) & set(map(int, ENDING)):
                if number != signal.SIGINT:
                    asked = min(asked, now)
                elif now - last > STUCK and _state.at < last - STUCK:
                    _end(number)
                last = now
        elif not _state.working and now - max(asked, _state.done) > PATIENCE:
            _end(number)
