"""The command `jaxgoodput simulate`: compare policies on a workload, or ask about one moment of it."""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

from jaxgoodput._commands import Commands, OneOf, file, folder, number, switch, text, wrong
from jaxgoodput._exits import DONE

DEFAULT_WORKLOAD = "synthetic:160"

_OPTIONS = (
    text("--policy", "A,B,...", "names of policies, see --list (default: of goodput,sia,pollux,tiresias "
         "those that know the kinds and tenants of the cluster; goodput with --explain and "
         "--what-if)"),
    text("--workload", "W", "synthetic[:JOBS], a workload file, or a folder that holds one, as published "
         "with Pollux, Sia or Gavel; the tables of measurements are searched for in the folders above it "
         f"(default: {DEFAULT_WORKLOAD})"),
    text("--trace", "F", "instead of --workload: a trace that says when jobs came, on how many devices and "
         "for how long they ran; may be compressed by gzip", type=file),
    text("--preset", "NAME", "layout of the --trace: helios, acme, alibaba-2020, alibaba-2023, philly, "
         "tiresias or slurm (sacct --parsable2 with JobID,User,Submit,Start,Elapsed,State,AllocTRES)"),
    text("--columns", "W=COLUMN", "columns of the --trace: submit=, devices= and duration= (or start= and "
         "end=), and perhaps cpu= and memory= (GiB) of the whole job, id=, state=, user=, tenant=, kind=, "
         "application=, prefer=, preference=, min=, max=, weight=, level=, min_run=, preemptible=, "
         "deadline=, budget=, separated by commas"),
    text("--delimiter", "C", "character between the cells of the --trace, or tab (default: as its "
         "header shows)"),
    text("--states", "S,...", "use only jobs that ended in these states, such as COMPLETED (default: all "
         "that ended)"),
    text("--history", "DIR", "instead of --workload: the jobs in the journal of a service with this "
         "--folder, on its own nodes unless --cluster is given", type=folder),
    text("--elastic", "CURVE", "serial=SHARE[,most=TIMES]: assume that jobs of a --trace or --history may "
         "have up to TIMES (4) the devices that they had, and that SHARE of their work on one device gains "
         "nothing by more (Amdahl's law; default: they are rigid)"),
    text("--cluster", "C", "[KIND:]NODESxDEVICES[/NODES PER RACK],... or a .json file with a ClusterSpec; "
         "+64cpu+512gib at its end: CPUs and memory of a node, for jobs of a --trace that need them "
         "(default: the cluster that was published with the workload; t4:16x4 for synthetic). With --trace "
         "and --history also [KIND:]unlimitedxDEVICES: nodes that are never short"),
    text("--rules", "R", "how the simulated cluster behaves. own: as published with the workload, or "
         "events for synthetic; pollux, sia, gavel: as published there, in rounds; events: a new plan when "
         "jobs come and go; realistic: with noise, interference, failures and measured restart costs", "own"),
    number("--restart-s", "S", 0.0, "seconds that a change of devices costs (default: set by the rules; 30 "
           "for synthetic)"),
    text("--faults", "F", "failures, times in hours: node=BETWEEN:REPAIR, rack=BETWEEN:REPAIR, "
         "slow=BETWEEN:LENGTH:SPEED, crash=BETWEEN, cancel=SHARE:AFTER, checkpoint=BETWEEN, separated by "
         "commas; the same for every policy (default: none)"),
    text("--costs", "X", "restart costs by kind of change, in units of --restart-s: start=N, resume=N, "
         "move=N, shape=N, kind=N; compile=SECONDS for a shape that is new to a job; storage=GIB/S, shared "
         "by jobs that restart together (default: all kinds cost the same)"),
    text("--inputs", "I", "cpus=NUMBER per node, APPLICATION=SAMPLES that one CPU prepares per second, "
         "per-device=NUMBER of CPUs that a job requests (default: no job waits for its samples)"),
    text("--tenants", "T", "tenants that share the cluster, [PARENT/]NAME[:KEY=NUMBER...],... with "
         "guaranteed= and limit= in devices, weight=, budget= per hour, and jobs= for the tenant's share "
         "of the jobs; adds results by tenant (default: none)"),
    text("--prices", "K=N", "price of a device per hour, KIND=NUMBER,... (default: the prices in the "
         "cluster's file)"),
    text("--budgets", "B", "maximum cost of a job, NAME=NUMBER,... where NAME is the id of a job, an "
         "application or all (default: no limit)"),
    text("--deadlines", "D", "SHARE:MULTIPLE: this share of the jobs is due MULTIPLE times its ideal run "
         "time after its submission (default: none)"),
    text("--work-left", "K", "what every policy knows of the work that jobs have left; "
         "history: what can be guessed from jobs that have ended; published: what the workload's own "
         "simulator tells", "published", choices=("published", "nothing", "history", "told")),
    number("--seed", "N", 0, "seed of jobs, noise and failures", 0, most=2**63 - 1),
    number("--hours", "H", 1e-3, "synthetic: hours during which jobs arrive (default: 8)", most=1e5),
    text("--speed", "K=N", "synthetic: speed of each kind of device, KIND=NUMBER,..., relative to a T4"),
    text("--out", "DIR", "folder for results.json and the pictures", type=folder),
    OneOf((
        text("--explain", "JOB@TIME", "instead of comparing: why this job had its devices at that time, "
             "what else it could have had at which price, and which jobs had the other devices; TIME in "
             "seconds or as 90m, 1.5h, 2d"),
        text("--what-if", "SPEC@TIME", "instead of comparing: the plan at that time if there were one more "
             "job, APPLICATION[:DEVICES][,mode=M][,batch=N][,weight=W][,id=NAME]; which jobs change, and "
             "by how much"),
    )),
    switch("--list", help="list all policies and stop"),
)  # fmt: skip


