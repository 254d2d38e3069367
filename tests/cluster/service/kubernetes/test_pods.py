"""Jobs whose processes are pods grow and shrink on an API that refuses, forgets and restarts.

The cluster is one of tests (`kubernetes_cluster.py`); no real Kubernetes was used.
"""

import collections
import contextlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_cluster import Cluster, expanded
from kubernetes_objects import Refused, Store, merged

from jaxgoodput.clock import FakeClock, SystemClock
from jaxgoodput.cluster.service.kubernetes import manifests
from jaxgoodput.cluster.service.kubernetes.api import ApiAccess, KubernetesApi
from jaxgoodput.cluster.service.kubernetes.follow import ObjectCopy
from jaxgoodput.cluster.service.kubernetes.manifests import ManifestOptions
from jaxgoodput.cluster.service.kubernetes.pod_jobs import (
    PodJobs,
    PodSettings,
    Workloads,
    jobs_as_pods,
)
from jaxgoodput.cluster.service.kubernetes.workload import (
    OF_JOB,
    OWNED_BY,
    CreateWorkload,
    DeleteWorkload,
    PodGroup,
    ResizeWorkload,
    WorkloadStyle,
    literal,
    name_of,
    num_pods,
    plan,
    resized,
    secret_of,
    workload,
)
from jaxgoodput.cluster.service.node.jobs import LaunchSettings
from jaxgoodput.cluster.service.wire import JobTask, NodeWork

SPACE = "training"
ELASTIC = frozenset({"ElasticJobSet"})
OPTIONS = ManifestOptions(
    name="cluster", namespace=SPACE, image="me/mine", jobs="pods", num_nodes=4, num_devices=2,
    kind="h200", resource="nvidia.com/gpu", queue="gpus",
)  # fmt: skip
STYLE = WorkloadStyle(
    agent="me", namespace=SPACE, template=manifests.pod_template(OPTIONS), resource="nvidia.com/gpu"
)

# Agents do not load JAX; a test's own process may have, which warns of every fork then.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def group(job="a", number=2, *, attempt=1, **changes):
    fields = {
        "num_devices": 1, "command": ("jaxgoodput", "agent"), "cwd": "/work", "secret": f"of {job}",
        "variables": (("KEY", "value"),),
    }  # fmt: skip
    return PodGroup(job=job, attempt=attempt, num_pods=number, **{**fields, **changes})


def style(elastic):
    fields = {name: getattr(STYLE, name) for name in ("agent", "namespace", "template", "resource")}
    return WorkloadStyle(**fields, elastic_jobset=elastic)


@contextlib.contextmanager
def installed(tmp_path, *, gates=ELASTIC, elastic_jobset=False, **settings):
    """A cluster with the objects of the agent, and what runs jobs there with the agent's own rights."""
    options = ManifestOptions(**{**vars(OPTIONS), "elastic_jobset": elastic_jobset})
    with Cluster(gates=gates, machines=3) as cluster:
        for one in manifests.pods(options):
            cluster.store.create(one["kind"], SPACE, one)
        credentials = cluster.account(tmp_path / "account", SPACE, "cluster-pods")
        template = tmp_path / "pod.json"
        template.write_text(json.dumps(manifests.pod_template(options)))
        made = PodSettings(
            template=template, resource=OPTIONS.resource, elastic_jobset=elastic_jobset,
            owner="cluster-pods", access=ApiAccess(url=cluster.url, credentials=credentials),
        )  # fmt: skip
        make, jobs = jobs_as_pods(made), []

        def start(clock=None) -> PodJobs:
            place = LaunchSettings(node="pool", host="127.0.0.1")
            jobs.append(make(place, clock or SystemClock(), None))
            return jobs[-1]

        try:
            yield cluster, start
        finally:
            cluster.stop_serving()  # ends the watches
            for one in jobs:
                one._workloads.close()
                for worker in one._workloads._workers:
                    assert worker.join(10.0)


def task(job, number, *, attempt=1, runs=True, each=1, **changes):
    fields = {
        "generation": 1, "command": ("python", "train.py", "$(HOME)"), "cwd": "/work", "workdir": None,
        "min_processes": 1, "max_processes": 8, "coordinates": False, "address": f"10.0.0.1:{attempt}",
        "secret": f"of {job}", "variables": (("KEY", "$(value)"),),
    }  # fmt: skip
    fields |= {"job": job, "devices": tuple(range(number * each)), "devices_per_process": each}
    return JobTask(**{**fields, "attempt": attempt, "runs": runs, **changes})


