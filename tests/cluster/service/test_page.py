"""The page in a real browser: it shows who has what, and keeps itself up to date."""

import dataclasses
import itertools
import math
import re
import shutil
import subprocess
import threading
import unittest.mock
import urllib.request

import pytest
import services
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.record.events import (
    CoordinatorEnded,
    JobCancelled,
    JobSubmitted,
    JournalEntry,
    NodeJoined,
    PlanMade,
)
from jaxgoodput.cluster.service.record.state import State, step
from jaxgoodput.cluster.service.web import metrics, page, show
from jaxgoodput.cluster.service.wire import JobShown
from jaxgoodput.specs import Allocation, Node

OPERATOR = Caller("default", "operator")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


def dom(url, folder, *, wait_ms):
    """The page's elements after its script has run for so long, of the browser's own, faster, time."""
    done = subprocess.run(
        [
            BROWSER, *QUIET, f"--user-data-dir={folder}", f"--virtual-time-budget={wait_ms}",
            "--dump-dom", url,
        ],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )  # fmt: skip
    return done.stdout


def numbers(service):
    """What Prometheus would read."""
    url = f"http://127.0.0.1:{service.port}/metrics"
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {service.token}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return answer.read().decode()


def plan_of(service, *names):
    """Wait until these jobs have devices."""
    service.until(lambda: all(service.job(name).num_devices for name in names), "no plan")


@pytest.mark.multihost
@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path):
    if not BROWSER:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    link = "http://tensorboard.example:6006"
    options = ("--local", "0", "--min-gap-s", "0.5", "--silent-s", "3600", "--tensorboard", link)
    with services.Service(tmp_path / "service", *options) as service:
        client = service.client()
        services.join(client, "n0", 2)
        for name in ("first", "second", "third"):
            made = services.submission(name, min_devices=1, max_devices=1)
            made = services.with_workdir(made, f"/runs/{name}")
            client.call("POST", "jobs", body=made, type_=JobShown, changes=True)
        plan_of(service, "first", "second")
        where = f"http://x:{service.token}@127.0.0.1:{service.port}/"
        text = dom(where, tmp_path / "profile", wait_ms=1000)
        parts = ("Nodes", "Running", "Waiting", "Devices over time", "Ended")
        places = [text.index(f"<h2>{part}</h2>") for part in parts]
        assert places == sorted(places)
        running, waiting = text[places[1] : places[2]], text[places[2] : places[3]]
        assert "</span>first</td>" in running and "</span>second</td>" in running
        assert "</span>third</td>" in waiting
        assert re.search(r"<b>2</b> of <b>2</b> devices on 1 node are in use", text)
        assert re.search(r'title="first">[01]</span>', text)
        assert len(re.findall(r'<rect class="held"', text)) == 2  # one bar a device
        assert f"{link}/?runFilter=first#timeseries" in text
        picture = tmp_path / "page.png"
        subprocess.run(
            [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1000",
             f"--screenshot={picture}", where],
            check=True, timeout=120, capture_output=True,
        )  # fmt: skip
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        with image.open(picture) as opened:
            colours = {page.colour(number) for number in range(3)}
            seen = {
                f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in opened.convert("RGB").getcolors(10**6)
            }
        assert colours <= seen
        client.close()


@pytest.mark.multihost
@pytest.mark.slow
def test_the_script_shows_what_has_changed_since(tmp_path):
    if not BROWSER:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    with services.Service(tmp_path / "service", "--local", "0") as service:
        where = f"http://x:{service.token}@127.0.0.1:{service.port}/"
        client, failed = service.client(), []

        def join_when_the_script_has_asked():
            try:
                service.until(lambda: 'route="/page",status="200"' in numbers(service), "no script")
                services.join(client, "newcomer", 2)
            except BaseException as error:
                failed.append(error)

        later = threading.Thread(target=join_when_the_script_has_asked)
        later.start()
        text = dom(where, tmp_path / "profile", wait_ms=200_000)
        later.join()
        client.close()
    assert not failed
    assert ">newcomer<" in text


