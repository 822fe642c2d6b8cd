"""A second local search with another seed, in a process of its own; it and its parent exchange their
results: choices, or choices (or None) and a bound."""

from __future__ import annotations

from layoutopt.runtime.own_process import first_letter
from layoutopt.solver.anytime.search import LocalSearch


def main() -> None:
    """Searches until the parent ends."""
    (network, seed), heard, send = first_letter()
    search = LocalSearch(network, seed)
    cost, bound = search.cost, search.bound
    while True:
        search.step()
        better = search.best if search.cost < cost else None
        if better is not None or search.bound > bound:
            send((better, search.bound))
        while heard:
            search.offer(heard.popleft())
        cost, bound = search.cost, search.bound
