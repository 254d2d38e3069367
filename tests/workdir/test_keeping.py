"""A keeper changes what is its own alone, and says that something is safe only once it is."""

import contextlib
import shutil
import threading

import buckets
import pytest
from buckets import checkpoint, write

from jaxgoodput.clock import SystemClock
from jaxgoodput.workdir.copies import stamps
from jaxgoodput.workdir.keeping import BucketKeeper
from jaxgoodput.workdir.listing import KEY, content, read
from jaxgoodput.workdir.objects import StoreError, Unavailable
from jaxgoodput.workdir.places import Bucket, workdir_of
from jaxgoodput.workdir.tenure import Tenure


class Below:
    """The objects of another store below a prefix."""

    def __init__(self, store, prefix):
        self.url = f"{store.url}/{prefix}"
        self.get = lambda key: store.get(prefix + key)
        self.put = lambda key, data: store.put(prefix + key, data)
        self.replace = lambda key, data, generation: store.replace(prefix + key, data, generation)
        self.keys = lambda below: (k.removeprefix(prefix) for k in store.keys(prefix + below))
        self.delete = lambda key: store.delete(prefix + key)


@contextlib.contextmanager
def keeping(folder, store):
    """A keeper of a folder, as a run holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    tenure = Tenure.begin(store, SystemClock())
    with contextlib.closing(BucketKeeper(folder, store, tenure, pytest.fail)) as keeper:
        yield keeper


def in_bucket(store):
    return {
        path: b"".join(content(store, piece) for piece in pieces)
        for path, pieces in read(store).listing.files.items()
    }


def contents(folder):
    return {path: (folder / path).read_bytes() for path in stamps(folder)}


def test_leftovers_of_runs_are_deleted_and_the_objects_of_others_stay(tmp_path):
    store = buckets.MemoryStore()
    write(tmp_path / "a", "config.json", b"1")
    with keeping(tmp_path / "a", store):
        pass
    others = {
        "notes.txt",
        "files/1.1/a@0",
        "workdir.pieces/notes.txt",
        "workdir.pieces/1.1/a",
        "workdir.pieces/mine/1.1/a@0",
        "workdir.pieces/1.1/a@0.bak",
    }
    for key in (*others, "workdir.pieces/1.7/checkpoints/3/x@0", "workdir.pieces/1.7/a@67108864"):
        store.put(key, b"x")
    with keeping(tmp_path / "b", store):
        assert store.objects.keys() == {*others, KEY, *read(store).listing.keys}
    assert in_bucket(store) == {"config.json": b"1"}


def test_a_place_that_is_in_use_for_something_else_is_refused_and_stays(tmp_path):
    store = buckets.MemoryStore()
    for key in ("workdir.pieces/1.1/a@0", "workdir.pieces/x"):
        store.objects.clear()
        store.put(key, b"of others")
        with pytest.raises(StoreError, match=f"{key} lies where a run would write. Name another"):
            Tenure.begin(store, SystemClock())
        assert [*store.objects] == [key]


def test_workdirs_within_workdirs_leave_each_other_alone(tmp_path):
    root = buckets.MemoryStore()
    places = {"": "outer", "files/exp1/": "inner", "workdir/": "third"}
    for turn in range(2):
        for prefix, name in places.items():
            folder = tmp_path / f"{name}{turn}"
            with keeping(folder, Below(root, prefix)):
                write(folder, f"{name}.txt", b"%d" % turn)
                write(folder, "log", b"%d" % turn)
    for prefix, name in places.items():
        assert in_bucket(Below(root, prefix)) == {f"{name}.txt": b"1", "log": b"1"}
    for url in ("gs://bucket/workdir.pieces", "s3://bucket/a/workdir.pieces/1.1/x/"):
        with pytest.raises(ValueError, match="in which another workdir keeps its files"):
            workdir_of(url)
    workdir_of("gs://bucket/my-workdir.pieces/x")


def test_a_step_that_is_saved_again_is_safe_only_once_it_is_copied_again(tmp_path):
    store = buckets.MemoryStore()
    answers = threading.Event()
    answers.set()

    def be_slow(method, key):
        if method == "put":
            answers.wait(60)

    store.before = be_slow
    folder = (tmp_path / "checkpoints/100").resolve()
    with keeping(tmp_path, store) as keeper:
        assert not keeper.is_safe(folder)
        checkpoint(tmp_path, 100, b"first")
        write(tmp_path, "checkpoints/100/state/d/other", b"of the first")
        assert keeper.secure() is None
        assert keeper.is_safe(folder)
        answers.clear()
        write(tmp_path, "damaged_checkpoints/x", b"")
        folder.rename(tmp_path / "damaged_checkpoints/100")
        checkpoint(tmp_path, 100, b"second")
        assert not keeper.is_safe(folder)
        answers.set()
        assert keeper.secure() is None
        assert keeper.is_safe(folder)
        assert in_bucket(store) == contents(tmp_path)
        shutil.rmtree(folder)
        assert keeper.secure() is None
        assert not keeper.is_safe(folder)


def test_what_was_published_though_the_answer_was_lost_is_safe(tmp_path):
    store, lost = buckets.MemoryStore(), []
    replace = store.replace

    def lose(key, data, generation):
        done = replace(key, data, generation)
        if b"checkpoints/1/" in data and not lost:
            lost.append(key)
            raise Unavailable("cut off")
        return done

    with keeping(tmp_path, store) as keeper:
        store.replace = lose
        checkpoint(tmp_path, 1)
        assert "cut off" in (keeper.secure() or "")
        assert keeper.secure() is None
        assert keeper.is_safe((tmp_path / "checkpoints/1").resolve())


def test_a_checkpoint_that_loses_files_here_is_named_and_stays_in_the_bucket(tmp_path, caplog):
    store = buckets.MemoryStore()
    with keeping(tmp_path, store) as keeper:
        checkpoint(tmp_path, 1)
        assert keeper.secure() is None
        whole = in_bucket(store)
        (tmp_path / "checkpoints/1/state/d/leaf").unlink()
        for _ in range(4):
            assert keeper.secure() is None
        assert in_bucket(store) == whole
    assert caplog.text.count(f"files have vanished from {tmp_path.resolve()}/checkpoints/1") == 1


def test_a_close_that_is_interrupted_gives_the_workdir_back(tmp_path, monkeypatch):
    store = buckets.MemoryStore()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), keeping(tmp_path, store) as keeper:
        monkeypatch.setattr(keeper, "secure", interrupt)
    assert read(store).listing.holder is None
    assert not keeper.is_complete
    assert not keeper._copier.is_alive
    assert not keeper._renewer.is_alive


def test_a_keeper_that_breaks_gives_the_workdir_back(tmp_path):
    store, told = buckets.MemoryStore(), []

    def fail(method, key):
        if method == "put":
            raise UnicodeError("no such name")

    tenure = Tenure.begin(store, SystemClock())
    with contextlib.closing(BucketKeeper(tmp_path, store, tenure, told.append)) as keeper:
        store.before = fail
        write(tmp_path, "config.json", b"1")
        assert "no such name" in (keeper.secure() or "")
    assert ["no such name" in why for why in told] == [True]
    assert read(store).listing.holder is None


def test_files_that_vanish_while_they_are_copied_do_not_mean_that_the_store_is_away(tmp_path):
    """Else saves would not wait for copies, and delete what is being copied, for ever."""
    store, is_away = buckets.MemoryStore(), threading.Event()

    def fail(method, key):
        if method == "put" and is_away.is_set():
            raise Unavailable("away")
        if method == "put":
            raise FileNotFoundError("deleted")

    with keeping(tmp_path, store) as keeper:
        store.before = fail
        write(tmp_path, "config.json", b"1")
        assert "deleted" in (keeper.secure() or "")
        assert keeper.unreachable is None
        is_away.set()
        assert "away" in (keeper.secure() or "")
        assert "away" in (keeper.unreachable or "")
        store.before = lambda method, key: None
        assert keeper.secure() is None
        assert keeper.unreachable is None


@pytest.mark.parametrize(
    "workdir", ["gs://bucket/..", "s3://bucket/a/../c", "gs://bucket/./a", "s3://bucket/a//c"]
)
def test_a_place_that_a_folder_cannot_copy_is_refused(workdir):
    with pytest.raises(ValueError, match="empty, . or .., .* Leave it out"):
        workdir_of(workdir)


@pytest.mark.parametrize("is_away", [False, True])
def test_the_local_copy_goes_after_a_stop_unless_it_is_all_there_is(
    tmp_path, monkeypatch, caplog, is_away
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = buckets.MemoryStore()
    monkeypatch.setattr(Bucket, "store", lambda self, clock, patience_s: store)
    bucket = workdir_of("gs://bucket/run")

    def fail(method, key):
        if method == "put":
            raise Unavailable("away")

    with pytest.raises(ZeroDivisionError), bucket.held(SystemClock(), pytest.fail):
        if is_away:
            store.before = fail
        write(bucket.folder, "config.json", b"1")
        raise ZeroDivisionError
    assert (bucket.folder / "config.json").exists() == is_away
    assert ("away" in caplog.text) == is_away
    assert read(store).listing.holder is None
    assert in_bucket(store) == ({} if is_away else {"config.json": b"1"})
