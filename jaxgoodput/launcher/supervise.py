"""Runs a set of child processes to their common end: passes signals on and leaves none behind."""

import atexit
import collections
import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, BinaryIO, TextIO

from jaxgoodput._exits import DONE, FAILED, SAVED, UNSAVED, exit_code
from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock
from jaxgoodput.launcher.roll_call import RollCall
from jaxgoodput.launcher.worker import pipe_name

_OUTPUT_DRAIN_S = 5.0
_LAST_LINES = 15  # of a failed process, repeated at the end
LONGEST_LINE = 2**18  # bytes; longer lines are passed on in parts, so that memory stays bounded
_STILL_S = 600.0  # a worker that has sent heartbeats, and then sends none for this long, hangs


class UsageError(ValueError):
    """The command line asks for something that cannot be started; exit code 2."""


@dataclass(frozen=True)
class ProcessesEnd:
    """How a set of processes ended: its exit code, and which steps were reported."""

    code: int  # of the whole set, see `exit_code`
    told: bool  # whether a signal had asked the set to stop
    began: int | None = None  # first step that a worker reported
    step: int | None = None  # last step that any worker reported


@dataclass(frozen=True)
class ChildExit:
    """A child process has ended with an exit code; -n means killed by signal n."""

    rank: int | str
    code: int
    why: str = ""
    """Reason for a code that is not the process's own; see `RollCall.true_code`."""


@dataclass(frozen=True)
class StopSignal:
    """This process has received a signal (such as SIGTERM) that tells it to stop."""

    signum: int


def supervise(
    commands: Sequence[Sequence[str]],
    environs: Sequence[Mapping[str, str]],
    *,
    prefix_output: bool,
    grace_s: float,
    crash_grace_s: float,
    clock: Clock,
    still_s: float = _STILL_S,
    roll_call: RollCall | None = None,
    events: "queue.SimpleQueue[ChildExit | StopSignal] | None" = None,
) -> ProcessesEnd:
    """Run all commands at once, command i with `environs[i]`, and wait until all have ended.

    * Output: with `prefix_output`, each line of process i appears here as `[i] line`. Otherwise the
      processes write directly to this process's output.
    * Signals: SIGTERM, SIGINT and SIGHUP are passed on to all processes once. Processes that still run
      `grace_s` later are killed; a second SIGINT kills at once.
    * Failures: when a process fails, the others get `crash_grace_s` to notice it, then SIGTERM, then as long
      again, then SIGKILL. When a process has saved and exited (143), the others get `grace_s` each.
    * Hangs: a training process sends heartbeats through the pipe JAXGOODPUT_BEATS, and is killed if it sends
      none for `still_s`.
    * Wrappers: with `roll_call`, signals go to the worker that a process has started, if that has joined the
      job. If all have to join, a process that does not do so in time is killed, and one that ends with 0
      without has failed.
    * If this process itself is killed, processes that watch the pipe JAXGOODPUT_LIFELINE
      (`worker.initialize`) die too.

    Call it in the main thread: signals cannot be received in any other. If the caller has directed them to a
    queue already (`signals_to`), to hear the ones before and after as well, it passes this queue as `events`.

    Raises:
        OSError: a command cannot be started; none is left running.
    """
    with contextlib.ExitStack() as stack:
        if events is None:
            events = queue.SimpleQueue()
            stack.enter_context(signals_to(events))
        lifeline, held = os.pipe()
        stack.callback(os.close, held)
        processes: list[Child] = []
        stack.callback(lambda: [process.finish() for process in processes])
        with contextlib.closing(os.fdopen(lifeline)):
            for rank, (command, environ) in enumerate(zip(commands, environs, strict=True)):
                child = {**environ, "JAXGOODPUT_LIFELINE": pipe_name(lifeline)}
                processes.append(
                    Child(rank, command, child, lifeline, prefix_output, events, clock, roll_call)
                )
        return ProcessSet(processes, grace_s, crash_grace_s, clock, still_s).wait(events)


def open_roll_call(*, must_join: bool, connect_s: float) -> RollCall:
    """Return a roll call for the processes of this host, which prints what goes wrong with it."""
    return RollCall(
        must_join=must_join,
        connect_s=connect_s,
        on_error=lambda error: say(f"a process that connected was refused: {error}"),
    )


