"""What the tests of the service have in common."""

import sqlite3

import pytest


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """All connections, at the end: Python 3.13 warns of those that are left open."""
    made, connect = [], sqlite3.connect

    def noted(*args, **kwargs):
        made.append(connect(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    yield
    for connection in made:
        connection.close()
