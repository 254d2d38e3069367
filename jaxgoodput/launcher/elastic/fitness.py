"""Whether a host is fit to take part: it is checked before it trains, and its speed is watched afterwards.

The check (`examine`) measures what a process without a device can: products of matrices in numpy, whose
results are verified, and the network, using the launcher's own signed messages. While it trains, each process
reports a `Pace`: how long its own part of a step takes before it waits for the others.

A host counts as slow only in comparison with the others, never against a fixed number. Noise must not leave
a healthy host out, so three conditions hold: medians of several steps are compared, with regard to how much
the others scatter; the host is slow in several windows in a row (`Limits.slow_windows`); and the job would
be faster without it (`saved`).
"""

import contextlib
import heapq
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from absl import logging

from jaxgoodput import _wire as wire
from jaxgoodput._fields.serial import decode, encode, parse
from jaxgoodput._worker import Worker, Workers
from jaxgoodput.clock import Clock
from jaxgoodput.specs import HostFault

SPREADS = 5.0  # distance from the others' median, in units of their scatter
SAVED_AT_LEAST = 0.2  # share of a step's time that must be saved before a host is left out
LENIENT = (
    4.0  # a check is a single reading, taken while the host is busy starting: allow this much more
)
_SIZE, _NUM_PRODUCTS = 256, 15
_NUM_PINGS, _NUM_BYTES = 9, 2**22
_ANSWER_S = 10.0
_MOST_PEERS = 3
_REACH_S, _NUM_ATTEMPTS = 1.5, 2  # TCP sends a lost first packet again after 1 s
ATTEMPTS_S = 2 * _REACH_S * _NUM_ATTEMPTS  # connections and greetings
_REPORT = "host report "
REFUSED = "refused"  # in the system's words for a port at which no process listens


# -- before it trains ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Check:
    """The results of a host's check of itself: how fast it computes and communicates, or why it cannot."""

    product_s: float = 0.0
    """Time of the fastest matrix product. Other work on the host can only add to it."""
    round_trip_s: float = 0.0
    """Time of a message to the coordinator and back. It is printed, but does not decide anything."""
    send_s: float = 0.0
    """Time to send a megabyte to the coordinator."""
    fetch_s: float | None = None
    """Median time to fetch a megabyte from a process that trains; None if there was none to ask."""
    failure: str = ""
    """Reason why the host cannot take part at all."""
    unreached: str = ""
    """What it did not reach: the coordinator, or processes that train."""

    def __str__(self) -> str:
        if not self.send_s:
            return f"it did not reach {self.unreached}"
        parts = [
            f"a matrix product took {1e3 * self.product_s:.3g} ms",
            f"the coordinator answered in {1e3 * self.round_trip_s:.2g} ms and received "
            f"{1 / self.send_s:.3g} MB/s",
        ]
        if self.fetch_s is not None:
            parts.append(f"other hosts sent {1 / self.fetch_s:.3g} MB/s")
        return ", ".join(parts)


def examine(address: str, peers: Sequence[str], secret: str, clock: Clock) -> Check:
    """Check this host against the coordinator at `address` and the training processes at `peers`.

    A bad host or network never raises here: it is a result.
    """
    try:
        product_s = _product_s(clock)
        round_trip_s, send_s = _to_coordinator(address, secret, clock)
    except (ArithmeticError, MemoryError) as error:
        return Check(failure=str(error) or type(error).__name__)
    except OSError as error:  # the coordinator may be busy for a moment
        return Check(unreached=f"the coordinator at {address} ({error})")
    failed = unreached_of({peer: peer for peer in peers}, secret)
    # Of a process that has just ended, its host says so: then the link works.
    unreached = {peer: why for peer, why in failed.items() if REFUSED not in why}
    if len(failed) == len(peers):
        unreached = failed
    fetched = []
    for peer in [] if unreached else [peer for peer in peers if peer not in failed][:_MOST_PEERS]:
        with contextlib.suppress(OSError):  # it answered a moment ago, so it has just ended
            fetched.append(_from_peer(peer, secret, clock))
    return Check(
        product_s=product_s,
        round_trip_s=round_trip_s,
        send_s=send_s,
        fetch_s=statistics.median(fetched) if fetched else None,
        unreached=", ".join(f"{peer} ({why})" for peer, why in unreached.items()),
    )


def unreached_of(state_at: Mapping[str, str], secret: str) -> dict[str, str]:
    """Return which of some training processes do not answer, and why. It takes `ATTEMPTS_S` at most.

    `state_at` has the addresses of their state servers by name.
    """
    why = dict.fromkeys(state_at, "no answer")

    def attempt(name: str, address: str, worker: Worker) -> None:
        for _ in range(_NUM_ATTEMPTS):
            try:
                channel = wire.connect(address, secret, timeout_s=_REACH_S, hello_s=_REACH_S)
                with contextlib.closing(channel):
                    channel.send({"type": "ping"})
                why.pop(name)
                return
            except OSError as error:
                why[name] = str(error) or type(error).__name__

    attempts = Workers("reach", partial(logging.warning, "an attempt to reach others failed: %r"))
    for name, address in state_at.items():
        attempts.start(partial(attempt, name, address))
    attempts.join()
    return dict(why)


