"""Workers killed, frozen or asked to end at random moments of a training over several processes: does it end
in time, start again, and learn the same?

    python benchmarks/kill_workers.py [--kills 24] [--frozen 4] [--asked 4] [--processes 2] [--out FILE]

Every job suffers a few failures, one after the other: at its start, in a step, while a checkpoint is written
(these moments in turn; which worker and when exactly is random). A row tells how long the other workers lived
on, how long it took until all were started again, and from which checkpoint. In the end the job's final
checkpoint must be that of an undisturbed job, and its losses those of one process with the same mesh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cluster.job import Job, contents, wait_for  # noqa: E402

MOMENTS = ("start", "step", "checkpoint")
EACH = 3
"""Failures of one job."""
STEPS, EVERY = 240, 10
SIZES = ("--set", "layers=2", "--set", "hidden=512")
PATIENCE = 300.0


@dataclass
class Failure:
    """One that is to come, then how it went."""

    moment: str
    number: int
    at: int = -1
    worker: int = 0
    ended: float = 0.0
    again: float = 0.0
    resumed: int = -1

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def row(self) -> list[str]:
        where = "start" if self.moment == "start" else f"{self.moment}, after step {max(self.at, 0)}"
        resumed = f"step {self.resumed}" if self.resumed >= 0 else "the beginning"
        return [self.name, str(self.worker), where, f"{self.ended:.1f}", f"{self.again:.1f}", resumed]


def command(mesh: str, layout: str, checkpoint: Path) -> list[str]:
    words = ["train", "examples/mlp.py", "--mesh", mesh, "--layout", layout, *SIZES, "--json"]
    numbers = ["--steps", str(STEPS), "--every", str(EVERY), "--held-out", "2"]
    return [*words, *numbers, "--checkpoint", str(checkpoint)]


def suffer(job: Job, failure: Failure, rng: random.Random, start_seconds: float, processes: int) -> None:
    """Waits for the moment, sends the signal, watches what follows."""
    before = wait_for(lambda: len(w := job.workers()) == processes and w, PATIENCE, "the start")
    if failure.moment == "start":
        with contextlib.suppress(AssertionError):  # before it has saved: this start may be a faster one
            wait_for(lambda: job.newest() >= 0, rng.uniform(0.0, 0.7 * start_seconds), "a checkpoint")
        failure.worker = rng.randrange(processes)
    else:
        after = job.newest() + EVERY * rng.randint(1, 3)
        wait_for(lambda: job.newest() >= after, PATIENCE, f"step {after}")
        if failure.moment == "checkpoint":
            wait_for(job.writing, PATIENCE, "a checkpoint", look=0.0005)
        else:
            failure.worker = rng.randrange(processes)
            time.sleep(rng.uniform(0.0, 0.1))
    failure.at = job.newest()
    began = time.monotonic()
    job.signal(failure.worker, failure.number)
    others = [pid for index, pid in before.items() if index != failure.worker]
    wait_for(lambda: not any(map(job.alive, others)), PATIENCE, "the end of the others")
    failure.ended = time.monotonic() - began
    failure.resumed = job.newest()
    wait_for(lambda: len(w := job.workers()) == processes and w != before, PATIENCE, "the new start")
    failure.again = time.monotonic() - began


def run(
    failures: list[Failure], args: argparse.Namespace, rng: random.Random, start_seconds: float, folder: Path
) -> dict[str, Any]:
    """One job; its final digest, losses of its last start, and seconds until its first checkpoint."""
    options = ["-n", str(args.processes), "--restarts", str(EACH)]
    began = time.monotonic()
    with Job(options, command(args.mesh, args.layout, folder), folder) as job:
        for failure in failures:
            try:
                suffer(job, failure, rng, start_seconds, args.processes)
            except AssertionError as error:
                raise SystemExit(f"{error}\n{job.log()}") from error
        if not failures:
            wait_for(lambda: job.newest() >= 0, PATIENCE, "a checkpoint")
            start_seconds = time.monotonic() - began
        code, out = job.end(3 * PATIENCE)
        left = job.workers()
        if code or left:
            raise SystemExit(f"the job ended with exit code {code}, workers left: {left}\n{job.log()}")
    found = json.loads(out)
    return {"digest": contents(folder, STEPS), "start": start_seconds, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--frozen", type=int, default=4, help="of which so many are frozen instead (SIGSTOP)")
    parser.add_argument("--asked", type=int, default=4, help="of which so many are asked to end (SIGTERM)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mesh", default="data:2;model:2")
    parser.add_argument("--layout", default="batch:data;hidden:model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the rows as JSON, written after every job")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    numbers = [signal.SIGSTOP] * args.frozen + [signal.SIGTERM] * args.asked
    numbers += [signal.SIGKILL] * (args.kills - len(numbers))
    rng.shuffle(numbers)
    failures = [Failure(MOMENTS[i % len(MOMENTS)], number) for i, number in enumerate(numbers)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = [sys.executable, "-m", "layoutopt", *command(args.mesh, args.layout, folder / "alone")]
        one = json.loads(subprocess.run(alone, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        whole = run([], args, rng, 0.0, folder / "undisturbed")
        far = max(abs(a - b) for a, b in zip(one["loss"], whole["loss"], strict=True))
        print(
            f"mesh {args.mesh} in {args.processes} processes, {STEPS} steps: the largest difference of "
            f"a loss from one process's is {far:.1e}; held out {whole['held_out']} and {one['held_out']}"
        )
        done: list[dict[str, Any]] = []
        print("signal   worker  moment                     ended s  again s  went on from", flush=True)
        for first in range(0, len(failures), EACH):
            part = failures[first : first + EACH]
            found = run(part, args, rng, whole["start"], folder / f"job-{first}")
            for failure in part:
                cells = zip(failure.row(), (9, 8, 27, 9, 9, 0), strict=True)
                print("".join(cell.ljust(width) for cell, width in cells))
            same = found["digest"] == whole["digest"]
            print(
                f"         -> final loss {found['loss'][-1]!r}, undisturbed {whole['loss'][-1]!r}; variables "
                f"{'equal to the last bit' if same else 'DIFFER'}",
                flush=True,
            )
            done += [{**asdict(failure), "signal": failure.name, "equal": same} for failure in part]
            if args.out:
                command_line = "python benchmarks/kill_workers.py " + " ".join(sys.argv[1:])
                content = {"date": date.today().isoformat(), "command": command_line}
                content |= {"mesh": args.mesh, "steps": STEPS, "failures": done}
                args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            if not same:
                raise SystemExit(1)
    ended = max(f.ended for f in failures)
    print(f"{len(failures)} failures; the others had ended after {ended:.1f} s at most")


if __name__ == "__main__":
    main()
