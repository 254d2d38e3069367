"""SIGTERM and SIGINT: saved at the next step, exit code 143, and nothing left behind."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import compilations
import jax
import numpy as np
import pytest
from problems import Counting, Evaluated, InStep, Recorder, counting_config

from jaxgoodput.observe.events import Checkpoint, FitEnd, FitStart, Preempt, StepEnd
from jaxgoodput.train.control import Preempted

LIMIT_S = 120.0

SCRIPT = """
    import pathlib, sys, time
    import jax
    jax.config.update("jax_platforms", "cpu")
    import problems

    workdir = pathlib.Path(sys.argv[1])

    class Slow:
        def __len__(self):
            return 400

        def __getitem__(self, index):
            time.sleep(0.002)
            return {"id": problems.np.int32(index), "x": problems.rows(1)["x"][0]}

    class Running:
        def on_step_end(self, event):
            (workdir / "running").write_text(str(event.step))

    trainer = problems.Counting(
        problems.counting_config(workdir, epochs=3), num_samples=400, hooks=[Running()]
    )
    trainer.data = Slow()
    state = trainer.fit()
    (workdir / "counts").write_text(repr(set(state.params["count"].tolist())))
"""


def started(workdir):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(workdir)],
        cwd=pathlib.Path(__file__).parents[1] / "support",
        env={**os.environ, **compilations.JOBS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_real_process_saves_and_exits_with_143_and_is_carried_on(tmp_path, signum):
    with started(tmp_path) as child:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (tmp_path / "running").exists():
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            child.send_signal(signum)
            output, _ = child.communicate(timeout=LIMIT_S)
        finally:
            child.kill()
    assert child.returncode == 143, output
    assert "Traceback" not in output
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert 0 < int(saved.name) < 75

    with started(tmp_path) as child:
        try:
            output, _ = child.communicate(timeout=LIMIT_S)
        finally:
            child.kill()
    assert child.returncode == 0, output
    assert (tmp_path / "counts").read_text() == "{3.0}"


@pytest.fixture
def own_handlers():
    """Handlers of the script's own, which a run must give back; without them a bug would end pytest."""
    heard = []

    def note(number, frame):
        heard.append(number)

    before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield note, heard
    for number, handler in before.items():
        signal.signal(number, handler)


def send(signum):
    os.kill(os.getpid(), signum)


def own_threads():
    return {t.name for t in threading.enumerate() if t.name.startswith("jaxgoodput")}


def given_back(own_handlers):
    note, heard = own_handlers
    assert signal.getsignal(signal.SIGTERM) is note
    assert signal.getsignal(signal.SIGINT) is note
    # What was being read is not waited for, and its thread ends with it; the guard's sees to the end.
    deadline = time.monotonic() + LIMIT_S
    while own_threads() - {"jaxgoodput-guard"}:
        assert time.monotonic() < deadline, own_threads()
        time.sleep(0.01)
    return not heard


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_between_steps_is_heard_at_the_next(tmp_path, own_handlers, signum):
    seen = Recorder(lambda e: send(signum) if e.step == 3 else None)
    with pytest.raises(Preempted) as stopped:
        Counting(counting_config(tmp_path), hooks=[seen], loop=InStep).fit()
    assert given_back(own_handlers)
    assert stopped.value.code == 143
    # The signal may reach the main thread just after it looked.
    assert stopped.value.step in (3, 4)
    assert seen.of(Preempt)[0].signal == stopped.value.signal_name == signal.Signals(signum).name
    assert seen.of(Checkpoint)[-1].step == stopped.value.step
    assert seen.of(FitEnd)[0].reason == "preempted"


@pytest.mark.slow
def test_a_signal_during_compilation_ends_a_run_that_has_nothing_to_lose(tmp_path, own_handlers):
    class Compiling(Counting):
        def loss(self, params, batch, key):
            if not sent:
                sent.append(signal.SIGTERM)
                send(signal.SIGTERM)
            return super().loss(params, batch, key)

    sent = []
    seen = Recorder()
    with pytest.raises(Preempted) as stopped:
        Compiling(counting_config(tmp_path), hooks=[seen]).fit()
    assert given_back(own_handlers)
    assert stopped.value.code == 143 and stopped.value.step is None
    assert not seen.events
    state = Compiling(counting_config(tmp_path)).fit()
    np.testing.assert_array_equal(state.params["count"], 2)


class Signalled(Evaluated):
    """Gets signals while it evaluates for the first time."""

    def __init__(self, config, *signals, **options):
        super().__init__(config, **options)
        self.signals = list(signals)

    def summarize(self, outputs):
        while self.signals:
            send(self.signals.pop(0))
        return super().summarize(outputs)


