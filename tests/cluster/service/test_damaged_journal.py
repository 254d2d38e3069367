"""Any damage of the journal after a kill: the same state, or a refusal and then a repair that is true.

`pytest -m nightly -s tests/cluster/service/test_damaged_journal.py` prints the table of 300 damages.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import damages
import pytest
import services
from damages import PAGE_BYTES

from jaxgoodput.cluster.service.record.events import (
    HintsReceived,
    JobCancelled,
    JobSubmitted,
    JournalEntry,
    ReasonsGiven,
    RequestAnswered,
)
from jaxgoodput.cluster.service.record.head import FILE as HEAD
from jaxgoodput.cluster.service.record.journal import ClusterJournal
from jaxgoodput.cluster.service.record.repair import repair
from jaxgoodput.cluster.service.record.state import State, step
from jaxgoodput.cluster.service.record.table import FILE, INDEX, LOG, CorruptJournalError
from jaxgoodput.specs import Hints

FILES = (FILE, LOG, INDEX, HEAD)
SEED = 32


def event(number: int):
    """The event at a position. Of six, one takes the place of an earlier one, and two are large."""
    job = f"j{number - number % 6}"
    match number % 6:
        case 0 | 1:
            return JobSubmitted(submission=services.submission(f"j{number}"), secret="s" * 300)
        case 2:
            body = "x" * (number * 997 % 9000)
            return RequestAnswered(request=f"r{number}", digest="d", status=200, body=body)
        case 3:
            hints = Hints(
                generation=0,
                number=number,
                kind="cpu",
                num_devices=1,
                largest=1,
                progress=1.0,
                base_batch_size=32,
                max_global_batch_size=64,
            )
            return HintsReceived(job="j6", hints=hints) if number > 6 else ReasonsGiven(reasons={})
        case 4:
            return ReasonsGiven(reasons={job: f"because of {number}"})
    return (
        JobCancelled(job=job)
        if number > 6
        else JobSubmitted(submission=services.submission("j6"), secret="s")
    )


WRITER = """
import pathlib, sys
sys.path[:0] = sys.argv[2:]
from test_damaged_journal import event
from jaxgoodput.cluster.service.record.journal import ClusterJournal
journal = ClusterJournal(pathlib.Path(sys.argv[1]))
for line in sys.stdin:
    while journal.last < int(line):
        numbers = range(journal.last + 1, min(journal.last + 1 + journal.last % 3, int(line)) + 1)
        journal.append([event(number) for number in numbers], float(numbers[0]), 1e9)
    print(journal.last, flush=True)
