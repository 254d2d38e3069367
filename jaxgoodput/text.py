"""Numbers, counts and durations as short text: for the console, the report and the pictures."""

import math


def compact(value: float | int | None, *, digits: int = 3) -> str:
    """Format a number with three significant digits, or `digits`, and k, M or G; '-' if unknown.

    >>> [compact(x) for x in (0.0123, 7, 512, 1024, 15_300.0, 2.5e6, float("nan"))]
    ['0.0123', '7', '512', '1.02k', '15.3k', '2.5M', '-']
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.6 would be rounded to 1000: use the next unit.
        if size >= limit * (1 - 0.5 * 10.0**-digits):
            return f"{value / limit:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def seconds(value: float | int | None) -> str:
    """Format a duration in seconds with its unit; '-' if unknown.

    >>> [seconds(x) for x in (0.0000021, 0.0123, 4.5, 192.0, 7265.0, float("nan"))]
    ['2.1 us', '12.3 ms', '4.5 s', '3 min 12 s', '2 h 01 min', '-']
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    if abs(value) < 0.9995e-3:
        return f"{value * 1e6:.3g} us"
    if abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if abs(value) < 59.95:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = whole // 60
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def count(number: int, noun: str) -> str:
    """Format a number of things, with the noun in singular or plural.

    >>> count(1, "change"), count(0, "change"), count(2, "process")
    ('1 change', '0 changes', '2 processes')
    """
    end = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{end}"
