"""Loops inside of loops run again in backward, each alone or together: the same numbers, less memory."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from examples import transformer_lm
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Loop
from mesh_tf_core.lower.recomputed import keep_sets
from mesh_tf_core.lower.remat_policy import Recomputed
from mesh_tf_core.lower.verify import verify
from tests.marks import by_day

B, D, F, H = mtf.Dim("batch", 4), mtf.Dim("d", 4), mtf.Dim("hidden", 16), mtf.Dim("rows", 8)
NAMES = ("groups", "layers", "rows")
CHOSEN = [c for n in range(4) for c in itertools.combinations(NAMES, n)]
X = np.random.default_rng(0).normal(size=(4, 8, 4))


def model(dtype: str = "float64") -> mtf.Model:
    """Three loops, one inside of the other; the inner ones read tensors, casts and variables from around."""
    g = mtf.Graph()
    x = g.input("x", [B, H, D], "float64").cast(dtype)

    def weight(name: str, dims: list[mtf.Dim]) -> mtf.Tensor:
        return g.variable(name, dims, mtf.Normal(0.3), "float64", dtype)

    def group(h: mtf.Tensor) -> mtf.Tensor:
        scale, other = weight("scale", [D]), mtf.sin(h)

        def layer(h: mtf.Tensor) -> mtf.Tensor:
            wide = mtf.einsum([mtf.tanh(h * scale + other), weight("wide", [D, F])], [B, H, F])
            w, back, bias = weight("w", [F]), weight("back", [F, D]), mtf.cos(weight("bias", [D]))

            def part(total: mtf.Tensor, row: mtf.Tensor) -> Any:
                y = mtf.dropout(mtf.relu(row * w + mtf.sin(total * 0.1)), 0.3)
                out = mtf.einsum([y, back], [B, D]) * bias
                return total + mtf.reduce_sum(out * weight("last", [D])), [out * mtf.sin(out)]

            total, (rows,) = mtf.scan(part, mtf.reduce_sum(wide) * 0.01, mtf.Dim("rows", 8), [wide])
            return h + mtf.transpose(rows, h.shape) * mtf.cos(total)

        return mtf.scan(layer, h + other, mtf.Dim("layers", 2)) * scale

    y = mtf.scan(group, x, mtf.Dim("groups", 3))
    return mtf.Model(mtf.reduce_sum(mtf.square(y.cast("float64"))), mtf.SGD(0.001))


@pytest.mark.parametrize("again", ["", "layers:keep=products+others"])
def test_what_has_two_names_is_saved_once(again: str) -> None:
    """Self-attention calls the positions of its input otherwise where these are keys."""
    small = transformer_lm.model(layers=2, d_model=8, d_kv=4, heads=2, d_ff=16, vocab=16, batch=2, length=4)
    program = small.lower(mtf.Mesh("x:2"), mtf.Layout("batch:x"), mtf.Options(recompute={again} - {""}))
    loops = [i for i, _ in program.walk() if isinstance(i, Loop) and i.origin.phase == Phase.FORWARD]
    stacks = [program.values[s.outer].shape.names for loop in loops for s in loop.stacked]
    assert ("layers", "batch", "length", "d_model") in stacks
    assert ("layers", "batch", "memory_length", "d_model") not in stacks


def run(recompute: frozenset[str], mesh: str, layout: str, dtype: str = "float64", **options: Any) -> Any:
    """The variables after two steps, and the program."""
    chosen = mtf.Options(recompute=recompute, **options)
    program = verify(model(dtype).lower(mtf.Mesh(mesh), mtf.Layout(layout), chosen))
    engine = LockstepEngine(program)
    for _ in range(2):
        engine.step({"x": X})
    assert engine.communication_bytes == program.communication_bytes()
    return {name: engine.read(name) for name in program.variables}, program


@cache
def plain(dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = run(frozenset(), "one:1", "", dtype)[0]
    return found


@pytest.mark.parametrize("chosen", by_day([(c,) for c in CHOSEN[1:]]))
@pytest.mark.one_in(4)
def test_the_numbers_stay(chosen: tuple[str, ...]) -> None:
    got, program = run(frozenset(chosen), "x:2;y:2", "batch:x;hidden:y")
    for name, value in plain("float64").items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-10, err_msg=name)
    assert any(i.origin.phase == Phase.RECOMPUTE for i, _ in program.walk())


@pytest.mark.parametrize("chosen", [("rows",), ("layers", "rows")], ids="+".join)
@pytest.mark.one_in(2)
def test_variables_that_are_cast_and_stored_split(chosen: tuple[str, ...]) -> None:
    """Casts of what loops around read are made again, not stacked."""
    names = [v.name for v in model().graph.variables.values() if v.trainable]
    storage = dict.fromkeys(names, 3)
    got, _ = run(frozenset(chosen), "x:2;y:2", "batch:x;hidden:y", "float32", storage=storage)
    for name, value in plain("float32").items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_every_set_of_kept_values_of_loops_inside_of_each_other() -> None:
    """A loop inside of one that keeps values for itself saves its stacks in the second run only."""
    whole = model("float64")
    sets = ([None, *(Recomputed(n, k) for k in ((), *keep_sets(whole.step_graph, n)))] for n in NAMES)
    every = [frozenset(filter(None, chosen)) for chosen in itertools.product(*sets)]
    assert len(every) == 24
    for chosen in every:
        whole.lower(mtf.Mesh("x:2"), mtf.Layout("batch:x"), mtf.Options(recompute=chosen))
    got, _ = run(frozenset({"groups:keep=others", "layers:keep=products+others", "rows"}), "x:2", "batch:x")
    for name, value in plain("float64").items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-10, err_msg=name)


def test_less_is_kept() -> None:
    """Every further loop that runs again lowers the peak."""
    peaks = {}
    for chosen in map(frozenset, CHOSEN):
        program = model().lower(mtf.Mesh("m:1"), mtf.Layout(""), mtf.Options(recompute=chosen))
        peaks[chosen] = memory(program).peak
    for chosen, peak in peaks.items():
        for name in set(NAMES) - chosen:
            assert peaks[chosen | {name}] < peak, (chosen, name)


def test_a_dimension_without_a_loop() -> None:
    with pytest.raises(mtf.UserError, match="recompute 'row': the model has no loop over"):
        run(frozenset({"row"}), "one:1", "")
