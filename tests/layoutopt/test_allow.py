"""Words for what may be chosen: what they mean for a model, and beside what is said itself."""

from __future__ import annotations

import pytest

import layoutopt
import mesh_tf_core as mtf
from layoutopt.cli.allowed import OnMesh
from layoutopt.space.allow import found, resolved
from layoutopt.space.context import WAYS
from layoutopt.space.decisions import ARGUMENTS, FEATURES, KINDS, SearchSpace
from layoutopt.space.kind import STORED, Target
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.schedules import GPIPE, ONE_F_ONE_B, SCHEDULES
from tests.layoutopt.every_kind import whole_model
from tests.layoutopt.models import EXAMPLES

MESH = mtf.Mesh("x:2;y:2")
TARGET = Target(whole_model(3), MESH)


def allowed(*words: str, **said: object) -> SearchSpace:
    return resolved(SearchSpace(allow=words, **said), [TARGET])  # type: ignore[arg-type]


def test_everything_is_what_every_kind_has() -> None:
    every = allowed("everything")
    for kind in KINDS:
        for name, widest in kind.widest(TARGET).items():
            chosen = getattr(every, name)
            assert chosen == widest if isinstance(widest, str) else {*widest} <= {*chosen}, name
    assert every.pipeline == ("layers",) and every.schedule == SCHEDULES and every.elsewhere == ("length",)
    assert "d" not in every.elsewhere and every.allow == () and every.pins == {}


def test_usual_is_nothing_more() -> None:
    assert allowed("usual") == allowed() == SearchSpace() == allowed("everything", "usual")


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_can_be_added_and_taken_away(name: str) -> None:
    feature = FEATURES[name]
    assert any(map(feature.means, getattr(allowed(f"+{name}"), feature.field) or WAYS))
    assert allowed(f"+{name}") == allowed(name)
    for start in ("everything", "usual"):
        rest = getattr(allowed(start, f"-{name}"), feature.field)
        assert rest is not None and not any(map(feature.means, rest))


def test_a_schedule_brings_its_pipelines() -> None:
    found = allowed("+1f1b")
    assert found.pipeline == ("layers",) and found.schedule == (GPIPE, ONE_F_ONE_B)
    with pytest.raises(UserError, match=r"--allow \+pipeline: this model has no such choice"):
        resolved(SearchSpace(allow="+pipeline"), [Target(EXAMPLES["mlp"](), MESH)])  # type: ignore[arg-type]


def test_what_is_said_itself_counts_more() -> None:
    said = allowed("everything", storage=("layout",), microbatches=(1,), elsewhere=("d",))
    assert (said.storage, said.microbatches, said.elsewhere) == (("layout",), (1,), ("d",))
    assert said.pipeline == ("layers",)
    typed = OnMesh(allow=["everything,-context"], storage="layout,zero3").space()
    assert typed.allow == ("everything", "-context") and typed.storage == ("layout", "zero3")


def test_meshes_that_are_searched_add_up() -> None:
    model = whole_model(3)
    one, both = ([Target(model, mtf.Mesh(text)) for text in texts] for texts in (["x:1"], ["x:1", "x:2"]))
    assert "pipeline" not in found(one) and found(both)["pipeline"] == ("layers",)
    assert found(both)["storage"] == STORED[:4]


def test_wrong_words_are_named() -> None:
    with pytest.raises(UserError, match=r"--allow \+pipelines: did you mean 'pipeline'\?"):
        allowed("+pipelines")
    with pytest.raises(UserError, match="known: "):
        allowed("-pins")
    assert {"pins", "forbid", "diloco"} == {n for n, a in ARGUMENTS.items() if a.names_axes}


def test_a_search_takes_them() -> None:
    asked = {"storage": ["layout"], "recompute": [False], "microbatches": [2], "alternatives": False}
    model = whole_model(3)
    plan = layoutopt.search(model, mesh="x:2", hardware="tpu-v3", allow="+pipeline,-context", **asked)
    search = plan.data.details.search
    assert search is not None and (search.pipeline, search.context) == (("layers",), ("gather",))
    assert OnMesh(allow=["+pipeline", "-context"]).space().keywords["allow"] == ("+pipeline", "-context")
    same = layoutopt.search(
        model, mesh="x:2", hardware="tpu-v3", pipeline=["layers"], context=["gather"], **asked
    )
    assert same.solver.objective == plan.solver.objective and same.layout == plan.layout
