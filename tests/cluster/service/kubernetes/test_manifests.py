"""What Kubernetes is told: objects of the published schemas, and no role has a right or secret too many."""

import itertools
import json
import os
import pathlib
import re
import shutil
import ssl
import stat
import subprocess
import sys
import tomllib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_cluster import Cluster
from kubernetes_objects import Refused, check_schema, violations

from jaxgoodput import cli
from jaxgoodput.cluster.service.kubernetes import folder, manifests
from jaxgoodput.cluster.service.kubernetes.manifests import ManifestOptions
from jaxgoodput.cluster.service.kubernetes.pods import PodPlace, PodSize, node_label, toleration
from jaxgoodput.cluster.service.kubernetes.yaml_text import documents, to_yaml
from jaxgoodput.cluster.service.serve import Service
from jaxgoodput.cluster.service.web.guard import read_tokens

TOP = pathlib.Path(__file__).parents[4]
CLAIM = "runs"


def wanted(**changes):
    fields = {
        "name": "cluster", "image": "example/trainer:1", "num_nodes": 3, "num_devices": 8,
        "kind": "h200", "resource": "nvidia.com/gpu", "volume": CLAIM,
    }  # fmt: skip
    return ManifestOptions(**{**fields, **changes})


OPTIONS = [
    {"volume": None, "resource": "", "kind": "cpu"},
    {
        "queue": "gpus",
        "place": PodPlace(node_selector={"a": "b"}, tolerations=[toleration("x=y:NoExecute")]),
    },
    {"elastic_jobset": True, "user_id": 65534, "grace_s": 300},
]


def all_objects(options):
    return [*manifests.service(options), *manifests.nodes(options), *manifests.pods(options)]


def pods_of(options):
    """The `spec` of each pod, by role."""
    found = {
        f"{one['kind']} {one['metadata']['name']}": one["spec"]["template"]["spec"]
        for one in all_objects(options)
        if one["kind"] in ("StatefulSet", "Deployment")
    }
    return found | {"job": manifests.pod_template(options)["template"]["spec"]}


def secrets_in(spec):
    """The Secrets that a pod mounts or reads."""
    volumes = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
    (container,) = spec["containers"]
    assert not any("secret" in str(one).lower() for one in container["env"])
    return volumes


@pytest.mark.parametrize("changes", OPTIONS)
def test_every_object_is_of_its_published_schema_and_its_yaml_says_the_same(changes):
    options = wanted(**changes)
    made = all_objects(options)
    assert list(yaml.safe_load_all(documents(made))) == made
    for one in (*made, manifests.pod_template(options)):
        check_schema({**one, "metadata": {**one["metadata"], "namespace": "default"}})
    wrong = {**made[0], "spec": {**made[0]["spec"], "replica": 1}}
    with pytest.raises(Refused, match="replica"):
        check_schema(wrong)


