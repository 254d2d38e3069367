"""Training in several processes is training in one: same updates, same samples, one decision."""

import dataclasses
import shutil

import jax
import multihost_worker
import numpy as np
import pytest
from multihost_worker import COUNTED_EPOCHS, NUM_COUNTED, Counting, Watch, newest, read
from processes import gone, run, start

from jaxgoodput import _disk
from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.goodput.search import BatchConfig

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

WORKER = multihost_worker.__file__


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds one folder per job."""
    return tmp_path_factory.mktemp("jobs")


def work(out, num_processes, devices_per_process, *sections):
    """Run sections as one job."""
    out.mkdir(exist_ok=True)
    return run(
        WORKER, num_processes, devices_per_process, arguments=[str(out), *sections], limit_s=300.0
    )


def seen(out, section, kind, rank=0):
    """What process `rank` wrote of one kind, in order."""
    return [line for line in read(out / f"{section}.{rank}.jsonl") if line["kind"] == kind]


def told(finished):
    return f"code {finished.code}\n{finished.out}\n{finished.err}"


# -- the same numbers as in one process --------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(folder):
    """One job of 2 x 2 that runs section after section: what each of them leaves harms none."""
    out = folder / "two"
    finished = work(out, 2, 2, *SECTIONS, "verdicts", "ready", "finish", "stop")
    assert finished.code == 143, told(finished)  # the last one stops
    return out


@pytest.fixture(scope="module")
def alone(folder):
    """The same sections in this process, on four of its devices."""
    out = folder / "one"
    out.mkdir()

    def fit(section):
        if not (out / f"{section}.0.jsonl").exists():
            multihost_worker.run_noisy(out, section, devices=jax.devices()[:4])
        return out

    return fit


SECTIONS = ("sgd", "adam")
NOISE = ("grad_sqr", "grad_var", "noise_samples", "newest_noise_samples")
DAMAGED = 999  # a step that no run reaches


@pytest.mark.parametrize("section", SECTIONS)
def test_two_processes_of_two_devices_give_the_update_of_four_devices(numbers, alone, section):
    one = alone(section)
    expected, got = seen(one, section, "applied"), seen(numbers, section, "applied")
    assert len(got) == len(expected) >= 4
    last = got[-1]["config"]
    assert got[-1]["num_samples"] < BatchConfig(**last).global_batch_size  # padded
    if section == "adam":
        assert last["num_micro_batches"] > 1
    for a, b in zip(expected, got, strict=True):
        same = ("step", "samples", "num_samples", "before", "after", "config")
        assert [a[k] for k in same] == [b[k] for k in same]
        assert a["metrics"].keys() == b["metrics"].keys()
        assert {"loss", "grad_norm", "gain", "grad_sqr", "grad_var"} <= b["metrics"].keys()
        # The smaller last batch of one process is the only one that measures no noise.
        apart = NOISE if a is expected[-1] else ()
        for name, value in a["metrics"].items():
            if name not in apart:
                np.testing.assert_allclose(
                    b["metrics"][name], value, rtol=5e-6, atol=1e-6, err_msg=name
                )
    assert not np.isnan(got[-1]["metrics"]["grad_var"])
    (wanted,) = seen(one, section, "state")
    for rank in (0, 1):
        (state,) = seen(numbers, section, "state", rank)
        assert state["step"] == wanted["step"]
        assert state["leaves"].keys() == wanted["leaves"].keys()
        for name, value in wanted["leaves"].items():
            np.testing.assert_allclose(
                state["leaves"][name], value, rtol=5e-6, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("section", SECTIONS)
def test_all_processes_take_the_same_samples(numbers, alone, section):
    expected = [line["indices"] for line in seen(alone(section), section, "taken")]
    for rank in (0, 1):
        assert [line["indices"] for line in seen(numbers, section, "taken", rank)] == expected


@pytest.mark.parametrize("section, count", [("sgd", 7), ("adam", 1)])
def test_an_evaluation_covers_every_sample_once(numbers, alone, section, count):
    """Seven samples over two processes of two devices; and one, for which the second has none."""
    (expected,) = seen(alone(section), section, "outputs")
    if section == "sgd":
        assert seen(numbers, section, "evaluated")  # while training, too
    for rank in (0, 1):
        (got,) = seen(numbers, section, "outputs", rank)
        assert all(outputs["id"] == list(range(count)) for outputs in got["outputs"])
        # While training, one process evaluates a step earlier than several can agree to.
        wanted, last = expected["outputs"][-1], got["outputs"][-1]
        np.testing.assert_allclose(last["error"], wanted["error"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            got["summary"]["error"], expected["summary"]["error"], rtol=1e-4, atol=1e-5
        )


# -- one decision ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agreement(numbers):
    return numbers


def configs(out, section, rank):
    return [
        (line["step"], line["config"]["micro_batch_size"], line["config"]["num_micro_batches"])
        for line in seen(out, section, "taken", rank)
    ]


def test_a_verdict_takes_effect_at_the_same_step_everywhere(agreement):
    used = configs(agreement, "verdicts", 0)
    assert configs(agreement, "verdicts", 1) == used
    # Two were asked for in successive steps: the later one wins, the other may be seen or not.
    changes = [b[1:] for a, b in zip(used, used[1:], strict=False) if a[1:] != b[1:]]
    assert [c for c in changes if c != (6, 1)] == [(12, 1), (8, 2), (10, 1), (6, 2)]
    applied = [
        (line["step"], line["config"]["micro_batch_size"], line["config"]["num_micro_batches"])
        for line in seen(agreement, "verdicts", "applied")
    ]
    # The loop also asked for what came after the last sample.
    assert applied == used[: len(applied)] and len(used) - len(applied) <= 1
    assert [s["leaves"] for s in seen(agreement, "verdicts", "state", 0)] == [
        s["leaves"] for s in seen(agreement, "verdicts", "state", 1)
    ]


def test_a_change_of_batch_loses_and_repeats_no_sample(agreement):
    (state,) = seen(agreement, "verdicts", "state", 1)
    assert state["leaves"]["[0]['count']"] == [COUNTED_EPOCHS] * NUM_COUNTED


def test_a_size_that_is_not_compiled_everywhere_is_never_chosen(agreement):
    lines = seen(agreement, "ready", "ready")
    # Process 0 was done long before process 1 was allowed to begin.
    early = [line for line in lines if len(line["own"]) > 1 and len(line["sizes"]) <= 1]
    assert early, lines
    used = configs(agreement, "ready", 0)
    assert configs(agreement, "ready", 1) == used
    for rank in (0, 1):
        assert all(line["compiled"] for line in seen(agreement, "ready", "taken", rank))
    # All but the one that does not fit into the smallest memory; it keeps no other from being used.
    assert sorted(lines[-1]["sizes"]) == [6, 8, 12, 16]
    assert {6, 16} <= {micro for _, micro, _ in used} <= {6, 8, 12, 16}


def test_a_hook_that_finishes_ends_all_processes_at_one_step(agreement):
    states = [state for rank in (0, 1) for state in seen(agreement, "finish", "state", rank)]
    assert len(states) == 2 and states[0]["step"] == states[1]["step"] <= 8 + 20
    (end,) = seen(agreement, "finish", "end")
    assert (end["reason"], end["step"]) == ("done", states[0]["step"])
    assert newest(agreement / "finish") == states[0]["step"]


def test_a_save_that_fails_costs_only_itself(agreement):
    failed, last = seen(agreement, "finish", "checkpoint")
    assert failed["step"] < last["step"] and "No space left" in failed["error"]
    assert last["error"] is None and newest(agreement / "finish") == last["step"]


def test_a_hook_that_stops_saves_one_checkpoint_and_ends_all_processes_at_its_step(agreement):
    stops = [line for rank in (0, 1) for line in seen(agreement, "stop", "preempted", rank)]
    assert len(stops) == 2 and stops[0]["step"] == stops[1]["step"] <= 5 + 20
    assert stops[0]["signal"] == "request_stop"
    assert newest(agreement / "stop") == stops[0]["step"]


# -- stop, crash, and another number of processes ----------------------------------------------------


@pytest.fixture(scope="module")
def restarts(folder):
    """One run in three jobs: 2 x 2 until SIGTERM to process 1, 1 x 2 until SIGKILL, 3 x 1.

    The third one finds a damaged checkpoint on top.
    """
    out = folder / "restarts"
    codes, saved = [], []
    for shape in ((2, 2, "terminated"), (1, 2, "killed"), (3, 1, "completed")):
        if shape[0] == 3:
            damaged = out / "counted" / "checkpoints" / str(DAMAGED)
            shutil.copytree(damaged.parent / str(saved[-1]), damaged)
            (damaged / "meta" / "metadata").write_text('{"cut off')
        finished = work(out, *shape)
        codes.append((finished.code, told(finished)))
        saved.append(newest(out / "counted"))
    return out, codes, saved


def test_sigterm_to_one_process_saves_and_stops_all_at_one_step(restarts):
    out, codes, saved = restarts
    assert codes[0][0] == 143, codes[0][1]
    stops = [line for rank in (0, 1) for line in seen(out, "terminated", "preempted", rank)]
    assert len(stops) == 2 and stops[0]["step"] == stops[1]["step"] == saved[0]
    assert 8 <= saved[0] <= 8 + 3
    assert {stop["signal"] for stop in stops} == {"SIGTERM", "peer"}
    (end,) = seen(out, "terminated", "end")
    assert (end["step"], end["reason"]) == (saved[0], "preempted")


def test_a_job_goes_on_with_another_number_of_processes_and_maps_the_batch(restarts):
    out, codes, saved = restarts
    assert codes[1][0] == 137, codes[1][1]
    assert codes[2][0] == 0, codes[2][1]
    first, second, third = (
        seen(out, section, "start")[0] for section in ("terminated", "killed", "completed")
    )
    assert [first["step"], second["step"]] == [0, saved[0]]
    assert third["step"] == saved[1] > saved[0]
    total = [BatchConfig(**line["config"]).global_batch_size for line in (first, second, third)]
    assert total == [24, 48, 48]  # the verdict of the first job outlived it
    assert [line["config"]["num_replicas"] for line in (first, second, third)] == [4, 2, 3]


def test_a_damaged_checkpoint_is_set_aside_by_all_processes(restarts):
    out, codes, saved = restarts
    for rank in (0, 1, 2):
        assert f"checkpoints/{DAMAGED} cannot be read" in "".join(
            line for line in codes[2][1].splitlines() if line.startswith(f"[{rank}]")
        )
    assert [p.name for p in (out / "counted" / "damaged_checkpoints").iterdir()] == [str(DAMAGED)]
    assert saved[1] < saved[2] < DAMAGED


def test_every_sample_of_every_epoch_is_applied_exactly_once_over_all_jobs(restarts):
    out, _, _ = restarts
    applied = []
    undone = 0
    for section in ("terminated", "killed", "completed"):
        for line in read(out / f"{section}.0.jsonl"):
            if line["kind"] == "start":
                kept = [a for a in applied if a["step"] <= line["step"]]
                undone += len(applied) - len(kept)
                applied = kept
            elif line["kind"] == "applied":
                applied.append(line)
    assert undone > 0  # else SIGKILL came too soon to show anything
    assert [a["step"] for a in applied] == list(range(1, len(applied) + 1))
    ids = []
    for line in applied:
        cursor = Cursor(**line["before"])
        indices, after = take(cursor, NUM_COUNTED, line["num_samples"])
        assert dataclasses.asdict(after) == line["after"]
        ids.append(indices)
    for a, b in zip(applied, applied[1:], strict=False):
        assert a["after"] == b["before"]
    epochs = np.concatenate(ids).reshape(COUNTED_EPOCHS, NUM_COUNTED)
    assert (np.sort(epochs, axis=1) == np.arange(NUM_COUNTED)).all()
    # And so say the devices.
    for rank in (0, 1, 2):
        (state,) = seen(out, "completed", "state", rank)
        assert state["leaves"]["[0]['count']"] == [COUNTED_EPOCHS] * NUM_COUNTED


def test_a_workdir_in_use_is_refused_by_all_processes(folder):
    out = folder / "held"
    (out / "finish").mkdir(parents=True)
    with _disk.held(out / "finish"):
        finished = work(out, 2, 1, "finish")
    assert finished.code == 1, told(finished)
    for rank, words in enumerate(("is in use", "another process cannot use the workdir")):
        assert words in "".join(finished.lines(rank, "err")), told(finished)


@pytest.mark.parametrize(
    "section, words", [("crash_source", "the disk of process 1"), ("crash_hook", "this hook")]
)
def test_a_process_that_fails_takes_the_job_down_and_leaves_the_checkpoint(folder, section, words):
    out = folder / section
    out.mkdir()
    # Far below any time-out of a collective or of the coordination service.
    with start(WORKER, 2, 1, arguments=[str(out), section]) as job:
        finished = job.wait(limit_s=100.0)
    assert finished.code not in (0, 143), told(finished)
    assert words in finished.err
    if (
        section == "crash_source"
    ):  # the other process says what it knows, and not to free some space
        assert "PeerLost: another process" in finished.err and "these are silent: 1" in finished.err
        assert "Free some space" not in finished.err
        assert "process 1 failed first" in finished.err
    for rank in (0, 1):
        assert gone(int(finished.value(rank, "pid")))
    saved = newest(out / section)
    assert saved >= 2

    settings = multihost_worker.counting_settings(epochs=None, base_steps=saved + 3.0)
    given = multihost_worker.config(out, section, **settings)
    again = Watch(Counting, given, out / "again.jsonl", devices=jax.devices()[:1])
    again.fit()
    (begin,) = [line for line in again.lines() if line["kind"] == "start"]
    assert begin["step"] == saved
    (state,) = [line for line in again.lines() if line["kind"] == "state"]
    # Batches of 24 out of 120 samples: five of them are an epoch.
    counts = np.bincount(np.asarray(state["leaves"]["[0]['count']"], int))
    epochs, rest = divmod(24 * state["step"], NUM_COUNTED)
    assert counts[epochs] == NUM_COUNTED - rest and counts[epochs + 1 :].sum() == rest
