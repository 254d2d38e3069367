"""Processes that hold tables together, each of them a thread."""

import socket
import threading
import time

from jaxgoodput import _wire
from jaxgoodput.embedding.peers import Peers


def together(count, run, first=None):
    """What `run(rank, peers)` returns in each of so many threads, by rank.

    `first(address)` is called in another, before anybody else comes to the first one.
    """
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    secret, found = _wire.make_secret(), {}

    def one(rank):
        try:
            peers = Peers(rank, addresses, secret, listeners[rank])
            try:
                found[rank] = run(rank, peers)
            finally:
                peers.close()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    if first is not None:
        threads.insert(0, threading.Thread(target=first, args=(addresses[0],)))
    for thread in threads:
        thread.start()
        time.sleep(0.1 if first is not None else 0.0)
    for thread in threads:
        thread.join()
    for listener in listeners:
        listener.close()
    for error in found.values():
        if isinstance(error, BaseException):
            raise error
    return [found[rank] for rank in range(count)]
