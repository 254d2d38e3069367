"""What a run changes in the user's process, and puts back: signals, the compilation cache, logs, threads."""

import atexit
import contextlib
import ctypes
import logging as std_logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache

from jaxgoodput._jax import Compilation, listen_for_compilations, waits_for_xla
from jaxgoodput.clock import Clock
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.train.config import Config, Saving
from jaxgoodput.train.control import SAVED, UNSAVED, NotSaved, Preempted, Requests
from jaxgoodput.train.runs.membership import Membership

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_BLOCKS = (1 << 30, 1 << 25)  # to keep, bytes; older versions refuse more than 32 MiB


class Compilations:
    """Counts the compilations of the loop's own thread, and books their time."""

    def __init__(self, ledger: TimeLedger):
        self.num = 0
        self._ledger = ledger
        self._thread_id = threading.get_ident()

    @contextlib.contextmanager
    def counted(self) -> Iterator["Compilations"]:
        """Listen while the block lasts."""
        stop = listen_for_compilations(self._take)
        try:
            yield self
        finally:
            stop()

    def _take(self, compilation: Compilation) -> None:
        if compilation.thread_id == self._thread_id:
            self.num += 1
            self._ledger.add("compilation", compilation.seconds)


def keep_freed_pages(platform: str) -> bool:
    """Have the C library keep what steps on the CPU free, for the next step; True where it will.

    glibc gives large blocks back to the kernel, so every step of XLA:CPU gets fresh pages, each zeroed at its
    first touch. For the whole process and for good: glibc has no way back to its own moving threshold. Left
    alone where `platform` is another, and where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if platform != "cpu" or mallopt is None:  # musl has none
        return False
    # The threshold first: without it, the others would only freeze it where it is.
    if not any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in LARGEST_BLOCKS):
        logging.info("the C library does not keep freed memory; steps will take fresh pages")
        return False
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(M_TOP_PAD, 1 << 26)
    return True


@dataclass(frozen=True)
class LauncherLink:
    """What a launcher has told this process, and what it wants to hear from it."""

    grace_s: float | None = None  # between a stop signal and SIGKILL
    # The last step done; None: it trains no more.
    beat: Callable[[int | None], None] = lambda step: None
    membership: Membership | None = None  # where processes of the job come and go


# Whoever has started this process says so here (`launcher.worker`, which reads the environment).
LAUNCHED: ContextVar[LauncherLink] = ContextVar("launched")

# SIGHUP comes where the terminal or the connection of a run goes away.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PROMPT_S = 5.0  # for a process that has nothing to save
POLL_S = 1.0
USUAL = 10.0  # times the usual time of a step: see `Saving.hang_after_s`
HELP_SHARE, LEAVE_SHARE = 0.25, 0.9  # of the grace period


@runtime_checkable
class GuardedLoop(Protocol):
    """What the guard asks of a loop, from a thread of its own."""

    @property
    def done(self) -> int:
        """The last step that is done."""
        ...

    def pulse(self) -> tuple[int, int] | None:
        """The last step done and another sign of life; None where no step can be expected now."""
        ...

    def save_aside(self) -> None:
        """Save the last step, while the loop's own thread does something else."""
        ...

    def farewell(self) -> tuple[int, str]:
        """The exit code by what is safe now, and a sentence on it."""
        ...


