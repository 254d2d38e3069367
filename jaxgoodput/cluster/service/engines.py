"""How agents come to be on machines: one class for each place that can start a program somewhere.

What runs jobs is the same agent everywhere; an engine only starts it on a node, sees when it has ended, and
stops it. (Kubernetes starts things by itself: `manifests.py` writes what it is told.)
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.node.process import die_with_parent
from jaxgoodput.cluster.service.wire import DONE, USAGE

ENGINE = "engine"  # the folder that its process holds, in that of the service
LOOK_S, AGAIN_S = 0.5, 2.0


@runtime_checkable
class AgentStarter(Protocol):
    """Starts agents on nodes."""

    def nodes(self) -> Mapping[str, Sequence[str]]:
        """The nodes that there are now, with the options of `jaxgoodput node` that the engine knows."""
        ...

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start the agent of a node; `arguments` are those of `jaxgoodput`. Raises OSError."""
        ...

    def ended(self) -> Mapping[str, int | None]:
        """Agents that have ended since the last call, with their exit codes; None: so has their node."""
        ...

    def stop(self) -> None:
        """Tell all agents to stop, and wait until they have."""
        ...


class Local:
    """Nodes that are this machine, each with its own devices: processes here."""

    def __init__(self, names: Sequence[str]):
        self._names = tuple(names)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def nodes(self) -> Mapping[str, Sequence[str]]:
        """Always the same."""
        return dict.fromkeys(self._names, ())

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start an agent; it goes on where this process is killed."""
        self._children[name] = subprocess.Popen(
            self._command(name, arguments), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def ended(self) -> Mapping[str, int | None]:
        """Those that have ended since the last call."""
        codes = {name: child.poll() for name, child in self._children.items()}
        found = {name: code for name, code in codes.items() if code is not None}
        for name in found:
            del self._children[name]
        return found

    def stop(self) -> None:
        """Tell them to stop, and wait."""
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        for child in self._children.values():
            child.wait()
        self._children = {}

    def _command(self, name: str, arguments: Sequence[str]) -> list[str]:
        return _command(arguments)


class Slurm(Local):
    """Nodes of the allocation that this process runs in: a step of `srun` on each."""

    def _command(self, name: str, arguments: Sequence[str]) -> list[str]:
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap"]
        step += ["--export=ALL", "--kill-on-bad-exit=0", f"--job-name=node-{name}"]
        return [*step, *_command(arguments)]


def slurm_nodes() -> list[str]:
    """The nodes of this allocation. Raises ValueError outside of one."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise ValueError(
            f"--engine slurm: the nodes of this allocation are not known ({str(said).strip()}). Start this "
            "in one, with sbatch or salloc."
        ) from None
    return done.stdout.split()


class Ray:
    """Nodes of a Ray cluster, as they come and go: on each an actor that has its devices, in it the agent.

    The actor ends with its node and with this process, and the agent with the actor: its jobs save and go on
    elsewhere. `kind` cpu: of Ray's CPUs; others: of its GPUs. Raises ValueError where there is no Ray, and
    ConnectionError where none runs.
    """

    def __init__(self, kind: str, num_devices: int):
        self._ray = _ray()
        self._resource, self._num_devices = "CPU" if kind == "cpu" else "GPU", num_devices
        self._names: dict[str, str] = {}  # by Ray's own id, as long as the node lives
        self._actors: dict[str, Any] = {}
        self._ends: dict[str, Any] = {}

    def nodes(self) -> Mapping[str, Sequence[str]]:
        """Those that are alive and have so many devices."""
        alive = {
            node["NodeID"]: node
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get(self._resource, 0) >= self._num_devices
        }
        self._names = {id_: name for id_, name in self._names.items() if id_ in alive}
        for id_ in sorted(set(alive) - set(self._names)):
            name = alive[id_]["NodeName"]
            taken = name in self._names.values()  # several of one machine, which have its address
            self._names[id_] = f"{name}-{id_[:8]}" if taken else name
        return {
            name: ("--address", alive[id_]["NodeManagerAddress"])
            for id_, name in self._names.items()
        }

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start an agent, as soon as Ray has its devices to give."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

        (id_,) = (id_ for id_, known in self._names.items() if known == name)
        needs = {"num_cpus" if self._resource == "CPU" else "num_gpus": self._num_devices}
        actor = self._ray.remote(_InRay).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=id_, soft=False),
            max_concurrency=2,  # it is told to stop while it waits
            **needs,
        )
        self._actors[name] = actor.remote()
        self._ends[name] = self._actors[name].run.remote(list(arguments))

    def ended(self) -> Mapping[str, int | None]:
        """Those that have ended since the last call."""
        if not self._ends:
            return {}
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

        done, _ = self._ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=0)
        found: dict[str, int | None] = {}
        for name in [name for name, end in self._ends.items() if end in done]:
            try:
                found[name] = self._ray.get(self._ends.pop(name))
            except RayActorError as error:
                logging.warning("node %s: %s", name, str(error).partition("\n")[0])
                found[name] = None
            del self._actors[name]
        return found

    def stop(self) -> None:
        """Tell them to stop, and wait."""
        for actor in self._actors.values():
            actor.stop.remote()
        self._ray.wait(list(self._ends.values()), num_returns=len(self._ends) or 1)
        self._ray.shutdown()


