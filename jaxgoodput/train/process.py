"""SIGTERM and SIGINT as a wish to save and stop."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from jaxgoodput.train.control import Requests


@contextlib.contextmanager
def heeded(requests: Requests) -> Iterator[None]:
    """SIGTERM and SIGINT ask to save and stop; a second SIGINT interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers only there; whoever owns the main thread may call request_stop
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: Any) -> None:
        if number == signal.SIGINT and requests.signal is not None:
            raise KeyboardInterrupt
        requests.interrupt(signal.Signals(number).name)

    try:
        for number in before:
            signal.signal(number, ask)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
