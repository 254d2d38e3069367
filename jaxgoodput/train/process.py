"""What a run changes in the user's process, and restores: signals, the compilation cache, logs, threads."""

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

import jaxgoodput
from jaxgoodput._exits import DONE, FAILED, INTERRUPTED, Exit, RunFacts, run_exit
from jaxgoodput._jax import Compilation, listen_for_compilations, waits_for_xla
from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.train.config import Config, Saving
from jaxgoodput.train.control import NotSaved, Preempted, Requests
from jaxgoodput.train.runs.membership import Membership
from jaxgoodput.workdir.copies import COMPILED
from jaxgoodput.workdir.places import workdir_of

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_BLOCKS = (
    1 << 30,
    1 << 25,
)  # bytes to keep; older versions of glibc refuse more than 32 MiB


class Compilations:
    """Counts the compilations on the thread that creates it, and books their time."""

    def __init__(self, ledger: TimeLedger):
        self.num = 0
        self._ledger = ledger
        self._thread_id = threading.get_ident()

    @contextlib.contextmanager
    def counted(self) -> Iterator["Compilations"]:
        """Count compilations inside the block."""
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
    """Have the C library keep the memory that a step on the CPU frees, for the next step; True if it will.

    By default glibc gives large blocks back to the kernel, so that every step of XLA:CPU gets fresh pages,
    each zeroed at its first touch. The change affects the whole process and cannot be undone. Nothing changes
    if `platform` is not "cpu" or the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if platform != "cpu" or mallopt is None:  # musl has none
        return False
    # The threshold comes first: without it, the other two would only freeze the present one.
    if not any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in LARGEST_BLOCKS):
        logging.info(
            "the C library cannot be told to keep freed memory, so steps on the CPU may be slower"
        )
        return False
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(M_TOP_PAD, 1 << 26)
    return True


@dataclass(frozen=True)
class LauncherLink:
    """What a launcher told this process at its start, and how the process reports back to it."""

    grace_s: float | None = None  # between a stop signal and SIGKILL
    # Called with the last step done; None if this process trains no more.
    beat: Callable[[int | None], None] = lambda step: None
    membership: Membership | None = None  # if processes of the job come and go
    # Called when a run begins, with None, and when it ends, with the exit code that it asks for.
    report: Callable[[int | None], None] = lambda code: None
    refusal: str = ""  # why this process may not train; empty if it may
    pid: int | None = None  # of the process that has joined; a forked child has another


@dataclass
class LinkOfProcess:
    """Holds the link of this process, for all of its threads."""

    link: LauncherLink = LauncherLink()


# Set by `launcher.worker`, which reads the environment.
OF_PROCESS = LinkOfProcess()
# Takes its place in one thread, for tests of several hosts in one process.
LAUNCHED: ContextVar[LauncherLink] = ContextVar("launched")


def launched() -> LauncherLink:
    """Return what a launcher told this process; a link to nothing if no launcher started it."""
    return LAUNCHED.get(OF_PROCESS.link)


def joined() -> LauncherLink:
    """Return what a launcher told this process, and join its job before if it has not joined yet.

    Raises RuntimeError if the process may not train: another process is the worker that its environment
    describes.
    """
    if LAUNCHED.get(None) is None:
        # The package itself, above all rooms, asks the launcher's room, which reads the environment.
        jaxgoodput._join_job()
    found = launched()
    if found.refusal:
        raise RuntimeError(found.refusal)
    return found


@contextlib.contextmanager
def reported(link: LauncherLink) -> Iterator[None]:
    """Tell the launcher that a run begins, and at the end of the block how it has ended."""
    link.report(None)
    try:
        yield
    except BaseException as error:
        link.report(_code_of(error))
        raise
    link.report(DONE)


def _code_of(error: BaseException) -> int:
    """Return the exit code of a program that this exception ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


