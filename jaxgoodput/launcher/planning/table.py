"""The tables of `jaxgoodput plan SCRIPT`: what each strategy holds, and what it does in a step."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxgoodput.text import compact

MIB = 2.0**20
_LEFT = ("strategy", "fits", "bound by")


@dataclass(frozen=True)
class Rates:
    """What turns samples into tokens and money; None if it was not given."""

    tokens_per_sample: int | None = None
    price_per_hour: float | None = None
    """Of one device."""


def memory_row(one: Any) -> dict[str, str]:
    """Return, by column, what a device holds under a strategy (an `Outlook`)."""
    peak = one.analysis.peak
    times = f" x {one.num_micro_batches}" if one.num_micro_batches > 1 else ""
    parts = ("parameters", "optimizer", "activations", "temporaries")
    return {
        "strategy": one.strategy.name,
        "fits": "yes" if one.fits else "no",
        "peak MiB": f"{one.analysis.bytes.peak / MIB:,.0f}",
        **{part: _mib(getattr(peak, part)) for part in parts},
        "batch": f"{one.global_batch_size}",
        "micro-batch": f"{one.micro_batch_size}{times}",
        "largest": f"{one.largest_micro_batch_size:,}",
    }


def step_row(one: Any, num_devices: int, rates: Rates) -> dict[str, str]:
    """Return, by column, what a step does under a strategy. Step times need a chip that is known."""
    facts, count = one.analysis, one.num_micro_batches
    row = {
        "strategy": one.strategy.name,
        "GFLOP": f"{facts.flops * count / num_devices / 1e9:,.4g}",
        "kernels": f"{facts.num_kernels * count:,}",
        "inside MiB": _mib(facts.received.inside * count),
        "between MiB": _mib(facts.received.between * count),
        "exposed": f"{len(facts.exposed_collectives)} of {len(facts.collectives)}",
    }
    if one.rooflines_s:
        step_ms = one.step_s * 1e3
        row["step ms"] = _step(step_ms)
        row["bound by"] = one.bound_by or "-"
        row["samples/s"] = compact(one.samples_per_s)
        row |= _priced(one.samples_per_s, num_devices, rates)
    return {**row, "compiled in s": f"{one.compile_s:.1f}"}


def _step(step_ms: float) -> str:
    if math.isnan(step_ms):
        return "-"
    return f"{step_ms:,.1f}" if step_ms >= 1 else f"{step_ms:.2g}"


def _priced(samples_per_s: float, num_devices: int, rates: Rates) -> dict[str, str]:
    tokens_per_s = samples_per_s * (rates.tokens_per_sample or math.nan)
    found = {}
    if rates.tokens_per_sample is not None:
        found["tokens/s"] = compact(tokens_per_s)
    if rates.price_per_hour is not None:
        per_s = rates.price_per_hour * num_devices / 3600
        if rates.tokens_per_sample is not None:
            found["per 1e9 tokens"] = _price(per_s / tokens_per_s * 1e9)
        else:
            found["per 1e6 samples"] = _price(per_s / samples_per_s * 1e6)
    return found


def _price(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.2f}"


def legend(rows: Sequence[Mapping[str, str]], chip: Any, types: Iterable[str] = ()) -> list[str]:
    """Return what the columns of the second table mean, if there is any row; `chip` may be None.

    `types` are those of the factors of the steps' matrix products: the ones without a known rate are named.
    """
    if not rows:
        return []
    lines = [
        "inside, between: received by a device from its own node or slice, and from others. exposed: "
        "collectives during which nothing is computed."
    ]
    if chip is not None and "step ms" in rows[0]:
        lines.append(
            "bound by: the largest part of the step; collectives: those during which nothing is computed."
        )
        lines.append(
            f"step: what the chip's peak rates allow ({chip.source}). Real steps take longer: compare "
            "strategies, not seconds."
        )
        if unknown := chip.unlisted(types):
            lines.append(
                f"no step times: the step multiplies {' and '.join(unknown)}, and {chip.source} states no "
                f"rate for that. Known: {', '.join(chip.flops_by_type)}."
            )
    return lines


def tabled(title: str, rows: Sequence[Mapping[str, str]]) -> Any:
    """Return a table of rich, with the columns that any row has."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column in _LEFT else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def left_out(others: Sequence[Any]) -> list[str]:
    """Return a line for each reason for which strategies are left out (`LeftOut`), with the first of them.

    Reasons that differ only in their numbers count as one.
    """
    alike: dict[str, list[Any]] = {}
    for one in others:
        alike.setdefault(re.sub(r"\d+(\.\d+)?", "#", one.reason), []).append(one)
    lines = []
    for group in alike.values():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"left out: {group[0].strategy.name}{more}: {group[0].reason}")
    return lines


def explained(one: Any, count: int = 5) -> list[str]:
    """Return the largest buffers and collectives of a strategy, by the user's names."""
    facts = one.analysis
    lines = [f"{one.strategy.name}: the largest of what a device holds at the peak"]
    for buffer in facts.peak.buffers[:count]:
        lines.append(
            f"  {_mib(float(buffer.size_bytes)):>10} MiB  {buffer.kind:<12} {buffer.shape:<24} {buffer.name}"
        )
    if math.isnan(facts.peak.activations):
        lines.append("  (this compiler does not tell what is alive besides the arguments)")
    lines.append(
        f"{one.strategy.name}: the collectives that bring most to a device in a micro-batch"
    )
    uses = sorted(facts.collectives, key=lambda use: -use.received.total)[:count]
    for use in uses:
        delays = "exposed" if use.is_exposed else "hidden"
        lines.append(
            f"  {_mib(use.received.inside):>10} MiB inside, {_mib(use.received.between):>10} MiB between  "
            f"{delays:<8} {use.kind:<18} x {use.times:<4} {_first(use.names)}"
        )
    return lines if uses else [*lines, "  none"]


def _first(names: Sequence[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{', '.join(names[:count])}{more}"


def _mib(size: float) -> str:
    if math.isnan(size):
        return "-"
    return f"{size / MIB:,.1f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


def rates_of(config: Any, price_per_hour: float | None) -> Rates:
    """Return the tokens of a sample by a run's configuration, and a price."""
    return Rates(config.reporting.tokens_per_sample, price_per_hour)
