"""Nodes that jobs report: kept apart for a term, from all jobs if several agree, and remembered."""

import dataclasses
import io
import re
from typing import Any

import pytest
import services
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.client import RequestRefused
from jaxgoodput.cluster.scheduler import Goodput
from jaxgoodput.cluster.service import terminal
from jaxgoodput.cluster.service.planning import decide
from jaxgoodput.cluster.service.planning.follow import needs_plan
from jaxgoodput.cluster.service.record import commands, faults
from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.record.events import (
    JobSubmitted,
    JournalEntry,
    NodeJoined,
    PlanMade,
    from_text,
    to_text,
)
from jaxgoodput.cluster.service.record.journal import ClusterJournal
from jaxgoodput.cluster.service.record.state import State, step
from jaxgoodput.cluster.service.web import metrics, page, show
from jaxgoodput.cluster.service.wire import (
    ClusterShown,
    JobExplanation,
    JobShown,
    NodeReport,
    NodeWork,
    Receipt,
    Report,
    Reports,
)
from jaxgoodput.specs import Allocation, Node

FIRST_S = 100.0
OPERATOR, RED = Caller("default", "operator"), Caller("red", "user")
RULES = decide.PlanRules(named=PolicyEntry(policy=Goodput(), says="", mode="adaptive"))
WHY = "in 8 windows in a row it was much slower than the others"


class Cluster:
    """A state of five nodes with one device each, and what happens to it at which time."""

    def __init__(self, jobs="abc", **spec):
        self.state, self.entries = State(), list[JournalEntry]()
        nodes = [Node(name=f"n{i}", kind="cpu", num_devices=1) for i in range(5)]
        self.happen(0.0, *(NodeJoined(node=node, instance="one") for node in nodes))
        for name in jobs:
            made = services.submission(name, **{"max_devices": 4, **spec})
            self.happen(0.0, JobSubmitted(submission=made, secret="s"))

    def happen(self, at_s, *events):
        for event in events:
            entry = JournalEntry(self.state.seq + 1, at_s, 1e9 + at_s, event)
            self.entries.append(entry)
            self.state = step(self.state, entry)

    def give(self, at_s=0.0, **nodes):
        """Give jobs the devices of nodes, the number of each as a letter."""
        changes = {
            job: Allocation(
                devices={f"n{i}": (0,) for i in its},
                generation=self.state.jobs[job].allocation.generation + 1,
            )
            for job, its in nodes.items()
        }
        self.happen(at_s, PlanMade(changes=changes, solved_s=at_s, next_solve_s=at_s + 60.0))

    def report(self, at_s, by, of, fault="slow", **changes) -> Any:
        """What the report of a job (`by`) about a node (`of`) leads to; `changes` are fields of it."""
        entry = self.state.jobs[by]
        ratio = 5.1 if fault == "slow" else None
        fields: dict[str, Any] = {"job": by, "attempt": entry.attempt, "node": of, "fault": fault}
        said = NodeReport(**{**fields, "why": WHY, "slow_ratio": ratio, **changes})
        found = commands.report_nodes(self.state, entry.home or "n0", (said,), at_s, FIRST_S)
        self.happen(at_s, *found.events)
        return found.events

    def avoided(self, at_s, job):
        return decide.avoided_by(self.state.faults, job, at_s)

    def plan(self, at_s):
        found = decide.plan(self.state, at_s, RULES)
        assert found is not None
        planned, reasoned = decide.as_events(self.state, found, at_s)
        self.happen(at_s, planned, *([reasoned] if reasoned.reasons else []))
        return found

    def nodes_of(self, job):
        return "".join(sorted(name[1:] for name in self.state.jobs[job].allocation.devices))


