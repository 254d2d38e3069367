"""How soon a job may end, judged by jobs that have ended: for policies that favour jobs which end soon.

A job that has had `a` device-seconds ends within the next d with the probability P(S <= a + d | S > a), and
uses E[min(S - a, d) | S > a] device-seconds meanwhile, where S is what it will use in all. Its *rate* is the
largest ratio of the two over d: the ends per device-second that running it promises (the Gittins index). Jobs
in the order of their rates have the lowest average completion time on one device. If nothing is known of S
but that it may have any order of magnitude, the rate falls with a, and that is least attained service.

S is guessed from jobs that have ended, in whatever way: runs of the same script and owner. If they are few,
jobs that asked for as many devices count as well; if these are few, all jobs; and if these are few, a
distribution that was chosen once. Jobs that still run are not counted, so guesses are a little short.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxgoodput.specs import require_within

USUAL_S = 6000.0  # device-seconds that half of all jobs are taken to exceed, if none has ended
COUNTS_AS = 4.0  # ended jobs that the more general guess is worth
MOST_ENDED = 500  # of a group, the newest
# Device-seconds at which guesses are tabled. Between two of them a rate is interpolated.
TABLED_S = np.concatenate([[0.0], np.geomspace(30.0, 1e9, 120)])


@dataclass(frozen=True)
class EndedJob:
    """A job that is done, has failed or was cancelled, and what it had used."""

    script: str
    """What it ran; empty if unknown."""
    owner: str
    num_devices: int
    """Devices that its user asked for."""
    device_s: float
    """Device-seconds that it used."""

    def __post_init__(self):
        what = f"an ended job of {self.script!r}"
        require_within(what, {"device_s": self.device_s})
        require_within(what, {"num_devices": self.num_devices}, 1)


@dataclass(frozen=True)
class WorkGuess:
    """What is likely of the work of one job."""

    still_runs: tuple[float, ...]
    """Share of such jobs that use more device-seconds than each of `TABLED_S`."""
    basis: str
    """Whose work it is guessed from."""

    @cached_property
    def rates(self) -> np.ndarray:
        """[TABLED_S] ends per device-second that running it promises, by the device-seconds it has had."""
        return _rates(np.array(self.still_runs))

    def rates_at(self, had_s: np.ndarray) -> np.ndarray:
        """Return [jobs] ends per device-second, for jobs that have had so many device-seconds."""
        return np.exp(np.interp(np.log1p(had_s), np.log1p(TABLED_S), np.log(self.rates)))

    def rate(self, had_s: float) -> float:
        """Return the ends per device-second for one job that has had so many device-seconds."""
        return float(self.rates_at(np.array([had_s]))[0])

    def least_left_s(self, had_s: float, chance: float) -> float:
        """Return the device-seconds that a job has left, or more, with a chance; it has had `had_s`."""
        shares = np.array(self.still_runs)
        then = chance * np.interp(had_s, TABLED_S, shares)
        # Shares fall; `np.interp` wants rising ones.
        at = np.interp(-then, -shares, TABLED_S)
        return max(float(at) - had_s, 0.0)


def least_left_s(guess: WorkGuess | None, had_s: float, chance: float) -> float:
    """Return the device-seconds that a job has left, or more, with a chance; None: nothing is known of it."""
    if guess is not None:
        return guess.least_left_s(had_s, chance)
    return (USUAL_S + had_s) * (1.0 / chance - 1.0)


class Experience:
    """The jobs that have ended, and what they say about others."""

    def __init__(self, ended: Iterable[EndedJob] = ()):
        self._used_s: defaultdict[tuple, list[float]] = defaultdict(list)
        self._known: dict[tuple, WorkGuess] = {}
        for job in ended:
            self.add(job)

    def add(self, job: EndedJob) -> None:
        """Take a job into account that has ended."""
        self._known.clear()
        for key in _groups(job.script, job.owner, job.num_devices):
            used_s = self._used_s[key]
            used_s.append(job.device_s)
            del used_s[:-MOST_ENDED]

    def guess(self, script: str, owner: str, num_devices: int) -> WorkGuess | None:
        """Return what is likely of a job's work; None if no job has ended yet.

        `num_devices`: what its user asked for. An empty script is unknown: no job is like it.
        """
        groups = [key for key in _groups(script, owner, num_devices) if self._used_s.get(key)]
        if not groups:
            return None
        nearest, asked = groups[-1], (script, owner, num_devices)
        if asked not in self._known:
            shares = USUAL_S / (USUAL_S + TABLED_S)
            for key in groups:
                shares = _with_ended(shares, self._used_s[key])
            num = len(self._used_s[nearest])
            words = f"{num} {_IN_WORDS[len(nearest)][num > 1]}"
            self._known[asked] = WorkGuess(tuple(shares.tolist()), words)
        return self._known[asked]


_IN_WORDS = (
    ("ended job", "ended jobs"),
    ("ended job of as many devices", "ended jobs of as many devices"),
    ("earlier run of its script", "earlier runs of its script"),
)


def _groups(script: str, owner: str, num_devices: int) -> list[tuple]:
    """Return the keys of the groups to which a job belongs, the largest group first."""
    own = [(script, owner)] if script else []
    return [(), (num_devices,), *own]


def _with_ended(general: np.ndarray, used_s: Sequence[float]) -> np.ndarray:
    """Return [TABLED_S] shares of jobs that use more, from a more general guess and jobs that have ended."""
    ended_s = np.sort(used_s)
    more = len(ended_s) - np.searchsorted(ended_s, TABLED_S, side="right")
    return (more + COUNTS_AS * general) / (len(ended_s) + COUNTS_AS)


def _rates(shares: np.ndarray) -> np.ndarray:
    """Return [TABLED_S] the largest ratio of ends to device-seconds, over all times to come."""
    steps = np.diff(TABLED_S) * (shares[1:] + shares[:-1]) / 2.0
    used = np.concatenate([[0.0], np.cumsum(steps)])
    ends = shares[:, None] - shares[None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(ends > 0.0, ends / (used[None, :] - used[:, None]), 0.0)
    best = np.triu(ratios, 1).max(1)
    # Of the last there is nothing to come; jobs beyond it end no sooner than those before.
    best[-1] = best[-2] * TABLED_S[-2] / TABLED_S[-1]
    return best
