"""The process of a `Partner`: reads a network, then choices, from stdin; writes its results to stdout."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import deque

from layoutopt.solver.anytime.search import LocalSearch
from layoutopt.solver.form import Ints


def main() -> None:
    """Searches until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    network, seed = pickle.load(sys.stdin.buffer)
    heard: deque[Ints] = deque()
    threading.Thread(target=_hear, args=(heard,), daemon=True).start()
    search = LocalSearch(network, seed)
    cost, bound = search.cost, search.bound
    while True:
        search.step()
        better = search.best if search.cost < cost else None
        if better is not None or search.bound > bound:
            pickle.dump((better, search.bound), answers)
            answers.flush()
        while heard:
            search.offer(heard.popleft())
        cost, bound = search.cost, search.bound


def _hear(heard: deque[Ints]) -> None:
    try:
        while True:
            heard.append(pickle.load(sys.stdin.buffer))
    except (EOFError, OSError, pickle.UnpicklingError):
        os._exit(0)  # the parent has ended
