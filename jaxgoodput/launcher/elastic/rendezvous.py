"""Which processes train together, and when that changes: a pure state machine that the coordinator drives.

A *generation* is a set of processes that train together. It comes about in these steps:

1. Processes start (`ProcessJoined`) and wait with the state that they hold in memory (`Ready`).
2. The coordinator assigns ranks (`Form`). Each process fetches the newest state if it does not hold it, and
   reports `SetUp`.
3. All of them connect at once (`Go`) and train.

A generation ends when a process waits to be taken in, is to leave, or has died. All processes are then
asked to come back (`EndGeneration`) with their state in memory, and the next generation is formed from those
that do. A process that does not come back, or sends no heartbeat, is killed (`Kill`) and replaced
(`StartProcess`).

If one copy of the model spans several processes, they form a *group*: ranks 0 to k - 1, k to 2k - 1, and so
on. Each holds the part of the state that belongs to its *place* in the group, so a new process takes its part
from a process with the same place in another group.

`step(state, event, now_s)` returns the next state and the actions that follow. It is the whole machine: the
coordinator carries the actions out, and tests drive it through any order of events. Rules about hosts are
in `exclusion`.
"""

from collections.abc import Callable, Mapping, Sequence

from jaxgoodput._exits import DONE, FAILED, SAVED, UNSAVED, Exit, RunFacts, exit_code, run_exit
from jaxgoodput.launcher import early_release
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import exclusion, fitness
from jaxgoodput.launcher.elastic.fitness import ATTEMPTS_S, HostDecision
from jaxgoodput.launcher.elastic.state import KnownProcess, Rendezvous, Stage, Turn

MOST_FRUITLESS = 3
UNANSWERED = 3.0  # times `Limits.silent_s`, or what an attempt to reach others takes


def step(
    state: Rendezvous, event: ev.JobEvent, now_s: float
) -> tuple[Rendezvous, tuple[ev.Action, ...]]:
    """Return the state after an event, and the actions for the coordinator, in order."""
    turn = Turn(state, now_s)
    _HANDLERS[type(event)](turn, event)
    for rule in _RULES:
        rule(turn)
    return turn.state, tuple(turn.actions)


# -- one handler per event ---------------------------------------------------------------------------


def _join(turn: Turn, event: ev.ProcessJoined) -> None:
    state = turn.state
    if not state.members and state.generation == 0:
        turn.change(since_s=turn.now_s)  # the first generation waits from here
    leaves = event.host in state.leaving or state.is_left_out(event.host)
    member = KnownProcess(host=event.host, joined_s=turn.now_s, leaves=leaves)
    turn.put_process(event.member, member)


def _ready(turn: Turn, event: ev.Ready) -> None:
    member = turn.state.members.get(event.member)
    if member is None or event.generation != member.generation:
        return  # from a finished generation, or from a process that counts as gone
    turn.change_process(
        event.member,
        holds=event.holds,
        place=event.place,
        copies=event.copies,
        share=event.share,
        waits_since_s=turn.now_s,
        beat_s=None,
        is_set=False,
    )
    if event.member in turn.state.ranks:
        if turn.state.stage is Stage.TRAINING:
            exclusion.ask_for_links(
                turn, turn.state.present_ranks
            )  # it lost a peer, or a link to one
            if turn.state.moved_s < turn.state.since_s:
                _pause(turn)
            turn.gather()
        elif turn.state.stage is Stage.FORMING:
            _pause(turn)
            turn.cancel_forming(but=[event.member])  # it could not fetch the state


def _pause(turn: Turn) -> None:
    """Have the next generation wait, ever longer, as this one ends by itself without a step."""
    num_barren = turn.state.num_barren
    pause_s = min(2.0 ** min(num_barren, 16), turn.state.limits.cut_s)
    turn.change(num_barren=num_barren + 1, pause_until_s=turn.now_s + pause_s)


def _set_up(turn: Turn, event: ev.SetUp) -> None:
    state = turn.state
    is_current = state.stage is Stage.FORMING and event.generation == state.generation
    if is_current and event.member in state.present_ranks:
        turn.change_process(event.member, is_set=True)


def _beat(turn: Turn, event: ev.Beat) -> None:
    member = turn.state.members.get(event.member)
    if member is None or event.generation != member.generation or member.killed_s is not None:
        return
    turn.change(furthest=max(turn.state.furthest, event.step))
    if member.step is not None and event.step > member.step:
        turn.change(moved_s=turn.now_s, num_tried=0, num_barren=0)
    turn.change_process(
        event.member,
        beat_s=turn.now_s,
        step=event.step,
        device_s=event.device_s,
        is_stuck=event.is_stuck,
        others_s=event.others_s,
        pace=event.pace or member.pace,
    )


