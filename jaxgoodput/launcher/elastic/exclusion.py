"""Which hosts take part: a host is checked before it starts processes, and left out if it holds others up.

The processes of a host that is left out leave as if the host itself did. Its agent stays connected, and
the host is checked again when its time is over, or as soon as the others are too few to train.

A link between two hosts may break although both reach the coordinator. If no step ends for a while, or a
generation ends by itself, processes try to reach each other. The job goes on with the largest part of the
hosts in which all reach all, and leaves the others out. If that part is too small, all wait until the link is
back.
"""

from collections.abc import Iterable, Mapping

from jaxgoodput.launcher import early_release
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness
from jaxgoodput.launcher.elastic.fitness import HostDecision, Pace
from jaxgoodput.launcher.elastic.state import Host, KnownProcess, Rendezvous, Stage, Turn
from jaxgoodput.specs import HostFault


def arrive(turn: Turn, event: ev.HostArrived) -> None:
    """Have a host that has connected checked, unless it is excluded for a time that is not over."""
    host, is_left_out = event.host, turn.state.is_left_out(event.host)
    if early_release.has_enough(turn.state):
        early_release.turn_away(turn, host)
        return
    turn.change(leaving=turn.state.leaving - {host})
    turn.change_host(host, is_here=True, is_beside=event.is_beside, is_asked=not is_left_out)
    if not is_left_out:
        turn.act(ev.Examine(host))


def lose_agent(turn: Turn, event: ev.AgentLost) -> None:
    """Note that a host's agent is gone, and that the host is not being asked for a check any more."""
    if event.host in turn.state.hosts:
        turn.change_host(event.host, is_here=False, is_asked=False)


def examined(turn: Turn, event: ev.HostExamined) -> None:
    """Refuse a host whose check failed; let it take part if it is fast enough or needed, else exclude it."""
    host, check = event.host, event.check
    known = turn.state.hosts.get(host)
    if known is None or not known.is_asked:
        return
    if early_release.has_enough(turn.state):  # since it was asked, others have left
        turn.change_host(host, is_asked=False)
        early_release.turn_away(turn, host)
        return
    if check.failure:
        turn.change(hosts={name: one for name, one in turn.state.hosts.items() if name != host})
        turn.announce(HostDecision(host=host, decision="refused", why=check.failure), "faulty")
        turn.act(ev.Refuse(host, check.failure))
        return
    others = _checks_of_others(turn, host)
    limits = turn.state.limits
    # If slow hosts are only reported, their speed in training decides, and not one check.
    why = fitness.unfit(check, others, 0.0 if limits.reports_hosts else limits.exclude_slow)
    turn.change_host(host, check=check, is_asked=False)
    if why and _suffice_without(turn.state, host):
        # A single attempt may have met processes that were just ending.
        is_again = bool(check.unreached) and known.num_cut_off > 0
        fault = "unreachable" if is_again else None
        _leave_out(turn, host, why, {}, is_cut=bool(check.unreached), fault=fault)
        return
    turn.change_host(host, until_s=None)
    there = (
        set()
        if check.unreached
        else {turn.state.members[name].host for name in turn.state.present_ranks}
    )
    mended = {pair for pair in turn.state.cuts if host in pair and there & set(pair) - {host}}
    turn.change(cuts={pair: s for pair, s in turn.state.cuts.items() if pair not in mended})
    if known.until_s is not None:
        passed = why or f"it has passed its check: {check}"
        turn.announce(HostDecision(host=host, decision="taken in again", why=passed))
    turn.act(ev.Admit(host))


def _checks_of_others(turn: Turn, host: str) -> list[fitness.Check]:
    others = [one for name, one in turn.state.hosts.items() if name != host]
    return [x.check for x in others if x.check is not None and x.is_here and x.until_s is None]


def compare(turn: Turn) -> None:
    """Exclude a host that slows the others down, once all processes have reported their speed."""
    state, factor = turn.state, turn.state.limits.exclude_slow
    here = {name: state.members[name] for name in state.present_ranks}
    paces = {name: member.pace for name, member in here.items() if member.pace is not None}
    # Processes of a group wait for each other, so none has a time of its own.
    if not factor or state.limits.group_size > 1:
        return
    if state.stage is not Stage.TRAINING or len(paces) < len(here):
        return
    if any(member.leaves for member in here.values()):
        return  # this generation is about to end
    hosts = {name: member.host for name, member in here.items()}
    samples_s = {name: pace.sample_s for name, pace in paces.items()}
    slow = fitness.are_slow(samples_s, hosts, factor)
    for name, member in here.items():
        turn.change_process(name, pace=None, num_slow=member.num_slow + 1 if name in slow else 0)
    times = fitness.ratios(samples_s, hosts)
    if state.limits.reports_hosts:
        _report_slow(turn, paces, times)
        return
    for name in sorted(slow, key=lambda name: -times[name]):
        saved = _share_saved(turn, name, here, paces)
        if saved is not None:
            why = (
                f"in {turn.state.members[name].num_slow} windows in a row it was much slower than the "
                f"others, in the last one {times[name]:.3g} times their median "
                f"({1e3 * samples_s[name]:.3g} ms per sample); without it a step takes {saved:.0%} less time"
            )
            numbers = {"slow_ratio": times[name], "saved": saved, "sample_s": samples_s[name]}
            _leave_out(turn, hosts[name], why, numbers)
            return  # if two hosts are slow, the other one follows in a later window


