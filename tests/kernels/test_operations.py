"""Every operation with TensorFlow's kernel gives what it gives with NumPy's, whole and split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.kernels.tf_kernel import TfKernel
from tests.conformance.helper import Built, Sample, check_close, legal_layouts
from tests.conformance.samples import SAMPLES
from tests.marks import by_day


class EagerKernel(TfKernel):
    """Takes the engine's NumPy pieces of the batch in."""

    def slice(self, x: Any, begin: Sequence[Any], sizes: Sequence[int]) -> Any:
        return super().slice(tf.convert_to_tensor(x), begin, sizes)


@pytest.mark.parametrize("sample", by_day(SAMPLES, every=5), ids=[s.name for s in SAMPLES])
@pytest.mark.one_in(4)
def test_operation(sample: Sample) -> None:
    built, mesh = Built(sample, "float32"), mtf.Mesh("x:2;y:2")
    tables = list(legal_layouts(built, mesh))
    # The first layout splits nothing; one in the middle splits most of what can be split.
    for table in (tables[0], tables[len(tables) // 2]):
        program = built.program(mesh, mtf.Layout(table))
        want = built.run(program)
        got = LockstepEngine(program, EagerKernel()).step(built.batch)
        for name, value in want.items():
            check_close(name, got[name], value, 3e-5, f"{sample.name} in TensorFlow under [{program.layout}]")
