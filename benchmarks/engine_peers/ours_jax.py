"""The model of examples/transformer_lm.py on the engine `jax`."""

from __future__ import annotations

import os
from functools import partial

from benchmarks.engine_peers import ours

os.environ["JAX_PLATFORMS"] = "cpu"

make = partial(ours.make, kind="jax")
