"""The words of what may be chosen are those of what is chosen: a search's option and that of one layout."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from layoutopt.space.decisions import ARGUMENTS, BY_HAND, KINDS, SearchSpace, typed
from layoutopt.space.kind import HYBRID, Decision, Target
from layoutopt.space.recompute import SELECTIVE, SOME
from mesh_tf_core.errors import UserError
from tests.layoutopt.every_kind import whole_model

MODEL = whole_model(3)
TARGET = Target(MODEL, mtf.Mesh("x:2;y:2"))
SEVERAL = {HYBRID, SELECTIVE, SOME}
"""Values that stand for several choices."""
BOTH = [
    kind
    for kind in KINDS
    if kind.by_hand is not None
    and any(kind.by_hand.name in {o.name for o in a.options} for a in ARGUMENTS.values())
    and kind.everything(TARGET)
]


@pytest.mark.parametrize("kind", BOTH)
def test_a_layout_takes_each_word_of_a_search(kind: type[Decision]) -> None:
    option = kind.by_hand
    assert option is not None
    name, argument = next((n, a) for n, a in ARGUMENTS.items() if option.name in {o.name for o in a.options})
    values = [value for value in kind.everything(TARGET).get(name, ()) if value not in SEVERAL]
    said = []
    for value in values:
        text = argument.texts(argument.parse((value,)))[option.name]
        assert text is not None
        found = typed(MODEL, {option.name: [text]})
        assert argument.parse(text) == argument.parse((value,))
        said.append(found)
    assert all(each not in said[:n] for n, each in enumerate(said)) and len(said) == len(values) > 0


def test_words_about_all_loops() -> None:
    def recomputed(*texts: str) -> set[str]:
        return {str(again) for again in typed(MODEL, {"--recompute": texts}).recompute}

    assert recomputed("always") == {"layers"} and recomputed("never") == set() == recomputed()
    assert recomputed("always:keep=attention") == {"layers:keep=attention"}
    with pytest.raises(UserError, match="--recompute never and --recompute layers: remove one of them"):
        recomputed("never", "layers")
    with pytest.raises(
        UserError, match=r"known: .*; to allow a set of kept values, write --keep attention\+wi"
    ):
        SearchSpace(recompute="layers:keep=attention+wi")  # type: ignore[arg-type]


def test_most_kinds_have_both_options() -> None:
    assert len(BOTH) >= 0.6 * len(BY_HAND)
