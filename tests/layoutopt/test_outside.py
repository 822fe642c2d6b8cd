"""No price from outside contradicts a proof (`tests.layoutopt.outside`)."""

from __future__ import annotations

from dataclasses import fields

import pytest

from costmodels.hardware import load_hardware
from layoutopt.space.kind import Decision
from layoutopt.space.storage import Storage
from mesh_tf_core.lower import Options
from tests.layoutopt.models import HARDWARE
from tests.layoutopt.outside import CHANGES, MESHES, Hunt, setting, thin
from tests.marks import by_day


def look(hunt: Hunt, seed: int, many: int, forgets: type[Decision] | None = None) -> None:
    hardware = load_hardware(HARDWARE[seed % len(HARDWARE)])
    hunt.look(thin(seed), MESHES[seed % len(MESHES)], hardware, seed, many, forgets)


def test_every_field_of_options_is_changed() -> None:
    assert set(CHANGES) == {f.name for f in fields(Options)}


@pytest.mark.parametrize("seed", by_day([3, 0]))
def test_nothing_outside_is_faster(seed: int) -> None:
    hunt = Hunt()
    look(hunt, seed, 60)
    assert hunt.prices == 60


@pytest.mark.parametrize("kind", [Storage])
def test_a_kind_that_a_search_forgets_is_found(kind: type[Decision]) -> None:
    with pytest.raises(AssertionError, match=f"outside: .*{kind.label[:7]}"):
        for seed in (8, *range(8)):
            look(Hunt(), seed, 30, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 400, 20))
def test_many_searches_against_many_prices(first: int) -> None:
    hunt = Hunt()
    for seed in range(first, first + 20):
        look(hunt, seed, 500)
        model, mesh = setting(seed)
        hunt.look(model, mesh, load_hardware(HARDWARE[seed % len(HARDWARE)]), seed, 100)
    assert hunt.proven > 0.5 * hunt.prices