"""


SAME = "the same state"
WHOLE, LOST = "refused; repaired, nothing lost", "refused; repaired, says what is lost"
UNKNOWN = "refused; repaired, says that what is lost cannot be told"
OUTCOMES = (SAME, WHOLE, LOST, UNKNOWN)


@dataclass(frozen=True)
class Killed:
    """What a process left that was killed after it had acknowledged `last` events, and its files earlier."""

    folder: pathlib.Path
    older: pathlib.Path
    last: int
    states: Mapping[int, State]
    """The state after each event, as far as no event took the place of another."""


def killed(folder: pathlib.Path, earlier: int, last: int) -> Killed:
    """Have a process acknowledge events, copy its files in between, and kill it."""
    support, own = os.path.dirname(services.__file__), os.path.dirname(__file__)
    made, older = folder / "made", folder / "older"
    made.mkdir(parents=True)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(made), support, own],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    with child.stdin as asks, child.stdout as told:
        for number in (earlier, last):
            print(number, file=asks, flush=True)
            assert told.readline() == f"{number}\n"
            if number == earlier:
                shutil.copytree(made, older)
        child.kill()
        child.wait()
    state, states = State(), {}
    for number in range(1, last + 1):
        state = step(state, JournalEntry(number, 0.0, 1e9, event(number)))
        states[number] = state
    return Killed(made, older, last, {0: State(), **states})


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Killed:
    """A life whose events are all in the log."""
    life = killed(tmp_path_factory.mktemp("short"), 12, 29)
    assert (life.folder / FILE).stat().st_size == 2 * PAGE_BYTES  # made, and never written since
    return life


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Killed:
    """A life whose log was begun anew."""
    life = killed(tmp_path_factory.mktemp("long"), 300, 731)
    assert (life.older / FILE).stat().st_size < (life.folder / FILE).stat().st_size
    return life


# -- damages ---------------------------------------------------------------------------------------------


def damage(kind: str, folder: pathlib.Path, life: Killed, draw: random.Random) -> str:
    """Damage one file of a journal; return its name."""
    name = draw.choice(FILES)
    path = folder / name
    if kind == "missing":
        path.unlink()
        return name
    if kind == "older table and log":  # a backup without the head
        for older in (FILE, LOG):
            shutil.copy(life.older / older, folder / older)
        return older
    if kind == "older copy":
        shutil.copy(life.older / name, path)
        return name
    path.write_bytes(damages.damaged(path.read_bytes(), kind, draw))
    return name


KINDS = (*damages.KINDS, "missing", "older copy", "older table and log")


# -- what must come of them --------------------------------------------------------------------------------


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """The files that matter; SQLite makes the index of the log anew whenever it likes."""
    found = {name: folder / name for name in FILES if name != INDEX}
    return {name: path.read_bytes() for name, path in found.items() if path.exists()}


def opened(folder: pathlib.Path) -> State:
    """The state with which a service starts."""
    with contextlib.closing(ClusterJournal(folder)) as journal:
        return journal.replay()[0]


def known(state: State) -> State:
    """A state without what later events replace, and without times."""
    jobs = {
        id_: dataclasses.replace(
            job, hints=None, reason="", submitted_s=0.0, settled_s=0.0, finished_s=None
        )
        for id_, job in state.jobs.items()
    }
    return dataclasses.replace(state, seq=0, at_s=0.0, news_s=0.0, jobs=jobs)


def outcome(folder: pathlib.Path, life: Killed, whole: State) -> str:
    """What a start makes of a damaged journal, and then a repair; fails if either is untrue."""
    before = contents(folder)
    try:
        assert opened(folder) == whole, "SILENT: it starts, and from another state"
        return SAME
    except (CorruptJournalError, ValueError) as error:
        assert "journal" in str(error) and "--repair" in str(error)
    after = contents(folder)
    assert {name: after[name] for name in before} == before, "a refusal has changed a file"
    report = repair(folder)
    assert report.aside is not None and report.why
    assert {name: (report.aside / name).read_bytes() for name in before} == before
    state = opened(folder)
    last = state.seq
    assert known(state) == known(life.states[last]), "repaired to a state that never was"
    if report.lost is None:
        assert "cannot be told" in report.text()
        return UNKNOWN
    assert report.lost == range(last + 1, life.last + 1)
    gone = {*life.states[life.last].jobs} - {*state.jobs}
    assert {*report.forgotten} <= gone
    if not report.lost:
        assert state == whole
        return WHOLE
    assert f"{len(report.lost)} acknowledged events are lost" in report.text()
    return LOST


def cases(count: int) -> Iterator[tuple[int, str]]:
    """Numbers of cases with the kind of damage of each."""
    return ((number, KINDS[number % len(KINDS)]) for number in range(count))


def table(lives: list[Killed], folder: pathlib.Path, count: int) -> Counter[tuple[str, str]]:
    """How often each kind of damage had each outcome."""
    found = Counter[tuple[str, str]]()
    wholes = [opened(shutil.copytree(life.folder, folder / f"{i}")) for i, life in enumerate(lives)]
    for number, kind in cases(count):
        draw = random.Random(f"{SEED} {number}")
        which = draw.randrange(len(lives))
        life = lives[which]
        case = folder / f"case{number}"
        shutil.copytree(life.folder, case)
        name = damage(kind, case, life, draw)
        try:
            found[kind, outcome(case, life, wholes[which])] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {kind} of {name}, life {which}") from error
        shutil.rmtree(case)
    return found


def kill_alone_loses_nothing(life: Killed, folder: pathlib.Path) -> None:
    state = opened(shutil.copytree(life.folder, folder / "whole"))
    assert state.seq == life.last
    assert known(state) == known(life.states[life.last])


def test_a_damaged_journal_is_the_same_or_refused_and_repaired(short, tmp_path):
    kill_alone_loses_nothing(short, tmp_path)
    found = table([short], tmp_path, 2 * len(KINDS))
    assert sum(found.values()) == 2 * len(KINDS)
    assert {SAME, LOST} <= {told for _, told in found}


@pytest.mark.slow
@pytest.mark.nightly
def test_300_damages(short, long, tmp_path):
    kill_alone_loses_nothing(long, tmp_path)
    found = table([short, long], tmp_path, 300)
    print("\n" + damages.as_table(found, KINDS, OUTCOMES))
    assert sum(found.values()) == 300


def test_the_bit_that_once_lost_15_of_20_jobs_loses_none(short, tmp_path):
    life = short
    folder = tmp_path / "case"
    shutil.copytree(life.folder, folder)
    data = bytearray((folder / LOG).read_bytes())
    data[32 + 8 * (24 + PAGE_BYTES) + 500] ^= 4
    (folder / LOG).write_bytes(data)
    with pytest.raises(
        CorruptJournalError, match=f"of the {life.last} acknowledged events are missing"
    ):
        opened(folder)
    report = repair(folder)
    assert report.lost == range(life.last + 1, life.last + 1)
    assert known(opened(folder)) == known(life.states[life.last])
