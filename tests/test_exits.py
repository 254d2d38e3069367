"""An exit code says what was done: never saved what is not, nor lost what is saved."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput import cli
from jaxgoodput._exits import (
    DONE,
    FAILED,
    MEANINGS,
    SAVED,
    UNSAVED,
    USAGE,
    ProcessFacts,
    RunFacts,
    exit_code,
    process_exit,
    run_exit,
)

steps = st.integers(0, 5)
runs = st.builds(
    RunFacts,
    stopped_by=st.sampled_from([None, "SIGTERM", "hang"]),
    last_step=steps,
    may_be_further=st.booleans(),
    saved_step=st.none() | steps,
    unsaved_why=st.just("the disk is full"),
)
# As the operating system tells them, and as runs report them.
codes = st.sampled_from([0, 143, 75, 1, 2, 9, 130, -2, -9, -11, -15])
reports = st.sampled_from([None, 0, 143, 75, 1, 130])
ends = st.builds(
    ProcessFacts,
    code=codes,
    has_begun=st.just(True),
    run_code=reports,
    last_step=st.none() | steps,
    is_wrapped=st.booleans(),
)


@given(runs)
def test_a_run_is_done_or_saved_exactly_if_its_last_step_is_known_and_safe(facts):
    is_safe = facts.last_step <= (facts.saved_step or 0) and not facts.may_be_further
    end = run_exit(facts)
    assert end.code == (UNSAVED if not is_safe else SAVED if facts.stopped_by else DONE)


@given(runs)
def test_the_sentence_names_the_step_at_which_a_restart_begins(facts):
    end = run_exit(facts)
    if end.code == UNSAVED:
        sure = f"step {facts.last_step} could not be saved (the disk is full)"
        assert (sure in end.why) != facts.may_be_further
        assert ("may not be saved (the disk is full)" in end.why) == facts.may_be_further
        named = {None: "from the last checkpoint", 0: "no step is safe"}
        assert named.get(facts.saved_step, f"step {facts.saved_step} is safe") in end.why
    elif facts.saved_step:
        assert end.why == f"step {facts.saved_step} is saved"
    else:
        assert "no step was done" in end.why


@given(ends)
def test_a_process_does_not_hide_how_its_run_ended(facts):
    end = process_exit(facts)
    shown, kept = exit_code([end.code]), end.code == facts.code
    assert kept == (not end.why)
    if facts.run_code is None:
        assert shown != DONE, "a run that was cut off is not done"
        trains = facts.last_step is not None
        assert not (shown == SAVED and trains), "143 promises that the last step is saved"
    if facts.code < 0 and facts.run_code in (SAVED, UNSAVED):
        assert end.code == facts.run_code, "a signal undoes no save, and makes none"
    if facts.is_wrapped and shown == DONE:
        assert facts.run_code == DONE
    if exit_code([facts.code]) not in (DONE, SAVED) and facts.code > 0:
        assert kept, "a process that fails has the last word"


@given(ends)
def test_a_process_in_which_no_run_began_ends_as_it_says(facts):
    facts = dataclasses.replace(facts, has_begun=False)
    assert process_exit(facts).code == facts.code and not process_exit(facts).why


@given(st.lists(codes, max_size=4))
def test_a_set_of_processes_is_done_if_all_are_and_saved_if_the_others_are_done(found):
    shown = exit_code(found)
    each = {exit_code([code]) for code in found}
    assert (shown == DONE) == (each <= {DONE})
    assert (shown == SAVED) == (SAVED in each and each <= {DONE, SAVED})
    assert shown in each | {DONE}


def test_the_command_line_tells_every_code():
    text = cli.command_parser().format_help()
    words = " ".join(text.split())
    assert all(f"{code} {means}" in words for code, means in MEANINGS.items())
    assert {*MEANINGS} == {DONE, FAILED, USAGE, UNSAVED, SAVED}