def told_within(seconds: float, events: "queue.SimpleQueue[Any]") -> bool:
    """Wait until a signal to stop comes to `events`, for `seconds` at most; return whether one has come."""
    try:
        return isinstance(events.get(timeout=seconds), StopSignal)
    except queue.Empty:
        return False


@dataclass(eq=False)
class ProcessSet:
    """Supervises child processes until the last one has ended. Its fields are arguments of `supervise`."""

    processes: Sequence["Child"]
    grace_s: float
    crash_grace_s: float
    clock: Clock
    still_s: float

    def __post_init__(self):
        self._began_s = self.clock.now()
        self._running: dict[int | str, Child] = dict(enumerate(self.processes))
        self._codes: list[int] = []  # in the order of their ends
        self._failed: list[
            tuple[ChildExit, float]
        ] = []  # likewise, with the seconds since the start
        self._told = self._interrupted = False  # by any signal, and by SIGINT
        self._plan: list[
            tuple[float, signal.Signals]
        ] = []  # next signals to all that are left, and when

    def wait(self, events: "queue.SimpleQueue[ChildExit | StopSignal]") -> ProcessesEnd:
        """Handle ends of processes and signals to stop until all processes have ended; return how."""
        while self._running:
            try:
                event = events.get(timeout=self._seconds_to_wait())
            except queue.Empty:
                self._kill_hanging()
                self._follow_plan()
                continue
            if isinstance(event, StopSignal):
                self._stop(event.signum)
            else:
                self._ended(event)
        self._sum_up()
        steps = [p.step for p in self.processes if p.step is not None]
        began = [p.began for p in self.processes if p.began is not None]
        return ProcessesEnd(
            exit_code(self._codes),
            self._told,
            max(began, default=None),
            max(steps, default=None),
        )

    def _seconds_to_wait(self) -> float:
        due_s = [at_s for at_s, _ in self._plan[:1]]
        beats_s = [p.beat_s for p in self._running.values() if p.beat_s is not None]
        due_s += [beat_s + self.still_s for beat_s in beats_s]
        due_s += [due for p in self._running.values() if (due := p.join_by_s) is not None]
        return max(min(due_s) - self.clock.now(), 0.0) if due_s else 1.0

    def _kill_hanging(self) -> None:
        now_s = self.clock.now()
        for rank, process in self._running.items():
            if process.beat_s is not None and now_s - process.beat_s >= self.still_s:
                say(
                    f"SIGKILL to process {rank}, which has sent no heartbeat for {self.still_s:g} s"
                )
                process.beat_s = None
                process.send(signal.SIGKILL)
            process.kill_if_overdue()

    def _follow_plan(self) -> None:
        if self._plan and self.clock.now() >= self._plan[0][0]:
            (_, signum), *self._plan = self._plan
            say(f"{signum.name} to process {self._ranks()}, which has not ended by itself")
            self._send(signum)

    def _stop(self, signum: int) -> None:
        if not self._told:
            self._told = True
            self._send(signum)
            self._plan = [(self.clock.now() + self.grace_s, signal.SIGKILL)]
        elif signum == signal.SIGINT and self._interrupted:
            self._send(signal.SIGKILL)
        self._interrupted |= signum == signal.SIGINT

    def _ended(self, event: ChildExit) -> None:
        is_first_failure = exit_code(self._codes) in (DONE, SAVED)
        del self._running[event.rank]
        self._codes.append(event.code)
        code = exit_code([event.code])
        if code == SAVED and not self._plan:
            self._end_soon(self.grace_s)
        elif code not in (DONE, SAVED):
            self._failed.append((event, self.clock.now() - self._began_s))
            if is_first_failure:
                why = f": {event.why}" if event.why else ""
                say(f"process {event.rank} ended with {code}{why}; still running: {self._ranks()}")
                self._end_soon(self.crash_grace_s)

    def _end_soon(self, grace_s: float) -> None:
        """Plan SIGTERM after one grace period and SIGKILL after two; what was planned earlier stays."""
        now_s = self.clock.now()
        kills_s = [at_s for at_s, signum in self._plan if signum == signal.SIGKILL]
        kill_s = min([now_s + 2 * grace_s, *kills_s])
        self._plan = [(min(now_s + grace_s, kill_s), signal.SIGTERM), (kill_s, signal.SIGKILL)]

    def _sum_up(self) -> None:
        """Print which process failed first and how, and repeat the last lines of all that failed."""
        for place, (end, after_s) in enumerate(self._failed):
            process = self.processes[int(end.rank)]
            step = "" if process.step is None else f", step {process.step} done"
            order = "failed first" if place == 0 else "failed then"
            say(f"process {end.rank} {order}: {how_it_ended(end.code)} after {after_s:.1f} s{step}")
            if end.why:
                say(f"    {end.why}")
            for line in process.last_lines:
                say(f"    [{end.rank}] {line}")

    def _send(self, signum: int) -> None:
        for process in self._running.values():
            process.send(signum)

    def _ranks(self) -> str:
        return ", ".join(map(str, self._running)) or "none"


