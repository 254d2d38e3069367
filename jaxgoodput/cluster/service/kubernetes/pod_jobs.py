"""Jobs whose processes are pods: one agent stands for all devices, and Kubernetes finds the machines.

The coordinators of jobs are children of the agent, as on any node. The processes of a job are the pods of one
workload (`workload.py`), which grows and shrinks with the job's devices: pods with the highest indices leave.
"""

import pathlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from absl import logging

from jaxgoodput._fields.serial import parse
from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.kubernetes.api import (
    CONFLICT,
    NOT_FOUND,
    ApiAccess,
    ApiRefused,
    ApiUnreachable,
    KubernetesApi,
)
from jaxgoodput.cluster.service.kubernetes.follow import ObjectCopy
from jaxgoodput.cluster.service.kubernetes.workload import (
    CreateWorkload,
    DeleteWorkload,
    PodGroup,
    ResizeWorkload,
    WorkloadChange,
    WorkloadStyle,
    literal,
    name_of,
    plan,
    resized,
    secret_of,
    workload,
)
from jaxgoodput.cluster.service.node.jobs import Jobs, LaunchSettings, NodeJob
from jaxgoodput.launcher.elastic.fitness import HostReport

LOOK_S = 1.0
AGAIN_S = 10.0  # between the end of a workload and the next one for the same attempt
REFUSED_S = 30.0  # until a change that was refused is tried again

Tell = Callable[[str, str], None]


