"""The contract of a stop: save first, then tell hooks, in time, and never an exit code that is not true."""

import dataclasses
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from problems import Counting, Evaluated, InStep, Mean, Recorder, config, counting_config, rows

from jaxgoodput._exits import Exit
from jaxgoodput.clock import FakeClock
from jaxgoodput.observe import hooks as hooking
from jaxgoodput.observe.events import Checkpoint, FitEnd, FitStart, Preempt, StepEnd
from jaxgoodput.train import process
from jaxgoodput.train.config import Saving
from jaxgoodput.train.control import NotSaved, Preempted, Requests

BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "stops.py"
LIMIT_S = 60.0


def newest(workdir):
    names = [p.name for p in (pathlib.Path(workdir) / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=None)


def wait_until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stopping_at(step):
    """A hook that asks to stop, and the list into which its trainer is to be put."""
    trainers = []
    return Recorder(lambda e: trainers[0].request_stop() if e.step == step else None), trainers


# -- the code says what is on the disk ---------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """From `full_disk.add(True)` on, nothing can be written any more."""
    save, is_full = ocp.CheckpointManager.save, set()

    def refuse(self, *arguments, **named):
        if is_full:
            raise OSError(28, "No space left on device")
        return save(self, *arguments, **named)

    monkeypatch.setattr(ocp.CheckpointManager, "save", refuse)
    return is_full


@pytest.mark.slow
def test_a_stop_that_cannot_save_ends_with_75_and_names_the_step_that_is_safe(tmp_path, full_disk):
    def act(event):
        if event.step == 3:
            trainer.request_save()
        if event.step == 6:
            wait_until(lambda: newest(tmp_path) is not None)
            full_disk.add(True)
            trainer.request_stop()

    seen = Recorder(act)
    trainer = Counting(counting_config(tmp_path), hooks=[seen], loop=InStep)
    with pytest.raises(NotSaved) as ended:
        trainer.fit()
    assert ended.value.code == 75
    assert (ended.value.step, ended.value.safe_step) == (6, 3)
    assert "step 3 is safe" in str(ended.value) and "No space left" in str(ended.value)
    assert seen.of(Checkpoint)[-1].error and seen.of(Preempt)
    (end,) = seen.of(FitEnd)  # what trackers and reports call the outcome
    assert end.reason.startswith("NotSaved: step 6 could not be saved")

    full_disk.clear()
    again = Recorder()
    state = Counting(counting_config(tmp_path), hooks=[again]).fit()
    assert again.of(FitStart)[0].step == 3
    np.testing.assert_array_equal(state.params["count"], 2)


def test_a_run_whose_last_save_fails_is_not_done(tmp_path, full_disk):
    full_disk.add(True)
    with pytest.raises(NotSaved) as ended:
        Counting(counting_config(tmp_path)).fit()
    assert (ended.value.code, ended.value.safe_step) == (75, None)
    np.testing.assert_array_equal(
        ended.value.state.params["count"], 2
    )  # it is not lost to who asks


@pytest.mark.parametrize("code", [None, 0, 143])
def test_a_hook_that_ends_the_process_well_does_not_hide_that_the_last_save_fails(
    code, tmp_path, full_disk
):
    def act(event):
        if event.step == 4:
            sys.exit(code)

    full_disk.add(True)
    with pytest.raises(NotSaved) as ended:
        Counting(counting_config(tmp_path), hooks=[Recorder(act)], loop=InStep).fit()
    assert ended.value.code == 75


def test_a_run_that_is_not_to_be_saved_is_done_without(tmp_path, full_disk):
    full_disk.add(True)
    Counting(counting_config(tmp_path, saving__at_end=False)).fit()


# -- nothing that is slow stands between a stop and its checkpoint -----------------------------------


class Hanging:
    """Samples of which one is never read, until `release` is set."""

    def __init__(self, num_samples, last):
        self.samples = {**rows(num_samples), "id": np.arange(num_samples)}
        self.last, self.num_read = last, 0
        self.hangs, self.release = threading.Event(), threading.Event()
        self.release_timed_out = False

    def __len__(self):
        return len(self.samples["id"])

    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read > self.last:
            self.hangs.set()
            self.release_timed_out |= not self.release.wait(LIMIT_S)
            self.release.set()  # so that only one of them waits so long
        return {name: x[index] for name, x in self.samples.items()}


@pytest.mark.slow
def test_a_stop_is_heard_while_the_data_hang(tmp_path):
    data = Hanging(96, 7 * 16 + 8)  # some are read to know what they are
    seen = Recorder()
    trainer = Counting(counting_config(tmp_path), hooks=[seen])
    trainer.data = data

    def stop():
        data.hangs.wait(LIMIT_S)
        wait_until(lambda: len(seen.of(StepEnd)) >= 3)  # what was read before is trained on
        trainer.request_stop()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Preempted) as stopped:
        trainer.fit()
    thread.join()
    data.release.set()
    assert not data.release_timed_out
    step = stopped.value.step
    assert step is not None and 3 <= step < 12
    assert step == newest(tmp_path) == len(seen.of(StepEnd))
    state = Counting(counting_config(tmp_path)).fit()
    np.testing.assert_array_equal(state.params["count"], 2)


