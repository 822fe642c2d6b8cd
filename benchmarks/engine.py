"""Step times of our engines against peers, interleaved in one run.

    python benchmarks/engine.py [--rounds 5] [--steps 3] [--only ours plain_tf] [--meshes one data model 2x4]
    python benchmarks/engine.py --rounds 10 --only ours_jax jax_gspmd --meshes data model 2x4

Every (peer, mesh) is a process of its own that waits until it is asked for some steps, so that all see the
same machine at the same time. Prints a table, our ratios to every peer with their geometric means, and one
JSON line: median wall and CPU milliseconds per step, seconds to the first step, losses of the first steps.
Fails if losses differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.engine_peers.sizes import MESHES, Sizes  # noqa: E402

PEERS = ("ours", "ours_jax", "plain_tf", "dtensor", "jax_gspmd", "mesh_tensorflow")
WARM = 3
APART = 1e-3
"""By how much losses may differ."""


def worker(peer: str, mesh: str) -> None:
    """Answers every line with a number of steps by a line of JSON."""
    module = importlib.import_module(f"benchmarks.engine_peers.{peer}")
    if hasattr(module, "install"):
        module.install()
    start = time.perf_counter()
    step = module.make(Sizes(), MESHES[mesh])
    losses = [step()]
    first = time.perf_counter() - start
    losses += [step() for _ in range(WARM - 1)]
    print(json.dumps({"first": first, "losses": losses}), flush=True)
    for line in sys.stdin:
        walls, cpu = [], time.process_time()
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            walls.append(1e3 * (time.perf_counter() - start))
        print(json.dumps({"wall": walls, "cpu": 1e3 * (time.process_time() - cpu) / int(line)}), flush=True)


class Contender:
    """One running worker and what it measured."""

    def __init__(self, peer: str, mesh: str) -> None:
        self.peer, self.mesh = peer, mesh
        command = [sys.executable, __file__, "--worker", peer, mesh]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.start = self._answer()
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.peer} on {self.mesh} ended; run with --worker {self.peer} {self.mesh} to see why"
            )
        return json.loads(line)

    def run(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        found = self._answer()
        self.wall += found["wall"]
        self.cpu.append(found["cpu"])

    def row(self) -> dict:
        return {
            "peer": self.peer,
            "mesh": self.mesh,
            "wall_ms": statistics.median(self.wall),
            "wall_min_ms": min(self.wall),
            "cpu_ms": statistics.median(self.cpu),
            "first_step_s": self.start["first"],
            "losses": self.start["losses"],
        }

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--worker", nargs=2, metavar=("PEER", "MESH"))
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    pairs = [(p, m) for m in args.meshes for p in args.only if not (p == "plain_tf" and m != "one")]
    contenders = [Contender(p, m) for p, m in pairs]
    for _ in range(args.rounds):
        for c in contenders:
            c.run(args.steps)
    rows = [c.row() for c in contenders]
    for c in contenders:
        c.close()
    print(f"{'peer':15} {'mesh':6} {'wall ms':>8} {'min':>8} {'cpu ms':>8} {'start s':>8}  first losses")
    for r in rows:
        losses = " ".join(f"{x:.5f}" for x in r["losses"])
        print(
            f"{r['peer']:15} {r['mesh']:6} {r['wall_ms']:8.1f} {r['wall_min_ms']:8.1f} {r['cpu_ms']:8.1f} "
            f"{r['first_step_s']:8.2f}  {losses}"
        )
    show_ratios(rows)
    print(json.dumps(rows))
    apart = [r for r in rows if abs(r["losses"][-1] - rows[0]["losses"][-1]) > APART]
    if apart:
        raise SystemExit(f"other losses than {rows[0]['peer']}: " + ", ".join(map(_name, apart)))


def show_ratios(rows: list[dict]) -> None:
    """What ours take of a peer's time on the same mesh, with the geometric mean over the meshes, and of their
    own on one device."""
    times = {(r["peer"], r["mesh"]): r for r in rows}
    meshes = list(dict.fromkeys(r["mesh"] for r in rows))
    for own in (p for p in dict.fromkeys(r["peer"] for r in rows) if p.startswith("ours")):
        for peer in (p for p in dict.fromkeys(r["peer"] for r in rows) if p != own):
            shared = [m for m in meshes if (own, m) in times and (peer, m) in times]
            found = [_ratio(times[own, m], times[peer, m]) for m in shared]
            if len(found) > 1:
                wall, cpu = (statistics.geometric_mean(ratio[i] for ratio in found) for i in (0, 1))
                print(f"{own} / {peer}, geometric mean: wall {wall:.3f}, CPU {cpu:.3f}")
        for mesh in meshes:
            if mesh != "one" and (own, "one") in times and (own, mesh) in times:
                _ratio(times[own, mesh], times[own, "one"])


def _ratio(a: dict, b: dict) -> tuple[float, float]:
    wall, cpu = a["wall_ms"] / b["wall_ms"], a["cpu_ms"] / b["cpu_ms"]
    print(f"{_name(a)} / {_name(b)}: wall {wall:.3f}, CPU {cpu:.3f}")
    return wall, cpu


def _name(row: dict) -> str:
    return f"{row['peer']} {row['mesh']}"


if __name__ == "__main__":
    main()
