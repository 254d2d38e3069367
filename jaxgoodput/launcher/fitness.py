"""Whether a host is fit to take part: checked before, and watched while it trains.

The check (`examine`) measures what a process without a device can: products of matrices in numpy, whose
numbers are looked at too, and the network over the launcher's own messages, signatures among it: to the
coordinator, and from processes that train already, where there are any, as a state comes. While it
trains, each process tells what its own part of a step takes before it waits for others, in `Pace`s.

What is slow is judged against the others, never against a number, and so that noise excludes nobody: by
medians of steps, against the median of the others and what they scatter, in several windows in a row
(`Limits.slow_windows`), and only where the job would be faster without that host (`saved`).
"""

import heapq
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxgoodput import _wire as wire
from jaxgoodput.clock import Clock

SPREADS = 5.0  # over the median of the others, in units of their scatter
SAVED_AT_LEAST = 0.2  # of a step's time, for a host to be left out
LENIENT = 4.0  # times FACTOR in a check: it is one reading, beside what a host does as it starts
_SIZE, _NUM_PRODUCTS = 256, 15
_NUM_PINGS, _NUM_BYTES = 9, 2**22
_ANSWER_S = 10.0
_MOST_PEERS = 3


# -- before --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a host could do before it took part."""

    product_s: float = 0.0
    """The fastest of several: what else the host does can only add."""
    round_trip_s: float = 0.0
    """A message to the coordinator and back. Told, not judged: the coordinator is one of the hosts."""
    send_s: float = 0.0
    """A megabyte to the coordinator."""
    fetch_s: float | None = None
    """A megabyte from a process that trains; the median of those asked. None: none was there to ask."""
    failure: str = ""
    """Why it cannot take part at all."""
    unreached: str = ""
    """Whom it did not reach: the coordinator, or any of those that train, which may have gone just then."""

    def __str__(self) -> str:
        if not self.send_s:
            return f"it did not reach {self.unreached}"
        parts = [
            f"a product of matrices {1e3 * self.product_s:.3g} ms",
            f"to the coordinator {1e3 * self.round_trip_s:.2g} ms and {1 / self.send_s:.3g} MB/s",
        ]
        if self.fetch_s is not None:
            parts.append(f"from other hosts {1 / self.fetch_s:.3g} MB/s")
        return ", ".join(parts)


def examine(address: str, peers: Sequence[str], secret: str, clock: Clock) -> Check:
    """Measure this host against the coordinator at `address` and the processes at `peers`.

    Never raises for what a bad host or network does: that is what it is to find out.
    """
    try:
        product_s = _product_s(clock)
        round_trip_s, send_s = _to_coordinator(address, secret, clock)
    except (ArithmeticError, MemoryError) as error:
        return Check(failure=str(error) or type(error).__name__)
    except OSError as error:  # it may be busy for once
        return Check(unreached=f"the coordinator at {address} ({error})")
    fetched, errors = [], []
    for peer in peers[:_MOST_PEERS]:
        try:
            fetched.append(_from_peer(peer, secret, clock))
        except OSError as error:  # it may just have gone; where all have, that is told
            errors.append(f"{peer} ({error})")
    return Check(
        product_s=product_s,
        round_trip_s=round_trip_s,
        send_s=send_s,
        fetch_s=statistics.median(fetched) if fetched else None,
        unreached=f"any process that trains: {', '.join(errors)}" if errors and not fetched else "",
    )


def _product_s(clock: Clock) -> float:
    """Seconds of a product on one processor; its numbers are small and whole, so that all sums are exact.

    Not by BLAS, whose threads wait for each other: hosts that start on one machine differ 60 times by it.
    """
    a = (np.arange(_SIZE * _SIZE, dtype=np.int64) * 7919 % 7 - 3).reshape(_SIZE, _SIZE)
    wanted = a @ (a @ np.ones(_SIZE, np.int64))  # in whole numbers
    x, times = a.astype(np.float32), []
    for _ in range(_NUM_PRODUCTS):
        began_s = clock.now()
        product = np.einsum("ij,jk->ik", x, x)
        times.append(clock.now() - began_s)
        require_right(product, wanted)
    return min(times)


def require_right(product: np.ndarray, wanted: np.ndarray) -> None:
    """Raises ArithmeticError where the sums of a product's rows are not just those that are `wanted`."""
    off = np.abs(product.astype(np.float64).sum(axis=1) - wanted).max()
    if not off == 0:  # NaN is not
        raise ArithmeticError(
            f"it computes wrong numbers: the sums of a product of whole numbers are off by {off:g}. Have its "
            "memory and processors tested."
        )


def _to_coordinator(address: str, secret: str, clock: Clock) -> tuple[float, float]:
    """Seconds there and back, and of a megabyte there."""
    channel = wire.connect(address, secret, timeout_s=_ANSWER_S)
    try:
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
    finally:
        channel.close()


