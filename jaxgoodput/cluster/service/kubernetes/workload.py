"""What a job is in Kubernetes: an Indexed Job, or a JobSet around one, whose number of pods changes.

The functions are pure: `plan` compares the pods that jobs need with the workloads that exist and says what to
do. Each attempt of a job's coordinator has a workload of its own, because the address in a pod's command can
never change.
"""

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OWNED_BY = "jaxgoodput/agent"  # label: the agent process that made a workload
OF_JOB = "jaxgoodput/job"  # annotation: the job's name
MOST_FAILURES = 1_000_000  # in effect no limit: the service decides whether a job has failed
REPLICATED = "processes"  # the only replicated job of a JobSet
SECRET_KEY = "JAXGOODPUT_SECRET"
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
_LONGEST_SLUG = 30  # of a job's name in the names of its objects, which Kubernetes extends


@dataclass(frozen=True, kw_only=True)
class PodGroup:
    """The pods that a job needs now, all with the same command."""

    job: str
    attempt: int
    """The number of the coordinator that the pods join."""
    num_pods: int
    num_devices: int
    """Devices of each pod."""
    command: tuple[str, ...]
    """The command of a pod. Kubernetes puts its index in for $(JOB_COMPLETION_INDEX)."""
    cwd: str
    secret: str = field(repr=False)
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class WorkloadStyle:
    """What all workloads of one agent have in common."""

    agent: str
    """A random name of the agent process. Workloads of another one are left over, and are deleted."""
    namespace: str
    template: Mapping[str, Any]
    """A PodTemplate, whose labels and annotations the workloads get, too."""
    resource: str | None
    """The resource whose amount in the template is for one device; None if there is none."""
    elastic_jobset: bool = False
    """Whether workloads are JobSets, not Jobs."""
    owner: Mapping[str, str] | None = None
    """The object, as in `ownerReferences`, with which Kubernetes deletes all workloads."""

    @property
    def collection(self) -> str:
        """The path of the workloads in the API."""
        group = "jobset.x-k8s.io/v1alpha2" if self.elastic_jobset else "batch/v1"
        kind = "jobsets" if self.elastic_jobset else "jobs"
        return f"/apis/{group}/namespaces/{self.namespace}/{kind}"

    @property
    def secrets(self) -> str:
        """The path of Secrets in the API."""
        return f"/api/v1/namespaces/{self.namespace}/secrets"


@dataclass(frozen=True)
class CreateWorkload:
    """The decision to create the pods of a job."""

    name: str
    group: PodGroup


@dataclass(frozen=True)
class ResizeWorkload:
    """The decision to change the number of pods. `found` is the workload as it was last seen."""

    name: str
    group: PodGroup
    found: Mapping[str, Any]


@dataclass(frozen=True)
class DeleteWorkload:
    """The decision to delete a workload with its pods, which then save and end."""

    name: str
    uid: str
    why: str


WorkloadChange = CreateWorkload | ResizeWorkload | DeleteWorkload


def literal(words: Sequence[str]) -> tuple[str, ...]:
    """Return words of a command so that Kubernetes leaves them as they are: it replaces $(NAME) and $$.

    >>> literal(("echo", "$(HOME) $5"))
    ('echo', '$$(HOME) $$5')
    """
    return tuple(word.replace("$", "$$") for word in words)


def name_of(style: WorkloadStyle, group: PodGroup) -> str:
    """Return the name of a job's workload, which no other job, attempt or agent uses.

    >>> style = WorkloadStyle(agent="a", namespace="n", template={}, resource=None)
    >>> group = dict(num_pods=1, num_devices=1, command=(), cwd="/", secret="s")
    >>> name_of(style, PodGroup(job="Bert_large.v2", attempt=3, **group))
    'bert-large-v2-3-9ce325497f'
    """
    slug = re.sub("[^a-z0-9]+", "-", group.job.lower())[:_LONGEST_SLUG].strip("-")
    if not slug[:1].isalpha():
        slug = f"job-{slug}"
    which = "\n".join((style.agent, group.job, group.secret, str(group.attempt)))
    return f"{slug}-{group.attempt}-{hashlib.sha256(which.encode()).hexdigest()[:10]}"


