"""A set of processes comes to one common end: whatever happens, nobody is left."""

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import gone, signal_soon

from jaxgoodput._exits import DONE, SAVED, exit_code
from jaxgoodput.clock import FakeClock, SystemClock
from jaxgoodput.launcher.supervise import (
    LONGEST_LINE,
    Child,
    ProcessesEnd,
    signals_to,
    supervise,
    told_within,
)

pytestmark = pytest.mark.multihost


def run(*scripts, grace_s=20.0, crash_grace_s=0.2, prefix_output=True, still_s=600.0):
    """Supervise one shell per script; each knows its RANK."""
    return supervise(
        [["sh", "-c", script] for script in scripts],
        [{"PATH": os.environ["PATH"], "RANK": str(rank)} for rank in range(len(scripts))],
        prefix_output=prefix_output,
        grace_s=grace_s,
        crash_grace_s=crash_grace_s,
        clock=SystemClock(),
        still_s=still_s,
    )


codes = st.integers(-31, 255).filter(lambda code: code != 0)


@given(st.lists(st.sampled_from([0, 143, -15]), min_size=1))
def test_a_set_that_is_done_or_saved_is_saved_if_any_is(ends):
    assert exit_code(ends) == (SAVED if set(ends) - {0} else DONE)


@given(st.lists(st.sampled_from([0, 143])), codes.filter(lambda c: c not in (143, -15)), st.data())
def test_the_first_failure_decides(before, first, data):
    after = data.draw(st.lists(codes))
    assert exit_code([*before, first, *after]) == (first if first > 0 else 128 - first)


@pytest.mark.parametrize(
    "ends, code",
    [((0, 0), 0), ((0, 143), 143), ((143, 143), 143), ((0, 5), 5), ((143, 1), 1), ((3, 3), 3)],
)
def test_exit_codes_are_gathered(ends, code):
    assert run(*(f"exit {end}" for end in ends)) == ProcessesEnd(code, told=False)


def test_every_line_carries_its_rank(capfdbinary):
    script = "echo out$RANK; echo err$RANK >&2; printf '\\303\\251 no newline'"
    assert run(script, script).code == 0
    out, err = capfdbinary.readouterr()
    for rank in (b"0", b"1"):
        assert b"[%s] out%s\n" % (rank, rank) in out
        assert b"[%s] \xc3\xa9 no newline\n" % rank in out
        assert b"[%s] err%s\n" % (rank, rank) in err


def test_a_line_without_an_end_is_passed_on_in_parts(capfdbinary):
    num_letters = 2 * LONGEST_LINE + 7
    assert run(f"head -c {num_letters} /dev/zero | tr '\\0' x; echo; echo after").code == 0
    *parts, after = capfdbinary.readouterr().out.splitlines()
    assert [len(part.removeprefix(b"[0] ")) for part in parts] == [LONGEST_LINE, LONGEST_LINE, 7]
    assert after == b"[0] after"


def test_without_prefixes_output_passes_through(capfd):
    assert run("echo plain", prefix_output=False).code == 0
    assert capfd.readouterr().out == "plain\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_all_once(signum, tmp_path):
    name = signum.name.removeprefix("SIG")
    script = f"""
        trap 'echo got >> {tmp_path}/$RANK' {name}
        : > {tmp_path}/ready$RANK
        [ $RANK = 0 ] && while [ ! -e {tmp_path}/ready1 ]; do sleep 0.01; done && : > {tmp_path}/all
        while [ ! -e {tmp_path}/$RANK ]; do sleep 0.05; done
        exit 143
    """
    signal_soon(signum, tmp_path / "all")
    assert run(script, script) == ProcessesEnd(143, told=True)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["got\n", "got\n"]


def test_who_does_not_leave_after_a_signal_is_killed(tmp_path):
    stubborn = f"trap '' TERM; echo $$ > {tmp_path}/pid; : > {tmp_path}/up; sleep 600; sleep 600"
    signal_soon(signal.SIGTERM, tmp_path / "up")
    assert run(stubborn, grace_s=0.3) == ProcessesEnd(137, told=True)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_second_interrupt_kills(tmp_path):
    script = f"trap ': > {tmp_path}/first' INT; : > {tmp_path}/up; while :; do sleep 0.05; done"
    signal_soon(signal.SIGINT, tmp_path / "up")
    signal_soon(signal.SIGINT, tmp_path / "first")
    assert run(script, grace_s=600.0) == ProcessesEnd(137, told=True)


def test_a_first_interrupt_after_another_signal_does_not(tmp_path):
    script = f"""
        trap ': > {tmp_path}/first' TERM
        trap ': > {tmp_path}/second' INT
        : > {tmp_path}/up
        while [ ! -e {tmp_path}/first ]; do sleep 0.05; done
        sleep 1
        exit 143
    """
    signal_soon(signal.SIGTERM, tmp_path / "up")
    signal_soon(signal.SIGINT, tmp_path / "first")
    assert run(script, grace_s=600.0) == ProcessesEnd(143, told=True)
    assert not (tmp_path / "second").exists(), "a signal to stop is passed on once"


def test_the_handlers_from_before_are_put_back():
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(s) for s in kinds]
    run("true")
    assert [signal.getsignal(s) for s in kinds] == before


def test_what_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signal_soon(signal.SIGHUP, tmp_path / "up")
        assert run(f": > {tmp_path}/up; sleep 1") == ProcessesEnd(0, told=False)
    finally:
        signal.signal(signal.SIGHUP, before)