def after(*happens, state=None, at_s=0.0):
    """The state after some events."""
    state = state or State()
    for event in happens:
        state = step(state, JournalEntry(state.seq + 1, at_s, 0.0, event))
    return state


def submitted(*names):
    return [JobSubmitted(submission=services.submission(name), secret="s") for name in names]


def painted(state, now_s=0.0):
    """The colour of each job that the page shows, by its name beside the dot."""
    text = page.inner(OPERATOR, state, now_s, page.Links())
    found = re.findall(r'class=dot style="background:(#[0-9a-f]{6})"></span>([^<]+)</td>', text)
    assert len({name for _, name in found}) == len(found)
    return {name: colour for colour, name in found}


# The service is asked for a job, a job ends, or time passes.
HAPPENS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 12)),
        st.tuples(st.just("pass"), st.sampled_from((1.0, 900.0, 3000.0, 9000.0))),
    ),
    min_size=20,
    max_size=40,
)


@unittest.mock.patch.object(page, "MOST_ENDED", 3)
@settings(max_examples=20, deadline=None)
@given(happens=HAPPENS)
def test_jobs_that_are_shown_together_never_share_a_colour(happens):
    state, now_s, known = State(), 0.0, {}
    for what, number in happens:
        name = f"j{number}"
        entry = state.jobs.get(name)
        if what == "pass":
            now_s += number
        elif what == "submit" and (entry is None or entry.is_over):
            known.pop(name, None)
            state = after(*submitted(name), state=state, at_s=now_s)
        elif what == "cancel" and entry is not None and not entry.is_over:
            state = after(JobCancelled(job=name), state=state, at_s=now_s)
        found = painted(state, now_s)
        assert len(set(found.values())) == len(found)
        assert found == painted(state, now_s)
        for name, colour in found.items():  # a job keeps its colour
            assert known.setdefault(name, colour) == colour


@given(numbers=st.lists(st.integers(0, 5), max_size=12))
def test_jobs_whose_numbers_are_the_same_get_different_colours_as_well(numbers):
    names = [f"j{index}" for index in range(len(numbers))]
    jobs = [
        dataclasses.replace(entry, colour=number)
        for entry, number in zip(after(*submitted(*names)).jobs.values(), numbers, strict=True)
    ]
    found = page.colours(jobs)
    assert list(sorted(found)) == sorted(names) and len(set(found.values())) == len(names)
    if names:
        assert found["j0"] == page.colour(numbers[0])


def seen(colour):
    """A colour in CIELAB, in which distances are as large as they look."""
    shares = (part / 255 for part in bytes.fromhex(colour[1:]))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    rows = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8729))
    sums = (sum(a * b for a, b in zip(row, linear, strict=True)) for row in rows)
    x, y, z = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in sums)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_all_colours_differ_and_the_first_can_be_told_apart():
    assert len({page.colour(number) for number in range(14_000)}) == 14_000
    first = [seen(colour) for colour in page.FIRST_COLOURS]
    for number, least in ((6, 40.0), (12, 25.0)):  # 2.3 can just be told apart
        for one, other in itertools.combinations(first[:number], 2):
            assert math.dist(one, other) > least


def test_what_the_page_leaves_out_is_counted():
    names = [f"j{number}" for number in range(250)]
    cancelled = [JobCancelled(job=name) for name in names[:50]]
    state = after(*submitted(*names), *cancelled)
    state = after(
        *(
            NodeJoined(node=Node(name=f"n{i}", kind="cpu", num_devices=100), instance="one")
            for i in range(130)
        ),
        state=state,
    )
    running = {
        name: Allocation(devices={f"n{i}": (0,)}, generation=1)
        for i, name in enumerate(names[50:170])
    }
    state = after(PlanMade(changes=running, solved_s=0.0, next_solve_s=1.0), state=state)
    text = page.inner(OPERATOR, state, 1.0, page.Links())
    head, *sections = re.split("<h2>", text)
    says = {part.partition("</h2>")[0]: part for part in sections}
    assert "and 2 more nodes" in says["Nodes"] and "and 36 more" in says["Nodes"]
    assert "and 20 more jobs" in says["Running"] and says["Running"].count("<tr>") == 101
    assert "more jobs" not in says["Waiting"] and says["Waiting"].count("<tr>") == 81
    assert "and 30 more jobs" in says["Ended"]
    assert "more devices" in says["Devices over time"]


