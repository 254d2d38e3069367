"""What a coordinator reports of hosts to the program that started it, which decides about them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rendezvous import FAST, SLOW, arrived, run, trained, tried, windows

from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness
from jaxgoodput.launcher.elastic.fitness import Check, HostReport

REPORTS = dataclasses.replace(FAST, reports_hosts=True)


def faults(actions):
    return [(x.decision.host, x.fault) for x in actions if isinstance(x, ev.Tell) and x.fault]


@pytest.mark.parametrize("least", [1, 3])
def test_a_slow_host_is_reported_and_stays_also_if_the_job_needs_it(least):
    machine = arrived(dataclasses.replace(REPORTS, least=least), "a", "b", "c")
    machine, actions = windows(machine, SLOW, 3)
    assert not faults(actions)
    machine, actions = windows(machine, SLOW, 1)
    assert faults(actions) == [("c", "slow")]
    (told,) = [x.decision for x in actions if isinstance(x, ev.Tell)]
    assert told.decision == "slow" and told.numbers["slow_ratio"] == pytest.approx(4 / 1.05)
    assert not machine.is_left_out("c") and not machine.members["c"].leaves
    machine, actions = windows(machine, SLOW, 3)
    assert not faults(actions), "not in every window"
    machine, actions = windows(machine, SLOW, 1)
    assert faults(actions) == [("c", "slow")], "again while it lasts"


def test_all_processes_of_a_slow_machine_are_reported_together():
    machine = arrived(dataclasses.replace(REPORTS, most=6), *"abcdef")
    speeds = {"a": 1.0, "b": 1.1, "c": 1.0, "d": 1.1, "e": 5.0, "f": 5.5}
    machine, actions = windows(machine, speeds, 4)
    assert faults(actions) == [("e", "slow"), ("f", "slow")]


def test_slow_hosts_that_hold_up_no_step_are_not_reported():
    machine = arrived(REPORTS, "a", "b", "c")
    machine, actions = windows(machine, SLOW, 20, is_leased=True, part=1)
    assert not faults(actions)


def test_a_single_check_says_nothing_of_the_speed_while_it_trains():
    machine = arrived(REPORTS, "a", "b")
    machine, _ = run(machine, ev.HostArrived("c"))
    slow = Check(product_s=9.0, round_trip_s=1e-3, send_s=1.0)
    machine, actions = run(machine, ev.HostExamined("c", slow))
    assert ev.Admit("c") in actions and not faults(actions)


def test_a_host_that_computes_wrong_numbers_is_reported():
    machine = arrived(REPORTS, "a", "b")
    machine, _ = run(machine, ev.HostArrived("c"))
    machine, actions = run(machine, ev.HostExamined("c", Check(failure="it computes wrong")))
    assert faults(actions) == [("c", "faulty")]


def test_a_host_that_others_do_not_reach_is_left_out_and_reported():
    machine = trained(REPORTS, "a", "b", "c")
    machine, _ = run(machine, *(ev.Beat(n, 1, 3) for n in "abc"), now_s=105.0)
    machine, actions = run(machine, tried("b", "c", reached="a"), now_s=106.0, links=True)
    assert faults(actions) == [("c", "unreachable")]


def test_a_host_without_which_the_others_are_too_few_is_reported_from_time_to_time():
    machine = trained(dataclasses.replace(REPORTS, least=2, most=2), "a", "b")
    machine, _ = run(machine, *(ev.Beat(n, 1, 3) for n in "ab"), now_s=105.0)
    machine, actions = run(machine, tried("b", "a"), now_s=106.0, links=True)
    found = faults(actions)
    assert [fault for _, fault in found] == ["unreachable"]
    for now_s in range(107, 150):
        machine, actions = run(machine, ev.Tick(), now_s=float(now_s))
        assert not faults(actions)
        machine, _ = run(machine, tried("b", "a"), now_s=now_s + 0.5)


def test_a_host_on_arrival_is_reported_only_if_it_reaches_nobody_again():
    machine = trained(REPORTS, "a", "b")
    cut = Check(unreached="a (no answer)")
    for time, wanted in ((110.0, []), (130.0, [("c", "unreachable")])):
        machine, _ = run(machine, ev.HostArrived("c"), now_s=time)
        machine, _ = run(machine, ev.Tick(), now_s=time + 4.0)
        machine, actions = run(machine, ev.HostExamined("c", cut), now_s=time + 5.0)
        assert faults(actions) == wanted


def test_a_stuck_device_is_reported():
    machine = trained(REPORTS, "a", "b")
    beats = ev.Beat("a", 1, 3, None, 50.0, True), ev.Beat("b", 1, 3, None, 0.0, False, 50.0)
    machine, actions = run(machine, *beats, now_s=105.0)
    assert faults(actions) == [("a", "stuck")]
    assert [x.member for x in actions if isinstance(x, ev.Kill)] == ["a"]


REPORT = st.builds(
    HostReport,
    host=st.text(max_size=20),
    fault=st.sampled_from(["slow", "unreachable", "stuck", "faulty"]),
    why=st.text(max_size=50),
    numbers=st.dictionaries(st.text(max_size=5), st.floats(0, 1e9), max_size=3),
)


@given(REPORT)
def test_a_report_is_one_line_and_is_read_as_it_was_written(report):
    line = f"jaxgoodput: {fitness.to_line(report)}"
    assert len(line.splitlines()) == 1 and line.isascii()
    assert fitness.from_line(line) == report


@pytest.mark.parametrize(
    "line",
    ["", "jaxgoodput: a has joined", "the script says: jaxgoodput: host report {}", "host report"],
)
def test_other_lines_are_no_reports(line):
    assert fitness.from_line(line) is None


def test_a_line_that_is_cut_is_refused():
    report = HostReport(host="a", fault="slow", why="b")
    with pytest.raises(ValueError):
        fitness.from_line(f"jaxgoodput: {fitness.to_line(report)[:-9]}")
