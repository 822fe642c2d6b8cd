"""Random models on virtual JAX devices, in a process of its own: prints how many pairs gave what they should.

JAX_PLATFORMS=cpu python -m tests.fuzz.on_jax 0,4     (the first seed, and the one after the last)
"""

from __future__ import annotations

import sys

from mesh_tf_core.engines.jax.compat import devices
from tests.fuzz.programs import check

if __name__ == "__main__":
    first, last = map(int, sys.argv[1].split(","))
    devices(8)
    print(sum(check(seed, number, "jax", 1e-7) for seed in range(first, last) for number in range(2)))
