"""`jaxgoodput submit` sends what its options say."""

import dataclasses

import pytest

from jaxgoodput import cli
from jaxgoodput.cluster.client import Client
from jaxgoodput.specs import JobTerms

# Seconds of the service's own clock, which a user does not see.
NOT_CHOSEN = {"deadline_s"}


class Sent(BaseException):
    """Carries the submission that would have been sent."""


@pytest.fixture
def submission(tmp_path, monkeypatch):
    (tmp_path / "address").write_text("http://localhost:9\n")
    (tmp_path / "token").write_text("0123456789abcdef" * 4 + "\n")

    def call(self, method, path, *, body, **_):
        raise Sent(body)

    monkeypatch.setattr(Client, "call", call)

    def sent(*options):
        with pytest.raises(Sent) as raised:
            cli.main(["submit", "--folder", str(tmp_path), *options, "--", "python", "train.py"])
        return raised.value.args[0]

    return sent


def test_a_user_can_choose_all_terms_of_a_job(submission):
    usual = submission().spec
    chosen = submission(
        "--weight", "2", "--tenant", "t", "--not-preemptible", "--min-run-s", "60", "--kinds", "a,b",
        "--level", "rack", "--budget", "5", "--prefer", "b", "--preference", "2", "--cpus-per-device", "4",
        "--memory-per-device", "32",
    ).spec  # fmt: skip
    names = {field.name for field in dataclasses.fields(JobTerms)}
    same = {name for name in names if getattr(usual, name) == getattr(chosen, name)}
    assert same == NOT_CHOSEN
    assert not chosen.preemptible and chosen.budget == 5.0 and chosen.kinds == ("a", "b")
