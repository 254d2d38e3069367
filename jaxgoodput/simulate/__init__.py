"""Policies in simulated time: workloads, what their applications really do, and what came of it.

`read_scenario` makes a `Scenario` of a workload, `compare` runs policies on it, `table` prints the results.
Underneath, `simulate` takes the jobs (`TraceJob`s), the cluster, a policy, the truth about the applications
(measured tables, Gavel's throughputs, goodput models) and the `Settings` of the simulated cluster.
"""

from jaxgoodput.simulate.compare import compare, table
from jaxgoodput.simulate.conditions.faults import Cancellations, Faults, Outages, Slowdowns
from jaxgoodput.simulate.conditions.inputs import Inputs
from jaxgoodput.simulate.conditions.restarts import RestartCosts, Storage
from jaxgoodput.simulate.gavel_jobs import GavelTruth
from jaxgoodput.simulate.generator import synthetic_applications, synthetic_workload
from jaxgoodput.simulate.job import SimulatedJob, Truth
from jaxgoodput.simulate.model_jobs import ModelApplication, ModelTruth
from jaxgoodput.simulate.pictures import completion_png, gantt_png
from jaxgoodput.simulate.questions import explanation, what_if
from jaxgoodput.simulate.records import Interval, JobRecord, Result
from jaxgoodput.simulate.scenario import (
    Scenario,
    read_cluster,
    read_costs,
    read_faults,
    read_inputs,
    read_scenario,
    read_settings,
)
from jaxgoodput.simulate.settings import (
    Failures,
    Pin,
    Settings,
    gavel_settings,
    pollux_settings,
    realistic,
    restart_by_state,
    sia_settings,
)
from jaxgoodput.simulate.simulator import (
    Decided,
    Progress,
    Stalled,
    decision_at,
    simulate,
    uniform_cluster,
)
from jaxgoodput.simulate.table_jobs import TableTruth
from jaxgoodput.simulate.traces import (
    TraceError,
    TraceJob,
    read_gavel_throughputs,
    read_gavel_trace,
    read_pollux_applications,
    read_pollux_workload,
    read_sia_applications,
    read_sia_workload,
)

__all__ = [
    "Cancellations", "Decided", "Failures", "Faults", "GavelTruth", "Inputs", "Interval",
    "JobRecord", "ModelApplication", "ModelTruth", "Outages", "Pin", "Progress", "RestartCosts",
    "Result", "Scenario", "Settings", "SimulatedJob", "Slowdowns", "Stalled", "Storage",
    "TableTruth", "TraceError", "TraceJob", "Truth", "compare", "completion_png", "decision_at",
    "explanation", "gantt_png", "gavel_settings", "pollux_settings", "read_cluster", "read_costs",
    "read_faults", "read_gavel_throughputs", "read_gavel_trace", "read_inputs",
    "read_pollux_applications", "read_pollux_workload", "read_scenario", "read_settings",
    "read_sia_applications", "read_sia_workload", "realistic", "restart_by_state", "sia_settings",
    "simulate", "synthetic_applications", "synthetic_workload", "table", "uniform_cluster",
    "what_if",
]  # fmt: skip
