"""What a coordinator says of hosts that go, to agents that are only connections."""

import contextlib
import threading
import time

import pytest

from jaxgoodput import _wire as wire
from jaxgoodput.clock import SystemClock
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import messages
from jaxgoodput.launcher.elastic.coordinator import Coordinator
from jaxgoodput.launcher.elastic.fitness import Check
from jaxgoodput.launcher.elastic.state import Limits

SECRET = "of these tests"
LIMIT_S = 60.0


@contextlib.contextmanager
def coordinator():
    """A coordinator at work, which is interrupted at the end."""
    made = Coordinator(
        Limits(least=1, most=4, exclude_slow=0.0),
        host="127.0.0.1",
        port=None,
        secret=SECRET,
        facts={},
        clock=SystemClock(),
    )
    is_over = threading.Event()
    thread = threading.Thread(
        target=made.run, args=(lambda: "SIGINT" if is_over.is_set() else None,)
    )
    thread.start()
    try:
        yield made
    finally:
        is_over.set()
        thread.join(LIMIT_S)
        made.close()
    assert not thread.is_alive()


class Connection:
    """An agent of a host that passes its check and starts a process."""

    def __init__(self, address, host):
        self.host = host
        self.channel = wire.connect(address, SECRET, timeout_s=LIMIT_S)
        self.send(messages.AgentHello(host, 1, host, {}))
        self.hears(messages.CheckHost)
        self.send(ev.HostExamined(host, Check(product_s=1e-3, send_s=1e-3)))
        self.member = self.hears(messages.StartWorker).member

    def send(self, message):
        self.channel.send(messages.encoded(message))

    def hears(self, kind):
        while (body := self.channel.receive()) is not None:
            message = messages.decoded(body, messages.TO_AGENTS)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"{self.host} was told no {kind.__name__}")


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_host_that_dies_before_it_could_leave_has_not_left_as_planned(has_ended, capfd):
    with coordinator() as made:
        stays, leaves = Connection(made.address, "stays"), Connection(made.address, "leaves")
        leaves.send(ev.Leave("leaves", "SIGTERM", None))
        if has_ended:
            leaves.send(ev.ProcessExited(leaves.member, 143))
        leaves.channel.close()
        said, deadline = "", time.monotonic() + LIMIT_S
        while "leaves has left" not in said:
            assert time.monotonic() < deadline, said
            said += capfd.readouterr().err
            time.sleep(0.02)
        stays.channel.close()
    assert ("leaves has left, as planned" in said) == has_ended
    assert ("leaves has left: its agent does not answer" in said) != has_ended
