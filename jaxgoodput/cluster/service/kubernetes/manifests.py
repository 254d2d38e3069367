"""Kubernetes manifests, one function for each role: the service, its nodes, and jobs as pods.

The service is a pod of its own with the journal. Jobs run in one of two ways. With `jobs="nodes"`, each agent
is a pod that holds the devices of a whole machine, and a job's processes are its children. With
`jobs="pods"`, one agent stands for all devices, and each process of a job is a pod that Kubernetes places.

No pod gets more than its role needs: only the service mounts the tokens of users and the key of its
certificate, an agent mounts its own token and the certificate, and only the agent of jobs as pods may use the
Kubernetes API.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxgoodput._fields.typed import shortened
from jaxgoodput.cluster.service.kubernetes.pods import (
    Mount,
    PodPlace,
    PodSize,
    from_field,
    pod,
    secret,
)

PORT = 8765
FOLDER = "/jaxgoodput"  # of the service's journal, or of the workdirs of jobs
SECRETS = "/secrets"
TEMPLATE = "/template"
TEMPLATE_FILE = "pod.json"
SCRATCH_FOLDER = "/tmp/jaxgoodput"
QUEUE = "kueue.x-k8s.io/queue-name"
ELASTIC = "kueue.x-k8s.io/elastic-job"
LONGER_S = 30  # beyond the time to save: for a coordinator to end after its processes, and for the farewell
PROBE_S = 10
STALE_S = 60  # an agent that has not looked after its processes for so long is stuck
JobsAs = Literal["nodes", "pods"]


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """The options of `jaxgoodput manifests`."""

    name: str
    image: str
    jobs: JobsAs = "nodes"
    """Whether jobs run on agents that hold whole nodes, or each process of a job is a pod."""
    num_nodes: int
    num_devices: int
    """Devices of each node."""
    kind: str
    resource: str
    """The Kubernetes resource for these devices, such as "nvidia.com/gpu"; empty for virtual devices."""
    cpu: str = "8"
    """Processor time of a node's agent, or of each process if they are pods."""
    memory: str = "32Gi"
    shared_memory: str = "8Gi"
    place: PodPlace = field(default_factory=PodPlace)
    """Which nodes the agents, or the processes, may run on."""
    queue: str | None = None
    """The Kueue queue that admits the agents, or the jobs; None without Kueue."""
    elastic_jobset: bool = False
    """Whether jobs as pods are JobSets, whose controller has its feature gate ElasticJobSet on."""
    volume: str | None = None
    """A volume claim that all pods can write to; without one the journal is lost with its pod."""
    namespace: str = "default"
    user_id: int = 1000
    """The user and group of all processes; not 0."""
    grace_s: int = 60
    """Seconds that a stopped process may take to save its state."""

    def __post_init__(self):
        for flag, value in (("--cluster", self.name), ("--namespace", self.namespace)):
            if re.fullmatch("[a-z]([a-z0-9-]{0,38}[a-z0-9])?", value) is None:
                raise ValueError(
                    f"{flag} {shortened(value)}: Kubernetes accepts lowercase letters, digits and dashes "
                    "only, a letter first and no dash last, and this name may have 40 characters at most."
                )
        given = {"--image": self.image, "--resource": self.resource or None}
        for flag, value in (given | {"--queue": self.queue, "--volume": self.volume}).items():
            if (
                value is not None
                and re.fullmatch("[A-Za-z0-9][A-Za-z0-9._:/@-]{0,250}", value) is None
            ):
                raise ValueError(
                    f"{flag} {shortened(value)}: this is no name that Kubernetes accepts. Use letters, "
                    "digits and the characters . _ : / @ -, with a letter or a digit first."
                )

    @property
    def labels(self) -> dict[str, str]:
        """The labels of everything that belongs to this cluster."""
        return {
            "app.kubernetes.io/name": "jaxgoodput",
            "app.kubernetes.io/instance": self.name,
        }

    def of_role(self, role: str) -> dict[str, str]:
        """Return the labels of what belongs to one role in this cluster."""
        return {**self.labels, "app.kubernetes.io/component": role}

    def named(self, role: str) -> str:
        """Return the name of a role's objects."""
        return f"{self.name}-{role}"

    @property
    def pod_grace_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL of an agent's pod, whose coordinators get twice the time."""
        return 2 * self.grace_s + LONGER_S

    @property
    def num_all_devices(self) -> int:
        """Devices of all nodes together."""
        return self.num_nodes * self.num_devices


