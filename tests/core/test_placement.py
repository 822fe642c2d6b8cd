"""The table of where values live, against the programs that lowering makes of it."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf
from examples.transformer_lm import model as transformer
from mesh_tf_core.lower.placement import COMPUTE, LOAD, PHASES, placement
from mesh_tf_core.lower.storage import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    GRADIENT,
    ONCE,
    SAVED,
    STAGES,
    STATE,
    UPDATE,
    VARIABLE,
)
from mesh_tf_core.model import Model

SIZES: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 2, "d_kv": 8, "d_ff": 32, "vocab": 32}
MESH, LAYOUT = mtf.Mesh("data:4;model:2"), mtf.Layout("batch:data;d_ff:model;heads:model")

ZERO = {
    (STATE, BETWEEN): 1,
    (VARIABLE, UPDATE): 1,
    (GRADIENT, UPDATE): 1,
    (GRADIENT, BACKWARD): 2,
}
"""Rajbhandari et al. 2020, section 5: the stage from which on a device has a part of what."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Model:
    return transformer(**SIZES, batch=8, length=8, dtype=request.param)


def options(model: Model, stage: int, host: bool = False) -> mtf.Options:
    trained = [n for n, v in model.graph.variables.items() if v.trainable and len(v.shape)]
    offload = {("optimizer", trained[0]), ("weights", trained[1])} if host else set()
    return mtf.Options(dict.fromkeys(trained, stage), offload=frozenset(offload))


@pytest.mark.parametrize("stage", range(len(STAGES)))
@pytest.mark.parametrize("host", [False, True])
def test_variables_are_stored_as_their_rows_say(model: Model, stage: int, host: bool) -> None:
    chosen = options(model, stage, host)
    program = model.lower(MESH, LAYOUT, chosen)
    where = placement(model.step_graph, MESH, LAYOUT, chosen)
    rows = {(name, what): row for what, name, phase, row in where.rows() if phase == BETWEEN}
    seen = set()
    for stored in program.variables.values():
        v = stored.variable
        if (row := rows.get((v.slot_of or v.name, STATE if v.slot_of else VARIABLE))) is None:
            continue
        seen.add((v.slot_of or v.name, STATE if v.slot_of else VARIABLE))
        assert stored.host == row.host
        if v.slot_of is None or v.shape.names == model.graph.variables[v.slot_of].shape.names:
            assert stored.splits == tuple(map(row.layout.axes, v.shape.names))
    assert seen == rows.keys()


def test_a_class_is_split_from_its_stage_on(model: Model) -> None:
    """Of every phase where something is split further, in no earlier stage."""
    tables = [placement(model.step_graph, MESH, LAYOUT, options(model, n)) for n in range(len(STAGES))]
    for name in (n for n in tables[-1].stages if tables[-1].further(n)[0]):
        stored = 1 if name in tables[0].narrow else 3  # a master copy is split as the state is
        for (what, phase), least in {**ZERO, (VARIABLE, BETWEEN): stored}.items():
            for number, where in enumerate(tables):
                split = where.row(what, name, phase).layout == where.view(name) != where.read_in(name)
                late = number == STAGES.index(ONCE) and (what, phase) == (GRADIENT, BACKWARD)
                assert split == (number >= least and not late), (what, phase, number)


def test_what_is_read_once_more(model: Model) -> None:
    chosen = options(model, 3, host=True)
    chosen = mtf.Options(
        chosen.storage, {"layers:keep=products"}, offload=chosen.offload | {("activations", "layers")}
    )
    found = [*placement(model.step_graph, MESH, LAYOUT, chosen).rows(["layers"])]
    assert {(what, phase) for what, _, phase, _ in found} == {
        (what, phase) for what, phases in PHASES.items() for phase in phases
    }
    read = {name: row.again for what, name, phase, row in found if (what, phase) == (VARIABLE, FORWARD)}
    (hosted,) = (name for kind, name in chosen.offload if kind == "weights")
    assert read[hosted] == LOAD
    (saved,) = (row for what, _, _, row in found if what == SAVED)
    assert saved.host and saved.again == COMPUTE and saved.keep == ("products",)


def test_other_stages_are_another_table(model: Model) -> None:
    where = placement(model.step_graph, MESH, LAYOUT, options(model, 1, host=True))
    again = where.stored(options(model, 3).storage)
    direct = placement(model.step_graph, MESH, LAYOUT, options(model, 3))
    direct.offload = where.offload
    assert [*again.rows()] == [*direct.rows()]
