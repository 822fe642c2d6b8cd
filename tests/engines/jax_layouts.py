"""Sequence, context and hybrid parallelism on JAX's devices: random layouts against one device, and planted
faults.

    JAX_PLATFORMS=cpu python -m tests.engines.jax_layouts faults|FIRST

Prints one JSON object: case -> what was wrong ("" if nothing was). A number runs `COUNT` seeds from there of
every hunt. By day, `jax_cases` runs `all_at_once` and `in_chunks`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

import mesh_tf_core as mtf
from examples import transformer_lm
from mesh_tf_core.engines.jax import program as jax_program
from mesh_tf_core.engines.jax.compat import devices
from tests.core import test_collective_matmul, test_context, test_elsewhere
from tests.examples.helper import SMALL, batches, check_same, train
from tests.examples.hunt import Hunt, options

COUNT = 6
HUNTS: dict[str, tuple[Hunt, str]] = {
    **{f"elsewhere, {name}": (test_elsewhere.HUNT, name) for name in test_elsewhere.MODELS},
    **{f"context, {name}": (hunt, name) for name, hunt in test_context.HUNTS.items()},
    **{f"chunks, {name}": (test_collective_matmul.HUNT, name) for name in test_collective_matmul.MODELS},
}
SIZES = {**SMALL, "kv_heads": 2, "positions": "rotary", "optimizer": "sgd"}
LAYOUT = "batch:data;length:seq;memory_length:seq;heads:model;d_ff:model;length@elsewhere:model"
"""Everything at once, stored over the axis `data` alone."""


def trainer(form: str = "zigzag", storage: str = "zero3@data") -> mtf.Trainer:
    model = transformer_lm.model(**SIZES)
    given = mtf.Options(**options(model, {"context": form, "storage": storage}))
    return mtf.Trainer(model, "data:2;seq:2;model:2", LAYOUT, given, engine="jax")


def alone() -> mtf.Trainer:
    return mtf.Trainer(transformer_lm.model(**SIZES), "one:1", engine="lockstep")


def learned(run: mtf.Trainer) -> dict[str, Any]:
    return {name: run.engine.read(name) for name in run.program.variables}


def same(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, 1e-4, 1e-5, err_msg=name)


def steps(form: str = "zigzag") -> mtf.Trainer:
    """Two steps are those of one device, and send what the program says."""
    run, one = trainer(form), alone()
    for batch in batches(transformer_lm, SIZES, 2):
        np.testing.assert_allclose(run.step(batch)["loss"], one.step(batch)["loss"], 1e-5)
    same(learned(run), learned(one))
    assert run.engine.communication_bytes == run.program.communication_bytes()
    return run


def all_at_once() -> None:
    """What it saves goes on, whole, on one device."""
    run, other = steps(), alone()
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        assert other.restore(folder) and other.step_number == 2
    for name, value in learned(run).items():
        np.testing.assert_array_equal(other.engine.read(name), value)


def in_chunks() -> None:
    """Messages beside products, both ways round eight devices, turns of scatters as a loop."""
    sizes, options = test_collective_matmul.sized(8), {"collective_matmul": test_collective_matmul.ALL}
    found = train(transformer_lm, sizes, "model:8", test_collective_matmul.RING, 2, engine="jax", **options)
    check_same(found, train(transformer_lm, sizes, steps=2))


_SCATTER, _GATHER, _SUM = (getattr(jax.lax, name) for name in ("psum_scatter", "all_gather", "psum"))
FAULTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "nothing is sent round": ("zigzag", "ppermute", lambda x, axes, links: x),
    "a scattered sum is halved": ("ring", "psum_scatter", lambda x, *a, **kw: _SCATTER(x, *a, **kw) * 0.5),
    "a gather is of one's own": (
        "ring",
        "all_gather",
        lambda x, *a, **kw: _GATHER(x * (jax.lax.axis_index(a[0]) == 0), *a, **kw),
    ),
    "heads are not exchanged": (
        "all_to_all",
        "all_to_all",
        lambda x, axes, split, concat, tiled: jax.numpy.concatenate(
            [jax.numpy.split(x, 2, split)[0]] * 2, concat
        ),
    ),
    "replicas are not summed": ("ring", "psum", lambda x, axes: x if axes == ("seq",) else _SUM(x, axes)),
}


def fault(form: str, name: str, wrong: Callable[..., Any]) -> None:
    with mock.patch.object(jax_program.lax, name, wrong):
        try:
            steps(form)
        except AssertionError as error:
            assert "Not equal to tolerance" in str(error)
        else:
            raise ValueError("it was not caught")


def cases(what: str) -> dict[str, Callable[[], Any]]:
    if what == "faults":
        return {name: lambda f=f: fault(*f) for name, f in FAULTS.items()}
    seeds = range(int(what), int(what) + COUNT)
    return {
        f"{case}, {seed}": lambda of=of, seed=seed: of[0].check(of[1], seed, "jax")
        for case, of in HUNTS.items()
        for seed in seeds
    }


def main() -> None:
    devices(8)
    said = {}
    for name, case in cases(sys.argv[1]).items():
        try:
            case()
            said[name] = ""
        except Exception as error:  # every case reports; the test says which failed
            said[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))


if __name__ == "__main__":
    main()
