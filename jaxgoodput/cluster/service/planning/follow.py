"""Makes the plans: a process that follows the journal, so that no request ever waits for a policy.

    python -m jaxgoodput.cluster.service.planning.follow FOLDER POLICY ...

The service writes it a line for every look or question and reads the line that it answers, {} where there is
no new plan; it ends with its input.
"""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from jaxgoodput._serial import decode, encode, parse
from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.scheduler.reconcile import PlanError
from jaxgoodput.cluster.service.planning import decide
from jaxgoodput.cluster.service.record.commands import CommandRefused
from jaxgoodput.cluster.service.record.events import (
    CoordinatorEnded,
    Event,
    HintsReceived,
    JobCancelled,
    JobSubmitted,
    NodeChanged,
    NodeJoined,
    PlanMade,
)
from jaxgoodput.cluster.service.record.journal import Follower
from jaxgoodput.cluster.service.record.state import State, step
from jaxgoodput.cluster.service.wire import Sharing, Submission

NICE = 5  # whoever waits for an answer comes first
GIVEN_UP_S = 30.0  # a plan that has not come into the journal by then was not taken


class Planner:
    """Follows the journal in a folder, and plans when something has happened or it is time."""

    def __init__(self, folder: pathlib.Path, rules: decide.Rules):
        self._journal = Follower(folder)
        self._rules = rules
        self.state = State()
        self._is_wanted = True
        self._again_s = 0.0  # not before, after a policy that failed
        self._waits_for: float | None = (
            None  # when the plan was made that is not in the journal yet
        )

    def follow(self) -> None:
        """Read what has been written since."""
        for stamped in self._journal.read(self.state.seq):
            before, self.state = self.state, step(self.state, stamped)
            self._is_wanted |= asks(before, stamped.event)
            if isinstance(stamped.event, PlanMade) and stamped.event.solved_s == self._waits_for:
                self._waits_for = None

    def look(self, now_s: float) -> dict[str, Any] | None:
        """A plan where one is due, as what is to be written, and on what it rests."""
        self.follow()
        state, rules = self.state, self._rules
        if self._waits_for is not None and now_s < self._waits_for + GIVEN_UP_S:
            return None
        soonest_s = 0.0 if state.solved_s is None else state.solved_s + rules.min_gap_s
        if now_s < (soonest_s if self._is_wanted else max(state.next_solve_s, soonest_s)):
            return None
        if now_s < self._again_s:
            return None
        try:
            found = decide.plan(state, now_s, rules)
        except (PlanError, ValueError, ArithmeticError) as error:  # nothing changes, and it is said
            self._again_s = now_s + rules.min_gap_s
            return {"failed": f"{type(error).__name__}: {error}"}
        self._is_wanted = False
        if found is None:
            return None
        planned, reasoned = decide.as_events(state, found, now_s)
        self._waits_for = now_s
        return {
            "planned": encode(planned),
            "base": {id_: state.jobs[id_].allocation.generation for id_ in planned.changes},
            "reasoned": encode(reasoned),
        }

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Why, or what if."""
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


def asks(state: State, event: Event) -> bool:
    """Whether what happened asks for another plan, by the state before it."""
    match event:
        case JobSubmitted() | JobCancelled() | NodeChanged() | NodeJoined() | CoordinatorEnded():
            return True
        case HintsReceived(job=job, hints=hints):
            last = state.jobs[job].hints
            return (
                last is None
                or last.largest != hints.largest
                or len(last.layouts) != len(hints.layouts)
                or bool(last.grad_sqr) != bool(hints.grad_sqr)
            )
    return False


def main(arguments: list[str], lines: TextIO, out: TextIO) -> int:
    """Answer line by line until there is no more."""
    parser = argparse.ArgumentParser(prog="jaxgoodput.cluster.service.planning.follow")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("policy")
    parser.add_argument("sharing", help="JSON of a Sharing")
    parser.add_argument("min_gap_s", type=float)
    parser.add_argument("max_gap_s", type=float)
    parser.add_argument("restart_s", type=float)
    options = parser.parse_args(arguments)
    os.nice(NICE)
    rules = decide.Rules(
        named=catalogue()[options.policy],
        sharing=decode(parse(options.sharing), Sharing, "sharing"),
        min_gap_s=options.min_gap_s,
        max_gap_s=options.max_gap_s,
        restart_s=options.restart_s,
    )
    planner = Planner(options.folder, rules)
    for line in lines:
        asked = json.loads(line)
        if asked["do"] == "look":
            found = planner.look(asked["now_s"]) or {}
            print(json.dumps(found), file=out, flush=True)
        else:
            said = {"id": asked["id"], **planner.answer(asked)}
            print(json.dumps(said), file=out, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], sys.stdin, sys.stdout))
