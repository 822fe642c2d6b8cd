"""What a whole frontier costs: 30 sizes of Llama 3's family on four kinds of hardware, 64 devices, two axes.

    python benchmarks/size_frontier.py [--every] [--candidates 30] [--out RESULT.json]

Runs `layoutopt size` as its users do, and adds CPU seconds and memory of that process. Without `--every`,
what cannot be on the frontier is not searched.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HARDWARE = ("tpu-v5p", "tpu-v5e", "h100", "a100")
ASKED = "--budget 1e21 --devices 64 --set batch=512 --set length=2048 --json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--candidates", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "size_frontier.json")
    given = parser.parse_args()
    asked = f"size examples/transformer_lm.py:llama3_8b {ASKED} --candidates {given.candidates}"
    asked += "".join(f" --hardware {name}" for name in HARDWARE) + " --every" * given.every
    done = subprocess.run(
        [sys.executable, "-m", "layoutopt", *asked.split(), "--quiet"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    used, found = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads(done.stdout)
    rows = found["candidates"]
    row = {
        "date": date.today().isoformat(),
        "command": f"layoutopt {asked}",
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": used.ru_maxrss // 1024,
        "searched": len(rows),
        "beaten": len(found["beaten"]),
        "unfit": len(found["unfit"]),
        "by_hardware": Counter(each["hardware"] for each in rows),
        "status": Counter(each["status"] for each in rows),
        "frontier": sum(each["frontier"] for each in rows),
        "best": {
            name: found["best"][name] for name in ("parameters", "tokens", "loss", "hardware", "mfu", "days")
        },
        "flat": found["flat"],
    }
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    known["every" if given.every else "frontier"] = row
    given.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
