"""The layouts of public traces, and of `sacct`: `--preset NAME`.

Sources, with what is not obvious in each:

* *helios*: `cluster_log.csv` of S-Lab-System-Group/HeliosData. `gpu_num` and `cpu_num` count what all nodes
  of a job have together.
* *acme*: `trace_seren.csv` and `trace_kalos.csv` of InternLM/AcmeTrace. The run time is taken as end - start,
  because `duration` in Kalos counts from the submission, although its README says otherwise: in its own
  example, a job that ran from 11:01:08 to 11:01:16 and was submitted at 11:00:58 has 18 s. `cpu_num` counts
  all nodes, `mem_per_pod_GB`, which Seren does not have, each of the `node_num` pods. A GB counts as a GiB.
* *alibaba-2020*: `pai_task_table.csv` of alibaba/clusterdata (cluster-trace-gpu-v2020). The file has no
  header; `plan_gpu` is in percent of a device, `plan_cpu` in percent of a CPU, `plan_mem` in GB, for each of
  `inst_num` instances. A GB counts as a GiB. The table does not say when a job was submitted, so the start of
  a task counts as its submission.
* *alibaba-2023*: `openb_pod_list_*.csv` of the same repository (v2023). `gpu_milli` is the thousandths of
  the device that a pod with one device gets, `cpu_milli` the thousandths of a CPU and `memory_mib` the MiB
  of a pod.
* *philly*: `cluster_job_log` of msr-fiddle/philly-traces, which is JSON (see `philly.py`).
* *tiresias*: the job files of SymbioticLab/Tiresias (`60_job.csv` and others), in seconds.
* *slurm*: `sacct --parsable2 --format=JobID,User,Submit,Start,End,Elapsed,State,AllocTRES`, in any order and
  with further fields. AllocTRES holds the devices, CPUs and memory of all nodes. Rows of job steps, such as
  12.batch, are no jobs. `sacct` writes local times without their zone; a change to daylight saving time
  shifts what follows by an hour.
"""

import re
from collections.abc import Callable, Mapping

from jaxgoodput.cluster.published.recorded.layout import (
    Cells,
    TraceLayout,
    devices_in,
    kinds_in,
    number_in,
)

# States of jobs that have ended, whether or not they reached what they wanted: they used their devices.
_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
_TRES_CPU = re.compile(r"(?:^|,)cpu=(?P<count>\d+)")
_TRES_MEMORY = re.compile(r"(?:^|,)mem=(?P<count>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)")
_GIB = {"K": 2.0**-20, "": 2.0**-10, "M": 2.0**-10, "G": 1.0, "T": 2.0**10, "P": 2.0**20}
_TRES_GPU = re.compile(r"gres/gpu(?::(?P<kind>[^=,]+))?=(?P<count>\d+)")


def _alibaba_2020(cells: Cells) -> float:
    return number_in(cells, "inst_num") * number_in(cells, "plan_gpu") / 100


def _alibaba_2023(cells: Cells) -> float:
    count = number_in(cells, "num_gpu")
    return number_in(cells, "gpu_milli") / 1000 if count == 1 else count


def _times(first: str, second: str, units: float = 1.0) -> Callable[[Cells], float]:
    """Return the function that multiplies the numbers of two columns, divided by `units`."""

    def read(cells: Cells) -> float:
        return number_in(cells, first) * number_in(cells, second) / units

    return read


def _in_units(name: str, units: float) -> Callable[[Cells], float]:
    """Return the function that reads the number of a column, divided by `units`."""

    def read(cells: Cells) -> float:
        return number_in(cells, name) / units

    return read


def _slurm_cpus(cells: Cells) -> float:
    found = _TRES_CPU.search(cells["AllocTRES"])
    return 0.0 if found is None else float(found["count"])


def _slurm_memory_gib(cells: Cells) -> float:
    found = _TRES_MEMORY.search(cells["AllocTRES"])
    return 0.0 if found is None else float(found["count"]) * _GIB[found["unit"]]