# SIGHUP comes when the terminal or the connection of a run is closed.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PROMPT_S = 5.0  # to exit, for a process that has nothing to save
POLL_S = 1.0
HANG_STEPS = 10.0  # a run hangs after this many usual step times; see `Saving.hang_after_s`
HELP_SHARE, LEAVE_SHARE = 0.25, 0.9  # of the grace period


@runtime_checkable
class GuardedLoop(Protocol):
    """The methods of a training loop that `StopGuard` calls, from its own thread."""

    @property
    def done(self) -> int:
        """The last step that is done."""
        ...

    def pulse(self) -> tuple[int, int] | None:
        """Return the last step done and another sign of life; None if no step can be expected now."""
        ...

    def save_aside(self) -> None:
        """Save the last step from another thread than the loop's."""
        ...

    def farewell(self) -> Exit:
        """Return the exit code for what is safe now, and a sentence on it."""
        ...


class StopGuard:
    """A thread that makes a run end in time after it was told to stop, and detects a run that hangs.

    Python runs signal handlers on the main thread only, and not before a call into C returns, such as a
    compilation. But the numbers of signals go into a pipe at once, which this thread reads. If the loop has
    not saved the state after a quarter of the grace period, the guard does. After nine tenths it ends the
    process, with the exit code that is true then. A process that is still getting ready, or gets a second
    SIGINT, has `PROMPT_S` to end. An interactive session is never ended.
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
        self._beat, self._report = launched.beat, launched.report
        self._end = leave
        self._loop: GuardedLoop | None = None
        self._stop_s: float | None = None  # when a stop was requested
        self._interrupted = False  # by SIGINT
        self._hurry_s: float | None = None  # when it was interrupted again
        self._has_helped = False
        self._code: int | None = None  # the exit code, once the run is over
        self._first: tuple[int, float] | None = None  # the first step seen, and when
        self._pulse: tuple[int, int] | None = None
        self._alive_s = clock.now()
        self._looking = threading.Lock()  # held while the guard uses the loop
        self._read, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)  # a signal handler must not wait
        self._worker = Worker("guard", self._run, on_error=_log_guard_failure)

    @property
    def grace_s(self) -> float:
        """How long the process may take to end after a stop."""
        return self._grace_s

    @property
    def is_ready(self) -> bool:
        """Whether there is a loop, and so something to save."""
        return self._loop is not None

    def watch(self, loop: GuardedLoop) -> None:
        """Guard this loop from now on: it is stopped if it hangs, or ends too slowly after a stop."""
        self._loop = loop
        self._beat(
            loop.done
        )  # so that a process which is cut off in its first second counts as alive

    def rest(self, step: int) -> None:
        """Let go of the loop while the processes of the job change; `step` is the last one, kept in memory.

        A stop that comes meanwhile is obeyed in the next generation. The loop's devices and their connections
        end only when nothing refers to it any more.
        """
        with self._looking:
            self._loop = _Resting(step)

    def linger(self, code: int) -> None:
        """Stay after a run that was told to stop, so that a thread that is stuck cannot prevent the exit."""
        was_heard = any(self._requests.signal == number.name for number in STOPS)
        if (
            self._stop_s is None and not was_heard
        ):  # the number of a signal may still be in the pipe
            return self.close()
        self._code, self._loop = code, None
        self._beat(None)

    def close(self) -> None:
        """End the guard's thread."""
        os.write(self.pipe, b"\0")
        self._worker.join()
        os.close(self._read)
        os.close(self.pipe)

    def _run(self, worker: Worker) -> None:
        readable = select.poll()
        readable.register(self._read, select.POLLIN)
        while True:
            numbers = os.read(self._read, 64) if readable.poll(POLL_S * 1e3) else b""
            with self._looking:
                if self._look(numbers):
                    return

    def _look(self, numbers: bytes) -> bool:
        """Handle what came through the pipe, and look at the loop; True if the guard is done."""
        loop = self._loop  # the main thread may set it to None meanwhile
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
                self._leave(Exit(self._code, f"some threads do not end:\n{stacks()}"))
            return True  # the script goes on with something else
        if self._stop_s is None:
            self._feel(pulse, now_s)
        else:
            self._press(now_s - self._stop_s, now_s)
        return False

    def _hear(self, number: int) -> None:
        if number not in STOPS:
            return  # the user has a handler for this signal
        if self._stop_s is None:
            self._stop_s = self._clock.now()
            self._requests.interrupt(signal.Signals(number).name)
        elif number == signal.SIGINT and self._interrupted:
            self._hurry_s = self._hurry_s or self._clock.now()
        self._interrupted |= number == signal.SIGINT

    def _feel(self, pulse: tuple[int, int] | None, now_s: float) -> None:
        """Stop the run if it has given no sign of life for too long."""
        if pulse is None or pulse != self._pulse:
            self._pulse, self._alive_s = pulse, now_s
            if pulse is not None and self._first is None:
                self._first = pulse[0], now_s
            return
        assert self._first is not None
        step, since_s = self._first
        usual_s = (self._alive_s - since_s) / (pulse[0] - step) if pulse[0] > step else 0.0
        silent_s = now_s - self._alive_s
        if silent_s < max(self._hang_after_s, HANG_STEPS * usual_s):
            return
        logging.error(
            "the run hangs and is stopped: no step ended in %.0f s. Step %d was the last; a step usually "
            "takes %.3g s. What the threads of the process do:\n%s",
            silent_s,
            pulse[0],
            usual_s,
            stacks(),
        )
        self._stop_s = now_s
        self._requests.interrupt("hang")

    def _press(self, waited_s: float, now_s: float) -> None:
        """Make a run that was told to stop `waited_s` ago end in time: save for it, then end the process."""
        leave_s = LEAVE_SHARE * self._grace_s
        in_a_hurry = self._hurry_s is not None and now_s - self._hurry_s >= PROMPT_S
        if self._loop is None:
            if waited_s >= min(PROMPT_S, leave_s) or in_a_hurry:
                self._leave(self._empty_handed("before the first step"))
            return
        if waited_s >= HELP_SHARE * self._grace_s and not self._has_helped:
            self._has_helped = self._requests.is_overdue = True
            # The guard must not wait for a disk or a device that does not answer.
            save = self._loop.save_aside
            Worker("save-aside", lambda _: save(), on_error=_log_save_failure)
        if waited_s >= leave_s or in_a_hurry:
            end = self._loop.farewell()
            why = f"{end.why}. The run did not end by itself; what its threads do:\n{stacks()}"
            self._leave(Exit(end.code, why))

    def cannot_interrupt(self) -> None:
        """Handle a stop that comes while the main thread waits for XLA, without raising an exception there.

        XLA's threads would compile on while Python shuts down, and crash the process. So a process that has
        nothing to save exits at once. A loop obeys the stop as soon as the compilation is done, or is ended
        `PROMPT_S` after a second SIGINT. An interactive session, which is never ended, waits in both cases.
        """
        if not self.is_ready:
            self._leave(self._empty_handed("while compiling"))

    def _empty_handed(self, when: str) -> Exit:
        """Return how a run ends that was told to stop before it had a loop."""
        end = run_exit(RunFacts(stopped_by=self._requests.signal or "a signal"))
        return Exit(end.code, f"told to stop {when}: {end.why}")

    def _leave(self, end: Exit) -> None:
        if hasattr(sys, "ps1"):  # never end an interactive session
            return
        logging.error("the process ends with code %d: %s", end.code, end.why)
        logging.flush()
        sys.stdout.flush()
        self._report(end.code)
        self._end(end.code)