def answer(channel: wire.Channel) -> None:
    """The coordinator's side of a probe, until the other has gone."""
    try:
        while (message := channel.receive()) is not None:
            if "num_bytes" in message:
                channel.receive_bytes(message)
            channel.send({"type": "pong"})
    except OSError:
        pass  # it has gone in the middle: its own check says so
    finally:
        channel.close()


def _from_peer(address: str, secret: str, clock: Clock) -> float:
    """Seconds of a megabyte from a process that serves its state."""
    channel = wire.connect(address, secret, timeout_s=_ANSWER_S)
    try:
        channel.be_patient(_ANSWER_S)
        began_s = clock.now()
        channel.send({"type": "probe"})
        message = channel.receive()
        if message is None:
            raise ConnectionError(f"no answer within {_ANSWER_S:g} s")
        channel.receive_bytes(message)
        return (clock.now() - began_s) / (_NUM_BYTES / 1e6)
    finally:
        channel.close()


def give(channel: wire.Channel) -> None:
    """The side of a process that is asked for a probe. Raises OSError where the other has gone."""
    channel.send({"type": "probe"}, bytes(_NUM_BYTES))


def unfit(check: Check, others: Collection[Check], factor: float) -> str:
    """Why a host is better left out for a while: what it was much slower at than the others; empty: nothing.

    Of two hosts, nobody knows which is the odd one; and a link to the coordinator's own host is no measure
    for those to others, so that the slower half counts.
    """
    if check.unreached:
        return (
            f"it did not reach {check.unreached}. Hosts of a job have to reach "
            "each other at any port, for the state of the run comes from one of them"
        )
    limit = LENIENT * factor
    for what, own, theirs in (
        ("a product of matrices", check.product_s, [x.product_s for x in others]),
        ("a megabyte to the coordinator", check.send_s, [x.send_s for x in others]),
        (
            "a megabyte from another host",
            check.fetch_s,
            [x.fetch_s for x in others if x.fetch_s is not None],
        ),
    ):
        if factor == 0 or own is None or len(theirs) < 2:
            continue
        usual = statistics.median_high(theirs)
        if own > limit * usual:
            return (
                f"in its check {what} took {1e3 * own:.3g} ms, and {1e3 * usual:.3g} ms is the median of "
                f"{len(theirs)} others"
            )
    return ""


# -- while it trains -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a process needed lately, medians over some steps."""

    sample_s: float
    """Of its own for a sample, before it waited for others."""
    step_s: float
    """For a step in all, the others and their sum among it."""
    part: int
    """Samples that a process takes at once."""
    whole: int
    """Samples of a batch, all processes."""
    is_leased: bool
    """Whether a process takes another part when it is done with one; else each gets as many."""


def ratios(paces: Mapping[str, float], hosts: Mapping[str, str]) -> dict[str, float]:
    """Each process's seconds over the median of those on other hosts.

    >>> ratios({"a": 1.0, "b": 1.0, "c": 4.0}, {"a": "a", "b": "b", "c": "c"})["c"]
    4.0
    """
    return {
        name: own / statistics.median(theirs)
        for name, own in paces.items()
        if (theirs := _of_others(name, paces, hosts))
    }


def are_slow(paces: Mapping[str, float], hosts: Mapping[str, str], factor: float) -> set[str]:
    """Who needs more than `factor` times the median of the others, and more than they scatter."""

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
    """The share of a step's time that `count` of the processes would save `without` these.

    A slow process that takes leases does a little of the work, and holds the others up only where one part of
    its own takes longer than they need for the batch.

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
    return (_own_s(now, one) - _own_s(left[-count:], one)) / step_s


def _own_s(samples_s: Sequence[float], kind: Pace) -> float:
    """Until the last of these processes is done with its part of a batch."""
    if not kind.is_leased:
        return max(samples_s) * kind.whole / len(samples_s)
    free = [(0.0, sample_s) for sample_s in samples_s]
    end_s = 0.0
    for _ in range(-(-kind.whole // kind.part)):
        at_s, sample_s = heapq.heappop(free)
        end_s = max(end_s, at_s + sample_s * kind.part)
        heapq.heappush(free, (at_s + sample_s * kind.part, sample_s))
    return end_s


# -- what came of it -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HostDecision:
    """What was decided about a host; those who train tell it their hooks."""

    host: str
    decision: str
    """"left out", "taken in again" or "refused"."""
    why: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """On which it rests, by name."""

    def __str__(self) -> str:
        return f"{self.host} is {self.decision}: {self.why}"

    def to_message(self) -> dict[str, Any]:
        """For a worker: the fields of `observe.events.HostJudged`."""
        return {
            "host": self.host,
            "decision": self.decision,
            "why": self.why,
            "numbers": dict(self.numbers),
        }
