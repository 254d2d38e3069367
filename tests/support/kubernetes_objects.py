"""The objects of a Kubernetes cluster of tests, and the rules by which they may be made and changed.

It is no Kubernetes. Objects are checked against the published schemas, fields that are immutable stay as they
are, and pods that break the "restricted" rules are refused. `kubernetes_cluster.py` serves them over HTTP.
"""

import base64
import copy
import functools
import importlib.resources
import json
import re
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import jsonschema
import kubernetes_validate
import referencing
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

VERSION = "1.37"
# By group and version, the kinds that there are and their plural names.
KINDS = {
    "v1": {
        "ConfigMap": "configmaps", "Node": "nodes", "Pod": "pods", "Secret": "secrets",
        "Service": "services", "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
}  # fmt: skip
PLURALS = {(v, plural): kind for v, kinds in KINDS.items() for kind, plural in kinds.items()}
OF_KIND = {kind: (v, plural) for (v, plural), kind in PLURALS.items()}
# Paths of fields that may not change, by kind. A Job's `completions` has a rule of its own.
IMMUTABLE = {
    "Job": "selector template completionMode podFailurePolicy backoffLimitPerIndex podReplacementPolicy",
    "StatefulSet": "selector serviceName podManagementPolicy volumeClaimTemplates",
    "Deployment": "selector",
}
Object = dict[str, Any]


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, code: int, reason: str, message: str):
        self.status = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "code": code, "reason": reason, "message": message,
        }  # fmt: skip
        super().__init__(message)


def invalid(message: str) -> Refused:
    return Refused(422, "Invalid", message)


def holds(read: Any, said: Any) -> bool:
    """Whether all that was said was read: a field that a schema does not know is left out in reading."""
    if isinstance(said, dict):
        return all(key in read and holds(read[key], value) for key, value in said.items())
    if isinstance(said, list):
        return len(read) == len(said) and all(map(holds, read, said))
    return read == said


def check_schema(one: Object) -> None:
    """Raises Refused (422) if an object does not follow the published schema of its kind."""
    try:
        if one["kind"] == "JobSet":
            said = {key: value for key, value in one.items() if key != "status"}
            # The model reads times as times, and writes them otherwise.
            own = one["metadata"].items()
            said["metadata"] = {key: value for key, value in own if "Timestamp" not in key}
            if not holds(JobsetV1alpha2JobSet.from_dict(said).to_dict(), said):
                raise invalid("JobSet: a field is unknown")
        else:
            _validator(one["apiVersion"], one["kind"]).validate(one)
    except (jsonschema.ValidationError, ValueError) as error:
        raise invalid(f"{one['kind']}: {error}") from None


@functools.cache
def _validator(version: str, kind: str) -> jsonschema.Draft202012Validator:
    """The check of a kind, as `kubernetes_validate.validate` makes it anew for each object."""
    folder = importlib.resources.files(kubernetes_validate) / "kubernetes-json-schema"
    folder /= f"v{VERSION}.0-local-strict"
    group = re.sub("^([^./]*)([^/]*)/", r"\1-", version)
    schema, definitions = (
        referencing.Resource.from_contents(json.loads((folder / name).read_text()))
        for name in (f"{kind.lower()}-{group}.json", "_definitions.json")
    )
    registry = schema @ (definitions @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema.contents, registry=registry)


def violations(spec: Mapping[str, Any]) -> list[str]:
    """What the rules "restricted" of the pod security standards forbid in the `spec` of a pod."""
    own = spec.get("securityContext", {})
    found = []
    for one in (*spec["containers"], *spec.get("initContainers", ())):
        context = {**own, **one.get("securityContext", {})}
        found += [] if context.get("runAsNonRoot") is True else ["runAsNonRoot"]
        found += [] if context.get("runAsUser", 1) != 0 else ["runAsUser"]
        kind = context.get("seccompProfile", {}).get("type")
        found += [] if kind in ("RuntimeDefault", "Localhost") else ["seccompProfile"]
        found += [] if context.get("allowPrivilegeEscalation") is False else ["escalation"]
        drops = context.get("capabilities", {})
        found += [] if drops.get("drop") == ["ALL"] and not drops.get("add") else ["capabilities"]
        found += ["privileged"] if context.get("privileged") else []
    allowed = {
        "configMap",
        "emptyDir",
        "secret",
        "persistentVolumeClaim",
        "projected",
        "downwardAPI",
    }
    for volume in spec.get("volumes", ()):
        found += [f"volume {kind}" for kind in set(volume) - {"name"} - allowed]
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    return found


