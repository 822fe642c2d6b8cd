"""Every operation, run eagerly under layouts of its dimensions, against the dense staged run: outputs and
gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ops.reduce import Reduce
from tests.conformance.helper import TOLERANCE, Built, Sample, check_close, dims, legal_layouts
from tests.conformance.samples import SAMPLES
from tests.marks import by_day

MESH = mtf.Mesh("x:2;y:2")
NAMES = [s.name for s in SAMPLES]
LOOPS = [s for s in SAMPLES if s.family in ("loop", "control")]


def results(g: mtf.Graph, sample: Sample, number: str) -> dict[str, Any]:
    """What `Built` returns, built in `g`."""
    inputs = [g.input(f"in{i}", dims(a.dims), a.dtype(number)) for i, a in enumerate(sample.args)]
    made = sample.apply(g, *inputs)
    outputs = list(made) if isinstance(made, tuple) else [made]
    found = {f"out{i}": y for i, y in enumerate(outputs)}
    terms = [
        mtf.einsum([y, g.input(f"weight{i}", y.shape.dims, y.dtype)], [])
        for i, y in enumerate(outputs)
        if is_float(y.dtype)
    ]
    floats = [i for i, x in enumerate(inputs) if is_float(x.dtype)]
    if terms and floats:
        found["loss"] = mtf.add_n(terms)
        grads = mtf.gradients(found["loss"], [inputs[i] for i in floats])
        found |= {f"grad{i}": dx for i, dx in zip(floats, grads, strict=True) if dx is not None}
    return found


def conform(sample: Sample, engine: str, unroll: bool = True, number: str = "float32") -> None:
    """Under a legal layout that splits as many dimensions as any does."""
    built = Built(sample, number)
    # Nobody stages an eager program, so nobody asks whether its ids name anything.
    want = {name: x for name, x in built.dense().items() if not name.startswith("inside")}
    layout = mtf.Layout(max(legal_layouts(built, MESH), key=lambda table: sum(map(bool, table.values()))))
    with mtf.Eager(MESH, layout, engine).step(built.batch, unroll) as g:
        got = results(g, sample, number)
    assert set(got) == set(want)
    for name, value in got.items():
        where = f"{sample.name} run eagerly under [{layout}]"
        check_close(name, value.numpy(), want[name], TOLERANCE[number], where)


@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
@pytest.mark.one_in(4)
def test_numpy(sample: Sample) -> None:
    conform(sample, "lockstep")


@pytest.mark.slow
@pytest.mark.parametrize("sample", by_day(SAMPLES, every=24, first=1), ids=NAMES)
def test_tensorflow(sample: Sample) -> None:
    conform(sample, "local")


@pytest.mark.parametrize("sample", LOOPS, ids=[s.name for s in LOOPS])
def test_loops_as_one_operation(sample: Sample) -> None:
    conform(sample, "lockstep", unroll=False)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
    def forgets_the_sum(self: Reduce, *inputs: TensorType) -> Roles:
        return Roles(parallel=inputs[0].shape.names)

    chosen: Sequence[Sample] = [s for s in SAMPLES if s.name == "sum"]
    conform(chosen[0], "lockstep")
    monkeypatch.setattr(Reduce, "roles", forgets_the_sum)
    forget()
    with pytest.raises((AssertionError, ValueError), match=r"dense result|different values"):
        conform(chosen[0], "lockstep")
