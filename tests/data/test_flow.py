"""Streams reduced by key give the same bits for any number of processes; joined with a table, its rows."""

import collections
import pathlib
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import LIMIT_S

from jaxgoodput.clock import FakeClock
from jaxgoodput.data import flow
from jaxgoodput.data.flow import Flow, FolderExchange, ReducedKeys
from jaxgoodput.embedding.optimizers import Sgd
from jaxgoodput.embedding.table import TieredTable


def flow_of(batches):
    return Flow(lambda: batches)


def in_processes(batches, count, run):
    """`run(flow, exchange)` on threads that stand for processes, each with every count-th batch."""
    found, errors = {}, []

    def one(index, folder):
        try:
            exchange = FolderExchange(folder, index=index, count=count, patience_s=LIMIT_S)
            found[index] = run(flow_of(batches[index::count]), exchange)
        except Exception as error:
            errors.append(error)

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=one, args=(i, folder)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert not list(pathlib.Path(folder).iterdir())
    return [found[i] for i in range(count)]


KEYS = st.one_of(
    st.lists(st.integers(-5, 30), min_size=1, max_size=40).map(np.array),
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40).map(np.array),
)
TEXTS = st.lists(
    st.text(st.characters(exclude_characters="\0"), max_size=5), min_size=1, max_size=40
)


@st.composite
def streams(draw):
    keys = draw(st.sampled_from([KEYS, TEXTS.map(np.array)]))
    batches = []
    for _ in range(draw(st.integers(1, 6))):
        some = draw(keys)
        values = draw(
            st.lists(st.integers(-(2**62), 2**62), min_size=len(some), max_size=len(some))
        )
        batches.append({"key": some, "value": np.array(values, np.int64)})
    return batches


def expected(batches, reduce):
    """By a dictionary; sums wrap around at 64 bits."""
    found = {}
    for batch in batches:
        for key, value in zip(batch["key"].tolist(), batch["value"].tolist(), strict=True):
            old = found.get(key)
            if old is not None:
                value = {"sum": old + value, "min": min(old, value), "max": max(old, value)}[reduce]
            found[key] = value
    return {key: (value + 2**63) % 2**64 - 2**63 for key, value in sorted(found.items())}


@settings(max_examples=40)
@given(batches=streams(), count=st.integers(1, 4), reduce=st.sampled_from(["sum", "min", "max"]))
def test_any_number_of_processes_gives_what_a_dictionary_would(batches, count, reduce):
    parts = in_processes(
        batches,
        count,
        lambda some, exchange: some.aggregate("key", "value", reduce, exchange=exchange),
    )
    keys = [key for part in parts for key in part.keys.tolist()]
    assert len(keys) == len(set(keys))  # each at one process
    found = {
        k: v
        for part in parts
        for k, v in zip(part.keys.tolist(), part.values.tolist(), strict=True)
    }
    assert dict(sorted(found.items())) == expected(batches, reduce)


def test_what_all_processes_have_together_has_the_same_bits_for_any_number(monkeypatch):
    monkeypatch.setattr(flow, "MOST_PENDING", 500)  # reduced many times on the way
    rng = np.random.default_rng(0)
    batches = [{"word": rng.integers(0, 3000, 200)} for _ in range(24)]
    alone = flow_of(batches).aggregate("word", None)
    counted = collections.Counter(np.concatenate([b["word"] for b in batches]).tolist())
    assert dict(zip(alone.keys.tolist(), alone.values.tolist(), strict=True)) == counted

    def run(some, exchange):
        return some.aggregate("word", None, exchange=exchange).everywhere(exchange)

    for count in (2, 3, 5):
        for found in in_processes(batches, count, run):
            np.testing.assert_array_equal(found.keys, alone.keys)
            np.testing.assert_array_equal(found.values, alone.values)


WORKER = """
import sys
import numpy as np
from jaxgoodput.data.flow import Flow, FolderExchange
folder, index, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = np.array("the cat saw the dog and the dog saw a bird".split())
own = Flow(lambda: [{"word": words[index::count]}])
patience_s = float(sys.argv[4])
exchange = FolderExchange(folder, index=index, count=count, patience_s=patience_s)
every = own.aggregate("word", None, exchange=exchange).everywhere(exchange).most(3)
print(every.keys.tolist(), every.values.tolist())
"""


