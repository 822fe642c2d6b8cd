"""What `layoutopt export` writes for haliax and for MaxText, taken by the real libraries.

    .venv/bin/python -m benchmarks.export_peers [--environment DIR]

Makes a virtual environment of its own (about 700 MB; haliax 1.3 needs a JAX of its time), places every
variable of a Transformer by the exported mapping on eight virtual devices, and compares what each device
holds with this project's own program: names of axes, sizes and places of pieces. A product under haliax's
`named_jit` must also give NumPy's result. MaxText is no package to install; its rules are read by the
function of Flax that it calls for that (`flax.linen.logical_to_mesh_axes`). Ends with code 1 at the first
difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

PACKAGES = ("haliax==1.3", "jax==0.4.30", "jaxlib==0.4.30", "flax==0.8.5", "equinox==0.11.10", "numpy<2")
LAYOUTS = (
    "batch:data;heads:model;d_ff:model;vocab:model",
    "d_ff:model+data;heads:model;vocab:data+model",
    "d_model:model;d_ff:data;vocab:data",
)
MESH = "data:2;model:4"
MAXTEXT = {
    "embedding/tokens": ("vocab", "embed"),
    "attention/q": ("embed", "q_heads", "kv"),
    "feed_forward/wi": ("embed", "mlp"),
    "feed_forward/wo": ("mlp", "embed"),
}
"""What MaxText calls the dimensions of these variables of ours, without the loop's."""


def environment(at: Path) -> Path:
    """The interpreter of an environment that has the libraries; made if it is not there."""
    python = at / "bin" / "python"
    if not python.exists():
        venv.create(at, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def question(layout: str) -> dict[str, Any]:
    """Exports of one layout, and what our program stores of every variable."""
    import mesh_tf_core as mtf
    from examples.transformer_lm import model
    from layoutopt.plan.export import export
    from layoutopt.plan.exported import Exported, placed

    made, mesh, rules = model(), mtf.Mesh(MESH), mtf.Layout(layout)
    program = made.lower(mesh, rules)
    variables, inputs = placed(program)
    what = Exported("exported", mesh, rules, variables, inputs)
    return {
        "layout": layout,
        "haliax": export(what, "haliax"),
        "maxtext": export(what, "maxtext"),
        "mesh": mesh.as_dict(),
        "variables": {
            v.name: {
                "dims": list(v.dims),
                "sizes": list(program.variables[v.name].variable.shape.sizes),
                "splits": [list(axes) for axes in v.splits],
            }
            for v in variables
        },
    }


def pieces(mesh: dict[str, int], sizes: list[int], splits: list[list[str]]) -> list[list[tuple[int, int]]]:
    """Begin and end along every dimension of the piece of every device, devices in row-major order."""
    found = []
    for place in itertools.product(*(range(n) for n in mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        own = []
        for size, axes in zip(sizes, splits, strict=True):
            number = 0
            for axis in axes:
                number = number * mesh[axis] + at[axis]
            part = size // math.prod(mesh[a] for a in axes)
            own.append((number * part, (number + 1) * part))
        found.append(own)
    return found


def inside() -> None:
    """Runs in the libraries' environment: questions on stdin, counts on stdout."""
    asked = json.load(sys.stdin)
    print(json.dumps([{"haliax": haliax(a), "maxtext": maxtext(a)} for a in asked]))


def haliax(asked: dict[str, Any]) -> int:
    """Places all variables; returns how many pieces were compared."""
    import haliax as hax
    import jax
    import numpy as np

    names: dict[str, Any] = {}
    exec(asked["haliax"], names)
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(names["MESH_SHAPE"]), names["MESH_AXES"])
    compared = 0
    with grid, hax.axis_mapping(names["AXIS_MAPPING"]):
        for name, v in asked["variables"].items():
            axes = tuple(hax.Axis(d, n) for d, n in zip(v["dims"], v["sizes"], strict=True))
            array = hax.shard(hax.zeros(axes))
            held = array.array.sharding.devices_indices_map(tuple(v["sizes"]))
            wanted = pieces(asked["mesh"], v["sizes"], v["splits"])
            for device, want in zip(grid.devices.flat, wanted, strict=True):
                have = [s.indices(n)[:2] for s, n in zip(held[device], v["sizes"], strict=True)]
                if have != want:
                    sys.exit(f"haliax, {asked['layout']}: {name} on {device} is {have}, ours {want}")
                compared += 1
        _product(names["AXIS_MAPPING"])
    return compared


def _product(mapping: dict[str, Any]) -> None:
    import haliax as hax
    import numpy as np

    b, d, f = hax.Axis("batch", 16), hax.Axis("d_model", 32), hax.Axis("d_ff", 64)
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(p.size, q.size)).astype(np.float32) for p, q in ((b, d), (d, f)))
    multiply = hax.named_jit(lambda x, w: hax.dot(x, w, axis=d), axis_resources=mapping)
    found = multiply(hax.named(x, (b, d)), hax.named(w, (d, f)))
    if not np.allclose(found.array, x @ w, atol=1e-4):
        sys.exit("haliax: the product under the mapping is not NumPy's")


def maxtext(asked: dict[str, Any]) -> int:
    """Reads the rules as MaxText does; returns how many dimensions were compared."""
    import flax.linen

    head, rules = asked["maxtext"].split("logical_axis_rules: ")
    table = [(logical, tuple(axes)) for logical, axes in json.loads(rules)]
    sizes = {
        line.split("_")[1]: int(line.split(": ")[1])
        for line in head.splitlines()
        if line.startswith("ici_") and not line.endswith(": 1")
    }
    ours = dict(zip(sizes, asked["mesh"], strict=True))
    compared = 0
    for name, logical in MAXTEXT.items():
        found = next(v for n, v in asked["variables"].items() if n.endswith(name))
        spec = flax.linen.logical_to_mesh_axes(logical, table)
        have = [[ours[a] for a in ((axes,) if isinstance(axes, str) else axes or ())] for axes in spec]
        if have != found["splits"][-len(logical) :]:
            sys.exit(f"maxtext, {asked['layout']}: {name} is {have}, ours {found['splits']}")
        compared += len(logical)
    return compared


def main() -> None:
    """Asks the libraries, in their own environment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, help="kept there for the next time (default: not kept)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside()
        return
    questions = [question(layout) for layout in LAYOUTS]
    with tempfile.TemporaryDirectory() as scratch:
        python = environment(given.environment or Path(scratch) / "peers")
        settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [python, __file__, "--inside"],
            input=json.dumps(questions),
            stdout=subprocess.PIPE,
            text=True,
            env=settings,
            check=False,
        )
    if done.returncode:
        sys.exit(done.returncode)
    for asked, found in zip(questions, json.loads(done.stdout), strict=True):
        print(
            f"{asked['layout']}: haliax agrees on {found['haliax']} pieces, Flax on {found['maxtext']} "
            "dimensions of MaxText's weights"
        )


if __name__ == "__main__":
    main()
