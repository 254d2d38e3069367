"""Exit codes: whether each end of a job says what is true, checked by a restart.

    python benchmarks/ends.py                 # all, about 25 minutes on 2 cores
    python benchmarks/ends.py --only wrapper  # the ends whose names match this

Every row is a job of real processes that ends in some way: by signals, alone and in pairs, at some moment; by
a hang, a full or read-only disk, an error or an exit of its script; because a process, a host or the
coordinator is killed. Then the script is started again in the same workdir, and says at which step it begins.

A row holds if the exit code is one that the row names, and

* 0 or 143: the restart begins at the last step that was done, or later;
* 75: a message says so, and the restart begins at the step that it calls safe;
* in every case: no message calls a step saved or safe at which the restart does not begin.

The exit code of this program is 1 if a row does not hold. A read-only disk needs root.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from jaxgoodput._worker import Worker

TERM, INT, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL
SCRIPT = str(pathlib.Path(__file__).resolve().with_name("ends_script.py"))
GRACE_S = 30.0
START_S, END_S = 400.0, 200.0  # until a moment has come, and until the job has ended
SECRET = {"JAXGOODPUT_SECRET": "the secret of these ends"}


@dataclass(frozen=True)
class Act:
    """A signal to one of the processes, once a moment has come in the script."""

    signum: signal.Signals
    to: str = "job"
    """"job", "agent NAME", or "worker NAME", a process that trains; "wrapper" is the parent of worker 0."""
    at: str = "moment"
    after_s: float = 0.3


@dataclass(frozen=True)
class EndRow:
    """One end: what is started, what is done to it, and the exit codes that are true for it."""

    name: str
    moment: str
    acts: tuple[Act, ...]
    codes: tuple[int, ...]
    launch: str = "alone"

    def __str__(self) -> str:
        return f"{self.launch}: {self.name}"


def signals(*signums: signal.Signals) -> tuple[Act, ...]:
    return tuple(Act(signum) for signum in signums)


def told(moment: str, *signums: signal.Signals, codes=(143,), launch="alone") -> EndRow:
    names = " ".join(number.name.removeprefix("SIG") for number in signums)
    name = f"{moment}, {names}" if names else moment
    return EndRow(name, moment, signals(*signums), tuple(codes), launch)


INTERRUPTED = (-INT, 130, 137)
HIDING = "{python} {script}; true"
TRAPPING = "trap 'exit 0' TERM; {python} {script} & wait; wait"
WRAPPERS = {
    "env": ["env", "X=1", "{python}", "{words}"],
    "nice": ["nice", "{python}", "{words}"],
    "shell": ["bash", "-c", HIDING],
    "trap": ["bash", "-c", TRAPPING],
}
COORDINATOR_DIES = (Act(KILL),)
ALONE = (
    *(told("start", *s) for s in ((TERM,), (INT,), (HUP,))),
    told("start", TERM, TERM, codes=(143, -TERM)),
    told("compilation", TERM),
    told("compilation", INT, INT, codes=(143, *INTERRUPTED)),
    *(told("stepping", *s) for s in ((TERM,), (INT,), (HUP,), (TERM, INT), (INT, TERM))),
    *(told("stepping", *s) for s in ((HUP, INT), (TERM, TERM), (TERM, HUP))),
    told("stepping", INT, INT, codes=(143, *INTERRUPTED)),
    told("stepping", TERM, KILL, codes=(143, -KILL)),
    told("stepping", KILL, codes=(-KILL,)),
    *(told("saving", *s) for s in ((TERM,), (TERM, INT))),
    *(told("evaluating", *s) for s in ((TERM,), (TERM, INT))),
    told("hanging evaluation", TERM),
    told("hanging data"),
    told("hanging data", TERM),
    told("hanging loss", codes=(75,)),
    told("hanging loss", TERM, codes=(75,)),
    told("hanging hook", TERM),
    told("complete", codes=(0,)),
    told("complete on a full disk", codes=(75,)),
    *(told("full disk", *s, codes=(75,)) for s in ((TERM,), (INT,), (TERM, INT))),
    told("full disk", INT, INT, codes=(75, *INTERRUPTED)),
    told("read-only disk", TERM, codes=(75,)),
    told("no folder", TERM, codes=(75,)),
    *(
        EndRow(
            f"{moment}, {name}",
            moment,
            (Act(TERM), *(Act(number, at="leaving") for number in later)),
            codes,
        )
        for moment, codes in (("leaving", (143,)), ("leaving a full disk", (75,)))
        for name, later in (("TERM and later INT", (INT,)), ("TERM and later TERM", (TERM,)))
    ),
    told("after fit", TERM, codes=(-TERM,)),
    told("after fit", INT, codes=INTERRUPTED),
    told("hook fails", codes=(1,)),
    told("data fail", codes=(1,)),
    told("exit 0 in a hook", codes=(0,)),
    told("exit 0 before fit", codes=(0,)),
    told("exit 7 after fit", codes=(7,)),
)
LAUNCHED = (
    *(told("stepping", *s, launch="run") for s in ((TERM,), (TERM, INT), (HUP, TERM))),
    told("start", TERM, launch="run"),
    told("stepping", INT, INT, launch="run", codes=(143, *INTERRUPTED)),
    told("beside the main thread", TERM, launch="run", codes=(75,)),
    told("os._exit(0)", launch="run", codes=(1,)),
    told("exit 0 in a hook", launch="run", codes=(0,)),
    told("full disk", TERM, launch="run", codes=(75,)),
    EndRow("worker, KILL", "stepping", (Act(KILL, "worker 0"),), (137,), "run"),
    *(
        EndRow(
            f"{moment}, the worker gets TERM twice",
            moment,
            (Act(TERM, "worker 0"), Act(TERM, "worker 0", at="leaving")),
            codes,
            "run",
        )
        for moment, codes in (("leaving", (143,)), ("leaving a full disk", (75,)))
    ),
    *(told("stepping", TERM, launch=f"wrapper {name}") for name in WRAPPERS),
    told("full disk", TERM, launch="wrapper shell", codes=(75,)),
    EndRow("wrapper, TERM", "stepping", (Act(TERM, "wrapper"),), (75, 143), "wrapper shell"),
    *(told("stepping", *s, launch="pair") for s in ((TERM,), (TERM, INT))),
    told("full disk", TERM, launch="pair", codes=(75,)),
    told("no process left", launch="pair", codes=(3, 1)),
    told("one exits 0", launch="pair", codes=(1,)),
    EndRow("worker 1, KILL", "stepping", (Act(KILL, "worker 1"),), (137, 1), "pair"),
)
HOSTS = (
    *(told("stepping", *s, launch="hosts") for s in ((TERM,), (TERM, INT), (TERM, TERM))),
    told("stepping", INT, INT, launch="hosts", codes=(143, 130)),
    told("full disk", TERM, launch="hosts", codes=(75,)),
    EndRow(
        "one agent is killed, then TERM",
        "stepping",
        (Act(KILL, "agent b"), Act(TERM, after_s=3.0)),
        (143,),
        "hosts",
    ),
    EndRow(
        "both workers are killed, then TERM",
        "stepping",
        (Act(KILL, "worker a"), Act(KILL, "worker b", after_s=0.0), Act(TERM, after_s=0.3)),
        (75, 137),
        "hosts",
    ),
    EndRow(
        "both agents, TERM",
        "stepping",
        (Act(TERM, "agent a"), Act(TERM, "agent b", after_s=0.0), Act(TERM, after_s=10.0)),
        (143,),
        "hosts",
    ),
    EndRow("the coordinator is killed", "stepping", COORDINATOR_DIES, (75,), "agent"),
    EndRow(
        "the coordinator is killed, then TERM",
        "stepping",
        (*COORDINATOR_DIES, Act(TERM, "agent a", after_s=1.5)),
        (75,),
        "agent",
    ),
    EndRow(
        "the agent gets INT twice",
        "hanging data",
        (Act(INT, "agent a"), Act(INT, "agent a")),
        (137, 143, 75),
        "agent",
    ),
)
WRONG = (
    EndRow("no script", "", (), (2,), "usage --nproc-per-node 1"),
    EndRow("no processes", "", (), (2,), "usage --nproc-per-node 0 -- python train.py"),
    EndRow("an unknown option", "", (), (2,), "usage --nprocs 2 -- python train.py"),
    EndRow("hosts in a wrong range", "", (), (2,), "usage --nnodes 3:2 -- python train.py"),
)
ROWS = (*ALONE, *LAUNCHED, *HOSTS, *WRONG)


@dataclass(frozen=True)
class Seen:
    """How a row ended, and where its restart began."""

    code: int
    seconds: float  # from the last signal on
    done: int  # the last step done
    began: int  # the first step of the restart
    output: str

    def fault(self, row: EndRow) -> str:
        """Return what is not true; empty if the row holds."""
        saved = [int(n) for n in re.findall(r"step (\d+) is saved", self.output)]
        safe = [int(n) for n in re.findall(r"step (\d+) is safe", self.output)]
        safe += [0] * self.output.count("no step is safe")
        if self.code not in row.codes:
            return f"code {self.code} instead of {row.codes}"
        if row.launch.startswith("usage"):
            return ""
        if any(step > self.began for step in (*saved, *safe)):
            return f"a message calls step {max(saved + safe)} saved"
        if self.code in (0, 143, -TERM) and self.began < self.done:
            return f"step {self.done} is lost"
        if self.code != 75:
            return ""
        if self.began >= self.done and "may not be saved" not in self.output:
            return f"step {self.done} is saved all the same"
        if safe:
            return "" if max(safe) == self.began else f"step {max(safe)} is called safe"
        is_said = "from the last checkpoint" in self.output or "may not be saved" in self.output
        return "" if is_said else "no message says what is safe"


class CopyServer:
    """A process that has imported everything and becomes the script in copies of itself, one at a time."""

    def __init__(self, environ: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT, "--copies"],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: pathlib.Path, moment: str) -> "Copy":
        """Start a copy, which runs the script with these arguments."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{folder}\t{moment}\n")
        self._process.stdin.flush()
        return Copy(int(self._process.stdout.readline()), self._process.stdout)

    def close(self) -> None:
        """End the process, between two copies."""
        self._process.communicate()


