"""How loops are timed, whatever they are written in: as iterators of (samples, model), one an update."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from data import Workload

Loop = Iterator[tuple[int, Any]]
WARM = 4  # untimed updates of a turn


def tell(**line: Any) -> None:
    """One line for `run.py`."""
    print(json.dumps(line), flush=True)


def since_start() -> float:
    """Seconds since `run.py` started this process."""
    return time.time() - float(os.environ["PEERS_STARTED"])


def first_step(loop: Loop, wait: Callable[[Any], Any]) -> float:
    """Seconds from the start of the process to the end of its first update."""
    _, model = next(loop)
    wait(model)
    return since_start()


def to_target(
    loop: Loop,
    evaluate: Callable[[Any], float],
    workload: Workload,
    *,
    wait: Callable[[Any], Any],
    paused: Callable[[float], Any] = lambda seconds: None,
) -> dict[str, Any]:
    """Train until the target is met; seconds are from the end of the first update on, without evaluations.

    `paused` hears of the seconds of every evaluation.
    """
    samples, due, evaluating_s, value, batches = 0, workload.every, 0.0, float("nan"), []
    began_s = 0.0
    for num, model in loop:
        if not samples:
            wait(model)
            began_s = time.perf_counter()
        samples += num
        if num not in batches:
            batches.append(num)
        if samples >= due:
            wait(model)
            paused_s = time.perf_counter()
            value = evaluate(model)
            took_s = time.perf_counter() - paused_s
            evaluating_s += took_s
            paused(took_s)
            due = samples + workload.every
            if workload.is_met(value) or samples >= workload.most:
                break
    return {
        "samples": samples,
        "seconds": time.perf_counter() - began_s - evaluating_s,
        "value": value,
        "met": workload.is_met(value),
        "batches": batches,
    }


def turn(loop: Loop, updates: int, wait: Callable[[Any], Any]) -> tuple[float, float]:
    """Seconds of an update, by the clock and of the processor."""
    model = None
    for _ in range(WARM):
        _, model = next(loop)
    wait(model)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(updates):
        _, model = next(loop)
    wait(model)
    return (time.perf_counter() - began_s) / updates, (time.process_time() - cpu_s) / updates


def ratios(plain: list[tuple[float, float]], adaptive: list[tuple[float, float]]) -> dict[str, Any]:
    """Of turns that alternate, plain ones first and last: each over the mean of its neighbours."""
    around = [
        tuple((x + y) / 2 for x, y in zip(a, b, strict=True))
        for a, b in zip(plain, plain[1:], strict=False)
    ]
    pairs = list(zip(adaptive, around, strict=True))
    return {
        "ratio": statistics.median(mine[0] / other[0] for mine, other in pairs),
        "cpu_ratio": statistics.median(mine[1] / other[1] for mine, other in pairs),
        "plain_s": statistics.median(other[0] for other in around),
        "adaptive_s": statistics.median(mine[0] for mine in adaptive),
    }


def lost(steps: list[tuple[float, int]], skip: int) -> list[float]:
    """Seconds that each change of the batch took, from (when a step ended, its batch).

    That is the first step of the new batch, less the median of those that follow. The first `skip` changes,
    up to the first use of every batch, do not count.
    """
    stretches: list[list[float]] = []
    for i, (at_s, batch) in enumerate(steps[1:], start=1):
        if batch != steps[i - 1][1] or not stretches:
            stretches.append([])
        stretches[-1].append(at_s - steps[i - 1][0])
    return [x[0] - statistics.median(x[1:]) for x in stretches[1 + skip :] if len(x) > 3]
