"""Samples on quiet and on noisy machines, without waiting for either."""

from __future__ import annotations

import pytest

from costmodels.calibration.clock import TimingSample, combined, noise, sample, spread, steps_for, typical


def test_on_a_quiet_machine_the_wall_time_counts():
    assert TimingSample(wall=2.0, own=3.0, foreign=0.0, cores=2).seconds == 2.0


def test_what_others_used_is_taken_off():
    assert TimingSample(wall=4.0, own=3.9, foreign=4.0, cores=2).seconds == 2.0


def test_a_step_takes_at_least_its_own_work():
    assert TimingSample(wall=4.0, own=4.0, foreign=7.0, cores=2).seconds == 2.0


def test_seconds_are_of_one_step():
    assert TimingSample(wall=4.0, own=4.0, foreign=0.0, cores=2, steps=8).seconds == 0.5


def test_a_quiet_machine_is_quiet():
    found = noise([[TimingSample(1.0 + i / 100, 1.5, 0.0, 2) for i in range(5)]] * 3)
    assert not found.noisy
    assert "quiet machine" in found.words


def test_a_machine_that_others_use_is_noisy():
    found = noise([[TimingSample(1.0, 1.2, 0.6, 2)] * 5])
    assert found.foreign == pytest.approx(0.3)
    assert found.noisy
    assert "other processes used 30% of the cores" in found.words


def test_a_machine_whose_repeats_differ_is_noisy():
    found = noise([[TimingSample(w, 0.1, 0.0, 2) for w in (1.0, 1.3, 1.6, 1.9, 2.2)]])
    assert found.spread > 0.1
    assert found.noisy
    assert "close other programs" in found.words


def test_one_disturbed_sample_does_not_move_the_typical_time():
    assert typical([TimingSample(w, 0.1, 0.0, 2) for w in (1.0, 1.0, 1.0, 9.0)]) == 1.0


def test_on_a_shared_machine_own_work_counts_and_ticks_do_not():
    # Others' time comes in ticks, so a single sample says 0 or far too much; the totals are right.
    ticks = (0.0, 2.0, 0.0, 2.0)
    found = typical([TimingSample(wall=1.5, own=1.0, foreign=t, cores=2) for t in ticks])
    assert found == pytest.approx(1.0)
    found = typical([TimingSample(wall=0.75, own=1.0, foreign=t / 4, cores=2) for t in ticks])
    assert found == pytest.approx(0.625)
    busy = typical([TimingSample(wall=4.0, own=1.0, foreign=8.0, cores=2)])
    assert busy == pytest.approx(0.5)


def test_processes_of_one_machine_are_no_others_to_each_other():
    """Each of them takes the others' CPU time for foreign; 0.2 s are."""
    parts = [
        TimingSample(2.0, 1.5, 2.5, 2, 4),
        TimingSample(2.1, 1.6, 2.4, 2, 4),
        TimingSample(1.9, 0.7, 3.3, 2, 4),
    ]
    found = combined(parts, ["here"] * 3)
    assert (found.wall, found.cores, found.steps) == (2.0, 2, 4)
    assert found.own == pytest.approx(3.8)
    assert found.foreign == pytest.approx(0.2)
    assert found.seconds == pytest.approx((2.0 - 0.2 / 2) / 4)


def test_one_process_is_itself():
    alone = TimingSample(2.0, 1.5, 0.3, 2)
    assert combined([alone], ["here"]) == alone


def test_ticks_do_not_make_foreign_time_negative():
    assert (
        combined([TimingSample(1.0, 1.0, 0.9, 2), TimingSample(1.0, 1.0, 1.0, 2)], ["a", "a"]).foreign == 0.0
    )


def test_of_several_machines_that_which_others_use_most_counts():
    """The wall time stays the first one's: it waits for the disturbed machine as all do."""
    parts = [TimingSample(2.0, 1.0, 1.0, 2), TimingSample(2.5, 1.0, 3.0, 4), TimingSample(2.0, 1.0, 1.0, 2)]
    found = combined(parts, ["a", "b", "a"])
    assert (found.wall, found.own, found.foreign, found.cores) == (2.0, 1.0, 3.0, 4)
    quiet = combined([TimingSample(2.0, 1.0, 0.0, 2), TimingSample(2.5, 2.0, 0.0, 4)], ["a", "b"])
    assert (quiet.own, quiet.cores) == (1.0, 2)


def test_spread_is_relative():
    assert spread([1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(spread([10.0, 20.0, 30.0])) == pytest.approx(0.5)


def test_a_sample_runs_every_step():
    ran = []
    found = sample(lambda: ran.append(1), 3)
    assert len(ran) == 3
    assert found.steps == 3
    assert found.wall > 0


def test_the_number_of_steps_is_bounded():
    assert steps_for(lambda: None, 1e9) == 200
    assert steps_for(lambda: None, 0.0) == 1
