"""JAX's coordination service for one generation after another, in the coordinator's process.

The service lives here, not in a worker, so that it survives the death of any worker.
"""

import subprocess
import sys
from functools import partial

from jaxgoodput import _jax
from jaxgoodput._worker import Worker, Workers
from jaxgoodput.launcher.supervise import say


class JaxService:
    """JAX's coordination service for the generation of processes that trains now."""

    def __init__(self, host: str):
        self.has_connected = True
        """Whether all processes of the generation have connected to each other."""
        self._host = host
        self._count = 1
        self._service: _jax.CoordinationService | None = None
        self._stand_ins: list[subprocess.Popen[bytes]] = []
        self._ending = Workers(
            "jax-service", lambda error: say(f"JAX's coordination service did not end: {error}")
        )

    def begin(self, count: int) -> str:
        """Start a service for a generation of `count` processes; return its address, "" if count is 1.

        All processes have left the generation before, so its service is not used any more.
        """
        self._dismiss_stand_ins()
        if self._service is not None:
            # It waits 5 s for clients whose host is cut off; the next generation need not wait for it.
            self._ending.start(partial(_shut_down, self._service))
            self._service = None
        self._count, self.has_connected = count, count == 1
        if count > 1:
            self._service = _jax.start_coordination_service(count, host=self._host)
        return "" if self._service is None else self._service.address

    def stand_in(self, rank: int) -> None:
        """Register another process in place of a worker that died before it had connected.

        JAX's registration waits for all ranks. Without the missing one it would fail in all workers, and
        abort them with the state in their memory.
        """
        assert self._service is not None
        say(f"rank {rank} died before all had connected: another process registers in its place")
        command = [sys.executable, "-m", "jaxgoodput.launcher.elastic.stand_in"]
        self._stand_ins.append(
            subprocess.Popen(
                [*command, self._service.address, str(self._count), str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def close(self) -> None:
        """End the service, and the processes that stand in for workers."""
        self._dismiss_stand_ins()
        if self._service is not None:
            self._service.shutdown()

    def _dismiss_stand_ins(self) -> None:
        for child in self._stand_ins:
            child.kill()
            child.wait()
        self._stand_ins = []


def _shut_down(service: _jax.CoordinationService, worker: Worker) -> None:
    service.shutdown()