@pytest.mark.parametrize("changes", OPTIONS)
def test_every_pod_keeps_to_the_restricted_rules_and_has_limits(changes):
    for role, spec in pods_of(wanted(**changes)).items():
        assert violations(spec) == [], role
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert spec["terminationGracePeriodSeconds"] > 0
        limits, asked = container["resources"]["limits"], container["resources"]["requests"]
        assert limits == asked and {"cpu", "memory"} <= set(limits)
        places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(places.values()) == set(volumes)
        assert volumes[places["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[places["/tmp"]]["emptyDir"] == {}
        if role != "job":  # the agent of a job's process ends with it
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


def test_a_pod_that_breaks_a_rule_is_seen():
    spec = pods_of(wanted())["job"]
    for name in ("runAsNonRoot", "seccompProfile"):
        own = {key: value for key, value in spec["securityContext"].items() if key != name}
        assert violations({**spec, "securityContext": own}) == [name]
    assert violations({**spec, "volumes": [{"name": "x", "hostPath": {"path": "/"}}]})


def test_no_pod_has_a_secret_or_a_right_that_its_role_can_do_without():
    specs = pods_of(wanted())
    assert {role: secrets_in(spec) for role, spec in specs.items()} == {
        "StatefulSet cluster-service": {"cluster-service"},
        "StatefulSet cluster-node": {"cluster-node"},
        "Deployment cluster-pods": {"cluster-node"},
        "job": set(),
    }
    for role, spec in specs.items():
        may_ask = role == "Deployment cluster-pods"
        assert spec["automountServiceAccountToken"] is may_ask
        assert ("serviceAccountName" in spec) is may_ask
        # A job must not reach the service's journal, which is on the same volume.
        mounts = {m["mountPath"]: m.get("subPath") for m in spec["containers"][0]["volumeMounts"]}
        own = {path: part for path, part in mounts.items() if path.startswith("/jaxgoodput")}
        part = "service" if role.endswith("service") else "work"
        assert own == {f"/jaxgoodput/{part}": part}
    (role,) = (one for one in manifests.pods(wanted()) if one["kind"] == "Role")
    verbs = {rule["resources"][0]: set(rule["verbs"]) for rule in role["rules"]}
    assert verbs.pop("secrets") == {"create"}  # and never to read them
    assert set(verbs) == {"jobs", "deployments"} and verbs["deployments"] == {"get"}


@pytest.mark.parametrize("changes", OPTIONS)
def test_its_pods_run_commands_that_there_are(changes, tmp_path):
    options = wanted(**changes)
    folder.write(tmp_path / "out", options)
    mounted = {"/secrets/": [tmp_path / "out" / folder.SERVICE, tmp_path / "out" / folder.NODE]}
    (tmp_path / "pod.json").write_text("{}")

    def readable(word):
        """The argument as the pod gets it, as a file that there is if it names one that the pod mounts."""
        word = word.replace("$(POD_NAME)", "cluster-node-0").replace("$(POD_IP)", "10.0.0.1")
        for place, sources in mounted.items():
            for source in sources:
                if word.startswith(place) and (source / word.removeprefix(place)).exists():
                    return str(source / word.removeprefix(place))
        return str(tmp_path / "pod.json") if word == "/template/pod.json" else word

    parsed = {}
    for role, spec in pods_of(options).items():
        program, *arguments = map(readable, spec["containers"][0]["command"] or ["jaxgoodput"])
        assert program == "jaxgoodput"
        if arguments:
            parsed[role] = cli.command_parser().parse_args(arguments)
    serve, node, pods = parsed.values()
    # What it listens at needs TLS, which it has.
    Service(
        folder=serve.folder, host=serve.host, certificate=serve.tls_certificate, key=serve.tls_key
    )
    assert {token.role for token in read_tokens(serve.tokens).tokens} == {"operator", "node"}
    assert node.scheduler == pods.scheduler == "https://cluster-service:8765"
    assert (node.devices, pods.devices) == (8, 24)
    size = manifests.nodes(options)[0]["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert size["limits"]["cpu"] == options.cpu
    assert (node.cpus, node.memory) == (8.0, 24.0)  # 32 GiB, 8 of which may be /dev/shm
    assert pods.cpus is None and pods.memory is None  # each process has a pod of its own
    assert node.token_file.read_text().strip() in serve.tokens.read_text()
    ssl.create_default_context(cafile=str(node.ca))
    assert pods.pods is not None and pods.elastic_jobset is options.elastic_jobset
    # A coordinator gets twice the time, and its agent outlives it.
    grace_s = pods_of(options)["StatefulSet cluster-node"]["terminationGracePeriodSeconds"]
    assert grace_s > 2 * node.grace_s == 2 * options.grace_s


def test_the_probe_of_an_agent_fails_once_it_looks_after_nothing(tmp_path):
    container = pods_of(wanted())["StatefulSet cluster-node"]["containers"][0]
    command = container["livenessProbe"]["exec"]["command"]
    place = "/tmp/jaxgoodput/nodes/$POD_NAME/alive"
    assert place in command[-1]
    alive = tmp_path / "alive"
    command = [*command[:-1], command[-1].replace(place, str(alive))]

    def code():
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert code() != 0
    alive.touch()
    assert code() == 0
    subprocess.run(["touch", "-d", "-61 seconds", str(alive)], check=True)
    assert code() != 0


def test_secrets_are_for_their_owner_alone_and_stay_when_written_again(tmp_path):
    folder.write(tmp_path, wanted())
    private = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and (path.parent.name == "secrets" or "token" in path.name)
    ]
    assert len(private) == 6
    before = {path: path.read_bytes() for path in private}
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    tokens = json.loads((tmp_path / folder.SERVICE / "tokens.json").read_text())["tokens"]
    operator = (tmp_path / folder.OPERATOR_TOKEN).read_text().strip()
    assert [token["token"] for token in tokens if token["role"] == "operator"] == [operator]
    for path in (tmp_path / folder.NODE).iterdir():
        text = path.read_text()
        assert operator not in text and "PRIVATE" not in text
    folder.write(tmp_path, wanted(num_nodes=5, jobs="pods"))
    assert {path: path.read_bytes() for path in private} == before
    with pytest.raises(ValueError, match="default/cluster .*Choose another folder"):
        folder.write(tmp_path, wanted(name="other"))


def test_secrets_of_a_call_that_was_interrupted_are_made_anew(tmp_path):
    folder.write(tmp_path, wanted())
    (tmp_path / folder.OPERATOR_TOKEN).unlink()
    old = (tmp_path / folder.NODE / "token").read_text()
    folder.write(tmp_path, wanted())
    assert (tmp_path / folder.NODE / "token").read_text() != old
    assert old.strip() not in (tmp_path / folder.SERVICE / "tokens.json").read_text()


NAMES = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES | st.sampled_from(["on", "No", "null", "a-b", "1", "a/b"]), VALUES))
def test_yaml_of_any_value(value):
    assert yaml.safe_load(to_yaml(value) if value else "{}") == value


