"""The planner: a process that follows the journal and makes plans, so that no request waits for a policy.

    python -m jaxgoodput.cluster.service.planning.follow FOLDER OPTIONS

OPTIONS is the JSON of a `wire.PlanOptions`. The service writes one JSON line for each look or question, and
reads one line as the answer, {} if there is no new plan. The process ends with its input.
"""

import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from jaxgoodput._fields.serial import decode, encode, parse
from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.scheduler.reconcile import PlanError
from jaxgoodput.cluster.service.planning import decide
from jaxgoodput.cluster.service.record import events
from jaxgoodput.cluster.service.record.commands import CommandRefused
from jaxgoodput.cluster.service.record.journal import JournalFollower
from jaxgoodput.cluster.service.record.state import State, step
from jaxgoodput.cluster.service.wire import PlanOptions, Submission

NICE = 5  # the service itself, which answers requests, goes first
GIVEN_UP_S = 30.0  # a plan that is not in the journal after this time was not adopted
# Events that always call for another plan.
ALWAYS = (
    *(events.JobSubmitted, events.JobCancelled, events.CoordinatorEnded),
    *(events.NodeChanged, events.NodeJoined, events.NodeReported, events.DevicesReleased),
)


class Planner:
    """Follows the journal in a folder, and plans when something has happened or a plan is due."""

    def __init__(self, folder: pathlib.Path, rules: decide.PlanRules):
        self._journal = JournalFollower(folder)
        self._rules = rules
        self.state = State()
        self._is_wanted = True
        self._retry_s = 0.0  # earliest time of the next plan after a policy has failed
        self._in_flight_s: float | None = None  # time of a plan that is not in the journal yet

    def follow(self) -> None:
        """Bring the state up to date with the events that the journal received since the last call."""
        for entry in self._journal.read(self.state.seq):
            before, self.state = self.state, step(self.state, entry)
            self._is_wanted |= needs_plan(before, entry.event)
            if (
                isinstance(entry.event, events.PlanMade)
                and entry.event.solved_s == self._in_flight_s
            ):
                self._in_flight_s = None

    def look(self, now_s: float) -> dict[str, Any]:
        """Return a plan if one is due, as its events and the generations that it assumes; else {}."""
        self.follow()
        state, rules = self.state, self._rules
        if not self._is_due(now_s):
            return {}
        try:
            found = decide.plan(state, now_s, rules)
        except (PlanError, ValueError, ArithmeticError) as error:
            self._retry_s = now_s + rules.min_gap_s
            return {"failed": f"{type(error).__name__}: {error}"}
        self._is_wanted = False
        if found is None:
            return {}
        planned, reasoned = decide.as_events(state, found, now_s)
        self._in_flight_s = now_s
        return {
            "planned": encode(planned),
            "base": {id_: state.jobs[id_].allocation.generation for id_ in planned.changes},
            "reasoned": encode(reasoned),
        }

    def _is_due(self, now_s: float) -> bool:
        if self._in_flight_s is not None and now_s < self._in_flight_s + GIVEN_UP_S:
            return False
        last_s, gap_s = self.state.solved_s, self._rules.min_gap_s
        due_s = max(0.0 if last_s is None else last_s + gap_s, self._retry_s)
        return now_s >= (due_s if self._is_wanted else max(due_s, self.state.next_solve_s))

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question of a user, "explain" or "what-if", from the present state."""
        self.follow()
        now_s = question["now_s"]
        try:
            if question["do"] == "explain":
                said: Any = decide.explained(self.state, question["job"], now_s, self._rules)
            else:
                wanted = decode(question["submission"], Submission, "submission")
                said = decide.what_if(self.state, wanted, now_s, self._rules)
        except CommandRefused as error:
            return {"status": error.status, "error": str(error)}
        except (PlanError, ValueError, ArithmeticError) as error:
            return {"status": 409, "error": str(error)}
        return {"answer": encode(said)}


def needs_plan(state: State, event: events.Event) -> bool:
    """Whether an event calls for another plan; `state` is the state before it."""
    match event:
        case (
            events.JobSubmitted()
            | events.JobCancelled()
            | events.NodeChanged()
            | events.NodeJoined()
            | events.NodeReported()
            | events.CoordinatorEnded()
            | events.DevicesReleased()
        ):
            return True
        case events.HintsReceived(job=job, hints=hints):
            last = state.jobs[job].hints
            return (
                last is None
                or last.largest != hints.largest
                or len(last.layouts) != len(hints.layouts)
                or bool(last.grad_sqr) != bool(hints.grad_sqr)
            )
    return False


def main(arguments: list[str], lines: TextIO, out: TextIO) -> int:
    """Read a JSON question from each line, and print its answer, until the input ends; return exit code 0."""
    folder, text = arguments
    options = decode(parse(text), PlanOptions, "options")
    os.nice(NICE)
    rules = decide.PlanRules(named=catalogue()[options.policy], **vars(options))
    planner = Planner(pathlib.Path(folder), rules)
    for line in lines:
        asked = json.loads(line)
        if asked["do"] == "look":
            said = planner.look(asked["now_s"])
        else:
            said = {"id": asked["id"], **planner.answer(asked)}
        print(json.dumps(said), file=out, flush=True)
    return 0


def answers_apart() -> TextIO:
    """Return the standard output for answers alone; all else that the process prints goes to standard error.

    The solver, which is written in C++, sometimes prints a line of its own.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], sys.stdin, answers_apart()))
