"""Chips by their makers' data sheets: peak rates, memory and links, and what NVIDIA's compiler asks of a GPU.

A chip is one row of `CHIPS`. `jaxgoodput plan` reads all it knows of a chip from there, so another chip is
another row.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GIB = 2.0**30
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """Properties of a GPU that XLA's compiler must know to compile for it without having one."""

    compute_capability: tuple[int, int]
    num_cores: int
    """Streaming multiprocessors."""
    arithmetic_units_per_core: int
    """Units for float32."""
    threads_per_core: int
    """Most threads that a core holds at once."""
    shared_memory_per_core: int
    """Bytes."""
    shared_memory_per_block: int
    """Bytes that a block of threads may ask for."""
    l2_bytes: int
    clock_ghz: float


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Peak rates and memory of one accelerator chip."""

    name: str
    """Name in `jaxgoodput plan --topology NAME:SHAPE`."""
    flops_by_type: Mapping[str, float]
    """Matrix-product operations per second by type of the factors, without sparsity; `float32` is the fastest
    that the hardware offers for it, such as TF32. A type that is missing has no known rate."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    network_bandwidth: float
    """Bytes per second received over all links to other chips of a slice or node."""
    node_bandwidth: float
    """Bytes per second received from other slices or nodes: a chip's share of its node's network."""
    source: str
    """Documents that state these numbers."""
    gpu: GpuTarget | None = None
    """None for a TPU, whose compiler knows its chips by name."""

    @property
    def flops(self) -> float:
        """Return the matrix-product operations per second in bfloat16, without sparsity."""
        return self.flops_by_type["bfloat16"]

    def seconds_of(self, flops_by_type: Mapping[str, float]) -> float:
        """Return the seconds that matrix products of given types take at the peak rate.

        NaN if the rate of any of them is not listed; see `unlisted`.
        """
        return sum((flops / self._rate(name) for name, flops in flops_by_type.items()), 0.0)

    def unlisted(self, types: Iterable[str]) -> tuple[str, ...]:
        """Return those types of factors for which no rate is listed, such as float64 on an L4."""
        return tuple(name for name in types if math.isnan(self._rate(name)))

    def _rate(self, name: str) -> float:
        """Return the operations per second of a type; NaN if it is not listed. "float8" has all its forms."""
        rates = (rate for kind, rate in self.flops_by_type.items() if name.startswith(kind))
        return next(rates, math.nan)


def _tpu(name: str, bfloat16: float, gib: float, memory: float, links: float, page: str) -> Chip:
    return Chip(
        name=name,
        # JAX rounds float32 factors to bfloat16 there, unless it is asked for more precision.
        flops_by_type={"bfloat16": bfloat16, "float32": bfloat16},
        memory_bytes=gib * GIB,
        memory_bandwidth=memory,
        network_bandwidth=links,
        # Google states the network of a host and not of a slice's chips. 100 Gbit/s for each host of four.
        node_bandwidth=3.125 * GB,
        source=f"cloud.google.com/tpu/docs/{page}",
    )


# Compute capability 8.9 has L4 and L40S, 9.0 has H100 and H200. The numbers are in the CUDA programming
# guide's table of technical specifications.
def _ampere(num_cores: int, l2_bytes: int, clock_ghz: float) -> GpuTarget:
    return GpuTarget(
        compute_capability=(8, 0),
        num_cores=num_cores,
        arithmetic_units_per_core=64,
        threads_per_core=2048,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
        l2_bytes=l2_bytes,
        clock_ghz=clock_ghz,
    )


def _ada(num_cores: int, l2_bytes: int, clock_ghz: float) -> GpuTarget:
    return GpuTarget(
        compute_capability=(8, 9),
        num_cores=num_cores,
        arithmetic_units_per_core=128,
        threads_per_core=1536,
        shared_memory_per_core=102_400,
        shared_memory_per_block=101_376,
        l2_bytes=l2_bytes,
        clock_ghz=clock_ghz,
    )


def _hopper_or_later(
    capability: tuple[int, int], num_cores: int, l2_bytes: int, clock_ghz: float
) -> GpuTarget:
    return GpuTarget(
        compute_capability=capability,
        num_cores=num_cores,
        arithmetic_units_per_core=128,
        threads_per_core=2048,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        l2_bytes=l2_bytes,
        clock_ghz=clock_ghz,
    )


MIB = 2**20
_A100 = {
    "flops_by_type": {
        "bfloat16": 312e12,
        "float16": 312e12,
        "int8": 624e12,
        "float32": 156e12,
        "float64": 19.5e12,
    },
    "network_bandwidth": 300 * GB,  # NVLink 3: 600 GB/s, both directions together
    "node_bandwidth": 25 * GB,  # DGX A100: one port of 200 Gbit/s for each GPU
    "source": "NVIDIA A100 data sheet (2021), DGX A100 data sheet",
    "gpu": _ampere(108, 40 * MIB, 1.41),
}
_H100 = {
    "flops_by_type": {
        "bfloat16": 989.4e12,
        "float16": 989.4e12,
        "float8": 1978.9e12,
        "int8": 1978.9e12,
        "float32": 494.7e12,
        "float64": 66.9e12,
    },
    "network_bandwidth": 450 * GB,  # NVLink 4: 900 GB/s, both directions together
    "node_bandwidth": 50 * GB,  # DGX H100: one port of 400 Gbit/s for each GPU
    "gpu": _hopper_or_later((9, 0), 132, 50 * MIB, 1.98),
}

