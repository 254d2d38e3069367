"""`--explain` and `--what-if` report what the simulation decided, and refuse wrong questions."""

import re

import pytest

from jaxgoodput import cli
from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.simulate.questions import explanation, read_job, read_moment, what_if
from jaxgoodput.cluster.simulate.rules import read_settings
from jaxgoodput.cluster.simulate.scenario import read_scenario
from jaxgoodput.cluster.simulate.simulator import decision_at, simulate

SHORT = "vision-small-0010"
SMALL = ["--workload", "synthetic:12", "--hours", "0.5", "--seed", "3", "--cluster", "2x4"]


@pytest.fixture(scope="module")
def scenario():
    return read_scenario("synthetic:12", "2x4", hours=0.5, seed=3)


@pytest.fixture(scope="module")
def rules():
    return read_settings("events", "synthetic", seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goodput", "static"])
def test_a_decision_is_the_one_that_the_simulation_took(scenario, rules, name):
    named = catalogue()[name]
    given = []

    class Noting:
        def __call__(self, jobs, cluster, now_s, /):
            found = named.policy(jobs, cluster, now_s)
            given.append((now_s, {j: dict(a.devices) for j, a in found.allocations.items()}))
            return found

    at_s = 1500.0
    settings = type(rules)(**{**vars(rules), "mode": named.mode})
    world = scenario.jobs, scenario.cluster
    simulate(*world, Noting(), scenario.truth, settings=settings)
    found, _ = decision_at(*world, named.policy, scenario.truth, at_s, settings=settings)
    now_s, expected = max((one for one in given if one[0] <= at_s), key=lambda one: one[0])
    assert found.now_s == now_s
    has = {job: dict(a.devices) for job, a in found.plan.allocations.items() if a.devices}
    assert has == {job: devices for job, devices in expected.items() if devices}


def test_an_explanation_says_what_a_job_has_and_who_has_the_rest(scenario, rules):
    named, at_s = catalogue()["goodput"], 1500.0
    settings = type(rules)(**{**vars(rules), "mode": named.mode})
    found, _ = decision_at(
        scenario.jobs, scenario.cluster, named.policy, scenario.truth, at_s, settings=settings
    )
    job = next(j.spec.id for j in found.jobs if found.plan.allocations[j.spec.id].devices)
    said = explanation(scenario, "goodput", named, rules, f"{job}@25m")
    assert f"why:  {found.plan.reasons[job]}" in said and f"> {job}" in said
    held = sum(a.num_devices for a in found.plan.allocations.values())
    assert f"{held} of 8 devices are taken" in said
    for other, allocation in found.plan.allocations.items():
        assert bool(re.search(rf"^(> )?{other} ", said, re.M)) == bool(allocation.devices)
    assert "price" in said and "who would change" in said


def test_what_if_counts_those_that_change(scenario, rules):
    application = scenario.jobs[0].application
    said = what_if(
        scenario, "goodput", catalogue()["goodput"], rules, f"{application},weight=4@25m"
    )
    changed = re.search(r"(\d+) of (\d+) jobs would change; together they lose (-?[\d.]+)", said)
    assert changed is not None
    rows = [line for line in said.splitlines() if re.match(r"\S+-\d{4} ", line)]
    assert len(rows) == int(changed[1]) > 0
    assert "gets: " in said and "of its best speed" in said


def test_questions_from_the_command_line(capsys, scenario):
    job = scenario.jobs[0].id
    at = f"{scenario.jobs[0].submit_s + 30:.0f}"
    assert cli.main(["simulate", *SMALL, "--explain", f"{job}@{at}"]) == 0
    assert f"goodput at {int(at):,} s: {job}" in capsys.readouterr().out
    assert cli.main(["simulate", *SMALL, "--policy", "sia", "--what-if", "speech:2@600"]) == 0
    assert capsys.readouterr().out.startswith("sia at 600 s: if 'what-if' (speech, adaptive)")


def test_times_and_jobs_from_text():
    assert read_moment("a@b@2d", "--explain") == ("a@b", 172800.0)
    job = read_job("bert:8,mode=rigid,batch=64,weight=2,id=me", 5.0)
    assert (job.id, job.application, job.num_devices, job.submit_s) == ("me", "bert", 8, 5.0)
    assert (job.mode, job.global_batch_size, job.weight) == ("rigid", 64, 2.0)


WRONG = {
    "no time": (["--explain", "x"], "expected JOB@TIME"),
    "time of words": (["--what-if", "bert@noon"], "expected SPEC@TIME"),
    "no such job": (["--explain", "x@1h"], "no job 'x'"),
    "before the first": (["--explain", "x@0"], "Name a later time"),
    "no such option": (["--what-if", "speech,colour=red@600"], "expected APPLICATION"),
    "no devices": (["--what-if", "speech:0@600"], "expected APPLICATION"),
    "no such mode": (["--what-if", "speech,mode=fast@600"], "expected APPLICATION"),
    "no such application": (["--what-if", "gpt@600"], "'gpt'"),
    "no batch": (["--what-if", "speech,mode=rigid@600"], "global batch size"),
    "a folder": (["--what-if", "speech@600", "--out", "there"], "only printed"),
}


@pytest.mark.parametrize("arguments, says", WRONG.values(), ids=WRONG)
def test_wrong_questions_are_named(capsys, arguments, says):
    assert cli.main(["simulate", *SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("jaxgoodput: ")


@pytest.mark.slow
def test_a_job_that_is_gone_or_has_not_come(capsys, scenario):
    first, last = scenario.jobs[0].id, scenario.jobs[-1].id
    assert cli.main(["simulate", *SMALL, "--explain", f"{first}@200h"]) == 2
    assert "all 12 jobs were done by" in capsys.readouterr().err
    assert cli.main(["simulate", *SMALL, "--explain", f"{SHORT}@3h"]) == 2
    assert f"'{SHORT}' was done by" in capsys.readouterr().err
    early = f"{scenario.jobs[0].submit_s + 1:.0f}"
    assert cli.main(["simulate", *SMALL, "--explain", f"{last}@{early}"]) == 2
    assert "arrives only at" in capsys.readouterr().err
