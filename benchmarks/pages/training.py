"""Training: killed processes, long jobs, this machine's predictions, a family of sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.pages.tables import caption, share, stored, table

HEAD = """\
# Training: lost processes, long jobs, predictions for CPU devices

## Killed and frozen processes

A perceptron on 2 processes × 2 devices, 240 steps. Failures come at random moments of the start, of a step,
and while all processes write a checkpoint. Seconds are medians, worst in brackets.
"""
LONG = """\
## Long jobs

A small perceptron, 20,000 steps, saved every 500. The table compares the second tenth of the job with the
last one.
"""
LOCAL = """\
## Predictions for this machine's CPU devices

`layoutopt validate` on a calibrated machine of two cores. Regret is the measured time of the layout ranked
first over the best measured time, minus one.
"""
FAMILY = """\
## A scaling law fitted to runs

Four sizes of `examples/transformer_lm.py` (34,976 to 98,640 parameters), trained twice each on 262,144 to
1,572,864 bytes of Python. The fitted law predicts the loss of a larger size on more data.
"""


def page() -> Iterator[str]:
    """docs/results/training.md."""
    yield HEAD
    failures = [f for run in stored("kill_workers")["runs"] for f in run["failures"]]
    equal = sum(f["equal"] for f in failures)
    yield caption("python benchmarks/kill_workers.py", "kill_workers")
    yield f"{equal} of {len(failures)} failures ended with an undisturbed run's variables, to the last bit.\n"
    yield from table(
        ("signal", "failures", "others ended after", "all started again after"), _kills(failures)
    )
    yield LONG
    long = stored("long_job")
    yield caption(long["command"], "long_job")
    yield from table(
        ("processes", "threads", "file descriptors", "memory, MiB"),
        (
            (f"{name} of {job['processes']}", *(_grown(job, name, k) for k in GROWN))
            for job in long["jobs"]
            for name in job["second_tenth"]
        ),
    )
    yield LOCAL
    yield caption("python -m benchmarks.validate_local", "validate_local")
    yield from table(
        ("model", "layouts", "mean error", "Kendall's tau", "regret"),
        (
            (r["model"], len(r["rows"]), share(r["mape"]), f"{r['kendall_tau']:.2f}", share(r["regret"]))
            for r in stored("validate_local")["results"]
        ),
    )
    yield FAMILY
    family = stored("size_family")
    held = family["held_out"]
    low, high = held["interval"]
    yield caption("python benchmarks/size_family.py", "size_family")
    yield (
        f"{held['N']:,} parameters on {held['D']:,} bytes: predicted {held['predicted']:.3f} nats per byte "
        f"(interval {low:.3f} to {high:.3f}), measured {' and '.join(f'{x:.3f}' for x in held['losses'])}."
    )


GROWN = {"threads": 1.0, "descriptors": 1.0, "resident_kib": 1024.0}
"""What a job samples of each process, and what the table divides it by."""


def _grown(job: dict[str, Any], name: str, key: str) -> str:
    return " → ".join(f"{job[at][name][key] / GROWN[key]:.0f}" for at in ("second_tenth", "last_tenth"))


def _kills(failures: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    by = defaultdict(list)
    for f in failures:
        by[f["signal"]].append(f)
    for signal, own in by.items():
        times = [[f[k] for f in own if f[k] is not None] for k in ("ended", "again")]
        yield signal, len(own), *(f"{median(t):.1f} s ({max(t):.1f} s)" for t in times)