@pytest.mark.parametrize("name", ["Cluster", "a_b", "a.b", "../x", "-a", "a-", "1a", "", "a" * 41])
def test_names_that_kubernetes_does_not_take(name):
    for field in ("name", "namespace"):
        with pytest.raises(ValueError, match="lowercase"):
            wanted(**{field: name})


@pytest.mark.parametrize("size", ["", "4 Gi", "4GB", "-1", "1e3", "many"])
def test_sizes_that_kubernetes_does_not_take(size):
    with pytest.raises(ValueError, match="--shm 8Gi leaves nothing"):
        manifests.nodes(wanted(memory="8192Mi"))
    with pytest.raises(ValueError, match="quantity"):
        PodSize(cpu="1", memory=size, shared_memory="1Gi")


@pytest.mark.parametrize("text", ["", "=x", "a:Never", "a:"])
def test_tolerations_that_there_are_not(text):
    with pytest.raises(ValueError, match="KEY=VALUE:EFFECT"):
        toleration(text)
    with pytest.raises(ValueError, match="KEY=VALUE"):
        node_label(text or "a")


def test_the_command_says_how_to_install_and_remove(capsys, tmp_path):
    out = tmp_path / "out"
    words = ["manifests", "--image", "i", "--nodes", "2", "--out", str(out), "--volume", "v"]
    words += [
        "--toleration",
        "spot",
        "--toleration",
        "a=b:NoSchedule",
        "--node-selector",
        "pool=gpu",
    ]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert f"kubectl apply -k {out}\n" in said and f"kubectl delete -k {out}\n" in said
    made = list(yaml.safe_load_all((out / "node" / "node.yaml").read_text()))
    spec = made[0]["spec"]["template"]["spec"]
    assert [one["key"] for one in spec["tolerations"]] == ["spot", "a"]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    token = (out / folder.OPERATOR_TOKEN).read_text().strip()
    assert token not in said
    for words in (["--cpu", "much"], ["--namespace", "A"], ["--cluster", "other"]):
        assert cli.main(["manifests", "--image", "i", "--out", str(out), *words]) == 2


