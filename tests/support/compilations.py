"""One folder of compiled programs for all tests, their processes, and the next run of them.

Most of the time of a test that trains is the compiler's, and most programs are the same from test to
test and from run to run. An entry's key holds the whole program, the compiler's version and its
options, so that nothing stale is ever found.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import time
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxgoodput import _jax

# What `compiler_options` a program needs to have the kernels that users get; see conftest.py.
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}

MAX_BYTES = 2**31  # programs that no test compiles any more pile up


def _folder() -> pathlib.Path:
    """Where `JAX_COMPILATION_CACHE_DIR` says; else in the user's cache, apart for every kind of CPU."""
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen:
        return pathlib.Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "jaxgoodput-tests" / f"{jax.__version__}-{_cpu()}"


def _cpu() -> str:
    # Programs are compiled for the CPU at hand, and one that lacks an instruction must not find them.
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        told = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        told = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {told}".encode()).hexdigest()[:12]


FOLDER = _folder()

# Everything is kept, also what compiles fast: there are thousands of those. XLA's own passes run as ever, so
# that programs hold the same operations; LLVM's, which take half of the time, make only faster code of them.
SETTINGS = {
    "jax_disable_most_optimizations": True,
    "jax_compilation_cache_dir": str(FOLDER),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

# The same for a process that a test starts: a folder beside, because the keys of a job leave out which
# of its devices are another process's.
JOBS = {name.upper(): str(value) for name, value in SETTINGS.items()}
JOBS["JAX_COMPILATION_CACHE_DIR"] = str(FOLDER / "jobs")

_undo = []


def use_folder() -> None:
    """Let this process find and keep its programs in `FOLDER`, together with others like it."""
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    # Entries must appear whole, because others read them at any moment.
    _undo.append(_jax.share_compilation_cache())


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Without the folder: JAX as it comes, which compiles every program."""
    _undo.pop()()
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        use_folder()


def prune() -> None:
    """Start afresh where the folder has outgrown `MAX_BYTES`."""
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    if sum(file.stat().st_size for file in files) < MAX_BYTES:
        return
    for file in files:
        if time.time() - file.stat().st_mtime > 3600.0:  # newer ones may be another run's
            file.unlink(missing_ok=True)
