"""Laws of costs and inputs: the defaults change nothing, and costs add up."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Shuffle, cluster, truth, workload

from jaxgoodput import cli
from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.published.baselines import Static
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import Decision
from jaxgoodput.cluster.simulate.conditions.inputs import Inputs, fed, read_inputs
from jaxgoodput.cluster.simulate.conditions.restarts import (
    RestartCosts,
    SharedStorage,
    Storage,
    change_of,
)
from jaxgoodput.cluster.simulate.generator import synthetic_applications
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth
from jaxgoodput.cluster.simulate.rules import read_costs, read_settings
from jaxgoodput.cluster.simulate.settings import RESTART_BASE_S, Settings
from jaxgoodput.cluster.simulate.simulator import simulate
from jaxgoodput.specs import Allocation, Node, Shape

RIGID = Settings(mode="rigid", round_s=None, rounding=False, restart_s=10.0)
ONE = (TraceJob(id="x", submit_s=0.0, application="toy", num_devices=1, global_batch_size=64),)


def run(rules, policy=None, jobs=ONE, where=None):
    policy = Static() if policy is None else policy
    where = cluster("a") if where is None else where
    return simulate(jobs, where, policy, truth(), settings=rules, clock=FakeClock())


def test_the_kinds_of_change():
    a, wide, other = Shape("a", 1, 2), Shape("a", 2, 2), Shape("b", 1, 2)
    assert change_of(None, False, a) == "start"
    assert change_of(a, False, other) == "resume"
    assert [change_of(a, True, s) for s in (a, wide, other)] == ["move", "shape", "kind"]


@dataclasses.dataclass(frozen=True)
class Path:
    """A policy that moves its one job along these placements, one every 40 s, and then leaves it there."""

    places: tuple[tuple[tuple[str, int], ...], ...]

    def __call__(self, jobs, cluster, now_s, /):
        here = dict(self.places[min(int(now_s // 40), len(self.places) - 1)])
        given = Allocation(devices={node: tuple(range(n)) for node, n in here.items()})
        return Decision(allocations={job.spec.id: given for job in jobs})


# start, move, shape, pause, resume, kind (compiled before), move
PLACES = Path(tuple(map(tuple, (
    [("a0", 1)], [("a1", 1)], [("a0", 1), ("a1", 1)], [], [("b0", 1)], [("a0", 1)], [("a1", 1)],
))))  # fmt: skip


def along(**costs):
    job = dataclasses.replace(ONE[0], mode="elastic")
    rules = dataclasses.replace(
        RIGID, min_gap_s=20.0, max_gap_s=20.0, costs=RestartCosts(**costs) if costs else None
    )
    (found,) = run(rules, PLACES, (job,), cluster()).jobs
    return found.finish_s


@pytest.mark.slow
def test_each_kind_of_change_has_its_cost():
    base_s = along()
    assert along(start=1.0) == base_s
    # Seconds on one device of a0 or a1 are worth the same; elsewhere a second has another worth.
    assert along(start=0.0) == pytest.approx(base_s - 10)
    assert along(move=1.5) == pytest.approx(base_s + 2 * 5)
    assert along(kind=2.0) == pytest.approx(base_s + 10)
    assert along(resume=2.0) != base_s and along(shape=2.0) != base_s
    # Three shapes are new; the return to one device of `a` compiles nothing.
    first = along(start=0.0, shape=0.0, resume=0.0, compile_s=10.0)
    assert first == pytest.approx(base_s)


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=6), st.floats(0.0, 3.0))
@settings(max_examples=30, deadline=None)
def test_storage_is_shared_evenly_and_never_idle(sizes, later_s):
    traffic = SharedStorage(bytes_per_s=10.0)
    for i, size in enumerate(sizes):
        traffic.join(f"j{i}", size, 0.0)
    alone = traffic.left_s(0.0)
    assert max(alone.values()) == pytest.approx(sum(sizes) / 10)
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    assert [alone[f"j{i}"] for i in order] == sorted(alone.values())
    # Reading the state in between changes nothing; a job that joins makes the others wait.
    after = traffic.left_s(later_s)
    expected = {job: s - later_s for job, s in alone.items() if s > later_s + 1e-6}
    assert {j: after[j] for j in expected} == pytest.approx(expected, abs=1e-6)
    traffic.join("late", 50.0, later_s)
    together = traffic.left_s(later_s)
    assert all(together[job] >= after[job] - 1e-9 for job in expected)
    traffic.leave("late", later_s)
    assert traffic.left_s(later_s) == after


def test_those_that_restart_together_wait_for_one_another():
    at_once = tuple(dataclasses.replace(ONE[0], id=f"j{i}") for i in range(4))
    moves = Path(((("a0", 1),), (("a1", 1),)))

    class Each:
        def __call__(self, jobs, cluster, now_s, /):
            node = "a0" if now_s < 40 else "a1"
            each = {j.spec.id: {node: (int(j.spec.id[1:]),)} for j in jobs}
            return Decision(allocations={j: Allocation(devices=d) for j, d in each.items()})

    def ends(policy, jobs, bytes_per_s):
        storage = Storage(bytes_per_s=bytes_per_s, state_bytes={"toy": 50.0})
        rules = dataclasses.replace(
            RIGID, min_gap_s=20.0, max_gap_s=20.0, costs=RestartCosts(storage=storage)
        )
        return [job.finish_s for job in run(rules, policy, jobs).jobs]

    (fast,) = ends(moves, ONE, 1e12)
    (slow,) = ends(moves, ONE, 10.0)
    assert slow == pytest.approx(fast + 2 * 50 / 10)  # written and read
    assert ends(Each(), at_once, 10.0) == pytest.approx([fast + 4 * 2 * 50 / 10] * 4)


def test_a_job_is_no_faster_than_it_is_fed():
    (free,) = run(RIGID).jobs
    rate = truth().job(ONE[0], RIGID, 0)
    rate.place("a", (1,))
    wanted = rate.samples_per_s()
    enough = Inputs(cpus_per_node=8.0, samples_per_cpu_s={"toy": wanted / 2})  # 2 per device
    assert run(dataclasses.replace(RIGID, inputs=enough)).jobs == (free,)
    half = Inputs(cpus_per_node=8.0, samples_per_cpu_s={"toy": wanted / 4})
    (hungry,) = run(dataclasses.replace(RIGID, inputs=half)).jobs
    assert hungry.finish_s - 10 == pytest.approx(2 * (free.finish_s - 10))
    others = Inputs(cpus_per_node=1e-6, samples_per_cpu_s={"tiny": 1.0})
    assert run(dataclasses.replace(RIGID, inputs=others)).jobs == (free,)


def test_processors_are_shared_in_proportion_to_what_jobs_ask_for():
    nodes = {n: Node(name=n, kind="a", num_devices=4) for n in ("p", "q")}
    wide = ("wide", "toy", Allocation(devices={"p": (0, 1), "q": (0, 1)}))
    beside = ("beside", "tiny", Allocation(devices={"q": (2, 3)}))
    asked = Inputs(
        cpus_per_node={"a": 12.0}, samples_per_cpu_s=1.0, cpus_per_device={"toy": 6.0, "tiny": 3.0}
    )
    assert fed(asked, nodes, [wide]) == {"wide": 24.0}
    # Jobs request 18 processors of q, so all get two thirds, and the wide job waits for q.
    both = fed(asked, nodes, [wide, beside])
    assert both == pytest.approx({"wide": 16.0, "beside": 4.0})
    own = Inputs(cpus_per_node=12.0, samples_per_cpu_s=1.0)
    assert fed(own, nodes, [wide, beside]) == {"wide": 12.0, "beside": 6.0}


def test_a_model_knows_the_samples_behind_its_goodput():
    made = ModelTruth(synthetic_applications({"t4": 1.0}))
    name = next(iter(made.applications))
    for mode, batch in (("adaptive", None), ("elastic", 256)):
        trace = dataclasses.replace(
            ONE[0], application=name, mode=mode, global_batch_size=batch, num_devices=2
        )
        job = made.job(trace, Settings(), 0)
        job.place("t4", (2,))
        before = job.save()
        job.advance(1.0)
        done = job.save() - before
        assert 0 < done <= job.samples_per_s() * (1 + 1e-9)


def test_defaults_change_nothing():
    jobs, rules = workload(5), Settings(mode="rigid", round_s=None)
    plain = run(rules, Shuffle(2), jobs, cluster())
    assert (
        run(dataclasses.replace(rules, costs=RestartCosts()), Shuffle(2), jobs, cluster()) == plain
    )


WRONG = [
    ("--costs", "pause=1", "'pause' is not one of start"),
    ("--costs", "resume=-1", "at least 0"),
    ("--costs", "storage=0", "above 0"),
    ("--costs", "move", "NAME=NUMBER"),
    ("--inputs", "llm=3", "Add cpus=NUMBER"),
    ("--inputs", "cpus=0,vision-small=1", "above 0"),
    ("--inputs", "cpus=8,gpt=1", "no job runs 'gpt'"),
]


@pytest.mark.parametrize(("option", "text", "says"), WRONG)
def test_what_cannot_be_is_refused(capsys, option, text, says):
    arguments = ["--workload", "synthetic:5", "--hours", "0.2", "--policy", "static", option, text]
    assert cli.main(["simulate", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_costs_and_inputs_from_text():
    costs = read_costs("start=0.5,compile=60,storage=2")
    assert (costs.start, costs.move, costs.compile_s) == (0.5, 1.0, 60.0)
    assert costs.storage is not None and costs.storage.bytes_per_s == 2 * 2**30
    assert costs.bytes("resume", "bert") == 1.3e9 and costs.bytes("start", "bert") == 0.0
    assert read_inputs("cpus=32,bert=50,per-device=4").cpus_per_device == 4.0
    told = read_settings("realistic", "pollux", costs="storage=2")
    assert told.restart_of("bert") == RESTART_BASE_S < told.told_restart_of("bert")