def _done(turn: Turn, event: ev.ProcessDone) -> None:
    if event.member in turn.state.ranks and turn.state.stage is not Stage.FORMING:
        turn.change(is_done=True)
        turn.end_run()


def _exited(turn: Turn, event: ev.ProcessExited) -> None:
    members = dict(turn.state.members)
    member = members.pop(event.member, None)
    if member is None:
        return
    turn.change(members=members)
    if turn.state.stage is Stage.OVER:
        _exited_after_the_end(turn, member, event)
    elif event.code in (DONE, SAVED) and not member.leaves:
        # It ended by itself without saying so: its script trains no further, or was told to stop.
        if event.member in turn.state.ranks or turn.state.generation == 0:
            turn.end_run()
            # If it was told to stop, all stop: the others hold the state that is to be saved.
            is_told = turn.state.is_told or event.code == SAVED
            turn.change(is_done=event.code == DONE, is_told=is_told)
            _exited_after_the_end(turn, member, event)
    else:
        _exited_while_others_go_on(turn, member, event)


def _exited_after_the_end(turn: Turn, member: KnownProcess, event: ev.ProcessExited) -> None:
    state = turn.state
    took_part = event.member in state.ranks
    # A process that was killed while it was still starting was not needed any more.
    code = event.code if took_part or member.killed_s is None else DONE
    # One that was to leave has nothing that the complete run lacks.
    if event.code == -9 and member.leaves and state.is_done:
        code = DONE
    # One that had nothing to save says 143, too, which says nothing of the state that others had.
    had_state = event.member in state.savers or member.step is not None
    if exit_code([code]) == SAVED and not had_state:
        code = DONE
    turn.change(code=exit_code([state.code, code]))
    if state.is_told and took_part:
        # Processes that still prepare for training would wait for this one, although they hold the state
        # that is to be saved. So would the other processes of its group, even if they train already.
        in_groups = state.limits.group_size > 1
        stuck = [n for n in state.outstanding if in_groups or state.members[n].beat_s is None]
        if stuck:
            turn.act(ev.EndGeneration(tuple(stuck), state.generation))


def _exited_while_others_go_on(turn: Turn, member: KnownProcess, event: ev.ProcessExited) -> None:
    took_part = event.member in turn.state.ranks
    if not member.leaves:
        _replace(turn, member, event.code)
    if turn.state.stage is Stage.TRAINING and took_part:
        turn.gather()
    elif turn.state.stage is Stage.FORMING and (took_part or event.member in turn.state.holders):
        turn.cancel_forming()


def _replace(turn: Turn, member: KnownProcess, code: int) -> None:
    """Start another process in place of one that failed, unless failures repeat without progress.

    A killed process (-9: out of memory, by a user, or by the coordinator) does not count as such a failure,
    because its replacement may well succeed.
    """
    state = turn.state
    has_progressed = state.furthest > state.furthest_then
    turn.change(
        num_failures=state.num_failures + 1,
        num_fruitless=0 if has_progressed else state.num_fruitless + (code != -9),
        furthest_then=state.furthest,
        code=_code_of_failure(state, exit_code([code])),
    )
    num_fruitless = turn.state.num_fruitless
    if turn.state.num_failures <= state.limits.max_restarts and num_fruitless < MOST_FRUITLESS:
        turn.act(ev.StartProcess(member.host, 0.0 if has_progressed else 2.0**num_fruitless))


def _leave(turn: Turn, event: ev.Leave) -> None:
    if event.why and event.host not in turn.state.leaving:
        turn.announce(fitness.leave_of(event.host, event.why, event.within_s))
    turn.dismiss(event.host)
    turn.change(leaving=turn.state.leaving | {event.host})


def _stop(turn: Turn, event: ev.Stop) -> None:
    turn.change(is_told=True)
    turn.end_run()


_HANDLERS: Mapping[type[ev.JobEvent], Callable] = {
    ev.HostArrived: exclusion.arrive,
    ev.HostExamined: exclusion.examined,
    ev.AgentLost: exclusion.lose_agent,
    ev.ProcessJoined: _join,
    ev.Ready: _ready,
    ev.LinksTried: exclusion.links_tried,
    ev.SetUp: _set_up,
    ev.Beat: _beat,
    ev.ProcessDone: _done,
    ev.ProcessExited: _exited,
    ev.Leave: _leave,
    ev.Stop: _stop,
    ev.Tick: lambda turn, event: None,
}

# -- rules, applied in order after every event -------------------------------------------------------


