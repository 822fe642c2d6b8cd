"""Every operation on the JAX engine under layouts of its dimensions, against the dense NumPy result.

    JAX_PLATFORMS=cpu python -m tests.conformance.jax_cases MESH LAYOUTS EVERY

Of every EVERY-th sample, LAYOUTS of the legal layouts that split anything, evenly spaced. Prints one JSON
object: sample -> what was wrong ("" if nothing was), and how many layouts were tried.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import mesh_tf_core as mtf
from mesh_tf_core.engines import open_engine, prepare
from tests.conformance.helper import Built, Sample, check_bytes, check_close, legal_layouts
from tests.conformance.samples import SAMPLES

TOLERANCE = 1e-4
"""Of float32; XLA's functions differ from NumPy's in the last bits."""


def tried(sample: Sample, mesh: mtf.Mesh, most: int) -> int:
    """How many layouts give the dense result; AssertionError at the first that does not."""
    built = Built(sample, "float32")
    want = built.dense()
    tables = [table for table in legal_layouts(built, mesh) if any(table.values())]
    first = zlib.crc32(sample.name.encode()) % max(1, len(tables) // most)
    chosen = tables[first :: max(1, len(tables) // most)][:most]
    for table in chosen:
        layout = mtf.Layout(table)
        program = built.program(mesh, layout)
        engine = open_engine(program, "jax")
        found = engine.step(built.batch)
        check_bytes(program, engine.communication_bytes)
        for name, value in found.items():
            check_close(name, value, want[name], TOLERANCE, f"{sample.name} on [{mesh}] under [{layout}]")
        engine.close()
    return len(chosen)


def main() -> None:
    text, most, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    mesh = mtf.Mesh(text)
    prepare(mesh.devices, "jax")
    said: dict[str, Any] = {}
    count = 0
    for sample in SAMPLES[::every]:
        try:
            count += tried(sample, mesh, most)
            said[sample.name] = ""
        except Exception as error:  # every sample reports
            said[sample.name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"said": said, "layouts": count}))


if __name__ == "__main__":
    main()