def _product_s(clock: Clock) -> float:
    """Return the seconds that a matrix product takes on one core, and verify its result.

    The product is `einsum`, not BLAS: BLAS threads wait for each other, so that hosts which start on one
    machine differ by a factor of 60.
    """
    # Small whole numbers, whose sums are exact in float32.
    a = (np.arange(_SIZE * _SIZE, dtype=np.int64) * 7919 % 7 - 3).reshape(_SIZE, _SIZE)
    wanted = a @ (a @ np.ones(_SIZE, np.int64))
    x, times = a.astype(np.float32), []
    for _ in range(_NUM_PRODUCTS):
        began_s = clock.now()
        product = np.einsum("ij,jk->ik", x, x)
        times.append(clock.now() - began_s)
        require_right(product, wanted)
    return min(times)


def require_right(product: np.ndarray, wanted: np.ndarray) -> None:
    """Raise ArithmeticError unless the rows of a product sum up to exactly `wanted`."""
    off = np.abs(product.astype(np.float64).sum(axis=1) - wanted).max()
    if not off == 0:  # also true for NaN
        raise ArithmeticError(
            f"it computes wrong numbers: the sums of a product of whole numbers are off by {off:g}. Have its "
            "memory and processors tested."
        )


def _to_coordinator(address: str, secret: str, clock: Clock) -> tuple[float, float]:
    """Return the seconds of a message to the coordinator and back, and of sending it a megabyte."""
    with contextlib.closing(wire.connect(address, secret, timeout_s=_ANSWER_S)) as channel:
        channel.be_patient(_ANSWER_S)
        channel.send({"type": "probe"})

        def there_and_back(data: bytes | None = None) -> float:
            began_s = clock.now()
            channel.send({"type": "ping"}, data)
            if channel.receive() is None:
                raise ConnectionError(
                    f"the coordinator at {address} did not answer a probe of the network within "
                    f"{_ANSWER_S:g} s"
                )
            return clock.now() - began_s

        there_and_back()
        round_trip_s = min(there_and_back() for _ in range(_NUM_PINGS))
        data = bytes(_NUM_BYTES)
        return round_trip_s, min(there_and_back(data) for _ in range(2)) / (_NUM_BYTES / 1e6)


def _from_peer(address: str, secret: str, clock: Clock) -> float:
    """Return how many seconds it took to fetch each megabyte from the training process at `address`."""
    with contextlib.closing(wire.connect(address, secret, timeout_s=_ANSWER_S)) as channel:
        channel.be_patient(_ANSWER_S)
        began_s = clock.now()
        channel.send({"type": "probe"})
        message = channel.receive()
        if message is None:
            raise ConnectionError(
                f"it did not answer a probe of the network within {_ANSWER_S:g} s"
            )
        channel.receive_bytes(message)
        return (clock.now() - began_s) / (_NUM_BYTES / 1e6)


def answer(channel: wire.Channel) -> None:
    """Answer, on the coordinator, the messages by which a host measures its connection, until it ends."""
    # If the connection breaks, the other host's own check reports it.
    with contextlib.closing(channel), contextlib.suppress(OSError):
        while (message := channel.receive()) is not None:
            if "num_bytes" in message:
                channel.receive_bytes(message)
            channel.send({"type": "pong"})


def give(channel: wire.Channel) -> None:
    """Send another host, which measures its connection, what it asks for; this is a training process.

    Raises OSError if the connection has ended.
    """
    channel.send({"type": "probe"}, bytes(_NUM_BYTES))


def unfit(check: Check, others: Collection[Check], factor: float) -> str:
    """Return why a host should be left out for a while; empty if it is fit.

    A host is compared with the slower half of the others, because the coordinator's own host has a much
    faster link to the coordinator. At least two others are needed: of two hosts, either may be the odd one.
    """
    if check.unreached:
        return (
            f"it did not reach {check.unreached}. The hosts of a job must reach each other on all ports, "
            "because processes send each other the state of the run"
        )
    for name, what in (
        ("product_s", "a matrix product"),
        ("send_s", "a megabyte to the coordinator"),
        ("fetch_s", "a megabyte from another host"),
    ):
        own = getattr(check, name)
        theirs = [seconds for x in others if (seconds := getattr(x, name)) is not None]
        if factor == 0 or own is None or len(theirs) < 2:
            continue
        usual = statistics.median_high(theirs)
        if own > LENIENT * factor * usual:
            return (
                f"in its check {what} took {1e3 * own:.3g} ms; the median of {len(theirs)} others is "
                f"{1e3 * usual:.3g} ms"
            )
    return ""


# -- while it trains -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a process was lately: medians over some steps."""

    sample_s: float
    """Time that the process itself needed per sample, without waiting for others."""
    step_s: float
    """Time of a whole step, with waiting and the sum over all processes."""
    part: int
    """Samples that a process takes at once."""
    whole: int
    """Samples of a batch, over all processes."""
    is_leased: bool
    """Whether a process takes another part whenever it has finished one; otherwise all get equal shares."""
    left: int | None = None
    """Samples that are left of the run, over all processes; None before its last epoch, or if the end is
    not known."""
    evaluates: bool = False
    """Whether the run evaluates, at least at its end."""