def test_processes_count_words_together(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(i), "2", str(LIMIT_S)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for child in children:
            out, _ = child.communicate(timeout=LIMIT_S)
            assert out == "['the', 'dog', 'saw'] [3, 2, 2]\n"
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_text_goes_to_the_same_process_however_wide_its_array_is():
    for narrow, wide in (("U3", "U9"), ("S3", "S7")):
        words = ["a", "bcd", "", "xy"]
        np.testing.assert_array_equal(
            flow._hashes(np.array(words, narrow)), flow._hashes(np.array(words, wide))
        )


def test_a_lookup_joins_each_sample_with_its_row_and_reads_a_row_once(tmp_path):
    with TieredTable(
        tmp_path, dim=3, optimizer=Sgd(0.1), num_rows=100, device_rows=10, ram_rows=10
    ) as table:
        batches = [{"user": np.array([[5, 7], [5, 5]]), "label": np.array([1, 0])}]
        (joined,) = flow_of(batches).lookup(table, ids="user", into="vector")
        assert joined["vector"].shape == (2, 2, 3)
        np.testing.assert_array_equal(joined["vector"][1, 0], table.read(np.array([5]))[0])
        assert joined["label"] is batches[0]["label"]

    class Counting:
        def __init__(self):
            self.num_read = 0

        def read(self, ids):
            self.num_read += len(ids)
            return ids * 10

    counting = Counting()
    (joined,) = flow_of(batches).lookup(counting, ids="user", into="ten")
    assert joined["ten"].tolist() == [[50, 70], [50, 50]] and counting.num_read == 2
    again = flow_of(batches).lookup(counting, ids="user", into="ten").aggregate("ten", None)
    assert again.keys.tolist() == [50, 70] and again.values.tolist() == [3, 1]


# -- what cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "reduce", "error", "message"),
    [
        ({"k": np.array([1.5])}, "sum", TypeError, "Keys of dtype float64"),
        ({"k": np.array([1]), "v": np.array([0.5])}, "sum", TypeError, "depends on its order"),
        ({"k": np.array([1]), "v": np.array([1, 2])}, "sum", ValueError, "Pass one value per key"),
        ({"k": np.array([1])}, "mean", ValueError, "reduce='mean' is not known"),
        ({"key": np.array([1])}, "sum", KeyError, "no column 'k'; it has"),
        (
            {"k": np.array([2**63], np.uint64)},
            "sum",
            ValueError,
            "Keys contain 9223372036854775808",
        ),
        (
            {"k": np.array([1]), "v": np.array([2**63], np.uint64)},
            "max",
            ValueError,
            "Values contain 9223372036854775808",
        ),
    ],
)
def test_what_cannot_be_reduced_is_named(batch, reduce, error, message):
    with pytest.raises(error, match=message):
        flow_of([batch]).aggregate("k", "v" if "v" in batch else None, reduce)


def test_the_smallest_float_is_found_and_nothing_is_reduced_to_nothing():
    batches = [{"k": np.array([1, 1, 2]), "v": np.array([0.5, -1.5, 3.0])}]
    assert flow_of(batches).aggregate("k", "v", "min").values.tolist() == [-1.5, 3.0]
    assert len(flow_of([]).aggregate("k", None).keys) == 0


def test_a_process_that_does_not_come_is_named(tmp_path):
    clock = FakeClock()
    exchange = FolderExchange(tmp_path, index=0, count=2, patience_s=60.0, clock=clock)
    with pytest.raises(TimeoutError, match=r"000000-1-to-0\.npz did not appear within 60 s"):
        flow_of([{"k": np.arange(3)}]).aggregate("k", None, exchange=exchange)
    with pytest.raises(ValueError, match="index=2, count=2"):
        FolderExchange(tmp_path, index=2, count=2)


def test_what_another_process_did_not_write_is_named(tmp_path):
    exchange = FolderExchange(tmp_path, index=0, count=2)
    (tmp_path / "000000-1-to-0.npz").write_bytes(b"PK nonsense")
    with pytest.raises(ValueError, match="was not written by this job"):
        exchange.all_to_all([{}, {}])


def test_the_most_frequent_keys_are_the_same_whoever_asks():
    reduced = ReducedKeys(np.array([3, 5, 7, 9]), np.array([2, 4, 2, 1]))
    assert reduced.most(3).keys.tolist() == [5, 3, 7]


def test_the_largest_floats_and_unsigned_numbers_come_first():
    batches = [{"k": np.arange(5), "v": np.array([0.1, 0.2, 0.9, 0.3, 0.8])}]
    assert flow_of(batches).aggregate("k", "v", "max").most(2).keys.tolist() == [2, 4]
    unsigned = ReducedKeys(np.array([3, 5, 7]), np.array([0, 2, 2**64 - 1], np.uint64))
    assert unsigned.most(2).keys.tolist() == [7, 5]


def test_signed_and_unsigned_keys_stay_integers():
    large = 2**53 + 1  # no float64
    batches = [{"k": np.array([large, -1])}, {"k": np.array([large, large - 1], np.uint64)}]
    found = flow_of(batches).aggregate("k", None)
    assert found.keys.dtype == np.int64
    assert found.keys.tolist() == [-1, large - 1, large] and found.values.tolist() == [1, 1, 2]
    sums = flow_of([{"k": np.array([1, 1]), "v": np.array([2**63, 2**63], np.uint64)}])
    assert sums.aggregate("k", "v").values.tolist() == [0]  # around 64 bits


def test_what_is_handed_over_has_the_names_that_it_was_given(tmp_path):
    exchange = FolderExchange(tmp_path, index=0, count=1)
    (found,) = exchange.all_to_all([{"keys": np.arange(3)}])
    assert list(found) == ["keys"]