def running(**nodes):
    made = Cluster("".join(nodes))
    made.give(**nodes)
    return made


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 30.0, 90.0, 250.0, 3700.0, 60_000.0]),
            st.sampled_from("abc"),
            st.sampled_from(["n0", "n1"]),
            st.sampled_from(["slow", "slow", "stuck", "unreachable"]),
        ),
        max_size=12,
    )
)
def test_terms_end_grow_and_hold_for_all_if_two_jobs_agree(happens):
    cluster = running(a="01", b="01", c="01")  # what no plan would do, and no matter here
    now_s, last = 0.0, dict[Any, Any]()
    for after_s, job, node, fault in happens:
        now_s += after_s
        known = last.get((node, job))
        events = cluster.report(now_s, job, node, fault)
        if known is not None and now_s < known.until_s and known.fault != "slow":
            assert not events, "it says nothing new"
        if events:
            (event,) = events
            term_s = event.until_s - now_s
            assert FIRST_S <= term_s <= faults.LONGEST_S
            if known is not None and now_s < known.until_s + faults.FORGET_S:
                before_s = known.until_s - last[node, job, "at"]
                assert term_s == pytest.approx(min(2 * before_s, faults.LONGEST_S))
            else:
                assert term_s == pytest.approx(FIRST_S)
            agree = [
                other
                for other in "abc"
                if other != job
                and (node, other) in last
                and now_s - last[node, other, "at"] <= faults.WINDOW_S
            ]
            assert (event.all_until_s is not None) == bool(agree)
            last[node, job], last[node, job, "at"] = event, now_s
        for one in "abc":
            avoided = cluster.avoided(now_s, one)
            for name in ("n0", "n1"):
                own = last.get((name, one))
                others = [x for (n, *_), x in last.items() if n == name and hasattr(x, "job")]
                is_own = own is not None and now_s < own.until_s
                is_all = any(now_s < (x.all_until_s or 0.0) for x in others)
                assert (name in avoided) == (is_own or is_all)
                if name in avoided:
                    is_broken = own is not None and own.fault != "slow"
                    is_broken &= own is not None and now_s < max(own.until_s, own.all_until_s or 0)
                    assert avoided[name].is_usable != is_broken, "others make no job wait"
    end_s = now_s + 2 * faults.LONGEST_S
    assert not any(cluster.avoided(end_s, job) for job in "abc")
    assert not faults.in_force(cluster.state.faults, end_s)
    again = State()
    for entry in cluster.entries:
        read = from_text(type(entry.event).__name__, to_text(entry.event))
        again = step(again, dataclasses.replace(entry, event=read))
    assert again == cluster.state, "the journal has all of it"


@pytest.mark.parametrize(
    "changes",
    [{"attempt": 0}, {"attempt": 7}, {"node": "n4"}, {"node": "elsewhere"}, {"job": "x"}],
    ids=str,
)
def test_reports_of_other_attempts_and_of_nodes_that_the_job_does_not_hold_do_not_count(changes):
    cluster = running(a="0123")
    assert not cluster.report(10.0, "a", "n2", **changes)
    assert cluster.report(10.0, "a", "n2")


def test_a_report_from_another_node_than_the_coordinators_does_not_count():
    cluster = running(a="0123")
    said = NodeReport(job="a", attempt=1, node="n2", fault="slow", why=WHY)
    assert commands.report_nodes(cluster.state, "n3", (said,), 1.0, FIRST_S).events == ()


def test_two_jobs_that_report_in_one_request_agree():
    cluster = Cluster("ab")
    cluster.give(a="02", b="02")
    said = [NodeReport(job=j, attempt=1, node="n2", fault="slow", why=WHY) for j in "ab"]
    events: Any = commands.report_nodes(cluster.state, "n0", (*said, *said), 1.0, FIRST_S).events
    first, second = events
    assert (first.all_until_s, second.all_until_s) == (None, 1.0 + FIRST_S)