class Copy:
    """A copy, with the methods of a `Popen` that a scene calls."""

    def __init__(self, pid: int, statuses: IO[str]):
        self.pid, self._code = pid, None
        self._reader = Worker("status", lambda _: self._read(statuses))

    def _read(self, statuses: IO[str]) -> None:
        self._code = os.waitstatus_to_exitcode(int(statuses.readline()))

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        if not self._reader.join(timeout_s):
            raise subprocess.TimeoutExpired(SCRIPT, timeout_s or 0.0)
        assert self._code is not None
        return self._code

    def send_signal(self, signum: int) -> None:
        if self._code is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(KILL)


class Scene:
    """The processes of one row; as a context manager it leaves none behind."""

    def __init__(self, row: EndRow, folder: pathlib.Path, copies: CopyServer, environ):
        self.row, self.folder, self.copies = row, folder, copies
        self.environ = {**os.environ, **SECRET, **environ}
        (folder / "run").mkdir()
        self.output = folder / "output.txt"
        self.children: dict[str, subprocess.Popen[bytes] | Copy] = {}
        self.judged = "job"

    def __enter__(self) -> "Scene":
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        words = [SCRIPT, str(self.folder), self.row.moment]
        script, run = [sys.executable, *words], [sys.executable, "-m", "jaxgoodput.cli", "run"]
        run += ["--grace-s", str(GRACE_S)]
        kind, _, rest = self.row.launch.partition(" ")
        match kind:
            case "alone":
                self.children["job"] = self.copies.start(self.folder, self.row.moment)
            case "run":
                self.start("job", [*run, "--nproc-per-node", "1", "--", *script])
            case "pair":
                self.start("job", [*run, "--nproc-per-node", "2", "--", *script])
            case "wrapper":
                values = {"python": sys.executable, "script": " ".join(map(repr, words))}
                wrapped: list[str] = []
                for word in WRAPPERS[rest]:
                    own = words if word == "{words}" else [word.format(**values, words="")]
                    wrapped += own
                self.start("job", [*run, "--nproc-per-node", "1", "--", *wrapped])
            case "usage":
                self.start("job", [*run, *rest.split()])
            case _:
                self._start_hosts(run, script, ["a", "b"] if kind == "hosts" else ["a"])
                self.judged = "job" if kind == "hosts" else "agent a"

    def _start_hosts(self, run: list[str], script: list[str], names: Sequence[str]) -> None:
        options = ["--nnodes", f"1:{len(names)}", "--local-hosts", "0", "--join-s", "60"]
        options += ["--rdzv-endpoint", "127.0.0.1:0"]
        self.start("job", [*run, *options, "--", *script])
        text = self.wait_for("the job is at ")
        address = text.split("the job is at ")[1].split(",")[0]
        for name in names:
            agent = [sys.executable, "-m", "jaxgoodput.cli", "agent", "--name", name]
            agent += ["--rdzv-endpoint", address, "--reconnect-s", "4"]
            agent += ["--grace-s", str(GRACE_S)]
            self.start(f"agent {name}", [*agent, "--", *script])

    def start(self, name: str, command: Sequence[str]) -> None:
        with self.output.open("ab") as output:
            self.children[name] = subprocess.Popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_for(self, text: str) -> str:
        return self._until(lambda: found if text in (found := self.text()) else "")

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def _until(self, look: Callable[[], str], *, may_end: bool = False) -> str:
        """Return what `look` returns as soon as it is not empty; "" if the job ends before and `may_end`."""
        give_up = time.monotonic() + START_S
        while not (found := look()):
            has_ended = self.children[self.judged].poll() is not None
            if has_ended and may_end:
                break
            if has_ended or time.monotonic() > give_up:
                raise RuntimeError(f"{self.row}:\n{self.text()[-4000:]}")
            time.sleep(0.01)
        return found

    def act(self) -> None:
        """Send the signals of the row, each at its moment; none if the job ends before a later moment."""
        for act in self.row.acts:
            is_first = act.at == "moment"
            count = 2 if is_first and self.row.launch in ("pair", "hosts") else 1

            def look(at: str = act.at, count: int = count) -> str:
                return "there" if len(list(self.folder.glob(f"{at}.*"))) >= count else ""

            if not self._until(look, may_end=not is_first):
                return
            time.sleep(act.after_s)
            with contextlib.suppress(ProcessLookupError):
                self._send(act)

    def _send(self, act: Act) -> None:
        if act.to in self.children:
            self.children[act.to].send_signal(act.signum)
            return
        name = act.to.removeprefix("worker ") if act.to != "wrapper" else "0"
        pid = int((self.folder / f"pid.{name}").read_text().split()[-1])
        if act.to == "wrapper":
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
        os.kill(pid, act.signum)

    def close(self) -> None:
        """End what still runs: with a coordinator or launcher its workers end as well."""
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
            child.wait()


