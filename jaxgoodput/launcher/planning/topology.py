"""Names of devices that need not be there, such as h100:2x8 or v5e:16x16, and the compilers for them.

XLA compiles for GPUs and TPUs on a machine that has none. It reads some settings before JAX is loaded, so
`settings_for` belongs into the environment of a process that then calls `devices_of`.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxgoodput.engine.chips import CHIPS, Chip, gpu_named
from jaxgoodput.launcher.supervise import UsageError

# With these settings, libtpu compiles on a machine without a TPU. It never touches a chip then, so it may be
# loaded by several processes at once.
_WITHOUT_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
}
# The fastest form of a kernel is found by running several, which needs a GPU.
_WITHOUT_AUTOTUNING = "--xla_gpu_autotune_level=0"
# What the wheels of the CUDA compiler are installed as, newest first.
_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
MOST_DEVICES = 65_536


@dataclass(frozen=True)
class GpuCluster:
    """Nodes with the same number of GPUs of one kind."""

    device_kind: str
    """As `Device.device_kind` would say."""
    chip: Chip
    num_nodes: int
    gpus_per_node: int


def gpu_cluster(topology: str) -> GpuCluster | None:
    """Return what a name such as h100:2x8 (nodes x GPUs) stands for; None if it does not begin with a GPU.

    Raises UsageError if it does, but is no such name.

    >>> gpu_cluster("h100:2x8").gpus_per_node, gpu_cluster("v5e:4x4")
    (8, None)
    """
    name, _, shape = topology.partition(":")
    found = gpu_named(name)
    if found is None:
        return None
    numbers = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", shape)
    num_nodes, gpus = (int(n) for n in numbers.groups()) if numbers else (0, 0)
    if not 1 <= num_nodes * gpus <= MOST_DEVICES:
        raise UsageError(
            f"--topology {topology!r} must name nodes x GPUs per node, at most {MOST_DEVICES} GPUs in all, "
            f"such as {name}:1x8 for one node or {name}:2x8 for two."
        )
    return GpuCluster(found[0], found[1], num_nodes, gpus)


def settings_for(topology: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a process can compile for a topology."""
    if gpu_cluster(topology) is None:
        return _WITHOUT_TPUS
    flags = f"{environ.get('XLA_FLAGS', '')} {_WITHOUT_AUTOTUNING}".strip()
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def devices_of(topology: str, num_slices: int = 1) -> list[Any]:
    """Return the devices of a topology, for which programs can be compiled and nothing can be run.

    Raises UsageError if the name is not known, or its compiler is not installed.
    """
    cluster = gpu_cluster(topology)
    return _tpus(topology, num_slices) if cluster is None else _gpus(topology, num_slices, cluster)


def _gpus(topology: str, num_slices: int, cluster: GpuCluster) -> list[Any]:
    if num_slices != 1:
        raise UsageError(
            f"--num-slices is for TPUs, and {topology} is a cluster of GPUs. Name the nodes in the topology, "
            f"such as {cluster.chip.name}:{num_slices}x{cluster.gpus_per_node}."
        )
    if not any(_is_installed(name) for name in _CUDA_PLUGINS):
        raise UsageError(
            f"compiling for {topology} needs the CUDA compiler, which this Python does not have. It needs no "
            "GPU: pip install 'jaxgoodput[cuda12]' (6 GB). To keep it apart from this environment, use "
            "python3 -m venv cuda && cuda/bin/pip install 'jaxgoodput[cuda12]', with what the script "
            "imports, and plan with --python cuda/bin/python."
        )
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{cluster.num_nodes}x{cluster.gpus_per_node}",
            target_config=target_config(cluster.device_kind, cluster.chip),
        )
    except Exception as error:  # no common type: the plugin and its libraries each have their own
        raise UsageError(
            f"the CUDA compiler is installed, but does not make {topology} available: "
            f"{_first_line(error)}. It must have the version of jax."
        ) from error
    return list(found.devices)


def target_config(device_kind: str, chip: Chip) -> str:
    """Return what XLA's compiler must know of a GPU, as the text of its `GpuTargetConfigProto`."""
    gpu = chip.gpu
    assert gpu is not None
    major, minor = gpu.compute_capability
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": gpu.shared_memory_per_core,
        "threads_per_core_limit": gpu.threads_per_core,
        "core_count": gpu.num_cores,
        "fpus_per_core": gpu.arithmetic_units_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": int(chip.memory_bandwidth),
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": int(chip.memory_bytes),
        "shared_memory_per_block_optin": gpu.shared_memory_per_block,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f"gpu_device_info {{ {fields} {capability} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
        "runtime_version { major: 12 minor: 9 patch: 0 } "
        f'device_description_str: "{device_kind}"'
    )


def _tpus(topology: str, num_slices: int) -> list[Any]:
    gpus = ", ".join(chip.name for chip in CHIPS.values() if chip.gpu)
    names = (
        "Names of TPUs look like v5e:16x16, v6e:4x4 or v5p:4x4x4; names of GPUs like h100:2x8, nodes x GPUs "
        f"per node, with one of {gpus}."
    )
    if not re.fullmatch(r"v\d\w*:\d+(x\d+)*", topology):
        raise UsageError(f"the topology {topology!r} is not known. {names}")
    if not _is_installed("libtpu"):
        raise UsageError(
            f"compiling for {topology} needs the TPU compiler, which this Python does not have. It needs no "
            "TPU: pip install 'jaxgoodput[tpu]'."
        )
    from jax.experimental import topologies

    several = {} if num_slices == 1 else {"num_slices": num_slices}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **several)
    except Exception as error:  # no common type
        raise UsageError(
            f"the TPU compiler does not make {topology} available: {_first_line(error)}. {names}"
        ) from error
    return list(found.devices)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200].rstrip(". ")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False
