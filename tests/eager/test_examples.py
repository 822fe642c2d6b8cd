"""The example models, replayed operation by operation under a layout, train as they do on one device."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from tests.examples.helper import Result, batches, check_same
from tests.examples.test_layouts import ALL, COMMON, PARTITIONS, SPATIAL, dense
from tests.marks import by_day


def replayed(name: str, steps: int = 3) -> Result:
    example, hparams = ALL[name]
    model = example.model(**hparams)
    run = mtf.Eager(*(PARTITIONS if name in SPATIAL else COMMON)[1], "lockstep")
    losses = []
    for batch in batches(example, hparams, steps):
        with run.step(batch) as g:
            losses.append(float(g.replay(model.step_graph)[model.loss]))
    return losses, {name: run.read(name) for name in run.variables}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day([n for n in ALL if "," not in n], first=1))
@pytest.mark.one_in(4)
def test_replay(name: str) -> None:
    check_same(replayed(name), dense(name))