def add_commands(commands: Commands) -> None:
    """Register the command `jaxgoodput simulate`."""
    usage = (
        "jaxgoodput simulate [--policy A,B,...] [--workload W] [--cluster C] [--out DIR] [options]"
    )
    commands.add(30, "simulate", _simulate, usage, _OPTIONS)


def _simulate(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Compare scheduling policies on a workload, in simulated time.

    Each policy makes its decisions as in the real scheduler. The results say how long jobs took, how much of
    the cluster was used and how fair it was. FTF is finish-time fairness: a job's time divided by the time it
    would take alone on its share; above 1 is unfair.

    examples:
      jaxgoodput simulate --policy goodput,sia,tiresias --out /tmp/compared
      jaxgoodput simulate --workload sia/workloads/philly/workload-1.csv \\
          --cluster aws:6x4,dgx-ext:2x8,rtx:3x8 --policy goodput,sia
      jaxgoodput simulate --trace cluster_log.csv --preset helios --cluster 143x8
      jaxgoodput simulate --history ~/.jaxgoodput/service --policy goodput,static
      jaxgoodput simulate --explain vision-small-12@3h
      jaxgoodput simulate --what-if language-model:8,weight=2@3h
    """
    from jaxgoodput.cluster.scheduler import catalogue
    from jaxgoodput.cluster.simulate import StalledError

    known = catalogue()
    if options.list:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {named.says}" for name, named in known.items()))
        return DONE
    try:
        scenario, settings = _setting(options)
        policies = {name: known[name] for name in _policies(options, known, scenario)}
        if options.explain or options.what_if:
            _answer(options, scenario, settings, policies)
        else:
            _compare(options, scenario, settings, policies)
    except (ValueError, OSError, StalledError) as error:
        return wrong(error)
    return DONE


def _policies(options, known, scenario) -> list[str]:
    """Return the names in --policy, or the default ones. Raises ValueError for a name that is unknown."""
    from jaxgoodput.cluster.simulate.checks import knows

    if not options.policy:
        is_question = options.explain or options.what_if
        default = ["goodput"] if is_question else ["goodput", "sia", "pollux", "tiresias"]
        if scenario.origin == "recorded" and not is_question:
            default = ["goodput", "tiresias", "static"]
        return [name for name in default if knows(scenario, known[name])]
    names = [name.strip() for name in options.policy.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(
                f"--policy: there is no {name!r}. There are: {', '.join(known)} (--list describes them)."
            )
    return names


def _setting(options):
    """Return the scenario and the settings that the options describe. Raises ValueError or OSError."""
    from jaxgoodput.cluster.simulate import read_scenario, read_settings
    from jaxgoodput.cluster.simulate.scenario import with_conditions

    def chosen(*names: str):
        return {name: getattr(options, name) for name in names}

    conditions = chosen("seed", "tenants", "prices", "budgets", "deadlines")
    if options.trace is not None or options.history is not None:
        scenario = with_conditions(_recorded(options), **conditions)
    else:
        _refuse_trace_options(options)
        workload = DEFAULT_WORKLOAD if options.workload is None else options.workload
        scenario = read_scenario(
            workload, options.cluster, **chosen("hours", "speed"), **conditions
        )
    settings = read_settings(
        options.rules,
        scenario.origin,
        **chosen("restart_s", "seed", "work_left", "faults", "costs", "inputs"),
    )
    return scenario, settings


def _recorded(options):
    """Return the scenario of --trace or --history. Raises ValueError for options that do not belong to it."""
    from jaxgoodput.cluster.simulate import recorded

    own = "--trace" if options.trace is not None else "--history"
    other = options.history if own == "--trace" else None
    others = {"--workload": options.workload, "--hours": options.hours, "--speed": options.speed}
    for option, given in {**others, "--history": other}.items():
        if given is not None:
            raise ValueError(f"{option} {given}: {own} says which jobs there are. Leave one out.")
    if options.inputs is not None:
        raise ValueError(
            f"--inputs {options.inputs}: nothing is known of the samples of recorded jobs. Leave it out."
        )
    if own == "--history":
        _refuse_layout(options, "the journal has a layout of its own")
        return recorded.read_history_scenario(
            options.history, options.cluster, states=options.states, elastic=options.elastic
        )
    chosen = {name: getattr(options, name) for name in ("preset", "columns", "states", "delimiter")}
    trace = recorded.TraceOptions(path=str(options.trace), **chosen)
    return recorded.read_trace_scenario(trace, options.cluster, elastic=options.elastic)


def _refuse_trace_options(options) -> None:
    """Raise ValueError for an option about a trace if there is none."""
    _refuse_layout(options, "it describes a --trace, and there is none")
    for option, given in (("--states", options.states), ("--elastic", options.elastic)):
        if given is not None:
            raise ValueError(f"{option} {given}: applies to --trace and --history. Leave it out.")


def _refuse_layout(options, why: str) -> None:
    for name in ("preset", "columns", "delimiter"):
        if (given := getattr(options, name)) is not None:
            raise ValueError(f"--{name} {given}: {why}. Leave it out.")


def _answer(options, scenario, settings, policies) -> None:
    """Print the answer to --explain or --what-if under each policy."""
    from jaxgoodput.cluster.simulate import explanation, what_if

    if options.out is not None:
        raise ValueError(
            "--out is for comparisons: the answer to --explain or --what-if is only printed."
        )
    ask = explanation if options.explain else what_if
    question = options.explain or options.what_if
    answers = [ask(scenario, name, policies[name], settings, question) for name in policies]
    print("\n\n".join(answers))


def _compare(options, scenario, settings, policies) -> None:
    """Simulate each policy, print the results, and write them into --out."""
    from jaxgoodput.cluster.simulate import compare, table
    from jaxgoodput.cluster.simulate.comparison import (
        costs_in_words,
        deadlines_in_words,
        tenants_table,
    )

    with _progress() as on_progress:
        results = compare(scenario, policies, settings, on_progress=on_progress)
    devices = sum(node.num_devices for node in scenario.cluster.nodes)
    faults = [f"{r.policy}: {r.faults() or 'nothing went wrong'}" for r in results]
    paragraphs = (
        [f"{scenario.name}, {len(scenario.jobs)} jobs on {devices} devices", *scenario.remarks],
        [table(results)],
        [tenants_table(results)],
        map(deadlines_in_words, results),
        map(costs_in_words, results),
        faults if settings.faults is not None else [],
    )
    shown = ("\n".join(filter(None, lines)) for lines in paragraphs)
    print("\n\n".join(filter(None, shown)))
    if options.out is not None:  # made only now: the simulation may have taken hours
        _write(options.out, scenario, settings, results)


def _write(folder: pathlib.Path, scenario, settings, results: Sequence) -> None:
    """Write results.json and, if matplotlib is installed, the pictures."""
    from jaxgoodput.cluster.simulate import pictures
    from jaxgoodput.cluster.simulate.comparison import to_json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(to_json(scenario, settings, results))
    if not pictures.has_matplotlib():
        print(f"\nwrote {folder}/results.json; for the pictures: pip install 'jaxgoodput[plots]'")
        return
    drawn = {"completion.png": pictures.completion_png(results, title=scenario.name)}
    for result in results:
        title = f"{result.policy}: {scenario.name}"
        name = f"gantt-{result.policy}.png"
        drawn[name] = pictures.gantt_png(result, scenario.cluster, title=title)
    for name, picture in drawn.items():
        (folder / name).write_bytes(picture)
    print(f"\nwrote results.json, {', '.join(drawn)} into {folder}")


@contextlib.contextmanager
def _progress() -> Iterator[Callable]:
    """Yield a function that shows how many jobs of a policy are done.

    A terminal gets a bar, which disappears at the end; a file gets one line per policy.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed}/{task.total} jobs, {task.fields[hours]:.1f} h"),
    )
    shown = progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    tasks: dict[str, progress.TaskID] = {}

    def on_progress(name: str, now) -> None:
        hours = now.now_s / 3600
        if console.is_terminal:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=now.num_jobs, hours=0.0)
            shown.update(tasks[name], completed=now.num_done, hours=hours)
        elif now.num_done == now.num_jobs:
            print(f"{name}: {now.num_done}/{now.num_jobs} jobs, {hours:.1f} h", file=sys.stderr)

    with shown:
        yield on_progress
