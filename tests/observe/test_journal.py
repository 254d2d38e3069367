"""The journal: whatever was written is read back once, whenever the writer was killed."""

import dataclasses
import inspect
import json
import math
import types

import numpy as np
import pytest
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxgoodput._fields import serial
from jaxgoodput.clock import FakeClock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.observe import hooks, journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.checked_lines import checked
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    Event,
    StateShown,
    StepEnd,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.observe.journal import Journal, of_kind


def step_end(step):
    return StepEnd(
        step=step,
        progress=float(step),
        samples=64 * step,
        config=synthetic.START,
        num_samples=64,
        before=Cursor(seed=1, offset=64 * (step - 1)),
        after=Cursor(seed=1, offset=64 * step),
        finite=True,
        at_s=1.0,
        seconds=None,
        metrics={"loss": math.nan},
    )


def test_every_record_reads_back(tmp_path, clock):
    sent = []
    synthetic.run(sent.append, clock, steps=200)
    sent[1:1] = [step_end(1), StateShown(step=1, progress=1.0, params={}, model_state=())]
    kinds = {type(event) for event in sent}
    assert kinds == set(Event.__subclasses__()), "an event that this test does not send"
    writer = Journal(tmp_path, clock=clock)
    for event in sent:
        writer.write(event)
    writer.close()
    back = journal.read(tmp_path / journal.FILE_NAME)
    kept = [event for event in sent if event.journaled]
    read = [record.event for record in back if type(record.event) is not Event]
    assert [type(event) for event in read] == [type(event) for event in kept]
    for event, other in zip(kept, read, strict=True):
        if not isinstance(event, TuneEnd):
            assert serial.encode(other) == serial.encode(event)
    tunes = zip(of_kind(back, TuneEnd), (e for e in sent if isinstance(e, TuneEnd)), strict=True)
    for tune, before in tunes:
        assert tune.timings is None, "the journal keeps none"
        assert tune == dataclasses.replace(before, timings=None, fit=tune.fit, grad=tune.grad)
        assert type(tune.grad) is type(before.grad)
        np.testing.assert_array_equal(tune.grad.sqr, before.grad.sqr)
        assert serial.encode(tune.fit) == serial.encode(before.fit)
        if tune.fit is not None:
            assert math.isnan(tune.fit.params.inter_base)
            assert tune.model.goodput(tune.placement, 8) == before.model.goodput(
                before.placement, 8
            )


def test_the_journal_takes_every_event_but_single_steps(tmp_path, clock):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Moved(Event):
        hook = "on_moved"
        where: str

    class Mover:
        seen = None

        def on_moved(self, event):
            self.seen = event

    writer, mover = Journal(tmp_path, clock=clock), Mover()
    for event in (step_end(1), Moved(step=3, where="here")):
        hooks.call([writer, mover], event)
    writer.close()
    (line,) = (tmp_path / journal.FILE_NAME).read_text().splitlines()
    assert json.loads(line).items() >= {"event": "Moved", "step": 3, "where": "here"}.items()
    (record,) = journal.read(tmp_path / journal.FILE_NAME)
    assert record.event == Event(step=3), "a reader that does not know the class"
    assert mover.seen == Moved(step=3, where="here")


def test_a_hook_hears_of_a_new_batch_too():
    heard = []

    class Listener(Hook):
        def on_event(self, event, /):
            heard.append("event")

        def on_tune_end(self, event, /):
            heard.append("tune")

        def on_batch_size_change(self, event, /):
            heard.append("change")

    change = synthetic.tune_end(50, 10.0, synthetic.START)
    assert change.switched
    hooks.call([Listener()], change)
    hooks.call([Listener()], dataclasses.replace(change, switched=False))
    assert heard == ["event", "tune", "change", "event", "tune"]


