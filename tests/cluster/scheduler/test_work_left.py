"""What jobs that have ended say about the work of others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.work_left import (
    TABLED_S,
    USUAL_S,
    EndedJob,
    Experience,
    least_left_s,
)

used = st.lists(st.floats(1.0, 1e7), min_size=1, max_size=30)


def experience(*groups):
    """Jobs of scripts of one owner, by (script, devices asked for, seconds used)."""
    return Experience(
        EndedJob(script, "ana", size, float(used_s))
        for script, size, all_s in groups
        for used_s in all_s
    )


def test_nothing_is_known_before_a_job_has_ended():
    assert Experience().guess("a.py", "ana", 1) is None
    assert least_left_s(None, 0.0, 0.5) == USUAL_S


@given(used, st.floats(0.0, 1e8))
def test_a_guess_is_a_chance_and_a_rate(all_s, had_s):
    guess = experience(("a.py", 1, all_s)).guess("a.py", "ana", 1)
    shares = np.array(guess.still_runs)
    assert shares[0] == 1.0 and (np.diff(shares) <= 0.0).all() and (shares > 0.0).all()
    assert np.isfinite(guess.rates).all() and (guess.rates > 0.0).all()
    assert np.isfinite(guess.rate(had_s)) and guess.rate(had_s) > 0.0
    assert guess.least_left_s(had_s, 0.5) >= 0.0


@given(used, st.floats(0.0, 1e5))
def test_a_rate_is_that_of_the_best_stretch(all_s, had_s):
    """No stretch ends more jobs per device-second than the rate says: checked by the shares themselves."""
    guess = experience(("a.py", 1, all_s)).guess("a.py", "ana", 1)
    shares, at = np.array(guess.still_runs), int(np.searchsorted(TABLED_S, had_s))
    steps = np.diff(TABLED_S) * (shares[1:] + shares[:-1]) / 2.0
    for end in range(at + 1, len(TABLED_S)):
        ratio = (shares[at] - shares[end]) / steps[at:end].sum()
        assert guess.rates[at] >= ratio * (1.0 - 1e-9)


def test_runs_of_the_same_script_and_owner_count_most():
    known = experience(("short.py", 4, [600.0] * 20), ("long.py", 4, [1e5] * 20))
    short, long = (known.guess(name, "ana", 4) for name in ("short.py", "long.py"))
    other, strange = known.guess("short.py", "bob", 4), known.guess("new.py", "ana", 64)
    assert short.rate(0.0) > 3.0 * long.rate(0.0)
    assert (
        short.least_left_s(0.0, 0.5)
        < 700.0
        < other.least_left_s(0.0, 0.5)
        < long.least_left_s(0.0, 0.5)
    )
    assert "20 earlier runs of its script" == short.basis
    assert "as many devices" in other.basis and strange.basis == "40 ended jobs"


def test_a_job_that_has_outlived_all_that_is_known_is_one_of_which_nothing_is_known():
    guess = experience(("a.py", 1, [600.0] * 50)).guess("a.py", "ana", 1)
    for had_s in (1e5, 1e6):
        assert guess.rate(had_s) == pytest.approx(1.0 / (USUAL_S + had_s), rel=0.1)
        assert guess.least_left_s(had_s, 0.5) == pytest.approx(USUAL_S + had_s, rel=0.1)


def test_more_knowledge_changes_a_guess_that_was_made_before():
    known = experience(("a.py", 1, [600.0]))
    before = known.guess("a.py", "ana", 1)
    known.add(EndedJob("a.py", "ana", 1, 5e4))
    assert known.guess("a.py", "ana", 1).least_left_s(0.0, 0.5) > before.least_left_s(0.0, 0.5)


@given(st.permutations([("a.py", 1), ("a.py", 8), ("b.py", 1), ("b.py", 8)]))
def test_a_guess_does_not_depend_on_who_asked_before(order):
    groups = (("a.py", 1, [100.0] * 2), ("b.py", 8, [1e6] * 20))
    alone = {asked: experience(*groups).guess(asked[0], "ana", asked[1]) for asked in order}
    known = experience(*groups)
    assert all(known.guess(script, "ana", size) == alone[script, size] for script, size in order)


def test_a_job_without_a_script_is_like_no_other():
    known = experience(("", 2, [600.0] * 9))
    assert known.guess("", "ana", 2).basis == "9 ended jobs of as many devices"
