"""What Kubernetes is told: YAML that is read as it was meant, of commands and options that there are."""

import pathlib

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from jaxgoodput import cli
from jaxgoodput.cluster.service.manifests import ManifestOptions, jobset, to_yaml
from jaxgoodput.cluster.service.serve import Service


def wanted(**changes):
    fields = {
        "name": "cluster", "image": "example/trainer:1", "num_nodes": 3, "num_devices": 8,
        "kind": "h200", "resource": "nvidia.com/gpu",
    }  # fmt: skip
    return ManifestOptions(**{**fields, **changes})


@pytest.mark.parametrize("volume", [None, "claim"])
def test_the_yaml_is_the_jobset(volume):
    made = jobset(wanted(volume=volume))
    assert yaml.safe_load(to_yaml(made)) == made


@pytest.mark.parametrize(
    "value", [{"a": [], "b": {}, "c": [[1, 2], {"d": None}], "e-f": "x: y # z", "g/h": True}]
)
def test_yaml_of_what_is_hard_to_write(value):
    assert yaml.safe_load(to_yaml(value)) == value


def test_its_pods_run_commands_that_there_are(tmp_path):
    def readable(word):
        """The argument as the pod gets it, as a file that there is if it names one that the pod mounts."""
        word = word.replace("$(INDEX)", "0").replace("$(POD_IP)", "10.0.0.1")
        if not word.startswith(("/tls/", "/tokens/", "/token/")):
            return word
        path = tmp_path / word[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return str(path)

    made = jobset(wanted(volume="claim"))
    assert (made["kind"], made["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    found = []
    for job in made["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert (spec["parallelism"], spec["completions"]) == (1, 1)
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        program, *arguments = map(readable, container["command"])
        assert program == "jaxgoodput"
        found.append((job, container, cli.command_parser().parse_args(arguments)))
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    (scheduler, _, serve), (nodes, container, node) = found
    assert (scheduler["replicas"], nodes["replicas"]) == (1, 3)
    assert (serve.called, node.called) == ("serve", "node")
    # Pods find the scheduler by the name that a JobSet gives its first pod.
    assert node.scheduler == "https://cluster-scheduler-0-0.cluster:8765"
    assert made["spec"]["network"]["enableDNSHostnames"] is True
    assert node.devices == 8 and container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert {variable["name"] for variable in container["env"]} == {"INDEX", "POD_IP"}
    # What it listens at needs TLS, which it has.
    Service(
        folder=serve.folder, host=serve.host, certificate=serve.tls_certificate, key=serve.tls_key
    )


def assert_jobset(made):
    """It is of the schema that JobSet publishes: every field of the right type, none missing."""
    assert holds(JobsetV1alpha2JobSet.from_dict(made).to_dict(), made)


def holds(read, said):
    """Whether all that was said was read; a field that nobody knows is left out in reading."""
    if isinstance(said, dict):
        return all(key in read and holds(read[key], value) for key, value in said.items())
    if isinstance(said, list):
        return len(read) == len(said) and all(map(holds, read, said))
    return read == said


@pytest.mark.parametrize("volume", [None, "claim"])
def test_it_is_of_the_schema_of_jobset(volume):
    made = jobset(wanted(volume=volume))
    assert_jobset(made)
    made["spec"]["network"]["enableDnsHostnames"] = True  # as it is not spelt
    with pytest.raises(AssertionError):
        assert_jobset(made)


def test_the_recipe_of_one_job_is_of_the_schema_of_jobset():
    recipe = pathlib.Path(__file__).parents[3] / "launch" / "jobset.yaml"
    for made in yaml.safe_load_all(recipe.read_text()):
        assert_jobset(made)


def test_names_that_kubernetes_does_not_take():
    for name in ("Cluster", "a_b", "a.b", "../x"):
        with pytest.raises(ValueError):
            jobset(wanted(name=name))


def test_the_command_prints_it(capsys):
    assert cli.main(["manifests", "--image", "i", "--nodes", "2", "--volume", "v"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert [job["replicas"] for job in made["spec"]["replicatedJobs"]] == [1, 2]
