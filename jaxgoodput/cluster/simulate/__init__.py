"""Simulates scheduling policies on workloads.

`read_scenario` reads a workload, `compare` runs policies on it, and `table` prints the results. Underneath,
`simulate` takes the jobs (`TraceJob`s), the cluster, a policy, the truth about the applications (measured
tables, Gavel's throughputs, or goodput models) and the `Settings` of the simulation.
"""

from jaxgoodput.cluster.published.traces import (
    TraceError,
    TraceJob,
    read_gavel_throughputs,
    read_gavel_trace,
    read_pollux_applications,
    read_pollux_workload,
    read_sia_applications,
    read_sia_workload,
)
from jaxgoodput.cluster.simulate.compare import compare, table
from jaxgoodput.cluster.simulate.conditions.faults import (
    Cancellations,
    Faults,
    Outages,
    Slowdowns,
    read_faults,
)
from jaxgoodput.cluster.simulate.conditions.inputs import Inputs, read_inputs
from jaxgoodput.cluster.simulate.conditions.restarts import RestartCosts, Storage
from jaxgoodput.cluster.simulate.generator import synthetic_applications, synthetic_workload
from jaxgoodput.cluster.simulate.jobs.gavel import GavelTruth
from jaxgoodput.cluster.simulate.jobs.job import SimulatedJob, Truth
from jaxgoodput.cluster.simulate.jobs.model import ModelApplication, ModelTruth
from jaxgoodput.cluster.simulate.jobs.tables import TableTruth
from jaxgoodput.cluster.simulate.pictures import completion_png, gantt_png
from jaxgoodput.cluster.simulate.questions import explanation, what_if
from jaxgoodput.cluster.simulate.records import Interval, JobRecord, Result
from jaxgoodput.cluster.simulate.rules import read_costs, read_settings
from jaxgoodput.cluster.simulate.scenario import Scenario, read_cluster, read_scenario
from jaxgoodput.cluster.simulate.settings import (
    Failures,
    Pin,
    Settings,
    gavel_settings,
    pollux_settings,
    realistic,
    restart_by_state,
    sia_settings,
)
from jaxgoodput.cluster.simulate.simulator import (
    Progress,
    SimulatedDecision,
    StalledError,
    decision_at,
    simulate,
    uniform_cluster,
)

__all__ = [
    "Cancellations", "SimulatedDecision", "Failures", "Faults", "GavelTruth", "Inputs", "Interval",
    "JobRecord", "ModelApplication", "ModelTruth", "Outages", "Pin", "Progress", "RestartCosts",
    "Result", "Scenario", "Settings", "SimulatedJob", "Slowdowns", "StalledError", "Storage",
    "TableTruth", "TraceError", "TraceJob", "Truth", "compare", "completion_png", "decision_at",
    "explanation", "gantt_png", "gavel_settings", "pollux_settings", "read_cluster", "read_costs",
    "read_faults", "read_gavel_throughputs", "read_gavel_trace", "read_inputs",
    "read_pollux_applications", "read_pollux_workload", "read_scenario", "read_settings",
    "read_sia_applications", "read_sia_workload", "realistic", "restart_by_state", "sia_settings",
    "simulate", "synthetic_applications", "synthetic_workload", "table", "uniform_cluster",
    "what_if",
]  # fmt: skip
