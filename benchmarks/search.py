"""How fast the search proves its answer, on real sizes and with everything free.

    python benchmarks/search.py [--only "language model"] [--out benchmarks/results/search.json]
    python benchmarks/search.py --clip [--only MODEL] [--out benchmarks/results/clipping.json]

Every row is a process of its own: seconds are CPU seconds of that process and its children, from reading the
model to the written plan (loading Python included). Splits, storage, recomputation and microbatches are free
in all rows, the mesh's shape too where devices are given. The last two rows of a model are about memory, on
a small mesh: the least peak, and the fastest layout within 3 % more than that.
Targets: a given mesh of three axes in 10 s; 512 devices over every shape of up to three axes in 60 s; 96
layers take no longer than 6. With `--clip` every search of more models is done twice, without and with
`clip_norm=1`, the norm over all gradients: 10 s and 25 s, and 1.3 times the search without. Contest
instances: see `contest.py`; random problems against enumeration: tests.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LARGE = {
    "d_model": 4096,
    "d_kv": 128,
    "heads": 32,
    "d_ff": 16384,
    "vocab": 32768,
    "batch": 512,
    "length": 1024,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "language model": ("transformer_lm.py", {**LARGE, "dtype": "bfloat16"}),
    "encoder-decoder": ("transformer_seq2seq.py", {**LARGE, "dtype": "bfloat16"}),
    "mixture of experts": ("moe_lm.py", {**LARGE, "d_model": 2048, "experts": 64, "dtype": "bfloat16"}),
    "spatial CNN": ("resnet.py", {"batch": 512, "size": 256, "channels": 64, "dtype": "bfloat16"}),
    "3-D U-Net": ("unet3d.py", {"batch": 64, "size": 128, "channels": 32, "dtype": "bfloat16"}),
}
CLIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    "BERT": ("bert.py", {**LARGE, "dtype": "bfloat16"}),
    "Reformer": ("reformer_lm.py", {**LARGE, "dtype": "bfloat16"}),
    "perceptron": ("mlp.py", {"batch": 512, "hidden": 4096, "layers": 6, "dtype": "bfloat16"}),
    "DLRM": ("dlrm.py:criteo", {"batch": 65536}),
    "ViT": ("vit.py:b16", {"batch": 4096}),
    "CLIP": ("clip.py:b32", {"batch": 32768}),
    "Mamba-2": ("mamba_lm.py:mamba2_130m", {"batch": 512, "length": 2048}),
    "Llama 3 8B": ("transformer_lm.py:llama3_8b", {"batch": 512, "length": 4096}),
    "DeepSeek-V2-Lite": ("deepseek_lm.py:v2_lite", {"batch": 512, "length": 4096}),
    "diffusion": ("diffusion.py:cifar10", {"batch": 512}),
    "Transformer of JAX": (
        "jax_transformer.py",
        {"batch": 512, "d_model": 1024, "d_ff": 4096, "heads": 16, "length": 512, "vocab": 32768},
    ),
}
LAYERED = ("language model", "encoder-decoder", "mixture of experts", "BERT", "Reformer")
HARDWARE = "tpu-v4"
MESH = ("--mesh", "data:8;model:8;more:8")
DEVICES = ("--devices", "512", "--max-axes", "3")
SMALL_MESH = ("--mesh", "data:4;model:4")
TIGHT = 1.03


@dataclass(frozen=True)
class Row:
    """One search.

    Attributes:
      step_ms: predicted, of the answer; rival_ms: of the best named baseline that fits, faster than an answer
        that was asked to hold least.
    """

    model: str
    layers: int | None
    where: str
    status: str
    gap: float
    cpu_seconds: float
    step_ms: float
    baseline: str
    rival_ms: float | None
    layouts: str
    asked: str
    peak_bytes: int
    clip_norm: float = 0.0


def rows(only: str | None) -> Iterator[Row]:
    for name in MODELS:
        if only is None or only in name:
            for layers in (6, 96) if name in LAYERED else (None,):
                yield run(name, layers, MESH)
            yield run(name, 96 if name in LAYERED else None, DEVICES)
            layers = 24 if name in LAYERED else None
            least = run(name, layers, SMALL_MESH, ("--objective", "memory", "--memory", "1TiB"))
            yield least
            yield run(name, layers, SMALL_MESH, ("--memory", str(int(TIGHT * least.peak_bytes))))


def clipped_rows(only: str | None) -> Iterator[Row]:
    for name in CLIPPED:
        if only is None or only in name:
            layers = 6 if name in LAYERED else None
            for where in (MESH, DEVICES):
                for clip_norm in (0.0, 1.0):
                    yield run(name, layers, where, clip_norm=clip_norm)


def run(
    name: str,
    layers: int | None,
    where: tuple[str, ...],
    asked: tuple[str, ...] = (),
    clip_norm: float = 0.0,
) -> Row:
    """One search by the command line; raises CalledProcessError with its message on stderr."""
    file, hparams = CLIPPED[name]
    settings = {**hparams, **({"layers": layers} if layers else {})}
    settings |= {"clip_norm": clip_norm} if clip_norm else {}
    command = [sys.executable, "-m", "layoutopt", "search", str(ROOT / "examples" / file), *where, *asked]
    command += ["--hardware", HARDWARE, "--json", "--quiet"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as out:
        subprocess.run(command, check=True, stdout=out, cwd=ROOT)
        out.seek(0)
        plan = json.load(out)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    fits = [a for a in plan["alternatives"] if a["feasible"]]
    baseline = min(fits, key=lambda a: a["predicted"]["step_seconds"], default=None)
    return Row(
        name,
        layers,
        " ".join(where[1::2]),
        plan["solver"]["status"],
        plan["solver"]["gap"],
        round(spent, 1),
        1e3 * plan["predicted"]["step_seconds"],
        baseline["name"] if baseline else "none fits",
        1e3 * baseline["predicted"]["step_seconds"] if baseline else None,
        plan["solver"]["layouts_considered"],
        " ".join(asked),
        plan["predicted"]["peak_memory_bytes"],
        clip_norm,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="models whose name has this in it")
    parser.add_argument("--clip", action="store_true", help="without and with clip_norm=1")
    parser.add_argument("--out", type=Path, help="write the rows there as JSON")
    asked = parser.parse_args()
    found = []
    print(
        f"{'model':20}{'layers':>7}  {'mesh or devices, and limit':38}{'status':>9}{'gap':>7}{'CPU s':>8}",
        end="",
    )
    print(f"{'step ms':>10}  best baseline")
    for row in (clipped_rows if asked.clip else rows)(asked.only):
        found.append(row)
        where = f"{row.where} {row.asked}{'clip_norm=1' if row.clip_norm else ''}"
        print(f"{row.model:20}{row.layers or '':>7}  {where:38}{row.status:>9}{row.gap:>7.1g}", end="")
        ratio = f" ({row.rival_ms / row.step_ms:.2f}x)" if row.rival_ms else ""
        print(f"{row.cpu_seconds:>8.1f}{row.step_ms:>10.4g}  {row.baseline}{ratio}", flush=True)
    if asked.out:
        machine = {
            "date": date.today().isoformat(),
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        content = {**machine, "ortools": version("ortools"), "rows": [asdict(row) for row in found]}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
