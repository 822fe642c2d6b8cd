"""The tables of what bandwidth a compute utilisation needs: our rule for the simulator that made them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.diloco_utilisation import GRID, MODELS, compared, crossing, needed, utilisation


def test_the_tables_are_the_rules_or_their_neighbours() -> None:
    rows = [*compared({})]
    apart = Counter(abs(row["points_apart"]) for row in rows)
    assert apart == {0: 65, 1: 39, 2: 1}
    far = [(r["model"], r["period"], r["utilisation"]) for r in rows if abs(r["points_apart"]) > 1]
    assert far == [("Chinchilla 10B", 50, 0.95)]


def test_the_rule() -> None:
    """One layer hides nothing: H C / (H C + N bits / W)."""
    assert utilisation(16, 1e9, 1, 1.0, 1) == pytest.approx(1 / 2)
    assert utilisation(16, 1e9, 1, 1.0, 10) == pytest.approx(10 / 11)
    # Of two, the first's reduction runs behind the other's backward, a third of the step.
    assert utilisation(24, 1e9, 2, 1.0, 1) == pytest.approx(1 / (1 + 1 / 3))
    assert utilisation(16, 1e9, 1, 1.0, 1) < utilisation(32, 1e9, 1, 1.0, 1)
    assert GRID[needed(0.5, 1e9, 1, 1.0, 1)] < 16 <= GRID[needed(0.5, 1e9, 1, 1.0, 1) + 1]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "parameters"), [("Llama3 405B", 405_853_388_800)])
def test_what_crosses_is_the_parameters(name: str, parameters: int) -> None:
    assert crossing(MODELS[name]()) == parameters