def test_hooks_that_are_behind_hear_of_a_stop_when_it_is_saved(tmp_path):
    saved = []

    class Behind:
        def on_step_end(self, event):
            if event.step == 4:
                trainer.request_stop()
                wait_until(lambda: newest(tmp_path) is not None)

        def on_preempt(self, event):
            saved.append((event.step, newest(tmp_path)))

    trainer = Counting(counting_config(tmp_path), hooks=[Behind()])
    with pytest.raises(Preempted) as stopped:
        trainer.fit()
    assert saved == [(stopped.value.step, stopped.value.step)]


@pytest.mark.slow
@pytest.mark.parametrize("heard", ["on_step_end", "on_window"])
def test_training_waits_for_hooks_that_are_far_behind_and_names_the_slow_one(
    tmp_path, monkeypatch, caplog, heard
):
    """Whether they hear of steps, or of windows that are as short."""
    monkeypatch.setattr(hooking, "MOST_BEHIND", 4)
    behind, waited_s = [], []

    class Slow:
        def handle(self, event):
            time.sleep(0.1)  # far longer than a step takes anywhere
            behind.append(trainer._loop.now.step - event.step)

        def on_fit_end(self, event):
            waited_s.append(event.buckets_s["hooks_behind"])

    setattr(Slow, heard, Slow.handle)
    settings = counting_config(tmp_path, epochs=6, reporting__window_s=1e-9)
    trainer = Counting(settings, hooks=[Slow()])
    trainer.fit()
    # What waits, what the hook has in hand, what the watcher holds, and the steps in flight.
    assert max(behind) <= 4 + 1 + 1 + 2
    assert waited_s[0] > 0
    (line,) = [r.getMessage() for r in caplog.records if "training waits" in r.getMessage()]
    assert "Slow" in line


@pytest.mark.slow
def test_an_evaluation_is_left_where_a_stop_is_asked_for(tmp_path):
    class Asking(Evaluated):
        batches = 0

        def eval_dataset(self) -> Any:
            task, whole = self, super().eval_dataset()

            class Rows:
                def __len__(self):
                    return len(whole["x"])

                def __getitem__(self, index):
                    if task._loop is not None:
                        task.batches += 1
                        task.request_stop()
                    return {"x": whole["x"][index]}

            return Rows()

    settings = counting_config(
        tmp_path, evaluation__every_base_steps=4.0, evaluation__micro_batch_size=1
    )
    trainer = Asking(settings, loop=InStep)
    with pytest.raises(Preempted) as stopped:
        trainer.fit()
    assert stopped.value.step == newest(tmp_path) == 5
    assert 0 < trainer.batches < 37


# -- what a user's own code raises costs nothing -----------------------------------------------------


class Mistaken(Evaluated):
    """Fails in one of its methods when it is called while training goes on."""

    def __init__(self, config, where, **options):
        super().__init__(config, **options)
        self.where = where

    def summarize(self, outputs):
        if self.where == "summarize":
            raise KeyError("the task's own mistake")
        return super().summarize(outputs)

    def loss(self, params, batch, key):
        if self.where == "loss" and batch["x"].shape[0] == 2 * 16:
            raise KeyError("the task's own mistake")
        return super().loss(params, batch, key)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["summarize", "loss"])
def test_an_exception_in_the_users_code_is_raised_after_a_checkpoint(tmp_path, where):
    import jax

    settings = counting_config(tmp_path, evaluation__every_base_steps=4.0)
    seen = Recorder(lambda e: trainer.request_batch(32) if e.step == 4 else None)
    options = {"devices": jax.devices()[:1], "hooks": [seen] if where == "loss" else []}
    trainer = Mistaken(settings, where, loop=InStep, **options)
    with pytest.raises(KeyError, match="own mistake"):
        trainer.fit()
    again = Recorder()
    Evaluated(settings, hooks=[again], devices=jax.devices()[:1]).fit()
    assert again.of(FitStart)[0].step in (4, 5)
    assert again.of(StepEnd)[-1].samples == 2 * 96


class Unreadable(Mean):
    """A sample of its first batch cannot be read."""

    def dataset(self):
        class Rows:
            def __len__(self):
                return 96

            def __getitem__(self, index):
                if index == 1:
                    raise ValueError("a broken sample")
                return {"x": rows(96)["x"][index]}

        return Rows()


