"""The model of examples/transformer_lm.py on our engines."""

from __future__ import annotations

from collections.abc import Callable

import mesh_tf_core as mtf
from benchmarks.engine_peers.sizes import RATE, RULES, Sizes, batch, parameters
from examples.transformer_lm import model
from mesh_tf_core.engines import open_engine

NAMES = {
    "embedding/tokens": "tokens",
    "embedding/positions": "positions",
    "output/projection": "projection",
    "attention_norm/scale": "norm1",
    "feed_forward_norm/scale": "norm2",
    "final_norm/scale": "final_norm",
}


def make(s: Sizes, mesh: dict[str, int], kind: str = "local") -> Callable[[], float]:
    """One training step per call, by an engine of that kind."""
    built = model(
        layers=s.layers,
        d_model=s.d_model,
        d_kv=s.d_kv,
        heads=s.heads,
        d_ff=s.d_ff,
        vocab=s.vocab,
        batch=s.batch,
        length=s.length,
        optimizer="sgd",
        learning_rate=RATE,
    )
    layout = ";".join(f"{dim}:{axis}" for dim, axis in RULES.items() if mesh[axis] > 1)
    program = built.lower(
        mtf.Mesh({a: n for a, n in mesh.items() if n > 1} or {"data": 1}), mtf.Layout(layout)
    )
    engine = open_engine(program, kind)
    engine.initialize()
    values = parameters(s)
    for name in program.variables:
        if name != "step":
            engine.write(name, values.pop(NAMES.get(name, name.rpartition("/")[2])))
    if values:
        raise ValueError(f"the model has no variables for {sorted(values)}")
    tokens, targets = batch(s)
    return lambda: float(engine.step({"tokens": tokens, "targets": targets})["loss"])