def _report_slow(turn: Turn, paces: Mapping[str, Pace], times: Mapping[str, float]) -> None:
    """Report the hosts that are slow for long, if steps would be shorter without all of them.

    They may be processes of one machine, and other machines may take their place.
    """
    members, limits = turn.state.members, turn.state.limits
    slow = [name for name in paces if members[name].num_slow >= limits.slow_windows]
    if not slow or len(slow) == len(paces):
        return
    saved = fitness.saved(paces, slow, len(paces) - len(slow))
    if saved < fitness.SAVED_AT_LEAST:
        return
    for name in slow:
        turn.change_process(name, num_slow=0)
        sample_s = paces[name].sample_s
        why = (
            f"in {limits.slow_windows} windows in a row it was much slower than the others, in the last one "
            f"{times[name]:.3g} times their median ({1e3 * sample_s:.3g} ms per sample); without slow hosts "
            f"a step takes {saved:.0%} less time"
        )
        numbers = {"slow_ratio": times[name], "saved": saved, "sample_s": sample_s}
        host = members[name].host
        turn.announce(HostDecision(host=host, decision="slow", why=why, numbers=numbers), "slow")


def _share_saved(
    turn: Turn, name: str, here: Mapping[str, KnownProcess], paces: Mapping[str, Pace]
) -> float | None:
    """Return the share of a step's time that is saved without this process's host; None if it should stay."""
    limits = turn.state.limits
    gone = {other for other, member in here.items() if member.host == here[name].host}
    count = limits.usable(len(here) - len(gone), here[name].share)
    if turn.state.members[name].num_slow < limits.slow_windows or not count:
        return None
    saved = fitness.saved(paces, gone, count)
    return saved if saved >= fitness.SAVED_AT_LEAST else None


def check_again(turn: Turn) -> None:
    """Check hosts whose time of exclusion is over; all excluded ones if too few processes are left."""
    if turn.state.stage is Stage.OVER or early_release.has_enough(turn.state):
        return
    for host, known in turn.state.hosts.items():
        if known.until_s is None or known.is_asked or not known.is_here:
            continue
        if host not in turn.state.leaving:
            _reconsider(turn, host, known.until_s)


def _reconsider(turn: Turn, host: str, until_s: float) -> None:
    here = [name for name, member in turn.state.members.items() if member.host == host]
    is_needed = not _suffice_without(turn.state, host)
    if not here:
        if is_needed or turn.now_s >= until_s:
            turn.change_host(host, is_asked=True)
            turn.act(ev.Examine(host))
    elif is_needed and all(turn.state.members[name].waits for name in here):
        # Its processes have not gone yet, and may hold a state that no other process holds: keep them.
        for name in here:
            turn.change_process(name, leaves=False)
        turn.change_host(host, until_s=None)


def _suffice_without(state: Rendezvous, host: str) -> bool:
    """Return whether the processes of the other hosts are enough for a generation."""
    others = [name for name, m in state.members.items() if not m.leaves and m.host != host]
    shares = (state.members[name].share for name in others)
    share = next((share for share in shares if share is not None), None)
    return bool(others) and state.limits.usable(len(together(state, others)), share) > 0


def _leave_out(
    turn: Turn,
    host: str,
    why: str,
    numbers: Mapping[str, float],
    *,
    is_cut: bool = False,
    fault: HostFault | None = None,
) -> None:
    """Exclude a host: have its processes leave, and start none on it for a while.

    A broken link (`is_cut`) may be back in a moment, and another check of it costs the others nothing.
    `fault` is for the program that started this one.
    """
    known, longest_s = turn.state.hosts.get(host, Host()), turn.state.limits.exclude_s
    if is_cut:
        is_new = turn.now_s - known.cut_off_s > 2 * longest_s
        before = 0 if is_new else known.num_cut_off
        seconds = min(2.0 ** min(before, 16), longest_s)
        turn.change_host(host, num_cut_off=before + 1, cut_off_s=turn.now_s)
    else:
        seconds = longest_s * 2.0 ** min(known.num_exclusions, 16)
        turn.change_host(host, num_exclusions=known.num_exclusions + 1)
    turn.change_host(host, until_s=turn.now_s + seconds)
    turn.announce(
        HostDecision(
            host=host,
            decision="left out",
            why=f"{why}. It is checked again in {seconds:g} s",
            numbers={**numbers, "excluded_s": seconds},
        ),
        fault,
    )
    turn.dismiss(host)


