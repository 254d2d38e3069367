"""A stand-in for a worker that died before it had connected: lets the others past JAX's registration.

    python -m jaxgoodput.launcher.elastic.stand_in HOST:PORT NUM_PROCESSES PROCESS_ID

A client of JAX's coordination service waits until all processes have registered. If one never does, the
client aborts its own process, and the state in its memory is lost. A stand-in registers, announces its
devices, and waits to be killed. The others then see a lost peer, as usual, and form another generation.
"""

import sys
import time

import jax

from jaxgoodput import _jax

LIVES_S = 120.0


def main() -> None:
    """Connect to JAX's coordination service in place of the worker that the command line names.

    The rest of the generation can then connect although that worker is gone.
    """
    address, num_processes, process_id = sys.argv[1:]
    _jax.quiet_runtime_log()
    _jax.connect(address, int(num_processes), int(process_id))
    jax.devices()
    time.sleep(LIVES_S)


if __name__ == "__main__":
    main()