def test_a_kind_of_event_that_nobody_hears_of_is_known_before_it_is_made(tmp_path, clock):
    class Steps(Hook):
        def on_step_end(self, event, /):
            pass

    class All:
        def on_event(self, event, /):
            pass

    record, idle = Journal(tmp_path, clock=clock), Hook()
    record.close()
    assert not hooks.hear([record, idle], StepEnd), "the journal does not write it"
    assert hooks.hear([record, idle], Checkpoint)
    assert not hooks.hear([idle, Steps()], Checkpoint)
    for one in (Steps(), All(), types.SimpleNamespace(on_step_end=print)):
        assert hooks.hear([record, idle, one], StepEnd)


def test_a_hook_has_no_method_that_no_event_calls():
    methods = {name for name, _ in inspect.getmembers(Hook, inspect.isfunction)}
    called = {event.hook for event in Event.__subclasses__()}
    assert methods <= called | {"on_event", "on_batch_size_change"}


def test_fields_of_another_version_do_not_cost_the_record(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.window(10, 10.0, 640))
    writer.close()
    path = tmp_path / journal.FILE_NAME
    line = json.loads(path.read_text()) | {"of_the_next_version": 1.0}
    path.write_bytes(path.read_bytes() + checked(line, 2))
    first, second = journal.read(path)
    assert serial.encode(first.event) == serial.encode(second.event)


def test_a_resumed_ledger_books_the_wait_in_its_open_bucket(tmp_path, clock):
    """The last steps before the loop, such as a barrier of half an hour, are not productive."""
    writer, ledger = Journal(tmp_path, clock=clock), TimeLedger(clock)
    writer.write(synthetic.fit_start())
    clock.advance(20.0)
    saved = ledger.saved()
    clock.advance(4.0)
    writer.write(synthetic.window(10, 1.0, 640))  # killed here: 4 s are lost
    writer.close()
    clock.advance(600.0)  # nothing runs
    ledger = TimeLedger(clock)
    with ledger.bucket("training_prep"):
        clock.advance(1.0)
        assert journal.resume(tmp_path, ledger, saved) == 1
        clock.advance(3.0)
    clock.advance(5.0)
    spent = {name: seconds for name, seconds in ledger.snapshot().items() if seconds}
    wasted = {"wasted_progress_from_disruption": 4.0}
    assert spent == {"training_prep": 4.0, "productive": 25.0} | wasted


def test_without_a_checkpoint_the_latest_run_was_in_vain(tmp_path, clock):
    ledger = TimeLedger(clock)
    assert journal.resume(tmp_path, ledger, None) == 0
    writer = Journal(tmp_path, clock=clock)
    for restart in (0, 1):
        clock.advance(100.0)
        writer.write(synthetic.fit_start(restart=restart))
        clock.advance(7.0)
        writer.write(synthetic.window(10, 1.0, 640))
    writer.close()
    ledger = TimeLedger(clock)
    assert journal.resume(tmp_path, ledger, None) == 2
    assert ledger.snapshot()["wasted_progress_from_disruption"] == 7.0
    assert sum(ledger.snapshot().values()) == 7.0
    assert journal.earlier_runs(tmp_path, before=1).latest_start == clock.wall() - 114.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(cut=st.integers(0, 3000), more=st.integers(0, 3))
def test_a_cut_anywhere_costs_at_most_the_cut_line(tmp_path, cut, more):
    path = tmp_path / journal.FILE_NAME
    path.unlink(missing_ok=True)
    clock = FakeClock()
    writer = Journal(tmp_path, clock=clock)
    for step in range(1, 9):
        writer.write(
            EvalEnd(step=step, progress=0.0, at_s=2.0, seconds=1.0, metrics={"ä|\n": float(step)})
        )
    writer.close()
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")
    torn = []
    writer = Journal(tmp_path, clock=clock)
    for step in range(100, 100 + more):
        writer.write(Checkpoint(step=step, seconds=0.1))
    writer.close()
    back = journal.read(path, on_damage=lambda number, text: torn.append(number))
    steps = [record.event.step for record in back]
    appended = list(range(100, 100 + more))
    kept = steps[: len(steps) - more]
    assert steps[len(kept) :] == appended
    # A cut just before the end of a line leaves a whole record without its newline.
    assert kept in (list(range(1, whole + 1)), list(range(1, whole + 2)))
    assert len(torn) <= 1
    if torn:
        assert kept == list(range(1, whole + 1))


