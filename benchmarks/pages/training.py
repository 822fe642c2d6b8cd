"""Training: killed processes, long jobs, this machine's predictions, a family of sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.long_job import EVERY
from benchmarks.pages.tables import caption, prose, share, stored, table

HEAD = """\
# Training: lost processes, long jobs, predictions for CPU devices

## Killed and frozen processes

A perceptron trains for {steps} steps on 2 processes with 2 devices each. A process gets a signal at a
random moment of the start, of a step or of a checkpoint. After {equal} of {failures} failures, the
final variables equal those of an undisturbed run bit for bit. Times are medians after the signal, with
the longest in parentheses.
"""
LONG = """\
## Long jobs

A small perceptron trains for {steps:,} steps on {processes} processes, with a checkpoint every {every}
steps. Between the second and the last tenth of the job, no process gains threads or file descriptors,
and none gains more than {mib:.1f} MiB of memory.
"""
LOCAL = """\
## Predictions for this machine's CPU devices

`layoutopt validate` ran on a calibrated machine of two cores. Kendall's tau is the rank correlation of
predicted and measured times. Regret is (measured time of the layout that is predicted fastest / best
measured time) − 1.
"""
FAMILY = """\
## A scaling law fitted to runs

Four sizes of `examples/transformer_lm.py` ({least:,} to {most:,} parameters) are each trained with two seeds
and evaluated after {few:,} to {many:,} bytes of Python code. For {N:,} parameters and {D:,} bytes,
the fitted law predicts {predicted:.3f} nats per byte (interval {low:.3f} to {high:.3f}); the measured
losses of two runs are {losses}.
"""

NARROW = """\
## Narrow types beside bfloat16

A mixture of experts of {parameters:,} parameters (`examples/moe_lm.py`) trains for {steps} steps with the
same batches. The table shows mean losses of {every} steps. From step {late} on, each curve stays within
{most:.1%} of bfloat16's.
"""


def page() -> Iterator[str]:
    """docs/results/training.md."""
    killed = stored("kill_workers")
    failures = [f for run in killed["runs"] for f in run["failures"]]
    equal = sum(f["equal"] for f in failures)
    yield prose(HEAD, steps=killed["steps"], equal=equal, failures=len(failures))
    yield caption("python benchmarks/kill_workers.py", "kill_workers")
    yield from table(
        ("signal", "failures", "other processes stopped", "all processes restarted"), _kills(failures)
    )
    yield prose(LONG, **_long(stored("long_job")["jobs"]))
    yield caption(stored("long_job")["command"], "long_job")
    narrow = stored("narrow_types")
    yield prose(NARROW, **_narrow(narrow))
    yield caption(narrow["command"], "narrow_types")
    every = [i for i in range(narrow["steps"] // narrow["every"]) if i % 2]
    heads = (f"steps {i * narrow['every']} to {(i + 1) * narrow['every']}" for i in every)
    rows = ((f"`{name}`", *(f"{c[i]:.3f}" for i in every)) for name, c in narrow["curves"].items())
    yield from table(("types", *heads), rows)
    yield prose(LOCAL)
    yield caption("python -m benchmarks.validate_local", "validate_local")
    yield from table(
        ("model", "layouts", "mean error", "Kendall's tau", "regret"),
        (
            (r["model"], len(r["rows"]), share(r["mape"]), f"{r['kendall_tau']:.2f}", share(r["regret"]))
            for r in stored("validate_local")["results"]
        ),
    )
    yield prose(FAMILY, **_family(stored("size_family")))
    yield caption("python benchmarks/size_family.py", "size_family")


def _long(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """What long jobs gained; the sentence about threads and descriptors holds for what is stored."""
    pairs = [
        (job["second_tenth"][name], job["last_tenth"][name]) for job in jobs for name in job["second_tenth"]
    ]
    assert all(last[k] <= first[k] for first, last in pairs for k in ("threads", "descriptors"))
    gained = max(last["resident_kib"] - first["resident_kib"] for first, last in pairs) / 1024
    (steps,) = {j["steps"] for j in jobs}
    named = {"steps": steps, "every": EVERY, "mib": gained}
    return {**named, "processes": " and ".join(str(j["processes"]) for j in jobs)}


def _family(found: dict[str, Any]) -> dict[str, Any]:
    held = found["held_out"]
    fitted = [r for r in found["rows"] if r["N"] != held["N"]]
    low, high = held["interval"]
    return {
        **{name: f(r["N"] for r in fitted) for name, f in (("least", min), ("most", max))},
        **{name: f(r["D"] for r in fitted) for name, f in (("few", min), ("many", max))},
        **{k: held[k] for k in ("N", "D", "predicted")},
        "low": low,
        "high": high,
        "losses": " and ".join(f"{x:.3f}" for x in held["losses"]),
    }


def _kills(failures: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    by = defaultdict(list)
    for f in failures:
        by[f["signal"]].append(f)
    for signal, own in by.items():
        times = [[f[k] for f in own if f[k] is not None] for k in ("ended", "again")]
        yield signal, len(own), *(f"{median(t):.1f} s ({max(t):.1f} s)" for t in times)


def _narrow(found: dict[str, Any]) -> dict[str, Any]:
    """Sizes, and the largest difference from the first curve behind the first third."""
    first, *others = found["curves"].values()
    begin = len(first) // 3
    apart = (abs(a / b - 1) for c in others for a, b in zip(c[begin:], first[begin:], strict=True))
    sizes = {name: found[name] for name in ("parameters", "steps", "every")}
    return {**sizes, "late": begin * found["every"], "most": max(apart)}
