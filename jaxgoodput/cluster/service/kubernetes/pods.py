"""Pods as a cluster with the strictest rules accepts them ("restricted" of the pod security standards).

Every role (service, node agents, processes of jobs) builds its pod with `pod`, so none can forget a rule.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput._fields.typed import shortened

CONTAINER = "jaxgoodput"
SCRATCH = "/tmp"  # the only folder of the image that can be written to
SHARED_MEMORY = "/dev/shm"
_QUANTITY = r"([0-9]+(?:\.[0-9]+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti)?"
_UNITS = {None: 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class PodSize:
    """The processor time and memory of a pod, as Kubernetes quantities such as "4" and "16Gi"."""

    cpu: str
    memory: str
    shared_memory: str
    """Size of /dev/shm, which counts as memory of the pod."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Number of devices by resource, such as {"nvidia.com/gpu": 8}."""

    def __post_init__(self):
        given = {"--cpu": self.cpu, "--memory": self.memory, "--shm": self.shared_memory}
        for flag, value in given.items():
            if re.fullmatch(_QUANTITY, value) is None:
                raise ValueError(
                    f"{flag} {shortened(value)} is not a Kubernetes quantity. Write a number, "
                    "with a unit if it needs one, such as 4, 500m or 16Gi."
                )
        if _number(self.memory) <= _number(self.shared_memory):
            raise ValueError(
                f"--memory {self.memory} includes /dev/shm, and --shm {self.shared_memory} leaves nothing of "
                "it for programs. Raise --memory or lower --shm."
            )

    @property
    def cpus(self) -> float:
        """Processors, as a number."""
        return _number(self.cpu)

    @property
    def memory_gib(self) -> float:
        """Memory in GiB, without /dev/shm, which may fill up."""
        return (_number(self.memory) - _number(self.shared_memory)) / 2**30

    @property
    def resources(self) -> dict[str, Any]:
        """The `resources` of the container; requests equal limits, so that the pod is evicted last."""
        amounts = {"cpu": self.cpu, "memory": self.memory}
        amounts |= {name: str(number) for name, number in self.devices.items()}
        return {"requests": amounts, "limits": dict(amounts)}


def _number(quantity: str) -> float:
    """Return a Kubernetes quantity as a number.

    >>> _number("500m"), _number("2Ki")
    (0.5, 2048.0)
    """
    found = re.fullmatch(_QUANTITY, quantity)
    assert found is not None  # `PodSize` has checked it
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, kw_only=True)
class PodPlace:
    """Which nodes a pod may run on."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Sequence[Mapping[str, str]] = ()
    """Taints of nodes that do not keep the pod away, as `toleration` reads them."""

    @property
    def spec(self) -> dict[str, Any]:
        """The fields of a pod's `spec`."""
        found: dict[str, Any] = {}
        if self.node_selector:
            found["nodeSelector"] = dict(self.node_selector)
        if self.tolerations:
            found["tolerations"] = [dict(one) for one in self.tolerations]
        return found


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A volume and its place in the pod."""

    name: str
    path: str
    source: Mapping[str, Any]
    """The volume as in a pod's `volumes`, without its name."""
    folder: str | None = None
    """The folder of the volume that is mounted; None mounts the whole volume."""
    read_only: bool = False


def secret(name: str, path: str) -> Mount:
    """Return the mount of a Secret whose files only the pod's own user and group can read."""
    source = {"secret": {"secretName": name, "defaultMode": 0o440}}
    return Mount(name=path.strip("/"), path=path, source=source, read_only=True)


def pod(
    *,
    image: str,
    command: Sequence[str],
    size: PodSize,
    user_id: int,
    grace_s: int,
    mounts: Sequence[Mount] = (),
    place: PodPlace | None = None,
    env: Sequence[Mapping[str, Any]] = (),
    account: str | None = None,
    container: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return the `spec` of a pod with one container.

    It gets no credentials of the Kubernetes API unless `account` names a service account. `grace_s` is the
    time to save between SIGTERM and SIGKILL. `container` and `spec` are further fields, such as probes.
    """
    mounts = (
        *(Mount(name="tmp", path=SCRATCH, source={"emptyDir": {}}), _shared_memory(size)),
        *mounts,
    )
    has_account = {} if account is None else {"serviceAccountName": account}
    return {
        "automountServiceAccountToken": account is not None,
        **has_account,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user_id,
            "runAsGroup": user_id,
            "fsGroup": user_id,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **(place or PodPlace()).spec,
        **spec,
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "command": list(command),
                "env": [{"name": "HOME", "value": SCRATCH}, *map(dict, env)],
                "resources": size.resources,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                **(container or {}),
                "volumeMounts": [_mounted(mount) for mount in mounts],
            }
        ],
        "volumes": [{"name": mount.name, **mount.source} for mount in mounts],
    }


def _shared_memory(size: PodSize) -> Mount:
    source = {"emptyDir": {"medium": "Memory", "sizeLimit": size.shared_memory}}
    return Mount(name="shm", path=SHARED_MEMORY, source=source)


def _mounted(mount: Mount) -> dict[str, Any]:
    found: dict[str, Any] = {"name": mount.name, "mountPath": mount.path}
    found |= {} if mount.folder is None else {"subPath": mount.folder}
    return found | ({"readOnly": True} if mount.read_only else {})


def from_field(name: str, path: str) -> dict[str, Any]:
    """Return a variable whose value is a field of the pod itself, such as "status.podIP"."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def toleration(text: str) -> dict[str, str]:
    """Parse a toleration, as `kubectl taint` writes taints: KEY[=VALUE][:EFFECT]. Raises ValueError.

    >>> toleration("gpu=a100:NoSchedule")
    {'key': 'gpu', 'operator': 'Equal', 'value': 'a100', 'effect': 'NoSchedule'}
    >>> toleration("spot")
    {'key': 'spot', 'operator': 'Exists'}
    """
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not key or (colon and effect not in _EFFECTS):
        raise ValueError(
            f"{text!r} is not a toleration. Write KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT, where "
            f"EFFECT is one of {', '.join(_EFFECTS)}."
        )
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    found |= {"value": value} if equals else {}
    return found | ({"effect": effect} if colon else {})


def node_label(text: str) -> tuple[str, str]:
    """Parse a label that nodes must have, KEY=VALUE. Raises ValueError."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"{text!r} is not a label of nodes. Write KEY=VALUE.")
    return key, value