def done_in(folder: pathlib.Path) -> int:
    """The last step that every process has done; lines that were cut off are left out."""
    last = []
    for path in folder.glob("steps.*"):
        lines = path.read_text().split("\n")[:-1]
        last.append(max(map(int, lines), default=0))
    return min(last, default=0)


def repair(folder: pathlib.Path) -> None:
    """Make the disk writable again, as a restart finds it."""
    checkpoints = folder / "run" / "checkpoints"
    # A folder that is mounted on itself does not look like a mount to `os.path.ismount`.
    while f" {checkpoints} " in pathlib.Path("/proc/mounts").read_text():
        subprocess.run(["umount", str(checkpoints)], check=True)
    if checkpoints.is_file():
        checkpoints.unlink()


def play(row: EndRow, folder: pathlib.Path, copies: CopyServer, environ: Mapping[str, str]) -> Seen:
    """Start the job of a row, do to it what the row says, and start its script again afterwards."""
    with Scene(row, folder, copies, environ) as scene:
        try:
            scene.act()
            began_s = time.monotonic()
            code = scene.children[scene.judged].wait(END_S)
            seconds = time.monotonic() - began_s
        finally:
            scene.close()
            done = done_in(folder)
            repair(folder)
    text = scene.text()
    if row.launch.startswith("usage"):
        return Seen(code, seconds, done, 0, text)
    copies.start(folder, "restart").wait(START_S)
    return Seen(code, seconds, done, int((folder / "began").read_text()), text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose names match this expression")
    only = parser.parse_args().only
    rows = [row for row in ROWS if re.search(only, str(row))]
    print("Ends of jobs, and the steps at which their restarts begin\n", flush=True)
    print("| started | end | code | done | restart | s | holds |\n|---|---|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        environ = compiled_in(stack.enter_context(tempfile.TemporaryDirectory()))
        copies = stack.enter_context(contextlib.closing(CopyServer(environ)))
        broken = sum(played(row, copies, environ) for row in rows)
    print(f"\n{len(rows) - broken} of {len(rows)} hold", flush=True)
    return 1 if broken else 0


def compiled_in(folder: str) -> dict[str, str]:
    """Return variables with which all processes keep what they have compiled in one folder."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def played(row: EndRow, copies: CopyServer, environ: Mapping[str, str]) -> bool:
    """Play a row and print it; return whether it does not hold."""
    with tempfile.TemporaryDirectory() as name:
        seen = play(row, pathlib.Path(name), copies, environ)
    fault = seen.fault(row)
    print(
        f"| {row.launch} | {row.name} | {seen.code} | {seen.done} | {seen.began} | "
        f"{seen.seconds:.1f} | {fault or 'yes'} |",
        flush=True,
    )
    if fault:
        print(seen.output[-6000:], file=sys.stderr, flush=True)
    return bool(fault)


if __name__ == "__main__":
    sys.exit(main())
