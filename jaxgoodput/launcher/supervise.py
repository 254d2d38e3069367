"""Watches a set of child processes to their common end: signals passed on, grace, nobody left."""

import collections
import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TextIO

from jaxgoodput.clock import Clock
from jaxgoodput.launcher.worker import pipe_name

# Exit codes of every command and worker; NOT_SAVED: the last step could not be (EX_TEMPFAIL).
DONE, FAILED, USAGE, NOT_SAVED, SAVED = 0, 1, 2, 75, 143

_OUTPUT_DRAIN_S = 5.0
_LAST_LINES = 15  # of a process that failed, once more at the end
LONGEST_LINE = 2**18  # bytes; longer ones come in parts, and none is held as a whole
_STILL_S = 600.0  # a worker that beat, and then does not for so long, has stopped running Python


class UsageError(ValueError):
    """What was asked for cannot be started: exit code 2."""


@dataclass(frozen=True)
class ProcessesEnd:
    """How a set of processes ended."""

    code: int  # of the whole set, see `exit_code`
    told: bool  # a signal had asked it to stop
    began: int | None = None  # the step that a worker had done when it was heard of first
    step: int | None = None  # the last one that any of them had done


@dataclass(frozen=True)
class ChildExit:
    """A child has ended with this code; -n: by signal n."""

    rank: int | str
    code: int


@dataclass(frozen=True)
class StopSignal:
    """This process was told to stop."""

    signum: int


def exit_code(codes: Sequence[int]) -> int:
    """The exit code of a set from its processes', in the order of their ends; -n means signal n.

    0 if all are done; 143 if all are done or saved; otherwise the first bad one.

    >>> exit_code([0, 143, 0]), exit_code([143, -9, 1])
    (143, 137)
    """
    shell = [128 - code if code < 0 else code for code in codes]
    bad = [code for code in shell if code not in (DONE, SAVED)]
    return bad[0] if bad else max(shell, default=DONE)


def supervise(
    commands: Sequence[Sequence[str]],
    environs: Sequence[Mapping[str, str]],
    *,
    prefix_output: bool,
    grace_s: float,
    crash_grace_s: float,
    clock: Clock,
    still_s: float = _STILL_S,
) -> ProcessesEnd:
    """Run all commands at once, command i with `environs[i]`, and wait for all of them.

    With `prefix_output` each line of process i appears here behind `[i] `; without it the processes
    write where this one writes. SIGTERM, SIGINT and SIGHUP are passed on to all once (a second SIGINT
    kills), and those that have not gone `grace_s` later are killed. When one fails, the others have
    `crash_grace_s` to see it, as long again after SIGTERM, and are then killed; when one has saved
    and gone (143), the others have `grace_s` each. A process that trains tells on JAXGOODPUT_BEATS
    that it runs, and is killed where it does not for `still_s`. At the end it is said who failed first,
    and how. Should this process be killed, a process that watches JAXGOODPUT_LIFELINE
    (`worker.initialize`) dies too.

    Call it in the main thread: elsewhere signals cannot be received, and are not.

    Raises:
        OSError: a command cannot be started; none is left running.
    """
    events: queue.SimpleQueue[ChildExit | StopSignal] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(events))
        lifeline, held = os.pipe()
        stack.callback(os.close, held)
        processes: list[Child] = []
        stack.callback(lambda: [process.finish() for process in processes])
        with contextlib.closing(os.fdopen(lifeline)):
            for rank, (command, environ) in enumerate(zip(commands, environs, strict=True)):
                child = {**environ, "JAXGOODPUT_LIFELINE": pipe_name(lifeline)}
                processes.append(
                    Child(rank, command, child, lifeline, prefix_output, events, clock)
                )
        return _wait(processes, events, grace_s, crash_grace_s, clock, still_s)


def told_within(seconds: float) -> bool:
    """Wait so long, or until a signal says to stop: True then."""
    events: queue.SimpleQueue[ChildExit | StopSignal] = queue.SimpleQueue()
    with signals_to(events):
        try:
            events.get(timeout=seconds)
        except queue.Empty:
            return False
        return True