def test_a_slow_node_is_replaced_for_its_term_and_then_free_for_the_job_again():
    cluster = running(a="0123")
    (event,) = cluster.report(50.0, "a", "n2")
    assert needs_plan(cluster.state, event)
    planned = cluster.plan(51.0)
    assert cluster.nodes_of("a") == "0134" and "n4 replaces n2" in planned.reasons["a"]
    said = decide.explained(cluster.state, "a", 60.0, RULES).message
    assert f"n2 is kept apart from it for 1 min 30 s, because it is slow: {WHY}" in said
    # The node that replaced it goes: the slow one is better than none, but not if it is to be left out.
    cluster.happen(90.0, *commands.change_node(cluster.state, "n4", "down", "x").events)
    cluster.plan(91.0)
    assert cluster.nodes_of("a") == "013"
    assert cluster.plan(92.0).next_solve_s <= 50.0 + FIRST_S
    cluster.plan(50.0 + FIRST_S)
    assert cluster.nodes_of("a") == "0123", "its term is over"
    assert "n2" not in decide.explained(cluster.state, "a", 160.0, RULES).message


def test_a_node_that_two_jobs_report_is_avoided_by_a_third_one_if_it_can():
    cluster = Cluster("ab", max_devices=2)
    cluster.give(a="02", b="1")
    cluster.report(10.0, "a", "n2")
    assert not cluster.avoided(11.0, "b")
    cluster.give(12.0, a="03")
    cluster.give(13.0, b="12")
    cluster.report(20.0, "b", "n2")
    cluster.plan(21.0)
    made = services.submission("c", max_devices=1)
    cluster.happen(22.0, JobSubmitted(submission=made, secret="s"))
    cluster.plan(30.0)
    assert cluster.nodes_of("c") and "2" not in "".join(map(cluster.nodes_of, "abc"))
    for name in ("n0", "n1", "n3", "n4"):
        cluster.happen(40.0, *commands.change_node(cluster.state, name, "down", "x").events)
    cluster.plan(50.0)
    assert "2" in "".join(map(cluster.nodes_of, "abc")), "slow is better than nothing"


def test_an_operator_takes_a_reported_node_back():
    cluster = running(a="0123")
    cluster.report(10.0, "a", "n2", "stuck")
    assert cluster.avoided(11.0, "a")
    cluster.happen(12.0, *commands.change_node(cluster.state, "n2", "up", "x").events)
    assert not cluster.avoided(13.0, "a")
    assert commands.change_node(cluster.state, "n2", "up", "x").events == ()
    (event,) = cluster.report(14.0, "a", "n2", "stuck")
    assert event.until_s == 14.0 + FIRST_S, "it starts afresh"


def test_a_silent_node_that_comes_back_is_still_kept_apart():
    cluster = running(a="0123")
    cluster.report(10.0, "a", "n2")
    changed = commands.change_node(cluster.state, "n2", "down", "nothing was heard", silent=True)
    cluster.happen(11.0, *changed.events)
    cluster.happen(12.0, *commands.revive(cluster.state, "n2").events)
    assert "n2" in cluster.avoided(13.0, "a")


def test_a_restart_of_the_service_forgets_nothing_and_an_older_journal_opens(tmp_path):
    cluster = running(a="0123", b="4")
    cluster.report(10.0, "a", "n2")
    cluster.report(20.0, "a", "n3", "unreachable")
    journal = ClusterJournal(tmp_path)
    for entry in cluster.entries:
        journal.append([entry.event], entry.at_s, entry.wall)
    journal.close()
    state = ClusterJournal(tmp_path).replay()[0]
    avoided = decide.avoided_by(state.faults, "a", 21.0)
    assert {name: one.is_usable for name, one in avoided.items()} == {"n2": True, "n3": False}
    assert state.num_faults == {"slow": 1, "unreachable": 1}
    old: Any = from_text("NodeChanged", '{"name": "n0", "state": "up", "why": "", "silent": false}')
    assert old.forgets is False


def test_the_only_node_of_its_kind_stays_usable():
    cluster = running(a="0")
    for name in sorted(set(cluster.state.nodes) - {"n0"}):
        cluster.happen(5.0, *commands.change_node(cluster.state, name, "down", "x").events)
    cluster.report(10.0, "a", "n0", "stuck")
    cluster.plan(20.0)
    assert cluster.nodes_of("a") == "0"


