"""A model that lies over several processes is trained as in one: same updates, same samples."""

import dataclasses

import numpy as np
import pytest
import spanning_worker
from multihost_worker import NUM_COUNTED, newest, read
from processes import run
from spanning_worker import EPOCHS, STOPPED_AT, STRATEGIES

from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.train.control import Preempted

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

WORKER = spanning_worker.__file__
SECTIONS = (*STRATEGIES, "begun", "switched", "constrained", "stopped")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds one folder per job."""
    return tmp_path_factory.mktemp("jobs")


def work(out, num_processes, devices_per_process, *sections):
    """Run sections as one job."""
    out.mkdir(exist_ok=True)
    arguments = [str(out), *sections]
    return run(WORKER, num_processes, devices_per_process, arguments=arguments, limit_s=400.0)


def seen(out, section, kind, rank=0):
    """What process `rank` wrote of one kind, in order."""
    return [line for line in read(out / f"{section}.{rank}.jsonl") if line["kind"] == kind]


@pytest.fixture(scope="module")
def two(folder):
    """Two processes of four devices: one section after the other, the last of which stops."""
    out = folder / "two"
    finished = work(out, 2, 4, *SECTIONS)
    assert finished.code == 143, f"{finished.out}\n{finished.err}"
    return out


@pytest.fixture(scope="module")
def four(folder):
    """Four processes of two devices: tensor inside of them, and groups of two that hold a copy each."""
    out = folder / "four"
    finished = work(out, 4, 2, "fsdp4.tensor2", "data2.fsdp4")
    assert finished.code == 0, f"{finished.out}\n{finished.err}"
    return out


@pytest.fixture(scope="module")
def one(folder):
    """One epoch in this process, on eight devices."""
    out = folder / "one"
    out.mkdir()
    spanning_worker.run_layout(out, "fsdp8")
    return out


@pytest.mark.parametrize(
    "job, section",
    [
        *(("two", section) for section in (*STRATEGIES, "switched")),
        pytest.param("four", "fsdp4.tensor2", marks=pytest.mark.nightly),
        pytest.param("four", "data2.fsdp4", marks=pytest.mark.nightly),
    ],
)
def test_a_layout_over_several_processes_gives_the_updates_of_one(request, one, job, section):
    out = request.getfixturevalue(job)
    expected, got = seen(one, "fsdp8", "applied"), seen(out, section, "applied")
    assert len(got) == len(expected) == 8
    names = ["loss", "grad_norm"]
    # With tensor 2 there are half as many replicas, and other rows are every fourth of one.
    if section not in ("switched", "fsdp4.tensor2"):
        names += ["grad_sqr", "grad_var"]
    assert got[-1]["num_samples"] == 8  # half of a batch
    for a, b in zip(expected, got, strict=True):
        same = ("step", "samples", "num_samples", "before", "after")
        assert [a[k] for k in same] == [b[k] for k in same]
        assert a["metrics"].keys() == b["metrics"].keys()
        for name in names:
            np.testing.assert_allclose(
                b["metrics"][name], a["metrics"][name], rtol=2e-5, atol=1e-6, err_msg=name
            )
    (wanted,) = seen(one, "fsdp8", "state")
    for rank in range({"two": 2, "four": 4}[job]):
        (state,) = seen(out, section, "state", rank)
        assert state["step"] == wanted["step"]
        for name, value in wanted["leaves"].items():
            np.testing.assert_allclose(
                state["leaves"][name], value, rtol=2e-5, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize("section", STRATEGIES)
def test_an_evaluation_of_all_processes_covers_every_sample_once(two, one, section):
    """37 samples, whatever the number of rows at a time; the order is checked where they are put together."""
    (expected,) = seen(one, "fsdp8", "evaluated at the end")
    assert len(seen(two, section, "evaluated")) == 2  # while training, and at its end
    for rank in (0, 1):
        (got,) = seen(two, section, "evaluated at the end", rank)
        for name, value in expected["metrics"].items():
            np.testing.assert_allclose(got["metrics"][name], value, rtol=1e-4, err_msg=name)


def test_strategies_change_at_the_same_step_in_all_processes(two):
    used = [
        [
            (line["step"], line["config"]["strategy"])
            for line in seen(two, "switched", "taken", rank)
        ]
        for rank in (0, 1)
    ]
    assert used[0] == used[1]
    names = [strategy for _, strategy in used[0]]
    changes = [a for a, b in zip(names, [None, *names], strict=False) if a != b]
    assert changes == ["fsdp4.tensor2", "data2.fsdp4", "fsdp4.tensor2"]


def test_a_run_begins_with_another_ones_checkpoint_and_its_state_can_be_seen_and_restored(two):
    (other,), (state,) = seen(two, "fsdp8", "state"), seen(two, "begun", "state")
    counts = [np.asarray(line["leaves"]["[0]['count']"]) for line in (other, state)]
    np.testing.assert_array_equal(counts[0], 1)  # every sample once, in the first
    np.testing.assert_array_equal(counts[1], 2)  # and once more
    (shown,) = seen(two, "begun", "shown")
    assert shown["step"] >= 3 and shown["shape"] == [16, 64]
    assert sum(shown["count"]) == 120 + 16 * shown["step"]
    for rank in (0, 1):
        (restored,) = seen(two, "begun", "restored", rank)
        assert restored["same"]


def test_a_model_with_constraints_is_one_program_over_all_processes(two):
    (start,), applied = (seen(two, "constrained", kind) for kind in ("start", "applied"))
    assert start["config"]["num_replicas"] == 8 and len(applied) >= 2
    states = [seen(two, "constrained", "state", rank)[0]["leaves"] for rank in (0, 1)]
    assert states[0] == states[1]


@pytest.fixture(scope="module")
def restarts(folder, two):
    """One run in three jobs: 2 x 4 until it is stopped, 1 x 8 likewise, 4 x 2 to the end."""

    def on_step(watch, event):
        if event.step == 2 * STOPPED_AT:
            watch.trainer.request_stop()

    saved = [newest(two / "counted")]
    with pytest.raises(Preempted):
        spanning_worker.counted(two, "alone", "data2.fsdp4", on_step=on_step)
    saved.append(newest(two / "counted"))
    finished = work(two, 4, 2, "completed")
    assert finished.code == 0, f"{finished.out}\n{finished.err}"
    return two, saved


def test_a_save_that_fails_in_every_process_costs_only_itself(two):
    failed, last = seen(two, "stopped", "checkpoint")
    assert failed["step"] < last["step"] and "No space left" in failed["error"]
    assert newest(two / "counted") >= last["step"] >= STOPPED_AT


def test_a_checkpoint_of_two_processes_is_restored_in_one_and_in_four(restarts):
    out, saved = restarts
    starts = [seen(out, section, "start")[0] for section in ("stopped", "alone", "completed")]
    assert [start["step"] for start in starts] == [0, *saved]
    assert [start["config"]["num_replicas"] for start in starts] == [4, 8, 4]


def test_every_sample_is_applied_exactly_once_over_all_jobs(restarts):
    out, _ = restarts
    applied = [
        line
        for section in ("stopped", "alone", "completed")
        for line in seen(out, section, "applied")
    ]
    assert [a["step"] for a in applied] == list(range(1, len(applied) + 1))
    for a, b in zip(applied, applied[1:], strict=False):
        assert a["after"] == b["before"]
    for line in applied:
        _, after = take(Cursor(**line["before"]), NUM_COUNTED, line["num_samples"])
        assert dataclasses.asdict(after) == line["after"]
    # And so say the devices, of every process.
    for rank in range(4):
        (state,) = seen(out, "completed", "state", rank)
        assert state["leaves"]["[0]['count']"] == [EPOCHS] * NUM_COUNTED