def service(wanted: ManifestOptions) -> list[dict[str, Any]]:
    """Return the objects of the service: its pod, its address, and who may connect to it."""
    role = "service"
    command = [
        *("jaxgoodput", "serve", "--folder", f"{FOLDER}/service", "--local", "0"),
        *("--host", "0.0.0.0", "--port", str(PORT), "--tokens", f"{SECRETS}/tokens.json"),
        *("--tls-certificate", f"{SECRETS}/tls.crt", "--tls-key", f"{SECRETS}/tls.key"),
    ]
    get = {"httpGet": {"path": "/healthz", "port": "https", "scheme": "HTTPS"}, "timeoutSeconds": 5}
    body = pod(
        image=wanted.image,
        command=command,
        size=PodSize(cpu="2", memory="4Gi", shared_memory="64Mi"),
        user_id=wanted.user_id,
        grace_s=LONGER_S,
        mounts=(secret(wanted.named(role), SECRETS), _folder(wanted, "service")),
        container={
            "ports": [{"name": "https", "containerPort": PORT}],
            # The first start may have a long journal to read.
            "startupProbe": {**get, "periodSeconds": 5, "failureThreshold": 60},
            "livenessProbe": {**get, "periodSeconds": PROBE_S, "failureThreshold": 6},
            "readinessProbe": {**get, "periodSeconds": PROBE_S},
        },
    )
    port = {"name": "https", "port": PORT, "targetPort": "https"}
    return [
        # A StatefulSet never has two pods of one name, and the journal only one writer.
        _stateful_set(wanted, role, 1, body),
        _object(wanted, role, "v1", "Service", {"selector": wanted.of_role(role), "ports": [port]}),
        _network_policy(wanted, role, [{"podSelector": {}}], PORT),
    ]


def nodes(wanted: ManifestOptions) -> list[dict[str, Any]]:
    """Return the objects of agents that hold the devices of whole nodes and run jobs there."""
    role = "node"
    size = _size(wanted, wanted.num_devices)
    # Jobs run in the agent's own pod, so what it may use is what the node has for them.
    has = ["--cpus", f"{size.cpus:g}", "--memory", f"{size.memory_gib:g}"]
    body = pod(
        image=wanted.image,
        command=[*_agent(wanted, "$(POD_NAME)", wanted.num_devices), *has],
        size=size,
        user_id=wanted.user_id,
        grace_s=wanted.pod_grace_s,
        mounts=(secret(wanted.named(role), SECRETS), _folder(wanted, "work")),
        place=wanted.place,
        env=_AGENT_ENV,
        container=_agent_probes("$POD_NAME"),
    )
    disruptions = {"maxUnavailable": 1, "selector": {"matchLabels": wanted.of_role(role)}}
    return [
        # A lost pod comes back under its name, which is the name of the node.
        _stateful_set(wanted, role, wanted.num_nodes, body, _queued(wanted)),
        # A drain of several machines lets the jobs of one save before it goes on with the next.
        _object(wanted, role, "policy/v1", "PodDisruptionBudget", disruptions),
        _network_policy(wanted, role, [{"podSelector": {"matchLabels": wanted.labels}}]),
    ]


def pods(wanted: ManifestOptions) -> list[dict[str, Any]]:
    """Return the objects of the agent that runs each process of a job as a pod."""
    role = "pods"
    name = wanted.named(role)
    command = _agent(wanted, wanted.name, wanted.num_all_devices)
    command += ["--pods", f"{TEMPLATE}/{TEMPLATE_FILE}", "--owner", name]
    command += ["--resource", wanted.resource] if wanted.resource else []
    command += ["--elastic-jobset"] if wanted.elastic_jobset else []
    template = {"configMap": {"name": wanted.named("template")}}
    body = pod(
        image=wanted.image,
        command=command,
        size=PodSize(cpu="4", memory="8Gi", shared_memory="64Mi"),
        user_id=wanted.user_id,
        grace_s=wanted.pod_grace_s,
        mounts=(
            secret(wanted.named("node"), SECRETS),
            _folder(wanted, "work"),
            Mount(name="template", path=TEMPLATE, source=template, read_only=True),
        ),
        env=_AGENT_ENV,
        container=_agent_probes(wanted.name),
        account=name,
    )
    kind = ("jobset.x-k8s.io", "jobsets") if wanted.elastic_jobset else ("batch", "jobs")
    deployment = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # never two agents for the same devices
        "selector": {"matchLabels": wanted.of_role(role)},
        "template": {"metadata": {"labels": wanted.of_role(role)}, "spec": body},
    }
    rules = [
        _rule(*kind, "get", "list", "watch", "create", "patch", "delete"),
        _rule("", "secrets", "create"),  # of jobs; it cannot read any
        {**_rule("apps", "deployments", "get"), "resourceNames": [name]},  # itself, the owner
    ]
    group = "rbac.authorization.k8s.io"
    account = {"kind": "ServiceAccount", "name": name, "namespace": wanted.namespace}
    return [
        _object(wanted, role, "v1", "ServiceAccount"),
        {**_object(wanted, role, f"{group}/v1", "Role"), "rules": rules},
        {
            **_object(wanted, role, f"{group}/v1", "RoleBinding"),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [account],
        },
        _object(wanted, role, "apps/v1", "Deployment", deployment),
        _network_policy(wanted, role, [{"podSelector": {"matchLabels": wanted.labels}}]),
        # No disruption budget for the pods of jobs: it would need a controller that it can ask for the number
        # of pods, which a Job is not, and would forbid every eviction.
        _network_policy(wanted, "job", [{"podSelector": {"matchLabels": wanted.labels}}]),
    ]


