"""The times and durations of traces, which every cluster writes in its own way."""

import datetime
import math
import re

# What logs write if they have no value.
_MISSING = frozenset({"", "none", "null", "(null)", "nan", "nat", "n/a", "na", "unknown"})
# Seconds of about 5,000 years. A larger number is in milliseconds, or no time.
_LARGEST_S = 1.6e11
_CLOCK = re.compile(
    r"(?:(?P<days>\d{1,6})-)?(?P<first>\d{1,6})(?::(?P<second>\d{1,2}))?(?::(?P<third>\d{1,2}(?:\.\d+)?))?"
)


def is_missing(text: str) -> bool:
    """Return whether a cell stands for no value, such as an empty one, "None" or "Unknown".

    >>> is_missing("Unknown"), is_missing("0")
    (True, False)
    """
    return text.strip().lower() in _MISSING


def time_s(text: str) -> float:
    """Return a moment in seconds: a plain number as it is, a date since 1970. Raises ValueError.

    Dates are ISO 8601, also with a space for the T. A date without a time zone counts as UTC.

    >>> time_s("2020-06-09 18:41:01") - time_s("2020-06-09T18:41:01+08:00"), time_s("1739162.0")
    (28800.0, 1739162.0)
    """
    number = _number(text)
    if number is None:
        try:
            moment = datetime.datetime.fromisoformat(text.strip())
        except ValueError:
            raise ValueError(
                f"{text[:40]!r} is no time. Times are ISO 8601, such as 2020-06-09 18:41:01, or seconds."
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.timestamp()
    return _checked(number, text)


def duration_s(text: str) -> float:
    """Return a duration in seconds: a number, MM:SS, HH:MM:SS, or D-HH[:MM[:SS]] as Slurm writes it.

    Raises ValueError for any other text.

    >>> duration_s("36848"), duration_s("01:02:03"), duration_s("2-00:00:10"), duration_s("05:30")
    (36848.0, 3723.0, 172810.0, 330.0)
    """
    number = _number(text)
    if number is not None:
        return _checked(number, text)
    found = _CLOCK.fullmatch(text.strip())
    if found is None or (found["days"] is None and found["second"] is None):
        raise ValueError(
            f"{text[:40]!r} is no duration. Durations are seconds, HH:MM:SS or D-HH:MM:SS."
        )
    first, second, third = (float(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is None and found["third"] is None:
        return _checked(60 * first + second, text)
    return _checked(86400 * float(found["days"] or 0) + 3600 * first + 60 * second + third, text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _checked(seconds: float, text: str) -> float:
    if not (math.isfinite(seconds) and abs(seconds) <= _LARGEST_S):
        raise ValueError(
            f"{text[:40]!r} is no number of seconds up to {_LARGEST_S:g}. Divide milliseconds by 1,000 first."
        )
    return seconds
