"""Tenants and budgets over simulated time: shares by weight, guarantees, limits, and used-up budgets."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxgoodput import cli
from jaxgoodput._fields.serial import pack, unpack
from jaxgoodput.cluster.published.sia import Sia
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.simulate.comparison import tenants_table
from jaxgoodput.cluster.simulate.conditions.tenants import deal_out, read_tenants, with_budgets
from jaxgoodput.cluster.simulate.generator import synthetic_applications
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth
from jaxgoodput.cluster.simulate.records import Result
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.cluster.simulate.simulator import simulate, uniform_cluster
from jaxgoodput.specs import Tenant

TRUTH = ModelTruth(synthetic_applications({"t4": 1.0}))
STEPS_PER_S = 1.0 / (0.02 + 8e-4 * 128)  # of vision-small on one device at its base batch of 128
RULES = Settings(
    round_s=None, rounding=False, growth=None, restart_s=30.0, min_gap_s=60.0, max_gap_s=600.0
)
FOUR = uniform_cluster("t4", 1, 4)


def stream(tenant, load, hours, *, start_h=0.0, each_h=2.0, seed=0, cluster=FOUR):
    """Return jobs of about `each_h` hours that want `load` times the devices of the cluster."""
    rng = np.random.default_rng([seed, sum(map(ord, tenant))])
    devices = sum(node.num_devices for node in cluster.nodes)
    at_s = 3600.0 * np.sort(start_h + rng.random(int(load * devices * hours / each_h)) * hours)
    return [
        TraceJob(
            id=f"{tenant}{i}",
            submit_s=float(submit_s),
            application="vision-small",
            global_batch_size=128,
            num_steps=max(int(3600 * each_h * rng.lognormal(-0.32, 0.8) * STEPS_PER_S), 1),
            tenant=tenant,
        )
        for i, submit_s in enumerate(at_s)
    ]


def had(result, tenants, until_s=math.inf):
    """Return the device-seconds of these tenants' jobs up to a moment."""
    return sum(
        max(min(stay.end_s, until_s) - stay.start_s, 0.0) * stay.num_devices
        for job in result.jobs
        if job.tenant in tenants
        for stay in job.intervals
    )


def at_once(result, tenants):
    """Return the most devices that these tenants had at once."""
    change = sorted(
        (moment, devices)
        for job in result.jobs
        if job.tenant in tenants
        for stay in job.intervals
        for moment, devices in (
            (stay.start_s, stay.num_devices),
            (stay.end_s, -stay.num_devices),
        )
    )
    return int(np.cumsum([devices for _, devices in change]).max(initial=0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_tenants_that_are_always_busy_have_what_their_weights_say_over_a_day(seed):
    cluster = dataclasses.replace(FOUR, tenants=(Tenant(name="a"), Tenant(name="b", weight=2.0)))
    jobs = stream("a", 0.8, 24.0, seed=seed) + stream("b", 1.3, 24.0, seed=seed)
    result = simulate(jobs, cluster, Goodput(), TRUTH, settings=RULES)
    day = 24 * 3600.0
    ratio = had(result, "b", day) / had(result, "a", day)
    assert 1.8 <= ratio <= 2.2
    a, b = result.tenants
    assert a.device_s == pytest.approx(had(result, "a"), rel=1e-6)
    assert 1.0 < b.deserved_s / a.deserved_s <= 2.0  # by weight while both have jobs
    assert a.num_jobs + b.num_jobs == len(jobs)


@pytest.mark.slow
def test_a_guarantee_holds_one_decision_after_it_is_asked_for():
    tenants = (
        Tenant(name="lab", guaranteed=3),
        Tenant(name="a", parent="lab", guaranteed=1),
        Tenant(name="b", parent="lab", guaranteed=1),
    )
    cluster = dataclasses.replace(FOUR, tenants=tenants)
    jobs = stream("d", 3.0, 3.0) + stream("a", 1.0, 1.0, start_h=1.0, each_h=0.5)
    jobs += stream("b", 1.0, 1.0, start_h=1.5, each_h=0.5)
    result = simulate(jobs, cluster, Goodput(), TRUTH, settings=RULES)
    for its, sure in (("a", 1), ("b", 1), ("ab", 3)):
        mine = [job for job in result.jobs if job.tenant in its]
        for now_s in np.arange(0.0, 3 * 3600.0, 60.0):
            there = [
                j for j in mine if j.submit_s <= now_s - RULES.min_gap_s and j.finish_s > now_s
            ]
            stays = [s for j in mine for s in j.intervals if s.start_s <= now_s < s.end_s]
            devices = sum(stay.num_devices for stay in stays)
            if len(there) > len(stays):  # one waits
                ended = any(abs(j.finish_s - now_s) <= RULES.min_gap_s for j in result.jobs)
                assert devices >= sure or ended, (its, now_s)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Goodput(), Sia(growth=None)], ids=["goodput", "sia"])
def test_limits_and_hourly_budgets_hold_all_the_time(policy):
    tenants = (
        Tenant(name="lab", limit=3),
        Tenant(name="a", parent="lab"),
        Tenant(name="b", parent="lab", budget_per_hour=1.0),
    )
    cluster = dataclasses.replace(FOUR, tenants=tenants, price_per_hour={"t4": 0.5})
    jobs = [job for name in "abd" for job in stream(name, 0.6, 4.0, each_h=0.5)]
    result = simulate(jobs, cluster, policy, TRUTH, settings=RULES)
    assert at_once(result, "ab") <= 3 and at_once(result, "b") <= 2
    assert at_once(result, "abd") == 4
    told = unpack(json.loads(json.dumps(pack(result))), Result)
    assert [t.name for t in told.tenants] == ["lab", "a", "b", "d"]
    assert told.tenants[0].cost == pytest.approx(had(result, "ab") / 3600 * 0.5, rel=1e-6)