def test_the_page_and_the_status_say_what_is_left_of_cpus_and_memory():
    node = Node(name="n0", kind="cpu", num_devices=4, cpus=10.0, memory_gib=64.0)
    needs = {"cpus_per_device": 2.5, "memory_gib_per_device": 8.0}
    state = after(
        NodeJoined(node=node, instance="one"),
        NodeJoined(node=Node(name="n1", kind="cpu", num_devices=4), instance="one"),
        JobSubmitted(submission=services.submission("a", **needs), secret="s"),
    )
    given = {"a": Allocation(devices={"n0": (0, 1, 2)}, generation=1)}
    state = after(PlanMade(changes=given, solved_s=0.0, next_solve_s=1.0), state=state)
    text = page.inner(OPERATOR, state, 1.0, page.Links())
    assert text.count(" left") == 1 and "2.5 CPUs and 40 GiB of memory left" in text
    shown = show.cluster(OPERATOR, state, 1.0, lambda name: 0.0)
    assert [(n.cpus_left, n.memory_gib_left) for n in shown.nodes] == [(2.5, 40.0), (None, None)]
    job = show.job(OPERATOR, state, state.jobs["a"], 1.0)
    assert {name: getattr(job, name) for name in needs} == needs


def test_metrics_say_what_an_autoscaler_needs_and_count_for_ever():
    parser = pytest.importorskip("prometheus_client.parser")

    def numbers(state, silent_s):
        text = metrics.text(state, 1.0, metrics.RequestMetrics(), silent_s, {"plans_total": 3.0})
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }

    jobs = {"a": (2, 4), "b": (3, 8), "c": (1, 2)}
    state = after(
        *(
            JobSubmitted(
                submission=services.submission(name, min_devices=least, max_devices=most),
                secret="s",
            )
            for name, (least, most) in jobs.items()
        ),
        NodeJoined(node=Node(name="n0", kind='a"b\\c', num_devices=4), instance="one"),
    )

    def give(state, **devices):
        changes = {
            name: Allocation(
                devices={"n0": local} if local else {},
                generation=state.jobs[name].allocation.generation + 1,
            )
            for name, local in devices.items()
        }
        return after(PlanMade(changes=changes, solved_s=0.0, next_solve_s=1.0), state=state)

    state = give(state, a=(0, 1))
    found = numbers(state, {"n0": 2.5})
    assert found["jaxgoodput_devices_wanted", "min"] == 6
    assert found["jaxgoodput_devices_wanted", "max"] == 14
    assert found["jaxgoodput_devices_waited_for",] == 4
    assert found["jaxgoodput_node_heartbeat_age_seconds", "n0"] == 2.5
    assert found["jaxgoodput_devices", 'a"b\\c', "up"] == 4
    assert found["jaxgoodput_job_resizes_total",] == found["jaxgoodput_job_restarts_total",] == 0
    state = give(state, a=(0, 1, 2))  # resized
    state = give(state, a=())  # paused
    state = give(state, a=(0, 1))  # resumed: other devices, and another coordinator
    state = after(CoordinatorEnded(job="a", attempt=2, code=-9), state=state)  # restarted
    found = numbers(state, {})
    assert found["jaxgoodput_job_resizes_total",] == 2
    assert found["jaxgoodput_job_restarts_total",] == 2
    for name in jobs:
        state = after(JobCancelled(job=name), state=state)
    state = after(*submitted("a"), state=state)  # forgets the first job of this name
    found = numbers(state, {})
    assert found["jaxgoodput_job_resizes_total",] == found["jaxgoodput_job_restarts_total",] == 2
    assert found["jaxgoodput_devices_waited_for",] == found["jaxgoodput_devices_wanted", "min"] == 1


def test_the_page_of_an_empty_cluster_says_what_to_do():
    text = page.whole(Caller("default", "operator"), State(), 5.0, page.Links())
    assert "jaxgoodput node --scheduler URL" in text
    assert text.count("<p class=dim>None") == 3