def _report_cut(turn: Turn, host: str, why: str) -> None:
    """Report a host that others do not reach, and without which they are too few; from time to time."""
    known = turn.state.hosts.get(host, Host())
    if known.num_cut_off and turn.now_s - known.cut_off_s < turn.state.limits.cut_s:
        return
    turn.change_host(host, num_cut_off=known.num_cut_off + 1, cut_off_s=turn.now_s)
    turn.announce(HostDecision(host=host, decision="unreachable", why=why), "unreachable")


# -- hosts that do not reach each other ----------------------------------------------------------------

_MOST_SEARCHED = 16  # hosts with a broken link, among which the largest part is found for sure
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between two attempts
_RECENT_S = 2.0  # shorter than an attempt that fails, longer than the time between heartbeats


def links_tried(turn: Turn, event: ev.LinksTried) -> None:
    """Note which hosts a process reached, and which it did not although the coordinator does.

    If the coordinator has not heard from the other lately, it may be that one that is silent, and not the
    link. Then all are asked once more.
    """
    member = turn.state.members.get(event.member)
    if member is None:
        return
    turn.change_process(event.member, tried_s=turn.now_s, is_trying=False)
    members, cuts, is_open = turn.state.members, dict(turn.state.cuts), False
    for name in event.reached:
        if name in members:
            cuts.pop((member.host, members[name].host), None)
    for other in (members[name] for name in event.unreached if name in members):
        if other.host != member.host and _lives(turn, other, member.asked_again_s):
            cuts[member.host, other.host] = turn.now_s
        else:
            is_open = True
    turn.change(cuts=cuts)
    if is_open and turn.now_s - turn.state.tried_s >= _SHORTEST_PAUSE_S:
        ask_for_links(turn, [n for n, one in members.items() if one.waits or n in turn.state.ranks])


def _lives(turn: Turn, process: KnownProcess, asked_s: float) -> bool:
    """Whether the coordinator has heard from a process since `asked_s`, when others were to reach it."""
    if process.killed_s is not None or process.is_released:
        return False
    if process.beat_s is not None and process.beat_s > turn.now_s - _RECENT_S:
        return True
    return process.tried_s > max(asked_s, turn.now_s - fitness.ATTEMPTS_S)


def together(state: Rendezvous, names: Iterable[str]) -> tuple[str, ...]:
    """Return the largest part of some processes in which all hosts reach each other.

    A part that holds the newest state is preferred to a larger one without. If two are equal, the one with
    lower ranks is taken.
    """
    names = tuple(names)
    hosts = {state.members[name].host for name in names}
    cut = {
        one: {other for other in hosts if other != one and state.is_cut(one, other)}
        for one in hosts
    }
    if not any(cut.values()):
        return names
    newest = max(_step_of(state, name) for name in names)

    def worth(part: frozenset[str]) -> tuple[bool, bool, int, float]:
        inside = [name for name in names if state.members[name].host in part]
        share = next((s for n in inside if (s := state.members[n].share) is not None), None)
        count = state.limits.usable(len(inside), share)
        # The step that is under way may have ended in one process and not in another.
        has_state = any(_step_of(state, name) >= newest - 1 for name in inside)
        ranks = [state.ranks.index(n) if n in state.ranks else len(state.ranks) for n in inside]
        return count > 0, has_state, count, -sum(ranks) / max(len(ranks), 1)

    def best(part: frozenset[str]) -> frozenset[str]:
        first = max(sorted(part), key=lambda host: len(cut[host] & part))
        if not cut[first] & part:
            return part
        without = best(part - {first})
        if sum(bool(cut[host] & part) for host in part) > _MOST_SEARCHED:
            return without
        return max(best(part - cut[first]), without, key=worth)

    kept = best(frozenset(hosts))
    return tuple(name for name in names if state.members[name].host in kept)


def _step_of(state: Rendezvous, name: str) -> int:
    """Return the step of the state that a process has: it waits with it, or trains from there."""
    member = state.members[name]
    return member.held_step if member.holds is not None else (member.step or 0)