@pytest.mark.slow
def test_a_signal_during_an_evaluation_is_heard_at_the_next_step(tmp_path, own_handlers):
    settings = counting_config(tmp_path, evaluation__every_base_steps=4.0)
    with pytest.raises(Preempted) as stopped:
        Signalled(settings, signal.SIGTERM, loop=InStep).fit()
    assert given_back(own_handlers)
    assert stopped.value.step == 6  # the evaluation was due after step 5
    seen = Recorder()
    Signalled(settings, hooks=[seen]).fit()
    assert [s.step for s in seen.of(StepEnd)] == list(range(7, 13))


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    "signals",
    [
        (INT, INT),
        (TERM, INT),
        *(
            pytest.param(signals, marks=pytest.mark.slow)
            for signals in [(TERM, TERM), (INT, TERM), (HUP, INT), (TERM, INT, INT)]
        ),
    ],
    ids=lambda signals: "-".join(one.name for one in signals),
)
def test_only_a_second_sigint_interrupts(tmp_path, own_handlers, signals):
    # Schedulers and launchers repeat themselves with other signals: what is being saved must not be cut off.
    settings = counting_config(tmp_path, evaluation__every_base_steps=4.0)
    ends_by = KeyboardInterrupt if signals.count(INT) > 1 else Preempted
    with pytest.raises(ends_by):
        Signalled(settings, *signals).fit()
    assert given_back(own_handlers)


AFTER = """
    import os, signal, sys, time
    from jaxgoodput.clock import SystemClock
    from jaxgoodput.goodput.search import BatchLimits
    from jaxgoodput.train.config import Config, Saving
    from jaxgoodput.train.control import NotSaved, Preempted, Requests
    from jaxgoodput.train.process import guarded

    first, ends, caught, *later = sys.argv[1:]
    config = Config(
        workdir="x", batch=BatchLimits(base=1, max=1), epochs=1,
        saving=Saving(grace_s=0.1 if caught == "late" else 60.0),
    )
    requests = Requests()

    def send(name):
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.05)

    class Loop:
        done = 3
        def pulse(self): return None
        def save_aside(self): return None

    try:
        with guarded(config, requests, SystemClock()) as guard:
            guard.watch(Loop())
            send(first)
            raise Preempted(3, first) if ends == "saved" else NotSaved(3, 2, "why")
    except SystemExit:
        if caught == "late":
            time.sleep(0.3)
        for name in later:
            send(name)
        if caught == "no":
            raise
"""


def ended_after(first, ends, caught, *later):
    command = [sys.executable, "-c", textwrap.dedent(AFTER), first, ends, caught, *later]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, ends, caught, later, code",
    [
        ("SIGTERM", "saved", "no", ("SIGINT",), 143),
        ("SIGTERM", "unsaved", "no", ("SIGTERM",), 75),
        ("SIGINT", "unsaved", "no", ("SIGTERM", "SIGHUP"), 75),
        ("SIGINT", "saved", "no", ("SIGTERM", "SIGINT"), -signal.SIGINT),
        ("SIGTERM", "saved", "yes", ("SIGTERM", "SIGHUP"), 0),
        ("SIGTERM", "saved", "late", ("SIGTERM",), -signal.SIGTERM),
    ],
)
def test_signals_after_a_stopped_run_do_not_change_what_the_exit_code_says(
    first, ends, caught, later, code
):
    ended = ended_after(first, ends, caught, *later)
    assert ended.returncode == code, ended.stderr


def test_handlers_are_given_back_after_an_error(tmp_path, own_handlers):
    with pytest.raises(ValueError, match="data set of 8"):
        Counting(counting_config(tmp_path), num_samples=8).fit()
    assert given_back(own_handlers)


@pytest.mark.slow
def test_a_run_beside_the_main_thread_leaves_signals_alone(tmp_path, own_handlers):
    found = []

    def look(event):
        found.append(signal.getsignal(signal.SIGTERM))
        trainer.request_stop()

    def fit():
        try:
            trainer.fit()
        except Preempted as stopped:
            found.append(stopped)

    trainer = Counting(counting_config(tmp_path), hooks=[Recorder(look)])
    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    note, _ = own_handlers
    assert found[0] is note
    assert isinstance(found[-1], Preempted) or len(found) == 12
    assert given_back(own_handlers)
    seen = Recorder()
    Counting(counting_config(tmp_path, epochs=3), hooks=[seen], devices=jax.devices()[:1]).fit()
    assert seen.of(FitStart)[0].step > 0
