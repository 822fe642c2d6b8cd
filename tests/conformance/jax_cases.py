"""Every operation on the JAX engine under layouts of its dimensions, against the dense NumPy result.

    JAX_PLATFORMS=cpu python -m tests.conformance.jax_cases MESH KINDS EVERY [FIRST]

Of every EVERY-th sample, from the FIRST, under KINDS kinds of legal layouts that split anything, evenly
spaced (0: under all). Layouts are of one kind if they split the same dimensions over as many axes; which of
a kind is run follows from the sample's name, so that axes and their orders take turns. Says on stderr how far
it is; prints one JSON object: sample -> what was wrong ("" if nothing was), and how many layouts were tried.
Where the environment names a job's processes, it runs over all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Mapping
from typing import Any

import mesh_tf_core as mtf
from mesh_tf_core.engines import open_engine, prepare
from mesh_tf_core.engines.jax.rendezvous import ADDRESS
from tests.conformance.helper import Built, Sample, Table, check_bytes, check_close, legal_layouts
from tests.conformance.samples import SAMPLES

TOLERANCE = 1e-4
"""Of float32; XLA's functions differ from NumPy's in the last bits."""


def kinds(built: Built, mesh: mtf.Mesh) -> list[Table]:
    """One legal layout of each kind that splits anything."""
    found: dict[tuple[int, ...], list[Table]] = {}
    for table in legal_layouts(built, mesh):
        if any(table.values()):
            found.setdefault(tuple(map(len, table.values())), []).append(table)
    first = zlib.crc32(built.sample.name.encode())
    return [tables[(first + n) % len(tables)] for n, tables in enumerate(found.values())]


def tried(sample: Sample, mesh: mtf.Mesh, most: int, cluster: mtf.Cluster | None) -> int:
    """How many layouts give the dense result; AssertionError at the first that does not."""
    built = Built(sample, "float32")
    want = built.dense()
    tables = kinds(built, mesh)
    apart = max(1, len(tables) // most) if most else 1
    chosen = tables[zlib.crc32(sample.name.encode()) % apart :: apart][: most or None]
    for table in chosen:
        compare(built, mesh, mtf.Layout(table), want, cluster)
    return len(chosen)


def compare(
    built: Built, mesh: mtf.Mesh, layout: mtf.Layout, want: Mapping[str, Any], cluster: mtf.Cluster | None
) -> None:
    """AssertionError unless a sample gives the wanted results under a layout, and sends what is predicted."""
    program = built.program(mesh, layout)
    engine = open_engine(program, "jax", cluster)
    found = engine.step(built.batch)
    check_bytes(program, engine.communication_bytes)
    for name, value in found.items():
        check_close(name, value, want[name], TOLERANCE, f"{built.sample.name} on [{mesh}] under [{layout}]")
    engine.close()


def run(mesh: mtf.Mesh, most: int, samples: list[Sample], cluster: mtf.Cluster | None) -> dict[str, Any]:
    said: dict[str, str] = {}
    count, start = 0, time.process_time()
    for place, sample in enumerate(samples, 1):
        try:
            done = tried(sample, mesh, most, cluster)
        except mtf.ClusterError:
            raise
        except Exception as error:  # every sample reports
            said[sample.name], done = f"{type(error).__name__}: {error}", 0
        else:
            said[sample.name] = ""
        count += done
        if cluster is None or cluster.is_writer:
            seconds = f"{time.process_time() - start:.0f} CPU s"
            how = said[sample.name] or f"{done} layouts"
            print(f"{place} of {len(samples)}, {seconds}: {sample.name}: {how}", file=sys.stderr, flush=True)
    return {"said": said, "layouts": count}


def main() -> None:
    text, most, every, *rest = sys.argv[1:]
    mesh, samples = mtf.Mesh(text), SAMPLES[int(rest[0]) if rest else 0 :: int(every)]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(mtf.Cluster()) if os.environ.get(ADDRESS) else None
        if cluster is None:
            prepare(mesh.devices, "jax")
        found = run(mesh, int(most), samples, cluster)
        if cluster is not None:  # each compared what it got
            for other in cluster.gather("what was found", found["said"]):
                found["said"] |= {name: why for name, why in other.items() if why}
    if cluster is None or cluster.is_writer:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
