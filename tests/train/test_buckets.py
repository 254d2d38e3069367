"""Runs whose workdir is a bucket, on emulators: resumed, read, refused, and whatever the store does."""

import contextlib
import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import buckets
import compilations
import jax
import numpy as np
import pytest
from problems import Counting, Evaluated, Recorder, config, counting_config, same

import jaxgoodput as jg
from jaxgoodput._disk import InUse
from jaxgoodput.clock import SystemClock
from jaxgoodput.observe import board
from jaxgoodput.observe.events import Checkpoint
from jaxgoodput.observe.report import numbers
from jaxgoodput.parallel.place import place
from jaxgoodput.train.control import NotSaved
from jaxgoodput.train.start.restoring import hold_workdir
from jaxgoodput.workdir import places
from jaxgoodput.workdir.listing import KEY, PIECES, packed, read
from jaxgoodput.workdir.objects import Unavailable
from jaxgoodput.workdir.places import Bucket, workdir_of

WORKER = pathlib.Path(__file__).with_name("bucket_worker.py")
EPOCHS = 3
FAULTS = (
    buckets.Fault(status=503),
    buckets.Fault(cut_after=0.5),
    buckets.Fault(lose_answer=True),
    buckets.Fault(delay_s=0.2),
)


@pytest.fixture(scope="module")
def gcs():
    with buckets.emulator("gs") as found:
        yield found


