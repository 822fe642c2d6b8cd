"""Predicted against measured step times of a mesh over two processes, of models that no calibration has seen.

    python benchmarks/validate_cluster.py [--profile PROFILE.json] [--out build/validate_cluster.json]

Two processes of two devices each, on this machine. Their profile is measured first, unless one is given. The
layouts differ in what crosses from process to process: the same split over either axis, and over both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from costmodels.calibration import assemble  # noqa: E402
from costmodels.calibration.machine import machine, versions  # noqa: E402
from costmodels.hardware import read_hardware  # noqa: E402
from costmodels.pricing.pricer import pricer  # noqa: E402
from layoutopt.analysis.validate import RunCandidate, result, run, seconds_of  # noqa: E402
from layoutopt.models.loading import load_model  # noqa: E402
from mesh_tf_core import Cluster, Layout, Mesh  # noqa: E402
from mesh_tf_core.engines.jax.rendezvous import ADDRESS, PROCESS  # noqa: E402
from mesh_tf_core.engines.jax.rendezvous import PROCESSES as COUNT  # noqa: E402
from tests.jax_process import free_port  # noqa: E402

MESH, PROCESSES, SAMPLES = Mesh("data:2;model:2"), 2, 8
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Transformer, d_model 128, 2 layers": (
        "examples/transformer_lm.py",
        {"layers": 2, "d_model": 128, "d_ff": 512, "d_kv": 16, "length": 64},
        (
            "",
            "batch:data",
            "batch:model",
            "batch:data+model;positions:data+model",
            "batch:data;d_ff:model;heads:model;vocab:model",
            "batch:model;d_ff:data;heads:data;vocab:data",
            "d_ff:model;heads:model",
            "batch:data;vocab:model",
        ),
    ),
    "perceptron, 3 x 1024": (
        "examples/mlp.py",
        {"hidden": 1024, "batch": 512, "layers": 3},
        (
            "batch:data",
            "batch:model",
            "batch:data+model",
            "batch:data;hidden:model",
            "batch:model;hidden:data",
            "hidden:model",
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", type=Path, help="of such processes (default: measure one now)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "validate_cluster.json")
    args = parser.parse_args()
    if ADDRESS in os.environ:
        work(args.profile, args.out)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    profile = args.profile or calibrated(args.out.with_name("two-processes.json"))
    place = {ADDRESS: f"127.0.0.1:{free_port()}", COUNT: str(PROCESSES)}
    words = [sys.executable, __file__, "--profile", str(profile), "--out", str(args.out)]
    workers = [
        subprocess.Popen(words, env={**os.environ, **place, PROCESS: str(i)}) for i in range(PROCESSES)
    ]
    sys.exit(max(worker.wait() for worker in workers))


def calibrated(profile: Path) -> Path:
    words = ["launch", "-n", str(PROCESSES), "--", "calibrate", "--mesh", str(MESH), "--out", str(profile)]
    subprocess.run([sys.executable, "-m", "layoutopt", *words], check=True, cwd=ROOT)
    return profile


def work(profile: Path, out: Path) -> None:
    """One of the processes."""
    prices, found = pricer(read_hardware(profile), MESH), []
    with Cluster(start_timeout=60) as cluster:
        for name, (source, settings, texts) in MODELS.items():
            loaded = load_model(str(ROOT / source), settings)
            layouts = [Layout(text) for text in texts]
            chosen = [RunCandidate("given", x, seconds_of(loaded.model, MESH, x, prices)) for x in layouts]
            batch = next(iter(loaded.data()))
            samples = run(loaded.model, assemble(MESH, cluster), chosen, SAMPLES, batch)
            found.append({"model": name, **result(chosen, samples)})
            if cluster.is_writer:
                show(found[-1])
    if cluster.is_writer:
        content = {"machine": machine(), "versions": versions("jax"), "results": found}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {out}")


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['model']}\n{'predicted ms':>13} {'measured ms':>12} {'ratio':>6} {'spread':>7}  layout")
    for row in sorted(found["rows"], key=lambda r: r["measured_seconds"]):
        predicted, measured = row["predicted_seconds"], row["measured_seconds"]
        numbers = f"{predicted * 1e3:13.1f} {measured * 1e3:12.1f} {predicted / measured:6.2f}"
        print(f"{numbers} {row['spread']:7.1%}  {row['layout'] or '-'}")
    words = f"MAPE {found['mape']:.1%}  Kendall tau {found['kendall_tau']:.3f}  regret {found['regret']:.1%}"
    print(f"{words}\n{found['noise']['words']}", flush=True)


if __name__ == "__main__":
    main()