def test_it_is_shown_why_and_for_how_long_and_not_whose_it_is_to_others():
    cluster = running(a="0123", b="4")
    cluster.report(10.0, "a", "n2")
    shown = show.cluster(OPERATOR, cluster.state, 40.0, lambda _: 0.0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal._nodes_table(shown))
    said = "slow (5.1 times the median) by a, kept apart from it for 1 min 10 s"
    assert said in console.export_text() and said in page.inner(
        OPERATOR, cluster.state, 40.0, page.Links()
    )
    jobs = cluster.state.jobs
    (fault,) = show.job(OPERATOR, cluster.state, jobs["a"], 40.0, whole=True).apart
    assert (fault.node, fault.why, fault.until_s) == ("n2", WHY, 10.0 + FIRST_S)
    assert not show.job(OPERATOR, cluster.state, jobs["b"], 40.0, whole=True).apart
    of_others = show.cluster(RED, cluster.state, 40.0, lambda _: 0.0)
    assert {one.job for node in of_others.nodes for one in node.faults} == {show.OTHERS}
    text = metrics.text(cluster.state, 40.0, metrics.RequestMetrics(), {}, {})
    assert 'jaxgoodput_node_reports_total{fault="slow"} 1' in text
    assert "jaxgoodput_nodes_kept_apart 1" in text
    assert "jaxgoodput_nodes_kept_apart 0" in metrics.text(
        cluster.state, 200.0, metrics.RequestMetrics(), {}, {}
    )


def told(client, home, *reports, coordinators=()):
    body = Reports(instance="one", coordinators=tuple(coordinators), nodes=tuple(reports))
    client.call("POST", "nodes", home, "reports", body=body, type_=Receipt)


@pytest.mark.slow
@pytest.mark.multihost
def test_a_service_replaces_a_reported_node_also_after_it_was_killed(tmp_path):
    options = ("--local", "0", "--min-gap-s", "0.2", "--max-gap-s", "1", "--silent-s", "600")
    with services.Service(tmp_path / "service", *options) as service:
        client = service.client()
        names = [f"n{i}" for i in range(5)]
        for name in names:
            services.join(client, name, devices=1)
        services.submit(client, services.submission("a", min_devices=4, max_devices=4))

        def nodes_of_a():
            return set(service.job("a").devices)

        first = service.until(nodes_of_a, "it gets no devices")
        home = str(service.job("a").home)
        slow = min(first - {home})
        (task,) = services.work(client, home).tasks
        heard = Report(job="a", attempt=task.attempt, address="127.0.0.1:9")
        said = NodeReport(
            job="a", attempt=task.attempt, node=slow, fault="slow", why=WHY, slow_ratio=5.1
        )
        told(client, home, said, coordinators=[heard])
        wanted = set(names) - {slow}
        service.until(lambda: nodes_of_a() == wanted, "it is not replaced")
        job = service.job("a")
        assert job.home == home and service.job("a").num_changes == 1
        service.kill()
        service.start()
        client = service.client()
        assert set(client.call("GET", "jobs", "a", type_=JobShown).devices) == wanted
        (fault,) = client.call("GET", "jobs", "a", type_=JobShown).apart
        assert (fault.node, fault.fault, fault.slow_ratio) == (slow, "slow", 5.1)
        assert re.search("slow .5.1 times", " ".join(service.run("status", "--once").split()))
        explained = client.call("GET", "jobs", "a", "explain", type_=JobExplanation, wait_s=60.0)
        assert f"{slow} is kept apart from it for" in explained.message
        assert WHY in explained.message
        # Once the reported node is taken back, it may replace another one.
        gone = min(wanted - {home})
        service.run("drain", "--undo", slow)
        client.call("POST", "nodes", gone, "down", changes=True, type_=Receipt)
        service.until(lambda: nodes_of_a() == set(names) - {gone}, "it does not come back")
        shown = client.call("GET", "nodes", type_=ClusterShown)
        assert not [node.node.name for node in shown.nodes if node.faults]
        with pytest.raises(RequestRefused):
            body = {"instance": "one", "nodes": [{**dataclasses.asdict(said), "fault": "lazy"}]}
            client.call("POST", "nodes", home, "reports", body=body, type_=Receipt)
        assert isinstance(services.work(client, home), NodeWork)