def merged(old: Any, patch: Any) -> Any:
    """The value after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    pairs = (part.partition("=") for part in selector.split(",") if part)
    return all(labels.get(key) == value for key, _, value in pairs)


class Store:
    """All objects with their versions, and a history of changes, which may be forgotten. Under `lock`."""

    def __init__(self, gates: frozenset[str]):
        self.lock = threading.Condition(threading.RLock())
        self.gates = gates
        self.objects: dict[tuple[str, str, str], Object] = {}  # by kind, namespace and name
        self.version = 1
        self.forgotten = 0
        self.history: list[tuple[int, str, Object]] = []

    def of(self, kind: str, namespace: str | None = None) -> list[Object]:
        return [
            one
            for (its, space, _), one in sorted(self.objects.items())
            if its == kind and namespace in (None, space)
        ]

    def get(self, kind: str, namespace: str, name: str) -> Object:
        found = self.objects.get((kind, namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f"{OF_KIND[kind][1]} {name!r} not found")
        return found

    def create(self, kind: str, namespace: str, body: Object) -> Object:
        one = copy.deepcopy(body)
        metadata = one["metadata"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", metadata["name"]):
            raise invalid(f"metadata.name: {metadata['name']!r}")
        if (kind, namespace, metadata["name"]) in self.objects:
            raise Refused(409, "AlreadyExists", f"{kind} {metadata['name']!r} already exists")
        if kind == "Secret" and "stringData" in one:
            text = one.pop("stringData")
            one["data"] = {k: base64.b64encode(v.encode()).decode() for k, v in text.items()}
        check_schema(one)
        self._admit(kind, one)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"}
        if kind != "Node":
            metadata["namespace"] = namespace
        return self._put("ADDED", one)

    def _admit(self, kind: str, one: Object) -> None:
        if kind == "Pod" and (found := violations(one["spec"])):
            raise Refused(403, "Forbidden", f"violates PodSecurity restricted: {found}")
        if kind == "Job":
            spec = one["spec"]
            if spec.get("completionMode") == "Indexed" and "completions" not in spec:
                raise invalid("spec.completions: required if completionMode is Indexed")
            if spec["template"]["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
                raise invalid("spec.template.spec.restartPolicy: Never or OnFailure")
            if "podFailurePolicy" in spec and spec["template"]["spec"]["restartPolicy"] != "Never":
                raise invalid("spec.podFailurePolicy: needs restartPolicy Never")

    def update(self, old: Object, new: Object, *, by_controller: bool = False) -> Object:
        """Store another state of an object. Raises Refused for changes that are not allowed."""
        told = new["metadata"].get("resourceVersion")
        if told is not None and told != old["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", "the object has been modified")
        if new == old:
            return old
        if not by_controller:
            check_schema(new)
            self._check_change(old, new)
        return self._put("MODIFIED", copy.deepcopy(new))

    def _check_change(self, old: Object, new: Object) -> None:
        kind, before, after = old["kind"], old.get("spec", {}), new.get("spec", {})
        for name in IMMUTABLE.get(kind, "").split():
            if before.get(name) != after.get(name):
                raise invalid(f"spec.{name}: field is immutable")
        if kind == "RoleBinding" and old["roleRef"] != new["roleRef"]:
            raise invalid("roleRef: field is immutable")
        if kind == "Job" and before.get("completions") != after.get("completions"):
            is_together = after.get("completions") == after.get("parallelism")
            if before.get("completionMode") != "Indexed" or not is_together:
                raise invalid("spec.completions: may only change together with parallelism")
        if kind == "JobSet":
            self._check_jobset(before, after)

    def _check_jobset(self, before: Object, after: Object) -> None:
        masked = copy.deepcopy(after)
        if "ElasticJobSet" in self.gates:
            for old, new in zip(before["replicatedJobs"], masked["replicatedJobs"], strict=True):
                job = new["template"]["spec"]
                if job["completions"] != job["parallelism"] or job["completions"] < 1:
                    raise invalid("completions must be equal to parallelism, and >= 1")
                job |= {k: old["template"]["spec"][k] for k in ("parallelism", "completions")}
        if masked["replicatedJobs"] != before["replicatedJobs"]:
            raise invalid("spec.replicatedJobs: field is immutable")

    def delete(self, one: Object, how: str = "Background") -> Object:
        """Delete an object, or mark it if pods have to end first, or what it owns."""
        waits = how == "Foreground" or one["kind"] == "Pod"
        if not waits:
            return self.remove(one)
        if "deletionTimestamp" in one["metadata"]:
            return one
        new = copy.deepcopy(one)
        new["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z"
        if how == "Foreground":
            new["metadata"]["finalizers"] = ["foregroundDeletion"]
        return self._put("MODIFIED", new)

    def remove(self, one: Object) -> Object:
        metadata = one["metadata"]
        del self.objects[one["kind"], metadata.get("namespace", ""), metadata["name"]]
        return self._note("DELETED", copy.deepcopy(one))

    def _put(self, what: str, one: Object) -> Object:
        metadata = one["metadata"]
        self.objects[one["kind"], metadata.get("namespace", ""), metadata["name"]] = one
        return self._note(what, one)

    def _note(self, what: str, one: Object) -> Object:
        with self.lock:
            self.version += 1
            one["metadata"]["resourceVersion"] = str(self.version)
            self.history.append((self.version, what, one))
            self.lock.notify_all()
        return one

    def forget(self) -> None:
        """Forget all changes so far, so that no watch can begin before now."""
        with self.lock:
            self.version += 1
            self.forgotten, self.history = self.version, []
            self.lock.notify_all()
