"""Whole commands killed at random moments: what was saved stays, and the next one goes on from it.

    python benchmarks/kill_commands.py [--train 20] [--launch 0] [--search 15] [--calibrate 15]
        [--signal KILL] [--seed 0] [--engine auto]

`train` goes on from its newest checkpoint after every kill; in the end its variables must be those of an
undisturbed run. Every second kill comes while a checkpoint is written. `launch` is the same in two processes:
with the launcher all that it started end. `search` writes a plan over an older one: after a kill the file is
one of the two, whole. `calibrate` goes on from its measurements, of which none may be missing. With
`--signal TERM`, `HUP` or `INT` the command is asked instead, and must end by itself within 30 s with the exit
code of that signal and without a traceback. A writer alone is killed by `tests/core/test_checkpoint.py` (450
times by `make test-nightly`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(ROOT))

from layoutopt.__main__ import main  # noqa: E402
from layoutopt.plan.build import load_plan  # noqa: E402
from mesh_tf_core.training import checkpoint  # noqa: E402
from tests.cluster.job import contents  # noqa: E402

STEPS, EVERY = 150, 5
ON = ["--mesh", "data:2;model:2", "--layout", "batch:data;hidden:model"]
SIZES = ["--set", "hidden=16", "--set", "layers=1", "--set", "batch=8"]
TRAIN = [
    "train",
    "examples/mlp.py",
    *ON,
    *SIZES,
    "--steps",
    str(STEPS),
    "--every",
    str(EVERY),
    "--held-out",
    "0",
]
LAUNCH = ("launch", "-n", "2", "--")
SEARCH = ["search", "examples/transformer_lm.py", "--mesh", "data:2;model:4", "--hardware", "tpu-v3"]
CALIBRATE = ["calibrate", "--mesh", "data:2"]
PATIENCE = 30.0
"""Seconds that schedulers give."""
LOADED = multiprocessing.get_context("forkserver")
"""Processes that begin with the libraries loaded, which takes most of a command's time."""
LOADED.set_forkserver_preload(
    ["tensorflow", "layoutopt.cli", "layoutopt.optimize.entry", "mesh_tf_core.training"]
)


@dataclass
class Ended:
    """How one attempt ended; `asked`: seconds after which the signal was sent, None if it was done before."""

    code: int
    seconds: float
    said: str
    asked: float | None


