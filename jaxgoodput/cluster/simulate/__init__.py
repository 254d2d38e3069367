"""Policies in simulated time: workloads, what their applications really do, and what came of it.

`read_scenario` makes a `Scenario` of a workload, `compare` runs policies on it, `table` prints the results.
Underneath, `simulate` takes the jobs (`TraceJob`s), the cluster, a policy, the truth about the applications
(measured tables, Gavel's throughputs, goodput models) and the `Settings` of the simulated cluster.
"""

from jaxgoodput._lazy import lazy_names

# Loaded late: the command line imports this room to find `jaxgoodput simulate`, and must not wait for numpy.
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "published.traces": "TraceError TraceJob read_gavel_throughputs read_gavel_trace "
        "read_pollux_applications read_pollux_workload read_sia_applications read_sia_workload",
        "simulate.comparison": "compare table",
        "simulate.conditions.faults": "Cancellations Faults Outages Slowdowns",
        "simulate.conditions.inputs": "Inputs",
        "simulate.conditions.restarts": "RestartCosts Storage",
        "simulate.gavel_jobs": "GavelTruth",
        "simulate.generator": "synthetic_applications synthetic_workload",
        "simulate.job": "SimulatedJob Truth",
        "simulate.model_jobs": "ModelApplication ModelTruth",
        "simulate.pictures": "completion_png gantt_png",
        "simulate.questions": "explanation what_if",
        "simulate.records": "Interval JobRecord Result",
        "simulate.scenario": "Scenario read_cluster read_costs "
        "read_faults read_inputs read_scenario read_settings",
        "simulate.settings": "Failures Pin Settings gavel_settings "
        "pollux_settings realistic restart_by_state sia_settings",
        "simulate.simulator": "Progress SimulatedDecision StalledError "
        "decision_at simulate uniform_cluster",
        "simulate.table_jobs": "TableTruth",
    },
    root="jaxgoodput.cluster",
)