# By `Device.device_kind`.
CHIPS: Mapping[str, Chip] = {
    "TPU v4": _tpu("v4", 275e12, 32.0, 1228e9, 300e9, "v4"),
    "TPU v5 lite": _tpu("v5e", 197e12, 16.0, 819e9, 200e9, "v5e"),
    "TPU v5": _tpu("v5p", 459e12, 95.0, 2765e9, 600e9, "v5p"),
    "TPU v6 lite": _tpu("v6e", 918e12, 32.0, 1640e9, 448e9, "v6e"),
    "NVIDIA A100-SXM4-40GB": Chip(
        name="a100-40", memory_bytes=40 * GIB, memory_bandwidth=1555 * GB, **_A100
    ),
    "NVIDIA A100-SXM4-80GB": Chip(
        name="a100-80", memory_bytes=80 * GIB, memory_bandwidth=2039 * GB, **_A100
    ),
    # GDDR6 keeps its error correction in the same memory, so these two report less than 24 and 48 GiB.
    "NVIDIA L4": Chip(
        name="l4",
        flops_by_type={
            "bfloat16": 121e12,
            "float16": 121e12,
            "float8": 242.5e12,
            "int8": 242.5e12,
            "float32": 60e12,
        },
        memory_bytes=24 * GB,
        memory_bandwidth=300 * GB,
        network_bandwidth=32 * GB,  # PCIe 4 x16
        node_bandwidth=1.5625 * GB,  # g2-standard-96: 100 Gbit/s for 8 GPUs
        source="NVIDIA L4 data sheet (2023); between nodes Google Cloud's g2-standard-96",
        gpu=_ada(58, 48 * MIB, 2.04),
    ),
    "NVIDIA L40S": Chip(
        name="l40s",
        flops_by_type={
            "bfloat16": 362e12,
            "float16": 362e12,
            "float8": 733e12,
            "int8": 733e12,
            "float32": 183e12,
        },
        memory_bytes=48 * GB,
        memory_bandwidth=864 * GB,
        network_bandwidth=32 * GB,  # PCIe 4 x16
        node_bandwidth=6.25 * GB,  # g6e.48xlarge: 400 Gbit/s for 8 GPUs
        source="NVIDIA L40S data sheet (2023); between nodes AWS's g6e.48xlarge",
        gpu=_ada(142, 96 * MIB, 2.52),
    ),
    "NVIDIA H100 80GB HBM3": Chip(
        name="h100",
        memory_bytes=80 * GIB,
        memory_bandwidth=3350 * GB,
        source="NVIDIA H100 data sheet (SXM), DGX H100 data sheet",
        **_H100,
    ),
    "NVIDIA H200": Chip(
        name="h200",
        memory_bytes=143_771.0 * MIB,  # as it reports; 141 GB by name
        memory_bandwidth=4800 * GB,
        source="NVIDIA H200 data sheet (SXM), DGX H200 data sheet",
        **_H100,
    ),
    "NVIDIA B200": Chip(
        name="b200",
        flops_by_type={
            "bfloat16": 2250e12,
            "float16": 2250e12,
            "float8": 4500e12,
            "int8": 4500e12,
            "float32": 1125e12,
            "float64": 37e12,
        },
        memory_bytes=183_359.0 * MIB,  # as it reports; 180 GB by name
        memory_bandwidth=8000 * GB,
        network_bandwidth=900 * GB,  # NVLink 5: 1800 GB/s, both directions together
        node_bandwidth=50 * GB,  # DGX B200: one port of 400 Gbit/s for each GPU
        source="NVIDIA DGX B200 data sheet, a GPU's eighth",
        gpu=_hopper_or_later((10, 0), 148, 126 * MIB, 1.965),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Operations that a training sample takes, and the peak rate of the devices, to compute utilisation."""

    tflops_per_sample: float
    """10^12 matrix-product operations per sample; NaN if not known."""
    num_devices: int
    peak_tflops: float
    """10^12 operations per second and device, in bfloat16; NaN if the chip is not listed."""


def chip_of(device: Any) -> Chip | None:
    """Return the chip of a device; None if its rates are not listed."""
    return CHIPS.get(getattr(device, "device_kind", ""))


def gpu_named(name: str) -> tuple[str, Chip] | None:
    """Return device kind and chip of the GPU with a name such as "h100"; None if there is none.

    >>> gpu_named("h100")[0], gpu_named("v5e")
    ('NVIDIA H100 80GB HBM3', None)
    """
    found = ((kind, chip) for kind, chip in CHIPS.items() if chip.gpu and chip.name == name)
    return next(found, None)