def test_torn_lines_are_reported(tmp_path, clock, caplog):
    writer = Journal(tmp_path, clock=clock)
    writer.write(Checkpoint(step=1, seconds=0.1))
    writer.close()
    path = tmp_path / journal.FILE_NAME
    path.write_bytes(path.read_bytes() + b'{"event": "Check')
    with caplog.at_level("WARNING", logger="absl"):
        assert len(journal.read(path)) == 1
    assert "goodput.jsonl:2" in caplog.text


def test_what_a_restart_undid_does_not_count(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    for step in (10, 20, 30):
        writer.write(synthetic.window(step, float(step), 64 * step))
    writer.write(synthetic.fit_start(step=20, progress=20.0, restart=1))
    for step in (30, 40):
        writer.write(synthetic.window(step, float(step), 64 * step))
    writer.close()
    path = tmp_path / journal.FILE_NAME
    steps = [(r.event.step, r.restart) for r in journal.read(path) if isinstance(r.event, Window)]
    assert steps == [(10, 0), (20, 0), (30, 1), (40, 1)]
    every = journal.read(path, keep_undone=True)
    assert [r.event.step for r in every if r.undone] == [30]


def test_a_full_disk_costs_lines_not_the_run(tmp_path, clock, monkeypatch, caplog):
    writer = Journal(tmp_path, clock=clock)

    class Full:
        name = "goodput.jsonl"

        def __init__(self, file):
            self.file, self.room = file, 20

        def write(self, data):
            if self.room == 0:
                raise OSError(28, "No space left on device")
            taken, self.room = data[: self.room], 0
            return self.file.write(taken)

    file = writer._file
    monkeypatch.setattr(writer, "_file", Full(file))
    with caplog.at_level("WARNING", logger="absl"):
        writer.write(Checkpoint(step=1, seconds=0.1))
        writer.write(Checkpoint(step=2, seconds=0.1))
    assert "Training goes on" in caplog.text
    monkeypatch.undo()
    writer.write(Checkpoint(step=3, seconds=0.1))
    writer.close()
    back = journal.read(tmp_path / journal.FILE_NAME, on_damage=lambda number, text: None)
    assert [record.event.step for record in back] == [3]


ANY_LINE = [
    b"",
    b"null",
    b"[]",
    b"\0" * 100,
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"event": 3}',
    b'{"event": "FitStart"}',
    b'{"event": "FitStart", "wall": "now", "restart": 0, "step": 0}',
    b'{"event": "FitStart", "wall": 1e999, "restart": 0, "step": 0}',
    b'{"event": "FitStart", "wall": NaN, "restart": 0, "step": 0}',
    b'{"event": "FitStart", "wall": 1.0, "restart": [], "step": 0}',
    b'{"event": "FitStart", "wall": 1.0, "restart": 0, "step": ' + b"9" * 5000 + b"}",
    b"x" * 3_000_000,
]


def read(path, torn=None):
    """The records as JSON: of two NaNs that were read apart, neither equals the other."""
    torn = [] if torn is None else torn
    records = journal.read(path, on_damage=lambda where, text: torn.append(where))
    return [(type(record.event), serial.encode(record)) for record in records]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(places=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(ANY_LINE)), max_size=6))
def test_lines_of_any_kind_cost_nothing_but_themselves(tmp_path, places):
    path = tmp_path / journal.FILE_NAME
    path.unlink(missing_ok=True)
    clock = FakeClock(100.0)
    writer = Journal(tmp_path, clock=clock)
    for restart, step in ((0, 0), (1, 20)):
        writer.write(synthetic.fit_start(step=step, restart=restart))
        for after in (10, 20, 30):
            clock.advance(1.0)
            writer.write(synthetic.window(step + after, 1.0, 640))
    writer.close()
    whole, runs = read(path), journal.earlier_runs(tmp_path)
    assert runs == (2, 106.0, 103.0)
    lines = path.read_bytes().splitlines()
    for place, line in places:
        lines.insert(place, line)
    path.write_bytes(b"\n".join(lines) + b"\n")
    torn = []
    assert read(path, torn) == whole
    assert len(torn) == sum(bool(line.strip()) for _, line in places)
    assert journal.earlier_runs(tmp_path) == runs
    assert journal.earlier_runs(tmp_path, before=1) == (1, 103.0, 100.0)


