"""Whether a search with a time limit ends in time, whatever it is asked: random models, meshes, hardware,
objectives and limits.

    python benchmarks/time_limits.py [--searches 100] [--seed 0] [--cpu] [--out FILE.json]

Every search is a process of its own, by the command line. A process has to end within its limit and two
seconds, loading Python and the model included, with an answer (exit 0) unless it is proven that there is none
(exit 3). Where nothing was found (exit 4) it is asked again in the end with `LONG` seconds, which are to
find nothing either. `--cpu` is for a machine that others use too: its clock then shows the CPU seconds of the
process, and these are what has to end in time.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LARGE = {"d_model": 2048, "d_kv": 128, "heads": 16, "d_ff": 8192, "vocab": 32768, "length": 1024}
TEXT = [{}, LARGE, {**LARGE, "layers": 48}, {"kv_heads": 2, "gated": True}]
MODELS: dict[str, list[dict[str, Any]]] = {
    "bert.py": [{}, LARGE],
    "mlp.py": [{}, {"layers": 4}, {"layers": 12, "hidden": 4096}],
    "moe_lm.py": [*TEXT[:3], {"experts": 64, "d_model": 1024}],
    "reformer_lm.py": [{}, {"layers": 12}],
    "resnet.py": [{}, {"size": 256, "channels": 64, "stages": 4}],
    "transformer_lm.py": TEXT,
    "transformer_seq2seq.py": TEXT,
    "unet3d.py": [{}, {"size": 128, "channels": 32, "levels": 3}],
}
HARDWARE = ("tpu-v2", "tpu-v4", "tpu-v5e", "tpu-v5p", "h100", "a100", "v100", "b200")
SPARE, LONG = 2.0, 60.0
"""Seconds after its limit in which a search has to end; the limit of a second look."""
BY_CPU = "import time; time.monotonic = time.process_time; from layoutopt.__main__ import main; main()"


@dataclass(frozen=True)
class Row:
    """One search; `seconds` are those of the clock, or CPU seconds where these are what counts.

    Attributes:
      missed: a second look found an answer; None: it was not taken.
    """

    command: str
    limit: float
    seconds: float
    cpu_seconds: float
    exit: int
    status: str
    gap: float | None
    missed: bool | None = None

    @property
    def over(self) -> float:
        """Seconds after the limit."""
        return self.seconds - self.limit

    @property
    def kept(self) -> bool:
        """Whether it ended in time, with an answer where there is one."""
        return self.exit in (0, 3, 4) and not self.missed and self.over <= SPARE


def asked(rng: random.Random) -> list[str]:
    """The words of one search, without its limit."""
    file = rng.choice(sorted(MODELS))
    settings: dict[str, Any] = dict(rng.choice(MODELS[file]))
    devices = rng.choice((2, 4, 6, 8, 12, 16, 60, 64, 96, 128, 256, 512))
    settings["batch"] = rng.choice((16, 64, devices, 2 * devices))
    if rng.random() < 0.4:
        settings["clip_norm"] = 1
    if rng.random() < 0.5:
        settings["dtype"] = "bfloat16"
    words = [f"examples/{file}", "--hardware", rng.choice(HARDWARE)]
    if rng.random() < 0.5:
        words += ["--devices", str(devices), "--max-axes", str(rng.choice((1, 2, 3)))]
    else:
        sizes = _parts(rng, devices)
        words += ["--mesh", ";".join(f"{name}:{n}" for name, n in zip("abc", sizes, strict=False))]
    if rng.random() < 0.4:
        words += ["--objective", rng.choice(("memory", "pareto"))]
    if rng.random() < 0.3:
        words += ["--top", str(rng.choice((2, 5, 20)))]
    if rng.random() < 0.2:
        words += ["--memory", rng.choice(("1GiB", "4GiB", "500GiB"))]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return words


def _parts(rng: random.Random, devices: int) -> list[int]:
    """Up to three sizes whose product is the number of devices."""
    sizes = [devices]
    while len(sizes) < 3 and rng.random() < 0.6:
        last = sizes.pop()
        divisors = [n for n in range(2, last) if last % n == 0]
        if not divisors:
            return [*sizes, last]
        one = rng.choice(divisors)
        sizes += [one, last // one]
    return sizes


def run(words: list[str], limit: float, by_cpu: bool) -> Row:
    """One search by the command line."""
    program = ["-c", BY_CPU] if by_cpu else ["-m", "layoutopt"]
    command = [sys.executable, *program, "search", *words, "--time-limit", f"{limit:g}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        start = time.monotonic()
        done = subprocess.run([*command, "--quiet", "--out", str(plan)], cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - start
        solver = json.loads(plan.read_text())["solver"] if plan.exists() else {}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Row(
        " ".join(words),
        limit,
        round(spent if by_cpu else seconds, 2),
        round(spent, 2),
        done.returncode,
        solver.get("status", "none"),
        solver.get("gap"),
    )


def _written(rows: list[Row], wanted: argparse.Namespace) -> None:
    """Writes the rows so far, if that was asked for."""
    if wanted.out:
        content = {
            "date": date.today().isoformat(),
            "machine": platform.platform(),
            "counted": "CPU" if wanted.cpu else "wall",
            "seed": wanted.seed,
            "rows": [asdict(row) for row in rows],
        }
        wanted.out.parent.mkdir(parents=True, exist_ok=True)
        wanted.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds")
    parser.add_argument("--out", type=Path, help="write the rows there as JSON; go on where it ends")
    wanted = parser.parse_args()
    rng, rows = random.Random(wanted.seed), list[Row]()
    if wanted.out and wanted.out.exists():
        rows = [Row(**row) for row in json.loads(wanted.out.read_text())["rows"]]
    print(f"{'':>4}{'limit':>6}{'over':>7}{'CPU s':>7}{'exit':>5}{'status':>10}{'gap':>8}  search")
    for number in range(wanted.searches):
        words, limit = asked(rng), round(rng.uniform(1, 20), 1)
        if number < len(rows):
            continue
        row = run(words, limit, wanted.cpu)
        rows.append(row)
        _written(rows, wanted)
        gap = "" if row.gap is None else f"{row.gap:.2g}"
        print(f"{number:>4}{limit:>6g}{row.over:>7.2f}{row.cpu_seconds:>7.1f}{row.exit:>5}", end="")
        print(f"{row.status:>10}{gap:>8}  {'' if row.kept else 'NOT KEPT: '}{row.command}", flush=True)
    for number, row in enumerate(rows):
        if row.exit == 4 and row.missed is None:
            rows[number] = replace(row, missed=run(row.command.split(), LONG, wanted.cpu).exit == 0)
            _written(rows, wanted)
    kept = sum(row.kept for row in rows)
    print(f"{kept} of {len(rows)} kept; at most {max(row.over for row in rows):.2f} s after the limit")
    sys.exit(0 if kept == len(rows) else 1)


if __name__ == "__main__":
    main()