class StopGuard:
    """A thread that has a run leave in time once it was told to stop, and finds out when it hangs.

    Python runs handlers of signals on the main thread alone, and not before what that one does in C is over,
    such as a compilation. But their numbers go into a pipe at once, which this thread reads. A quarter of
    the grace period later it has the state saved where the loop has not come to it, and at nine tenths it
    ends the process, with the code that is true then. A process that was still getting ready, or that got a
    second SIGINT, has `PROMPT_S`. An interactive session is never ended.
    """

    def __init__(
        self,
        requests: Requests,
        saving: Saving,
        clock: Clock,
        *,
        launched: LauncherLink = LauncherLink(),
        leave: Callable[[int], None] = os._exit,
    ):
        self._requests = requests
        self._grace_s = saving.grace_s if launched.grace_s is None else launched.grace_s
        self._hang_after_s = saving.hang_after_s
        self._clock = clock
        self._beat = launched.beat
        self._end = leave
        self._loop: GuardedLoop | None = None
        self._stop_s: float | None = None  # when a stop was asked for
        self._hurry_s: float | None = None  # when it was once more
        self._has_helped = False
        self._code: int | None = None  # of a run that is over
        self._first: tuple[int, float] | None = None  # the first step seen, and when
        self._pulse: tuple[int, int] | None = None
        self._alive_s = clock.now()
        self._looking = threading.Lock()  # at the loop
        self._read, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)  # of a signal handler
        self._thread = threading.Thread(target=self._run, name="jaxgoodput-guard", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether there is a loop, and with it something that should be saved."""
        return self._loop is not None

    def watch(self, loop: GuardedLoop) -> None:
        """Look after this loop from now on."""
        self._loop = loop
        self._beat(loop.done)  # who is cut off in its first second was alive

    def rest(self, step: int) -> None:
        """Between two sets of processes: `step` is in memory, and obeyed is in the next.

        From here on nothing is held of the loop: its devices, and their connections, end with it.
        """
        with self._looking:
            self._loop = _Resting(step)

    def linger(self, code: int) -> None:
        """Stay behind a run that was told to stop: a thread that is stuck must not hold up the exit."""
        was_heard = any(self._requests.signal == number.name for number in STOPS)
        if self._stop_s is None and not was_heard:  # its number may be in the pipe still
            return self.close()
        self._code, self._loop = code, None
        self._beat(None)

    def close(self) -> None:
        """End the thread."""
        os.write(self.pipe, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self.pipe)

    def _run(self) -> None:
        readable = select.poll()
        readable.register(self._read, select.POLLIN)
        while True:
            numbers = os.read(self._read, 64) if readable.poll(POLL_S * 1e3) else b""
            with self._looking:
                if self._look(numbers):
                    return

    def _look(self, numbers: bytes) -> bool:
        """Take what came through the pipe, and look at the loop; whether that was the last time."""
        loop = self._loop  # the main thread may let go of it
        pulse = None if loop is None else loop.pulse()
        if loop is not None:
            self._beat(loop.done)
        if 0 in numbers:
            self._beat(None)
            return True
        for number in numbers:
            self._hear(number)
        now_s = self._clock.now()
        if self._stop_s is not None and self._code is not None:
            if now_s - self._stop_s < LEAVE_SHARE * self._grace_s:
                return False
            if not threading.main_thread().is_alive():
                self._leave(self._code, f"some threads do not end:\n{stacks()}")
            return True  # the script goes on with something else
        if self._stop_s is None:
            self._feel(pulse, now_s)
        else:
            self._press(now_s - self._stop_s, now_s)
        return False

    def _hear(self, number: int) -> None:
        if number not in STOPS:
            return  # of a handler of the user's
        if self._stop_s is None:
            self._stop_s = self._clock.now()
            self._requests.interrupt(signal.Signals(number).name)
        elif number == signal.SIGINT:
            self._hurry_s = self._hurry_s or self._clock.now()

    def _feel(self, pulse: tuple[int, int] | None, now_s: float) -> None:
        """Look for a sign of life since the last time; without any for too long, stop the run."""
        if pulse is None or pulse != self._pulse:
            self._pulse, self._alive_s = pulse, now_s
            if pulse is not None and self._first is None:
                self._first = pulse[0], now_s
            return
        assert self._first is not None
        step, since_s = self._first
        usual_s = (self._alive_s - since_s) / (pulse[0] - step) if pulse[0] > step else 0.0
        silent_s = now_s - self._alive_s
        if silent_s < max(self._hang_after_s, USUAL * usual_s):
            return
        logging.error(
            "no step in %.0f s (%d was the last; usually one takes %.3g s): the run hangs and is stopped. "
            "What its threads do:\n%s",
            silent_s,
            pulse[0],
            usual_s,
            stacks(),
        )
        self._stop_s = now_s
        self._requests.interrupt("hang")

    def _press(self, waited_s: float, now_s: float) -> None:
        """Have a run that was told to stop do so in time."""
        leave_s = LEAVE_SHARE * self._grace_s
        in_a_hurry = self._hurry_s is not None and now_s - self._hurry_s >= PROMPT_S
        if self._loop is None:
            if waited_s >= min(PROMPT_S, leave_s) or in_a_hurry:
                self._leave(SAVED, "told to stop before the first step: there is nothing to save")
            return
        if waited_s >= HELP_SHARE * self._grace_s and not self._has_helped:
            self._has_helped = self._requests.is_overdue = True
            # On a thread of its own: the disk or a device may not answer.
            threading.Thread(
                target=self._loop.save_aside, name="jaxgoodput-save-aside", daemon=True
            ).start()
        if waited_s >= leave_s or in_a_hurry:
            code, why = self._loop.farewell()
            self._leave(code, f"{why}. It did not end by itself; what its threads do:\n{stacks()}")

    def cannot_interrupt(self) -> None:
        """The main thread waits for XLA, whose threads would compile on while the process is taken down.

        An exception there ends in a crash; so what has nothing to save leaves at once, and a loop is asked as
        soon as it goes on, or `PROMPT_S` after a second SIGINT. In an interactive session, which is never
        ended, both wait for the compilation.
        """
        if not self.is_ready:
            self._leave(SAVED, "told to stop while it compiles: there is nothing to save")

    def _leave(self, code: int, why: str) -> None:
        if hasattr(sys, "ps1"):  # an interactive session goes on
            return
        logging.error("the process ends with code %d: %s", code, why)
        logging.flush()
        sys.stdout.flush()
        self._end(code)


@dataclass(frozen=True)
class _Resting:
    """A run whose processes are coming together."""

    done: int

    def pulse(self) -> None:
        return None

    def save_aside(self) -> None:
        return None

    def farewell(self) -> tuple[int, str]:
        return UNSAVED, f"step {self.done} is in memory while processes come and go, and not saved"


def stacks() -> str:
    """What every thread of this process is doing, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


@contextlib.contextmanager
def guarded(config: Config, requests: Requests, clock: Clock) -> Iterator[StopGuard]:
    """A guard over the block; SIGTERM, SIGINT and SIGHUP ask to save and stop, a second SIGINT interrupts.

    Before the guard has a loop to watch, there is nothing to save, and they raise `Preempted` at once. One
    that comes too late to be obeyed is handed on to whoever handled it before.
    """
    guard = StopGuard(requests, config.saving, clock, launched=LAUNCHED.get(LauncherLink()))
    # Python allows handlers on the main thread only; whoever owns it may call request_stop.
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _heeded(guard, requests) if is_main else contextlib.nullcontext():
            yield guard
    except (Preempted, NotSaved) as ended:
        code = SAVED if isinstance(ended, Preempted) else UNSAVED
        atexit.register(_exit_beside_threads, code)
        guard.linger(code)
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            atexit.register(_exit_beside_threads, 128 + signal.SIGINT)
        guard.close()
        raise
    guard.close()


def _exit_beside_threads(code: int) -> None:
    """End the process here, as its last act, where a thread of a stopped run still compiles or reads.

    One that comes back from C++ while the interpreter is being taken down has the process aborted.
    """
    ours = (t.name for t in threading.enumerate() if t.name.startswith("jaxgoodput-"))
    if set(ours) - {"jaxgoodput-guard", "jaxgoodput-lifeline"}:
        atexit.unregister(_exit_beside_threads)
        atexit._run_exitfuncs()  # everybody else's
        logging.flush()
        sys.stdout.flush()
        os._exit(code)


@contextlib.contextmanager
def _heeded(guard: StopGuard, requests: Requests) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    heard: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        is_again = bool(heard)
        heard.append(number)
        name = signal.Signals(number).name
        requests.interrupt(name)
        if waits_for_xla(frame):
            return guard.cannot_interrupt()
        if number == signal.SIGINT and is_again:
            raise KeyboardInterrupt
        if not guard.is_ready:
            raise Preempted(None, name)

    def give_back() -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)

    wakeup = signal.set_wakeup_fd(guard.pipe, warn_on_full_buffer=False)
    # A forked child, such as a reader of data, shares the pipe: its signals are none of this run's.
    in_child = [give_back]
    os.register_at_fork(after_in_child=lambda: [undo() for undo in in_child])
    try:
        for number in before:
            signal.signal(number, ask)
        yield
    finally:
        in_child.clear()  # what is registered stays for good
        give_back()
    if heard:
        signal.raise_signal(heard[0])


