"""If a table is saved by some hosts and opened by others, every row keeps its bits, and few rows move."""

from typing import Any

import numpy as np
import pytest

from jaxgoodput.embedding.hashing import owners
from jaxgoodput.embedding.hosts import host_folder, resize
from jaxgoodput.embedding.store import RowStore

NUM_ROWS, WORDS = 12_000, 4
SMALL: dict[str, Any] = {"row_bytes": 8 * WORDS, "segment_bytes": 2**15}


def rows_of(ids, version):
    return (
        np.asarray(ids, np.uint64)[:, None] * np.uint64(77)
        + np.arange(WORDS, dtype=np.uint64)
        + np.uint64(version)
    )


def put(folder, hosts, ids, version):
    """Save as training does: each host has changed its own rows, and all save."""
    for host in hosts:
        with RowStore(host_folder(folder, host), **SMALL) as store:
            own = ids[owners(ids, hosts) == host]
            store.put(own, rows_of(own, version))
            store.commit({"seed": 0, "with": {"step": version}})


def held(folder, hosts):
    """Return all rows by id, each from its owner."""
    found = np.zeros((NUM_ROWS, WORDS), np.uint64)
    for host in hosts:
        with RowStore(host_folder(folder, host), **SMALL) as store:
            assert store.newest is not None
            ids = np.arange(NUM_ROWS)
            ids = ids[owners(ids, hosts) == host]
            got = store.get(ids)
            assert got.found.all()
            found[ids] = got.rows
    return found


def test_from_one_host_to_three_to_two_every_row_has_its_bits_and_one_in_n_moves(tmp_path):
    everything = np.arange(NUM_ROWS)
    expected = rows_of(everything, 1)
    put(tmp_path, [0], everything, 1)
    moves = {}
    hosts = [0]
    for version, new in ((2, [0, 1, 2]), (3, [0, 2]), (4, [0, 1, 2]), (5, [5])):
        moved = resize(tmp_path, hosts, new, **SMALL)
        assert moved.num_rows == NUM_ROWS
        moves[version] = moved.num_moved / NUM_ROWS
        hosts = new
        np.testing.assert_array_equal(held(tmp_path, hosts), expected)
        # After more training, the copies that a host gave away before are stale.
        some = np.random.default_rng(version).permutation(NUM_ROWS)[:3000]
        put(tmp_path, hosts, some, version)
        expected[some] = rows_of(some, version)
        np.testing.assert_array_equal(held(tmp_path, hosts), expected)
    assert moves[2] == pytest.approx(2 / 3, abs=0.02)
    assert moves[3] == pytest.approx(1 / 3, abs=0.02)
    assert moves[4] == pytest.approx(1 / 3, abs=0.02)
    assert moves[5] == 1


def test_a_change_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
    everything = np.arange(NUM_ROWS)
    put(tmp_path, [0, 1], everything, 1)
    commit, calls = RowStore.commit, []

    def fails(self, about=None, **options):
        calls.append(self.folder)
        if len(calls) == 2:
            raise OSError("the disk is gone")
        return commit(self, about, **options)

    monkeypatch.setattr(RowStore, "commit", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        resize(tmp_path, [0, 1], [0, 1, 2], **SMALL)
    monkeypatch.undo()
    np.testing.assert_array_equal(held(tmp_path, [0, 1]), rows_of(everything, 1))
    assert resize(tmp_path, [0, 1], [0, 1, 2], **SMALL).num_rows == NUM_ROWS
    np.testing.assert_array_equal(held(tmp_path, [0, 1, 2]), rows_of(everything, 1))


def test_no_commit_is_forgotten_when_an_older_one_gets_other_hosts(tmp_path):
    ids = np.arange(NUM_ROWS)
    for version in (1, 2):
        put(tmp_path, [0], ids, version)
    put(tmp_path, [1], ids, 3)  # left by an earlier change of hosts
    resize(tmp_path, [0], [0, 1], at={0: 1}, **SMALL)
    np.testing.assert_array_equal(held(tmp_path, [0, 1]), rows_of(ids, 1))
    for host, number, version in ((0, 1, 1), (0, 2, 2), (1, 1, 3)):
        with RowStore(host_folder(tmp_path, host), at=number, **SMALL) as store:
            assert store.newest is not None and store.newest.about["with"] == {"step": version}
            np.testing.assert_array_equal(store.get(ids).rows, rows_of(ids, version))


def test_commits_of_different_saves_and_missing_hosts_are_named(tmp_path):
    put(tmp_path, [0, 1], np.arange(100), 1)
    with RowStore(host_folder(tmp_path, 1), **SMALL) as store:
        store.commit({"seed": 0, "with": {"step": 2}})
    with pytest.raises(ValueError, match="to different saves.*'step': 1.*'step': 2"):
        resize(tmp_path, [0, 1], [0], **SMALL)
    with pytest.raises(FileNotFoundError, match="host-000002 is missing"):
        resize(tmp_path, [0, 1, 2], [0], **SMALL)
    with RowStore(host_folder(tmp_path, 3), **SMALL):
        pass
    with pytest.raises(FileNotFoundError, match="host-000003 has no commit"):
        resize(tmp_path, [3], [0], **SMALL)


def test_a_new_host_that_holds_another_table_is_named(tmp_path):
    put(tmp_path, [0, 1], np.arange(100), 1)
    with RowStore(host_folder(tmp_path, 2), **SMALL) as store:
        store.commit({"seed": 7, "with": {"step": 1}})
    with pytest.raises(ValueError, match="host-000002 holds another table, made with .*7"):
        resize(tmp_path, [0, 1], [0, 1, 2], **SMALL)