def ratios(paces: Mapping[str, float], hosts: Mapping[str, str]) -> dict[str, float]:
    """Return each process's seconds divided by the median of the processes on other hosts.

    >>> ratios({"a": 1.0, "b": 1.0, "c": 4.0}, {"a": "a", "b": "b", "c": "c"})["c"]
    4.0
    """
    return {
        name: own / statistics.median(theirs)
        for name, own in paces.items()
        if (theirs := _of_others(name, paces, hosts))
    }


def are_slow(paces: Mapping[str, float], hosts: Mapping[str, str], factor: float) -> set[str]:
    """Return the processes slower than `factor` times the median of the others, and beyond their scatter."""

    def is_slow(own: float, theirs: list[float]) -> bool:
        usual = statistics.median(theirs)
        scatter = 1.4826 * statistics.median(abs(x - usual) for x in theirs)
        return own > factor * usual and own > usual + SPREADS * scatter

    return {
        name
        for name, own in paces.items()
        if (theirs := _of_others(name, paces, hosts)) and is_slow(own, theirs)
    }


def _of_others(name: str, paces: Mapping[str, float], hosts: Mapping[str, str]) -> list[float]:
    return [x for other, x in paces.items() if hosts[other] != hosts[name]]


def saved(paces: Mapping[str, Pace], without: Collection[str], count: int) -> float:
    """Return the share of a step's time that `count` processes would save if these ones left.

    A slow process that takes leases does little of the work. It holds the others up only if one part takes
    it longer than they need for the whole batch.

    >>> def made(sample_s, is_leased):
    ...     return Pace(sample_s=sample_s, step_s=4.0, part=1, whole=12, is_leased=is_leased)
    >>> saved({n: made(s, False) for n, s in {"a": 0.25, "b": 0.25, "c": 1.0}.items()}, {"c"}, 2)
    0.625
    >>> saved({n: made(s, True) for n, s in {"a": 0.25, "b": 0.25, "c": 1.0}.items()}, {"c"}, 2)
    0.125
    """
    left = sorted(pace.sample_s for name, pace in paces.items() if name not in without)
    now = [pace.sample_s for pace in paces.values()]
    one = next(iter(paces.values()))
    step_s = statistics.median(pace.step_s for pace in paces.values())
    return (own_s(now, one) - own_s(left[-count:], one)) / step_s


def own_s(samples_s: Sequence[float], kind: Pace) -> float:
    """Return the seconds after which the last of these processes has finished its own part of a batch."""
    if not kind.is_leased:
        return max(samples_s) * kind.whole / len(samples_s)
    # Simulate the leases: the process that is free first takes the next part.
    free = [(0.0, sample_s) for sample_s in samples_s]
    end_s = 0.0
    for _ in range(-(-kind.whole // kind.part)):
        at_s, sample_s = heapq.heappop(free)
        end_s = max(end_s, at_s + sample_s * kind.part)
        heapq.heappush(free, (at_s + sample_s * kind.part, sample_s))
    return end_s


# -- what follows ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HostDecision:
    """A decision about a host. Training processes pass it to their hooks as `observe.events.HostJudged`."""

    host: str
    decision: str
    """"left out", "taken in again", "released", "refused" or "told to leave"; "slow", "stuck" or
    "unreachable" for a host that stays."""
    why: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements behind the decision, by name."""

    def __str__(self) -> str:
        return f"{self.host} is {self.decision}: {self.why}"


def leave_of(host: str, why: str, within_s: float | None) -> HostDecision:
    """Return the decision that a host leaves because of a signal or a notice; seconds until it is gone.

    >>> str(leave_of("a", "SIGTERM", None))
    'a is told to leave: SIGTERM'
    """
    numbers = {} if within_s is None else {"notice_s": within_s}
    return HostDecision(host=host, decision="told to leave", why=why, numbers=numbers)


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What a coordinator reports of a host to the program that started it, such as the cluster service."""

    host: str
    fault: HostFault
    why: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements behind it, by name."""


def to_line(report: HostReport) -> str:
    r"""Return a report as the line that a coordinator prints, without the mark of the launcher.

    >>> to_line(HostReport(host="a", fault="slow", why="b"))
    'host report {"host": "a", "fault": "slow", "why": "b", "numbers": {}}'
    """
    return f"{_REPORT}{json.dumps(encode(report))}"


def from_line(line: str) -> HostReport | None:
    """Return the report in a coordinator's line; None if the line is no report. Raises ValueError.

    >>> from_line(f"jaxgoodput: {to_line(HostReport(host='a', fault='slow', why='b'))}").fault
    'slow'
    """
    before, found, text = line.partition(_REPORT)
    if not found or before != "jaxgoodput: ":
        return None
    return decode(parse(text), HostReport, "report")
