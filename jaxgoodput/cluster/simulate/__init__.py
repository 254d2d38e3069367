"""Simulates scheduling policies on workloads.

`read_scenario` reads a workload (`read_trace_scenario` a trace of any cluster), `compare` runs policies on
it, and `table` prints the results. Underneath, `simulate` takes the jobs (`TraceJob`s), the cluster, a
policy, the truth about the applications (measured tables, Gavel's throughputs, goodput models, or durations)
and the `Settings` of the simulation.
"""

from jaxgoodput._lazy import lazy_names

# Loaded late: the command line imports this room to find `jaxgoodput simulate`, and must not wait for numpy.
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "published.traces": "TraceError TraceJob read_gavel_throughputs read_gavel_trace "
        "read_pollux_applications read_pollux_workload read_sia_applications read_sia_workload",
        "simulate.comparison": "compare table",
        "simulate.conditions.faults": "Cancellations Faults Outages Slowdowns read_faults",
        "simulate.conditions.inputs": "Inputs read_inputs",
        "simulate.conditions.restarts": "RestartCosts Storage",
        "simulate.generator": "synthetic_applications synthetic_workload",
        "simulate.jobs.gavel": "GavelTruth",
        "simulate.jobs.job": "SimulatedJob Truth",
        "simulate.jobs.model": "ModelApplication ModelTruth",
        "simulate.jobs.tables": "TableTruth",
        "simulate.pictures": "completion_png gantt_png",
        "simulate.questions": "explanation what_if",
        "simulate.records": "Interval JobRecord Result",
        "simulate.recorded": "TraceOptions read_history_scenario read_trace_scenario",
        "simulate.rules": "read_costs read_settings",
        "simulate.scenario": "Scenario read_cluster read_scenario",
        "simulate.settings": "Failures Pin Settings gavel_settings "
        "pollux_settings realistic restart_by_state sia_settings",
        "simulate.simulator": "Progress SimulatedDecision StalledError "
        "decision_at simulate uniform_cluster",
    },
    root="jaxgoodput.cluster",
)
