"""Carries out the command `jaxgoodput decide`."""

import json
import sys

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
        plan = decide(read_request(text))
    except (ValueError, OSError) as error:
        return wrong(ValueError(f"{place}: {error}"))
    except PlanError as error:
        return wrong(error)
    print(json.dumps(pack(plan), allow_nan=False))
    return DONE
