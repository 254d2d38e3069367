"""Traces of real clusters are read in their layouts; what cannot be simulated is counted by reason."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import LAYOUTS, LoggedJob, elapsed

from jaxgoodput.cluster.published.recorded.layout import columns_layout
from jaxgoodput.cluster.published.recorded.presets import PRESETS
from jaxgoodput.cluster.published.recorded.read import read_recorded
from jaxgoodput.cluster.published.recorded.times import duration_s, is_missing, time_s
from jaxgoodput.cluster.published.traces import TraceError

JOBS = st.lists(
    st.builds(
        LoggedJob,
        submit_s=st.integers(0, 10**7),
        wait_s=st.integers(0, 10**5),
        duration_s=st.integers(1, 10**6),
        num_devices=st.integers(1, 300),
        user=st.sampled_from(["u1", "u2"]),
    ),
    min_size=1,
    max_size=12,
)


def test_every_preset_has_a_sample():
    assert LAYOUTS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", LAYOUTS)
@given(jobs=JOBS, packed=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_jobs_of_a_layout_are_those_that_were_logged(name, jobs, packed, tmp_path_factory):
    path = tmp_path_factory.mktemp(name) / "trace"
    body = LAYOUTS[name](jobs).encode()
    path.write_bytes(gzip.compress(body) if packed else body)
    found = read_recorded(path, PRESETS[name])
    submitted = {"alibaba-2020": lambda j: j.start_s}.get(name, lambda j: j.submit_s)
    zero_s = min(map(submitted, jobs))
    expected = sorted((submitted(j) - zero_s, j.num_devices, j.duration_s) for j in jobs)
    got = sorted((j.submit_s, j.num_devices, j.duration_s) for j in found.jobs)
    assert got == [pytest.approx(row) for row in expected]
    assert len({job.id for job in found.jobs}) == len(jobs)
    assert [job.submit_s for job in found.jobs] == sorted(job.submit_s for job in found.jobs)
    # Slurm's log also has a row for each step.
    assert found.unusable == ({"a step of a job": len(jobs)} if name == "slurm" else {})


@given(st.integers(0, 10**8))
def test_a_duration_is_the_same_in_every_form(seconds):
    days, rest = divmod(seconds, 86400)
    forms = [str(seconds), f"{seconds}.0", elapsed(seconds)]
    forms += [f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"]
    if seconds < 3600:
        forms.append(f"{seconds // 60:02}:{seconds % 60:02}")
    assert {duration_s(form) for form in forms} == {float(seconds)}


@pytest.mark.parametrize("text", ["soon", "1:2:3:4", "-", "inf", "nan", "1e30", "5-", "12:61x"])
def test_a_text_that_is_no_time_is_refused(text):
    for parse in (duration_s, time_s):
        with pytest.raises(ValueError, match="is no "):
            parse(text)
    assert is_missing(text) == (text == "nan")


def table(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


LAYOUT = columns_layout("submit=at,start=begin,end=finish,devices=gpus,state=how,id=name")
HEADER = "name,at,begin,finish,gpus,how\n"


def test_rows_that_are_no_use_are_counted_by_reason(tmp_path):
    rows = [
        "good,0,5,10,2,done",
        "idle,0,5,10,0,done",
        "none,0,5,10,,done",
        "pending,0,None,10,1,done",
        "running,0,5,Unknown,1,done",
        "short,0,5,5,1,done",
        "back,0,5,4,1,done",
        "lost,,5,10,1,done",
        "part,3,5,10,0.5,done",
        "cut,3,5",
    ]
    found = read_recorded(table(tmp_path, HEADER + "\n".join(rows)), LAYOUT)
    assert [job.id for job in found.jobs] == ["good", "part"] and found.num_rounded == 1
    assert found.unusable == {
        "without devices": 2,
        "without a start": 1,
        "without a duration": 2,
        "ends before it starts": 1,
        "without a submission": 1,
        "another number of cells than the header": 1,
    }
    said = found.in_words()
    assert "2 of 10 rows" in said and "1 without a start" in said and "all of it: 1" in said


def test_only_the_wanted_states_are_used(tmp_path):
    path = table(tmp_path, HEADER + "a,0,1,2,1,done\nb,0,1,2,1,failed\nc,0,1,2,1,\n")
    wanted = columns_layout(
        "submit=at,start=begin,end=finish,devices=gpus,state=how,id=name", states=("done",)
    )
    found = read_recorded(path, wanted)
    assert [job.id for job in found.jobs] == ["a"]
    assert found.unusable == {"in state failed": 1, "in state (none)": 1}


@pytest.mark.parametrize("delimiter", [",", "\t", "|", ";", "^"])
def test_any_delimiter_is_read(tmp_path, delimiter):
    text = (HEADER + "a,0,1,2,1,done\n").replace(",", delimiter)
    given_ = delimiter if delimiter == "^" else None
    layout = columns_layout("submit=at,start=begin,end=finish,devices=gpus", delimiter=given_)
    (job,) = read_recorded(table(tmp_path, text), layout).jobs
    assert (job.num_devices, job.duration_s, job.id) == (1, 1.0, "job-000000")


def test_a_missing_column_is_named_with_those_that_there_are(tmp_path):
    path = table(tmp_path, "id,when,gpus\n1,2,3\n")
    with pytest.raises(
        TraceError, match=r"no column at, begin, finish, how, name\..* id, when, gpus"
    ):
        read_recorded(path, LAYOUT)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("a,soon,1,2,1,x", "line 2: column 'at': 'soon' is no time"),
        ("a,0,1,2,many,x", "line 2: 'many' is no number"),
        ("a,1600000000000,1,2,1,x", "milliseconds"),
        ("a,0,1,2,0,x", "no row is a job that can be simulated: 1 without devices"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, row, says):
    with pytest.raises(TraceError, match=says):
        read_recorded(table(tmp_path, HEADER + row), LAYOUT)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("submit=a,devices=b", "durations, or columns of starts and ends"),
        ("submit=a,duration=b", "Add devices=NAME"),
        ("devices=a,duration=b", "when jobs were submitted"),
        ("submit=a,devices=b,duration=c,disk=d", "'disk=d' is not of the form"),
        ("submit=a,submit=b", "each WHAT once"),
    ],
)
def test_columns_that_do_not_suffice_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        columns_layout(text)


def test_equal_names_are_told_apart(tmp_path):
    path = table(tmp_path, HEADER + "a,0,1,2,1,x\na,0,1,2,1,x\na#2,0,1,2,1,x\n")
    assert [job.id for job in read_recorded(path, LAYOUT).jobs] == ["a", "a#2", "a#2#2"]


# What is particular to single layouts.


def test_parts_of_a_device_and_kinds(tmp_path):
    rows = "j1,worker,3.0,Terminated,5.0,9.0,600.0,29.3,50.0,T4\nj1,ps,1.0,Terminated,5.0,9.0,600.0,29.3,,\n"
    found = read_recorded(table(tmp_path, rows), PRESETS["alibaba-2020"])
    (job,) = found.jobs
    assert (job.num_devices, job.kinds, found.num_rounded) == (2, ("T4",), 1)  # 3 halves
    assert found.unusable == {"without devices": 1}
    rows = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,"
        "scheduled_time\np,4000,1,1,220,V100M16|V100M32,BE,Running,10,30,20\nq,4,1,1,1000,,BE,Pending,10,30,\n"
    )
    found = read_recorded(table(tmp_path, rows), PRESETS["alibaba-2023"])
    (job,) = found.jobs
    assert (job.num_devices, job.kinds, job.duration_s) == (1, ("V100M16", "V100M32"), 10.0)
    assert found.num_rounded == 1 and found.unusable == {"in state Pending": 1}


@pytest.mark.parametrize(
    ("name", "row", "cpus", "memory_gib"),
    [
        (
            "helios",
            "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,duration\n"
            "1,u,v,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,249\n",
            4.0,
            0.0,
        ),
        (
            "acme",
            "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,type,state,submit_time,start_time,"
            "end_time\nd,u,8,64,960,1000,Other,FAILED,2023-05-17 11:00:58,2023-05-17 11:01:08,"
            "2023-05-17 11:01:16\n",
            15.0,
            125.0,
        ),
        (
            "acme",  # Seren says nothing of memory
            "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time\n"
            "5,u,1,8,128,Other,FAILED,2023-03-01 00:18:22,2023-03-01 00:18:54,2023-03-01 00:20:51\n",
            16.0,
            0.0,
        ),
        (
            "alibaba-2020",
            "j,worker,2.0,Terminated,10.0,20.0,600.0,29.0,50.0,MISC\n",
            12.0,  # two instances of half a device: one device
            58.0,
        ),
        (
            "alibaba-2023",
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,"
            "deletion_time,scheduled_time\np,88000,327680,8,1000,,LS,Succeeded,1,9,2\n",
            11.0,
            40.0,
        ),
        (
            "slurm",
            "JobID|User|Submit|Start|Elapsed|State|AllocTRES\n"
            "7|u|2024-05-01T00:00:00|2024-05-01T00:01:00|01:00:00|COMPLETED|"
            "billing=8,cpu=64,gres/gpu=8,mem=1T,node=1\n",
            8.0,
            128.0,
        ),
    ],
    ids=["helios", "kalos", "seren", "alibaba-2020", "alibaba-2023", "slurm"],
)
def test_cpus_and_memory_are_shared_evenly_by_devices(tmp_path, name, row, cpus, memory_gib):
    (job,) = read_recorded(table(tmp_path, row), PRESETS[name]).jobs
    assert (job.cpus_per_device, job.memory_gib_per_device) == (cpus, memory_gib)


def test_attempts_of_philly_without_times_or_devices(tmp_path):
    times = '"start_time": "2017-10-07 01:00:00", "end_time": "2017-10-07 02:00:00"'
    gpus = '"detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]'
    job = '{{"status": "Pass", "jobid": "{0}", "submitted_time": "2017-10-07 00:00:00", "attempts": [{1}]}}'
    jobs = [
        job.format("good", f"{{{times}, {gpus}}}"),
        job.format("never", ""),
        job.format("open", f'{{"start_time": "2017-10-07 01:00:00", "end_time": null, {gpus}}}'),
    ]
    found = read_recorded(table(tmp_path, f"[{','.join(jobs)}]"), PRESETS["philly"])
    (one,) = found.jobs
    assert (one.num_devices, one.duration_s) == (3, 3600.0)
    assert found.unusable == {"without a start": 1, "without a duration": 1}
    with pytest.raises(TraceError, match="expected a list of jobs.*cluster_job_log"):
        read_recorded(table(tmp_path, "{}"), PRESETS["philly"])


def test_an_archive_is_named(tmp_path):
    path = tmp_path / "t.tar.gz"
    path.write_bytes(gzip.compress(b"\0" * 257 + b"ustar" + b"\0" * 300))
    with pytest.raises(TraceError, match="is an archive. Unpack it"):
        read_recorded(path, LAYOUT)


def test_slurm_counts_devices_by_kind_if_there_is_no_total(tmp_path):
    head = "JobID|User|Submit|Start|Elapsed|State|AllocTRES\n"
    row = "7|me|2026-07-13T08:06:54|2026-07-13T08:06:54|1-00:00:00|COMPLETED|gres/gpu:a=2,gres/gpu:b=1\n"
    never = "8|me|2026-07-13T08:06:54|None|00:00:00|CANCELLED by 19032|\n"
    found = read_recorded(table(tmp_path, head + row + never), PRESETS["slurm"])
    (job,) = found.jobs
    assert (job.num_devices, job.kinds, job.duration_s) == (3, ("a", "b"), 86400.0)
    assert found.unusable == {"without a start": 1}