class Agent:
    """Does with `PodJobs` what a node's agent does."""

    def __init__(self, cluster, jobs):
        self.cluster, self.jobs, self._versions = cluster, jobs, itertools.count(1)

    def take(self, *tasks):
        self.jobs.take(NodeWork(node="pool", version=next(self._versions), tasks=tasks))
        self.jobs.look()

    def until(self, sizes, failed):
        """Wait until each job's pods are 0, 1, ... and no job has others."""

        def holds():
            self.jobs.look()
            with self.cluster.store.lock:
                found = {job: indices for job, indices in running(self.cluster).items() if indices}
            return found == {job: list(range(number)) for job, number in sizes.items() if number}

        self.cluster.until(holds, failed)


def workloads_of(cluster):
    """The job of each Indexed Job that ever was, by name."""
    found = {}
    for _, _, one in [
        *cluster.store.history,
        *((0, "", x) for x in cluster.store.objects.values()),
    ]:
        if one["kind"] in ("Job", "JobSet") and OF_JOB in one["metadata"].get("annotations", {}):
            name = one["metadata"]["name"]
            found[name] = found[f"{name}-processes-0"] = one["metadata"]["annotations"][OF_JOB]
    return found


def started(cluster):
    """Workload and index of each pod that was started."""
    return [(name, index) for what, name, index, _ in cluster.ledger.lines if what == "start"]


def running(cluster):
    """The indices of each job's running pods."""
    found = collections.defaultdict(list)
    for name, job in JOBS.items() | workloads_of(cluster).items():
        JOBS[name] = job
        found[job] += cluster.ledger.running(name)
    return {job: sorted(indices) for job, indices in found.items()}


JOBS: dict[str, str] = {}  # the jobs of workloads whose history was forgotten


@pytest.fixture(autouse=True)
def forget():
    JOBS.clear()


@pytest.mark.parametrize("elastic_jobset", [False, True])
def test_three_jobs_grow_and_shrink_a_machine_is_drained_and_the_api_restarts(
    elastic_jobset, tmp_path
):
    with installed(tmp_path, elastic_jobset=elastic_jobset) as (cluster, start):
        agent = Agent(cluster, start())
        told = collections.Counter()

        def become(failed, **sizes):
            """Give jobs other sizes, and note which indices have to be told their place."""
            for job, number in sizes.items():
                told.update((job, index) for index in range(now.get(job, 0), number))
                now[job] = number
            agent.take(*(task(job, number) for job, number in now.items()))
            agent.until(now, failed)

        now = {}
        become("they do not start", a=1, b=4, c=2)
        become("they do not grow and shrink", a=4, b=1, c=2)
        evicted = cluster.drain("m0")
        assert evicted
        told.update((workloads_of(cluster)[name], index) for name, index in evicted)
        cluster.until(lambda: len(started(cluster)) == sum(told.values()), "not all come back")
        agent.until(now, "what was drained does not come back")
        nodes = {pod["spec"]["nodeName"] for pod in cluster.store.of("Pod")}
        assert "m0" not in nodes

        cluster.stop_serving()
        running(cluster)  # notes the names
        for number in (3, 2):  # changes that the API hears of only once it answers again
            agent.take(task("a", number), task("b", number), task("c", number))
        now = dict(a=2, b=2, c=2)
        told.update([("b", 1)])
        cluster.store.forget()
        cluster.serve()
        agent.until(now, "they have not the size that was asked for last")
        cluster.until(
            lambda: any(code == 410 for _, _, code in cluster.requests), "nothing was forgotten"
        )

        become("one does not end", a=3, b=0, c=1)
        assert collections.Counter((JOBS[name], index) for name, index in started(cluster)) == told
        # Each pod was told the place of its job, and the words of its command as they were.
        for uid, words in cluster.ledger.words.items():
            assert words[-3:] == ["python", "train.py", "$(HOME)"]
            assert words[words.index("--rdzv-endpoint") + 1] == "10.0.0.1:1"
            environ = cluster.ledger.environ[uid]
            assert f"pool:{environ['JOB_COMPLETION_INDEX']}" in words
            assert environ["KEY"] == "$(value)"
            assert environ["JAXGOODPUT_SECRET"].startswith("of ")

        # Removal: Kubernetes deletes all that belongs to the Deployment, which is gone.
        for one in reversed(manifests.pods(OPTIONS)):
            api, plural = one["apiVersion"], one["kind"].lower().replace("policy", "policie") + "s"
            root = "/api/v1" if api == "v1" else f"/apis/{api}"
            name = one["metadata"]["name"]
            cluster.call("DELETE", f"{root}/namespaces/{SPACE}/{plural}/{name}")
        agent.take()
        cluster.until(lambda: {key[0] for key in cluster.store.objects} == {"Node"}, "more is left")
        agent.until({}, "pods are left")


