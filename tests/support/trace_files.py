"""Small traces in the layouts of public ones, written from the same jobs."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass

DAY = datetime.datetime(2020, 6, 9, 18, 41, 1)


@dataclass(frozen=True)
class LoggedJob:
    """A job as a cluster's log has it. Seconds count from any zero."""

    submit_s: int
    wait_s: int
    duration_s: int
    num_devices: int
    user: str = "u1"

    @property
    def start_s(self) -> int:
        return self.submit_s + self.wait_s

    @property
    def end_s(self) -> int:
        return self.start_s + self.duration_s


def clock(seconds: int, zone: str = "") -> str:
    return str(DAY + datetime.timedelta(seconds=seconds)) + zone


def elapsed(seconds: int) -> str:
    """As Slurm writes it: [D-]HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    said = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{said}" if days else said


def _table(header: str, rows: Sequence[Sequence[object]], delimiter: str = ",") -> str:
    lines = [delimiter.join(map(str, row)) for row in rows]
    return "\n".join([*([header] if header else []), *lines]) + "\n"


def helios(jobs: Sequence[LoggedJob]) -> str:
    rows = [
        (i, j.user, "vc1", j.num_devices, 4, 1, "COMPLETED", clock(j.submit_s), clock(j.start_s),
         clock(j.end_s), j.duration_s, j.wait_s)
        for i, j in enumerate(jobs)
    ]  # fmt: skip
    names = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
    return _table(names, rows)


def acme(jobs: Sequence[LoggedJob]) -> str:
    """Kalos, whose durations count from the submission."""
    rows = [
        (f"dlc{i}", j.user, 1, j.num_devices, 8, 100, 100.0, "Pretrain", "FAILED",
         clock(j.submit_s, "+00:00"), clock(j.start_s, "+00:00"), clock(j.end_s, "+00:00"), "", "",
         j.duration_s + j.wait_s, j.wait_s, 1.0)
        for i, j in enumerate(jobs)
    ]  # fmt: skip
    names = (
        "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,"
        "start_time,end_time,fail_time,stop_time,duration,queue,gpu_time"
    )
    return _table(names, rows)


def alibaba_2020(jobs: Sequence[LoggedJob]) -> str:
    """Instances of one device each; the log begins with the start of a task."""
    rows = [
        (f"4f05{i}", "worker", f"{j.num_devices}.0", "Terminated", f"{j.start_s}.0", f"{j.end_s}.0", 600.0,
         29.3, 100.0, "MISC")
        for i, j in enumerate(jobs)
    ]  # fmt: skip
    return _table("", rows)


def alibaba_2023(jobs: Sequence[LoggedJob]) -> str:
    names = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,"
        "scheduled_time"
    )
    rows = [
        (f"pod-{i}", 8000, 30517, j.num_devices, 1000, "", "LS", "Running", j.submit_s, j.end_s, j.start_s)
        for i, j in enumerate(jobs)
    ]  # fmt: skip
    return _table(names, rows)


def philly(jobs: Sequence[LoggedJob]) -> str:
    """Each job in two attempts, with an hour between them that is no run time."""
    return json.dumps(
        [
            {
                "status": "Pass",
                "vc": "ee9e8c",
                "jobid": f"application_{i}",
                "attempts": [
                    _attempt(j.start_s, j.start_s + j.duration_s // 2, j.num_devices),
                    _attempt(j.start_s + j.duration_s // 2 + 3600, j.end_s + 3600, j.num_devices),
                ],
                "submitted_time": clock(j.submit_s),
                "user": j.user,
            }
            for i, j in enumerate(jobs)
        ]
    )


def _attempt(start_s: int, end_s: int, num_devices: int) -> dict[str, object]:
    gpus = [f"gpu{k}" for k in range(num_devices)]
    servers = [gpus[at : at + 8] for at in range(0, num_devices, 8)]
    detail = [{"ip": f"m{k}", "gpus": local} for k, local in enumerate(servers)]
    return {"start_time": clock(start_s), "end_time": clock(end_s), "detail": detail}


def tiresias(jobs: Sequence[LoggedJob]) -> str:
    rows = [
        (i, j.num_devices, j.submit_s, 100, "vgg16", j.duration_s, 30) for i, j in enumerate(jobs)
    ]
    return _table("job_id,num_gpu,submit_time,iterations,model_name,duration,interval", rows)


def slurm(jobs: Sequence[LoggedJob]) -> str:
    rows = []
    for i, j in enumerate(jobs):
        times = clock(j.submit_s), clock(j.start_s), clock(j.end_s), elapsed(j.duration_s)
        times = tuple(time.replace(" ", "T") for time in times)
        gpus = f"gres/gpu:a100={j.num_devices},gres/gpu={j.num_devices}"
        rows.append(
            (i, j.user, *times, "CANCELLED by 1000", f"billing=8,cpu=8,{gpus},mem=4G,node=1")
        )
        rows.append((f"{i}.batch", "", *times, "CANCELLED", "cpu=8,gres/gpu=1,mem=4G,node=1"))
    return _table("JobID|User|Submit|Start|End|Elapsed|State|AllocTRES", rows, "|")


LAYOUTS = {
    "helios": helios,
    "acme": acme,
    "alibaba-2020": alibaba_2020,
    "alibaba-2023": alibaba_2023,
    "philly": philly,
    "tiresias": tiresias,
    "slurm": slurm,
}
