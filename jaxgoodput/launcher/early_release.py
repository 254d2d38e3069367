"""Rules of a job's state machine for hosts that leave early: near its end, a run may not need all of them.

`release_plan` decides. The act is the one of any host that leaves as planned: its processes take part in no
further generation. In addition its agent is told to end with code 0, so that its devices are free. A host
that comes afterwards is told so, too, unless others have been lost since.
"""

import dataclasses

from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic.fitness import HostDecision
from jaxgoodput.launcher.elastic.state import Rendezvous, Stage, Turn
from jaxgoodput.launcher.release_plan import ReleasePlan, best_release


def has_enough(state: Rendezvous) -> bool:
    """Whether hosts were released, and the processes that were to stay are all still here."""
    living = sum(not m.leaves and m.killed_s is None for m in state.members.values())
    return 0 < state.release.num_enough <= living


def take_back(turn: Turn) -> None:
    """Let the last release count no more: the run has more to do than it had then, and needs help again."""
    if turn.state.release.num_enough:
        turn.change(release=dataclasses.replace(turn.state.release, num_enough=0))


def turn_away(turn: Turn, host: str) -> None:
    """Tell a host that the job does not need it any more."""
    turn.change(leaving=turn.state.leaving | {host})
    turn.act(ev.LetGo(host, turn.state.release.why))


def release_hosts(turn: Turn) -> None:
    """Let hosts go that the rest of the run does not need, as soon as new speeds show it."""
    _measure_pauses(turn)
    if not _take_paces(turn):
        return
    if _has_gone_back(turn.state):
        take_back(turn)
    state, record = turn.state, turn.state.release
    here = {name: state.members[name].host for name in state.present_ranks}
    if not _may_release(state) or record.began_s is None:
        return
    rest = record.rest_of_run(here, turn.now_s - record.began_s)
    if rest is None:
        return
    share = state.members[state.present_ranks[0]].share
    found = best_release(
        rest,
        record.regroup_s,
        is_usable=lambda count: state.limits.usable(count, share) == count,
        kept=_beside_coordinator(state, set(here.values())),
    )
    if found is not None:
        _let_go(turn, found)


def _may_release(state: Rendezvous) -> bool:
    """Whether the generation trains undisturbed, and hosts may leave before the end at all."""
    # Processes of a group wait for each other, so that none has a speed of its own.
    if state.limits.group_size > 1 or state.limits.keep_hosts or state.is_told:
        return False
    names = state.ranks
    is_whole = len(state.present_ranks) == len(names) > 1
    return is_whole and not any(
        state.members[name].leaves or state.members[name].killed_s is not None for name in names
    )


def _has_gone_back(state: Rendezvous) -> bool:
    """Whether more than a step more is left of the run than at the last release."""
    record = state.release
    newest = [record.paces[name][-1] for name in state.present_ranks if name in record.paces]
    return any(pace.left is None or pace.left > record.samples_left + pace.whole for pace in newest)


def _beside_coordinator(state: Rendezvous, hosts: set[str]) -> set[str]:
    """Return the hosts on the machine of the coordinator, which stays anyway; none if all are there."""
    beside = {host for host in hosts if host in state.hosts and state.hosts[host].is_beside}
    return set() if beside == hosts else beside


def _let_go(turn: Turn, found: ReleasePlan) -> None:
    state = turn.state
    staying = {state.members[name].host for name in state.ranks} - set(found.hosts)
    # Processes that wait as spares, or still start, are not needed either. Nor are hosts that are left out.
    spare = {m.host for m in state.members.values() if not m.leaves}
    spare |= {host for host, one in state.hosts.items() if one.is_here and one.until_s is not None}
    gone = (*found.hosts, *sorted(spare - staying - set(found.hosts)))
    record = dataclasses.replace(
        state.release,
        delayed_s=state.release.delayed_s + max(found.later_s, 0.0),
        num_enough=found.num_processes,
        samples_left=found.samples_left,
        why=found.why,
    )
    turn.change(release=record)
    for host in gone:
        turn.dismiss(host)
        turn_away(turn, host)
        turn.announce(
            HostDecision(
                host=host,
                decision="released",
                why=found.why,
                numbers={
                    "samples_left": float(found.samples_left),
                    "later_s": found.later_s,
                    "saved_host_s": found.saved_host_s,
                },
            )
        )


# -- what is measured for it ---------------------------------------------------------------------------


def _take_paces(turn: Turn) -> bool:
    """Take in the speeds that processes have reported since; whether there is any new one."""
    state, record = turn.state, turn.state.release
    if state.stage is not Stage.TRAINING:
        if record.paces:
            turn.change(release=dataclasses.replace(record, paces={}))
        return False
    before = record
    for name in state.present_ranks:
        pace, known = state.members[name].pace, record.paces.get(name)
        # Each report is an object of its own, and stays with the process until all are compared.
        if pace is not None and (not known or known[-1] is not pace):
            record = record.with_pace(name, pace)
    if record is not before:
        turn.change(release=record)
    return record is not before


def _measure_pauses(turn: Turn) -> None:
    """Measure how long no process trains when the processes change, up to the end of the next step."""
    state, record = turn.state, turn.state.release
    if state.stage is Stage.TRAINING and record.began_s is None:
        record = dataclasses.replace(record, began_s=turn.now_s, paused_s=state.since_s)
    elif state.stage in (Stage.GATHERING, Stage.FORMING) and record.began_s is not None:
        if record.paused_s is None:
            record = dataclasses.replace(record, paused_s=state.since_s)
    elif state.stage is Stage.TRAINING and record.paused_s is not None:
        if state.moved_s > state.since_s:
            count, pause_s = len(state.ranks), state.moved_s - record.paused_s
            longest_s = max(record.pauses_s.get(count, 0.0), pause_s)
            record = dataclasses.replace(
                record, paused_s=None, pauses_s={**record.pauses_s, count: longest_s}
            )
    if record is not state.release:
        turn.change(release=record)
