"""Kubernetes manifests: one JobSet with the scheduler and the agents of all nodes.

The scheduler is a job of one pod, which the others find by its stable name. Each node's agent is a job of
its own with the devices of a whole machine, so that a lost pod comes back as the same node. The scheduler's
folder and the workdirs share one volume.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxgoodput.cluster.service.wire import check_name

PORT = 8765
FOLDER = "/jaxgoodput"
INDEX = "jobset.sigs.k8s.io/job-index"  # the label that holds the number of a node
MOST_RESTARTS = 1_000_000  # in effect no limit: a lost pod always comes back


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """The options of `jaxgoodput manifests`."""

    name: str
    image: str
    num_nodes: int
    num_devices: int
    """Devices of each node."""
    kind: str
    resource: str
    """The Kubernetes resource for these devices, such as "nvidia.com/gpu"."""
    volume: str | None = None
    """A volume claim that all pods can write to; without one the journal is lost with its pod."""


def jobset(wanted: ManifestOptions) -> dict[str, Any]:
    """Return the JobSet, a Kubernetes resource. Raises ValueError for a name that Kubernetes rejects."""
    check_name(wanted.name, "a cluster")
    if wanted.name != wanted.name.lower() or "_" in wanted.name or "." in wanted.name:
        raise ValueError(
            f"--cluster {wanted.name}: Kubernetes accepts lowercase letters, digits and dashes only."
        )
    head = f"{wanted.name}-scheduler-0-0.{wanted.name}"
    serve = ["serve", "--folder", f"{FOLDER}/service", "--host", "0.0.0.0", "--local", "0"]
    serve += ["--tls-certificate", "/tls/tls.crt", "--tls-key", "/tls/tls.key"]
    serve += ["--tokens", "/tokens/tokens.json"]
    node = ["node", "--scheduler", f"https://{head}:{PORT}", "--ca", "/tls/tls.crt"]
    node += ["--token-file", "/tokens/node", "--folder", "/tmp/jaxgoodput"]
    node += ["--devices", str(wanted.num_devices), "--kind", wanted.kind]
    node += ["--name", "node-$(INDEX)", "--address", "$(POD_IP)"]
    devices = {wanted.resource: str(wanted.num_devices)}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": wanted.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                _replicated("scheduler", 1, _pod(wanted, serve, {})),
                _replicated("node", wanted.num_nodes, _pod(wanted, node, devices)),
            ],
        },
    }


def _replicated(name: str, replicas: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    job = {"parallelism": 1, "completions": 1, "backoffLimit": MOST_RESTARTS, "template": pod}
    return {"name": name, "replicas": replicas, "template": {"spec": job}}


def _pod(
    wanted: ManifestOptions, arguments: list[str], devices: Mapping[str, str]
) -> dict[str, Any]:
    mounts = [
        {"name": "tls", "mountPath": "/tls", "readOnly": True},
        {"name": "tokens", "mountPath": "/tokens", "readOnly": True},
        {"name": "folder", "mountPath": FOLDER},
    ]
    folder: dict[str, Any] = {"name": "folder", "emptyDir": {}}
    if wanted.volume is not None:
        folder = {"name": "folder", "persistentVolumeClaim": {"claimName": wanted.volume}}
    container: dict[str, Any] = {
        "name": "jaxgoodput",
        "image": wanted.image,
        "command": ["jaxgoodput", *arguments],
        "ports": [{"containerPort": PORT}],
        "env": [_field("INDEX", f"metadata.labels['{INDEX}']"), _field("POD_IP", "status.podIP")],
        "volumeMounts": mounts,
    }
    if devices:
        container["resources"] = {"limits": dict(devices)}
    return {
        "spec": {
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 120,
            "containers": [container],
            "volumes": [
                {"name": "tls", "secret": {"secretName": f"{wanted.name}-tls"}},
                {"name": "tokens", "secret": {"secretName": f"{wanted.name}-tokens"}},
                folder,
            ],
        }
    }


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return a value as YAML, with one line per field and quoted texts.

    >>> to_yaml({"a": [1, {"b": "x"}]})
    'a:\\n- 1\\n- b: "x"\\n'
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> list[str]:
    found = []
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            name = key if key.replace("-", "").isalnum() else json.dumps(key)
            inner = _lines(item)
            if isinstance(item, Mapping | list) and item:
                indent = "  " if isinstance(item, Mapping) else ""
                found += [f"{name}:", *(indent + line for line in inner)]
            else:
                found.append(f"{name}: {inner[0]}")
        return found
    if isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    return [json.dumps(value)]  # every JSON value is YAML
