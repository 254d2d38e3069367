"""Metrics for Prometheus, in its text format."""

import bisect
import collections
from collections.abc import Iterator, Mapping

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


def text(state: State, requests: RequestMetrics, numbers: Mapping[str, float]) -> str:
    """Return all metrics in Prometheus's text format.

    `numbers` adds more by name; a name that ends in "_total" makes it a counter.
    """
    lines = list(requests.lines())
    phases = collections.Counter(entry.phase for entry in state.jobs.values())
    lines.append("# TYPE jaxgoodput_jobs gauge")
    lines += [f'jaxgoodput_jobs{{phase="{phase}"}} {n}' for phase, n in sorted(phases.items())]
    devices = collections.Counter[tuple[str, str]]()
    for entry in state.nodes.values():
        devices[entry.node.kind, entry.node.state] += entry.node.num_devices
    lines.append("# TYPE jaxgoodput_devices gauge")
    for (kind, node_state), count in sorted(devices.items()):
        name = kind.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'jaxgoodput_devices{{kind="{name}",state="{node_state}"}} {count}')
    lines.append("# TYPE jaxgoodput_devices_in_use gauge")
    lines.append(f"jaxgoodput_devices_in_use {len(owners(state))}")
    lines.append("# HELP jaxgoodput_job_goodput Useful samples per second, as the job measured it.")
    lines.append("# TYPE jaxgoodput_job_goodput gauge")
    for id_, entry in state.active.items():
        if entry.hints is not None and entry.hints.goodput is not None:
            lines.append(f'jaxgoodput_job_goodput{{job="{id_}"}} {entry.hints.goodput}')
    for name, value in numbers.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE jaxgoodput_{name} {kind}", f"jaxgoodput_{name} {value}"]
    return "\n".join(lines) + "\n"