def test_another_attempt_has_another_address_and_the_old_pods_end_first(tmp_path):
    with installed(tmp_path) as (cluster, start):
        agent = Agent(cluster, start())
        agent.take(task("a", 2))
        agent.until({"a": 2}, "it does not start")
        agent.take(task("a", 2, runs=False))
        agent.until({}, "its pods do not end")
        agent.take(task("a", 3, attempt=2, each=2))
        agent.until({"a": 3}, "it does not start again")
        last = [
            words[words.index("--rdzv-endpoint") + 1] for words in cluster.ledger.words.values()
        ]
        assert last == ["10.0.0.1:1"] * 2 + ["10.0.0.1:2"] * 3
        (pod, *_) = cluster.store.of("Pod")
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert len(cluster.store.of("Secret")) == 1
        (job,) = cluster.store.of("Job")
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        agent.take()
        agent.until({}, "its pods do not end")
        cluster.until(lambda: agent.jobs.is_idle, "the agent waits for ever")
        assert not cluster.store.of("Secret")


def test_an_agent_deletes_what_an_earlier_one_has_left(tmp_path):
    with installed(tmp_path) as (cluster, start):
        before = Agent(cluster, start())
        before.take(task("a", 2))
        before.until({"a": 2}, "it does not start")
        before.jobs._workloads.close()  # as if it were killed
        cluster.stop_serving()
        assert all(worker.join(10.0) for worker in before.jobs._workloads._workers)
        cluster.serve()
        after = Agent(cluster, start())
        after.take(task("a", 1, attempt=2))
        after.until({"a": 1}, "the pods of the first agent are left")
        cluster.until(lambda: len(cluster.store.of("Job")) == 1, "the first agent's job is left")


def test_a_workload_that_ends_while_its_job_goes_on_is_made_again(tmp_path):
    with installed(tmp_path) as (cluster, start):
        clock = FakeClock()
        agent = Agent(cluster, start(clock))
        agent.take(task("a", 2))
        agent.until({"a": 2}, "it does not start")
        with cluster.store.lock:
            for pod in cluster.store.of("Pod"):
                cluster.ledger.codes[pod["metadata"]["uid"]] = 0
        cluster.until(lambda: not cluster.store.of("Job"), "what has ended is left")
        clock.advance(60.0)  # not at once: its job may be about to end
        agent.until({"a": 2}, "the job has no pods")


def test_a_jobset_without_its_feature_gate_is_not_resized_and_its_user_is_told_why(tmp_path):
    with installed(tmp_path, gates=frozenset(), elastic_jobset=True) as (cluster, start):
        agent = Agent(cluster, start())
        agent.take(task("a", 2))
        agent.until({"a": 2}, "it does not start")
        agent.take(task("a", 3))
        told = []
        cluster.until(
            lambda: told.extend(text for _, _, text in agent.jobs.lines(2**16)) or told, "no word"
        )
        assert "ElasticJobSet" in told[0] and "leave out --elastic-jobset" in told[0]
        agent.until({"a": 2}, "it has changed")


def test_what_the_agent_may_not_do_is_told(tmp_path):
    with installed(tmp_path) as (cluster, start):
        cluster.store.remove(cluster.store.get("RoleBinding", SPACE, "cluster-pods"))
        with pytest.raises(ValueError, match="--owner cluster-pods.*403"):
            jobs_as_pods(
                PodSettings(
                    template=tmp_path / "pod.json", owner="cluster-pods",
                    access=ApiAccess(url=cluster.url, credentials=tmp_path / "account"),
                )
            )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"template": {"spec": {"containers": []}}}', "é"]
)
def test_a_template_that_is_none(text, tmp_path):
    (tmp_path / "token").write_text("x")
    (tmp_path / "namespace").write_text("n")
    (tmp_path / "pod.json").write_text(text)
    access = ApiAccess(url="http://127.0.0.1:1", credentials=tmp_path)
    with pytest.raises(ValueError, match=r"--pods .*manifests --jobs"):
        jobs_as_pods(PodSettings(template=tmp_path / "pod.json", access=access))
    with pytest.raises(ValueError, match="service account"):
        ApiAccess(credentials=tmp_path / "none")


# -- without a server ------------------------------------------------------------------------------


@pytest.mark.parametrize("elastic", [False, True])
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5), each=st.integers(1, 4))
def test_any_sizes_are_allowed_one_after_the_other(elastic, sizes, each):
    store, its = Store(ELASTIC), style(elastic)
    kind = "JobSet" if elastic else "Job"
    one = store.create(kind, SPACE, workload(its, group(number=sizes[0], num_devices=each)))
    store.create("Secret", SPACE, secret_of(its, group(), one["metadata"]["uid"]))
    for number in sizes[1:]:
        assert num_pods(one) != number or resized(one, number)["metadata"]
        stale, one = one, store.update(one, merged(one, resized(one, number)))
        assert num_pods(one) == number
        if one is not stale:
            with pytest.raises(Refused) as refused:  # it has changed since
                store.update(one, merged(one, resized(stale, number + 1)))
            assert refused.value.status["code"] == 409


