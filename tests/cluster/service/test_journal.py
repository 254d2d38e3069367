"""The journal: what was acknowledged is there after any death, and damage is found at its place."""

import contextlib
import errno
import os
import pathlib
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile

import pytest
import services
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput._disk import InUse, held
from jaxgoodput.cluster.service import serve
from jaxgoodput.cluster.service.record import head as heads
from jaxgoodput.cluster.service.record import install, table
from jaxgoodput.cluster.service.record.chain import EMPTY, ChainHead
from jaxgoodput.cluster.service.record.events import (
    HintsReceived,
    JobCancelled,
    JobSubmitted,
    NodeJoined,
    PlanMade,
    ReasonsGiven,
)
from jaxgoodput.cluster.service.record.journal import ClusterJournal, JournalFollower
from jaxgoodput.cluster.service.record.repair import repair
from jaxgoodput.cluster.service.record.state import State
from jaxgoodput.cluster.service.record.table import FILE, CorruptJournalError, DiskFull
from jaxgoodput.specs import Allocation, Hints, Node


def hints(number, **changes):
    fields = {
        "generation": 0,
        "number": number,
        "kind": "cpu",
        "num_devices": 1,
        "largest": 1,
        "progress": float(number),
        "base_batch_size": 32,
        "max_global_batch_size": 64,
    }
    return Hints(**(fields | changes))


def a_few(journal):
    """Some events of every sort, one transaction each."""
    node = Node(name="n0", kind="cpu", num_devices=8)
    allocation = Allocation(devices={"n0": (0, 1)}, generation=1)
    for at, event in enumerate(
        (
            NodeJoined(node=node, instance="one"),
            JobSubmitted(submission=services.submission("a"), secret="s"),
            JobSubmitted(submission=services.submission("b"), secret="t"),
            PlanMade(changes={"a": allocation}, solved_s=3.0, next_solve_s=60.0),
            ReasonsGiven(reasons={"a": "gets 2", "b": "waits"}),
            HintsReceived(job="a", hints=hints(1)),
            HintsReceived(job="a", hints=hints(2)),
            JobCancelled(job="b"),
            ReasonsGiven(reasons={"a": "keeps 2"}),
        )
    ):
        journal.append([event], float(at), 1e9 + at)


