"""Messages between launchers: signed, in order, and nothing of a stranger is heard."""

import contextlib
import json
import select
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput import _wire as wire

SECRET = "known to both"


def serve(secret, answer):
    """A server for one client; its address, and what `answer(channel, hello)` gave or raised."""
    listener = socket.create_server(("127.0.0.1", 0))
    found = []

    def run():
        sock, _ = listener.accept()
        listener.close()
        channel = None
        try:
            channel, hello = wire.accepted(sock, secret)
            found.append(answer(channel, hello))
        except Exception as error:
            found.append(error)
        finally:
            if channel is not None:
                channel.close()

    thread = threading.Thread(target=run)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread, found


def echo(channel, hello):
    message = hello
    count = 0
    while message is not None:
        blob = channel.receive_bytes(message) if "num_bytes" in message else None
        channel.send({k: v for k, v in message.items() if k != "num_bytes"}, blob)
        message = channel.receive()
        count += 1
    return count


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=50),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.text(max_size=9).filter(lambda k: k != "num_bytes"), VALUES, max_size=4
            ),
            st.none() | st.binary(max_size=3000),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_messages_and_bytes_arrive_as_they_were_sent(messages):
    address, thread, found = serve(SECRET, echo)
    channel = wire.connect(address, SECRET, timeout_s=5.0)
    for message, blob in messages:
        channel.send(message, blob)
        got = channel.receive()
        assert got is not None
        if blob is None:
            assert got == json.loads(json.dumps(message))
        else:
            assert channel.receive_bytes(got) == blob
    channel.close()
    thread.join(10)
    assert found == [len(messages)]


def test_blocks_larger_than_one_arrive_whole(monkeypatch):
    monkeypatch.setattr(wire, "_BLOCK", 1000)
    data = bytes(range(256)) * 40
    address, thread, _ = serve(SECRET, echo)
    channel = wire.connect(address, SECRET, timeout_s=5.0)
    channel.send({"type": "state"}, data)
    got = channel.receive()
    assert got is not None and channel.receive_bytes(got) == data
    channel.close()
    thread.join(10)


def test_a_wrong_secret_is_named_on_both_sides():
    address, thread, found = serve(SECRET, echo)
    with pytest.raises(wire.WrongSecret, match="JAXGOODPUT_SECRET"):
        wire.connect(address, "another", timeout_s=5.0)
    thread.join(10)
    assert isinstance(found[0], ConnectionError) and "another secret" in str(found[0])


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"\0" * 500])
def test_a_stranger_is_refused(greeting):
    address, thread, found = serve(SECRET, echo)
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(greeting)
        sock.shutdown(socket.SHUT_WR)
        thread.join(15)
    assert isinstance(found[0], wire.WrongSecret)


@pytest.mark.parametrize("speaks", [b"", b"0", b"0" * 30], ids=["silent", "one byte", "many"])
def test_a_stranger_is_gone_in_time_however_often_it_sends(monkeypatch, speaks):
    limit_s, rest_s = 0.5, 0.1
    monkeypatch.setattr(wire, "_HELLO_S", limit_s)
    address, thread, found = serve(SECRET, echo)
    host, port = address.split(":")
    began_s = time.monotonic()
    with socket.create_connection((host, int(port))) as sock:
        while thread.is_alive() and time.monotonic() - began_s < 20 * limit_s:
            with contextlib.suppress(OSError):  # it is gone
                sock.sendall(speaks[:1])  # far more often than any limit of a single read
                speaks = speaks[1:] + speaks[:1]
            thread.join(rest_s)
    assert not thread.is_alive()
    assert isinstance(found[0], ConnectionError)


def test_a_message_that_is_sent_once_more_or_changed_is_refused():
    """Whoever listens has whole lines, and the nonces, but not the secret."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    heard = []

    def man_in_the_middle():
        client, _ = listener.accept()
        server = socket.create_connection(tuple(backend))
        client_file, server_file = client.makefile("rb"), server.makefile("rb")
        server.sendall(client_file.readline())
        client.sendall(server_file.readline())
        client.sendall(server_file.readline())  # welcome
        line = client_file.readline()
        heard.append(line)
        server.sendall(line)
        client.sendall(server_file.readline())
        server.sendall(line)  # once more
        server_file.readline()
        for sock in (client, server):
            sock.close()
        client_file.close()
        server_file.close()

    address, thread, found = serve(SECRET, echo)
    host, backend_port = address.split(":")
    backend = [host, int(backend_port)]
    middle = threading.Thread(target=man_in_the_middle)
    middle.start()
    channel = wire.connect(f"127.0.0.1:{port}", SECRET, timeout_s=5.0)
    channel.send({"type": "kill", "member": "a"})
    assert channel.receive() == {"type": "kill", "member": "a"}
    middle.join(10)
    thread.join(10)
    channel.close()
    listener.close()
    assert heard and isinstance(found[0], wire.WrongSecret)


def test_a_server_that_is_gone_is_none():
    address, thread, _ = serve(SECRET, lambda channel, hello: None)
    channel = wire.connect(address, SECRET, timeout_s=5.0)
    channel.send({"type": "hello"})
    assert channel.receive() is None
    channel.close()
    thread.join(10)


def test_connections_to_an_address_are_ended_and_others_are_not():
    with contextlib.ExitStack() as stack:

        def connected(address, family=socket.AF_INET):
            server = stack.enter_context(socket.create_server((address, 0)))
            client = stack.enter_context(socket.socket(family))
            mapped = f"::ffff:{address}" if family == socket.AF_INET6 else address
            client.connect((mapped, server.getsockname()[1]))
            accepted, _ = server.accept()
            client.settimeout(5.0)
            return client, stack.enter_context(accepted)

        lost, kept = connected("127.0.0.2"), connected("127.0.0.1")
        mapped = connected("127.0.0.2", socket.AF_INET6)
        assert wire.end_connections({"127.0.0.2"}) == 2, "those that were made from here"
        assert [lost[0].recv(1), mapped[0].recv(1), lost[1].recv(1)] == [b""] * 3
        kept[1].sendall(b"1")
        assert kept[0].recv(1) == b"1"


def test_a_connection_that_is_still_being_made_is_ended():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.3", 0), backlog=0))
        waiting = [stack.enter_context(socket.socket()) for _ in range(4)]
        for one in waiting:  # more than may wait to be accepted
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        ready = select.poll()
        ready.register(waiting[-1])
        assert not [
            what
            for _, what in ready.poll(100)
            if what & select.POLLOUT and not what & select.POLLHUP
        ]
        assert wire.end_connections({"127.0.0.3"}) == 4
        assert [what for _, what in ready.poll(5000) if what & select.POLLHUP]