def pod_template(wanted: ManifestOptions) -> dict[str, Any]:
    """Return the template of a job's pods: all but the command, the variables and the number of devices."""
    body = pod(
        image=wanted.image,
        command=(),
        size=_size(wanted, 1),
        user_id=wanted.user_id,
        grace_s=wanted.grace_s + LONGER_S,
        mounts=(_folder(wanted, "work"),),
        place=wanted.place,
        restartPolicy="Never",
    )
    return {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": _metadata(wanted, "job", _queued(wanted)),
        "template": {"metadata": {"labels": wanted.of_role("job")}, "spec": body},
    }


_AGENT_ENV = (from_field("POD_NAME", "metadata.name"), from_field("POD_IP", "status.podIP"))


def _agent(wanted: ManifestOptions, name: str, num_devices: int) -> list[str]:
    """Return the command of an agent that joins the service under a name."""
    return [
        *("jaxgoodput", "node", "--scheduler", f"https://{wanted.named('service')}:{PORT}"),
        *("--ca", f"{SECRETS}/ca.crt", "--token-file", f"{SECRETS}/token"),
        *("--folder", SCRATCH_FOLDER, "--devices", str(num_devices), "--kind", wanted.kind),
        *("--name", name, "--address", "$(POD_IP)", "--grace-s", str(wanted.grace_s)),
    ]


def _agent_probes(name: str) -> dict[str, Any]:
    """Return the probes of an agent, which has no port but touches a file while it looks after its jobs."""
    path = f"{SCRATCH_FOLDER}/nodes/{name}/alive"
    age = f"$(( $(date +%s) - $(stat -c %Y {path}) ))"
    check = {"exec": {"command": ["sh", "-c", f'test "{age}" -lt {STALE_S}']}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**check, "periodSeconds": 2, "failureThreshold": 90},
        "livenessProbe": {**check, "periodSeconds": PROBE_S, "failureThreshold": 6},
        "readinessProbe": {**check, "periodSeconds": PROBE_S},
    }


def _size(wanted: ManifestOptions, num_devices: int) -> PodSize:
    devices = {wanted.resource: num_devices} if wanted.resource else {}
    return PodSize(
        cpu=wanted.cpu, memory=wanted.memory, shared_memory=wanted.shared_memory, devices=devices
    )


def _folder(wanted: ManifestOptions, part: str) -> Mount:
    """Return the mount of a part of the volume: jobs cannot reach the service's journal."""
    source: Mapping[str, Any] = {"emptyDir": {}}
    if wanted.volume is not None:
        source = {"persistentVolumeClaim": {"claimName": wanted.volume}}
    path = f"{FOLDER}/{part}"
    return Mount(name="folder", path=path, source=source, folder=part)


def _queued(wanted: ManifestOptions) -> dict[str, Any]:
    """Return the metadata by which Kueue finds the queue, and knows that jobs change their size."""
    if wanted.queue is None:
        return {}
    found: dict[str, Any] = {"labels": {QUEUE: wanted.queue}}
    return found | ({"annotations": {ELASTIC: "true"}} if wanted.jobs == "pods" else {})


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


def _metadata(
    wanted: ManifestOptions, role: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    more = more or {}
    labels = {**wanted.of_role(role), **more.get("labels", {})}
    return {"name": wanted.named(role), **more, "labels": labels}


def _object(
    wanted: ManifestOptions,
    role: str,
    version: str,
    kind: str,
    spec: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    found = {"apiVersion": version, "kind": kind, "metadata": _metadata(wanted, role, more)}
    return found | ({} if spec is None else {"spec": dict(spec)})


def _stateful_set(
    wanted: ManifestOptions,
    role: str,
    replicas: int,
    body: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    labels = wanted.of_role(role)
    spec = {
        "replicas": replicas,
        "serviceName": wanted.named(role),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": dict(body)},
    }
    return _object(wanted, role, "apps/v1", "StatefulSet", spec, more)


def _network_policy(
    wanted: ManifestOptions,
    role: str,
    sources: Sequence[Mapping[str, Any]],
    port: int | None = None,
) -> dict[str, Any]:
    """Return the rule that only some pods of the namespace may connect to the pods of a role."""
    allowed: dict[str, Any] = {"from": [dict(source) for source in sources]}
    allowed |= {} if port is None else {"ports": [{"port": port, "protocol": "TCP"}]}
    spec = {
        "podSelector": {"matchLabels": wanted.of_role(role)},
        "policyTypes": ["Ingress"],
        "ingress": [allowed],
    }
    return _object(wanted, role, "networking.k8s.io/v1", "NetworkPolicy", spec)
