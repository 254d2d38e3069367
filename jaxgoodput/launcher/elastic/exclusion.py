"""Which hosts take part: a host is checked before it starts processes, and left out if it holds others up.

The processes of a host that is left out leave as if the host itself did. Its agent stays connected, and
the host is checked again when its time is over, or as soon as the others are too few to train.
"""

from collections.abc import Mapping

from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness
from jaxgoodput.launcher.elastic.fitness import HostDecision, Pace
from jaxgoodput.launcher.elastic.state import Host, KnownProcess, Stage, Turn


def arrive(turn: Turn, event: ev.HostArrived) -> None:
    """Have a host that has connected checked, unless it is excluded for a time that is not over."""
    host, is_left_out = event.host, turn.state.is_left_out(event.host)
    turn.change(leaving=turn.state.leaving - {host})
    turn.change_host(host, is_here=True, is_asked=not is_left_out)
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
    if check.failure:
        turn.change(hosts={name: one for name, one in turn.state.hosts.items() if name != host})
        turn.announce(HostDecision(host=host, decision="refused", why=check.failure))
        turn.act(ev.Refuse(host, check.failure))
        return
    others = _checks_of_others(turn, host)
    why = fitness.unfit(check, others, turn.state.limits.exclude_slow)
    turn.change_host(host, check=check, is_asked=False)
    if why and turn.state.suffices_without(host):
        _leave_out(turn, host, why, {})
        return
    turn.change_host(host, until_s=None)
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
    hosts = {name: member.host for name, member in here.items()}
    samples_s = {name: pace.sample_s for name, pace in paces.items()}
    slow = fitness.are_slow(samples_s, hosts, factor)
    for name, member in here.items():
        turn.change_process(name, pace=None, num_slow=member.num_slow + 1 if name in slow else 0)
    times = fitness.ratios(samples_s, hosts)
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
    if turn.state.stage is Stage.OVER:
        return
    for host, known in turn.state.hosts.items():
        if known.until_s is None or known.is_asked or not known.is_here:
            continue
        if host not in turn.state.leaving:
            _reconsider(turn, host, known.until_s)


def _reconsider(turn: Turn, host: str, until_s: float) -> None:
    here = [name for name, member in turn.state.members.items() if member.host == host]
    is_needed = not turn.state.suffices_without(host)
    if not here:
        if is_needed or turn.now_s >= until_s:
            turn.change_host(host, is_asked=True)
            turn.act(ev.Examine(host))
    elif is_needed and all(turn.state.members[name].waits for name in here):
        # Its processes have not gone yet, and may hold a state that no other process holds: keep them.
        for name in here:
            turn.change_process(name, leaves=False)
        turn.change_host(host, until_s=None)


def _leave_out(turn: Turn, host: str, why: str, numbers: Mapping[str, float]) -> None:
    """Exclude a host: have its processes leave, and start none on it for a while."""
    before = turn.state.hosts.get(host, Host()).num_exclusions
    seconds = turn.state.limits.exclude_s * 2.0 ** min(before, 16)
    turn.change_host(host, num_exclusions=before + 1, until_s=turn.now_s + seconds)
    turn.dismiss(host)
    turn.announce(
        HostDecision(
            host=host,
            decision="left out",
            why=f"{why}. It is checked again in {seconds:g} s",
            numbers={**numbers, "excluded_s": seconds},
        )
    )