@pytest.fixture(autouse=True)
def _own_copies(tmp_path, monkeypatch):
    """This machine's copies lie in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(places.tempfile, "tempdir", str(tmp_path))


def settings(url, **changed):
    return counting_config(
        url,
        **{
            "epochs": EPOCHS,
            "saving__every_base_steps": 4,
            "saving__every_s": None,
            "saving__keep": 2,
            **changed,
        },
    )


def counted(state) -> set[float]:
    return set(np.asarray(state.params["count"]).tolist())


def store_of(url):
    bucket = workdir_of(url)
    assert isinstance(bucket, Bucket)
    return bucket.store(SystemClock(), 5.0)


@pytest.mark.slow
def test_a_run_in_a_bucket_is_resumed_read_and_left_to_the_next(gcs, tmp_path):
    url = gcs.url("first")
    with buckets.environment(gcs):
        first = Counting(settings(url, epochs=1, reporting__tensorboard=True))
        state = first.fit()
        assert counted(state) == {1.0}
        assert read(store_of(url)).listing.holder is None
        copy = workdir_of(url).folder
        assert {p.name for p in copy.iterdir()} <= {"lock", "compilation_cache"}

        refused = []

        def another(event):
            if event.step == first_step + 2:
                with pytest.raises(InUse, match=f"{url} is in use by process {os.getpid()} on "):
                    Counting(settings(url)).fit()
                refused.append(event.step)

        first_step = int(state.step)
        second = Counting(settings(url), hooks=[Recorder(another)])
        state = second.fit()
        assert refused == [first_step + 2]
        assert counted(state) == {float(EPOCHS)}

        params, _ = jg.load(url)
        same(params, jax.device_get(state.params))
        same(jax.device_get(second.restore().params), jax.device_get(state.params))
        report = numbers(url)
        assert report["workdir"] == url
        assert report["step"] == int(state.step)
        assert report["restarts"] == 1
        assert report["outcome"] == "done"
        with workdir_of(url).viewed(board.CURVES) as view:
            (curves,) = board.named([url], [view.folder]).values()
            assert len([*curves.rglob("events.*")]) >= 2
        assert not [*tmp_path.glob("jaxgoodput-*")]
        steps = {p.split("/")[1] for p in read(store_of(url)).listing.files if "checkpoints/" in p}
        assert len(steps) == 2
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 7777"):
            jg.load(url, step=7777)


@pytest.mark.nightly
def test_the_best_checkpoint_is_kept_and_found(gcs):
    url = gcs.url("best")
    with buckets.environment(gcs):
        trainer = Evaluated(
            config(
                url,
                epochs=1,
                evaluation__every_base_steps=2,
                saving__best="distance",
                saving__keep=1,
            )
        )
        trainer.fit()
        best = trainer.restore(best=True)
        loaded, _ = jg.load(url, best=True)
        same(loaded, jax.device_get(best.params))


@pytest.mark.nightly
def test_what_the_store_lost_is_named_and_the_checkpoint_before_is_used(gcs, caplog):
    url = gcs.url("damaged")
    with buckets.environment(gcs):
        Counting(settings(url, epochs=1)).fit()
        store = store_of(url)
        listing = read(store).listing
        newest = max(int(p.split("/")[1]) for p in listing.files if p.startswith("checkpoints/"))
        lost = [p for p in listing.files if p.startswith(f"checkpoints/{newest}/state/")]
        for path in lost:
            for piece in listing.files[path]:
                store.delete(piece.key)
        with pytest.raises(ValueError, match="is missing"):
            jg.load(url)
        hook = Recorder()
        assert counted(Counting(settings(url), hooks=[hook]).fit()) == {float(EPOCHS)}
        assert f"{newest} cannot be read" in caplog.text


@pytest.mark.nightly
def test_a_run_whose_workdir_is_taken_stops_and_changes_nothing(gcs):
    url = gcs.url("taken")
    after = []
    with buckets.environment(gcs):
        store = store_of(url)

        def take(event):
            if event.step == 6:
                found = read(store)
                assert found.listing.holder is not None
                other = dataclasses.replace(
                    found.listing.holder, name="process 7 on far", token="7", machine="far"
                )
                store.replace(KEY, packed(found.listing.held_by(other)), found.generation)
                after.append(read(store).listing)

        with pytest.raises(NotSaved) as stopped:
            Counting(settings(url, epochs=1000), hooks=[Recorder(take)]).fit()
        assert f"{url} was taken by process 7 on far" in str(stopped.value)
        assert read(store).listing == after[0]


@pytest.mark.nightly
def test_a_store_that_is_away_fails_saves_and_not_the_run(gcs, monkeypatch):
    monkeypatch.setattr(places, "PATIENCE_S", 0.3)
    url, faults = gcs.url("away"), buckets.Faults()
    away = buckets.Fault(status=503)

    def fail(event):
        if event.step == 5:
            faults.choose = lambda request: away
        if event.step == 14:
            faults.choose = lambda request: None

    hook = Recorder(fail)
    with buckets.faulty(gcs, faults) as through, buckets.environment(through):
        state = Counting(settings(url), hooks=[hook]).fit()
        assert counted(state) == {float(EPOCHS)}
        assert any("503" in (e.error or "") for e in hook.of(Checkpoint))
        assert faults.num_faults > 2
        same(jg.load(url)[0], jax.device_get(state.params))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_a_run_on_a_store_that_fails_often_applies_every_sample_once(kind):
    draw, faults = random.Random(0), buckets.Faults()
    kinds = (*FAULTS, buckets.Fault(status=429))

    def choose(request):
        return draw.choice(kinds) if draw.random() < 0.25 else None

    faults.choose = choose
    with buckets.emulator(kind) as emulator:
        with buckets.faulty(emulator, faults) as through, buckets.environment(through):
            url = through.url("often")
            for epochs in (1, EPOCHS):
                state = Counting(settings(url, epochs=epochs)).fit()
                assert counted(state) == {float(epochs)}
            faults.choose = lambda request: None
            same(jg.load(url)[0], jax.device_get(state.params))
    assert faults.num_faults > 10


def test_several_processes_are_refused_with_the_remedy():
    where = dataclasses.replace(place(jax.devices()[:1]), process_count=2)
    with contextlib.ExitStack() as stack:
        with pytest.raises(ValueError, match="several processes.*mount the bucket"):
            hold_workdir("gs://bucket/run", where, stack, SystemClock())


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("gs://bucket/run", "google.cloud.storage", "gcs"), ("s3://bucket/run", "boto3", "s3")],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(url, module, extra, monkeypatch):
    name = {"gcs": "jaxgoodput.workdir.gcs", "s3": "jaxgoodput.workdir.s3"}[extra]
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    if extra == "gcs":
        monkeypatch.delattr("google.cloud.storage", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'jaxgoodput\[{extra}\]'"):
        jg.load(url)


def test_copies_lie_in_the_cache_of_the_user(tmp_path, monkeypatch):
    assert workdir_of("gs://bucket/run").folder.is_relative_to(tmp_path / "jaxgoodput")
    assert (tmp_path / "jaxgoodput").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for relative in ("", "here"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert places.private_folder() == tmp_path / "home/.cache/jaxgoodput"


def test_a_folder_that_others_could_write_to_is_refused(tmp_path):
    (tmp_path / "jaxgoodput").mkdir()
    (tmp_path / "jaxgoodput").chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it.*set XDG_CACHE_HOME"):
        _ = workdir_of("gs://bucket/run").folder
    (tmp_path / "jaxgoodput").rename(tmp_path / "other")
    (tmp_path / "jaxgoodput").symlink_to(tmp_path / "other")
    with pytest.raises(PermissionError, match="set XDG_CACHE_HOME"):
        _ = workdir_of("gs://bucket/run").folder
    (tmp_path / "jaxgoodput").unlink()
    (tmp_path / "jaxgoodput").write_text("a file")
    with pytest.raises(PermissionError, match="cannot make the folder.*set XDG_CACHE_HOME"):
        _ = workdir_of("gs://bucket/run").folder


# -- stores that are slow or away, without an emulator --------------------------------------------------


ONE = jax.devices()[:1]


@pytest.fixture
def memory(monkeypatch):
    """A store in memory, which all buckets are."""
    store = buckets.MemoryStore()
    monkeypatch.setattr(Bucket, "store", lambda self, clock, patience_s: store)
    return store


def of_checkpoints(method, key):
    return method == "put" and "/checkpoints/" in key


@pytest.mark.nightly
def test_a_store_that_is_away_does_not_hold_up_steps(memory):
    """Once a copy has failed, a save does not wait for the next one: it would never come here."""
    goes_on, waited = threading.Event(), []

    def fail(method, key):
        if of_checkpoints(method, key):
            raise Unavailable("away")

    def hang(method, key):
        if of_checkpoints(method, key):
            waited.append(goes_on.wait(60))
            raise Unavailable("away")

    class Away(Recorder):
        def on_event(self, event):
            super().on_event(event)
            is_failure = isinstance(event, Checkpoint) and event.error is not None
            if is_failure and memory.before is fail:
                memory.before = hang

    def then(event):
        if event.step == 2:
            memory.before = fail
        if event.step == 28:
            memory.before = lambda method, key: None
            goes_on.set()

    hook = Away(then)
    state = Counting(settings("gs://bucket/away", epochs=5), hooks=[hook], devices=ONE).fit()
    assert counted(state) == {5.0}
    assert all(waited)
    assert len([e for e in hook.of(Checkpoint) if "away" in (e.error or "")]) >= 3
    same(jg.load("gs://bucket/away")[0], jax.device_get(state.params))


@pytest.mark.slow
def test_what_is_in_the_bucket_counts_though_it_was_deleted_here(memory):
    def fail(method, key):
        if of_checkpoints(method, key):
            raise Unavailable("away")

    def then(event):
        if event.step == 6:
            while not any("checkpoints/" in x for x in read(memory).listing.files):
                time.sleep(0.01)
            memory.before = fail
        loop = trainer._loop
        assert loop is not None
        known.append(loop.start.checkpoints.steps())

    known, changed = [], {"epochs": 5, "saving__keep": 1}
    hooks = [Recorder(then)]
    trainer = Counting(settings("gs://bucket/run", **changed), hooks=hooks, devices=ONE)
    with pytest.raises(NotSaved) as stopped:
        trainer.fit()
    there = {int(p.split("/")[1]) for p in read(memory).listing.files if "checkpoints/" in p}
    here = {int(x.name) for x in (workdir_of("gs://bucket/run").folder / "checkpoints").iterdir()}
    assert there.isdisjoint(here)
    assert known[-1] >= there  # so that their tables are kept, too
    assert stopped.value.safe_step == max(there)


@pytest.mark.nightly
def test_a_slow_copy_does_not_count_as_hanging(memory, caplog):
    def slow(method, key):
        if of_checkpoints(method, key) and key.endswith("meta/metadata@0"):
            memory.before = lambda method, key: None
            time.sleep(12)

    memory.before = slow
    changed = {"epochs": 5, "saving__hang_after_s": 4.0}
    trainer = Counting(settings("gs://bucket/slow", **changed), devices=ONE)
    assert counted(trainer.fit()) == {5.0}
    assert "hangs" not in caplog.text


# -- kills ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Life:
    """What a process of the worker has said until it ended."""

    steps: list[int]
    saved: list[int]
    applied: str | None
    code: int
    text: str


def lived(
    emulator, url, tmp_path, kill_at=None, nth=1, delay_s=0.0, epochs=EPOCHS, until=None
) -> Life:
    """Run the worker; kill it `delay_s` after the `nth` line that matches `kill_at`, once `until` is set."""
    support = pathlib.Path(__file__).parents[1] / "support"
    environ = {
        **os.environ,
        **compilations.JOBS,
        **emulator.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{support}:{os.environ.get('PYTHONPATH', '')}",
        "XDG_CACHE_HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    child = subprocess.Popen(
        [sys.executable, str(WORKER), url, str(epochs), "0.02"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, num_left = [], nth
    with child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if kill_at is None or not re.match(kill_at, line):
                continue
            if until is not None and not until.is_set():
                continue
            num_left -= 1
            if num_left == 0:
                threading.Timer(delay_s, child.send_signal, [signal.SIGKILL]).start()
    text = "".join(lines)
    return Life(
        steps=[int(s) for s in re.findall(r"^step (\d+)$", text, re.MULTILINE)],
        saved=[int(s) for s in re.findall(r"^saved (\d+) ", text, re.MULTILINE)],
        applied=next(iter(re.findall(r"^applied (.*)$", text, re.MULTILINE)), None),
        code=child.returncode,
        text=text,
    )


def killed_again_and_again(kind, tmp_path, num_kills, seed):
    """Kill runs in one workdir at drawn moments while the store fails; then let one end."""
    draw, faults = random.Random(seed), buckets.Faults()

    def choose(request):
        return draw.choice(FAULTS) if draw.random() < 0.1 else None

    faults.choose = choose
    with buckets.emulator(kind) as emulator, buckets.faulty(emulator, faults) as through:
        url, safe, resumed = through.url("kills/run"), 0, []
        for _ in range(num_kills):
            # Any step; a checkpoint that was begun, and is perhaps being copied; one that is safe.
            kill_at = draw.choice([r"step \d+$", r"saved \d+ ", r"saved [1-9]\d* "])
            delay_s = draw.choice([0.0, 0.05, 0.3])
            life = lived(through, url, tmp_path, kill_at, draw.randint(1, 3), delay_s)
            assert life.code == -signal.SIGKILL, life.text
            if life.steps:  # it went on from what was acknowledged, or from later
                assert life.steps[0] > safe, life.text
                resumed.append(life.steps[0])
            safe = max([safe, *life.saved])
        assert safe > 0
        assert len({*resumed}) > num_kills / 4  # most kills came after something new was saved
        life = lived(through, url, tmp_path)
        assert life.steps[0] > safe, life.text
        assert life.code == 0, life.text
        assert life.applied == f"[{float(EPOCHS)}]", life.text
        assert faults.num_faults > 0
        with buckets.environment(emulator):
            assert set(jg.load(url)[0]["count"].tolist()) == {float(EPOCHS)}
            listing = read(store_of(url)).listing
            assert {*store_of(url).keys(PIECES)} >= listing.keys


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_twenty_kills_lose_nothing_that_was_acknowledged(kind, tmp_path):
    killed_again_and_again(kind, tmp_path, 20, seed=1)


@pytest.mark.nightly
def test_a_second_process_is_refused_while_the_first_lives_and_follows_when_it_is_killed(
    gcs, tmp_path
):
    url, said, is_refused = gcs.url("two"), [], threading.Event()

    def first():
        life = lived(gcs, url, tmp_path, r"saved [1-9]", until=is_refused, epochs=10**6)
        said.append(life)

    thread = threading.Thread(target=first)
    thread.start()
    with buckets.environment(gcs):
        while read(store_of(url)).listing.holder is None:
            time.sleep(0.1)
    try:
        second = lived(gcs, url, tmp_path)
    finally:
        is_refused.set()
    assert second.code == 1
    assert f"{url} is in use by process" in second.text
    assert not second.steps
    thread.join()
    assert said[0].code == -signal.SIGKILL
    third = lived(gcs, url, tmp_path, r"step \d+$", epochs=10**6)
    assert third.steps[0] > max(said[0].saved)
