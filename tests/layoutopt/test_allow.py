"""Words for what may be chosen: what they mean for a model, and beside what is said itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

import layoutopt
import mesh_tf_core as mtf
from examples.transformer_seq2seq import model as seq2seq
from layoutopt.cli.given import OnMesh
from layoutopt.space.allow import found, resolved
from layoutopt.space.context import WAYS
from layoutopt.space.decisions import ARGUMENTS, FEATURES, KINDS, SearchSpace, left_out
from layoutopt.space.kind import STORED, Target
from layoutopt.space.stages import ways
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.schedules import GPIPE, NAMES, ONE_F_ONE_B, ONE_WAY, kind_name
from tests.layoutopt.every_kind import whole_model
from tests.layoutopt.models import EXAMPLES, SMALL

MESH = mtf.Mesh("x:2;y:2")
TARGET = Target(whole_model(3), MESH, stage_programs=True)


def allowed(*words: str, **said: object) -> SearchSpace:
    return resolved(SearchSpace(allow=words, **said), [TARGET])  # type: ignore[arg-type]


def test_everything_is_what_every_kind_has() -> None:
    every = allowed("everything")
    for kind in KINDS:
        for name, widest in kind.widest(TARGET).items():
            chosen = getattr(every, name)
            assert chosen == widest if isinstance(widest, str) else {*widest} <= {*chosen}, name
    assert every.pipeline == ("layers",) and every.schedule == NAMES and every.elsewhere == ("length",)
    assert "d" not in every.elsewhere and every.allow == ("usual",) and every.pins == {}


def test_usual_is_nothing_more() -> None:
    usual = SearchSpace(allow="usual")
    assert allowed("usual") == allowed() == usual == allowed("everything", "usual")


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_can_be_added_and_taken_away(name: str) -> None:
    feature = FEATURES[name]
    assert any(map(feature.means, getattr(allowed(f"+{name}"), feature.field) or WAYS))
    assert allowed(f"+{name}") == allowed(name)
    for start in ("everything", "usual"):
        rest = getattr(allowed(start, f"-{name}"), feature.field)
        assert rest is not None and not any(map(feature.means, rest))


@pytest.mark.parametrize("start", ["everything", "usual"])
@pytest.mark.parametrize("name", [n for n, a in ARGUMENTS.items() if not a.names_axes])
def test_a_search_without_a_kind_of_choice_is_possible(start: str, name: str) -> None:
    """What means nothing without it leaves with it."""
    space = allowed(start, f"-{name}").settled("time")
    for kind in KINDS:
        kind.check(space)
    assert [*ways(TARGET.model, MESH, space)]


def test_the_order_of_axes_is_searched_on_request() -> None:
    assert allowed("everything").orders == "mesh" and allowed("everything", "+orders").orders == "all"


def test_a_schedule_brings_its_pipelines() -> None:
    found = allowed("+1f1b")
    assert found.pipeline == ("layers",) and found.schedule == (GPIPE, ONE_F_ONE_B)
    with pytest.raises(UserError, match=r"--allow \+pipeline: this model has no such choice"):
        resolved(SearchSpace(allow="+pipeline"), [Target(EXAMPLES["mlp"](), MESH)])  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [False, True])
def test_every_schedule_can_be_added_and_is_said_where_it_is_left_out(apart: bool) -> None:
    """Where one program runs all stages, `everything` means those that idle least there."""
    target = replace(TARGET, stage_programs=apart)
    every = resolved(SearchSpace(allow=("everything",)), [target])
    assert every.schedule == (NAMES if apart else ONE_WAY)
    (said,) = {x.allow for x in left_out(target, every) if "zb-v" in x.allow} or {""}
    assert said == ("" if apart else f"--schedule {','.join(NAMES)}")
    for name in map(kind_name, NAMES):
        found = resolved(SearchSpace(allow=(f"+{name}",)), [target]) if name != GPIPE else every
        assert name in map(kind_name, found.schedule) and found.pipeline == ("layers",)


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
    assert found(both)["storage"] == STORED[:-1]


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


def test_no_word_about_recomputation_loses_a_part() -> None:
    for text in ("keep=products:count=2", "count=2:keep=products"):
        with pytest.raises(UserError, match="not both in one"):
            layoutopt.search(EXAMPLES["transformer"](), mesh="x:2", hardware="tpu-v3", recompute=(text,))


def test_pins_of_stages_that_nothing_can_have_are_refused() -> None:
    pinned = ("encoder_layers", "decoder_layers")
    pins = dict(zip(pinned, (("x",), ("y",)), strict=True))
    for again in (("some",), ("count=2",), (False, True)):
        space = SearchSpace(pipeline=pinned, pins=pins, recompute=again)
        with pytest.raises(UserError, match=f"--pin of {', '.join(pinned)} is not possible"):
            list(ways(seq2seq(**SMALL), mtf.Mesh("x:2;y:2"), space))
