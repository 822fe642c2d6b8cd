"""What may be asked of a search: rules that hold together, numbers that mean something."""

from __future__ import annotations

from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from examples.mlp import model as mlp
from examples.transformer_lm import model as transformer
from layoutopt import search
from layoutopt.analysis.explain import forbidden, without
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.splits import parse_forbid, parse_rules, rules_text
from mesh_tf_core.errors import UserError


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return mlp()


def test_what_is_pinned_is_searched_though_tables_are_made_one_by_one(model: mtf.Model) -> None:
    plan = search(model, mesh="data:2;model:2", pins="batch:data", microbatches=(1, 2))
    assert plan.layout.axes("batch") == ("data",)
    assert plan.solver.status == "OPTIMAL"


@pytest.mark.parametrize("rules", ["batch:none;batch:data", "batch:data;batch:none"])
def test_contradicting_pins_are_refused_in_any_order(rules: str) -> None:
    with pytest.raises(UserError, match=r"two rules pin 'batch', to .* remove one of them"):
        parse_rules(rules)


def test_what_is_forbidden_adds_up() -> None:
    assert parse_forbid("batch:data;batch:model;d:data") == {"batch": ("data", "model"), "d": ("data",)}
    assert parse_forbid({"batch": ("data",)}) == {"batch": ("data",)}
    with pytest.raises(
        UserError, match="forbid batch:none names no axis; to require a split of 'batch', use --pin"
    ):
        parse_forbid("batch:none")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"microbatches": (7,)},
            "microbatches=7: 'batch' has size 64, which is divisible by none of these numbers",
        ),
        ({"microbatches": (0,)}, r"microbatches \(0,\): write whole numbers of at least 1"),
        ({"microbatches": ()}, r"microbatches \(\): write whole numbers of at least 1"),
        ({"storage": ()}, "storage is empty; name one or more of layout, zero1"),
        ({"storage": ("zero4",)}, "unknown storage 'zero4'; did you mean"),
        ({"microbatches": 4}, "microbatches 4: write a list of allowed values, or a comma-separated text"),
        ({"memory": "16GiB"}, "memory is '16GiB'; give a positive number of bytes"),
        ({"pins": 5}, "pins 5: write rules such as 'batch:data', or a dict of dimensions and axes"),
        ({"top": 2.5}, "top is 2.5; give a whole number"),
        (
            {"mesh": None, "devices": 1 << 40},
            "devices=1099511627776: a search supports at most 1,048,576 devices",
        ),
        ({"recompute": ()}, "recompute is empty; write False, True or both"),
    ],
)
def test_options_that_mean_nothing_are_refused(model: mtf.Model, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        search(model, **{"mesh": "data:2", **asked})


def test_a_stage_that_is_named_twice_is_allowed_once(model: mtf.Model) -> None:
    assert (
        search(model, mesh="data:2", storage=("zero1", "zero1"), microbatches=(1,)).solver.status == "OPTIMAL"
    )


def test_a_file_is_no_model() -> None:
    with pytest.raises(UserError, match=r"search: 'examples/mlp.py' is not a Model; pass what"):
        search("examples/mlp.py", mesh="data:2")  # type: ignore[arg-type]


def test_rules_in_words_are_the_same_rules() -> None:
    rules = {"batch": ("data", "model"), "d": ()}
    assert rules_text(rules) == "batch:data+model;d:none" and parse_rules(rules_text(rules)) == rules
    assert rules_text(None) is rules_text({}) is None


def test_axes_in_words_are_the_same_axes() -> None:
    """A mapping's texts are read as those of a rule are."""
    words = {"batch": "data+model", "d": "none", "length": "-"}
    rules = {"batch": ("data", "model"), "d": (), "length": ()}
    assert parse_rules(words) == rules and rules_text(words) == rules_text(rules)
    assert parse_forbid({"batch": "data"}) == parse_forbid("batch:data")
    with pytest.raises(UserError, match="--forbid d:none names no axis"):
        parse_forbid({"d": "none"})


def test_only_public_names_are_shown() -> None:
    asked = [
        "candidates",
        "choose_replicas",
        "cost",
        "explain",
        "from_huggingface",
        "from_jax",
        "from_torch",
        "learn",
        "lint",
        "load_plan",
        "search",
        "size",
    ]
    assert dir(layoutopt) == ["Limits", "Plan", "SearchSpace", "__version__", *asked, "validate", "verify"]


def test_rules_for_elsewhere_hold_if_pinned_and_not_if_forbidden() -> None:
    sizes = {
        "batch": 4,
        "length": 8,
        "d_model": 16,
        "d_ff": 32,
        "heads": 2,
        "d_kv": 8,
        "vocab": 32,
        "layers": 2,
    }
    model = transformer(**sizes)
    asked: dict[str, Any] = {"mesh": "data:2;model:2", "microbatches": (1,), "hardware": "tpu-v3"}
    asked |= {"storage": ("layout",), "recompute": (False,)}
    splits = "batch:data;d_ff:model;heads:model"
    plan = search(model, **asked, elsewhere=("length",), pins=f"{splits};length@elsewhere:model")
    assert plan.layout.elsewhere == (("length", ("model",)),)
    assert plan.solver.status == "OPTIMAL"
    then = SearchSpace(pins={"length@elsewhere": ("model",)}, elsewhere=("length",), microbatches=(1,))
    with pytest.raises(UserError, match="--without sequence: the plan's search required this decision"):
        without(then, "sequence")
    assert "sequence" not in forbidden(plan, then, ["all"])
    assert "sequence" in forbidden(plan, SearchSpace(elsewhere=("length",), microbatches=(1,)), ["all"])
    for rules in ({"forbid": "length@elsewhere:data+model"}, {"pins": "length@elsewhere:none"}):
        assert search(model, **asked, elsewhere=("length",), **rules).layout.elsewhere == ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            "lenth@elsewhere:model",
            "lenth@elsewhere: no operation has this dimension; did you mean 'length'",
        ),
        ("batch@elsewhere:model", "'batch' may not be split elsewhere; add"),
        ("length@elsewhere:other", "has no axis 'other'"),
        (
            "length@feed_forward:model",
            "apply to a dimension wherever it appears; remove @feed_forward",
        ),
    ],
)
def test_rules_for_elsewhere_that_mean_nothing_are_refused(rules: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        search(transformer(), mesh="data:2;model:2", elsewhere=("length",), pins=rules)
