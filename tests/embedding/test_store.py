"""Stored rows survive commits, compaction and reopening, and damage is reported by name."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput._disk import DamagedError, InUse
from jaxgoodput.embedding import index
from jaxgoodput.embedding.store import RowStore, manifests, to_compact
from jaxgoodput.embedding.store import folder as folder_module
from jaxgoodput.embedding.store.compaction import Compactor
from jaxgoodput.embedding.store.segment import Segment, SegmentWriter

WORDS = 4
SMALL: dict[str, Any] = {
    "row_bytes": 8 * WORDS,
    "segment_bytes": 256 * 8 * WORDS,
}  # 256 rows in a segment


def rows_of(ids, version=0):
    """Return rows whose content depends on id and version."""
    ids = np.asarray(ids, np.uint64)
    return ids[:, None] * np.uint64(1000) + np.arange(WORDS, dtype=np.uint64) + np.uint64(version)


def check(store, versions):
    """Assert that the store holds exactly these versions by id."""
    ids = np.array(sorted(versions), np.int64)
    found, rows = store.get(ids)
    assert found.all()
    expected = rows_of(ids) + np.array([versions[i] for i in ids.tolist()], np.uint64)[:, None]
    np.testing.assert_array_equal(rows, expected)
    assert store.ids().tolist() == ids.tolist() and len(store) == len(ids)


@st.composite
def histories(draw):
    """Draw a sequence of operations on a store."""
    ids = st.lists(st.integers(0, 999), unique=True, min_size=1, max_size=400)
    one = st.one_of(
        ids.map(lambda some: ("put", some)),
        st.sampled_from([("commit", []), ("compact", []), ("reopen", []), ("crash", [])]),
    )
    return draw(st.lists(one, max_size=25))


@pytest.mark.parametrize("num_ids", [None, 1000])
@settings(max_examples=25)
@given(history=histories())
def test_every_row_is_the_last_that_was_put_and_a_crash_goes_back_to_the_last_commit(
    num_ids, history
):
    with tempfile.TemporaryDirectory() as folder:
        store = RowStore(folder, num_ids=num_ids, compacts=False, **SMALL)
        now, committed, version = {}, {}, 0
        for what, ids in history:
            version += 1
            if what == "put":
                store.put(np.array(ids), rows_of(ids, version))
                now = now | dict.fromkeys(ids, version)
            elif what == "commit":
                store.commit({"version": version})
                committed = now
            elif what == "compact":
                while store.compact():
                    pass
            else:
                if what == "reopen":
                    store.commit()
                    committed = now
                store.close()
                store = RowStore(folder, num_ids=num_ids, compacts=False, **SMALL)
                now = committed
            check(store, now)
        store.close()


def test_a_row_that_was_never_put_is_not_found(tmp_path):
    with RowStore(tmp_path, **SMALL) as store:
        store.put(np.array([5, 7]), rows_of([5, 7]))
        found, rows = store.get(np.array([4, 7, 2**62, 5]))
        assert found.tolist() == [False, True, False, True]
        np.testing.assert_array_equal(rows, rows_of([7, 5]))


def test_compaction_behind_the_others_keeps_the_disk_within_twice_the_rows(tmp_path):
    rng, versions = np.random.default_rng(0), {}
    with RowStore(tmp_path, **SMALL) as store:
        for version in range(300):
            ids = rng.permutation(4000)[:200]
            store.put(ids, rows_of(ids, version))
            versions |= dict.fromkeys(ids.tolist(), version)
        store.commit()
        while store.compact():
            pass
        store.commit()
        store.commit()  # commits that name compacted segments are forgotten
        check(store, versions)
        size = sum(path.stat().st_size for path in tmp_path.glob("*.rows"))
        assert store.traffic.num_compactions >= 1
    assert size < 2.2 * len(versions) * (8 * WORDS + 16)
    with RowStore(tmp_path, **SMALL) as store:
        check(store, versions)


def test_what_is_compacted_meanwhile_can_still_be_read(tmp_path):
    """Read and write on threads while another thread compacts."""
    errors, done = [], threading.Event()
    with RowStore(tmp_path, **SMALL) as store:
        ids = np.arange(2000)
        store.put(ids, rows_of(ids))

        def read():
            rng = np.random.default_rng(1)
            while not done.is_set():
                some = rng.permutation(2000)[:300]
                found, rows = store.get(some)
                if not found.all() or (rows[:, 0] // 1000 != some).any():
                    errors.append(some)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            rng = np.random.default_rng(2)
            for version in range(200):
                some = rng.permutation(2000)[:100]
                store.put(some, rows_of(some, version))
                if version % 20 == 0:
                    store.commit()
                    store.compact()  # has something to do if the background thread has not done it
        finally:
            done.set()
            reader.join()
        assert store.traffic.num_compactions >= 1
    assert not errors


def test_stale_and_small_segments_are_chosen_to_be_written_anew():
    assert to_compact([100] * 3, [100, 51, 50], 100) == []
    assert to_compact([100] * 3, [0, 49, 100], 100) == [0, 1]
    # More rows would not fit into one segment.
    assert to_compact([100] * 3, [49, 48, 47], 100) == [1, 2]
    assert to_compact([10] * 16, [10] * 16, 100) == []
    assert to_compact([10] * 17, [10] * 17, 100) == list(range(10))


def test_commits_that_are_kept_can_be_gone_back_to_and_others_are_forgotten(tmp_path):
    with RowStore(tmp_path, keep=2, **SMALL) as store:
        for version in range(4):
            store.put(np.array([1, version]), rows_of([1, version], version))
            assert store.commit({"step": version}) == version + 1
    assert list(manifests(tmp_path)) == [4, 3]
    with RowStore(tmp_path, at=3, **SMALL) as store:
        assert store.newest.about == {"step": 2}
        np.testing.assert_array_equal(store.get(np.array([1])).rows, rows_of([1], 2))
        assert not store.get(np.array([3])).found.any()
        assert store.commit() == 5
    assert list(manifests(tmp_path)) == [5, 3]
    with pytest.raises(ValueError, match=r"has no commit 4; it has \[3, 5\]"):
        RowStore(tmp_path, at=4, **SMALL)


def test_a_commit_that_was_gone_back_from_counts_no_more_after_a_kill(two_commits, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_commits, folder)
    with RowStore(folder, at=1, keep=3, **SMALL) as store:
        assert store.commit() == 3
    # Killed before it was deleted.
    shutil.copy(two_commits / "commits/00000002.json", folder / "commits")
    shutil.copy(two_commits / "00000002.rows", folder)
    with RowStore(folder, keep=3, **SMALL) as store:
        assert list(manifests(folder)) == [3, 2, 1]
        store.put(np.array([0]), rows_of([0], 1))
        assert store.commit() == 4
    assert list(manifests(folder)) == [4, 3, 1]


# -- bad input ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_commits(tmp_path_factory):
    """Return a folder with 400 rows in commit 1 and others in commit 2; copy it before you damage it."""
    folder = tmp_path_factory.mktemp("two")
    with RowStore(folder, compacts=False, **SMALL) as store:
        store.put(np.arange(200), rows_of(np.arange(200)))
        store.commit()
        store.put(np.arange(100, 300), rows_of(np.arange(100, 300), 1))
        store.commit()
    return folder


def damage(path: pathlib.Path, kind: str, place: float) -> None:
    content = bytearray(path.read_bytes())
    at = int(place * (8 * len(content) - 1))
    if kind == "flipped":
        content[at // 8] ^= 1 << at % 8
    elif kind == "cut":
        del content[at // 8 :]
    elif kind == "zeroed":
        content[at // 8 :] = bytes(len(content) - at // 8)
    else:
        path.unlink()
        return
    path.write_bytes(content)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["flipped", "cut", "zeroed", "gone"]),
    place=st.floats(0, 1),
    which=st.sampled_from(["00000002.rows", "commits/00000002.json"]),
)
def test_whatever_becomes_of_a_file_it_is_named_and_the_commit_before_is_offered(
    two_commits, kind, place, which
):
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path) / "copy"
        shutil.copytree(two_commits, folder)
        before = (folder / which).read_bytes()
        damage(folder / which, kind, place)
        if (folder / which).exists() and (folder / which).read_bytes() == before:
            return
        if kind == "gone" and which.endswith("json"):  # the damage removed the commit
            with RowStore(folder, **SMALL) as store:
                check(store, dict.fromkeys(range(200), 0))
            return
        with pytest.raises(DamagedError) as found:
            RowStore(folder, **SMALL)
        assert which.rpartition("/")[2] in str(found.value)
        assert "open the store with at=1" in str(found.value)
        assert len(list(folder.glob("damaged/*"))) == (kind != "gone" and which.endswith("rows"))
        with pytest.raises(
            DamagedError, match="open the store with at=1"
        ):  # a damaged store must not look empty
            RowStore(folder, **SMALL)
        with RowStore(folder, at=1, **SMALL) as store:
            check(store, dict.fromkeys(range(200), 0))


def test_damage_to_what_all_commits_share_says_that_none_is_whole(two_commits, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_commits, folder)
    damage(folder / "00000001.rows", "flipped", 0.1)
    with pytest.raises(DamagedError, match=r"00000001\.rows.*No commit before it is whole"):
        RowStore(folder, **SMALL)


def test_a_row_that_is_damaged_while_the_store_is_open_is_never_served(two_commits, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_commits, folder)
    with RowStore(folder, checks_rows=False, **SMALL) as store:
        with open(folder / "00000002.rows", "r+b") as file:
            file.seek(8 * WORDS * 50 + 3)
            file.write(b"\xff")
        with pytest.raises(
            DamagedError, match=r"00000002\.rows has a damaged row: id 150, at position 50"
        ):
            store.get(np.arange(300))
        assert store.get(np.arange(100)).found.all()


def test_damage_to_an_older_commit_stops_nothing_and_goes_with_it(tmp_path):
    folder = tmp_path / "with a space"
    with RowStore(folder, keep=2, compacts=False, **SMALL) as store:
        for version in range(2):
            store.put(np.arange(100), rows_of(np.arange(100), version))
            store.commit()
    damage(folder / "commits/00000001.json", "flipped", 0.7)
    with RowStore(folder, keep=2, compacts=False, **SMALL) as store:
        check(store, dict.fromkeys(range(100), 1))
        store.commit()
        store.commit()
    assert list(manifests(folder)) == [4, 3]
    damage(folder / "commits/00000004.json", "cut", 0.5)
    with pytest.raises(DamagedError, match=r"with a space/commits/00000004\.json.*at=3"):
        RowStore(folder, **SMALL)
    with RowStore(folder, at=3, **SMALL) as store:
        check(store, dict.fromkeys(range(100), 1))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_commit_that_cannot_be_read_now_is_not_damaged(two_commits, tmp_path, monkeypatch, code):
    folder = tmp_path / "copy"
    shutil.copytree(two_commits, folder)

    def refuses(*_):
        raise OSError(code, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_text", refuses)
        with pytest.raises(OSError, match="not now"):
            RowStore(folder, **SMALL)
    with RowStore(folder, **SMALL) as store:
        assert store.newest.number == 2 and len(store) == 300


@pytest.mark.parametrize("limit", [100, 1000])  # with the hash index, and with the direct one
def test_fewer_ids_than_rows_are_there_are_refused(two_commits, tmp_path, monkeypatch, limit):
    folder = tmp_path / "copy"
    shutil.copytree(two_commits, folder)
    monkeypatch.setattr(index, "DIRECT_LIMIT", limit)
    with pytest.raises(ValueError, match=r"the row of id 299, .* num_rows=300 or more"):
        RowStore(folder, num_ids=299, **SMALL)
    with RowStore(folder, num_ids=300, **SMALL) as store:
        assert len(store) == 300


def test_a_store_that_was_closed_takes_nothing(tmp_path):
    store = RowStore(tmp_path, **SMALL)
    store.put(np.arange(3), rows_of(range(3)))
    store.commit()
    store.close()
    there = sorted(tmp_path.glob("**/*"))
    for write in (lambda: store.put(np.arange(3), rows_of(range(3))), store.commit, store.compact):
        with pytest.raises(RuntimeError, match="was closed, and may belong to another process"):
            write()
    store.close()
    assert sorted(tmp_path.glob("**/*")) == there


def test_a_manifest_that_commit_has_just_deleted_is_not_said_to_be_damaged(
    two_commits, tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "copy"
    shutil.copytree(two_commits, folder)
    with RowStore(folder, compacts=False, **SMALL) as store:
        listed = manifests(folder) | {9: folder / "commits/00000009.json"}
        monkeypatch.setattr(folder_module, "manifests", lambda _: listed)
        (folder / "00000077.rows").write_bytes(b"")
        store._folder.delete_unused()
    assert not caplog.records and not (folder / "00000077.rows").exists()


def test_a_segment_that_could_not_be_mapped_is_finished_later(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with RowStore(tmp_path, **SMALL) as store:
        store.put(np.arange(3), rows_of(range(3)))
        with monkeypatch.context() as patch:
            patch.setattr(Segment, "open", refuses)
            with pytest.raises(OSError, match="Too many"):
                store.commit()
        store.commit()
    with RowStore(tmp_path, **SMALL) as store:
        check(store, dict.fromkeys(range(3), 0))


def test_a_store_of_other_rows_is_refused_and_stays_as_it_is(two_commits, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_commits, folder)
    with pytest.raises(ValueError, match="holds rows of 32 bytes, and rows of 64 were asked for"):
        RowStore(folder, row_bytes=64)
    with pytest.raises(ValueError, match="row_bytes=12"):
        RowStore(folder, row_bytes=12)
    with RowStore(folder, **SMALL) as store:
        assert len(store) == 300
        with pytest.raises(ValueError, match="rows of 16 bytes do not fit"):
            store.put(np.arange(1), np.zeros((1, 2), np.uint64))


@pytest.mark.slow
def test_two_processes_cannot_have_one_folder(tmp_path):
    with RowStore(tmp_path, **SMALL) as store:
        store.put(np.arange(3), rows_of(range(3)))
        store.commit()
        program = (
            "import sys\nfrom jaxgoodput.embedding.store import RowStore\n"
            "from jaxgoodput._disk import InUse\n"
            "try:\n    RowStore(sys.argv[1], row_bytes=32)\n"
            "except InUse as error:\n    print(error)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"{tmp_path} is in use by process" in done.stdout
        with pytest.raises(InUse):
            RowStore(tmp_path, **SMALL)
        assert store.get(np.arange(3)).found.all()
    with RowStore(tmp_path, **SMALL) as store:
        assert len(store) == 3


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 MB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here (that needs root)")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_loses_nothing_that_was_committed(small_disk):
    ids = np.arange(20_000)
    with RowStore(small_disk, row_bytes=32, segment_bytes=2**20) as store:
        store.put(ids, rows_of(ids))
        store.commit()
        with pytest.raises(OSError, match="takes no more rows. What was committed is intact"):
            for turn in range(1, 100):  # new ids, so that compaction cannot make room
                store.put(ids + turn * len(ids), rows_of(ids))
        found, rows = store.get(ids)
        assert found.all() and (rows[:, 0] // 1000 == ids).all()
    with RowStore(small_disk, row_bytes=32, segment_bytes=2**20) as store:
        check(store, dict.fromkeys(ids.tolist(), 0))


def test_a_compaction_that_finds_no_room_waits_for_the_next_commit(tmp_path, monkeypatch):
    ids, tried = np.arange(600), threading.Event()

    def refuses(*_):
        tried.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    with RowStore(tmp_path, **SMALL) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Compactor, "_rewrite", refuses)
            for version in range(4):
                store.put(ids, rows_of(ids, version))
            assert tried.wait(60.0)
            tried.clear()
            store.put(ids, rows_of(ids, 4))
            store.commit()
            assert tried.wait(60.0)  # the commit may have made room
        deadline = time.monotonic() + 60.0
        while not store.traffic.num_compactions:
            store.put(ids, rows_of(ids, 5))
            store.commit()
            assert time.monotonic() < deadline
        check(store, dict.fromkeys(ids.tolist(), 5))


@pytest.mark.parametrize("fails", ["os.ftruncate", "numpy.memmap"])
def test_a_segment_that_cannot_be_begun_leaves_nothing_behind(tmp_path, monkeypatch, fails):
    opened, closed = [], []
    real_open, real_close = os.open, os.close

    def opens(path, *options):
        opened.append(real_open(path, *options))
        return opened[-1]

    def closes(descriptor):
        closed.append(descriptor)
        real_close(descriptor)

    def refuses(*_, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with RowStore(tmp_path, compacts=False, **SMALL) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opens)
            patch.setattr(os, "close", closes)
            patch.setattr(fails, refuses)
            with pytest.raises(OSError, match="Cannot allocate"):
                store.put(np.arange(5), rows_of(np.arange(5)))
        assert opened == closed and len(opened) == 1
        assert not list(tmp_path.glob("*.rows")) and not store._folder._pinned
        store.put(np.arange(5), rows_of(np.arange(5)))
        check(store, dict.fromkeys(range(5), 0))


def test_where_the_first_rows_of_a_segment_are_refused_commits_go_on(tmp_path, monkeypatch):
    ids = np.arange(100)

    def refuses(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RowStore(tmp_path, **SMALL) as store:
        store.put(ids, rows_of(ids))
        store.commit()
        with monkeypatch.context() as patch:
            patch.setattr(SegmentWriter, "_allocate", refuses)
            with pytest.raises(OSError, match="takes no more rows"):
                store.put(ids, rows_of(ids, 1))
            assert store.commit() == 2
        store.put(ids, rows_of(ids, 2))
        assert store.commit() == 3
        check(store, dict.fromkeys(ids.tolist(), 2))
    with RowStore(tmp_path, **SMALL) as store:
        check(store, dict.fromkeys(ids.tolist(), 2))


def test_a_disk_that_becomes_read_only_loses_nothing_that_was_committed(small_disk):
    ids = np.arange(1000)
    store = RowStore(small_disk, **SMALL)
    store.put(ids, rows_of(ids))
    store.commit()
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match="ead-only"):
        RowStore(small_disk, **SMALL)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with RowStore(small_disk, **SMALL) as store:
        check(store, dict.fromkeys(ids.tolist(), 0))


# -- kills -------------------------------------------------------------------------------------------

WRITER = pathlib.Path(__file__).with_name("store_worker.py")


def killed_and_opened(folder: pathlib.Path, after_s: float, seed: int) -> tuple[int, int, int]:
    """Kill a writer at a given moment, check every row, and return (commit, its rows, compactions before)."""
    child = subprocess.Popen(
        [sys.executable, WRITER, str(folder), str(seed)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline()  # it has begun to write
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(after_s)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        said = child.stdout.read().splitlines()
        child.stdout.close()
    told, num_compactions = map(int, said[-1].split()) if said else (0, 0)
    with RowStore(folder, row_bytes=64, segment_bytes=2**18) as store:
        assert store.newest is not None
        number = store.newest.about["round"]
        assert number >= told, f"round {told} was committed, and {number} is there"
        expected = store.newest.about["versions"]
        ids = store.ids()
        assert len(ids) == len(expected)
        rows = store.get(ids).rows
        np.testing.assert_array_equal(rows[:, 0], ids)
        np.testing.assert_array_equal(rows[:, 1], np.array(expected)[ids])
        assert (rows[:, 2:] == rows[:, :1] * 7 + rows[:, 1:2]).all()
    return number, len(ids), num_compactions


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.nightly)])
def test_a_store_that_is_killed_at_any_moment_has_every_committed_row_and_no_torn_one(
    tmp_path, num_kills
):
    rng, rounds, compactions = np.random.default_rng(num_kills), [], 0
    for kill in range(num_kills):
        after_s = float(rng.uniform(0.02, 0.8))
        number, num_rows, num_compactions = killed_and_opened(tmp_path, after_s, seed=kill)
        rounds.append(number)
        compactions += num_compactions
        assert num_rows == 3000
    assert rounds == sorted(rounds)
    print(f"{rounds[-1]} rounds, {compactions} compactions")
    assert compactions or num_kills < 50
