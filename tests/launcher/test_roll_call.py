"""One process is the worker, whoever else has its environment; what a wrapper hides is known all the same."""

import os
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._exits import ProcessFacts, process_exit
from jaxgoodput.launcher.roll_call import VARIABLE, AlreadyJoined, RollCall, RollCallLink

COMMAND = ["env", "X=1", "python", "train.py"]


@pytest.fixture
def roll_call():
    failures = []
    made = RollCall(must_join=True, connect_s=7.0, on_error=failures.append)
    yield made
    made.close()
    assert not failures


def answer(roll_call, worker):
    return RollCallLink(roll_call.environ(worker)[VARIABLE])


def gone(link, roll_call, worker):
    """End a worker's connection, as its death does, and wait until that is noticed."""
    link.close()
    while roll_call.is_there(worker):
        time.sleep(0.001)


@pytest.mark.parametrize("worker", ["0", "host.1", "me@a.b:22.3", "rack/7.1"])
def test_of_all_processes_that_answer_one_is_the_worker(roll_call, worker):
    assert not roll_call.has_joined(worker) and not roll_call.is_there(worker)
    accepted, refused = [], []
    barrier = threading.Barrier(8)

    def process():
        barrier.wait()
        try:
            accepted.append(answer(roll_call, worker))
        except AlreadyJoined as error:
            refused.append(str(error))

    threads = [threading.Thread(target=process) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(accepted) == 1 and len(refused) == 7
    assert all(f"process {os.getpid()}" in text and "cannot train" in text for text in refused)
    assert roll_call.is_there(worker)
    other = answer(roll_call, "another")
    gone(accepted[0], roll_call, worker)
    assert roll_call.has_joined(worker), "no other process is the worker then"
    with mock.patch.object(os, "getpid", return_value=1), pytest.raises(AlreadyJoined):
        answer(roll_call, worker)
    gone(answer(roll_call, worker), roll_call, worker)  # as one that has executed itself anew
    gone(other, roll_call, "another")


def test_a_number_that_denotes_another_process_here_gets_no_signals(roll_call):
    code = (
        "import os, sys; from jaxgoodput.launcher.roll_call import VARIABLE, RollCallLink;"
        "link = RollCallLink(os.environ[VARIABLE]); print('there', flush=True); sys.stdin.read()"
    )
    called = roll_call.environ("0")
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **called},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        assert roll_call.pid("0") == child.pid
    while roll_call.is_there("0"):
        time.sleep(0.001)
    assert roll_call.pid("0") is None
    # This process was not started as a worker. So is a process of the host that has a container's number.
    link = answer(roll_call, "1")
    assert roll_call.is_there("1") and roll_call.pid("1") is None
    gone(link, roll_call, "1")


def test_a_worker_that_is_let_go_hears_it(roll_call):
    link, other = answer(roll_call, "0"), answer(roll_call, "1")
    roll_call.let_go("0")
    link.wait_for_the_end()
    link.close()
    roll_call.let_go("absent")
    assert roll_call.is_there("1")
    gone(other, roll_call, "1")


def test_a_worker_hears_that_its_launcher_has_ended():
    made = RollCall(must_join=True, connect_s=7.0, on_error=lambda error: None)
    link = answer(made, "0")
    heard = threading.Thread(target=link.wait_for_the_end)
    heard.start()
    made.close()
    heard.join(20.0)
    assert not heard.is_alive()
    link.report(0)  # it fails, and says nothing: the worker is about to end
    with pytest.raises(ConnectionError, match="cannot be reached at 127.0.0.1"):
        answer(made, "1")
    link.close()


codes = st.sampled_from([0, 143, 75, 1, 2, 9, -9, -15, -11])
runs = st.lists(st.sampled_from([None, 0, 143, 75, 1]), max_size=3)
own = os.getpid()


@given(codes, runs, st.booleans(), st.none() | st.integers(0, 9))
def test_a_code_is_at_least_as_bad_as_the_last_run(code, reports, is_wrapped, last_step):
    made = RollCall(must_join=True, connect_s=7.0, on_error=lambda error: None)
    try:
        link = answer(made, "0")
        for report in reports:
            link.report(report)
        gone(link, made, "0")
        found, why = made.true_code("0", COMMAND, own - is_wrapped, code, last_step)
    finally:
        made.close()
    facts = ProcessFacts(
        code=code,
        has_begun=bool(reports),
        run_code=reports[-1] if reports else None,
        last_step=last_step,
        is_wrapped=is_wrapped,
    )
    assert found == process_exit(facts).code
    assert bool(why) == bool(process_exit(facts).why)
    assert not why or "env X=1 python train.py" in why


@given(codes, st.booleans())
def test_a_worker_that_never_joined_is_not_done(code, must_join):
    made = RollCall(must_join=must_join, connect_s=7.0, on_error=lambda error: None)
    try:
        found, why = made.true_code("0", COMMAND, own, code)
    finally:
        made.close()
    assert found == (1 if code == 0 and must_join else code)
    assert bool(why) == (found != code)
    assert not why or ("had joined" in why and "jaxgoodput.initialize()" in why)