def test_no_job_spends_more_than_its_budget_by_more_than_one_interval():
    cluster = dataclasses.replace(FOUR, price_per_hour={"t4": 2.0})
    jobs = with_budgets(stream("a", 1.2, 3.0, each_h=1.0), {"all": 1.5})
    for settings in (RULES, dataclasses.replace(RULES, work_left="told")):
        result = simulate(jobs, cluster, Goodput(), TRUTH, settings=settings)
        over = RULES.max_gap_s / 3600 * 2.0 * 4
        assert all((job.cost or 0.0) <= 1.5 + over for job in result.jobs)
        assert any(job.out_of_money for job in result.jobs)
        assert all(job.cancelled == job.out_of_money for job in result.jobs)
        assert all((job.cost or 0.0) >= 1.5 for job in result.jobs if job.out_of_money)


def test_without_tenants_nothing_is_counted():
    jobs = stream("a", 0.5, 1.0, each_h=0.3)
    bare = simulate(jobs, FOUR, Goodput(), TRUTH, settings=RULES)
    other = dataclasses.replace(RULES, usage_half_life_s=60.0)
    again = simulate(jobs, FOUR, Goodput(), TRUTH, settings=other)
    assert bare.jobs == again.jobs and bare.tenants == () and tenants_table([bare]) == ""


def test_jobs_are_dealt_out_by_their_parts():
    tenants, part = read_tenants("lab:guaranteed=4,lab/a:limit=9:jobs=3,lab/b:weight=2:budget=1.5")
    assert tenants[0] == Tenant(name="lab", guaranteed=4)
    assert tenants[2] == Tenant(name="b", parent="lab", weight=2.0, budget_per_hour=1.5)
    assert part == {"lab": 0.0, "a": 3.0, "b": 1.0}
    jobs = deal_out(stream("x", 100.0, 5.0), part, 0)
    share = np.mean([job.tenant == "a" for job in jobs])
    assert {job.tenant for job in jobs} == {"a", "b"} and share == pytest.approx(0.75, abs=0.05)
    assert jobs == deal_out(stream("x", 100.0, 5.0), part, 0)


SMALL = ("--workload", "synthetic:6", "--cluster", "t4:1x4", "--hours", "0.5")


@pytest.mark.slow
def test_the_command_shares_a_cluster(capsys, tmp_path):
    code = cli.main(
        ["simulate", "--policy", "goodput,max-min", *SMALL, "--out", str(tmp_path),
         "--tenants", "lab:guaranteed=2,lab/a:guaranteed=2,lab/b,c:limit=4:budget=9",
         "--prices", "t4=0.5", "--budgets", "all=20,vision-small=0.01"]
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0 and "deserved" in said and "out of money" in said
    names = [line.split()[1] for line in said.splitlines() if line.startswith("max-min ")]
    assert names[-4:] == ["lab", "a", "b", "c"]
    body = json.loads((tmp_path / "results.json").read_text())
    results = [unpack(one, Result) for one in body["results"]]
    for result in results:
        assert all(job.cost is not None and job.tenant in "abc" for job in result.jobs)


WRONG = {
    "words": (["--tenants", "a:limit=many"], "guaranteed=8,lab/team"),
    "half a device": (["--tenants", "a:limit=0.5"], "whole numbers"),
    "unknown key": (["--tenants", "a:size=2"], "size=2"),
    "a tree that cannot be": (["--tenants", "p/a"], "the parent 'p'"),
    "a guarantee above the limit": (["--tenants", "a:guaranteed=3:limit=2"], "limited to 2"),
    "more than there is": (["--tenants", "a:guaranteed=5"], "more than the 4 devices"),
    "nobody's jobs": (["--tenants", "a:jobs=0"], "no tenant has jobs"),
    "a budget without prices": (["--budgets", "all=3"], "Add --prices"),
    "an hourly budget without prices": (["--tenants", "a:budget=3"], "price_per_hour"),
    "a price of nothing there": (["--prices", "h100=3"], "no 'h100'"),
    "a price below 0": (["--prices", "t4=-1"], "finite number, 0 or more"),
    "a budget of nobody": (
        ["--prices", "t4=1", "--budgets", "nobody=3"],
        "'nobody' is neither a job",
    ),
    "a limit that a job exceeds": (
        ["--tenants", "a:limit=0", "--policy", "max-min"],
        "more than the limit of tenant 'a', 0 devices",
    ),
    "a baseline": (["--tenants", "a", "--policy", "static"], "does not support tenants"),
}


@pytest.mark.parametrize("arguments, says", WRONG.values(), ids=WRONG)
def test_bad_tenants_are_named(capsys, arguments, says):
    code = cli.main(["simulate", "--policy", "goodput", *SMALL, *arguments])
    found = capsys.readouterr()
    assert code == 2 and says in found.err and not found.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked, names",
    [
        ([], {"goodput", "sia", "pollux", "tiresias"}),
        (["--tenants", "a:weight=2,b"], {"goodput", "sia", "pollux"}),
        (["--cluster", "t4:1x2,rtx:1x2"], {"goodput", "sia", "pollux"}),
    ],
)
def test_by_default_the_policies_that_know_the_cluster_are_compared(capsys, asked, names):
    assert (
        cli.main(
            [
                "simulate",
                "--workload",
                "synthetic:3",
                "--hours",
                "0.2",
                "--cluster",
                "t4:1x4",
                *asked,
            ]
        )
        == 0
    )
    table = capsys.readouterr().out
    known = {"goodput", "sia", "pollux", "tiresias"}
    assert {name for name in known if f"\n{name} " in f"\n{table}"} == names
