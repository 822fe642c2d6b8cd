"""Runs probes on a live mesh, of one process or several: one after the other, each until its steps find their
memory as the last one left it, as steps of a training do; within a budget of time, resumable."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from costmodels.calibration.clock import ClockNoise, TimingSample, noise, repeats_spread, steps_for, typical
from costmodels.calibration.probes import LAUNCH, Probe
from costmodels.calibration.team import Team
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import write_file
from mesh_tf_core.reading import read_json, reading

OnProbe = Callable[[str, int, int], None]
"""on_progress(what, done, total)."""
ProbeRecord = dict[str, Any]
"""A probe's name, target, axes, bytes, repeats, and `seconds` of a whole step with all devices at work."""

WARMING = 20
"""Samples that are thrown away at the beginning."""


def measure(
    team: Team,
    wanted: Sequence[Probe],
    rounds: int,
    seconds: float,
    budget: float,
    done: dict[str, ProbeRecord],
    on_progress: OnProbe | None = None,
    save: Callable[[], None] | None = None,
) -> None:
    """Adds the measurements of `wanted` to `done`, by name; the same ones in every process of the team.

    Args:
      rounds: samples of every probe.
      seconds: of one sample.
      budget: seconds after which the remaining measurements get three rounds, except overheads that others
        subtract or add.
      done: must be equal in all processes.
    """
    left = [p for p in wanted if p.name not in done]
    if left:
        _samples(team, left[0], WARMING, seconds)  # the first steps of a process are slower
    start = time.monotonic()
    for batch in (left[i : i + 12] for i in range(0, len(left), 12)):
        share = (time.monotonic() - start) / budget
        late = team.broadcast("the time", share > (len(done) + 1) / max(1, len(wanted)))
        try:
            for probe in batch:
                few = late and probe.target not in ("stores", LAUNCH)
                samples = _samples(team, probe, min(3, rounds) if few else rounds, seconds)
                done[probe.name] = {
                    "name": probe.name,
                    "target": probe.target,
                    "axes": "+".join(probe.axes),
                    "bytes": probe.bytes,
                    "repeats": probe.repeats,
                    "seconds": typical(samples),
                    "wall_seconds": median(s.wall / s.steps for s in samples),
                    "foreign": median(s.foreign_share for s in samples),
                    "spread": repeats_spread(samples),
                    "samples": len(samples),
                }
        finally:  # also what was measured before an interruption
            if save is not None:
                save()
        if on_progress is not None:
            on_progress(batch[-1].target, len(done), len(wanted))


def _samples(team: Team, probe: Probe, rounds: int, seconds: float) -> list[TimingSample]:
    engine = team.open(probe.program(team.mesh))

    def step() -> object:
        return engine.step({})

    try:
        engine.initialize()
        step()
        step()
        (steps,) = team.broadcast("the number of steps", [steps_for(step, seconds)])
        return [team.sample(step, steps) for _ in range(rounds)]
    finally:
        engine.close()


def noise_of(done: Sequence[ProbeRecord]) -> ClockNoise:
    """The machine's noise, from all measurements."""
    if not done:
        return noise([])
    return ClockNoise(median(m["foreign"] for m in done), median(m["spread"] for m in done))


class Partial:
    """Measurements so far in a file, so that a stopped calibration can resume.

    Args:
      key: the conditions of the measurements; a file with another key is refused.
    """

    def __init__(self, path: Path | None, key: dict[str, Any]) -> None:
        self.path, self.key = path, key
        self.done: dict[str, ProbeRecord] = {}
        if path is not None and path.is_file():
            self._load(path)

    def _load(self, path: Path) -> None:
        what, again = f"the partial results in {str(path)!r}", "delete the file to start again"
        with reading(what, again):
            content = read_json(path)
        try:
            key, done = dict(content["key"]), {m["name"]: m for m in content["measurements"]}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{what} are not those of a calibration; {again}") from None
        if key != self.key:
            raise UserError(
                f"the partial results in {str(path)!r} are of {_words(key)}, not of {_words(self.key)}; "
                "delete the file or give another file"
            )
        self.done = done

    def save(self) -> None:
        if self.path is None:
            return
        content = {"key": self.key, "measurements": list(self.done.values())}
        write_file(self.path, json.dumps(content), "partial results")

    def finish(self) -> None:
        """Removes the file: the profile holds everything now."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _words(key: dict[str, Any]) -> str:
    return ", ".join(" ".join(f"{k} {v}".split()) for k, v in key.items())