def _wait(
    processes: Sequence["Child"],
    events: "queue.SimpleQueue[ChildExit | StopSignal]",
    grace_s: float,
    crash_grace_s: float,
    clock: Clock,
    still_s: float,
) -> ProcessesEnd:
    began_s = clock.now()
    failed: list[tuple[ChildExit, float]] = []  # in the order of their ends, and when
    codes: list[int] = []
    running: dict[int | str, Child] = dict(enumerate(processes))
    told = False
    plan: list[tuple[float, signal.Signals]] = []  # what happens to those left, and when

    def send(signum: int) -> None:
        for process in running.values():
            process.send(signum)

    while running:
        try:
            due_s = [at_s for at_s, _ in plan[:1]]
            due_s += [p.beat_s + still_s for p in running.values() if p.beat_s is not None]
            event = events.get(timeout=max(min(due_s) - clock.now(), 0.0) if due_s else 1.0)
        except queue.Empty:
            now_s = clock.now()
            for rank, process in running.items():
                if process.beat_s is not None and now_s - process.beat_s >= still_s:
                    say(f"SIGKILL to process {rank}, which has stood still for {still_s:g} s")
                    process.beat_s = None
                    process.send(signal.SIGKILL)
            if not plan or now_s < plan[0][0]:
                continue
            (_, signum), *plan = plan
            say(f"{signum.name} to process {_ranks(running)}, which has not ended by itself")
            send(signum)
            continue
        now_s = clock.now()
        if isinstance(event, StopSignal):
            if not told:
                told = True
                send(event.signum)
                plan = [(now_s + grace_s, signal.SIGKILL)]
            elif event.signum == signal.SIGINT:
                send(signal.SIGKILL)
            continue
        del running[event.rank]
        codes.append(event.code)
        code = exit_code([event.code])
        if code not in (DONE, SAVED):
            failed.append((event, now_s - began_s))
        if code == DONE:
            continue
        if code != SAVED and exit_code(codes[:-1]) in (DONE, SAVED):
            say(f"process {event.rank} ended with {code}; still running: {_ranks(running)}")
            plan = _earlier(plan, now_s, crash_grace_s)
        elif code == SAVED and not plan:
            plan = _earlier(plan, now_s, grace_s)
    _sum_up(failed, processes)
    steps = [p.step for p in processes if p.step is not None]
    began = [p.began for p in processes if p.began is not None]
    return ProcessesEnd(exit_code(codes), told, max(began, default=None), max(steps, default=None))


def _sum_up(failed: Sequence[tuple[ChildExit, float]], processes: Sequence["Child"]) -> None:
    """Who failed first and how, and the last lines of all that failed."""
    for place, (end, after_s) in enumerate(failed):
        process = processes[int(end.rank)]
        step = "" if process.step is None else f", step {process.step} done"
        order = "failed first" if place == 0 else "failed then"
        say(f"process {end.rank} {order}: {how_it_ended(end.code)} after {after_s:.1f} s{step}")
        for line in process.last_lines:
            say(f"    [{end.rank}] {line}")


