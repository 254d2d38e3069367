"""Metrics for Prometheus, in its text format."""

import bisect
import collections
from collections.abc import Iterator, Mapping

from jaxgoodput.cluster.service.record.faults import in_force
from jaxgoodput.cluster.service.record.state import State, owners

LIMITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RequestMetrics:
    """Counts answers by route and status, and the durations of requests that do not wait for a change."""

    def __init__(self):
        self._counts = collections.Counter[tuple[str, int]]()
        self._below = [0] * (len(LIMITS_S) + 1)
        self._total_s = 0.0

    def count(self, route: str, status: int, seconds: float, *, waits: bool) -> None:
        """Count an answer and how long it took.

        `waits`: the request waited for a change, so its duration is not counted.
        """
        self._counts[route, status] += 1
        if not waits:
            self._below[bisect.bisect_left(LIMITS_S, seconds)] += 1
            self._total_s += seconds

    def lines(self) -> Iterator[str]:
        """Yield all counts and durations in the text format of Prometheus."""
        yield "# TYPE jaxgoodput_requests_total counter"
        for (route, status), count in sorted(self._counts.items()):
            yield f'jaxgoodput_requests_total{{route="{route}",status="{status}"}} {count}'
        yield "# HELP jaxgoodput_answer_seconds Duration of requests that do not wait for a change."
        yield "# TYPE jaxgoodput_answer_seconds histogram"
        total = 0
        for limit, count in zip((*LIMITS_S, "+Inf"), self._below, strict=True):
            total += count
            yield f'jaxgoodput_answer_seconds_bucket{{le="{limit}"}} {total}'
        yield f"jaxgoodput_answer_seconds_sum {self._total_s}"
        yield f"jaxgoodput_answer_seconds_count {total}"


def text(
    state: State,
    now_s: float,
    requests: RequestMetrics,
    silent_s: Mapping[str, int | float],
    numbers: Mapping[str, int | float],
) -> str:
    """Return all metrics in Prometheus's text format.

    `silent_s` has the seconds since the last heartbeat of each node. `numbers` adds more by name; a name that
    ends in "_total" makes it a counter.
    """
    found = [*requests.lines(), *_job_lines(state), *_device_lines(state, now_s)]
    found += _lines(
        "node_heartbeat_age_seconds",
        "Seconds since the last heartbeat of a node.",
        {_labels(node=name): age_s for name, age_s in silent_s.items()},
    )
    for name, value in numbers.items():
        found += _lines(name, "", {"": value})
    return "\n".join(found) + "\n"


def wanted_devices(state: State) -> tuple[int, int]:
    """Return the least and the most devices that are worth having, for an autoscaler.

    With fewer than the least, some job has to wait. With more than the most, some device stays idle.
    """
    specs = [entry.spec for entry in state.active.values()]
    least = sum(spec.num_devices or spec.min_devices for spec in specs)
    return least, sum(spec.num_devices or spec.max_devices for spec in specs)


def _job_lines(state: State) -> Iterator[str]:
    phases = collections.Counter(entry.phase for entry in state.jobs.values())
    yield from _lines("jobs", "", {_labels(phase=phase): n for phase, n in sorted(phases.items())})
    yield from _lines(
        "job_goodput",
        "Useful samples per second, as the job measured it.",
        {
            _labels(job=id_): entry.hints.goodput
            for id_, entry in state.active.items()
            if entry.hints is not None and entry.hints.goodput is not None
        },
    )
    yield from _lines(
        "job_resizes_total",
        "How often jobs got other devices after their first start.",
        {"": state.num_resizes},
    )
    yield from _lines(
        "job_restarts_total",
        "How often coordinators of jobs were started again.",
        {"": state.num_restarts},
    )


def _device_lines(state: State, now_s: float) -> Iterator[str]:
    devices = collections.Counter[tuple[str, str]]()
    for entry in state.nodes.values():
        devices[entry.node.kind, entry.node.state] += entry.node.num_devices
    by_kind = {_labels(kind=k, state=s): count for (k, s), count in sorted(devices.items())}
    yield from _lines("devices", "", by_kind)
    yield from _lines("devices_in_use", "", {"": len(owners(state))})
    waiting = [e.spec for e in state.active.values() if e.phase == "waiting"]
    yield from _lines(
        "devices_waited_for",
        "Devices that the waiting jobs need at least.",
        {"": sum(spec.num_devices or spec.min_devices for spec in waiting)},
    )
    yield from _lines(
        "node_reports_total",
        "How often jobs reported nodes as slow or broken.",
        {_labels(fault=fault): count for fault, count in sorted(state.num_faults.items())},
    )
    yield from _lines(
        "nodes_kept_apart",
        "Nodes that are kept apart from some job because it reported them.",
        {"": len({node for node, _ in in_force(state.faults, now_s)})},
    )
    least, most = wanted_devices(state)
    yield from _lines(
        "devices_wanted",
        "Devices worth having: with fewer than min some job waits, with more than max some are idle.",
        {_labels(bound="min"): least, _labels(bound="max"): most},
    )


def _lines(name: str, help_: str, samples: Mapping[str, int | float]) -> Iterator[str]:
    """Yield a metric: its samples by their labels, as `_labels` writes them."""
    if help_:
        yield f"# HELP jaxgoodput_{name} {help_}"
    yield f"# TYPE jaxgoodput_{name} {'counter' if name.endswith('_total') else 'gauge'}"
    for labels, value in samples.items():
        yield f"jaxgoodput_{name}{labels} {value}"


def _labels(**labels: str) -> str:
    r"""Return labels as Prometheus reads them.

    >>> _labels(kind='a"b')
    '{kind="a\\"b"}'
    """
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n"}
    pairs = (
        f'{name}="{"".join(escapes.get(letter, letter) for letter in value)}"'
        for name, value in labels.items()
    )
    return "{" + ",".join(pairs) + "}"
