"""Predictions against throughput that others published: the Mesh-TensorFlow paper's run and MaxText on one
slice.

    .venv/bin/python -m benchmarks.published

Every row is priced under the layout that its authors state, on the preset as it ships: nothing is fitted to
these rows.
MaxText counts 6 FLOPs per weight of a product and token, and 12 L S H d for attention without the causal
half; the same
count is divided by our predicted step here. "minimal" keeps some products for backward; it is priced as if
all of a
layer ran again ("full"), and as if nothing did ("none").
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import mesh_tf_core as mtf
from costmodels import load_hardware
from costmodels.memory import memory
from costmodels.pricing import price
from examples.transformer_lm import model

DATA = Path(__file__).parent / "data" / "maxtext_tpu.csv"


@dataclass(frozen=True)
class Row:
    """A published figure beside ours."""

    name: str
    recompute: str
    measured: float
    predicted: float
    gib: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def maxtext(row: dict[str, str]) -> list[Row]:
    chips, length = int(row["chips"]), int(row["seq"])
    ways = dict(part.split("=") for part in row["layout"].split(";")[0].removeprefix("ici ").split())
    fsdp, tensor = int(ways["fsdp"]), int(ways.get("tp", 1))
    assert fsdp * tensor == chips
    generation = row["slice"].split("-")[0]
    old = generation == "v4"
    sizes = {
        "layers": int(row["layers"]),
        "d_model": int(row["emb"]),
        "d_kv": int(row["head_dim"]),
        "heads": int(row["heads"]),
        "d_ff": int(row["mlp"]),
        "vocab": int(row["vocab"]),
        "length": length,
        "batch": int(float(row["per_chip_batch"]) * chips),
        "gated": not old,
        "tied": old,
        "positions": "none",
        "dtype": "bfloat16",
        "optimizer": "adam",
    }
    built = model(**sizes)  # type: ignore[arg-type]
    _ = built.step_graph
    mesh = mtf.Mesh([("fsdp", fsdp), ("tensor", tensor)] if tensor > 1 else [("fsdp", fsdp)])
    layout = "batch:fsdp" + (";heads:tensor;d_ff:tensor;vocab:tensor" if tensor > 1 else "")
    stages = {v.name: 3 for v in built.graph.variables.values() if v.trainable}
    hardware = load_hardware(f"tpu-{generation}")
    attention = 12 * sizes["layers"] * length * sizes["heads"] * sizes["d_kv"]
    table = 0 if old else sizes["vocab"] * sizes["d_model"]  # an untied look-up multiplies nothing
    norms = (2 * sizes["layers"] + 1) * sizes["d_model"]
    flops = (6 * (built.parameters - table - norms) + attention) * sizes["batch"] * length
    found = []
    for name in ("full",) if row["remat"].startswith("full") else ("full", "none"):
        again = frozenset({"layers"}) if name == "full" else frozenset()
        program = built.lower(mesh, mtf.Layout(layout), mtf.Options(stages, again))
        seconds = price(program, hardware).step_seconds
        what = f"{row['slice']} {row['model']} {row['layout'].split(';')[0]}"
        ours = flops / seconds / chips / 1e12
        found.append(Row(what, name, float(row["tflops_per_chip"]), ours, memory(program).peak / 2**30))
    return found


def paper() -> Row:
    """The 4.9-billion-parameter language model on 512 TPU v2 cores: steps per second (Shazeer et al.
    2018)."""
    built = model(
        layers=6,
        d_model=1024,
        d_kv=256,
        heads=256,
        d_ff=262144,
        vocab=32768,
        batch=256,
        length=256,
        dtype="bfloat16",
        optimizer="adafactor",
        dropout=0.1,
    )
    layout = mtf.Layout("batch:batch;vocab:model;d_ff:model;heads:model")
    program = built.lower(mtf.Mesh("batch:16;model:32"), layout)
    seconds = price(program, load_hardware("tpu-v2")).step_seconds
    return Row("Mesh-TF 4.9B, 512 v2 cores, step", "none", 0.3441, seconds, memory(program).peak / 2**30)


def main() -> None:
    found = [paper()]
    for row in rows_of(DATA):
        found += maxtext(row)
    print(f"{'run':44} {'recompute':9} {'published':>9} {'ours':>8} {'error':>7} {'peak GiB':>8}")
    for r in found:
        print(
            f"{r.name:44} {r.recompute:9} {r.measured:9.4g} {r.predicted:8.4g} {r.error:+7.1%} {r.gib:8.1f}"
        )
    full = [abs(r.error) for r in found[1:] if r.recompute == "full"]
    mean = sum(full) / len(full)
    print(f"mean absolute error of the {len(full)} MaxText rows, all recomputed: {mean:.1%}")


if __name__ == "__main__":
    main()
