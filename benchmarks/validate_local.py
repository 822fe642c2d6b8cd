"""Predicted against measured step times on this machine's mesh, of models that no calibration has seen.

    python benchmarks/validate_local.py [--profile PROFILE.json] [--mesh "data:2;model:4"] [--count 20]

Two Transformer sizes, a mixture of experts, a convolutional network and a perceptron. Every layout's time is
a median of interleaved samples; the whole table is repeated `--repeats` times. A profile is measured first,
unless one is given. Nothing is fitted to these models: the calibration runs little programs only, so every
model is one that was left out.
Targets: MAPE <= 10 %, Kendall tau >= 0.85, regret <= 3 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from costmodels.calibration import calibrate  # noqa: E402
from costmodels.calibration.runner import machine, versions  # noqa: E402
from costmodels.hardware import Hardware, read_hardware, write_profile  # noqa: E402
from layoutopt.analysis.validate import ValidationRuns, validate  # noqa: E402
from layoutopt.models.loading import load_model  # noqa: E402
from mesh_tf_core import Mesh  # noqa: E402
from mesh_tf_core.engines import prepare  # noqa: E402

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Transformer, d_model 128, 2 layers": (
        "examples/transformer_lm.py",
        {"layers": 2, "d_model": 128, "d_ff": 512, "d_kv": 16, "length": 64},
    ),
    "Transformer, d_model 256, 2 layers": (
        "examples/transformer_lm.py",
        {"layers": 2, "d_model": 256, "d_ff": 1024, "length": 64, "vocab": 1024},
    ),
    "mixture of 8 experts": (
        "examples/moe_lm.py",
        {
            "layers": 2,
            "d_model": 128,
            "d_ff": 512,
            "d_kv": 16,
            "heads": 8,
            "experts": 8,
            "length": 64,
            "batch": 16,
            "vocab": 512,
        },
    ),
    "residual network, 16 x 16 images": ("examples/resnet.py", {"size": 16}),
    "perceptron, 3 x 1024": ("examples/mlp.py", {"hidden": 1024, "batch": 512, "layers": 3}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", type=Path, help="a calibrated profile (default: measure one now)")
    parser.add_argument("--mesh", default="data:2;model:4")
    parser.add_argument("--count", type=int, default=20, help="layouts of every model")
    parser.add_argument("--steps", type=int, default=7, help="samples of every layout")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the models to run (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "validate_local.json")
    args = parser.parse_args()
    mesh = Mesh(args.mesh)
    prepare(mesh.devices)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    hardware = read_hardware(args.profile) if args.profile else calibrated(mesh, args.out)
    wanted = [list(MODELS)[i] for i in args.only] if args.only else list(MODELS)
    found: list[dict[str, Any]] = []
    for repeat, name in itertools.product(range(args.repeats), wanted):
        source, settings = MODELS[name]
        loaded = load_model(str(ROOT / source), settings)
        result = validate(
            loaded.model,
            mesh,
            hardware,
            runs=ValidationRuns(count=args.count, steps=args.steps, batch=next(loaded.data())),
            on_progress=lambda what, done, total: print(
                f"\r{done}/{total} {what:60.60}", end="", file=sys.stderr
            ),
        ).to_json()
        print(file=sys.stderr)
        found.append({"model": name, "repeat": repeat, **result})
        show(name, result)
        args.out.write_text(
            json.dumps(
                {
                    "date": date.today().isoformat(),
                    "machine": machine(),
                    "versions": versions(),
                    "results": found,
                },
                indent=1,
            )
            + "\n"
        )
    summary(found)
    print(f"wrote {args.out}")


def calibrated(mesh: Mesh, out: Path) -> Hardware:
    content = calibrate(
        mesh, lambda what, done, total: print(f"\rcalibrating {done}/{total}", end="", file=sys.stderr)
    )
    print(f"\n{content['calibration']['machine']['noise']}", file=sys.stderr)
    return write_profile(content, out.with_name("cpu-local.json"))


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}\n{'predicted ms':>13} {'measured ms':>12} {'ratio':>6} {'spread':>7}  layout")
    for row in sorted(result["rows"], key=lambda r: r["predicted_seconds"]):
        predicted, measured = row["predicted_seconds"], row["measured_seconds"]
        numbers = f"{predicted * 1e3:13.2f} {measured * 1e3:12.2f} {predicted / measured:6.2f}"
        print(f"{numbers} {row['spread']:7.1%}  {row['layout'] or '-'} ({row['name']})")
    print(line(result))
    print(result["noise"]["words"])


def line(result: dict[str, Any]) -> str:
    drift = result["noise"]["drift"]
    text = (
        f"MAPE {result['mape']:.1%}  Kendall tau {result['kendall_tau']:.3f}  "
        f"Spearman {result['spearman']:.3f}  regret {result['regret']:.1%}"
    )
    return (
        text
        if drift is None
        else f"{text}  machine's drift {drift:.2f}, MAPE without it {undrifted(result):.1%}"
    )


def undrifted(result: dict[str, Any]) -> float:
    """The mean error if every prediction is scaled as the calibration's own references have changed since."""
    drift = result["noise"]["drift"] or 1.0
    errors = [abs(r["predicted_seconds"] * drift / r["measured_seconds"] - 1) for r in result["rows"]]
    return sum(errors) / len(errors)


def summary(found: list[dict[str, Any]]) -> None:
    print("\ntargets: MAPE <= 10 %, Kendall tau >= 0.85, regret <= 3 %")
    for result in found:
        met = result["mape"] <= 0.10 and result["kendall_tau"] >= 0.85 and result["regret"] <= 0.03
        word = "met   " if met else "missed"
        print(f"{word} {result['model']:36} {len(result['rows'])} layouts: {line(result)}")


if __name__ == "__main__":
    main()