@dataclass(frozen=True)
class _Resting:
    """Stands for the loop while the processes of the job change: nothing can be saved then."""

    done: int

    def pulse(self) -> None:
        return None

    def save_aside(self) -> None:
        return None

    def farewell(self) -> Exit:
        facts = RunFacts(
            stopped_by="stop",
            last_step=self.done,
            saved_step=None,
            unsaved_why="it is in memory while processes come and go",
        )
        return run_exit(facts)


def _log_guard_failure(error: BaseException) -> None:
    logging.error(
        "the thread that watches for signals and hangs has failed. Training goes on, but hangs are not "
        "noticed any more, and a stop may take longer than its grace period. Stop the run and start it again "
        "to have it watched.",
        exc_info=error,
    )


def _log_save_failure(error: BaseException) -> None:
    logging.error(
        "the thread that saves for a loop that does not answer has failed. The process ends before its grace "
        "period is over, and the next run resumes from the last checkpoint.",
        exc_info=error,
    )


def stacks() -> str:
    """Return what every thread of this process is doing, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


@contextlib.contextmanager
def guarded(config: Config, requests: Requests, clock: Clock) -> Iterator[StopGuard]:
    """Guard the block: SIGTERM, SIGINT and SIGHUP ask to save and stop, and a second SIGINT interrupts.

    Before the guard has a loop to watch, there is nothing to save, and the signals raise `Preempted` at once.
    A signal that comes too late to be obeyed is passed to the handler that was there before. After a run that
    a signal has stopped, the same signals say nothing new; see `_stay_deaf`.
    """
    guard = StopGuard(requests, config.saving, clock, launched=launched())
    # Python allows signal handlers on the main thread only. Elsewhere, request_stop() takes their place.
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _heeded(guard, requests, clock) if is_main else contextlib.nullcontext():
            yield guard
    except (Preempted, NotSaved) as ended:
        assert isinstance(ended.code, int)
        atexit.register(_exit_beside_threads, ended.code)
        guard.linger(ended.code)
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            atexit.register(_exit_beside_threads, INTERRUPTED)
        guard.close()
        raise
    guard.close()


def _exit_beside_threads(code: int) -> None:
    """End the process, as its last act, if a thread of a stopped run still compiles or reads.

    A thread that returns from C++ while the interpreter shuts down would abort the process.
    """
    ours = (t.name for t in threading.enumerate() if t.name.startswith("jaxgoodput-"))
    if set(ours) - {"jaxgoodput-guard", "jaxgoodput-lifeline"}:
        atexit.unregister(_exit_beside_threads)
        atexit._run_exitfuncs()  # all other functions, because os._exit runs none
        logging.flush()
        sys.stdout.flush()
        os._exit(code)


@contextlib.contextmanager
def _heeded(guard: StopGuard, requests: Requests, clock: Clock) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    heard: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        # After another signal, a first SIGINT asks for nothing new: what is being saved is not cut off.
        is_again = number == signal.SIGINT and number in heard
        heard.append(number)
        name = signal.Signals(number).name
        requests.interrupt(name)
        if waits_for_xla(frame):
            return guard.cannot_interrupt()
        if is_again:
            raise KeyboardInterrupt
        if not guard.is_ready:
            raise Preempted(None, name)

    def give_back() -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)

    wakeup = signal.set_wakeup_fd(guard.pipe, warn_on_full_buffer=False)
    # A forked child, such as a reader of data, shares the pipe, and its signals must not stop this run.
    in_child = [give_back]

    def is_stop(unraisable: Any) -> bool:
        # The signal came while Python ran a callback, for example of a weak reference. `requests` and the
        # guard have heard of it, too.
        return isinstance(unraisable.exc_value, Preempted)

    os.register_at_fork(after_in_child=lambda: [undo() for undo in in_child])
    try:
        for number in before:
            signal.signal(number, ask)
        with _hiding(is_stop):
            yield
    except (Preempted, NotSaved):
        if heard:
            _stay_deaf(before, heard, clock, until_s=clock.now() + guard.grace_s)
        raise
    finally:
        in_child.clear()  # the registered function cannot be removed
        give_back()
    if heard:
        signal.raise_signal(heard[0])


def _stay_deaf(
    before: dict[signal.Signals, Any], heard: list[int], clock: Clock, *, until_s: float
) -> None:
    """Ignore repeated stop signals while the process ends, in place of Python's own handlers in `before`.

    Schedulers and launchers repeat themselves, and the process would end by the second signal instead of with
    the exit code that says what is saved. A second SIGINT interrupts all the same. After `until_s` a signal
    does what it did before the run, because the script may go on with something else. So do, at any time,
    handlers of the script's own.
    """

    def again(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if number == signal.SIGINT and heard.count(number) > 1:
            signal.default_int_handler(number, frame)
        if clock.now() >= until_s:
            signal.signal(number, defaults[signal.Signals(number)])
            signal.raise_signal(number)

    def ignore_at_exit() -> None:
        # Python sets its own handlers before the process ends, but leaves ignored signals alone.
        for number in defaults:
            if signal.getsignal(number) is again:
                signal.signal(number, signal.SIG_IGN)

    own = (signal.SIG_DFL, signal.default_int_handler)
    defaults = {number: handler for number, handler in before.items() if handler in own}
    before.update(dict.fromkeys(defaults, again))
    atexit.register(ignore_at_exit)


@contextlib.contextmanager
def quiet_writer() -> Iterator[None]:
    """Hide what Orbax and JAX's cache log below a warning: many lines that do not help a user.

    An exception in a thread of Orbax is logged there with its traceback. It is hidden, too, from whatever
    handler the user has, because it comes back from Orbax and `Saver` reports it in a sentence.
    """

    def worth_reading(record: Any) -> bool:
        chatty = "orbax" in record.pathname or "compilation_cache" in record.pathname
        return record.levelno >= std_logging.WARNING or not chatty

    def is_told_once(record: Any) -> bool:
        trace = record.exc_info[2] if record.exc_info else None
        return not any("orbax" in frame.filename for frame in traceback.extract_tb(trace))

    handler = logging.get_absl_handler()
    loggers = logging.get_absl_logger(), std_logging.getLogger("asyncio")

    def is_late(unraisable: Any) -> bool:
        # After a failed write, tensorstore raises one for each array that was under way: the event loop that
        # waited for them is closed. No object is named, unlike in a `__del__` of the user.
        return str(unraisable.exc_value) == "Event loop is closed" and unraisable.object is None

    handler.addFilter(worth_reading)
    for logger in loggers:
        logger.addFilter(is_told_once)
    try:
        with _hiding(is_late):
            yield
    finally:
        handler.removeFilter(worth_reading)
        for logger in loggers:
            logger.removeFilter(is_told_once)


@contextlib.contextmanager
def _hiding(is_known: Callable[[Any], bool]) -> Iterator[None]:
    """Print no exception that Python cannot raise, for want of a caller, if the run knows of it anyway."""

    def report(unraisable: Any) -> None:
        if not is_known(unraisable):
            before(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, report
    try:
        yield
    finally:
        if sys.unraisablehook is report:
            sys.unraisablehook = before


@contextlib.contextmanager
def prompt_threads(interval_s: float = 0.0005) -> Iterator[None]:
    """Give the loop's thread the interpreter soon while another thread traces, plans or compiles.

    A waiting thread gets it after CPython's switch interval, 5 ms by default. Many steps are shorter.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def cache_folder(config: Config) -> str | None:
    """Return the folder in which compiled programs are kept; None if they are not."""
    wanted = config.execution.compilation_cache
    return str(workdir_of(config.workdir).folder.absolute() / COMPILED) if wanted == "" else wanted


@contextlib.contextmanager
def persistent_cache(config: Config) -> Iterator[None]:
    """Keep JAX's compilation cache under the workdir inside the block, unless one is set already."""
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
    """Inside the block, guard against signals and hangs, keep compiled programs, and hide Orbax's log."""
    with quiet_writer(), persistent_cache(config), prompt_threads():
        with guarded(config, requests, clock) as guard:
            yield guard