def how_it_ended(code: int) -> str:
    """Describe an exit code; -n means signal n.

    >>> how_it_ended(1), how_it_ended(-9)
    ('exit code 1', 'killed by SIGKILL')
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "its last step could not be saved (75)" if code == UNSAVED else f"exit code {code}"


def say(message: str) -> None:
    """Print a line of the launcher itself, marked so that it stands out from its processes' lines."""
    print(f"jaxgoodput: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_to(events: "queue.SimpleQueue[Any]") -> Iterator[None]:
    """Put SIGTERM, SIGINT and SIGHUP on a queue as `StopSignal`s inside the block.

    The former handlers come back at its end. SIGHUP is left alone if it is ignored (nohup). Outside the main
    thread nothing happens. While Python shuts down, the signals are ignored if their handlers are Python's
    own: the exit code is known then, and death by a late SIGTERM would look like 143.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal handler may run in the middle of any code. SimpleQueue.put is reentrant, so it is safe there.
    kinds = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        kinds.remove(signal.SIGHUP)
    before = [signal.signal(kind, lambda s, _: events.put(StopSignal(s))) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
        atexit.unregister(_ignore_signals)
        atexit.register(_ignore_signals)  # last, so that it comes before the other functions


def _ignore_signals() -> None:
    ignore_if_default((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


def ignore_if_default(kinds: Iterable[int]) -> None:
    """Ignore those of these signals that have no handler but Python's own."""
    for kind in kinds:
        if signal.getsignal(kind) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(kind, signal.SIG_IGN)


def _switches_while_stopped(pid: int) -> int | None:
    """Return how many context switches a stopped process has had; None if it is not stopped (SIGSTOP)."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    switches = [fields.get(f"{kind}_ctxt_switches") for kind in ("voluntary", "nonvoluntary")]
    if (
        fields["State"].split()[0] != "T" or None in switches
    ):  # some sandboxes do not count switches
        return None
    return sum(int(number) for number in switches if number is not None)


class Child:
    """A child process that leads its own process group, with threads that read its output and await its end.

    `rank` marks its lines, and names it in the `ChildExit` that `events` receives.
    """

    def __init__(
        self,
        rank: int | str,
        command: Sequence[str],
        environ: Mapping[str, str],
        lifeline: int,
        prefix_output: bool,
        events: "queue.SimpleQueue[Any]",
        clock: Clock,
        roll_call: RollCall | None = None,
    ):
        pipe = subprocess.PIPE if prefix_output else None
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.began: int | None = None  # first step that it reported
        self.step: int | None = None  # last step that it reported
        self.beat_s: float | None = None  # time of its last heartbeat; None if it does not train
        self.run_step: int | None = None  # last step that its present run reported; None: no run
        called = {} if roll_call is None else roll_call.environ(str(rank))
        beats, beaten = os.pipe()
        try:
            self._child = subprocess.Popen(
                list(command),
                env={**environ, "JAXGOODPUT_BEATS": pipe_name(beaten), **called},
                stdin=subprocess.DEVNULL if prefix_output else None,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                pass_fds=(lifeline, beaten),
            )
        except OSError:
            os.close(beats)
            raise
        finally:
            os.close(beaten)
        self._rank = rank
        self._command = list(command)
        self._clock = clock
        self._roll_call = roll_call
        self._began_s = clock.now()
        self._overdue = ""  # why it was killed, if it had not joined in time
        # Context switches when the process was last seen stopped, and since when it has not run since.
        self._stopped: tuple[int | None, float] = (None, 0.0)
        self._lock = threading.Lock()
        self._reaped = False
        self._workers = [self._start("beats", partial(self._hear, os.fdopen(beats)))]
        if prefix_output:
            assert self._child.stdout is not None and self._child.stderr is not None
            for source, sink in (
                (self._child.stdout, sys.stdout.buffer),
                (self._child.stderr, sys.stderr.buffer),
            ):
                self._workers.append(self._start("output", partial(self._copy_lines, source, sink)))
        self._waiter = self._start("child", partial(self._await, events))

    def stopped_s(self) -> float:
        """Return for how many seconds the process has been stopped by SIGSTOP; 0 if it is not stopped.

        The time counts from the first call that finds the process stopped. A process that is continued now
        and then does not count as stopped. Works on Linux only.
        """
        seen = _switches_while_stopped(self._child.pid)
        if seen is None or seen != self._stopped[0]:
            self._stopped = seen, self._clock.now()
        return 0.0 if seen is None else self._clock.now() - self._stopped[1]

    @property
    def join_by_s(self) -> float | None:
        """Time at which the process must have joined its job; None if it has, or need not."""
        roll_call = self._roll_call
        if roll_call is None or not roll_call.must_join or self._overdue:
            return None
        is_there = roll_call.has_joined(str(self._rank))
        return None if is_there else self._began_s + roll_call.connect_s

    def kill_if_overdue(self) -> None:
        """Kill the process if it has not joined its job in time. Its exit code is then 1."""
        join_by_s, roll_call = self.join_by_s, self._roll_call
        if join_by_s is not None and roll_call is not None and self._clock.now() >= join_by_s:
            self._overdue = roll_call.overdue(self._command)
            say(f"SIGKILL to {self._rank}: {self._overdue}")
            self.send(signal.SIGKILL)

    def send(self, signum: int) -> None:
        """Send a signal to the process, or to the worker that it has started; SIGKILL goes to all of them."""
        with self._lock:
            if self._reaped:
                return
            if signum == signal.SIGKILL:
                self._signal_group(signum)
            elif not self._signal_worker(signum):
                os.kill(self._child.pid, signum)  # Popen.send_signal would reap

    def finish(self) -> None:
        """Kill the process and its children if they still run."""
        self.send(signal.SIGKILL)

    def _start(self, name: str, run) -> Worker:
        return Worker(
            f"{name}-{self._rank}",
            run,
            on_error=lambda error: say(f"watching process {self._rank} failed: {error!r}"),
        )

    def _hear(self, beats: TextIO, worker: Worker) -> None:
        with beats:
            for line in beats:
                if line == "\n":  # it trains no more
                    self.beat_s = self.run_step = None
                    continue
                self.step = self.run_step = int(line)
                self.beat_s = self._clock.now()
                if self.began is None:
                    self.began = self.step

    def _copy_lines(self, source: IO[bytes], sink: BinaryIO, worker: Worker) -> None:
        prefix = f"[{self._rank}] ".encode()
        with source:
            while line := source.readline(LONGEST_LINE):
                self.last_lines.append(line.decode(errors="replace").rstrip())
                # If this process's own output is closed, read on all the same: a worker whose pipe is full
                # would hang.
                with contextlib.suppress(OSError, ValueError):
                    sink.write(prefix + line.removesuffix(b"\n") + b"\n")
                    sink.flush()

    def _await(self, events: "queue.SimpleQueue[Any]", worker: Worker) -> None:
        # Until the process is reaped, no other process can get its number. So its group, with any children
        # that it has left behind, can be killed without hitting a stranger.
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._signal_group(signal.SIGKILL)
            code = self._child.wait()
            self._reaped = True
        for reader in self._workers:
            reader.join(_OUTPUT_DRAIN_S)
        events.put(self._exit(code))

    def _exit(self, code: int) -> ChildExit:
        if self._overdue:
            return ChildExit(self._rank, FAILED, self._overdue)
        if self._roll_call is None:
            return ChildExit(self._rank, code)
        found = self._roll_call.true_code(
            str(self._rank), self._command, self._child.pid, code, self.run_step
        )
        self._roll_call.let_go(str(self._rank))
        return ChildExit(self._rank, *found)

    def _signal_worker(self, signum: int) -> bool:
        """Send a signal to the worker that the process has started; False if there is none to be reached."""
        pid = None if self._roll_call is None else self._roll_call.pid(str(self._rank))
        if pid is None:
            return False
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return False
        return True

    def _signal_group(self, signum: int) -> None:
        # A process may have moved to another group, and left this one empty.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signum)
