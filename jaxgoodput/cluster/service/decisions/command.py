"""Carries out the command `jaxgoodput decide`."""

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator

from jaxgoodput._commands import wrong
from jaxgoodput._exits import DONE
from jaxgoodput._fields.serial import pack
from jaxgoodput.cluster.scheduler.reconcile import PlanError
from jaxgoodput.cluster.service.decisions.answer import decide
from jaxgoodput.cluster.service.decisions.request import read_request


def decide_command(options) -> int:
    """Read a request, print its plan, and return the exit code: 2 if the request is wrong."""
    place = "the standard input" if options.file is None else str(options.file)
    try:
        text = sys.stdin.buffer.read() if options.file is None else options.file.read_bytes()
        with output_to_stderr():
            plan = decide(read_request(text))
    except (ValueError, OSError) as error:
        return wrong(ValueError(f"{place}: {error}"))
    except PlanError as error:
        return wrong(error)
    print(json.dumps(pack(plan), allow_nan=False))
    return DONE


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """Send to standard error what is printed meanwhile, by C as well: the solver sometimes prints a line."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)  # what C has buffered
        os.dup2(kept, 1)
        os.close(kept)