def test_an_exception_before_the_first_step_leaves_no_checkpoint(tmp_path):
    with pytest.raises(RuntimeError, match="a broken sample"):
        Unreadable(config(tmp_path, shuffle=False)).fit()
    assert newest(tmp_path) is None


# -- the guard ---------------------------------------------------------------------------------------


class Looped:
    """What a guard sees of a loop."""

    def __init__(self):
        self.done, self.is_safe = 7, False
        self.life: int | None = 0
        self.saves = threading.Event()

    def pulse(self):
        return None if self.life is None else (self.done, self.life)

    def save_aside(self):
        self.saves.set()

    def farewell(self):
        return Exit(143, "all is saved") if self.is_safe else Exit(75, "step 3 is safe")


@pytest.fixture
def guarding(monkeypatch):
    """A guard with a clock that is told the time, what it looks after, and the codes it ended with."""
    monkeypatch.setattr(process, "POLL_S", 0.005)
    clock, requests, ends, beats = FakeClock(), Requests(), [], []
    guard = process.StopGuard(
        requests,
        Saving(grace_s=60.0, hang_after_s=100.0),
        clock,
        launched=process.LauncherLink(grace_s=40.0, beat=beats.append),
        leave=ends.append,
    )
    yield guard, clock, requests, ends, beats
    guard.close()


def hear(guard, number):
    os.write(guard.pipe, bytes([number]))


def settle(guard):
    """Let the guard look a few times."""
    time.sleep(0.1)


def test_a_guard_helps_at_a_quarter_of_the_grace_and_ends_before_the_launcher_does(guarding):
    guard, clock, requests, ends, _ = guarding
    loop = Looped()
    guard.watch(loop)
    hear(guard, signal.SIGHUP)
    wait_until(lambda: requests.signal == "SIGHUP")
    clock.advance(9.9)
    settle(guard)
    assert not loop.saves.is_set() and not requests.is_overdue
    clock.advance(0.2)
    wait_until(loop.saves.is_set)
    assert requests.is_overdue
    clock.advance(25.0)
    settle(guard)
    assert not ends
    loop.is_safe = True
    clock.advance(1.0)
    wait_until(lambda: ends)
    assert set(ends) == {143}


def test_a_guard_does_not_say_143_for_what_is_not_saved(guarding, caplog):
    guard, clock, requests, ends, _ = guarding
    guard.watch(Looped())
    hear(guard, signal.SIGTERM)
    wait_until(lambda: requests.signal)
    clock.advance(36.1)
    wait_until(lambda: ends)
    assert set(ends) == {75}
    assert any("step 3 is safe" in r.getMessage() for r in caplog.records)


def test_a_run_that_was_getting_ready_ends_soon(guarding):
    guard, clock, requests, ends, _ = guarding
    hear(guard, signal.SIGTERM)
    wait_until(lambda: requests.signal)
    clock.advance(process.PROMPT_S)
    wait_until(lambda: ends)
    assert set(ends) == {143}


def test_a_second_sigint_ends_a_run_soon_and_other_signals_do_not(guarding):
    guard, clock, requests, ends, _ = guarding
    guard.watch(Looped())
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        hear(guard, number)
    wait_until(lambda: requests.signal)
    clock.advance(process.PROMPT_S + 1)
    settle(guard)
    assert not ends
    hear(guard, signal.SIGINT)
    settle(guard)
    clock.advance(process.PROMPT_S)
    wait_until(lambda: ends)
    assert set(ends) == {75}


def test_a_run_without_a_sign_of_life_is_told_to_stop_with_the_stacks_of_its_threads(
    guarding, caplog
):
    guard, clock, requests, ends, beats = guarding
    loop = Looped()
    guard.watch(loop)
    for _ in range(20):  # evaluating is a sign of life, and compiling may take any time
        clock.advance(60.0)
        loop.life = None if loop.life == 3 else (loop.life or 0) + 1
        settle(guard)
    assert requests.signal is None and set(beats) == {7}
    loop.life = 9
    settle(guard)
    clock.advance(101.0)
    wait_until(lambda: requests.signal == "hang")
    (told,) = [r.getMessage() for r in caplog.records if "the run hangs" in r.getMessage()]
    assert "thread MainThread" in told and "test_a_run_without_a_sign_of_life" in told


def test_between_two_sets_of_processes_nothing_holds_the_loop(guarding):
    guard, *_ = guarding
    loop = Looped()
    guard.watch(loop)
    settle(guard)
    still = weakref.ref(loop)
    guard.rest(7)
    del loop
    assert still() is None


# -- signals -----------------------------------------------------------------------------------------


