"""What restarts took overrules what was told, and one that took far too long does not overrule the rest."""

from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.restart_estimate import estimated_restart_s

SECONDS = st.floats(0.0, 1e4)


@given(told_s=SECONDS)
def test_without_a_restart_what_is_told_holds(told_s):
    assert estimated_restart_s(told_s, ()) == told_s


@given(told_s=SECONDS, took_s=SECONDS, count=st.integers(1, 10))
def test_restarts_that_agree_are_believed_to_the_bit(told_s, took_s, count):
    assert estimated_restart_s(told_s, [took_s] * count) == took_s


@given(told_s=SECONDS, took_s=st.lists(SECONDS, min_size=1, max_size=10))
def test_it_lies_between_what_is_known_and_knows_no_order(told_s, took_s):
    found = estimated_restart_s(told_s, took_s)
    assert min(told_s, *took_s) <= found <= max(told_s, *took_s)
    assert found == estimated_restart_s(told_s, took_s[::-1])


@given(told_s=SECONDS, usual_s=SECONDS, count=st.integers(2, 10), outlier_s=st.floats(1e4, 1e6))
def test_one_outlier_among_three_changes_nothing(told_s, usual_s, count, outlier_s):
    assert estimated_restart_s(told_s, [usual_s] * count + [outlier_s]) == usual_s
