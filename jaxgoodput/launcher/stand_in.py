"""In place of a worker that died before it had connected: lets the others past JAX's registration.

    python -m jaxgoodput.launcher.stand_in HOST:PORT NUM_PROCESSES PROCESS_ID

A client of JAX's service waits for all processes to register, and aborts its own where one never does: the
state in its memory would be lost. This one registers, shows devices of its own, and waits to be killed; the
others go on, learn that somebody has gone, and come together anew.
"""

import sys
import time

import jax

from jaxgoodput import _jax

LIVES_S = 120.0


def main() -> None:
    """Stand in for the worker that the command line names."""
    address, num_processes, process_id = sys.argv[1:]
    _jax.quiet_runtime_log()
    _jax.connect(address, int(num_processes), int(process_id))
    jax.devices()
    time.sleep(LIVES_S)


if __name__ == "__main__":
    main()
