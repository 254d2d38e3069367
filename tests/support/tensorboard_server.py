"""Starts TensorBoard itself on a local port, for tests that look at what it shows."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

from jaxgoodput.clock import SystemClock


class serving:
    """A TensorBoard on a free local port; ready once it has loaded the data."""

    def __init__(self, logdir, fast_reader="true"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [
            sys.executable, "-m", "tensorboard.main", f"--logdir={logdir}", "--host=127.0.0.1",
            f"--port={self.port}", f"--load_fast={fast_reader}", "--reload_interval=1",
        ]  # fmt: skip
        self.clock = SystemClock()

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as reply:
            return reply.read().decode()

    def get_until(self, path, loaded):
        """The JSON at `path` once `loaded(json)`: runs are read one by one, beside the server."""
        for _ in range(240):
            try:
                if loaded(found := json.loads(self.get(path))):
                    return found
            except OSError:
                assert self.process.poll() is None, "tensorboard did not start"
            self.clock.sleep(0.25)
        raise AssertionError("tensorboard did not load the events within a minute")

    def __enter__(self):
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.command, stdout=quiet, stderr=quiet, start_new_session=True
        )
        try:
            last = "hparam/mean_goodput"
            self.get_until(
                "/data/plugin/scalars/tags",
                lambda runs: any(last in tags for tags in runs.values()),
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # The whole group: the fast reader is a process of its own.
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(timeout=20)
