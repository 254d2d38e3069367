"""Numbers, counts and durations as short text: for the console, the report and the pictures."""

import math


def compact(value: float | int | None, *, digits: int = 3) -> str:
    """Format a number with three significant digits, or `digits`, and k, M, G, T or P; '-' if unknown.

    >>> [compact(x) for x in (0.0123, 7, 512, 1024, 15_300.0, 2.5e6, 4e13, float("nan"))]
    ['0.0123', '7', '512', '1.02k', '15.3k', '2.5M', '40T', '-']
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    units = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    for limit, unit in units if size < 1e18 else ():
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

    >>> count(1, "change"), count(0, "change"), count(2, "process"), count(2, "batch")
    ('1 change', '0 changes', '2 processes', '2 batches')
    """
    end = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{end}"


def percent(share: float, *, down: bool = False) -> str:
    """Format a share in whole percents of two significant digits; `down` never rounds up.

    >>> percent(0.0004), percent(0.046), percent(0.046, down=True), percent(3.167)
    ('0%', '5%', '4%', '320%')
    """
    value = 100 * share
    if not math.isfinite(value):
        return f"{compact(value)}%"
    unit = 10.0 ** max(math.floor(math.log10(abs(value))) - 1, 0) if value else 1.0
    return f"{(math.floor if down else round)(value / unit) * unit:.0f}%"


def estimate(value: float) -> str:
    """Format an estimated number with two significant digits, and k, M or G; '-' if unknown.

    >>> [estimate(x) for x in (1.234, 321.0, 45_678.0)]
    ['1.2', '320', '46k']
    """
    return compact(float(f"{value:.2g}"))


def roughly(value_s: float) -> str:
    """Format an estimated duration with two significant digits, in one unit; '-' if unknown.

    >>> [roughly(x) for x in (1e-9, 0.0123, 0.3, 4.56, 123.0, 7265.0, 1e7, math.inf)]
    ['0 s', '12 ms', '0.3 s', '4.6 s', '2 min', '2 h', '120 days', 'for ever']
    """
    if math.isnan(value_s):
        return "-"
    if math.isinf(value_s):
        return "for ever"
    if value_s < 1e-6:
        return "0 s"
    units = ((1e-6, 0.1e-3, "us"), (1e-3, 0.0995, "ms"), (1.0, 99.5, "s"), (60.0, 5970.0, "min"))
    last = (3600.0, 99.5 * 3600, "h"), (86400.0, math.inf, "days")
    one, unit = next((one, unit) for one, limit, unit in (*units, *last) if value_s < limit)
    value = float(f"{value_s / one:.2g}")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:g} {unit}"


def with_error(value: float, error: float) -> str:
    """Format a measured value and its error, of which one digit is known; '-' if either is unknown.

    >>> with_error(0.4567, 0.032), with_error(1234.0, 56.0), with_error(math.nan, 0.1)
    ('0.46 +- 0.03', '1230 +- 60', '-')
    >>> with_error(1.42e-6, 2.7e-7)
    '(1.4 +- 0.3)e-6'
    """
    if not (math.isfinite(value) and math.isfinite(error)):
        return "-"
    if not error > 0:
        return f"{compact(value)} +- 0"
    if 0 < (size := max(abs(value), error)) < 1e-3:
        power = math.floor(math.log10(size))
        return f"({with_error(value / 10.0**power, error / 10.0**power)})e{power}"
    decimals = -math.floor(math.log10(error))
    shown = (f"{round(x, decimals):.{max(decimals, 0)}f}" for x in (value, error))
    return " +- ".join(shown)
