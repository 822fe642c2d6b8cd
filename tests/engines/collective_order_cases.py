"""Prints the compiled text of an interleaved pipeline with sequence parallelism, with turns and without.

JAX_PLATFORMS=cpu python -m tests.engines.collective_order_cases
"""

from __future__ import annotations

import json

import jax

import mesh_tf_core as mtf
from examples import transformer_lm
from mesh_tf_core.engines.jax import compat
from mesh_tf_core.engines.jax.compat import placed
from mesh_tf_core.engines.jax.program import JaxProgram
from tests.examples.helper import SMALL

MESH, LAYOUT = "pipe:2;t:2", "layers:pipe;heads:t;d_ff:t;length@elsewhere:t"


def compiled(platform: str) -> str:
    """`platform`: of an accelerator to leave turns out; it is compiled for the CPU."""
    model = transformer_lm.model(**{**SMALL, "layers": 4, "optimizer": "sgd", "positions": "rotary"})
    mesh = mtf.Mesh(MESH)
    program = model.lower(mesh, mtf.Layout(LAYOUT), mtf.Options(microbatches=4, schedule="interleaved:2"))
    found = compat.device_mesh(mesh, placed(mesh, compat.devices(4)))
    return str(JaxProgram(program, found, platform).lowered().compile().as_text())


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", False)  # they are what forgets the order
    print(json.dumps({"with turns": compiled("cpu"), "without": compiled("none")}))
