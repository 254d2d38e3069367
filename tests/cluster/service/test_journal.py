"""The journal: what was acknowledged is there after any death, and damage is found at its place."""

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys

import pytest
import services

from jaxgoodput._disk import InUse, held
from jaxgoodput.cluster.service import serve
from jaxgoodput.cluster.service.record import journal as service_journal
from jaxgoodput.cluster.service.record.events import (
    HintsReceived,
    JobCancelled,
    JobSubmitted,
    NodeJoined,
    PlanMade,
    ReasonsGiven,
)
from jaxgoodput.cluster.service.record.journal import (
    FILE,
    ClusterJournal,
    CorruptJournalError,
    DiskFull,
    repair,
)
from jaxgoodput.cluster.service.record.state import State
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


@pytest.mark.parametrize("change", ["body", "sum", "kind", "at"])
def test_a_row_that_was_changed_is_refused_with_its_place_and_repaired(tmp_path, change):
    journal = ClusterJournal(tmp_path)
    a_few(journal)
    journal.close()
    value = '\'{"job":"a"}\'' if change == "body" else "'x'" if change in ("sum", "kind") else "7.5"
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"update events set {change} = {value} where seq = 4")
    connection.close()
    with pytest.raises(CorruptJournalError, match="from position 4 on.*--repair") as found:
        ClusterJournal(tmp_path).replay()
    assert found.value.position == 4
    done = repair(tmp_path)
    assert (done.kept, done.position) == (3, 4)
    assert done.aside is not None and done.aside.exists()
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


@pytest.mark.parametrize("dies_in", ["copy2", "_write", "replace"])
def test_a_repair_that_is_cut_short_leaves_the_journal_as_it_was(tmp_path, monkeypatch, dies_in):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    journal = ClusterJournal(first)
    a_few(journal)
    with contextlib.closing(sqlite3.connect(first / FILE, isolation_level=None)) as connection:
        connection.execute("update events set sum = 'x' where seq = 8")
    for end in ("", "-wal"):  # as a service that was killed leaves them: all is in the -wal
        shutil.copy(first / f"{FILE}{end}", second / f"{FILE}{end}")
    assert (second / f"{FILE}-wal").stat().st_size

    def dies(*_):
        raise InterruptedError(dies_in)

    owner = {"copy2": shutil, "_write": service_journal, "replace": os}[dies_in]
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
    damaged = ClusterJournal(tmp_path)
    with pytest.raises(CorruptJournalError, match="from position"):
        damaged.replay()
    damaged.close()  # whoever has it open may take its log away while it is repaired
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
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"pragma user_version = {number}")
    connection.close()
    with pytest.raises(ValueError, match=f"has format {number}"):
        ClusterJournal(tmp_path)


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
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        made[0].append([], 0.0, 0.0)