class Workloads:
    """Keeps the workloads in Kubernetes as jobs need them. Thread-safe.

    `tell` is called with the name of a job and what its user has to know.
    """

    def __init__(self, api: KubernetesApi, style: WorkloadStyle, clock: Clock, tell: Tell):
        self._api, self._style, self._clock, self._tell = api, style, clock, tell
        self._changed = threading.Event()
        labels = style.template.get("metadata", {}).get("labels", {})
        own = {name: x for name, x in labels.items() if name.startswith("app.kubernetes.io/")}
        selector = ",".join(f"{name}={value}" for name, value in sorted(own.items()))
        self._copy = ObjectCopy(api, style.collection, selector, self._changed.set)
        self._wanted: Mapping[str, PodGroup] = {}
        self._num_asked = self._num_kept = (
            0  # changes of `_wanted`, and how many have been carried out
        )
        self._not_before_s: dict[str, float] = {}  # by name, the time of the next change
        self._with_secret: set[str] = set()  # the uids of workloads
        self._no_secret_before_s: dict[str, float] = {}  # of the one that was refused last
        failed = partial(logging.error, "pods can no longer be started or ended: %r")
        self._workers = (
            Worker("kubernetes-watch", self._copy.run, on_error=failed),
            Worker("kubernetes-pods", self._keep, on_error=failed),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no pods are wanted, and none are left."""
        is_settled = self._num_kept == self._num_asked and not self._wanted
        return is_settled and self._copy.objects() == {}

    @property
    def is_alive(self) -> bool:
        """Whether workloads are still looked after."""
        return all(worker.is_alive for worker in self._workers)

    def want(self, groups: Sequence[PodGroup]) -> None:
        """Say which pods jobs need from now on."""
        wanted = {name_of(self._style, group): group for group in groups}
        if wanted != self._wanted:
            self._wanted = wanted
            self._num_asked += 1
            self._changed.set()

    def close(self) -> None:
        """End the threads. Workloads stay as they are."""
        for worker in self._workers:
            worker.stop()
        self._changed.set()

    def _keep(self, worker: Worker) -> None:
        while not worker.is_stopping:
            self._changed.wait(LOOK_S)
            self._changed.clear()
            num_asked = (
                self._num_asked
            )  # read first: what is asked later is not settled by this look
            found, wanted = self._copy.objects(), self._wanted
            if found is None:
                continue
            try:
                for change in plan(wanted, found, self._style.agent):
                    if self._clock.now() >= self._not_before_s.get(change.name, 0.0):
                        self._carry_out(change)
                for name in sorted(wanted):
                    self._give_secret(name, wanted[name])
                self._num_kept = num_asked
            except ApiUnreachable as error:
                logging.warning("%s. It is tried again.", error)
                worker.wait_stopping(LOOK_S)
                self._changed.set()
            gone = set(self._not_before_s) - set(wanted)
            for name in gone:
                del self._not_before_s[name]

    def _carry_out(self, change: WorkloadChange) -> None:
        """Make one change. A refusal is told to the job's user, unless the next look settles it."""
        path = f"{self._style.collection}/{change.name}"
        try:
            match change:
                case CreateWorkload(name, group):
                    body = workload(self._style, group)
                    self._copy.put(self._api.create(self._style.collection, body))
                    logging.info("%s: created with %d pods", name, group.num_pods)
                case ResizeWorkload(name, group, found):
                    self._copy.put(self._api.patch(path, resized(found, group.num_pods)))
                    logging.info("%s: resized to %d pods", name, group.num_pods)
                case DeleteWorkload(name, uid, why):
                    self._not_before_s[name] = self._clock.now() + AGAIN_S
                    self._copy.put(self._api.delete(path, uid))
                    logging.info("%s: deleted, because %s", name, why)
        except ApiRefused as error:
            if error.status == NOT_FOUND and not isinstance(change, CreateWorkload):
                self._copy.remove(change.name)
            elif error.status != CONFLICT:  # the watch soon tells what has changed meanwhile
                self._note_refusal(change, error)

    def _give_secret(self, name: str, group: PodGroup) -> None:
        """Create the Secret of a workload, for which its pods wait, unless it is there."""
        found = (self._copy.objects() or {}).get(name)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return
        uid, now_s = found["metadata"]["uid"], self._clock.now()
        if uid in self._with_secret or now_s < self._no_secret_before_s.get(uid, 0.0):
            return
        try:
            self._api.create(self._style.secrets, secret_of(self._style, group, uid))
        except ApiRefused as error:
            if error.status != CONFLICT:  # it was created, but the answer was lost
                self._no_secret_before_s = {uid: now_s + REFUSED_S}
                self._tell_refusal(CreateWorkload(name, group), error)
                return
        self._with_secret.add(uid)

    def _note_refusal(self, change: WorkloadChange, error: ApiRefused) -> None:
        self._not_before_s[change.name] = self._clock.now() + REFUSED_S
        self._tell_refusal(change, error)

    def _tell_refusal(self, change: WorkloadChange, error: ApiRefused) -> None:
        said = (
            f"Kubernetes refuses to change {change.name} ({error.status}: {error}). It is tried again every "
            f"{REFUSED_S:g} s."
        )
        if isinstance(change, ResizeWorkload) and self._style.elastic_jobset:
            said += (
                " A JobSet can be resized only if its controller has the feature gate ElasticJobSet on. If "
                "it has not, leave out --elastic-jobset."
            )
        logging.error("%s", said)
        if not isinstance(change, DeleteWorkload):
            self._tell(change.group.job, said)


class PodJobs(Jobs):
    """The jobs of a node whose devices are anywhere in a Kubernetes cluster. See `Jobs`."""

    # A workload shrinks from its highest index, so that a pod which was let go before cannot leave it.
    COORDINATOR = (*Jobs.COORDINATOR, "--keep-hosts")

    def __init__(
        self,
        place: LaunchSettings,
        clock: Clock,
        lock: int | None = None,
        *,
        workloads: Callable[[Tell], Workloads],
    ):
        super().__init__(place, clock, lock)
        self._groups: list[PodGroup] = []
        self._workloads = workloads(self._say)

    @property
    def is_idle(self) -> bool:
        """Whether no coordinator runs here, and no pod of any job is left."""
        return super().is_idle and self._workloads.is_idle

    def look(self) -> None:
        """Start and end coordinators, and say which pods are needed. Raises RuntimeError if that fails."""
        self._groups = []
        super().look()
        self._workloads.want(self._groups)
        if not self._workloads.is_alive:
            raise RuntimeError("pods are no longer looked after; the log says why")

    def look_at_processes(self, job: NodeJob) -> None:
        """Note the pods that a job needs; `Workloads` starts and ends them."""
        task, address = job.task, job.address
        number = len(task.devices) // task.devices_per_process
        if address is None or not number:
            return
        place = self._place
        command = [
            *("jaxgoodput", "agent", "--name", f"{place.node}:$(JOB_COMPLETION_INDEX)"),
            *("--rdzv-endpoint", address, "--nproc-per-node", "1", "--reconnect-s", "60"),
            *("--devices-per-process", str(task.devices_per_process)),
            *("--grace-s", f"{place.grace_s:g}", "--silent-s", f"{place.silent_s:g}"),
            *("--", *literal(task.command)),
        ]
        group = PodGroup(
            job=task.job,
            attempt=task.attempt,
            num_pods=number,
            num_devices=task.devices_per_process,
            command=tuple(command),
            cwd=task.cwd,
            secret=task.secret,
            variables=tuple(task.variables),
        )
        self._groups.append(group)

    def report_node(self, job: NodeJob, report: HostReport) -> None:
        """Tell the job's user of a pod in trouble. The node is no machine that could be kept apart."""
        self._say(job.task.job, f"pod {report.host} is {report.fault}: {report.why}")

    def _say(self, job: str, text: str) -> None:
        """Add a line to the output of a job."""
        found = self._jobs.get(job)
        if found is not None:
            found.lines.add(f"jaxgoodput: {self._place.node}: {text}")


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """The options of `jaxgoodput node --pods`."""

    template: pathlib.Path
    """A JSON file with a PodTemplate, as `jaxgoodput manifests --jobs pods` writes it."""
    resource: str | None = None
    """The resource of the devices, such as "nvidia.com/gpu"; None for virtual devices."""
    elastic_jobset: bool = False
    owner: str | None = None
    """The Deployment of this agent; Kubernetes deletes all workloads with it."""
    access: ApiAccess = field(default_factory=ApiAccess)


def jobs_as_pods(settings: PodSettings) -> Callable[[LaunchSettings, Clock, int | None], PodJobs]:
    """Return what makes the `PodJobs` of an agent.

    Raises ValueError or OSError if the template cannot be read, or Kubernetes does not know the owner.
    """
    api, namespace = KubernetesApi(settings.access), settings.access.namespace
    style = WorkloadStyle(
        agent=secrets.token_hex(8),
        namespace=namespace,
        template=_read_template(settings.template, settings.resource),
        resource=settings.resource,
        elastic_jobset=settings.elastic_jobset,
        owner=None if settings.owner is None else _owner(api, namespace, settings.owner),
    )

    def make(place: LaunchSettings, clock: Clock, lock: int | None = None) -> PodJobs:
        return PodJobs(
            place, clock, lock, workloads=lambda tell: Workloads(api, style, clock, tell)
        )

    return make


def _read_template(path: pathlib.Path, resource: str | None) -> Mapping[str, Any]:
    try:
        found = parse(path.read_bytes())
        (container,) = found["template"]["spec"]["containers"]
        if resource is not None:
            for part in ("requests", "limits"):
                int(container["resources"][part][resource])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--pods {path}: this is not the JSON of a PodTemplate with one container that requests the "
            f"--resource ({type(error).__name__}: {error}). Use the file that `jaxgoodput manifests --jobs "
            "pods` writes."
        ) from None
    return found


def _owner(api: KubernetesApi, namespace: str, name: str) -> Mapping[str, str]:
    try:
        found = api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")
    except ApiRefused as error:
        raise ValueError(
            f"--owner {name}: Kubernetes does not show a Deployment of this name ({error.status}: {error}). "
            "Give the one that this agent belongs to."
        ) from None
    uid = found["metadata"]["uid"]
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}