def test_a_signal_that_comes_too_late_is_handed_on(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:

        class Late:
            def on_fit_end(self, event):
                os.kill(os.getpid(), signal.SIGTERM)

        Counting(counting_config(tmp_path), hooks=[Late()]).fit()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


FORKED = """
    import os, signal, sys, time
    from jaxgoodput.clock import SystemClock
    from jaxgoodput.goodput.search import BatchLimits
    from jaxgoodput.train.config import Config
    from jaxgoodput.train.control import Requests
    from jaxgoodput.train.process import guarded

    requests = Requests()
    with guarded(Config(workdir="x", batch=BatchLimits(base=1, max=1), epochs=1), requests, SystemClock()):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        time.sleep(0.5)
    print(os.WTERMSIG(status), requests.signal)
"""


STUCK = """
    import os, signal, sys, threading, time
    from jaxgoodput.clock import SystemClock
    from jaxgoodput.goodput.search import BatchLimits
    from jaxgoodput.train.config import Config, Saving
    from jaxgoodput.train.control import Preempted, Requests
    from jaxgoodput.train.process import guarded

    batch, saving = BatchLimits(base=1, max=1), Saving(grace_s=3.0)
    config, requests = Config(workdir="x", batch=batch, epochs=1, saving=saving), Requests()
    with guarded(config, requests, SystemClock()):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
        except Preempted:
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise
"""


IN_A_CALLBACK = """
    import os, signal, sys, time
    from jaxgoodput.clock import SystemClock
    from jaxgoodput.goodput.search import BatchLimits
    from jaxgoodput.train.config import Config, Saving
    from jaxgoodput.train.control import Requests
    from jaxgoodput.train.process import guarded

    class Freed:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.0)

    batch, saving = BatchLimits(base=1, max=1), Saving(grace_s=3.0)
    config, requests = Config(workdir="x", batch=batch, epochs=1, saving=saving), Requests()
    with guarded(config, requests, SystemClock()):
        Freed()
        print(requests.signal, flush=True)
        time.sleep(60.0)
        print("not ended")
"""


def script(text):
    """A process of its own that runs this text, once it has ended."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.slow
def test_a_thread_that_is_stuck_does_not_hold_up_the_exit():
    done = script(STUCK)
    assert done.returncode == 143
    assert "some threads do not end" in done.stderr


COMPILING = """
    import atexit, threading, time
    from jaxgoodput.clock import SystemClock
    from jaxgoodput.goodput.search import BatchLimits
    from jaxgoodput.train.config import Config
    from jaxgoodput.train.control import NotSaved, Requests
    from jaxgoodput.train.process import guarded

    def late():
        time.sleep(0.2)
        print("too late", flush=True)

    atexit.register(print, "the user's own")
    config = Config(workdir="x", batch=BatchLimits(base=1, max=1), epochs=1)
    threading.Thread(target=late, name="jaxgoodput-compile", daemon=True).start()
    with guarded(config, Requests(), SystemClock()):
        raise NotSaved(3, 2, "why")
"""


@pytest.mark.slow
def test_the_interpreter_is_not_taken_down_while_something_compiles():
    done = script(COMPILING)
    assert (done.returncode, done.stdout) == (75, "the user's own\n"), done.stderr


@pytest.mark.slow
def test_a_stop_that_comes_during_a_callback_is_obeyed_and_prints_no_traceback():
    # Python does not raise exceptions of callbacks: of weak references, and of objects that are freed.
    ended = script(IN_A_CALLBACK)
    assert (ended.returncode, ended.stdout) == (143, "SIGTERM\n"), ended.stderr
    assert "Traceback" not in ended.stderr and "ignored" not in ended.stderr


@pytest.mark.slow
def test_a_signal_to_a_forked_child_is_not_the_runs():
    done = script(FORKED)
    assert done.stdout.split() == ["15", "None"], done.stderr


# -- real processes ----------------------------------------------------------------------------------


def campaign():
    spec = importlib.util.spec_from_file_location("stops", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stops"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


STOPS = campaign()


def held(line, folder):
    (folder / "run").mkdir()
    end = STOPS.play(line, folder)
    assert end.holds(dataclasses.replace(line)), (line.name, end)
    return end


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize(
    "moment, processes",
    [
        ("compilation", 1),
        pytest.param("hanging evaluation", 1, marks=pytest.mark.nightly),
        ("hanging peer", 2),
        ("hanging writer", 2),
    ],
)
def test_a_process_that_is_told_to_stop_ends_in_time_with_a_code_that_is_true(
    tmp_path, moment, processes
):
    line = STOPS.Line(moment, (signal.SIGTERM,), processes)
    end = held(line, tmp_path)
    if moment in ("compilation", "hanging evaluation"):
        assert end.code == 143


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("line", STOPS.LINES, ids=lambda line: f"{line.name} x{line.processes}")
def test_every_stop_of_the_campaign(tmp_path, line):
    if "disk" in line.moment:
        pytest.skip("needs a disk of its own: benchmarks/stops.py mounts one")
    held(line, tmp_path)