@contextlib.contextmanager
def quiet_writer() -> Iterator[None]:
    """Leave out what Orbax and JAX's cache log below a warning: many lines, none for a user."""

    def worth_reading(record: Any) -> bool:
        chatty = "orbax" in record.pathname or "compilation_cache" in record.pathname
        return record.levelno >= std_logging.WARNING or not chatty

    handler = logging.get_absl_handler()
    handler.addFilter(worth_reading)
    try:
        yield
    finally:
        handler.removeFilter(worth_reading)


@contextlib.contextmanager
def prompt_threads(interval_s: float = 0.0005) -> Iterator[None]:
    """Let the loop's thread have the interpreter soon while another one traces, plans or compiles.

    A waiting thread gets it after CPython's switch interval, 5 ms unless told, which is longer than
    many a step.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def cache_folder(config: Config) -> str | None:
    """Where compiled programs are to be kept; None: nowhere."""
    wanted = config.execution.compilation_cache
    return (
        os.path.join(os.path.abspath(config.workdir), "compilation_cache")
        if wanted == ""
        else wanted
    )


@contextlib.contextmanager
def persistent_cache(config: Config) -> Iterator[None]:
    """JAX's compilation cache under the workdir while a run lasts, unless one is set already."""
    directory = cache_folder(config)
    if directory is None or jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    settings = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def changed_process(config: Config, requests: Requests, clock: Clock) -> Iterator[StopGuard]:
    """All of the changes of this file, while a run lasts."""
    with quiet_writer(), persistent_cache(config), prompt_threads():
        with guarded(config, requests, clock) as guard:
            yield guard
