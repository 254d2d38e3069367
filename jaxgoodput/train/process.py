"""What a run changes in the user's process, and puts back: signals, the compilation cache, logs, threads."""

import contextlib
import ctypes
import logging as std_logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache

from jaxgoodput._jax import Compilation, listen_for_compilations
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import Requests

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_BLOCKS = (1 << 30, 1 << 25)  # to keep, bytes; older versions refuse more than 32 MiB


@contextlib.contextmanager
def changed_process(config: Config, requests: Requests) -> Iterator[None]:
    """All of the changes of this file, while a run lasts."""
    with quiet_writer(), persistent_cache(config), prompt_threads(), heeded_signals(requests):
        yield


class Compilations:
    """Counts the compilations of the loop's own thread, and books their time."""

    def __init__(self, ledger: TimeLedger):
        self.num = 0
        self._ledger = ledger
        self._thread_id = threading.get_ident()

    @contextlib.contextmanager
    def counted(self) -> Iterator["Compilations"]:
        """Listen while the block lasts."""
        stop = listen_for_compilations(self._take)
        try:
            yield self
        finally:
            stop()

    def _take(self, compilation: Compilation) -> None:
        if compilation.thread_id == self._thread_id:
            self.num += 1
            self._ledger.add("compilation", compilation.seconds)


def keep_freed_pages(platform: str) -> bool:
    """Have the C library keep what steps on the CPU free, for the next step; True where it will.

    glibc gives large blocks back to the kernel, so every step of XLA:CPU gets fresh pages, each zeroed at its
    first touch. For the whole process and for good: glibc has no way back to its own moving threshold. Left
    alone where `platform` is another, and where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if platform != "cpu" or mallopt is None:  # musl has none
        return False
    # The threshold first: without it, the others would only freeze it where it is.
    if not any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in LARGEST_BLOCKS):
        logging.info("the C library does not keep freed memory; steps will take fresh pages")
        return False
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(M_TOP_PAD, 1 << 26)
    return True


@contextlib.contextmanager
def heeded_signals(requests: Requests) -> Iterator[None]:
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


@contextlib.contextmanager
def quiet_writer() -> Iterator[None]:
    """Leave out what Orbax and JAX's cache log below a warning: many lines, none for a user."""

    def worth_reading(record: Any) -> bool:
        chatty = "orbax" in record.pathname or "compilation_cache" in record.pathname
        return record.levelno >= std_logging.WARNING or not chatty

    handler = logging.get_absl_handler()
    handler.addFilter(worth_reading)
    try:
        yield
    finally:
        handler.removeFilter(worth_reading)


@contextlib.contextmanager
def prompt_threads(interval_s: float = 0.0005) -> Iterator[None]:
    """Let the loop's thread have the interpreter soon while another one traces, plans or compiles.

    A waiting thread gets it after CPython's switch interval, 5 ms unless told, which is longer than
    many a step.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def cache_folder(config: Config) -> str | None:
    """Where compiled programs are to be kept; None: nowhere."""
    wanted = config.execution.compilation_cache
    return (
        os.path.join(os.path.abspath(config.workdir), "compilation_cache")
        if wanted == ""
        else wanted
    )


@contextlib.contextmanager
def persistent_cache(config: Config) -> Iterator[None]:
    """JAX's compilation cache under the workdir while a run lasts, unless one is set already."""
    directory = cache_folder(config)
    if directory is None or jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    settings = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
