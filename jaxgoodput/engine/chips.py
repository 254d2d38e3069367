"""Peak rates of chips by their makers' data sheets, to compare measured rates with."""

from dataclasses import dataclass
from typing import Any

GIB = 2.0**30


@dataclass(frozen=True)
class Chip:
    """Peak rates and memory of one accelerator chip."""

    flops: float
    """Matrix-product operations per second in bfloat16, without sparsity."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    network_bandwidth: float
    """Bytes per second received over all links to other chips of a slice or host."""


# By `Device.device_kind`. Sources: cloud.google.com/tpu/docs, the page of each version; NVIDIA's data sheets.
CHIPS = {
    "TPU v4": Chip(275e12, 32 * GIB, 1228e9, 300e9),
    "TPU v5 lite": Chip(197e12, 16 * GIB, 819e9, 200e9),
    "TPU v5": Chip(459e12, 95 * GIB, 2765e9, 600e9),
    "TPU v6 lite": Chip(918e12, 32 * GIB, 1640e9, 448e9),
    "NVIDIA A100-SXM4-40GB": Chip(312e12, 40 * GIB, 1555e9, 300e9),
    "NVIDIA A100-SXM4-80GB": Chip(312e12, 80 * GIB, 2039e9, 300e9),
    "NVIDIA H100 80GB HBM3": Chip(989e12, 80 * GIB, 3350e9, 450e9),
    "NVIDIA H200": Chip(989e12, 141e9, 4800e9, 450e9),
    "NVIDIA L4": Chip(121e12, 24 * GIB, 300e9, 32e9),
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
