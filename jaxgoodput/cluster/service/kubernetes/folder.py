"""The folder that `jaxgoodput manifests` writes: a Kustomize base, a part for each role, and the secrets.

`kubectl apply -k FOLDER` installs everything and `kubectl delete -k FOLDER` removes it. The top file is the
user's to extend, with patches or other images; writing again replaces all files but the secrets.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgoodput.cluster.service.kubernetes import manifests, secrets
from jaxgoodput.cluster.service.kubernetes.manifests import ManifestOptions
from jaxgoodput.cluster.service.kubernetes.yaml_text import documents, to_yaml

KUSTOMIZATION = "kustomization.yaml"
OWNER = "cluster"  # names the cluster that the folder is for
OPERATOR_TOKEN, CERTIFICATE = "operator-token", "ca.crt"
SERVICE, NODE = "service/secrets", "node/secrets"  # folders of the secrets of a role


def write(folder: pathlib.Path, wanted: ManifestOptions) -> None:
    """Write the manifests of an installation, and its secrets unless the folder has them.

    Raises OSError if the folder cannot be written or the certificate cannot be made, and ValueError if the
    folder holds the secrets of another cluster, whose certificate is for another name.
    """
    _claim(folder, wanted)
    _write_secrets(folder, wanted)
    service = _generator(wanted.named("service"), _in("secrets", _SERVICE_FILES))
    _write_part(folder / "service", {"service.yaml": manifests.service(wanted)}, service)
    node = _generator(wanted.named("node"), _in("secrets", _NODE_FILES))
    if wanted.jobs == "nodes":
        _write_part(folder / "node", {"node.yaml": manifests.nodes(wanted)}, node)
    else:
        template = _generator(wanted.named("template"), [manifests.TEMPLATE_FILE], "configMap")
        _write_part(folder / "node", {"pods.yaml": manifests.pods(wanted)}, {**node, **template})
        text = json.dumps(manifests.pod_template(wanted), indent=2)
        (folder / "node" / manifests.TEMPLATE_FILE).write_text(f"{text}\n")
    top = {
        "namespace": wanted.namespace,
        "resources": ["service", "node"],
    }
    _write_kustomization(folder, top)


def commands(folder: pathlib.Path, wanted: ManifestOptions) -> str:
    """Return the commands that install the cluster, use it and remove it, for a terminal."""
    name, space = wanted.named("service"), wanted.namespace
    claim = "" if wanted.volume is None else f" (its volume claim {wanted.volume} has to exist)"
    return (
        f"install{claim}:\n  kubectl apply -k {folder}\n"
        f"use, in two terminals:\n"
        f"  kubectl port-forward -n {space} service/{name} {manifests.PORT}:{manifests.PORT}\n"
        f"  jaxgoodput status --scheduler https://localhost:{manifests.PORT} "
        f"--token-file {folder / OPERATOR_TOKEN} --ca {folder / CERTIFICATE}\n"
        f"remove:\n  kubectl delete -k {folder}\n"
    )


_SERVICE_FILES = ("tls.crt", "tls.key", "tokens.json")
_NODE_FILES = ("token", CERTIFICATE)


def _claim(folder: pathlib.Path, wanted: ManifestOptions) -> None:
    """Note the cluster that the folder is for, or check that it is still this one."""
    owner, name = folder / OWNER, f"{wanted.namespace}/{wanted.name}\n"
    if owner.exists() and owner.read_text() != name:
        raise ValueError(
            f"--out {folder} holds the secrets of the cluster {owner.read_text().strip()} (--namespace/"
            f"--cluster), not of {name.strip()}. Choose another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    owner.write_text(name)
    (folder / ".gitignore").write_text(f"secrets/\n{OPERATOR_TOKEN}\n")


def _write_secrets(folder: pathlib.Path, wanted: ManifestOptions) -> None:
    """Write the secrets, each into the folder of the role that gets it.

    The operator's token is written last: without it an earlier call was interrupted, and all are made anew.
    """
    if (folder / OPERATOR_TOKEN).exists():
        return
    name, space = wanted.named("service"), wanted.namespace
    made = secrets.make([name, f"{name}.{space}", f"{name}.{space}.svc", "localhost"])
    own = {"tls.crt": made.certificate, "tls.key": made.key, "tokens.json": made.tokens}
    secrets.write_secrets(folder / SERVICE, own)
    agents = {"token": f"{made.node_token}\n", CERTIFICATE: made.certificate}
    secrets.write_secrets(folder / NODE, agents)
    secrets.write_secret(folder / CERTIFICATE, made.certificate)
    secrets.write_secret(folder / OPERATOR_TOKEN, f"{made.operator_token}\n")


def _in(folder: str, names: Sequence[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


def _generator(name: str, files: Sequence[str], kind: str = "secret") -> dict[str, Any]:
    """Return the part of a kustomization that makes a Secret or a ConfigMap of files."""
    return {f"{kind}Generator": [{"name": name, "files": list(files)}]}


def _write_part(
    folder: pathlib.Path,
    files: Mapping[str, Sequence[Mapping[str, Any]]],
    generators: Mapping[str, Any],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, objects in files.items():
        (folder / name).write_text(documents(objects))
    _write_kustomization(folder, {"resources": list(files), **generators})


def _write_kustomization(folder: pathlib.Path, fields: Mapping[str, Any]) -> None:
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    (folder / KUSTOMIZATION).write_text(to_yaml({**kind, **fields}))
