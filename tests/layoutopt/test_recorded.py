"""What a search was allowed is in its plan, whatever it is, and is what is asked of it later."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields, replace
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt.analysis.certificate import certify, considered_by, proof_of
from layoutopt.cli.given import OnAnyMesh, OnMesh
from layoutopt.cli.repairs import _changed
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.heuristics.baselines import chosen_by_name
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.plan.build import decided, options_of
from layoutopt.plan.decided import Decided
from layoutopt.plan.details import Searched
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported
from layoutopt.sizing.sizing import LAYOUTS
from layoutopt.space.allow import USUALLY, allowed_by, allowed_text, recorded
from layoutopt.space.decisions import ARGUMENTS, FEATURES, KINDS, SearchSpace, typed
from layoutopt.space.kind import PLAIN, Decision
from layoutopt.space.microbatches import Microbatches
from layoutopt.space.schedule import ScheduleDecision
from mesh_tf_core.errors import UserError
from tests.layoutopt.every_kind import whole_model
from tests.layoutopt.models import EXAMPLES
from tests.searching import search

SAID: dict[str, Any] = {
    "pins": {"batch": ("a", "b"), "length@elsewhere": ()},
    "forbid": {"d": ("a", "b")},
    "orders": "all",
    "storage": ("layout", "zero3@a"),
    "recompute": (True, "keep=attention+wi", False),
    "microbatches": (2, 8),
    "context": ("gather", "zigzag"),
    "elsewhere": ("length",),
    "pipeline": ("layers",),
    "offload": ("optimizer", "weights"),
    "diloco": mtf.DiLoCo("c", 10, fragments=2),
    "schedule": ("1f1b", "circular:2"),
    "collective_matmul": ("d_ff",),
}
"""Of every field that is asked for, something that is not usual."""


def by_json(allowed: SearchSpace) -> SearchSpace:
    """What a plan file that was saved and read again says."""
    said = json.loads(json.dumps(Searched(**recorded(allowed)).to_json()))
    return allowed_by(Searched.model_validate(said))


def test_every_field_is_looked_at() -> None:
    assert SAID.keys() == {*ARGUMENTS} <= Searched.model_fields.keys()
    assert {name for name in SAID if SAID[name] == getattr(USUALLY, name)} == set()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_was_allowed_comes_back_from_a_plan_file(name: str) -> None:
    every = SearchSpace(allow="usual", **SAID)  # type: ignore[arg-type]
    for asked in (replace(USUALLY, **{name: SAID[name]}), every, USUALLY):
        assert by_json(asked) == asked
        assert (name.replace("_", " ") in allowed_text(asked)) is (asked != USUALLY or name == "context")


def test_a_plan_that_says_nothing_means_what_is_usual() -> None:
    assert allowed_by(Searched()) == allowed_by(None) == USUALLY


def test_a_space_names_its_fields_and_the_command_line_its_options() -> None:
    for name, text in {"microbatches": "1,x", "recompute": "sometimes"}.items():
        with pytest.raises(UserError, match=f"^{name} '{text}'?"):
            SearchSpace(**{name: text})
        with pytest.raises(UserError, match=f"^--{name} '{text}'?"):
            OnMesh(**{name: text}).space()


def test_every_door_has_every_field() -> None:
    options = {option.name for argument in ARGUMENTS.values() for option in argument.options}
    others = {"near", "stages", "again", "allow", "given", "restriction"}
    assert {*ARGUMENTS} == {f.name for f in fields(SearchSpace)} - others
    parameters = {name.removeprefix("--").replace("-", "_") for name in options}
    assert parameters | {"allow"} == {*OnMesh.__dataclass_fields__}
    assert OnMesh.__dataclass_fields__.keys() - OnAnyMesh.__dataclass_fields__ == {"pin", "forbid", "diloco"}
    assert {*ARGUMENTS} - {*LAYOUTS} == {"pins", "forbid", "diloco"}
    assert OnMesh().space() == OnAnyMesh().space() == SearchSpace()
    with pytest.raises(UserError, match="have no option 'pins'; known: "):
        layoutopt.size(EXAMPLES["mlp"], tokens=1e6, pins="batch:data")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_its_options_say_is_what_it_means(name: str) -> None:
    argument = ARGUMENTS[name]
    for value in (SAID[name], getattr(SearchSpace(), name)):
        said = argument.texts(value)
        assert said.keys() == {option.name for option in argument.options}
        text = argument.read(said)
        meant = getattr(SearchSpace() if text is None else SearchSpace(**{name: text}), name)
        assert argument.parse(value) == value and (meant == value or {*meant} == {*value})


def test_what_a_search_was_asked_is_in_its_plan() -> None:
    asked = {"orders": "all", "pins": "batch:b+a", "microbatches": (1,), "storage": ("layout", "zero1")}
    plan = search(EXAMPLES["mlp"](), mesh="a:2;b:2", hardware="tpu-v3", **asked)
    found = allowed_by(plan.data.details.search)
    assert found.orders == "all" and found.pins == {"batch": ("b", "a")} and found.microbatches == (1,)
    assert by_json(found) == found


# -- the space that is checked is the plan's --


def test_a_proof_over_all_orders_is_checked_over_all_orders() -> None:
    model, machine = EXAMPLES["mlp"](), load_hardware("tpu-v3")
    plan = search(
        model, mesh="a:2;b:2", hardware=machine, orders="all", microbatches=(1,), recompute=(False,)
    )
    asked = allowed_by(plan.data.details.search)
    whole, few = (
        proof_of(tuple(certify(model, plan, machine, 1e12, each)), each, considered_by(plan))
        for each in (asked, replace(asked, orders="mesh"))
    )
    assert whole.verified and whole.layouts == considered_by(plan)
    assert f"1 problem with {whole.layouts:,} layouts, ruled out" in whole.words
    assert few.layouts < whole.layouts and not few.verified
    assert (
        few.words.startswith("for another search space: ") and f"had {whole.layouts:,} layouts" in few.words
    )


@pytest.mark.parametrize("field", [n for n in ARGUMENTS if n not in ("pins", "forbid", "diloco")])
def test_a_field_that_a_check_forgets_is_another_space(field: str) -> None:
    """Whatever is left out of what is checked, the number of layouts tells it."""
    model, mesh = whole_model(3), mtf.Mesh("x:2;y:2")
    said = {
        "orders": "all", "storage": ("layout", "zero1"), "recompute": (False,), "microbatches": (1, 2),
        "context": ("gather", "ring"), "elsewhere": ("length",), "pipeline": ("layers",),
        "offload": ("optimizer",), "schedule": ("gpipe", "1f1b"), "collective_matmul": ("f",),
    }  # fmt: skip

    def layouts(asked: SearchSpace) -> int:
        found = subproblems(model, [mesh], asked, Evaluator(model, load_hardware("tpu-v4")).near)
        return sum(each.layouts for each in found)

    assert said.keys() == {*LAYOUTS}
    whole, usual = SearchSpace(**said), SearchSpace(microbatches=(1,), recompute=(False, True))
    lost = (field, "schedule") if field == "pipeline" else (field,)  # there is none without stages
    assert layouts(replace(whole, **{name: getattr(usual, name) for name in lost})) != layouts(whole)


# -- what stands beside an answer --


def test_named_plans_may_choose_whatever_names_do_not_say() -> None:
    found = chosen_by_name(SearchSpace(**{**SAID, "storage": ("layout", "zero3@a", "zero1")}))
    same = {name for name in SAID if getattr(found, name) == SAID[name]}
    assert same == {
        "orders",
        "recompute",
        "microbatches",
        "context",
        "offload",
        "collective_matmul",
        "elsewhere",
    }
    assert found.storage == ("layout", "zero1")


@pytest.mark.nightly
def test_what_named_plans_could_not_choose_is_said() -> None:
    asked: dict[str, Any] = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}

    def note(name: str, mesh: str, **more: Any) -> list[str]:
        plan = layoutopt.search(EXAMPLES[name](), mesh=mesh, **{"hardware": "h100", **asked, **more})
        return [n for n in plan.data.notes if n.startswith("named layouts were searched without")]

    staged: dict[str, Any] = {"pipeline": ("layers",), "pins": {"layers": ("x",)}, "microbatches": (2,)}
    (found,) = note("transformer", "x:2", **staged)
    assert found == "named layouts were searched without pipeline; the best layout uses pipeline"
    assert not note("transformer", "x:2", elsewhere=("length",))
    hybrid, axis = ("layout", "zero1", "hybrid"), ("layout", "zero1", "zero1@x")
    (found,) = note("mlp", "node:2;own:8", storage=hybrid)
    assert found.startswith("named layouts were searched without hybrid")
    (found,) = note("mlp", "x:2;y:2", storage=axis)
    assert found.startswith("named layouts were searched without hybrid")
    # In one node all links are near: hybrid means nothing.
    assert not note("mlp", "x:2;y:2", storage=hybrid)
    assert {f.field for f in FEATURES.values()} <= {*ARGUMENTS}


def test_a_repair_names_whatever_it_changes() -> None:
    asked = {"microbatches": (1,), "recompute": (False,), "pins": "batch:a", "offload": (), "mesh": None}
    now = {**asked, "offload": ("optimizer", "weights"), "recompute": (False, True), "pins": None}
    found = _changed(asked, {**now, "collective_matmul": ("d_ff",), "microbatches": (1, 2)})
    assert found == {
        "--offload": "optimizer,weights", "--recompute": None, "--keep": None, "--pin": None,
        "--collective-matmul": "d_ff", "--microbatches": "1,2",
    }  # fmt: skip


# -- what one layout says --


def test_every_field_of_a_plan_is_of_one_kind() -> None:
    fields_of = [kind.says.name for kind in KINDS if kind.says is not None]
    assert len(fields_of) == len({*fields_of}) and {*fields_of} | {"refined"} == {*Decided.model_fields}
    words = [kind.word for kind in KINDS if kind.word]
    assert len(words) == len({*words}) and {*words} | {"refined"} == Decided().listed().keys()
    assert Decided().in_short() == "" and not any(Decided().listed().values())
    assert Decided().to_json() == {} and Decided().model_dump() == {
        kind.says.name: getattr(Decided(), kind.says.name) for kind in KINDS if kind.always and kind.says
    }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.by_hand is not None], ids=lambda k: k.word)
def test_what_is_typed_by_hand_comes_back_from_a_plan_and_is_said(kind: type[Decision]) -> None:
    """Option -> options of lowering -> plan file -> options of lowering is the identity."""
    assert kind.by_hand is not None
    model = EXAMPLES["transformer"]()
    texts = TYPED[kind.by_hand.name]
    options = typed(model, {kind.by_hand.name: texts})
    assert options != mtf.Options()
    said = Decided.model_validate(json.loads(json.dumps(decided(options, mtf.Layout()).to_json())))
    assert options_of(said) == options
    words = shlex.split(said.as_options())
    assert {*words[::2]} == {kind.by_hand.name}
    assert typed(model, {kind.by_hand.name: words[1::2]}) == options
    assert kind is ScheduleDecision or (
        kind.in_words(said)[1] in said.in_short() and kind.in_words(said) != PLAIN
    )
    assert kind is ScheduleDecision or [*kind.beyond(said)] or kind is Microbatches


TYPED = {
    "--storage": ["zero3"],
    "--recompute": ["layers:keep=attention"],
    "--offload": ["optimizer"],
    "--context": ["ring"],
    "--collective-matmul": ["d_ff"],
    "--microbatches": ["2"],
    "--diloco": ["sites:period=30"],
    "--schedule": ["1f1b"],
}
"""Of every option of commands that take one layout, something that is not plain."""


def test_every_form_refuses_what_it_does_not_say() -> None:
    """Whatever kinds there are: a decision that nobody told a form of is refused, not lost."""
    layout = mtf.Layout("batch:a")
    for kind in KINDS:
        if kind.by_hand is None:
            continue
        options = typed(EXAMPLES["transformer"](), {kind.by_hand.name: TYPED[kind.by_hand.name]})
        said = decided(options, layout)
        what = Exported("", mtf.Mesh("a:2"), layout, (), (), said)
        for to, form in FORMATS.items():
            if missing := [
                each
                for each in kind.beyond(said)
                if not form.says.expresses(each.field, each.value, ARGUMENTS.get(each.field))
            ]:
                with pytest.raises(
                    UserError, match=re.escape(f"{to} cannot express this plan, in which {missing[0].words}")
                ):
                    export(what, to)
