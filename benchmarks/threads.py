"""Reads how much processor time the threads of this process have used."""

import pathlib
import threading
import time


def cpu_of_threads() -> dict[str, float]:
    """CPU seconds so far of every thread that Python knows, by its name, and of all others."""
    found = {}
    for thread in threading.enumerate():
        path = pathlib.Path(f"/proc/self/task/{thread.native_id}/schedstat")
        if not path.exists():
            continue
        name = thread.name.removeprefix("jaxgoodput-").removesuffix("Thread").lower()
        found[name] = found.get(name, 0.0) + int(path.read_text().split()[0]) * 1e-9
    return {**found, "others": time.process_time() - sum(found.values())}
