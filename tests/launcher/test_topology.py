"""Names of devices that are not there: what they stand for, what a compiler is told, and what is missing."""

import math
import os
import re
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import topologies

from jaxgoodput import cli
from jaxgoodput.engine.chips import CHIPS, chip_of
from jaxgoodput.launcher import plan as plan_module
from jaxgoodput.launcher.planning import topology
from jaxgoodput.launcher.planning.topology import (
    devices_of,
    gpu_cluster,
    settings_for,
    target_config,
)
from jaxgoodput.launcher.supervise import UsageError

GPUS = {chip.name: (kind, chip) for kind, chip in CHIPS.items() if chip.gpu}


def test_the_gpus_of_data_centres_are_listed():
    assert set(GPUS) == {"a100-40", "a100-80", "l4", "l40s", "h100", "h200", "b200"}
    assert len({chip.name for chip in CHIPS.values()}) == len(CHIPS)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_a_chip_is_consistent(chip):
    """Wider types are no faster, links are faster inside a node, and memory is faster than links."""
    rates = [
        chip.flops_by_type[name]
        for name in ("float8", "bfloat16", "float32", "float64")
        if name in chip.flops_by_type
    ]
    assert rates == sorted(rates, reverse=True) and chip.flops > 1e14
    assert chip.memory_bandwidth > chip.network_bandwidth > chip.node_bandwidth > 1e9
    assert 15e9 < chip.memory_bytes < 200e9 and chip.source


@pytest.mark.parametrize("name, gib", [("h200", 140.4), ("b200", 179.1), ("h100", 79.6)])
def test_the_memory_is_what_the_device_reports(name, gib):
    """And not the number in its name times 1e9, which is up to 7 % less."""
    (chip,) = (chip for chip in CHIPS.values() if chip.name == name)
    assert chip.memory_bytes / 2**30 == pytest.approx(gib, rel=0.01)


@given(
    flops=st.dictionaries(
        st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int8"]), st.floats(0, 1e18)
    )
)
def test_products_of_several_types_take_the_sum_of_their_times(flops):
    chip = CHIPS["NVIDIA H100 80GB HBM3"]
    fast = {"float8_e4m3fn": 1978.9e12, "int8": 1978.9e12}
    rates = {"bfloat16": 989.4e12, "float32": 494.7e12, **fast}
    expected = sum(count / rates[name] for name, count in flops.items())
    assert chip.seconds_of(flops) == pytest.approx(expected)


def test_the_time_of_a_type_without_a_rate_is_unknown():
    chip = CHIPS["NVIDIA L4"]
    assert math.isnan(chip.seconds_of({"bfloat16": 1e12, "float64": 121e12}))
    assert chip.unlisted(["bfloat16", "float64", "float8_e5m2", "int32"]) == ("float64", "int32")
    assert CHIPS["TPU v4"].seconds_of({"float32": 275e12}) == 1.0


@given(name=st.sampled_from(sorted(GPUS)), nodes=st.integers(1, 99), gpus=st.integers(1, 99))
def test_a_name_is_nodes_by_gpus(name, nodes, gpus):
    found = gpu_cluster(f"{name}:{nodes}x{gpus}")
    assert found is not None
    assert (found.device_kind, found.chip) == GPUS[name]
    assert (found.num_nodes, found.gpus_per_node) == (nodes, gpus)


@given(
    name=st.sampled_from(sorted(GPUS)),
    shape=st.text(st.sampled_from("0123456789x:-. "), max_size=9),
)
def test_any_other_shape_is_refused_with_one_that_works(name, shape):
    numbers = re.fullmatch(r"(\d{1,5})x(\d{1,5})", shape)
    if numbers and 1 <= int(numbers[1]) * int(numbers[2]) <= topology.MOST_DEVICES:
        assert gpu_cluster(f"{name}:{shape}")
        return
    with pytest.raises(UsageError, match=f"nodes x GPUs per node.*such as {name}:1x8"):
        gpu_cluster(f"{name}:{shape}")


@pytest.mark.parametrize("name", ["v5e:16x16", "v5p:4x4x4", "rtx:1x8", "h100x8", ""])
def test_other_names_are_not_gpus(name):
    assert gpu_cluster(name) is None


@pytest.mark.parametrize("name", ["rtx:1x8", "h100x8", "v5e", "tpu:4x4", ""])
def test_a_name_that_is_not_known_is_refused_with_the_names_that_are(name):
    with pytest.raises(UsageError, match=f"the topology {name!r} is not known.*v5e:16x16.*a100-40"):
        devices_of(name)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_the_compiler_is_told_what_the_data_sheet_says(name):
    kind, chip = GPUS[name]
    text = target_config(kind, chip)
    assert text.count("{") == text.count("}")
    assert f'device_description_str: "{kind}"' in text
    assert f"core_count: {chip.gpu.num_cores} " in text
    major, minor = chip.gpu.compute_capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert f"memory_bandwidth: {int(chip.memory_bandwidth)} " in text
    assert chip_of(types.SimpleNamespace(device_kind=kind)) is chip


