"""A real Slurm on this machine, for tests: a controller and nodes, each a daemon that a test may kill."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import processes

PATH = f"{os.environ['PATH']}:/usr/sbin"  # where Debian puts the daemons
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
LIMIT_S = 60.0

# A job that is requeued starts again when the credentials of its last start have expired.
SETTINGS = """\
ClusterName=jaxgoodput
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=5
ReturnToService=2
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def available() -> str | None:
    """Why there can be no Slurm here, or None where there can."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"there is no Slurm here ({', '.join(missing)}): apt-get install slurm-wlm munge"
    return None


class Slurm:
    """A cluster of the nodes n0, n1, ..., all on this machine; `cluster` makes it and removes it."""

    def __init__(self, folder: pathlib.Path, count: int):
        self.folder = folder
        self.nodes = [f"n{i}" for i in range(count)]
        self.environ = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons; every node is idle then."""
        ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        (self.folder / "slurm.conf").write_text(
            SETTINGS.format(
                host=host,
                folder=self.folder,
                ports=ports,
                nodes="\n".join(
                    f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
                    for name, port in zip(self.nodes, ports[1:], strict=True)
                ),
            )
        )
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        at = {
            name: f"--{name}-file={self.folder / 'munge'}.{name}" for name in ("pid", "log", "seed")
        }
        own = [f"--key-file={key}", f"--socket={self.folder / 'munge.sock'}", *at.values()]
        self._start("munged", ["munged", "--foreground", "--force", *own])
        self._until(lambda: (self.folder / "munge.sock").exists(), "munged does not listen")
        self._start("slurmctld", ["slurmctld", "-D"])
        for name in self.nodes:
            self._start(name, ["slurmd", "-D", "-N", name])
        self._until(
            lambda: all(self.state(name) == "idle" for name in self.nodes), "nodes are not idle"
        )

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()} ({done.returncode})")
        return done.stdout

    def state(self, node: str) -> str:
        """Of a node: idle, mixed, down, ...; a * says that it does not answer."""
        return self.run("sinfo", "-h", "-n", node, "-o", "%T", check=False).strip()

    def submit(
        self,
        script: pathlib.Path,
        *arguments: str,
        options: Sequence[str],
        environ: Mapping[str, str],
    ) -> str:
        """Submit a job; its number."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        done = subprocess.run(
            command, env={**self.environ, **environ}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode, ..."""
        shown = self.run("scontrol", "show", "job", number, "--oneliner")
        fields = (word.partition("=") for word in shown.split())
        return {name: value for name, _, value in fields}

    def kill(self, node: str) -> None:
        """End a node with all that runs on it, as a power failure would; no daemon says goodbye."""
        pids = self.pids(f"SLURMD_NODENAME={node}")
        steps = {_parent(pid) for pid in pids} - set(pids)
        daemon = self._daemons.pop(node)
        for pid in (daemon.pid, *(pid for pid in steps if _name(pid) == "slurmstepd"), *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def pids(self, *variables: str) -> list[int]:
        """The processes of jobs of this cluster that have all these variables in their environment."""
        wanted = {f"SLURM_CONF={self.environ['SLURM_CONF']}", *variables}
        found = []
        for folder in pathlib.Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):  # it has ended
                    environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    if wanted <= set(environ):
                        found.append(int(folder.name))
        return sorted(found)

    def close(self) -> None:
        """End all jobs, then the daemons, and then what they may have left."""
        if "slurmctld" in self._daemons:
            self.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        for child in reversed(self._daemons.values()):
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._daemons = {}
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _until(self, what, otherwise: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not what():
            ended = [name for name, child in self._daemons.items() if child.poll() is not None]
            if ended or time.monotonic() > deadline:
                told = "".join(
                    f"-- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
                    for pattern in ("*.out", "*.log")
                    for path in self.folder.glob(pattern)
                )
                raise RuntimeError(f"{otherwise}; ended: {ended}\n{told}")
            time.sleep(0.1)


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Slurm]:
    """A cluster of so many nodes; afterwards all its processes and files are gone."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path must be short
    made = Slurm(folder, count)
    try:
        made.start()
        yield made
    finally:
        made.close()
        assert all(processes.gone(pid) for pid in made.pids())
        shutil.rmtree(folder)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in found]


def _parent(pid: int) -> int:
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return pid


def _name(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
