"""What chips can do at most, as their makers state it: the measure of rooflines and of how a chip is used."""

from dataclasses import dataclass
from typing import Any

GIB = 2.0**30


@dataclass(frozen=True)
class Chip:
    """Peak rates of one chip."""

    flops: float
    """Per second, of matrix products in bfloat16, without sparsity."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    network_bandwidth: float
    """Bytes per second that arrive over all of its links to other chips of a slice or a host."""


# By `Device.device_kind`; cloud.google.com/tpu/docs, the pages of each version, and NVIDIA's data sheets.
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
    """What training takes, and what the devices could do."""

    tflops_per_sample: float
    """10^12 operations of matrix products; NaN: not known."""
    num_devices: int
    peak_tflops: float
    """Per second and device, in bfloat16; NaN: of a chip that is not listed."""


def chip_of(device: Any) -> Chip | None:
    """The chip of a device; None where its rates are not listed."""
    return CHIPS.get(getattr(device, "device_kind", ""))
