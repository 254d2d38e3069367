"""Exit codes: what each one means, and which one is true for what a run, a process or a job has done.

Every part of a job knows something else. A run knows which of its steps is saved, a launcher how a process
ended and what its run reported, a coordinator whether a process was left that could save. `run_exit`,
`process_exit` and `exit_code` turn that into an exit code and a sentence. No other place decides whether
something counts as saved.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# 75 is EX_TEMPFAIL of <sysexits.h>; 143 is also what a shell reports for a process that SIGTERM ended.
DONE, FAILED, USAGE, UNSAVED, INTERRUPTED, SAVED = 0, 1, 2, 75, 130, 143

MEANINGS = {
    DONE: "done",
    SAVED: "saved and wants a restart (SIGTERM, SIGINT, SIGHUP)",
    UNSAVED: "the last step could not be saved",
    FAILED: "a bug",
    USAGE: "wrong usage",
}


@dataclass(frozen=True)
class Exit:
    """A true exit code, and a sentence without a full stop on what was done."""

    code: int
    why: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run that ends, in its own process or in the coordinator of its job."""

    stopped_by: str | None = None
    """What asked it to stop, such as a signal; None: it is complete."""
    last_step: int = 0
    """The last step that is done and may be lost; 0 if there is none."""
    may_be_further: bool = False
    """Whether more steps may be done than this: others hear of a process's steps about once a second."""
    saved_step: int | None = 0
    """The step of the newest checkpoint; 0 if there is none, None if that is not known here."""
    unsaved_why: str = "no process was left to save it"
    """Why the last step is not saved, if it is not."""


def run_exit(facts: RunFacts) -> Exit:
    """Return how a run ends: done or stopped, and whether its last step is saved.

    >>> run_exit(RunFacts(stopped_by="SIGTERM", last_step=7, saved_step=7))
    Exit(code=143, why='step 7 is saved')
    >>> run_exit(RunFacts(last_step=7, saved_step=4, unsaved_why="the disk is full"))
    Exit(code=75, why='step 7 could not be saved (the disk is full); step 4 is safe')
    """
    if not facts.may_be_further and facts.last_step <= (facts.saved_step or 0):
        code = DONE if facts.stopped_by is None else SAVED
        if facts.saved_step:
            return Exit(code, f"step {facts.saved_step} is saved")
        return Exit(code, "no step was done, so there is nothing to save")
    safe = {None: "a restart resumes from the last checkpoint", 0: "no step is safe"}.get(
        facts.saved_step, f"step {facts.saved_step} is safe"
    )
    what = f"step {facts.last_step} could not be saved"
    if facts.may_be_further:
        which = (
            f"step {facts.last_step} and what came after it" if facts.last_step else "what was done"
        )
        what = f"{which} may not be saved"
    return Exit(UNSAVED, f"{what} ({facts.unsaved_why}); {safe}")


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """How a process has ended, and what its launcher knows of the last run in it."""

    code: int
    """As the operating system tells it; -n means killed by signal n."""
    has_begun: bool = False
    """Whether a run has begun in it."""
    run_code: int | None = None
    """The exit code that its last run has reported; None if that run had not ended."""
    last_step: int | None = None
    """The last step that the run has reported; None if it has not begun to train."""
    is_wrapped: bool = False
    """Whether the run was in another process, which this one had started."""


def process_exit(facts: ProcessFacts) -> Exit:
    """Return the true exit code of a process, and the reason if it is not the process's own.

    A process that fails has the last word. One that ends well, or is killed, cannot hide how its run ended:

    * A run that was cut off is not done. If the process was ended by SIGTERM, which shells report as 143, or
      ended with 143 itself, that means "saved" only if the run had not begun to train.
    * If a signal ended the process after its run was over, such as another SIGTERM or the SIGKILL after the
      grace period, what the run saved or did not save stays true.
    * In a wrapper, the code of the run counts. Without one, the script knows how its run ended, and chooses.

    >>> process_exit(ProcessFacts(code=-15, has_begun=True, last_step=7)).code
    75
    """
    code, run_code = facts.code, facts.run_code
    ends_well = _of_shell(code) in (DONE, SAVED)
    if not facts.has_begun:
        return Exit(code, "")
    if run_code is None:
        if code == DONE:
            return Exit(FAILED, "was ended from outside before it was over")
        # Heartbeats may not pass through a wrapper.
        may_lose = facts.last_step is not None or facts.is_wrapped
        if not (ends_well and may_lose):
            return Exit(code, "")
        at = "" if facts.last_step is None else f" after step {facts.last_step}"
        return Exit(UNSAVED, f"was ended from outside{at}, which may not be saved")
    was_killed = code < 0 and run_code in (SAVED, UNSAVED)
    is_hidden = facts.is_wrapped and ends_well and run_code not in (DONE, _of_shell(code))
    if was_killed or is_hidden:
        return Exit(run_code, f"ended with code {run_code}")
    return Exit(code, "")


def exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of a set of processes, whose codes are given in the order of their ends.

    0 if all are done, 143 if all are done or saved, otherwise the first other code. -n means signal n.
    Give it true codes (`process_exit`): -15 counts as 143, because nothing was lost with such a process.

    >>> exit_code([0, 143, 0]), exit_code([143, -9, 1])
    (143, 137)
    """
    shown = [_of_shell(code) for code in codes]
    bad = [code for code in shown if code not in (DONE, SAVED)]
    return bad[0] if bad else max(shown, default=DONE)


def _of_shell(code: int) -> int:
    """Return the code as a shell reports it, to which a signal is 128 and its number."""
    return 128 - code if code < 0 else code