class _InRay:
    """The agent of a node, in an actor."""

    def __init__(self):
        self._child: subprocess.Popen[bytes] | None = None
        self._is_told = False
        self._lock = threading.Lock()

    def run(self, arguments: Sequence[str]) -> int:
        """Until it ends; its exit code."""
        with self._lock:
            if self._is_told:
                return DONE
            self._child = subprocess.Popen(
                _command(arguments), stdin=subprocess.DEVNULL, preexec_fn=die_with_parent()
            )
        return self._child.wait()

    def stop(self) -> None:
        """Tell it to stop."""
        with self._lock:
            self._is_told = True
            if self._child is not None:
                self._child.send_signal(signal.SIGTERM)


def _ray():
    """Ray, connected to the cluster that runs here, or to that of RAY_ADDRESS."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "--engine ray: there is no Ray here. Install it: pip install 'jaxgoodput[ray]'."
        ) from None
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        # Never a cluster of its own, which Ray would make where it is told of none.
        ray.init(address=address, namespace="jaxgoodput")
    except ConnectionError as error:
        raise ConnectionError(
            f"--engine ray: no cluster of Ray's is found at {address!r} ({error}). Start it "
            "(`ray start --head`), and this on one of its nodes, or set RAY_ADDRESS."
        ) from None
    return ray


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "jaxgoodput.cli", *arguments]


def run_engine(
    engine: AgentStarter,
    options: Sequence[str],
    told: threading.Event,
    clock: Clock,
    lost: Callable[[str], None],
) -> int:
    """Keep an agent on every node until told to stop; an exit code.

    `options` are what the agents have in common, `lost` tells of a node that has gone. An agent that crashes
    is started again, and one that finds another one there already. Those that were told that they are not
    wanted are not; when no other is left this ends too.
    """
    waiting: dict[str, float] = {}  # when each is started
    running: set[str] = set()
    codes: dict[str, int] = {}
    while not told.is_set():
        nodes = engine.nodes()
        for name in sorted(set(nodes) - running - set(codes)):
            if waiting.get(name, 0.0) <= clock.now():
                engine.start(name, ["node", "--name", name, *nodes[name], *options])
                running.add(name)
        for name, code in engine.ended().items():
            running.discard(name)
            if code is None:
                lost(name)
            if code in (DONE, USAGE):
                logging.warning("the agent of %s has ended with %d", name, code)
                codes[name] = code
            elif code is not None:
                logging.warning(
                    "the agent of %s has ended with %d; it is started again", name, code
                )
            waiting[name] = clock.now() + AGAIN_S
        codes = {name: code for name, code in codes.items() if name in nodes}
        waiting = {name: at_s for name, at_s in waiting.items() if name in nodes}
        if nodes and len(codes) == len(nodes):
            return max(codes.values())
        told.wait(LOOK_S)
    engine.stop()
    return DONE