# A shell that tells how far it has come, as a trainer's process does.
BEAT = "beat() { echo $1 > /proc/self/fd/${JAXGOODPUT_BEATS%%:*}; }; "


def test_how_far_a_job_came_is_known_at_its_end():
    end = run(BEAT + "beat 5; beat 9; exit 3", BEAT + "beat 5; beat 8; sleep 600")
    assert end == ProcessesEnd(3, told=False, began=5, step=9)


def test_a_process_that_stands_still_is_killed_but_not_one_that_trains_no_more():
    assert run(BEAT + "beat 5; sleep 600", still_s=0.5).code == 137
    assert run(BEAT + "beat 5; beat; sleep 2", still_s=0.5).code == 0


def test_the_end_says_who_failed_first_and_shows_the_last_lines_of_all(capfd):
    first = BEAT + "beat 7; echo all well; echo the reason >&2; exit 4"
    then = "trap 'echo a consequence; exit 5' TERM; while :; do sleep 0.05; done"
    assert run(then, first).code == 4
    told = capfd.readouterr().err.split("still running: 0")[1]
    order = ["process 1 failed first: exit code 4", "step 7 done", "[1] the reason"]
    order += ["process 0 failed then: exit code 5", "[0] a consequence"]
    places = [told.index(words) for words in order]
    assert places == sorted(places), told


def test_a_signal_ends_a_pause(tmp_path):
    ready, before = tmp_path / "ready", signal.getsignal(signal.SIGTERM)

    def touch_when_handled():  # earlier, the signal would end this process
        while signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.01)
        ready.touch()

    threading.Thread(target=touch_when_handled, daemon=True).start()
    signal_soon(signal.SIGTERM, ready)
    events = queue.SimpleQueue()
    with signals_to(events):
        assert told_within(600.0, events)
        assert not told_within(0.01, events)


@pytest.mark.parametrize("deaf", ["", "trap '' TERM;"])
def test_a_crash_brings_the_others_down_with_its_code(deaf, tmp_path):
    crash = f"while [ ! -e {tmp_path}/pid ]; do sleep 0.01; done; exit 7"
    other = f"{deaf} echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; sleep 600"
    assert run(other, crash) == ProcessesEnd(7, told=False)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_killed_process_is_a_failure_with_its_signal():
    assert run("kill -KILL $$", "sleep 600") == ProcessesEnd(137, told=False)


def test_one_that_saved_and_left_takes_the_others_with_it_after_the_grace():
    assert run("exit 143", "sleep 600", grace_s=0.3) == ProcessesEnd(143, told=False)


def test_what_a_process_leaves_behind_goes_with_it(tmp_path):
    assert run(f"sleep 600 & echo $! > {tmp_path}/pid").code == 0
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_cannot_start_leaves_nobody(tmp_path):
    started = functools.partial(
        supervise,
        [["sleep", "600"], [str(tmp_path / "absent")]],
        [{"PATH": os.environ["PATH"]}] * 2,
        prefix_output=True,
        grace_s=1.0,
        crash_grace_s=1.0,
        clock=SystemClock(),
    )
    children = set(_children())
    with pytest.raises(FileNotFoundError):
        started()
    assert all(gone(pid) for pid in set(_children()) - children)


def _children():
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def test_a_reader_that_goes_away_does_not_stop_a_worker(tmp_path):
    # 300 kB fill any pipe: a launcher that stopped reading would hang here.
    body = f"""
import os, sys
from jaxgoodput.clock import FakeClock, SystemClock
from jaxgoodput.launcher.supervise import supervise
os.close(1); os.close(2)
r, w = os.pipe(); assert w == 2 or os.dup2(w, 1) == 1
os.dup2(w, 1); os.dup2(w, 2); os.close(r)
end = supervise([["sh", "-c", "yes | head -c 300000"]], [dict(os.environ)],
    prefix_output=True, grace_s=60, crash_grace_s=1, clock=SystemClock())
open({str(tmp_path / "code")!r}, "w").write(str(end.code))
os._exit(0)
"""
    # subprocess rather than os.spawnv: JAX may run in this process, and forks under it warn.
    assert subprocess.run([sys.executable, "-c", body], timeout=60).returncode == 0
    assert (tmp_path / "code").read_text() == "0"


def test_a_child_that_is_stopped_is_told_from_one_that_is_let_on_now_and_then():
    clock, events = FakeClock(), queue.SimpleQueue()
    lifeline, held = os.pipe()
    script = "import time\nwhile True: time.sleep(0.01)"
    environ = {"PATH": os.environ["PATH"]}
    child = Child(0, [sys.executable, "-c", script], environ, lifeline, False, events, clock)
    try:

        def looked(seconds):
            clock.advance(seconds)
            return child.stopped_s()

        def until(holds):
            deadline = time.monotonic() + 20
            while not holds():
                assert time.monotonic() < deadline
                time.sleep(0.01)

        assert looked(5.0) == 0.0
        child.send(signal.SIGSTOP)
        until(lambda: child.stopped_s() == 0.0 and looked(1.0) >= 1.0)
        before = child.stopped_s()
        assert looked(3.0) == before + 3.0
        child.send(signal.SIGCONT)
        time.sleep(2.0)  # it is to run for a moment, also on a machine that is busy
        child.send(signal.SIGSTOP)
        until(lambda: looked(0.0) < before)
    finally:
        child.finish()
        os.close(lifeline)
        os.close(held)