def plan(
    wanted: Mapping[str, PodGroup], found: Mapping[str, Mapping[str, Any]], agent: str
) -> Sequence[WorkloadChange]:
    """Return what turns the workloads that exist into the wanted ones, by name.

    A workload that is being deleted is left alone until it is gone. One that has ended although its job goes
    on is deleted, so that the next plan creates it again.
    """
    changes: list[WorkloadChange] = []
    for name, one in sorted(found.items()):
        group = wanted.get(name)
        if "deletionTimestamp" in one["metadata"]:
            continue
        uid = one["metadata"]["uid"]
        if one["metadata"]["labels"].get(OWNED_BY) != agent:
            changes.append(DeleteWorkload(name, uid, "it is left over from an earlier agent"))
        elif group is None:
            changes.append(DeleteWorkload(name, uid, "its job no longer needs it"))
        elif why := _end(one):
            changes.append(DeleteWorkload(name, uid, why))
        elif num_pods(one) != group.num_pods:
            changes.append(ResizeWorkload(name, group, one))
    for name, group in sorted(wanted.items()):
        if name not in found:
            changes.append(CreateWorkload(name, group))
    return changes


def num_pods(workload: Mapping[str, Any]) -> int:
    """Return how many pods a workload has, or will soon have."""
    return _indexed(workload)["completions"]


def resized(workload: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the merge patch that gives a workload another number of pods.

    `parallelism` and `completions` may only change together. The patch names the version that it changes, so
    that it is refused if the workload has changed meanwhile.
    """
    size = {"parallelism": number, "completions": number}
    patch: dict[str, Any] = {"metadata": _only(workload["metadata"], "resourceVersion")}
    if workload["kind"] == "Job":
        return patch | {"spec": size}
    jobs = copy.deepcopy(workload["spec"]["replicatedJobs"])  # a merge patch replaces lists
    jobs[0]["template"]["spec"] |= size
    return patch | {"spec": {"replicatedJobs": jobs}}


def workload(style: WorkloadStyle, group: PodGroup) -> dict[str, Any]:
    """Return the workload of a job, as it is created."""
    name = name_of(style, group)
    given = style.template.get("metadata", {})
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": style.namespace,
        "labels": {**given.get("labels", {}), OWNED_BY: style.agent},
        "annotations": {**given.get("annotations", {}), OF_JOB: group.job},
    }
    if style.owner is not None:
        metadata["ownerReferences"] = [dict(style.owner)]
    job = {
        "completionMode": "Indexed",
        "parallelism": group.num_pods,
        "completions": group.num_pods,
        "backoffLimit": MOST_FAILURES,
        # A pod that is evicted has not failed.
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [dict(_DISRUPTED)]}]
        },
        # An index has its next pod only after the last one has ended, and so never two.
        "podReplacementPolicy": "Failed",
        "template": _pod_template(style, group, name),
    }
    if not style.elastic_jobset:
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}
    replicated = {"name": REPLICATED, "replicas": 1, "template": {"spec": job}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"replicatedJobs": [replicated]},
    }


def secret_of(style: WorkloadStyle, group: PodGroup, uid: str) -> dict[str, Any]:
    """Return the Secret of a workload: what its pods need to join, and the job's variables.

    Kubernetes deletes it with the workload, whose `uid` it names.
    """
    name = name_of(style, group)
    version = "jobset.x-k8s.io/v1alpha2" if style.elastic_jobset else "batch/v1"
    kind = "JobSet" if style.elastic_jobset else "Job"
    owner = {"apiVersion": version, "kind": kind, "name": name, "uid": uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": style.namespace, "ownerReferences": [owner]},
        "stringData": {**dict(group.variables), SECRET_KEY: group.secret},
    }


def _pod_template(style: WorkloadStyle, group: PodGroup, secret: str) -> dict[str, Any]:
    template = copy.deepcopy(dict(style.template["template"]))
    container = template["spec"]["containers"][0]
    container["command"] = list(group.command)
    # A variable of the template would win over the job's own in `envFrom`.
    own = {SECRET_KEY, *dict(group.variables)}
    container["env"] = [one for one in container.get("env", ()) if one["name"] not in own]
    container["workingDir"] = group.cwd
    container["envFrom"] = [{"secretRef": {"name": secret}}]
    if style.resource is not None:
        amounts = container["resources"]
        for part in ("requests", "limits"):
            each = int(amounts[part][style.resource])
            amounts[part][style.resource] = str(each * group.num_devices)
    return template


def _indexed(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `spec` of the Indexed Job in a workload."""
    if workload["kind"] == "Job":
        return workload["spec"]
    return workload["spec"]["replicatedJobs"][0]["template"]["spec"]


def _end(workload: Mapping[str, Any]) -> str:
    """Return why a workload can no longer give its job all pods; an empty text if it can."""
    for condition in workload.get("status", {}).get("conditions", ()):
        if (
            condition["type"] in ("Complete", "Failed", "Completed")
            and condition["status"] == "True"
        ):
            return f"it has ended ({condition['type']}) while its job goes on"
    return ""


def _only(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: values[name]}