def command(words: list[str], said: str) -> None:
    """The command line, in a process that has its libraries."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv = ["layoutopt", *words]
    main()


def writing(place: Path) -> bool:
    """Whether a checkpoint is being written."""
    return place.is_dir() and any(name.startswith(".step-") for name in os.listdir(place))


def attempt(words: list[str], number: int, moment: float | None, saves: Path | None = None) -> Ended:
    """Runs a command, and sends it a signal at a moment (None: never); from then on when a checkpoint is
    written, if a directory is given into which it saves."""
    with tempfile.NamedTemporaryFile("r") as said:
        began, asked = time.monotonic(), None
        process = LOADED.Process(target=command, args=(words, said.name))
        process.start()
        process.join(moment)
        while saves is not None and process.is_alive() and not writing(saves):
            time.sleep(0.0005)
        if process.is_alive():
            asked = time.monotonic() - began
            assert process.pid is not None
            os.kill(process.pid, number)
            process.join(PATIENCE)
        if process.exitcode is None:
            raise SystemExit(f"{words[0]} did not end within {PATIENCE:.0f} s:\n{said.read()}")
        return Ended(process.exitcode, time.monotonic() - began, said.read(), asked)


@dataclass
class Hunt:
    """Kills of one kind of command, and what was wrong after them."""

    number: int
    rng: random.Random
    folder: Path
    engine: str
    slowest: float = 0.0

    def kill(self, words: list[str], most: float, saves: Path | None = None) -> Ended:
        """One attempt, ended within `most` seconds or in the next save; checks how it ended."""
        ended = attempt(words, self.number, self.rng.uniform(0.0, most), saves)
        if "Traceback" in ended.said:
            raise SystemExit(f"a traceback of {words[0]}:\n{ended.said}")
        if ended.asked is None:
            if ended.code:
                raise SystemExit(f"{words[0]} ended with exit code {ended.code}:\n{ended.said}")
        else:
            own = -self.number if self.number == signal.SIGKILL else 128 + self.number
            # Before the command line hears signals, a process is ended by the system.
            if ended.code not in (own, 0, -self.number):
                raise SystemExit(f"{words[0]} ended with exit code {ended.code}:\n{ended.said}")
            self.slowest = max(self.slowest, ended.seconds - ended.asked)
        return ended

    def launch(self, kills: int) -> str:
        """The same in two processes."""
        return self.train(kills, LAUNCH, "jax")

    def train(self, kills: int, first: Sequence[str] = (), engine: str = "") -> str:
        """Kills until there were enough, then to the end."""
        command = [*first, *TRAIN, "--engine", engine or self.engine]
        place, whole = self.folder / "run", self.folder / "whole"
        undisturbed = attempt([*command, "--checkpoint", str(whole)], self.number, None)
        wanted, before, killed, rounds, during = contents(whole, STEPS), -1, 0, 0, 0
        while killed < kills or before < STEPS:
            words = [*command, "--checkpoint", str(place)]
            if killed >= kills:
                ended = attempt(words, self.number, None)
            else:
                saves = place if killed % 2 else None
                ended = self.kill(words, 1.1 * undisturbed.seconds / (1 + killed % 2), saves)
            killed += ended.asked is not None
            during += ended.asked is not None and writing(place)
            if before > 0 and "resuming" in ended.said and f"resuming from step {before} " not in ended.said:
                raise SystemExit(f"step {before} was saved:\n{ended.said}")
            found = checkpoint.newest(place) if place.exists() else None
            step = -1 if found is None else found.step
            if step < before or (found is not None and found.skipped):
                raise SystemExit(f"step {before} was saved, now {step}: {found}")
            if "saved in" in ended.said and f"after step {step} " not in ended.said:
                raise SystemExit(f"what was said is not what is there, step {step}:\n{ended.said}")
            before = step
            print(f"{killed} of {kills} kills, saved up to step {step}", file=sys.stderr, flush=True)
            if step == STEPS:
                rounds += 1
                if contents(place, STEPS) != wanted:
                    raise SystemExit("the variables differ from those of an undisturbed run")
                if killed < kills:
                    place, before = self.folder / f"run-{rounds}", -1
        return (
            f"{first[0] if first else 'train'}: {killed} kills, of which {during} left an unfinished "
            f"checkpoint; {rounds} runs to the end, all with variables equal to an undisturbed run's"
        )

    def search(self, kills: int) -> str:
        """Writes plans over an older one."""
        out, killed, kept, new = self.folder / "plan.json", 0, 0, 0
        first = attempt([*SEARCH, "--out", str(out)], self.number, None)
        while killed < kills:
            old = json.dumps({**json.loads(out.read_text(encoding="utf-8")), "number": killed})
            out.write_text(old, encoding="utf-8")
            ended = self.kill([*SEARCH, "--out", str(out)], 1.1 * first.seconds)
            killed += ended.asked is not None
            same = out.read_text(encoding="utf-8") == old
            load_plan(out)
            kept, new = kept + same, new + (not same)
            if same and f"wrote the plan to {out}" in ended.said:
                raise SystemExit(f"it said that the plan was written:\n{ended.said}")
        return f"search: {killed} kills, afterwards the old plan {kept} times, the new one {new} times"

    def calibrate(self, kills: int, seconds: float = 20.0) -> str:
        """Goes on from what was measured."""
        out = self.folder / "mine.json"
        partial, before, killed = self.folder / "mine.partial.json", 0, 0
        while killed < kills:
            ended = self.kill([*CALIBRATE, "--out", str(out)], seconds)
            killed += ended.asked is not None
            if out.exists():
                raise SystemExit(f"it ended after {ended.seconds:.0f} s: kill sooner")
            found = json.loads(partial.read_text(encoding="utf-8")) if partial.exists() else None
            measured = 0 if found is None else len(found["measurements"])
            if measured < before:
                raise SystemExit(f"{before} measurements were kept, now {measured}")
            before = measured
        last = attempt([*CALIBRATE, "--out", str(out)], self.number, None)
        if last.code or (before and "going on from" not in last.said):
            raise SystemExit(f"it did not go on:\n{last.said}")
        return f"calibrate: {killed} kills, {before} measurements kept, then to its end"


def hunts() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for kind, kills in (("train", 20), ("launch", 0), ("search", 15), ("calibrate", 15)):
        parser.add_argument(f"--{kind}", type=int, default=kills, help="kills")
    parser.add_argument("--signal", default="KILL")
    parser.add_argument("--engine", default="auto", help="of `train` in one process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    number = signal.Signals[f"SIG{args.signal}"]
    attempt(["--version"], number, None)  # the libraries are loaded
    for kind in ("train", "launch", "search", "calibrate"):
        kills = getattr(args, kind)
        if kills:
            with tempfile.TemporaryDirectory() as name:
                hunt = Hunt(number, random.Random(f"{kind} {args.seed}"), Path(name), args.engine)
                print(getattr(hunt, kind)(kills), flush=True)
                if number != signal.SIGKILL:
                    print(f"  asked by {number.name}, the slowest end took {hunt.slowest:.1f} s", flush=True)


if __name__ == "__main__":
    hunts()
