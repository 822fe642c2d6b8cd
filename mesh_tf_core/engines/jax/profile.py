"""Steps recorded by JAX's profiler: files that XProf (TensorBoard) opens, and the activity of each device
over time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP = "step"
"""The name of the engine's step events (`jax.profiler.StepTraceAnnotation`)."""
HOST = "/host:CPU"
"""XProf's name of the host, where CPU devices run too."""


@dataclass
class Track:
    """The events of one thread or stream of a device or the host.

    Attributes:
      home: the device, or the host, in words.
      events: name, first nanosecond since the recording began, and duration; an event comes before the events
        inside it.
    """

    home: str
    name: str
    events: list[tuple[str, float, float]] = field(default_factory=list)


@contextlib.contextmanager
def recording(directory: Path) -> Iterator[None]:
    """Records the activity of JAX's devices inside the block; it is written at the end, below `directory`."""
    import jax

    how = jax.profiler.ProfileOptions()
    how.python_tracer_level = 0  # Python's own calls are most of a file, and slow the steps down
    jax.profiler.start_trace(str(directory), profiler_options=how)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def recorded(directory: Path) -> list[Track]:
    """The newest recording below a directory: its steps first, then every device's tracks."""
    import jax

    files = directory.glob("plugins/profile/*/*.xplane.pb")
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    planes = jax.profiler.ProfileData.from_file(str(newest)).planes
    steps, found = Track("host", "steps"), dict[tuple[str, str], Track]()
    for plane in planes:
        is_host = plane.name == HOST
        if not is_host and not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            for event in line.events:
                home, stats = plane.name.removeprefix("/device:"), dict(event.stats) if is_host else {}
                what = event.name, event.start_ns, event.duration_ns
                if is_host and event.name == STEP and "step_num" in stats:
                    steps.events.append((f"step {stats['step_num']}", *what[1:]))
                    continue
                if is_host and "hlo_op" not in stats:
                    continue  # what the host does is not the step
                if is_host:
                    home = f"CPU:{stats.get('device_ordinal', 0)}"
                found.setdefault((home, line.name), Track(home, line.name)).events.append(what)
    tracks = [steps, *(found[key] for key in sorted(found, key=_order))]
    for track in tracks:
        track.events.sort(key=lambda event: (event[1], -event[2]))
    return tracks


def _order(key: tuple[str, str]) -> tuple[Any, ...]:
    """Devices by their numbers."""
    home, name = key
    kind, _, number = home.rpartition(":")
    return kind, int(number) if number.isdigit() else 0, name