def _give_up_killed(turn: Turn) -> None:
    """Treat a process that was killed as ended, if its agent has not confirmed the kill in time."""
    for name, member in turn.state.members.items():
        if member.killed_s is not None:
            if turn.now_s - member.killed_s >= turn.state.limits.farewell_s:
                _exited(turn, ev.ProcessExited(name, -9))


def _kill_slow_starters(turn: Turn) -> None:
    """Kill processes that take too long to get ready; less patiently after the run is over."""
    state, limits = turn.state, turn.state.limits
    since_s, limit_s, reason = 0.0, limits.starting_s, ""
    if state.stage is Stage.OVER:
        if not state.generation:
            return
        since_s, limit_s, reason = state.since_s, limits.silent_s, ", and the run is over"
    for name, member in state.members.items():
        is_starting = name not in state.ranks and member.holds is None and member.killed_s is None
        if is_starting and turn.now_s - max(member.joined_s, since_s) >= limit_s:
            _kill(turn, name, f"it did not get ready to train within {limit_s:g} s{reason}")


def _kill_silent(turn: Turn) -> None:
    """Kill processes that send no heartbeat for too long, or do not come back after their generation."""
    state, limits = turn.state, turn.state.limits
    if state.stage is Stage.OVER:
        return
    for name in state.outstanding:
        member = state.members[name]
        if member.killed_s is not None:
            continue
        if member.beat_s is not None and turn.now_s - member.beat_s >= limits.silent_s:
            _kill(turn, name, f"it sent no heartbeat for {limits.silent_s:g} s")
        elif state.stage is Stage.TRAINING:
            continue
        elif _hangs(turn, member):
            _kill(turn, name, "it still waits for processes that it did not reach")
        elif member.beat_s is None and turn.now_s - state.since_s >= limits.patience_s:
            # It may evaluate, save or compile, during which it sends no heartbeat.
            _kill(turn, name, f"it did not come back within {limits.patience_s:g} s")


def _hangs(turn: Turn, member: KnownProcess) -> bool:
    """Whether a process waits for others to which it has ended its connections, which ends no more by itself.

    Those of hosts that are left out go first, because that may free the others, who hold the state.
    """
    silent_s = turn.state.limits.silent_s
    limit_s = silent_s if member.leaves else 3 * silent_s
    return (
        member.hung_up_s is not None
        and member.others_s >= silent_s
        and turn.now_s - member.hung_up_s >= limit_s
    )


def _kill_frozen(turn: Turn) -> None:
    """Kill waiting processes that did not answer when they were asked to try to reach others."""
    limit_s = max(UNANSWERED * turn.state.limits.silent_s, UNANSWERED * ATTEMPTS_S)
    for name, member in turn.state.members.items():
        if member.waits and member.is_trying and turn.now_s - member.asked_s >= limit_s:
            _kill(turn, name, f"it waited, and did not answer the coordinator for {limit_s:g} s")


def _kill_stuck(turn: Turn) -> None:
    """Kill processes whose device computes nothing any more while others wait for their part of a step."""
    state, silent_s = turn.state, turn.state.limits.silent_s
    # Processes of a group wait for each other within their part, so that all would seem stuck.
    if state.stage not in (Stage.TRAINING, Stage.GATHERING) or state.limits.group_size > 1:
        return
    here = {n: state.members[n] for n in state.present_ranks if state.members[n].killed_s is None}
    stuck = [
        n
        for n in state.outstanding
        if n in here
        and here[n].device_s >= (silent_s if here[n].is_stuck else state.limits.patience_s)
    ]
    if any(one.waits or one.others_s >= silent_s for one in here.values()):
        for name in stuck:
            why = (
                f"its device has worked on its part of step {(here[name].step or 0) + 1} for "
                f"{here[name].device_s:.0f} s, for which others wait"
            )
            _kill(turn, name, why)
            decision = HostDecision(host=here[name].host, decision="stuck", why=why)
            turn.announce(decision, "stuck")


def _kill(turn: Turn, name: str, why: str) -> None:
    turn.change_process(name, killed_s=turn.now_s)
    turn.act(ev.Kill(name, why))


def _release(turn: Turn) -> None:
    """Release waiting processes that leave the job or, once the run is over, all that wait.

    If the job was told to stop and no process trains any more, also choose who saves.
    """
    state = turn.state
    free = tuple(name for name in state.members if _may_go(state, name))
    if state.is_told and not state.savers and not _has_training(state):
        free = _choose_savers(turn, free)
    for name in (*free, *turn.state.savers[:1]):
        if name in state.members:
            turn.change_process(name, is_released=True, leaves=True)
    if free:
        turn.act(ev.Release(free))