def leave_out_unreached(turn: Turn) -> None:
    """Go on without hosts that others do not reach, if these suffice; else end the generation and wait."""
    state, now_s = turn.state, turn.now_s
    if state.cuts:
        cuts = {pair: s for pair, s in state.cuts.items() if now_s - s < state.limits.cut_s}
        turn.change(cuts=cuts)
    state = turn.state
    if not state.cuts or state.stage is Stage.OVER:
        return
    here = [
        name
        for name, one in state.members.items()
        if not one.leaves and one.killed_s is None and (name in state.ranks or one.waits)
    ]
    kept = together(state, here)
    if len(kept) == len(here):
        return
    if _is_parted(state):
        if state.stage is Stage.TRAINING:
            turn.gather()
        else:
            turn.cancel_forming()
    share = next((s for name in kept if (s := state.members[name].share) is not None), None)
    for host in sorted({state.members[name].host for name in here if name not in kept}):
        why = _why_cut(state, host, kept)
        if state.limits.usable(len(kept), share):
            _leave_out(turn, host, why, {}, is_cut=True, fault="unreachable")
        elif state.limits.reports_hosts:
            _report_cut(turn, host, why)


def _is_parted(state: Rendezvous) -> bool:
    """Whether the newest generation trains or forms with hosts that do not reach each other."""
    if state.stage not in (Stage.TRAINING, Stage.FORMING):
        return False
    here = state.present_ranks
    if state.stage is Stage.FORMING:
        here = (*here, *(name for name in state.holders if name in state.members))
    return any(state.cut_off_from(name, here) for name in here)


def _why_cut(state: Rendezvous, host: str, kept: Iterable[str]) -> str:
    others = sorted({state.members[name].host for name in kept})
    ways = [
        f"{a} did not reach {b}"
        for a, b in sorted(state.cuts)
        if (a == host and b in others) or (b == host and a in others)
    ]
    return (
        f"{', '.join(ways)}, although both are connected to the coordinator. The hosts of a job must reach "
        "each other on all ports"
    )


def try_links(turn: Turn) -> None:
    """Have processes try to reach each other if no step ends, and again while some hosts do not."""
    state, limits = turn.state, turn.state.limits
    names = state.present_ranks or state.waiting
    if state.stage is Stage.GATHERING:
        names = tuple({**dict.fromkeys(state.present_ranks), **dict.fromkeys(state.waiting)})
        is_idle = bool(state.outstanding)
    else:
        is_idle = state.stage is not Stage.OVER or bool(state.outstanding)
    if len({state.members[name].host for name in names}) < 2:
        return
    is_idle &= turn.now_s - max(state.moved_s, state.since_s) >= limits.silent_s
    is_cut = any(state.cut_off_from(name, names) for name in names)
    pause_s = min(2.0 ** min(state.num_tried, 16), _LONGEST_PAUSE_S)
    pause_s = pause_s if is_cut else max(pause_s, limits.silent_s)
    if (is_idle or is_cut) and turn.now_s - state.tried_s >= pause_s:
        ask_for_links(turn, names)


def ask_for_links(turn: Turn, names: Iterable[str]) -> None:
    """Have these processes try to reach each other, one of each host, but for those that still do."""
    turn.change(tried_s=turn.now_s, num_tried=turn.state.num_tried + 1)
    asked = {}
    for name in names:
        member = turn.state.members[name]
        if not member.is_trying or turn.now_s - member.asked_s >= fitness.ATTEMPTS_S:
            asked.setdefault(member.host, name)
            if asked[member.host] == name:
                asked_s = member.asked_s if member.is_trying else turn.now_s
                told = {"asked_s": asked_s, "asked_again_s": turn.now_s}
                turn.change_process(name, is_trying=True, **told)
    if len(asked) > 1:
        turn.act(ev.TryLinks(tuple(asked.values())))


def hang_up(turn: Turn) -> None:
    """Have processes that should come back end their connections to those that they do not reach.

    If packets are lost silently, a collective would wait for them for minutes. It may try anew to
    connect, so they are told again.
    """
    state = turn.state
    if state.stage not in (Stage.GATHERING, Stage.OVER):
        return
    for name in state.outstanding:
        member = state.members[name]
        # Of those it was told of, some may have ended since.
        others = (*member.hung_up_on, *state.cut_off_from(name, state.present_ranks))
        others = tuple(dict.fromkeys(others))
        if others and turn.now_s - member.hung_up_again_s >= _SHORTEST_PAUSE_S:
            first_s = turn.now_s if member.hung_up_s is None else member.hung_up_s
            told = {"hung_up_on": others, "hung_up_s": first_s, "hung_up_again_s": turn.now_s}
            turn.change_process(name, **told)
            turn.act(ev.HangUp(name, others))
