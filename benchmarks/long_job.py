"""A long training in several processes: do threads, memory or file descriptors grow?

    python benchmarks/long_job.py [--processes 2] [--steps 20000] [--out benchmarks/results/long_job.json]

Every few seconds the operating system is asked about each worker and the coordinator's process. The job saves
every 500 steps, so what writes checkpoints is watched too. Printed and kept: the medians of the second and
of the last tenth of the samples (the first tenth compiles and fills caches), and all samples. Where the job
was started again, as after the machine stood still in a collective, they are of its longest life.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cluster.job import Job  # noqa: E402

COUNTS = ("threads", "descriptors", "resident_kib")
EVERY = 500
"""Steps between two checkpoints."""


def numbers(pid: int) -> dict[str, int]:
    """What a process has now."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resident = int(status["VmRSS"].split()[0])
    return dict(zip(COUNTS, (int(status["Threads"]), descriptors, resident), strict=True))


def children(pid: int) -> list[int]:
    """Processes that a process started, and that run."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def watched(job: Job) -> dict[str, int]:
    """Name -> process id."""
    workers = job.workers()
    found = {f"worker {index}": pid for index, pid in workers.items()}
    if 0 in workers:
        found |= dict(zip(("coordinator",), children(workers[0]), strict=False))
    return found


def medians(samples: list[dict[str, Any]], tenth: int) -> dict[str, dict[str, float]]:
    """By process and count, of one tenth of the samples."""
    part = samples[len(samples) * tenth // 10 : len(samples) * (tenth + 1) // 10]
    names = sorted(set.intersection(*(set(sample["processes"]) for sample in part)))
    return {
        name: {count: statistics.median(s["processes"][name][count] for s in part) for count in COUNTS}
        for name in names
    }


def run(processes: int, steps: int, seconds: float) -> dict[str, Any]:
    """One job, and its samples."""
    mesh, layout = f"data:{processes}", "batch:data"
    with tempfile.TemporaryDirectory() as name:
        saved = Path(name) / "saved"
        words = [
            "train",
            "examples/mlp.py",
            "--mesh",
            mesh,
            "--layout",
            layout,
            "--quiet",
        ]  # nobody reads the pipe meanwhile
        words += ["--set", "hidden=64", "--set", "batch=32", "--steps", str(steps), "--every", str(EVERY)]
        words += ["--checkpoint", str(saved), "--held-out", "4"]
        samples: list[dict[str, Any]] = []
        lives: dict[int, int] = {}
        began = time.monotonic()
        with Job(["-n", str(processes)], words, saved) as job:
            while job.process.poll() is None:
                time.sleep(seconds)
                with contextlib.suppress(OSError, KeyError):  # one that ends meanwhile
                    pids = watched(job)
                    found = {name: numbers(pid) for name, pid in pids.items()}
                    if len(found) > processes:
                        lives.setdefault(pids["worker 0"], len(lives))
                        at = {"seconds": round(time.monotonic() - began, 1), "saved": job.newest()}
                        at["life"] = lives[pids["worker 0"]]
                        samples.append({**at, "processes": found})
            code, _ = job.end(60)
            done = job.newest()
            if code:
                raise SystemExit(f"exit code {code}\n{job.log()}")
    assert done == steps
    longest = max(lives.values(), key=lambda life: sum(sample["life"] == life for sample in samples))
    own = [sample for sample in samples if sample["life"] == longest]
    return {
        "processes": processes,
        "mesh": mesh,
        "steps": steps,
        "wall_seconds": round(time.monotonic() - began, 1),
        "lives": len(lives),
        "steps_of_the_longest": own[-1]["saved"] - own[0]["saved"],
        "second_tenth": medians(own, 1),
        "last_tenth": medians(own, 9),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="between two samples")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "long_job.json")
    args = parser.parse_args()
    found = []
    for processes in args.processes:
        row = run(processes, args.steps, args.seconds)
        found.append(row)
        print(
            f"{processes} processes, {row['steps']} steps, {row['wall_seconds']:.0f}s, {row['lives']} lives, "
            f"the longest, {row['steps_of_the_longest']} steps:"
        )
        for name, last in row["last_tenth"].items():
            first = row["second_tenth"][name]
            cells = ", ".join(f"{count} {first[count]:.0f} -> {last[count]:.0f}" for count in COUNTS)
            print(f"  {name}: {cells}", flush=True)
        command = "python benchmarks/long_job.py " + " ".join(sys.argv[1:])
        result = {"date": date.today().isoformat(), "command": command.strip(), "jobs": found}
        content = json.dumps(result, separators=(",", ":"))
        args.out.write_text(content.replace('{"seconds"', '\n{"seconds"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