KUBECTL = shutil.which("kubectl")


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl")
@pytest.mark.parametrize("jobs", ["nodes", "pods"])
def test_one_command_installs_and_one_removes(jobs, tmp_path):
    """With the real kubectl, against the API of tests."""
    out = tmp_path / "out"
    folder.write(out, wanted(jobs=jobs, queue="q"))

    def kubectl(*words):
        connection = ["--server", cluster.url, "--cache-dir", str(tmp_path / "cache")]
        command = [str(KUBECTL), *connection, "--kubeconfig", "/dev/null", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def there():
        return {key for key in cluster.store.objects if key[0] not in ("Node", "Pod")}

    with Cluster() as cluster:
        kubectl("apply", "-k", str(out), "--validate=false")
        installed = there()
        assert {kind for kind, _, _ in installed} >= {"StatefulSet", "Service", "NetworkPolicy"}
        assert len([1 for kind, _, _ in installed if kind == "Secret"]) == 2
        assert "unchanged" in kubectl("apply", "-k", str(out), "--validate=false")
        assert there() == installed
        kubectl("delete", "-k", str(out))
        assert there() == set()


def test_the_recipe_of_one_job_is_of_the_schema_of_jobset():
    recipe = TOP / "launch" / "jobset.yaml"
    for made in yaml.safe_load_all(recipe.read_text()):
        check_schema(made)
        made["spec"]["network"] = {"enableDnsHostnames": True}  # as it is not spelt
        with pytest.raises(Refused):
            check_schema(made)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_has_the_user_and_the_extras_that_the_manifests_count_on(name):
    text = (TOP / "launch" / name).read_text()
    assert f"USER {wanted().user_id}:{wanted().user_id}\n" in text
    (extras,) = re.findall(r"'\.\[([a-z0-9,]+)\]'", text)
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    assert {"service", *extras.split(",")} <= set(project["optional-dependencies"])
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((TOP / path).exists() for path in copied.split())


def test_the_script_for_a_real_cluster_gives_options_that_there_are(tmp_path):
    """With stand-ins for kubectl and curl: no real cluster is at hand."""
    calls = tmp_path / "calls"
    for program in ("kubectl", "curl"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@" >> {calls}\n')
        (tmp_path / program).chmod(0o755)
    ours = tmp_path / "jaxgoodput"
    ours.write_text(f"""#!/bin/sh
echo jaxgoodput "$@" >> {calls}
[ "$1" = manifests ] || exit 0
exec {sys.executable} -m jaxgoodput.cli "$@"
""")
    ours.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DRAIN": "yes",
        "WAIT_S": "0",
    }
    script = TOP / "launch" / "kubernetes.sh"
    command = ["bash", str(script), "me/mine", "runs", "space", "pods", "--queue", "q"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in calls.read_text().splitlines()]
    for program, *words in lines:
        if program == "jaxgoodput":
            words = words[: words.index("--")] if "--" in words else words
            parse = cli.command_parser().parse_args
            gone = str(TOP / "LICENSE")  # for the files of a folder that is gone by now
            parse(
                [gone if re.search(r"/(ca.crt|operator-token)$", word) else word for word in words]
            )
    assert [words[:2] for words in lines if words[1] in ("apply", "delete")] == [
        ["kubectl", "apply"],
        ["kubectl", "delete"],
    ]


def test_roles_have_objects_of_their_own():
    roles = [manifests.service(wanted()), manifests.nodes(wanted()), manifests.pods(wanted())]
    names = [{(one["kind"], one["metadata"]["name"]) for one in objects} for objects in roles]
    assert all(not a & b for a, b in itertools.combinations(names, 2))