def how_it_ended(code: int) -> str:
    """An exit code in words; -n: by signal n.

    >>> how_it_ended(1), how_it_ended(-9)
    ('exit code 1', 'killed by SIGKILL')
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "its last step could not be saved (75)" if code == NOT_SAVED else f"exit code {code}"


def _earlier(
    plan: list[tuple[float, signal.Signals]], now_s: float, grace_s: float
) -> list[tuple[float, signal.Signals]]:
    """SIGTERM after one grace, SIGKILL after two; never later than planned already."""
    kill_s = min([now_s + 2 * grace_s, *(at for at, signum in plan if signum == signal.SIGKILL)])
    return [(min(now_s + grace_s, kill_s), signal.SIGTERM), (kill_s, signal.SIGKILL)]


def _ranks(running: Mapping[int | str, object]) -> str:
    return ", ".join(map(str, running)) or "none"


def say(message: str) -> None:
    """A line of the launcher's own, among those of its processes."""
    print(f"jaxgoodput: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_to(events: "queue.SimpleQueue[Any]") -> Iterator[None]:
    """Have SIGTERM, SIGINT and SIGHUP put on a queue as `StopSignal`, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # SimpleQueue.put is reentrant: the one thing a handler can do safely.
    kinds = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        kinds.remove(signal.SIGHUP)
    before = [signal.signal(kind, lambda s, _: events.put(StopSignal(s))) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _stopped_at(pid: int) -> int | None:
    """How often a process that is stopped was given the processor before; None where it is not stopped."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    switches = [fields.get(f"{kind}_ctxt_switches") for kind in ("voluntary", "nonvoluntary")]
    if fields["State"].split()[0] != "T" or None in switches:  # some sandboxes do not count
        return None
    return sum(int(number) for number in switches if number is not None)


class Child:
    """One child, leader of a process group of its own, with the threads that read and await it.

    `rank` is what its lines are marked with, and who `ChildExit` says has ended.
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
    ):
        pipe = subprocess.PIPE if prefix_output else None
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.began: int | None = None  # the first step that it told of
        self.step: int | None = None  # the last one
        self.beat_s: float | None = None
        beats, beaten = os.pipe()
        try:
            self._child = subprocess.Popen(
                list(command),
                env={**environ, "JAXGOODPUT_BEATS": pipe_name(beaten)},
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
        threading.Thread(target=self._hear, args=(os.fdopen(beats), clock), daemon=True).start()
        self._clock = clock
        self._stopped: tuple[int | None, float] = (
            None,
            0.0,
        )  # what was seen when it was looked for, since when
        self._lock = threading.Lock()
        self._reaped = False
        self._readers = []
        if prefix_output:
            assert self._child.stdout is not None and self._child.stderr is not None
            self._start(self._copy_lines, rank, self._child.stdout, sys.stdout.buffer)
            self._start(self._copy_lines, rank, self._child.stderr, sys.stderr.buffer)
        threading.Thread(target=self._await, args=(rank, events), daemon=True).start()

    def stopped_s(self) -> float:
        """Seconds for which it has stood still by SIGSTOP, as far as calls of this saw it; 0: it does not.

        One that is let on now and then is not stopped. Only Linux tells.
        """
        seen = _stopped_at(self._child.pid)
        if seen is None or seen != self._stopped[0]:
            self._stopped = seen, self._clock.now()
        return 0.0 if seen is None else self._clock.now() - self._stopped[1]

    def _start(self, target, *args) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._readers.append(thread)

    def _hear(self, beats: TextIO, clock: Clock) -> None:
        with beats:
            for line in beats:
                if line == "\n":  # it trains no more
                    self.beat_s = None
                    continue
                self.step, self.beat_s = int(line), clock.now()
                if self.began is None:
                    self.began = self.step

    def _copy_lines(self, rank: int | str, source: BinaryIO, sink: BinaryIO) -> None:
        prefix = f"[{rank}] ".encode()
        with source:
            while line := source.readline(LONGEST_LINE):
                self.last_lines.append(line.decode(errors="replace").rstrip())
                try:
                    sink.write(prefix + line.removesuffix(b"\n") + b"\n")
                    sink.flush()
                except (OSError, ValueError):
                    # Nobody reads this process's output any more. Read on all the same: a worker
                    # whose pipe is full stands still.
                    continue

    def _await(self, rank: int | str, events: "queue.SimpleQueue[Any]") -> None:
        # Before the process is reaped nobody else can have its number: its group, children that it
        # left behind included, can be killed without harm to strangers.
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._signal_group(signal.SIGKILL)
            code = self._child.wait()
            self._reaped = True
        for reader in self._readers:
            reader.join(_OUTPUT_DRAIN_S)
        events.put(ChildExit(rank, code))

    def send(self, signum: int) -> None:
        """Send a signal to the process; SIGKILL to its children too."""
        with self._lock:
            if self._reaped:
                return
            if signum == signal.SIGKILL:
                self._signal_group(signum)
            else:
                os.kill(self._child.pid, signum)  # Popen.send_signal would reap

    def _signal_group(self, signum: int) -> None:
        # A process may have moved to another group, and left this one empty.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signum)

    def finish(self) -> None:
        """Leave nothing behind, whatever went wrong."""
        self.send(signal.SIGKILL)