def test_a_start_reads_the_end_of_a_journal_and_no_more(tmp_path, clock, monkeypatch):
    writer = Journal(tmp_path, clock=clock)
    for restart in range(3):
        for step in range(300):
            if step == 0:
                writer.write(synthetic.fit_start(restart=restart))
            clock.advance(1.0)
            writer.write(synthetic.window(step, 1.0, 640))
    writer.close()
    parsed = []
    parse = journal.parse
    monkeypatch.setattr(journal, "_BLOCK_BYTES", 10_000)
    monkeypatch.setattr(journal, "parse", lambda *a, **k: (parsed.append(1), parse(*a, **k))[1])
    path = tmp_path / journal.FILE_NAME
    own = path.read_bytes().rindex(b'"FitStart"') - 20_000  # two blocks before it, at most
    assert own > 0.6 * path.stat().st_size
    data = path.read_bytes()
    path.write_bytes(b"\0" * own + data[own:])
    assert journal.earlier_runs(tmp_path) == (3, 900.0, 600.0)
    assert len(parsed) == 3  # a blank end, the newest, and the start


@pytest.mark.parametrize("block_bytes", [1, 7, 100, 2**20])
def test_lines_are_the_same_from_both_ends(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(journal, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "lines"
    for data in (b"", b"\n", b"a", b"a\n", b"\n\na\nbb\n\nccc"):
        path.write_bytes(data)
        backwards = [line[:block_bytes] for line in journal._lines_backwards(path)]
        assert backwards[::-1] == [line[:block_bytes] for line in data.split(b"\n")]


def test_a_journal_is_set_aside_in_parts_and_none_of_it_is_lost(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 5_000)
    monkeypatch.setattr(journal, "MOST_MERGED", 3)
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    spent_s = 0.0
    for step in range(1, 101):
        clock.advance(1.0)
        window = synthetic.window(10 * step, float(step), 640 * step, metrics={"loss": float(step)})
        spent_s += window.seconds
        writer.write(window)
        writer.write(synthetic.tune_end(10 * step, 0.0, synthetic.START, known=False))
    writer.close()
    path = tmp_path / journal.FILE_NAME
    parts = journal.segments(path)
    assert len(parts) > journal.NUM_WHOLE + 2
    assert [part.name for part in parts] == [
        *(f"goodput.{i}.jsonl" for i in range(1, len(parts))),
        journal.FILE_NAME,
    ]
    back = journal.read(path)
    windows = of_kind(back, Window)
    assert len(windows) < 90
    assert sum(w.num_steps for w in windows) == 1000
    assert sum(w.seconds for w in windows) == pytest.approx(spent_s)
    assert sum(w.num_steps * w.metrics["loss"] for w in windows) == pytest.approx(50500)
    for kind in (Window, TuneEnd):
        assert sum(r.num_merged for r in back if isinstance(r.event, kind)) == 100
    assert [w.step for w in windows] == sorted({w.step for w in windows})
    assert (windows[-1].step, windows[-1].samples) == (1000, 64000)
    assert journal.earlier_runs(tmp_path) == (1, 100.0, 0.0)


def test_a_journal_that_cannot_be_divided_grows_on(tmp_path, clock, monkeypatch, caplog):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 200)
    writer = Journal(tmp_path, clock=clock)

    def refuse(self, target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(tmp_path), "rename", refuse)
    with caplog.at_level("WARNING", logger="absl"):
        for step in range(1, 11):
            writer.write(Checkpoint(step=step, seconds=0.1))
    writer.close()
    assert 1 <= caplog.text.count("no new file could be begun") <= 5
    back = journal.read(tmp_path / journal.FILE_NAME)
    assert [r.event.step for r in back] == list(range(1, 11))


def test_a_missing_journal_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        journal.read(tmp_path / journal.FILE_NAME)