def test_replay_gives_the_same_state(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    state, wall = journal.replay()
    assert wall == 1e9 + 8
    assert state.jobs["a"].allocation.num_devices == 2
    assert state.jobs["a"].hints.number == 2
    assert state.jobs["a"].reason == "keeps 2"
    assert state.jobs["b"].phase == "cancelled"
    journal.close()
    again = ClusterJournal(tmp_path)
    assert again.replay()[0] == state
    assert again.last == state.seq
    again.append([JobCancelled(job="a")], 9.0, 1e9)
    assert again.replay()[0].jobs["a"].phase == "cancelled"


def test_only_the_newest_of_a_key_stays(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    for number in range(3, 50):
        journal.append([HintsReceived(job="a", hints=hints(number))], 10.0, 1e9)
    count = sqlite3.connect(tmp_path / FILE).execute("select count(*) from events").fetchone()[0]
    assert count == 7  # one hint, one set of reasons, five others
    assert journal.replay()[0].jobs["a"].hints.number == 49


def test_plans_that_change_nothing_do_not_pile_up(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    for number in range(50):
        at_s = 10.0 + number
        journal.append([PlanMade(changes={}, solved_s=at_s, next_solve_s=at_s + 60.0)], at_s, 1e9)
    count = sqlite3.connect(tmp_path / FILE).execute("select count(*) from events").fetchone()[0]
    assert count == 7 + 1
    state, _ = journal.replay()
    assert (state.solved_s, state.next_solve_s) == (59.0, 119.0)
    assert state.jobs["a"].allocation.num_devices == 2


WRITER = """
import pathlib, sys
from jaxgoodput.cluster.service.record.events import JobSubmitted
from jaxgoodput.cluster.service.record.journal import ClusterJournal
sys.path.insert(0, sys.argv[2])
import services
journal = ClusterJournal(pathlib.Path(sys.argv[1]))
for number in range(10**6):
    journal.append([JobSubmitted(submission=services.submission(f"j{number}"), secret="s")], 0.0, 1.0)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_what_was_acknowledged_outlives_a_kill(tmp_path):
    support = os.path.dirname(services.__file__)
    for life in range(3):
        folder = tmp_path / f"{life}"
        folder.mkdir()
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), support], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        told = [child.stdout.readline() for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        told += child.stdout
        child.wait()
        child.stdout.close()
        last = int([text for text in told if text.endswith("\n")][-1])
        state, _ = ClusterJournal(folder).replay()
        assert set(state.jobs) >= {f"j{number}" for number in range(last + 1)}


@pytest.mark.parametrize("change", ["body", "sum", "kind", "at", "key", "after", "link"])
def test_a_row_that_was_changed_is_refused_with_its_place_and_repaired(tmp_path, change):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    journal.close()
    value = {"body": '{"job":"a"}', "at": 7.5, "after": 2}.get(change, "x")
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"update events set {change} = ? where seq = 4", (value,))
    connection.close()
    with pytest.raises(CorruptJournalError, match="from position 4 on.*--repair") as found:
        ClusterJournal(tmp_path).replay()
    assert found.value.position == 4
    done = repair(tmp_path)
    assert (done.kept, done.position, done.lost) == (3, 4, range(4, 10))
    assert done.aside is not None and (done.aside / FILE).exists()
    assert "6 acknowledged events are lost, positions 4 to 9" in done.text()
    state, _ = ClusterJournal(tmp_path).replay()
    assert list(state.jobs) == ["a", "b"]
    assert state.jobs["a"].allocation.num_devices == 0
    assert repair(tmp_path).position is None  # it is sound now


def test_an_event_that_cannot_be_is_repaired_at_the_place_that_the_replay_says(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    journal.append([JobCancelled(job="nobody's")], 9.0, 1e9)  # sound as a row
    with pytest.raises(CorruptJournalError) as found:
        journal.replay()
    journal.close()
    done = repair(tmp_path)
    assert done.position == found.value.position == 10
    assert done.kept == 7


def test_a_journal_that_a_service_has_is_not_repaired(tmp_path):
    ClusterJournal(tmp_path).close()
    with held(tmp_path), pytest.raises(InUse, match="is in use by process"):
        repair(tmp_path)


@pytest.mark.parametrize("dies_in", ["copy2", "create_file", "replace"])
def test_a_repair_that_is_cut_short_leaves_the_journal_as_it_was(tmp_path, monkeypatch, dies_in):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    journal = ClusterJournal(first)
    a_few(journal)
    with contextlib.closing(sqlite3.connect(first / FILE, isolation_level=None)) as connection:
        connection.execute("update events set sum = 'x' where seq = 8")
    for name in (FILE, f"{FILE}-wal", heads.FILE):  # as a service that was killed leaves them
        shutil.copy(first / name, second / name)
    assert (second / f"{FILE}-wal").stat().st_size

    def dies(*_):
        raise InterruptedError(dies_in)

    owner = {"copy2": shutil, "create_file": install, "replace": os}[dies_in]
    with monkeypatch.context() as patch, pytest.raises(InterruptedError, match=dies_in):
        patch.setattr(owner, dies_in, dies)
        repair(second)
    with pytest.raises(CorruptJournalError, match="from position 8 on"):
        ClusterJournal(second).replay()
    done = repair(second)
    assert (done.kept, done.position) == (5, 8)  # later ones took the place of two
    assert list(ClusterJournal(second).replay()[0].jobs) == ["a", "b"]


def test_a_page_of_rubbish_is_refused_and_what_is_before_it_kept(tmp_path):
    journal = ClusterJournal(tmp_path)
    many = [
        JobSubmitted(submission=services.submission(f"j{number}"), secret="s" * 200)
        for number in range(200)
    ]
    journal.append(many, 1.0, 1e9)
    journal.close()
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[-3 * 4096 : -2 * 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    with pytest.raises(CorruptJournalError, match="from position"):
        ClusterJournal(tmp_path)
    done = repair(tmp_path)
    assert 0 < done.kept < 200
    state, _ = ClusterJournal(tmp_path).replay()
    assert list(state.jobs) == [f"j{number}" for number in range(done.kept)]


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"rubbish" * 1000)
    with pytest.raises(CorruptJournalError, match="from position 1 on"):
        ClusterJournal(tmp_path)


@pytest.mark.parametrize("number", [1, 9])  # 1 has other names of events
def test_a_journal_of_another_format_is_refused(tmp_path, number):
    ClusterJournal(tmp_path).close()
    (tmp_path / heads.FILE).unlink()  # another program writes another one, or none
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"pragma user_version = {number}")
    connection.close()
    with pytest.raises(ValueError, match=f"has format {number}.*program that wrote"):
        ClusterJournal(tmp_path)
    with pytest.raises(ValueError, match=f"has format {number}.*program that wrote"):
        repair(tmp_path)


def test_a_full_disk_refuses_and_changes_nothing(tmp_path):
    journal = ClusterJournal(tmp_path, most_bytes=2**17)
    a_few(journal)
    many = [
        JobSubmitted(submission=services.submission(f"j{number}"), secret="s" * 1000)
        for number in range(100)
    ]
    acknowledged, before = [], journal.replay()[0]
    with pytest.raises(DiskFull, match="Free some space"):
        for first in range(0, 10**6, 10):
            before = journal.replay()[0]
            journal.append(many[first % 100 : first % 100 + 10], 9.0, 1e9)
            acknowledged.append(first)
    assert acknowledged, "it was full at once"
    assert journal.replay()[0] == before  # all of a transaction, or nothing
    journal.close()
    journal = ClusterJournal(tmp_path)  # there is room again
    assert journal.replay()[0] == before
    journal.append([JobCancelled(job="a")], 10.0, 1e9)
    assert journal.replay()[0].jobs["a"].phase == "cancelled"


def test_there_is_nothing_to_repair_where_there_is_no_journal(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing can be repaired"):
        repair(tmp_path)


def test_an_empty_journal_is_an_empty_state(tmp_path):
    assert ClusterJournal(tmp_path).replay() == (State(), 0.0)


@pytest.mark.parametrize("fault", ["its port is taken", "its journal is damaged"])
def test_a_service_that_cannot_start_closes_its_journal(fault, tmp_path, monkeypatch):
    made = []

    class Noted(ClusterJournal):
        def __init__(self, folder):
            super().__init__(folder)
            made.append(self)

    monkeypatch.setattr(serve, "ClusterJournal", Noted)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if fault == "its port is taken" else 0
        if not port:
            journal = ClusterJournal(tmp_path)
            a_few(journal)
            journal.close()
            with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as connection:
                connection.execute("update events set body = 'x'")
                connection.commit()
        with pytest.raises(OSError if port else CorruptJournalError):
            serve.run_service(serve.Service(folder=tmp_path, port=port))
    assert len(made) == bool(port)  # a damaged journal is not opened to write to it
    for journal in made:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            journal.append([], 0.0, 0.0)


# -- the chain ---------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
# Each event by its kind, its job and a number.
kinds_of_events = st.lists(
    st.tuples(
        st.sampled_from(["job", "hints", "reasons", "plan"]),
        st.sampled_from(NAMES),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=4,
)


def event_of(kind, name, number):
    match kind:
        case "job":
            return JobSubmitted(submission=services.submission(name), secret="s")
        case "hints":
            return HintsReceived(job=name, hints=hints(number))
        case "reasons":
            return ReasonsGiven(reasons={})
    return PlanMade(changes={}, solved_s=0.0, next_solve_s=1.0)


def written(folder, groups):
    """A journal with these events, each group in one transaction; the events before them make all allowed."""
    journal = ClusterJournal(folder)
    journal.append(
        [JobSubmitted(submission=services.submission(n), secret="s") for n in NAMES], 0.0, 1e9
    )
    for at, group in enumerate(groups, 1):
        journal.append([event_of(*each) for each in group], float(at), 1e9 + at)
    return journal


@settings(max_examples=30, deadline=None)
@given(groups=st.lists(kinds_of_events, min_size=1, max_size=8), data=st.data())
def test_rows_that_are_missing_are_noticed_wherever_they_were(groups, data):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        journal = written(folder, groups)
        state, last = journal.replay()[0], journal.last
        journal.close()
        again = ClusterJournal(folder)  # the chain holds after replacing rows
        assert (again.replay()[0], again.last) == (state, last)
        again.close()
        with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as connection:
            there = [seq for (seq,) in connection.execute("select seq from events")]
            gone = data.draw(st.sets(st.sampled_from(there), min_size=1))
            connection.executemany("delete from events where seq = ?", [(seq,) for seq in gone])
        with pytest.raises(CorruptJournalError) as found:
            ClusterJournal(folder)
        before = [seq for seq in there if seq < min(gone)]
        assert found.value.position == (before[-1] if before else 0) + 1
        done = repair(folder)
        assert done.kept == len(before)
        assert done.lost is not None and gone <= {*done.lost} and done.lost[-1] == last
        ClusterJournal(folder).close()


def test_a_shorter_table_is_refused_and_says_how_much_is_missing(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as connection:
        connection.execute("delete from events where seq > 4")
    with pytest.raises(
        CorruptJournalError, match="from position 5 on: 5 of the 9 acknowledged events"
    ):
        ClusterJournal(tmp_path)


def test_events_that_a_crash_kept_from_being_acknowledged_are_kept(tmp_path, monkeypatch):
    journal = ClusterJournal(tmp_path)
    a_few(journal)

    def dies(*_):
        raise InterruptedError("between the table and the head")

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(heads.HeadFile, "write", dies)
        journal.append([JobCancelled(job="a")], 9.0, 1e9)
    journal.close()
    told = heads.read_head(tmp_path)
    assert told is not None and told.position == 9
    again = ClusterJournal(tmp_path)
    assert again.replay()[0].jobs["a"].phase == "cancelled"
    told = heads.read_head(tmp_path)
    assert told is not None and told.position == 10  # it is acted on from now on


@settings(max_examples=50, deadline=None)
@given(
    positions=st.lists(st.integers(1, 10**12), min_size=1, max_size=5, unique=True), data=st.data()
)
def test_a_head_that_is_cut_short_while_it_is_written_is_the_one_before(positions, data):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        heads.create_head(folder, EMPTY)
        told = [EMPTY, *(ChainHead(position, "f" * 24) for position in sorted(positions))]
        file = heads.HeadFile(folder)
        before = b""
        for head in told[1:]:
            before = (folder / heads.FILE).read_bytes()
            file.write(head)
            assert heads.read_head(folder) == head
        file.close()
        after = (folder / heads.FILE).read_bytes()
        changed = [i for i in range(len(after)) if after[i] != before[i]]
        torn = data.draw(st.sampled_from(changed)) + 1
        (folder / heads.FILE).write_bytes(after[:torn] + before[torn:])
        assert heads.read_head(folder) in told[-2:]


def test_a_head_that_cannot_be_written_acknowledges_nothing(tmp_path, monkeypatch):
    journal = ClusterJournal(tmp_path)
    a_few(journal)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    said = r"head could not be written \(No space"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=said):
        patch.setattr(os, "fdatasync", full)
        journal.append([JobCancelled(job="a")], 9.0, 1e9)
    journal.close()
    assert ClusterJournal(tmp_path).last == 10  # on the disk, and not answered


def test_a_head_of_which_nothing_can_be_read_is_refused(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    journal.close()
    (tmp_path / heads.FILE).write_bytes(b"\xff" * 1024)
    with pytest.raises(
        CorruptJournalError, match=r"journal\.head.*is damaged, so it cannot be told"
    ):
        ClusterJournal(tmp_path)
    done = repair(tmp_path)
    assert (done.kept, done.lost) == (7, None)
    assert "cannot be told" in done.text()
    assert ClusterJournal(tmp_path).replay()[0].seq == 9


def test_a_head_of_another_journal_is_refused(tmp_path):
    for name, secret in (("one", "s"), ("two", "t")):
        (tmp_path / name).mkdir()
        journal = ClusterJournal(tmp_path / name)
        journal.append([JobSubmitted(submission=services.submission("a"), secret=secret)], 0.0, 1e9)
        journal.close()
    shutil.copy(tmp_path / "one" / heads.FILE, tmp_path / "two" / heads.FILE)
    with pytest.raises(CorruptJournalError, match="another journal's"):
        ClusterJournal(tmp_path / "two")
    done = repair(tmp_path / "two")
    assert (done.kept, done.lost) == (1, None)
    assert ClusterJournal(tmp_path / "two").replay()[0].jobs["a"].secret == "t"


# -- a journal of the format before chains --------------------------------------------------------------

BEFORE_CHAINS = """
create table events (
    seq integer primary key autoincrement,
    at real not null, wall real not null,
    kind text not null, body text not null, key text, sum text not null
);
create index by_key on events (key) where key is not null;
pragma user_version = 2;
"""


def before_chains(folder):
    """Make the journal in a folder one of an earlier program."""
    with contextlib.closing(sqlite3.connect(folder / FILE)) as connection:
        rows = connection.execute(
            "select seq, at, wall, kind, body, key, sum from events"
        ).fetchall()
    for path in folder.iterdir():
        path.unlink()
    with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.executescript(BEFORE_CHAINS)
        connection.executemany("insert into events values (?, ?, ?, ?, ?, ?, ?)", rows)


def test_a_journal_from_before_chains_is_converted(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    state = journal.replay()[0]
    journal.close()
    before_chains(tmp_path)
    assert repair(tmp_path).aside is None  # nothing is wrong with it
    journal = ClusterJournal(tmp_path)
    assert journal.replay()[0] == state
    journal.append([HintsReceived(job="a", hints=hints(9))], 9.0, 1e9)
    journal.close()
    assert ClusterJournal(tmp_path).replay()[0].jobs["a"].hints.number == 9
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as connection:
        assert connection.execute("pragma user_version").fetchone() == (table.FORMAT,)
        assert connection.execute("select count(*) from events").fetchone() == (7,)
    (tmp_path / heads.FILE).unlink()
    with pytest.raises(CorruptJournalError, match=r"journal\.head.*is missing"):
        ClusterJournal(tmp_path)


def test_an_older_backup_of_the_table_is_refused_in_either_format(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    journal.close()
    head = (tmp_path / heads.FILE).read_bytes()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as connection:
        connection.execute("delete from events where seq > 4")
    before_chains(tmp_path)
    (tmp_path / heads.FILE).write_bytes(head)
    with pytest.raises(CorruptJournalError, match="5 of the 9 acknowledged events are missing"):
        ClusterJournal(tmp_path)
    assert repair(tmp_path).lost == range(5, 10)
    assert ClusterJournal(tmp_path).last == 4


def test_a_damaged_journal_from_before_chains_is_repaired_up_to_the_damage(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    journal.close()
    before_chains(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as connection:
        connection.execute("update events set body = 'x' where seq = 4")
    with pytest.raises(CorruptJournalError, match="from position 4 on"):
        ClusterJournal(tmp_path)
    assert repair(tmp_path).kept == 3
    assert list(ClusterJournal(tmp_path).replay()[0].jobs) == ["a", "b"]


# -- replacing a journal, cut short anywhere --------------------------------------------------------------

STEPS = ("create_file", "replace 1", "create_head", "replace 2", "replace 3")


@pytest.mark.parametrize("how", ["repair", "start"])
@pytest.mark.parametrize("step", STEPS)
def test_a_replacement_that_is_cut_short_anywhere_loses_nothing(tmp_path, monkeypatch, step, how):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    state = journal.replay()[0]
    journal.close()
    before_chains(tmp_path)  # the next start replaces it
    name, _, number = step.partition(" ")
    calls = iter(range(1, 10))
    owner = os if name == "replace" else install
    real = getattr(owner, name)

    def dies(*arguments):
        if number and next(calls) != int(number):
            return real(*arguments)
        raise InterruptedError(step)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(owner, name, dies)
        ClusterJournal(tmp_path)
    if how == "repair":
        assert repair(tmp_path).aside is None
    journal = ClusterJournal(tmp_path)
    assert journal.replay()[0] == state
    assert sorted(path.name for path in tmp_path.glob("journal*") if "db-" not in path.name) == [
        FILE,
        heads.FILE,
    ]


def test_a_follower_reads_past_events_that_were_replaced_behind_it(tmp_path):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    follower = JournalFollower(tmp_path)
    seen = [entry.seq for entry in follower.read(0)]
    journal.append([HintsReceived(job="a", hints=hints(3)), ReasonsGiven(reasons={})], 9.0, 1e9)
    assert [entry.seq for entry in follower.read(seen[-1])] == [10, 11]
    journal.append([ReasonsGiven(reasons={})], 9.0, 1e9)
    assert [entry.seq for entry in follower.read(11)] == [12]
    assert [entry.seq for entry in follower.read(10)] == [12]
    journal.close()