def _may_go(state: Rendezvous, name: str) -> bool:
    """Return whether a process may be released: needed neither to train nor for the state that it holds."""
    member = state.members[name]
    if not member.waits:
        return False
    if state.stage is Stage.OVER:
        return _may_go_at_the_end(state, name)
    if not member.leaves or (state.stage is Stage.FORMING and name in state.ranks):
        return False
    return state.stage is Stage.TRAINING or member.held_step <= _newest_staying(state, member.place)


def _may_go_at_the_end(state: Rendezvous, name: str) -> bool:
    if state.savers:  # the saving process may still fetch a part from it
        return name not in state.savers or state.savers[0] not in state.members
    # While others train, it is open which process will have to save.
    return not (state.is_told and state.members[name].held_step >= 0 and _has_training(state))


def _newest_staying(state: Rendezvous, place: int | None) -> int:
    """Return the newest step of which a process that stays holds part number `place`; -1 if none does."""
    held = (state.members[name] for name in state.waiting)
    return max((m.held_step for m in held if m.place == place), default=-1)


def _has_training(state: Rendezvous) -> bool:
    return any(
        not state.members[name].waits and not state.members[name].is_released
        for name in state.present_ranks
    )


def _choose_savers(turn: Turn, free: tuple[str, ...]) -> tuple[str, ...]:
    """Choose processes to save the newest complete state; return the others, which are not needed."""
    savers, held_step = turn.state.newest_held(free)
    if savers:
        turn.change(savers=savers)
        turn.act(ev.Save(savers, held_step))
    elif any(turn.state.members[name].held_step >= 0 for name in free):
        # Only parts of the state are left: a restart resumes from the last checkpoint.
        turn.change(code=max(turn.state.code, end_unsaved(turn.state).code))
    return tuple(name for name in free if name not in savers)


def _proceed(turn: Turn) -> None:
    """End the generation, form the next or begin it, whichever is due now."""
    match turn.state.stage:
        case Stage.TRAINING:
            _regroup_if_needed(turn)
        case Stage.GATHERING:
            _form_if_possible(turn)
        case Stage.FORMING:
            _go_if_set(turn)


def _regroup_if_needed(turn: Turn) -> None:
    state, limits = turn.state, turn.state.limits
    here = state.present_ranks
    joiners = [name for name in state.waiting if name not in state.ranks]
    share = state.members[joiners[0]].share if joiners else None
    more = limits.usable(len(here) + len(joiners), share)
    can_grow = more > len(here) and turn.now_s - state.since_s >= limits.admit_every_s
    if can_grow or any(state.members[name].leaves for name in here):
        turn.gather()


def _form_if_possible(turn: Turn) -> None:
    state, limits = turn.state, turn.state.limits
    waiting = _within_reach(state, turn.now_s)
    count = limits.usable(len(waiting), state.members[waiting[0]].share) if waiting else 0
    if state.outstanding or not count or turn.now_s < state.pause_until_s:
        return
    if _are_trying(state, waiting, turn.now_s):
        return
    if state.generation == 0 and len(waiting) < limits.most and _some_start(state):
        if turn.now_s - state.since_s < limits.join_s:
            return

    def order(name: str) -> tuple[int, float]:
        """Return the sort key of a process: by its last rank, or else by when it became ready."""
        last = state.ranks.index(name) if name in state.ranks else len(state.ranks)
        return last, state.members[name].waits_since_s

    ranks = _placed(state, sorted(waiting, key=order), count)
    # The newest state counts, even if it is held by a process that leaves or that is one too many.
    others = [
        name
        for name, m in state.members.items()
        if m.waits and name not in ranks and not state.cut_off_from(name, ranks)
    ]
    holders, held_step = state.newest_held([*ranks, *others])
    number = state.generation + 1
    turn.enter(Stage.FORMING, generation=number, ranks=ranks, holders=holders)
    if not holders:
        early_release.take_back(turn)  # it begins at a checkpoint, or anew
    for name in ranks:
        turn.change_process(name, is_set=False)
    turn.act(ev.Form(number, ranks, holders, held_step, state.news))


def _are_trying(state: Rendezvous, names: Sequence[str], now_s: float) -> bool:
    """Whether processes that came back still try to reach each other; not for longer than that takes."""
    limit_s = max(2 * state.limits.silent_s, 2 * ATTEMPTS_S)
    return now_s - state.since_s < limit_s and any(state.members[n].is_trying for n in names)