def test_settings_keep_the_users_flags_and_let_several_plans_run_at_once():
    gpus = settings_for("h100:1x8", {"XLA_FLAGS": "--mine=1"})
    assert gpus["XLA_FLAGS"].startswith("--mine=1 ") and gpus["JAX_PLATFORMS"] == "cpu"
    # libtpu holds a lock of the machine otherwise, which a second plan would fail at.
    assert settings_for("v5e:4x4", {})["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("h100:1x8", r"pip install 'jaxgoodput\[cuda12\]'.*--python cuda/bin/python"),
        ("v5e:2x4", r"pip install 'jaxgoodput\[tpu\]'"),
    ],
)
def test_a_compiler_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch, name, remedy
):
    monkeypatch.setattr(topology, "_is_installed", lambda module: False)
    with pytest.raises(UsageError, match=f"needs the (CUDA|TPU) compiler.*{remedy}"):
        devices_of(name)


@pytest.mark.parametrize("name", ["h100:1x8", "v5e:2x4"])
def test_a_compiler_that_fails_is_not_said_to_be_missing(monkeypatch, name):
    def fails(**_):
        raise RuntimeError("ABORTED: in use by another process\nmore")

    monkeypatch.setattr(topology, "_is_installed", lambda module: True)
    monkeypatch.setattr(topologies, "get_topology_desc", fails)
    with pytest.raises(UsageError, match="ABORTED: in use by another process") as raised:
        devices_of(name)
    assert "pip install" not in str(raised.value)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_the_compiler_is_asked_for_the_nodes_and_gpus_of_the_name(monkeypatch, name):
    asked = []

    def found(**settings):
        asked.append(settings)
        return types.SimpleNamespace(devices=("a", "b"))

    monkeypatch.setattr(topology, "_is_installed", lambda module: True)
    monkeypatch.setattr(topologies, "get_topology_desc", found)
    assert devices_of(f"{name}:2x4") == ["a", "b"]
    assert asked == [
        {"platform": "cuda", "topology": "1x2x4", "target_config": target_config(*GPUS[name])}
    ]
    with pytest.raises(UsageError, match=f"--num-slices is for TPUs.*{name}:2x4"):
        devices_of(f"{name}:1x4", 2)


def test_a_python_without_this_package_is_refused_with_the_remedy(tmp_path, capsys):
    arguments = ["plan", "train.py", "--topology", "h100:1x8", "--python"]
    assert cli.main([*arguments, str(tmp_path / "none")]) == 2
    assert "cannot be started: No such file" in capsys.readouterr().err
    empty = tmp_path / "python"
    empty.write_text(
        "#!/bin/sh\necho 'ModuleNotFoundError: No module named jaxgoodput' >&2\nexit 1\n"
    )
    empty.chmod(0o755)
    assert cli.main([*arguments, str(empty)]) == 2
    said = capsys.readouterr().err
    assert "cannot import jaxgoodput: ModuleNotFoundError" in said and "-m pip install" in said


def test_another_python_does_the_planning(tmp_path, monkeypatch):
    """With the settings of the topology, and without JAX's cache, in which nothing would be compiled."""
    wrapped = tmp_path / "python"
    wrapped.write_text(
        '#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\n'
        f'echo "$XLA_FLAGS $JAX_ENABLE_COMPILATION_CACHE $*" > {tmp_path}/called; exit 3\n'
    )
    wrapped.chmod(0o755)
    environ = {"PATH": os.environ["PATH"]}
    code = plan_module.plan(["train.py"], topology="h100:1x8", python=str(wrapped), environ=environ)
    assert code == 3, sys.executable
    said = (tmp_path / "called").read_text()
    assert "--xla_gpu_autotune_level=0 false -m jaxgoodput.launcher.plan train.py" in said


@pytest.mark.parametrize(("text", "share"), [(None, 0.75), ("0.9", 0.9), ("1", 1.0)])
def test_jax_takes_a_share_of_a_gpu(text, share):
    environ = {} if text is None else {"XLA_PYTHON_CLIENT_MEM_FRACTION": text}
    assert plan_module.share_of_gpu(environ) == share


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="must be above 0 and at most 1"):
        plan_module.share_of_gpu({"XLA_PYTHON_CLIENT_MEM_FRACTION": text})
