"""Any damage of a run's journal is said, and a run starts all the same.

`pytest -m nightly -s tests/observe/test_damaged_run_journal.py` prints the table of 300 damages.
"""

import pathlib
import random
import shutil
from collections import Counter

import damages
import pytest
import synthetic

from jaxgoodput._fields import serial
from jaxgoodput.clock import FakeClock
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Checkpoint, EvalEnd, FitStart
from jaxgoodput.observe.journal import Journal, Record

KINDS = (*damages.KINDS, "one line gone", "one line twice", "missing", "older copy")
SAID, ENDS_EARLY, SAME = "said", "as if the run had been killed earlier", "the same records"
SEED = 33


def lived(folder: pathlib.Path, segment_bytes: int) -> pathlib.Path:
    """A journal of three runs; a copy of its folder from the second run on lies beside it."""
    clock = FakeClock(1000.0)
    for restart in range(3):
        writer = Journal(folder, clock=clock)
        writer._set_aside_at = segment_bytes
        writer.write(synthetic.fit_start(step=100 * restart, restart=restart))
        for step in range(1, 101):
            clock.advance(1.5)
            at = 100 * restart + step
            writer.write(synthetic.window(at, float(at), 64 * at))
            if step % 10 == 0:
                writer.write(
                    EvalEnd(step=at, progress=0.0, at_s=2.0, seconds=1.0, metrics={"loss": 1.0})
                )
                writer.write(Checkpoint(step=at, seconds=0.1))
        writer.close()
        if restart == 1:
            shutil.copytree(folder, folder.with_name("older"))
    return folder


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A journal in one file."""
    return lived(tmp_path_factory.mktemp("one") / "now", journal.SEGMENT_BYTES)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A journal in several files, of which the oldest were made shorter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SEGMENT_BYTES", 30_000)
        patch.setattr(journal, "NUM_WHOLE", 2)
        folder = lived(tmp_path_factory.mktemp("parts") / "now", 30_000)
    files = journal.segments(folder / journal.FILE_NAME)
    assert len(files) > 4 and b"journal_from" in files[0].read_bytes()
    return folder


def read(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """The records, as text, and what was said about damage."""
    said: list[str] = []

    def told(where: str, what: str) -> None:
        said.append(f"{where}: {what}")

    try:
        records = journal.read(folder / journal.FILE_NAME, keep_undone=True, on_damage=told)
    except FileNotFoundError as error:
        return [], [str(error)]
    return [as_text(record) for record in records], said


def as_text(record: Record) -> str:
    return f"{type(record.event).__name__} {serial.encode(record)}"


def damage(kind: str, folder: pathlib.Path, draw: random.Random) -> str:
    path = draw.choice(journal.segments(folder / journal.FILE_NAME))
    lines = path.read_bytes().splitlines(keepends=True)
    place = draw.randrange(len(lines))
    if kind == "missing":
        path.unlink()
    elif kind == "older copy":
        path = folder / journal.FILE_NAME
        shutil.copy(folder.with_name("older") / path.name, path)
    elif kind == "one line gone":
        path.write_bytes(b"".join(lines[:place] + lines[place + 1 :]))
    elif kind == "one line twice":
        path.write_bytes(b"".join(lines[: place + 1] + lines[place:]))
    else:
        path.write_bytes(damages.damaged(path.read_bytes(), kind, draw))
    return path.name


def outcome(folder: pathlib.Path, whole: list[str]) -> str:
    """What a reader says; fails if it is silent, and if a start is not possible or not exact afterwards."""
    found, said = read(folder)
    journal.resume(folder, TimeLedger(FakeClock(2000.0)), None)
    writer = Journal(folder, clock=FakeClock(3000.0))
    writer.write(synthetic.fit_start(step=300, restart=3))
    writer.close()
    after, _ = read(folder)
    assert len(after) == len(found) + 1 and FitStart.__name__ in after[-1]
    if said:
        return SAID
    if found == whole:
        return SAME
    assert found == whole[: len(found)], "SILENT: other records"
    return ENDS_EARLY


def table(lives: list[pathlib.Path], folder: pathlib.Path, count: int) -> Counter[tuple[str, str]]:
    """How often each kind of damage had each outcome."""
    found = Counter[tuple[str, str]]()
    wholes = [read(life) for life in lives]
    assert all(records and not said for records, said in wholes)
    for number in range(count):
        draw, kind = random.Random(f"{SEED} {number}"), KINDS[number % len(KINDS)]
        which = draw.randrange(len(lives))
        case = folder / str(number) / "now"
        shutil.copytree(lives[which].parent, case.parent)
        name = damage(kind, case, draw)
        try:
            found[kind, outcome(case, wholes[which][0])] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {kind} of {name}, life {which}") from error
        shutil.rmtree(case.parent)
    return found


def test_any_damage_is_said(life, parts, tmp_path):
    found = table([life, parts], tmp_path, 2 * len(KINDS))
    for kind in ("one line gone", "one line twice", "zeros", "rubbish"):
        assert found[kind, SAID] == 2 or kind == "one line gone" and found[kind, SAID] > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_300_damages(life, parts, tmp_path):
    outcomes = (SAID, ENDS_EARLY, SAME)
    found = table([life, parts], tmp_path, 300)
    print("\n" + damages.as_table(found, KINDS, outcomes))
    assert sum(found.values()) == 300


def test_a_changed_digit_is_said(life, tmp_path):
    shutil.copytree(life, tmp_path / "now")
    path = tmp_path / "now" / journal.FILE_NAME
    data = path.read_bytes()
    place = data.index(b'"step": 57,') + 8
    path.write_bytes(data[:place] + b"6" + data[place + 1 :])
    records, said = read(tmp_path / "now")
    assert len(said) == 1 and "changed or cut" in said[0]
    assert len(records) == len(read(life)[0]) - 1


def test_lines_without_numbers_are_taken_as_they_are(tmp_path):
    for restart in range(3):
        writer = Journal(tmp_path, clock=FakeClock(1000.0))
        writer.write(synthetic.fit_start(step=0, restart=restart))
        writer.write(Checkpoint(step=1, seconds=0.1))
        writer.close()
        with (tmp_path / journal.FILE_NAME).open("a") as file:
            file.write(
                '{"event": "Checkpoint", "wall": 1.0, "restart": 0, "step": 1, "seconds": 0.1}\n'
            )
    records, said = read(tmp_path)
    assert not said and len(records) == 9


def test_a_damaged_segment_is_not_made_shorter(parts, tmp_path):
    shutil.copytree(parts, tmp_path / "now")
    last = journal.segments(tmp_path / "now" / journal.FILE_NAME)[-2]
    lines = last.read_bytes().splitlines(keepends=True)
    for damage in (lines[:3] + lines[4:], [*lines[:3], lines[3].replace(b"1", b"2"), *lines[4:]]):
        last.write_bytes(b"".join(damage))
        before = last.read_bytes()
        journal._shorten(last)
        assert last.read_bytes() == before
    last.write_bytes(b"".join(lines))
    journal._shorten(last)
    assert last.stat().st_size < len(before)
    assert not read(tmp_path / "now")[1]
