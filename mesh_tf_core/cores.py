"""The cores that this process may use."""

import os


def cores() -> int:
    """The number of cores that this process may use."""
    return len(cpus())


def cpus() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