def _slurm_devices(cells: Cells) -> float:
    """Return the devices of a TRES text: the total if there is one, otherwise the sum over kinds."""
    counts = {m["kind"]: float(m["count"]) for m in _TRES_GPU.finditer(cells["AllocTRES"])}
    return counts.get(None, sum(counts.values()))


def _slurm_kinds(cells: Cells) -> tuple[str, ...]:
    found = _TRES_GPU.finditer(cells["AllocTRES"])
    return tuple(dict.fromkeys(m["kind"] for m in found if m["kind"] is not None))


def _slurm_step(cells: Cells) -> str | None:
    return "a step of a job" if "." in cells["JobID"] else None


def _same(*names: str) -> dict[str, str]:
    """Return columns whose names are what they hold, with `_time` after a moment."""
    return {name: f"{name}_time" if name in ("submit", "start", "end") else name for name in names}


PRESETS: Mapping[str, TraceLayout] = {
    "helios": TraceLayout(
        columns={
            **_same("submit", "start", "duration", "state"), "id": "job_id", "user": "user", "tenant": "vc",
        },
        needs=("gpu_num",),
        devices=devices_in("gpu_num"),
        cpus=devices_in("cpu_num"),
        states=_ENDED,
    ),
    "acme": TraceLayout(
        columns={
            **_same("submit", "start", "end", "state"), "id": "job_id", "user": "user", "application": "type",
        },
        needs=("gpu_num",),
        devices=devices_in("gpu_num"),
        cpus=devices_in("cpu_num"),
        memory_gib=_times("node_num", "mem_per_pod_GB"),
        states=_ENDED,
    ),
    "alibaba-2020": TraceLayout(
        header=(
            "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem",
            "plan_gpu", "gpu_type",
        ),
        delimiter=",",
        columns={**_same("start", "end"), "id": "job_name", "state": "status", "application": "task_name"},
        needs=("inst_num", "plan_gpu", "gpu_type"),
        devices=_alibaba_2020,
        cpus=_times("inst_num", "plan_cpu", 100.0),
        memory_gib=_times("inst_num", "plan_mem"),
        kinds=kinds_in("gpu_type"),
        states=("Terminated", "Failed"),
    ),
    "alibaba-2023": TraceLayout(
        columns={
            "submit": "creation_time", "start": "scheduled_time", "end": "deletion_time", "id": "name",
            "state": "pod_phase", "application": "qos",
        },
        needs=("num_gpu", "gpu_milli", "gpu_spec"),
        devices=_alibaba_2023,
        cpus=_in_units("cpu_milli", 1000.0),
        memory_gib=_in_units("memory_mib", 1024.0),
        kinds=kinds_in("gpu_spec"),
        states=("Succeeded", "Running", "Failed"),
    ),
    "philly": TraceLayout(
        file="philly",
        columns={
            "submit": "submitted_time", "start": "start", "duration": "duration", "id": "jobid",
            "state": "status", "user": "user", "tenant": "vc",
        },
        needs=("devices",),
        devices=devices_in("devices"),
        states=("Pass", "Killed", "Failed"),
    ),
    "tiresias": TraceLayout(
        columns={
            "submit": "submit_time", "duration": "duration", "id": "job_id", "application": "model_name",
        },
        needs=("num_gpu",),
        devices=devices_in("num_gpu"),
    ),
    "slurm": TraceLayout(
        delimiter="|",
        columns={
            "submit": "Submit", "start": "Start", "duration": "Elapsed", "id": "JobID", "state": "State",
            "user": "User",
        },
        needs=("AllocTRES",),
        devices=_slurm_devices,
        cpus=_slurm_cpus,
        memory_gib=_slurm_memory_gib,
        kinds=_slurm_kinds,
        left_out=_slurm_step,
        states=(*_ENDED, "OUT_OF_MEMORY", "DEADLINE", "PREEMPTED", "BOOT_FAIL"),
    ),
}  # fmt: skip