def _within_reach(state: Rendezvous, now_s: float) -> tuple[str, ...]:
    """Return the waiting processes that can train together.

    If only a host that leaves holds the newest state, those that do not reach it come in later. If the others
    are too few, all wait for the link for a while, because the steps since the last checkpoint would be lost.
    """
    waiting, size = state.waiting, state.limits.group_size
    together = exclusion.together(state, waiting)
    held = {name: member.held_step for name, member in state.members.items() if member.waits}
    newest = max(held.values(), default=-1)
    if size > 1 or any(held[name] >= newest - 1 for name in together):
        return together
    for holder in (name for name, held_step in held.items() if held_step == newest):
        near = [name for name in waiting if not state.cut_off_from(name, [holder])]
        near = exclusion.together(state, near)
        if near and state.limits.usable(len(near), state.members[near[0]].share):
            return near
    return () if now_s - state.since_s < state.limits.cut_s else together


def _some_start(state: Rendezvous) -> bool:
    """Return whether processes are starting, or hosts are being checked, that may be ready soon."""
    starting = any(not m.waits and not m.leaves for m in state.members.values())
    return starting or any(host.is_asked for host in state.hosts.values())


def _placed(state: Rendezvous, names: Sequence[str], count: int) -> tuple[str, ...]:
    """Choose and order `count` processes; each keeps its number in a group of processes if it is free."""
    size = state.limits.group_size
    ranks: list[str | None] = [None] * count
    others = []
    for name in names:
        place = state.members[name].place
        free = range(count if place is None else place, count, size)
        rank = next((rank for rank in free if ranks[rank] is None), None)
        if rank is None:
            others.append(name)
        else:
            ranks[rank] = name
    rest = iter(others)
    return tuple(next(rest) if name is None else name for name in ranks)


def _go_if_set(turn: Turn) -> None:
    state = turn.state
    if not all(state.members[name].is_set for name in state.ranks):
        return
    for rank, name in enumerate(state.ranks):
        turn.change_process(
            name,
            generation=state.generation,
            place=rank % state.limits.group_size,
            holds=None,
            is_set=False,
            beat_s=None,
            step=None,
            device_s=0.0,
            is_stuck=False,
            others_s=0.0,
            hung_up_on=(),
            hung_up_s=None,
            hung_up_again_s=0.0,
            pace=None,
            num_slow=0,
        )
    turn.enter(Stage.TRAINING, news=())
    turn.act(ev.Go(state.generation))


def _end_job(turn: Turn) -> None:
    """End the job when all its processes have ended, or when it keeps failing."""
    state, limits = turn.state, turn.state.limits
    if state.stage is Stage.OVER:
        if not state.members:
            code, why = state.code, "all processes have ended"
            if state.is_told and not state.is_done and code == DONE:
                # A job that was stopped before its end wants a restart, even if no process was there to save.
                end = end_unsaved(state)
                code, why = end.code, f"{why}: {end.why}"
            turn.act(ev.EndJob(code, why))
        return
    why = ""
    if state.num_fruitless >= MOST_FRUITLESS:
        why = f"{state.num_fruitless} processes in a row have failed without a finished step in between"
    elif state.num_failures > limits.max_restarts and not _can_recover(state):
        why = (
            f"{state.num_failures} processes have failed, and only {limits.max_restarts} may be replaced "
            "(--max-restarts)"
        )
    if why:
        turn.change(stage=Stage.OVER)
        turn.act(ev.EndJob(state.code, why))


def end_unsaved(state: Rendezvous) -> Exit:
    """Return how a job ends that is not done, and of which no process saves: is there anything to save?"""
    return run_exit(
        RunFacts(
            stopped_by="stop",
            last_step=max(state.furthest, 0),
            may_be_further=state.has_trained,
            saved_step=None,
        )
    )


def _code_of_failure(state: Rendezvous, code: int) -> int:
    """Return the exit code of a job that cannot replace a process which has ended with this code."""
    if code not in (DONE, SAVED):
        return code
    # The process has not saved for the job: SIGTERM has ended it, or it left.
    return UNSAVED if state.has_trained else FAILED


def _can_recover(state: Rendezvous) -> bool:
    """Return whether enough processes live to train, or an excluded host may bring more."""
    living = sum(not member.leaves for member in state.members.values())
    spare = any(host.is_here and host.until_s is not None for host in state.hosts.values())
    return living >= state.limits.needed or spare


_RULES = (
    _give_up_killed,
    _kill_slow_starters,
    _kill_silent,
    _kill_frozen,
    _kill_stuck,
    early_release.release_hosts,
    exclusion.compare,
    exclusion.check_again,
    exclusion.leave_out_unreached,
    _release,
    _proceed,
    exclusion.try_links,
    exclusion.hang_up,
    _end_job,
)