def test_a_job_cannot_be_changed_otherwise():
    """The API of tests refuses what Kubernetes refuses."""
    store = Store(frozenset())
    one = store.create("Job", SPACE, workload(STYLE, group()))
    for patch in (
        {"completions": 3},
        {"parallelism": 3, "completions": 2, "completionMode": "NonIndexed"},
        {"template": {"spec": {"nodeName": "x"}}},
        {"parallelism": "3", "completions": "3"},
        {"parallel": 3},
    ):
        with pytest.raises(Refused) as refused:
            store.update(one, merged(one, {"spec": patch}))
        assert refused.value.status["code"] == 422


@given(
    st.lists(st.text(st.characters(codec="utf-8")) | st.sampled_from(["$(A)", "$$(A)", "$", "$$"]))
)
def test_the_words_of_a_command_arrive_as_they_are(words):
    assert expanded(list(literal(words)), {"A": "x"}) == words
    assert expanded(["$(A)"], {"A": "x"}) == ["x"]


JOB_NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


@settings(max_examples=30)
@given(job=JOB_NAMES, attempt=st.integers(1, 10**6))
def test_every_job_has_a_name_that_kubernetes_takes_and_no_other_has(job, attempt):
    store = Store(frozenset())
    names = {name_of(STYLE, group(job, attempt=attempt + i)) for i in (0, 1)}
    names.add(name_of(STYLE, group(job, attempt=attempt, secret="another job of this name")))
    assert len(names) == 3 and max(map(len, names)) <= 52  # it gets more for the names of pods
    store.create("Job", SPACE, workload(STYLE, group(job, attempt=attempt)))


STATES = st.sampled_from(["right", "small", "ended", "ending", "foreign", "none"])


@given(wanted=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5)), states=st.data())
def test_a_plan_leads_to_what_is_wanted_and_then_to_nothing(wanted, states):
    groups = {name: group(name, number) for name, number in wanted.items()}
    found = {}
    for name in "abcdef":
        state = states.draw(STATES)
        if state == "none":
            continue
        one = workload(STYLE, group(name, wanted.get(name, 1) + (state == "small")))
        one["metadata"] |= {"uid": name, "resourceVersion": "1", "name": name}
        if state == "ended":
            one["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        if state == "ending":
            one["metadata"]["deletionTimestamp"] = "now"
        if state == "foreign":
            one["metadata"]["labels"][OWNED_BY] = "earlier"
        found[name] = one
    for _ in range(4):
        changes = plan(groups, found, "me")
        assert len({change.name for change in changes}) == len(changes)
        found = {n: x for n, x in found.items() if "deletionTimestamp" not in x["metadata"]}
        for change in changes:
            match change:
                case CreateWorkload(name, one):
                    assert name not in found
                    found[name] = workload(STYLE, one)
                    found[name]["metadata"] |= {"uid": name, "resourceVersion": "1"}
                case ResizeWorkload(name, one, before):
                    found[name] = merged(before, resized(before, one.num_pods))
                case DeleteWorkload(name, uid, why):
                    assert why and found[name]["metadata"]["uid"] == uid
                    found[name]["metadata"]["deletionTimestamp"] = "now"
    assert plan(groups, found, "me") == []
    assert {name: num_pods(one) for name, one in found.items()} == wanted


def test_threads_end(tmp_path):
    with installed(tmp_path) as (cluster, start):
        jobs = start()
        assert isinstance(jobs._workloads, Workloads)
        assert isinstance(jobs._workloads._api, KubernetesApi)
        cluster.until(lambda: jobs.is_idle, "it is not idle")


def test_an_answer_that_is_older_than_what_the_watch_told_is_left_out():
    def made(version, uid="u", **more):
        return {"metadata": {"name": "x", "uid": uid, "resourceVersion": str(version), **more}}

    class Listed(KubernetesApi):
        """An API that lists one object."""

        def __init__(self):
            pass

        def get(self, path, **query):
            items = [made(5)]
            return {
                "kind": "JobList",
                "apiVersion": "batch/v1",
                "items": items,
                "metadata": {"resourceVersion": "5"},
            }

    copy: Any = ObjectCopy(Listed(), "/x", "", lambda: None)
    copy.put(made(9))
    assert copy.objects() is None, "nothing was listed yet"
    copy._list()
    copy.put(made(4))
    assert copy.objects()["x"]["metadata"]["resourceVersion"] == "5"
    copy.put(made(10))
    copy.put(made(6, uid="another"))  # made anew: its numbers say nothing of the one before
    assert copy.objects()["x"]["metadata"]["uid"] == "another"
    copy.remove("x")
    copy.put(made(11, deletionTimestamp="now"))
    assert copy.objects() == {}
